"""What a test calls: a function on every rank, and its results or its errors back."""

import atexit
import pickle
import warnings
from collections.abc import Callable
from typing import TypeVar, TypeVarTuple

from harness.failures import DistributedFailure, failure_of
from harness.messages import Call, Outcome, Raised, Returned
from harness.pool import WorkerPool

Arguments = TypeVarTuple("Arguments")
Result = TypeVar("Result")

_pools: dict[int, WorkerPool] = {}


def run_distributed(
    world_size: int,
    function: Callable[[*Arguments], Result],
    *arguments: *Arguments,
    timeout: float = 60.0,
) -> list[Result]:
    """Call `function(*arguments)` on ranks 0 … `world_size` - 1 and return its results in rank order.

    `function` is defined at the top level of an importable module. It, the arguments and the results travel
    as pickles. On each rank the default process group has `world_size` ranks. `timeout` is in seconds.

    Raises `DistributedFailure` with each rank's traceback when a rank raises or dies, and
    `DistributedTimeout` with each stuck rank's stack when the time is over; in both cases the next call
    finds ranks that work.
    """
    __tracebackhide__ = True
    call = _make_call(world_size, function, arguments)
    pool = _ready_pool(world_size)
    outcomes = pool.call(call, timeout, failure_is_final=True)
    values = [outcome.value for outcome in outcomes if isinstance(outcome, Returned)]
    if len(values) < world_size:
        raise failure_of(call.name, outcomes)
    if pool.closed:
        warnings.warn(
            f"{call.name} returned on all {world_size} ranks, but left something that keeps them from "
            "beginning another call (an operation that does not end?); they were restarted",
            stacklevel=2,
        )
    return [pickle.loads(value) for value in values]


def run_expecting_error(
    world_size: int,
    function: Callable[[*Arguments], object],
    *arguments: *Arguments,
    timeout: float = 60.0,
) -> list[BaseException | None]:
    """Like `run_distributed`, for a function that must raise: each rank's exception, None where it returned.

    Every rank must return or raise within `timeout` seconds. Raises `DistributedFailure` when a rank does
    not, when no rank raised, or when an exception cannot be sent here.
    """
    __tracebackhide__ = True
    call = _make_call(world_size, function, arguments)
    outcomes = _ready_pool(world_size).call(call, timeout, failure_is_final=False)
    if not all(isinstance(outcome, Returned | Raised) for outcome in outcomes):
        raise failure_of(call.name, outcomes)
    if not any(isinstance(outcome, Raised) for outcome in outcomes):
        raise DistributedFailure(f"{call.name} raised on none of {world_size} ranks, and was expected to")
    return [_error(call, rank, outcome) for rank, outcome in enumerate(outcomes)]


def _error(call: Call, rank: int, outcome: Outcome) -> BaseException | None:
    if not isinstance(outcome, Raised):
        return None
    if outcome.error is None:
        raise DistributedFailure(
            f"{call.name}: the exception of rank {rank} does not survive pickling ({outcome.unpicklable}); "
            f"give its class a __reduce__.\n{outcome.traceback}"
        )
    error: BaseException = pickle.loads(outcome.error)
    return error


def _make_call(world_size: int, function: Callable[..., object], arguments: tuple[object, ...]) -> Call:
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, not {world_size}")
    module, qualname = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if module is None or qualname is None or module == "__main__" or "<" in qualname:
        raise TypeError(
            f"{function!r} cannot be found by its name in a worker process: define it with `def` at the top "
            "level of a test module, and pass what it needs as arguments"
        )
    return Call(module, qualname, pickle.dumps(arguments))


def _ready_pool(world_size: int) -> WorkerPool:
    pool = _pools.get(world_size)
    if pool is None or pool.closed:
        pool = _pools[world_size] = WorkerPool(world_size)
    return pool


@atexit.register
def _close_pools() -> None:
    for pool in _pools.values():
        if not pool.closed:
            pool.close()
