"""Policies: what a user decides about precision and schedule, as frozen values.

Promises: a policy is data. It is hashable, holds no tensor and no process group, and every field that it has
is honoured; a value that cannot be honoured is refused when the policy is made.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch


class Release(StrEnum):
    """What happens to gathered storage when its unit is released."""

    FREE = "free"
    """Its bytes go back to the allocator."""

    POISON = "poison"
    """It keeps its bytes, filled with NaN: a stale read shows as NaN, and ends no process (debugging)."""


@dataclass(frozen=True)
class SchedulePolicy:
    """How gathered weights come and go.

    ``unshard_all_planes_in_backward``: gather the forward planes too when backward starts, for recomputation
    that happens inside a unit and reads its weights without asking for a plane. A dense weight has one plane,
    which serves every phase, so there it changes nothing.

    ``release``: see :class:`Release`.
    """

    unshard_all_planes_in_backward: bool = False
    release: Release = Release.FREE

    def __post_init__(self) -> None:
        object.__setattr__(self, "release", Release(self.release))


@dataclass(frozen=True)
class PrecisionPolicy:
    """Dtypes of a unit's weights and gradients; None keeps the parameter's own dtype.

    ``main_dtype``: the sharded main weights, their gradients and the optimizer's state.
    ``compute_dtype``: the gathered weights that forward and backward compute with.
    ``reduce_dtype``: gradients while they are summed over ranks; None means the main weights' dtype.

    Only floating-point parameters of 16 bits or more are ever cast; integer, bool, complex and 8-bit floating-point
    ones (codes that have scales elsewhere) keep their dtype.
    """

    main_dtype: torch.dtype | None = None
    compute_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        for name in ("main_dtype", "compute_dtype", "reduce_dtype"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, torch.dtype) and value.is_floating_point):
                raise TypeError(f"PrecisionPolicy.{name}: expected a floating-point torch.dtype or None, got {value!r}")

    def main(self, dtype: torch.dtype) -> torch.dtype:
        """Dtype of the main weight of a parameter that the model holds in ``dtype``."""
        return self.main_dtype if self.main_dtype is not None and _is_cast(dtype) else dtype

    def compute(self, dtype: torch.dtype) -> torch.dtype:
        """Dtype in which a parameter that the model holds in ``dtype`` is gathered and computed with."""
        return self.compute_dtype if self.compute_dtype is not None and _is_cast(dtype) else dtype

    def reduce(self, dtype: torch.dtype) -> torch.dtype:
        """Dtype in which gradients of a parameter that the model holds in ``dtype`` are summed over ranks."""
        return self.reduce_dtype if self.reduce_dtype is not None and _is_cast(dtype) else self.main(dtype)


def _is_cast(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize > 1
