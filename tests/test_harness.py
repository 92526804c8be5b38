"""The multi-process harness: results per rank, failures that say where, and ranks that work afterwards."""

import os
import sys
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from harness import DistributedFailure, DistributedTimeout, run_distributed, run_expecting_error

SHORT_TIMEOUT = 2.0
# Far below any collective's own time limit; with room for stack dumps on a busy machine.
SOON = 20.0


class TwoArgumentError(Exception):
    """Pickles, but does not unpickle: its constructor takes other arguments than its `args`."""

    def __init__(self, unit: str, rank: int) -> None:
        super().__init__(f"unit {unit} on rank {rank}")


def describe_rank(offset: int, scale: torch.Tensor) -> tuple[int, int, torch.Tensor]:
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total)
    return dist.get_rank() + offset, dist.get_world_size(), total * scale


def process_id() -> int:
    return os.getpid()


def draw() -> list[float]:
    return torch.rand(3).tolist()


def raise_on_rank(failing: int) -> str:
    if dist.get_rank() == failing:
        raise ValueError(f"bad shape on rank {failing}")
    return "fine"


def raise_while_others_wait(failing: int) -> None:
    raise_on_rank(failing)
    dist.all_reduce(torch.ones(2))


def return_on_rank_0_while_others_wait() -> None:
    if dist.get_rank() != 0:
        dist.all_reduce(torch.ones(2))


def exit_on_rank(dying: int, exit_code: int) -> None:
    if dist.get_rank() == dying:
        os._exit(exit_code)
    dist.all_reduce(torch.ones(2))


def call_sys_exit() -> None:
    sys.exit(4)


def raise_two_argument_error() -> None:
    raise TwoArgumentError("layers.0", dist.get_rank())


def leave_a_collective_that_only_rank_0_started() -> None:
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(2), async_op=True)


def leave_a_group_that_only_rank_0_made() -> None:
    if dist.get_rank() == 0:
        dist.new_group([0], use_local_synchronization=True)


def sum_over_a_new_group() -> float:
    group = dist.new_group(list(range(dist.get_world_size())))
    total = torch.ones(())
    dist.all_reduce(total, group=group)
    return total.item()


def matrix_with_both_dims_sharded(groups_before: int) -> torch.Tensor:
    for _ in range(groups_before):
        dist.new_group()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    value = distribute_tensor(torch.arange(12.0).view(4, 3), mesh, [Shard(0), Shard(1)])
    return (value * 2).full_tensor()


def return_a_lambda() -> object:
    return lambda: None


def test_results_come_back_per_rank_with_arguments_and_tensors_by_value(world_size: int) -> None:
    results = run_distributed(world_size, describe_rank, 10, torch.tensor([1.0, 2.0]))

    total = sum(range(world_size))
    assert [(rank, size) for rank, size, _ in results] == [(10 + rank, world_size) for rank in range(world_size)]
    for _, _, scaled in results:
        torch.testing.assert_close(scaled, torch.tensor([1.0, 2.0]) * total, rtol=0, atol=0)


def test_ranks_are_distinct_processes_that_are_reused_by_the_next_call() -> None:
    first = run_distributed(3, process_id)

    assert len({*first, os.getpid()}) == 4
    assert run_distributed(3, process_id) == first


def test_random_numbers_are_the_same_on_every_rank_and_in_every_call() -> None:
    first, second = run_distributed(2, draw)

    assert first == second
    assert run_distributed(2, draw) == [first, second]


def test_a_rank_computes_with_one_thread() -> None:
    assert run_distributed(2, torch.get_num_threads) == [1, 1]


def test_an_error_on_one_rank_is_told_with_its_rank_and_traceback() -> None:
    with pytest.raises(DistributedFailure) as failure:
        run_distributed(3, raise_on_rank, 1)

    message = str(failure.value)
    assert "on 3 ranks: rank 0 returned; rank 1 raised ValueError: bad shape on rank 1; rank 2 returned" in message
    assert "--- rank 1 ---\nTraceback" in message
    assert "in raise_on_rank" in message


def test_ranks_that_wait_for_a_failed_one_are_not_waited_for_until_the_timeout() -> None:
    began = time.monotonic()
    with pytest.raises(DistributedFailure) as failure:
        run_distributed(2, raise_while_others_wait, 1, timeout=10 * SOON)

    assert time.monotonic() - began < SOON
    assert not isinstance(failure.value, DistributedTimeout)
    message = str(failure.value)
    assert "rank 1 raised ValueError" in message
    assert "rank 0 was stuck" in message
    assert "in raise_while_others_wait" in message
    assert run_distributed(2, draw)


def test_a_hang_is_found_within_its_limit_and_the_next_call_works() -> None:
    stuck_processes = run_distributed(2, process_id)
    began = time.monotonic()
    with pytest.raises(DistributedTimeout) as failure:
        run_distributed(2, return_on_rank_0_while_others_wait, timeout=SHORT_TIMEOUT)

    assert SHORT_TIMEOUT <= time.monotonic() - began < SOON
    message = str(failure.value)
    assert "rank 0 returned; rank 1 was stuck after" in message
    assert "in return_on_rank_0_while_others_wait" in message
    assert set(run_distributed(2, process_id)).isdisjoint(stuck_processes)


def test_a_rank_that_dies_is_told_with_its_exit_code_and_the_next_call_works() -> None:
    with pytest.raises(DistributedFailure, match="rank 1 died with exit code 7"):
        run_distributed(2, exit_on_rank, 1, 7, timeout=10 * SOON)

    assert run_distributed(2, describe_rank, 0, torch.ones(()))[1][:2] == (1, 2)


def test_sys_exit_in_a_function_ends_the_call_and_not_the_worker() -> None:
    before = run_distributed(1, process_id)
    with pytest.raises(DistributedFailure, match="rank 0 raised SystemExit: 4"):
        run_distributed(1, call_sys_exit)

    assert run_distributed(1, process_id) == before


def test_expected_errors_come_back_as_exceptions_per_rank() -> None:
    errors = run_expecting_error(3, raise_on_rank, 2)

    assert errors[:2] == [None, None]
    assert isinstance(errors[2], ValueError)
    assert str(errors[2]) == "bad shape on rank 2"


def test_expecting_an_error_fails_when_no_rank_raises() -> None:
    with pytest.raises(DistributedFailure, match=r"test_harness\.draw raised on none of 2 ranks"):
        run_expecting_error(2, draw)


def test_expecting_an_error_fails_when_a_rank_hangs() -> None:
    with pytest.raises(DistributedFailure, match="rank 0 was stuck after"):
        run_expecting_error(2, raise_while_others_wait, 1, timeout=SHORT_TIMEOUT)


def test_an_expected_exception_that_cannot_be_pickled_is_told_with_what_to_do() -> None:
    with pytest.raises(DistributedFailure, match=r"rank 0 does not survive pickling.*give its class a __reduce__"):
        run_expecting_error(1, raise_two_argument_error)


def test_a_result_that_cannot_be_pickled_is_a_failure() -> None:
    with pytest.raises(DistributedFailure, match="return_a_lambda"):
        run_distributed(1, return_a_lambda)


@pytest.mark.filterwarnings("ignore:.*left something that keeps them from beginning another call")
def test_a_collective_that_one_rank_left_behind_does_not_reach_the_next_call() -> None:
    run_distributed(2, leave_a_collective_that_only_rank_0_started)

    assert run_distributed(2, sum_over_a_new_group) == [2.0, 2.0]


def test_a_group_that_one_rank_left_behind_does_not_reach_the_next_call() -> None:
    run_distributed(2, leave_a_group_that_only_rank_0_made)

    assert run_distributed(2, sum_over_a_new_group) == [2.0, 2.0]


def test_a_mesh_of_an_earlier_call_is_not_met_again() -> None:
    wanted = torch.arange(12.0).view(4, 3) * 2
    for groups_before in (2, 0):
        for result in run_distributed(4, matrix_with_both_dims_sharded, groups_before):
            assert torch.equal(result, wanted)


def test_a_function_without_an_importable_name_is_refused() -> None:
    def local() -> None: ...

    for function in (local, lambda: None):
        with pytest.raises(TypeError, match="top level of a test module"):
            run_distributed(1, function)


def test_a_world_without_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match="world_size must be at least 1, not 0"):
        run_distributed(0, draw)
