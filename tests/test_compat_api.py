"""Every public name, argument and method of torch's FSDP2 has its counterpart, and its line in the table.

Read from torch as it is installed, so that a version with more of them fails here.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as theirs
from models import Stack, build
from refusals import refused
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from fsdp_fn import compat
from harness import run_distributed

TABLE = Path(__file__).parents[1] / "docs" / "fsdp2.md"
OF_FSDP1 = {
    name
    for name in theirs.__all__
    if name.startswith(("BackwardPrefetch", "CPUOffload", "Full", "Local", "Optim", "ShardedOptim", "ShardedState"))
    or name in ("MixedPrecision", "ShardingStrategy", "StateDictConfig", "StateDictSettings", "StateDictType")
} - {"CPUOffloadPolicy"}
PUBLIC = sorted(set(theirs.__all__) - OF_FSDP1)


def methods_of(cls: type) -> dict[str, inspect.Signature]:
    found = inspect.getmembers(cls, inspect.isfunction)
    return {name: inspect.signature(method) for name, method in found if not name.startswith("_") and name != "forward"}


def rows() -> dict[str, str]:
    """What the table says of each name: "served", "accepted", "in part" or "refused"."""
    found = {}
    for line in TABLE.read_text().splitlines():
        match = re.match(r"\| `([^`]+)` \| ([a-z ]+) \|", line)
        if match:
            found[match[1]] = match[2]
    return found


def arguments() -> list[str]:
    named = [f"fully_shard({name}=)" for name in inspect.signature(theirs.fully_shard).parameters if name != "module"]
    for policy in (theirs.MixedPrecisionPolicy, theirs.OffloadPolicy, theirs.CPUOffloadPolicy):
        named += [f"{policy.__name__}({name}=)" for name in inspect.signature(policy).parameters]
    return named


def test_every_name_is_importable_and_in_the_table() -> None:
    for name in PUBLIC:
        assert hasattr(compat, name), name
    wanted = {*PUBLIC, *arguments(), *methods_of(theirs.FSDPModule)}
    assert wanted <= set(rows()), f"the table lacks {sorted(wanted - set(rows()))}"
    assert set(rows().values()) <= {"served", "accepted", "in part", "refused"}, set(rows().values())


def test_the_table_has_nothing_that_torch_never_had() -> None:
    known = {*PUBLIC, *arguments(), *methods_of(theirs.FSDPModule), "clip_grad_norm_"}
    newer = {"DataParallelMeshDims", "fully_shard(dp_mesh_dims=)", "reset_iter_state", *methods_of(compat.FSDPModule)}
    assert set(rows()) <= known | newer, sorted(set(rows()) - known - newer)


@pytest.mark.parametrize("name", methods_of(theirs.FSDPModule))
def test_methods_take_the_same_arguments(name: str) -> None:
    ours, wanted = methods_of(compat.FSDPModule)[name], methods_of(theirs.FSDPModule)[name]
    found = [(p.name, p.kind, p.default) for p in ours.parameters.values()]
    assert found == [(p.name, p.kind, p.default) for p in wanted.parameters.values()]


def test_functions_take_the_same_arguments() -> None:
    for name in ("fully_shard", "register_fsdp_forward_method", "share_comm_ctx"):
        ours, wanted = inspect.signature(getattr(compat, name)), inspect.signature(getattr(theirs, name))
        found = [(p.name, p.kind) for p in ours.parameters.values()]
        # An older torch has fewer.
        assert found[: len(wanted.parameters)] == [(p.name, p.kind) for p in wanted.parameters.values()], name
    assert compat.MixedPrecisionPolicy is theirs.MixedPrecisionPolicy
    assert compat.CPUOffloadPolicy is theirs.CPUOffloadPolicy
    assert compat.OffloadPolicy is theirs.OffloadPolicy


# --- refusals -----------------------------------------------------------------------------------------------


def refuse_by_name() -> None:
    model = compat.fully_shard(build(Stack))
    for name, arguments in (
        ("set_symm_mem_for_comm", ()),
        ("set_allocate_memory_from_process_group_for_comm", (True,)),
        ("set_unshard_in_backward", (False,)),
    ):
        assert rows()[name] in ("refused", "in part"), name
        with refused(NotImplementedError, name, name):
            getattr(model, name)(*arguments)
    model.set_allocate_memory_from_process_group_for_comm(False)
    model.set_reduce_scatter_max_input_buffers(3)
    with refused(ValueError, "expected a number above 0, got 0", "buffers"):
        model.set_reduce_scatter_max_input_buffers(0)
    model.set_unshard_in_backward(True)
    for name in ("set_requires_gradient_sync", "set_reshard_after_forward", "set_is_last_backward"):
        with refused(ValueError, "expected True or False, got 'no'", name):
            getattr(model, name)("no")
    with refused(ValueError, "expected FSDPModules, got Linear", "prefetch"):
        model.set_modules_to_forward_prefetch([nn.Linear(2, 2)])
    with refused(ValueError, "applied to this FSDPStack already", "twice"):
        compat.fully_shard(model)
    with refused(NotImplementedError, r"gives .*1.*'embedding.weight'.*only Shard\(0\)", "shard_placement_fn"):
        compat.fully_shard(build(Stack), shard_placement_fn=lambda parameter: Shard(1))
    compat.fully_shard(build(Stack), shard_placement_fn=lambda parameter: Shard(0))
    unnamed = init_device_mesh("cpu", (1, dist.get_world_size()))
    with refused(ValueError, "of two with names", "an unnamed mesh of two dimensions"):
        compat.fully_shard(build(Stack), mesh=unnamed)


def test_what_is_not_served_is_refused_by_name() -> None:
    run_distributed(2, refuse_by_name)


def look_at_a_wrapped_module() -> None:
    model = build(Stack)
    assert compat.fully_shard(model) is model
    assert type(model).__name__ == "FSDPStack"
    assert isinstance(model, Stack | compat.FSDPModule)
    shape = model.head.weight.shape
    handle = model.unshard(async_op=True)  # type: ignore[operator]
    assert isinstance(handle, compat.UnshardHandle)
    handle.wait()
    assert type(model.head.weight) is not type(build(Stack).head.weight) or model.head.weight.shape == shape
    torch.testing.assert_close(model.head.weight.detach(), build(Stack).head.weight.detach())
    model.reshard()  # type: ignore[operator]
    assert hasattr(model.head.weight, "_local_tensor")
    with torch.device("meta"):
        empty = Stack()
    compat.fully_shard(empty)
    with refused(RuntimeError, "wrapped on the meta device and has no values yet", "meta"):
        empty(torch.arange(3))


def test_a_wrapped_module_has_torchs_name_and_shows_its_weights_when_unsharded() -> None:
    run_distributed(2, look_at_a_wrapped_module)


def give_memory_to_a_part() -> None:
    with torch.device("meta"):
        model = Stack()
    compat.fully_shard(model)
    model.to_empty(device="cpu")
    model.head.to_empty(device="cpu")
    with refused(RuntimeError, "the memory of parameter 'weight' was replaced after sharding", "to_empty of a part"):
        model(torch.arange(3))


def test_memory_that_the_gathers_would_not_read_is_refused() -> None:
    run_distributed(2, give_memory_to_a_part)


def give_memory_in_odd_ways() -> None:
    def on_meta() -> nn.Module:
        with torch.device("meta"):
            model = Stack()
        for block in model.blocks:
            compat.fully_shard(block)
        return compat.fully_shard(model)

    model = on_meta()
    model.blocks[0].to_empty(device="cpu")
    with refused(RuntimeError, "the root unit was wrapped on the meta device", "a part has memory"):
        model(torch.arange(3))
    model.to_empty(device="cpu")
    model.to_empty(device="cpu")
    model.load_state_dict(compat.fully_shard(build(Stack)).state_dict(), assign=True)
    torch.testing.assert_close(model(torch.arange(3)), build(Stack)(torch.arange(3)))
    with refused(TypeError, "to_empty.*on 'cpu'|cannot change sharded weights", "another device"):
        model.to_empty(device="meta")
    with refused(TypeError, "cannot change sharded weights", "half"):
        model.half()
    with refused(ValueError, "assign=True", "assign from above"):
        nn.Sequential(model).load_state_dict(nn.Sequential(model).state_dict(), assign=True)
    each = on_meta()
    for module in each.modules():
        if isinstance(module, compat.FSDPModule):
            module.to_empty(device="cpu", recurse=False)
    each(torch.arange(3))


def test_memory_may_be_given_part_by_part_and_again() -> None:
    run_distributed(2, give_memory_in_odd_ways)


def wrap_a_tuple() -> None:
    model = build(Stack)
    compat.fully_shard((model.blocks[0], model.blocks[1]))
    assert [isinstance(block, compat.FSDPModule) for block in model.blocks] == [True, True, False]


def test_a_tuple_of_modules_is_wrapped_as_a_list_is() -> None:
    run_distributed(2, wrap_a_tuple)
