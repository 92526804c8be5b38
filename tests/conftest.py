"""What every test may use, and which tests run where."""

import os
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch
import torch.distributed as dist

# Under CI hypothesis loads its own, deterministic profile. The time of one example is never a result.
if "CI" not in os.environ:
    hypothesis.settings.register_profile("untimed", deadline=None)
    hypothesis.settings.load_profile("untimed")


@pytest.fixture(params=[1, 2, 3, 4], ids=lambda size: f"{size}-ranks")
def world_size(request: pytest.FixtureRequest) -> int:
    """Runs the test at 1, 2, 3 and 4 ranks; `pytest.mark.parametrize("world_size", …)` chooses others."""
    size: int = request.param
    return size


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    """A process group of one rank over NCCL."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("nccl", rank=0, world_size=1, store=store)
    yield
    dist.destroy_process_group()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA GPU")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
