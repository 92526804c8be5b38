"""Policies: what a user decides about precision and schedule, as frozen values.

Promises: a policy is data. It is hashable, holds no tensor and no process group, and every field that it has
is honoured; a value that cannot be honoured is refused when the policy is made.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass, field
from enum import StrEnum

import torch


class Release(StrEnum):
    """What happens to gathered storage when its unit is released."""

    FREE = "free"
    """Its bytes go back to the allocator."""

    POISON = "poison"
    """It keeps its bytes, filled with NaN: a stale read shows as NaN, and ends no process (debugging)."""


RELEASE_VARIABLE = "FSDP_FN_RELEASE"
"""Environment variable with the release of every policy that names none."""


@functools.cache
def default_release() -> Release:
    """:data:`Release.FREE`, or what ``FSDP_FN_RELEASE`` says; read once. ValueError where that is no release."""
    named = os.environ.get(RELEASE_VARIABLE, Release.FREE)
    if named not in set(Release):
        accepted = ", ".join(repr(release.value) for release in Release)
        raise ValueError(f"environment variable {RELEASE_VARIABLE}: expected one of {accepted}, got {named!r}")
    return Release(named)


@dataclass(frozen=True)
class SchedulePolicy:
    """How gathered weights come and go.

    ``reshard_after_forward``: True releases a unit's weights after its forward and gathers them again in backward;
    False keeps them until its backward is through; a number ``k`` keeps, in between, only what a group of ``k``
    neighbouring ranks of the innermost sharded axis holds together, and gathers within that group. Nothing is
    released, and this says nothing, where the strategy replicates parameters.

    ``unshard_all_planes_in_backward``: gather the forward planes too when backward starts, for recomputation
    that happens inside a unit and reads its weights without asking for a plane. A dense weight has one plane,
    which serves every phase, so there it changes nothing.

    ``offload``: main weights, finished gradients and with them the optimizer's state live in the host's pinned memory;
    what compute reads is copied from there and gathered on the device.

    ``divergence_timeout``: seconds after which a rank that came to another unit than the others raises
    :class:`~fsdp_fn.agreement.RankDivergence`.

    ``release``: see :class:`Release`; where it is not given, what the environment variable ``FSDP_FN_RELEASE`` says,
    else FREE. All ranks need the same one.
    """

    reshard_after_forward: bool | int = True
    unshard_all_planes_in_backward: bool = False
    offload: bool = False
    divergence_timeout: float = 600.0
    release: Release = field(default_factory=default_release)

    def __post_init__(self) -> None:
        object.__setattr__(self, "release", Release(self.release))
        kept = self.reshard_after_forward
        if not isinstance(kept, bool) and not (type(kept) is int and kept >= 1):
            raise ValueError(
                "SchedulePolicy.reshard_after_forward: expected True, False or a group size of at least 1, got "
                f"{kept!r}"
            )
        seconds: object = self.divergence_timeout
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
            raise ValueError(f"SchedulePolicy.divergence_timeout: expected seconds above 0, got {seconds!r}")
        for name in ("unshard_all_planes_in_backward", "offload"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"SchedulePolicy.{name}: expected True or False, got {getattr(self, name)!r}")


@dataclass(frozen=True)
class PrecisionPolicy:
    """Dtypes of a unit's weights, gradients, inputs and outputs; None keeps what the model has.

    ``main_dtype``: the sharded main weights, their gradients and the optimizer's state.
    ``compute_dtype``: the gathered weights that forward and backward compute with.
    ``reduce_dtype``: gradients while they are summed over ranks; None means the main weights' dtype.
    ``accumulate_dtype``: gradients while they are summed over microbatches; None means the main weights' dtype.
    ``cast_inputs``: cast floating-point tensors in the unit's arguments, nested ones too, to ``compute_dtype`` if set.
    ``output_dtype``: cast floating-point tensors in what the unit returns.

    Only floating-point values of 16 bits or more are ever cast; integer, bool, complex and 8-bit floating-point ones
    (codes that have scales elsewhere) keep their dtype.
    """

    main_dtype: torch.dtype | None = None
    compute_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    accumulate_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_inputs: bool = True

    def __post_init__(self) -> None:
        for name in ("main_dtype", "compute_dtype", "reduce_dtype", "accumulate_dtype", "output_dtype"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, torch.dtype) and is_cast(value)):
                raise TypeError(
                    f"PrecisionPolicy.{name}: expected a floating-point torch.dtype of 16 bits or more, or None, got "
                    f"{value!r}"
                )
        if not isinstance(self.cast_inputs, bool):
            raise TypeError(f"PrecisionPolicy.cast_inputs: expected True or False, got {self.cast_inputs!r}")

    @property
    def input_dtype(self) -> torch.dtype | None:
        """Dtype to which inputs are cast; None where they are left alone."""
        return self.compute_dtype if self.cast_inputs else None

    def main(self, dtype: torch.dtype) -> torch.dtype:
        """Dtype of the main weight of a parameter that the model holds in ``dtype``."""
        return self.main_dtype if self.main_dtype is not None and is_cast(dtype) else dtype

    def compute(self, dtype: torch.dtype) -> torch.dtype:
        """Dtype in which a parameter that the model holds in ``dtype`` is gathered and computed with."""
        return self.compute_dtype if self.compute_dtype is not None and is_cast(dtype) else dtype

    def reduce(self, dtype: torch.dtype) -> torch.dtype:
        """Dtype in which gradients of a parameter that the model holds in ``dtype`` are summed over ranks."""
        return self.reduce_dtype if self.reduce_dtype is not None and is_cast(dtype) else self.main(dtype)

    def accumulate(self, dtype: torch.dtype) -> torch.dtype:
        """Dtype in which gradients of a parameter that the model holds in ``dtype`` are summed over microbatches."""
        return self.accumulate_dtype if self.accumulate_dtype is not None and is_cast(dtype) else self.main(dtype)


def is_cast(dtype: torch.dtype) -> bool:
    """Whether a policy may cast values of this dtype."""
    return dtype.is_floating_point and dtype.itemsize > 1
