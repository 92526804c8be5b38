"""Train a byte-level language model with fully sharded data parallel, in either of the library's two modes.

    python docs/examples/train_lm.py --launch                     # all GPUs, or two CPU processes
    torchrun --nproc-per-node=2 docs/examples/train_lm.py         # the same, started by hand
    python docs/examples/train_lm.py --help

What to read: ``lm/wrapper.py`` and ``lm/functional.py`` are the two ways to train, ``lm/job.py`` the loop
around them, ``lm/transformer.py`` the model, which is plain PyTorch. ``docs/train.md`` explains the options
and the pictures.

Promises: exit code 0 when the run is whole, 2 for what the user can mend, 130 after Ctrl-C; in every case no
process stays behind. Modules that import torch are imported late, so that ``--help`` and Ctrl-C answer at
once.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from lm.ending import Farewell, leave
from lm.settings import Settings, parse_settings

SIGNAL_UNDER_WAY_SECONDS = 1.0


def main(arguments: Sequence[str]) -> int:
    """Exit code of the job with these command-line arguments."""
    settings, launch = parse_settings(arguments)
    if launch is not None:
        from lm.launch import run_launch

        return run_launch(Path(__file__).resolve(), launch)
    return run_rank(settings)


def run_rank(settings: Settings) -> int:
    """This process's part of the job; its exit code."""
    leads = os.environ.get("RANK", "0") == "0"
    farewell = Farewell("Interrupted before the first checkpoint; nothing to resume." if leads else "")

    import torch
    import torch.distributed as dist
    from lm.errors import JobError
    from lm.job import Job

    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend, device_id=device if device.type == "cuda" else None)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    code = 0
    try:
        Job(settings, device, farewell).run()
    except JobError as error:
        # One write, so that ranks do not mix their lines.
        sys.stderr.write(f"[rank {dist.get_rank()}] error: {error}\n")
        sys.stderr.flush()
        dist.barrier()  # every rank has said it before the first exit makes torchrun end the others
        code = 2
    except Exception:
        # Interrupted ranks break the collectives of the others, whose own signal is on its way: it goes first.
        time.sleep(SIGNAL_UNDER_WAY_SECONDS)
        raise
    dist.destroy_process_group()
    farewell.dismiss()
    return code


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
