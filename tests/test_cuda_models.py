"""On one CUDA GPU: models whose parts run on both devices, in torch's fused layers, or change between steps."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from models import Block, Chain, Tied, build, maybe_checkpoint
from torch import nn

import fsdp_fn

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("one_rank")]

BF16 = fsdp_fn.PrecisionPolicy(compute_dtype=torch.bfloat16)
WIDTH = 8


class Across(nn.Module):
    """A part of the forward runs on the host, and so does its backward, in another thread of autograd."""

    def __init__(self, checkpointing: str | None = None, stays: bool = False) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)
        self.checkpointing, self.stays = checkpointing, stays

    def across(self, x: torch.Tensor) -> torch.Tensor:
        host = self.up(x).cpu().sort(-1).values.tanh()
        return self.down(host.to(x.device)) + x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = maybe_checkpoint(self.across, x, self.checkpointing)
        return y.cpu() if self.stays else y


class Ends(nn.Module):
    """Its last unit gives host tensors."""

    def __init__(self, checkpointing: str | None = None) -> None:
        super().__init__()
        self.first = Across(checkpointing)
        self.second = Across(checkpointing, stays=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def train_alike(plain: nn.Module, units: tuple[type[nn.Module], ...], inputs: list[torch.Tensor]) -> None:
    """Three steps of both paths beside plain PyTorch, bit-equal: one rank sums nothing."""
    template, state = fsdp_fn.shard(plain, units=units)
    model = copy.deepcopy(plain)
    for module in model.modules():
        if isinstance(module, units):
            fsdp_fn.fully_shard(module)
    fsdp_fn.fully_shard(model)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    ours = torch.optim.SGD(model.parameters(), lr=0.1)
    functional = fsdp_fn.SGD(lr=0.1)
    optimizer_state = functional.init(state)
    step = fsdp_fn.value_and_grad(template, lambda call, x: call(x).float().square().mean())
    for x in inputs:
        wanted = plain(x).float().square().mean()
        loss = model(x).float().square().mean()
        other, grads, state = step(state, x)
        torch.testing.assert_close(loss, wanted, rtol=0, atol=0)
        torch.testing.assert_close(other, wanted.detach(), rtol=0, atol=0)
        wanted.backward()
        loss.backward()
        for one in (theirs, ours):
            one.step()
            one.zero_grad()
        state, optimizer_state = functional.update(grads, optimizer_state, state)
        for (name, parameter), weight in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(parameter.to_local(), weight.detach(), rtol=0, atol=0, msg=name)  # type: ignore[attr-defined]


def vectors() -> list[torch.Tensor]:
    # A reentrant checkpoint needs an input that needs a gradient.
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(4, WIDTH, generator=generator).cuda().requires_grad_() for _ in range(3)]


@pytest.mark.parametrize("frozen", ["nothing", "up", "down"])
@pytest.mark.parametrize("checkpointing", [None, "non-reentrant"])
def test_a_forward_on_both_devices_trains_as_in_plain_pytorch(checkpointing: str | None, frozen: str) -> None:
    model = build(lambda: Ends(checkpointing)).cuda()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(frozen not in name)
    train_alike(model, (Across,), vectors())


def test_what_a_reentrant_checkpoint_hides_of_another_device_is_right_or_refused_by_name() -> None:
    """Backward comes back from the host when it likes, so either may be."""
    told = refusal_of(lambda: train_alike(build(lambda: Ends("reentrant")).cuda(), (Across,), vectors()))
    assert not told or "unit" in told, told


def refusal_of(run: Callable[[], None]) -> str:
    try:
        run()
    except RuntimeError as error:
        return str(error)
    return ""


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "encoder layer": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True),
    "synchronised batch norm": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SyncBatchNorm(WIDTH)),
    "weight norm": lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))),
}


@pytest.mark.parametrize("layer", LAYERS)
def test_layers_with_kernels_of_their_own_train_as_in_plain_pytorch(layer: str) -> None:
    plain = build(LAYERS[layer]).cuda()
    inputs = [x.view(1, 4, WIDTH) for x in vectors()] if layer == "encoder layer" else vectors()
    train_alike(plain, (), inputs)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lstm(x)[0]


def test_an_lstm_trains_as_in_plain_pytorch() -> None:
    train_alike(build(Recurrent).cuda(), (nn.LSTM,), [x.view(1, 4, WIDTH) for x in vectors()])


def test_the_fast_path_of_an_encoder_layer_reads_the_weights_of_now() -> None:
    plain = build(LAYERS["encoder layer"]).cuda().eval()
    model = fsdp_fn.fully_shard(copy.deepcopy(plain))
    x = vectors()[0].view(1, 4, WIDTH)
    with torch.no_grad():
        for parameter, weight in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(model(x), plain(x), rtol=0, atol=0)
            parameter.mul_(0.5)
            weight.mul_(0.5)


def test_weights_tied_across_units_and_unfrozen_later_train_in_bf16_from_fp32() -> None:
    model = build(Tied).cuda()
    plain = copy.deepcopy(model)
    fsdp_fn.fully_shard(model.emb, precision=BF16)
    fsdp_fn.fully_shard(model.out, precision=BF16)
    fsdp_fn.fully_shard(model, precision=BF16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    theirs = torch.optim.AdamW(plain.parameters(), lr=0.1)
    tokens = torch.arange(4, device="cuda")
    for frozen in (False, True, False):
        for one in (model, plain):
            one.requires_grad_(not frozen)
        loss = model(tokens).float().square().mean()
        compute = copy.deepcopy(plain).bfloat16()
        wanted = compute(tokens).float().square().mean()
        torch.testing.assert_close(loss, wanted, rtol=0, atol=0)
        if not frozen:
            loss.backward()
            wanted.backward()
            assert compute.emb.weight.grad is not None
            plain.emb.weight.grad = compute.emb.weight.grad.float()
        for one_optimizer in (optimizer, theirs):
            one_optimizer.step()
            one_optimizer.zero_grad()
        torch.testing.assert_close(model.emb.weight.to_local(), plain.emb.weight.detach())  # type: ignore[attr-defined]


def test_requires_grad_that_changes_is_followed_on_the_device() -> None:
    model = build(Chain).cuda()
    for module in model.modules():
        if isinstance(module, Block):
            fsdp_fn.fully_shard(module)
    fsdp_fn.fully_shard(model)
    x = torch.randn(4, model.first.up.in_features, device="cuda")
    for frozen in ("first", "second", "none"):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.startswith(frozen))
        model(x).square().mean().backward()
        for name, parameter in model.named_parameters():
            assert (parameter.grad is None) == name.startswith(frozen), name
        model.zero_grad()
