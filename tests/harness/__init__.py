"""Run a function on several ranks from an ordinary test.

    from harness import run_distributed

    def sum_of_ranks() -> float:
        total = torch.tensor(float(dist.get_rank()))
        dist.all_reduce(total)
        return total.item()

    def test_all_ranks_see_the_same_sum() -> None:
        assert run_distributed(3, sum_of_ranks) == [3.0, 3.0, 3.0]

Worker processes are started once per world size and kept for the whole pytest session, so that a call costs
tens of milliseconds. Every call begins in the same state: a fresh default process group (gloo, over the
loopback interface), the same seeds on every rank, one intra-op thread, collected garbage.
"""

from harness.failures import DistributedFailure, DistributedTimeout
from harness.run import run_distributed, run_expecting_error

__all__ = ["DistributedFailure", "DistributedTimeout", "run_distributed", "run_expecting_error"]
