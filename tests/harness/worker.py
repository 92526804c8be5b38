"""One rank: a process that waits for calls, runs them, and answers what became of them.

A worker owns no policy. It never gives up on its own: time limits are the test process's, which ends the
worker. It ends when its connection closes, and at once when the test process is gone.
"""

import faulthandler
import gc
import importlib
import os
import pickle
import random
import signal
import sys
import threading
import traceback
from datetime import timedelta
from functools import reduce
from multiprocessing import connection, parent_process
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from harness.messages import Call, Raised, Returned, receive, send

# Longer than any test may take, so that a hang is found, and its stacks shown, by the test process.
COLLECTIVE_TIMEOUT = timedelta(minutes=30)
LOOPBACK_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"


def main(rank: int, world_size: int, folder: Path, orders: connection.Connection) -> None:
    """Serve `orders` until it is closed. `folder` is the pool's, for its rendezvous and stack dumps."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    stack_file = stack_path(folder, rank).open("w")
    faulthandler.enable(stack_file)
    faulthandler.register(signal.SIGUSR1, stack_file)
    os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK_INTERFACE
    torch.set_num_threads(1)
    # What was imported stays: later collections need not look at it.
    gc.collect()
    gc.freeze()

    store = dist.FileStore(str(folder / "rendezvous"), world_size)
    groups_made = 0
    while True:
        _renew_process_group(dist.PrefixStore(f"group{groups_made}", store), rank, world_size)
        groups_made += 1
        send(orders, Returned(pickle.dumps(None)))
        try:
            order = receive(orders)
            while isinstance(order, Call):
                send(orders, _answer(order))
                order = receive(orders)
        except EOFError:
            return


def stack_path(folder: Path, rank: int) -> Path:
    """Where rank `rank` writes its threads' stacks on SIGUSR1 and on a fatal signal."""
    return folder / f"stack-of-rank-{rank}.txt"


def _exit_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


def _renew_process_group(store: dist.Store, rank: int, world_size: int) -> None:
    # A new group for each call, and no barrier on the old one: collectives that a failed call left behind,
    # group names and counters that differ between ranks, and groups that a test made end with the old one.
    if dist.is_initialized():
        dist.destroy_process_group()
    # Meshes of equal shape and names are equal: torch's caches would answer with one whose groups have ended.
    _clear_sharding_prop_cache()
    gc.collect()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=COLLECTIVE_TIMEOUT)


def _answer(call: Call) -> Returned | Raised:
    try:
        _seed()
        module = importlib.import_module(call.module)
        function: Any = reduce(getattr, call.qualname.split("."), module)
        return Returned(pickle.dumps(function(*pickle.loads(call.arguments))))
    except BaseException as error:
        # BaseException: sys.exit and pytest.skip end a call, not the worker.
        return _raised(error)


def _seed() -> None:
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


def _raised(error: BaseException) -> Raised:
    summary = traceback.format_exception_only(error)[0].strip().splitlines()[0]
    text = "".join(traceback.format_exception(error))
    try:
        pickled = pickle.dumps(error)
        # An exception whose constructor takes other arguments than its `args` pickles, but does not unpickle.
        pickle.loads(pickled)
    except Exception as reason:
        return Raised(summary, text, None, f"{type(reason).__name__}: {reason}")
    return Raised(summary, text, pickled)
