"""The worker processes of one world size, seen from the test process.

A pool is always in one of two states: every rank waits for a call in a fresh process group, or it is closed.
Whatever leaves a rank in another state (a hang, a death, an interrupt, a process group that cannot be
renewed) closes the pool.
"""

import multiprocessing
import os
import signal
import tempfile
import time
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path

from harness import worker
from harness.failures import failure_of
from harness.messages import Call, Died, Outcome, Raised, Renew, Returned, Stuck, receive, send

START_LIMIT = 180.0
RENEW_LIMIT = 15.0
STACK_LIMIT = 2.0
# How long the other ranks of a call that has failed may go on: they often wait for the failed one.
FAILURE_GRACE = 5.0


class WorkerPool:
    """Ranks 0 … `world_size` - 1, each a process. Creating one returns when all ranks are ready."""

    def __init__(self, world_size: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="worker-pool-")
        self._connections: list[Connection] = []
        self._processes: list[SpawnProcess] = []
        context = multiprocessing.get_context("spawn")
        try:
            for rank in range(world_size):
                ours, theirs = context.Pipe()
                arguments = (rank, world_size, Path(self._folder.name), theirs)
                process = context.Process(target=worker.main, args=arguments, name=f"rank {rank} of {world_size}")
                process.start()
                # Ours is then the only other end, and reads end-of-file when the worker dies.
                theirs.close()
                self._connections.append(ours)
                self._processes.append(process)
            answers = self._collect(START_LIMIT)
        except BaseException:
            self.close()
            raise
        self.closed = False
        if not _all_returned(answers):
            self.close()
            raise failure_of("the start of the worker processes", answers)

    def call(self, call: Call, timeout: float, *, failure_is_final: bool) -> list[Outcome]:
        """Run `call` on every rank; one outcome per rank. Leaves the pool ready or closed.

        failure_is_final: when one rank has raised, give the others `FAILURE_GRACE` seconds, not the whole
        timeout. (A rank that died always has this effect.)
        """
        try:
            for connection in self._connections:
                send(connection, call)
            outcomes = self._collect(timeout, failure_is_final=failure_is_final)
            if any(isinstance(outcome, Stuck | Died) for outcome in outcomes) or not self._renew():
                self.close()
        except BaseException:
            # An interrupt, or the time limit of the test: the ranks are in the middle of something.
            self.close()
            raise
        return outcomes

    def close(self) -> None:
        """End all ranks now."""
        self.closed = True
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._folder.cleanup()

    def _renew(self) -> bool:
        for connection in self._connections:
            send(connection, Renew())
        return _all_returned(self._collect(RENEW_LIMIT))

    def _collect(self, timeout: float, *, failure_is_final: bool = True) -> list[Outcome]:
        """One answer per rank. Ranks that have not answered in time are `Stuck`; they go on running."""
        answers: dict[int, Outcome] = {}
        waiting = dict(enumerate(self._connections))
        began = time.monotonic()
        deadline = began + timeout
        while waiting and (ready := wait(waiting.values(), max(0.0, deadline - time.monotonic()))):
            for rank in [rank for rank, connection in waiting.items() if connection in ready]:
                del waiting[rank]
                answers[rank] = answer = self._answer(rank)
                if isinstance(answer, Died) or (failure_is_final and isinstance(answer, Raised)):
                    deadline = min(deadline, time.monotonic() + FAILURE_GRACE)
        seconds = time.monotonic() - began
        for rank, stack in self._dump_stacks(list(waiting)).items():
            answers[rank] = Stuck(seconds, stack)
        return [answers[rank] for rank in range(len(self._connections))]

    def _answer(self, rank: int) -> Outcome:
        try:
            answer = receive(self._connections[rank])
        except (EOFError, ConnectionResetError):
            self._processes[rank].join()
            return Died(self._processes[rank].exitcode, self._stack_path(rank).read_text())
        if not isinstance(answer, Returned | Raised):
            raise TypeError(f"rank {rank} sent {answer!r} instead of an outcome")
        return answer

    def _dump_stacks(self, ranks: list[int]) -> dict[int, str]:
        """The stacks of all threads of `ranks`, which are alive."""
        for rank in ranks:
            if (process_id := self._processes[rank].pid) is not None:
                os.kill(process_id, signal.SIGUSR1)
        # faulthandler marks no end: a dump is whole when it is there and has stopped growing.
        before: dict[int, str] = {}
        give_up = time.monotonic() + STACK_LIMIT
        while True:
            now = {rank: self._stack_path(rank).read_text() for rank in ranks}
            if (all(now.values()) and now == before) or time.monotonic() > give_up:
                return now
            before = now
            time.sleep(0.05)

    def _stack_path(self, rank: int) -> Path:
        return worker.stack_path(Path(self._folder.name), rank)


def _all_returned(outcomes: list[Outcome]) -> bool:
    return all(isinstance(outcome, Returned) for outcome in outcomes)
