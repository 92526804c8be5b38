"""Starting the job on this machine: torchrun, in this very process, over all GPUs or two CPU processes.

Promises: returns the exit code of the job; after Ctrl-C it is 130 and every process that was started
has ended.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from pathlib import Path

import torch
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from lm.settings import Launch

CPU_PROCESSES = 2
MENDABLE = 2
"""Exit code for what the user can mend; torchrun's own ending of the other ranks must not hide it."""


def run_launch(script: Path, launch: Launch) -> int:
    """Run ``script`` with the arguments of ``launch`` under torchrun; the job's exit code."""
    gpus = torch.cuda.device_count()
    if gpus and launch.processes is not None and launch.processes > gpus:
        print(
            f"train_lm.py: error: --processes {launch.processes}: this machine has {gpus} GPUs",
            file=sys.stderr,
        )
        return MENDABLE
    count = launch.processes or gpus or CPU_PROCESSES
    if not gpus:
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    # How a process ended is told by its own message or traceback, and by the exit code.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    options = torchrun.parse_args(["--standalone", f"--nproc-per-node={count}", str(script), *launch.arguments])
    try:
        torchrun.run(options)
    except ChildFailedError as error:
        if MENDABLE in (failure.exitcode for failure in error.failures.values()):
            return MENDABLE
        first = error.get_first_failure()[1].exitcode
        return first if first > 0 else 128 - first  # negative: the signal that ended it
    except SignalException as stop:
        return 128 + stop.sigval
    except KeyboardInterrupt:  # before torchrun has its own handlers
        return 128 + signal.SIGINT
    return 0
