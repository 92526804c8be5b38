"""The ragged DTensor face: placed, gathered, copied and pickled as it should be."""

import copy
import io
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ragged_tensors import CUTS, make_mesh, shard, values
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from fsdp_fn.ragged import RaggedShard, RaggedTensor, as_ragged, ragged_spec, restore_placement
from harness import run_distributed

# --- the placement as a value -------------------------------------------------------------------------------

bounds_of_rows = st.lists(st.integers(0, 6), min_size=1, max_size=5).map(
    lambda counts: tuple(sum(counts[:index]) for index in range(len(counts) + 1))
)


@given(bounds_of_rows)
def test_a_placement_survives_pickle_and_copy_and_equals_itself_only(bounds: tuple[int, ...]) -> None:
    placement = RaggedShard(bounds)
    for copied in (pickle.loads(pickle.dumps(placement)), copy.deepcopy(placement), copy.copy(placement)):
        assert copied == placement
        assert hash(copied) == hash(placement)
        assert copied.bounds == bounds
    assert placement != RaggedShard((*bounds[:-1], bounds[-1] + 1))
    assert placement != Shard(0)
    assert Shard(0) != placement
    assert str(bounds) in repr(placement)


@given(bounds_of_rows)
def test_a_placement_tells_every_rank_its_rows(bounds: tuple[int, ...]) -> None:
    placement, ranks = RaggedShard(bounds), len(bounds) - 1
    rows = [placement._local_shard_size_and_offset(bounds[-1], ranks, rank) for rank in range(ranks)]
    assert rows == [(bounds[rank + 1] - bounds[rank], bounds[rank]) for rank in range(ranks)]


@pytest.mark.parametrize("bounds", [(), (0,), (1, 2), (0, 3, 2)])
def test_bounds_that_are_no_partition_are_refused(bounds: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="RaggedShard: expected bounds"):
        RaggedShard(bounds)


# --- the face -----------------------------------------------------------------------------------------------


def check_values_survive(cuts: list[tuple[int, ...]]) -> None:
    mesh = make_mesh()
    for bounds in cuts:
        for trailing in ((), (3,), (2, 2), (0,)):
            dtypes = (torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.float8_e4m3fn)
            for dtype in dtypes if trailing == (3,) else dtypes[:1]:
                whole = values((bounds[-1], *trailing), dtype=dtype)
                ragged = shard(whole, bounds, mesh)
                assert ragged.shape == whole.shape
                assert ragged.stride() == whole.stride()
                assert torch.equal(ragged.full_tensor().float(), whole.float())
                spread = ragged.redistribute(placements=[Replicate()])
                assert spread.placements == (Replicate(),)
                assert torch.equal(spread.to_local().float(), whole.float())
                back = restore_placement(spread, ragged)
                assert torch.equal(back.to_local().float(), ragged.to_local().float())


def test_full_tensor_and_redistribute_give_the_whole_tensor_at_any_bounds(world_size: int) -> None:
    run_distributed(world_size, check_values_survive, CUTS[world_size])


def check_redistribute_to_plain_shard(bounds: tuple[int, ...]) -> None:
    mesh = make_mesh()
    whole = values((bounds[-1], 4))
    for dim in (0, 1):
        plain = shard(whole, bounds, mesh).redistribute(placements=[Shard(dim)])
        expected = distribute_tensor(whole, mesh, [Shard(dim)])
        assert plain.placements == (Shard(dim),)
        assert torch.equal(plain.to_local(), expected.to_local())
        assert torch.equal(restore_placement(plain, shard(whole, bounds, mesh)).full_tensor(), whole)


def test_a_ragged_tensor_redistributes_to_plain_shards_and_back(world_size: int) -> None:
    run_distributed(world_size, check_redistribute_to_plain_shard, CUTS[world_size][0])


def check_face_is_a_view(bounds: tuple[int, ...]) -> None:
    mesh = make_mesh()
    flat = torch.arange(float(bounds[-1] * 3))
    rank = mesh.get_local_rank()
    local = flat[bounds[rank] * 3 : bounds[rank + 1] * 3].view(-1, 3)
    parameter = nn.Parameter(as_ragged(local, mesh, bounds, (bounds[-1], 3), True))
    assert isinstance(parameter, nn.Parameter)
    assert type(parameter) is RaggedTensor
    assert parameter.requires_grad
    with torch.no_grad():
        parameter.add_(1.0)
        parameter.mul_(2.0)
    own = flat[bounds[rank] * 3 : bounds[rank + 1] * 3]
    assert torch.equal(own, (torch.arange(float(bounds[-1] * 3))[bounds[rank] * 3 : bounds[rank + 1] * 3] + 1) * 2)
    assert "RaggedShard" in repr(parameter)


def test_a_write_through_the_face_is_a_write_to_the_flat_shard(world_size: int) -> None:
    run_distributed(world_size, check_face_is_a_view, CUTS[world_size][0])


def check_copies(bounds: tuple[int, ...]) -> None:
    mesh = make_mesh()
    whole = values((bounds[-1], 2))
    parameter = nn.Parameter(shard(whole, bounds, mesh))
    file = io.BytesIO()
    torch.save(parameter, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for copied in (copy.deepcopy(parameter), parameter.detach().clone(), parameter.detach(), loaded):
        assert type(copied) is RaggedTensor
        assert copied.placements == parameter.placements
        assert torch.equal(copied.to_local(), parameter.to_local())
    assert isinstance(copy.deepcopy(parameter), nn.Parameter)
    assert (
        copy.deepcopy(parameter).to_local().data_ptr() != parameter.to_local().data_ptr()
        or not parameter.to_local().numel()
    )


def test_copies_and_pickles_stay_ragged(world_size: int) -> None:
    run_distributed(world_size, check_copies, CUTS[world_size][0])


def check_wrong_faces() -> list[str]:
    mesh = make_mesh()
    said = []
    for attempt in (
        lambda: ragged_spec(mesh, (0, 1, 1), ()),
        lambda: ragged_spec(mesh, (0, 1, 4), (5, 2)),
        lambda: ragged_spec(mesh, (0, 1, 2, 5), (5, 2)),
        lambda: as_ragged(torch.zeros(9, 2), mesh, (0, 1, 5), (5, 2)),
        lambda: restore_placement(shard(values((3, 2)), (0, 1, 3), mesh), shard(values((4, 2)), (0, 1, 4), mesh)),
    ):
        with pytest.raises(ValueError) as caught:  # noqa: PT011 (each message is checked by the caller)
            attempt()
        said.append(str(caught.value))
    return said


def test_faces_that_do_not_fit_are_refused_by_name() -> None:
    for said in run_distributed(2, check_wrong_faces):
        assert "0-dim" in said[0]
        assert "4 rows" in said[1]
        assert "3 ranks" in said[2]
        assert "(9, 2)" in said[3]
        assert "restore_placement" in said[4]
