"""Frameworks that call FSDP2 themselves, where they are installed: the same numbers with ours in its place."""

from __future__ import annotations

import os
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from compat_scripts import Found, full, same

import fsdp_fn.compat
from harness import run_distributed

transformers = pytest.importorskip("transformers")

VOCABULARY = 64


def llama(tied: bool) -> Any:
    """A small one with random weights."""
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        tie_word_embeddings=tied,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.LlamaForCausalLM(config).train()


def tokens(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * dist.get_rank() + step)
    return torch.randint(VOCABULARY, (2, 8), generator=generator)


def train_llama(fsdp: ModuleType, tied: bool, checkpointing: bool) -> Found:
    model = llama(tied)
    if checkpointing:
        model.gradient_checkpointing_enable()
    for layer in model.model.layers:
        fsdp.fully_shard(layer)
    fsdp.fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found: Found = {}
    for step in range(3):
        loss = model(input_ids=tokens(step), labels=tokens(step)).loss
        loss.backward()
        found[f"norm {step}"] = full(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        optimizer.zero_grad()
        found[f"loss {step}"] = loss.detach()
    found |= {name: full(parameter) for name, parameter in model.named_parameters()}
    model.eval()
    prompt = torch.arange(8).view(1, 8)
    found["generated"] = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=4, do_sample=False
    )
    return found


def llama_with_both(tied: bool, checkpointing: bool) -> None:
    same(
        train_llama(fsdp_fn.compat, tied, checkpointing),
        train_llama(torch.distributed.fsdp, tied, checkpointing),
    )


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_a_llama_of_transformers_trains_and_generates_alike(tied: bool, checkpointing: bool) -> None:
    run_distributed(2, llama_with_both, tied, checkpointing, timeout=120.0)


def train_by_accelerate(fsdp: ModuleType) -> Found:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType

    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    # It only looks whether the address is there.
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, MASTER_ADDR="localhost", MASTER_PORT="0")
    AcceleratorState._reset_state(reset_partial_state=True)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        cpu_ram_efficient_loading=False,
    )
    accelerator = Accelerator(cpu=True)
    # It shards on accelerators alone; all it does then needs none.
    accelerator.state.distributed_type, accelerator.state.fsdp_plugin = DistributedType.FSDP, plugin
    model = llama(tied=False)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    assert isinstance(model, fsdp.FSDPModule)
    found: Found = {}
    for step in range(3):
        with accelerator.accumulate(model):
            loss = model(input_ids=tokens(step), labels=tokens(step)).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        found[f"loss {step}"] = loss.detach()
    return found | {name: full(parameter) for name, parameter in model.named_parameters()}


def accelerate_with_both() -> None:
    expected = train_by_accelerate(torch.distributed.fsdp)
    theirs = torch.distributed.fsdp
    with pytest.MonkeyPatch.context() as patch:
        for name in ("fully_shard", "FSDPModule"):
            patch.setattr(theirs, name, getattr(fsdp_fn.compat, name))
        found = train_by_accelerate(fsdp_fn.compat)
    same(found, expected)


def test_an_accelerate_loop_trains_alike() -> None:
    pytest.importorskip("accelerate")
    run_distributed(2, accelerate_with_both, timeout=120.0)
