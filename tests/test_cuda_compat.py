"""On one CUDA GPU: scripts in FSDP2's style come to the same numbers through both imports."""

from __future__ import annotations

import itertools
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
from compat_scripts import Found, batch, full, same, weights, wrapped
from models import Stack, build
from torch import nn

import fsdp_fn.compat

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("one_rank")]


def train(fsdp: ModuleType, model: Any) -> Found:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    found: Found = {}
    for step in range(3):
        tokens = batch(step).cuda()
        loss = nn.functional.cross_entropy(model(tokens).float(), tokens.roll(1))
        loss.backward()
        optimizer.step()
        event = torch.cuda.Event()
        event.record()
        model.set_post_optim_event(event)
        optimizer.zero_grad()
        found[f"loss {step}"] = full(loss)
    return found | weights(model)


def options_of(fsdp: ModuleType, name: str) -> dict[str, Any]:
    match name:
        case "offloaded":
            return {"offload_policy": fsdp.CPUOffloadPolicy()}
        case "mixed precision":
            return {"mp_policy": fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
    return {}


def run(fsdp: ModuleType, name: str) -> Found:
    model = wrapped(fsdp, build(Stack), **options_of(fsdp, name))  # from the host: it is moved
    assert all(buffer.is_cuda for buffer in model.buffers())
    blocks = list(model.blocks)
    if name == "told":
        for block, following in itertools.pairwise(blocks):
            block.set_modules_to_forward_prefetch([following])
            following.set_modules_to_backward_prefetch([block])
        blocks[0].set_all_reduce_hook(lambda reduced: reduced.mul_(0.5), stream=torch.cuda.Stream())
        model.unshard(async_op=True).wait()
    return train(fsdp, model)


@pytest.mark.parametrize("name", ["plain", "offloaded", "mixed precision", "told"])
def test_a_script_runs_by_changing_one_import(name: str) -> None:
    same(run(fsdp_fn.compat, name), run(torch.distributed.fsdp, name))


def test_a_model_on_meta_gets_memory_by_to_empty() -> None:
    found = []
    for fsdp in (fsdp_fn.compat, torch.distributed.fsdp):
        with torch.device("meta"):
            model: Any = Stack()
        wrapped(fsdp, model)
        model.to_empty(device="cuda")
        model.load_state_dict(wrapped(fsdp, build(Stack)).state_dict())
        found.append(train(fsdp, model))
    same(*found)
