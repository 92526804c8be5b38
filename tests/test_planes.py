"""Which planes a phase computes with, decided with no tensor and no process group."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_fn.planes import Phase, PlaneKind, planes_for_phase
from fsdp_fn.policy import SchedulePolicy

DENSE, ROWWISE, COLUMNWISE = PlaneKind.DENSE, PlaneKind.ROWWISE, PlaneKind.COLUMNWISE
ONE_DIRECTION = SchedulePolicy()
BOTH_IN_BACKWARD = SchedulePolicy(unshard_all_planes_in_backward=True)

phases = st.sampled_from(Phase)
policies = st.sampled_from([ONE_DIRECTION, BOTH_IN_BACKWARD])
kinds = st.lists(st.sampled_from(PlaneKind), unique=True).map(tuple)


@given(phases, policies)
def test_a_dense_plane_serves_every_phase(phase: Phase, policy: SchedulePolicy) -> None:
    assert planes_for_phase((DENSE,), phase, policy) == (DENSE,)


@pytest.mark.parametrize(
    ("phase", "policy", "needed"),
    [
        (Phase.FORWARD, ONE_DIRECTION, (ROWWISE,)),
        (Phase.RECOMPUTE, ONE_DIRECTION, (ROWWISE,)),
        (Phase.BACKWARD, ONE_DIRECTION, (COLUMNWISE,)),
        (Phase.FORWARD, BOTH_IN_BACKWARD, (ROWWISE,)),
        (Phase.RECOMPUTE, BOTH_IN_BACKWARD, (ROWWISE,)),
        (Phase.BACKWARD, BOTH_IN_BACKWARD, (ROWWISE, COLUMNWISE)),
    ],
)
def test_a_phase_needs_the_planes_of_its_own_direction(
    phase: Phase, policy: SchedulePolicy, needed: tuple[PlaneKind, ...]
) -> None:
    assert planes_for_phase((ROWWISE, COLUMNWISE), phase, policy) == needed
    assert planes_for_phase((ROWWISE, DENSE, COLUMNWISE), phase, policy) == tuple(
        kind for kind in (ROWWISE, DENSE, COLUMNWISE) if kind in (*needed, DENSE)
    )


@pytest.mark.parametrize(
    ("available", "phase", "named"),
    [
        ((ROWWISE,), Phase.BACKWARD, "columnwise"),
        ((COLUMNWISE,), Phase.FORWARD, "rowwise"),
        ((COLUMNWISE, DENSE), Phase.RECOMPUTE, "rowwise"),
        ((), Phase.FORWARD, "none"),
    ],
)
def test_a_missing_direction_is_refused_by_name(available: tuple[PlaneKind, ...], phase: Phase, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        planes_for_phase(available, phase, ONE_DIRECTION)


@pytest.mark.parametrize("phase", ["backward", "sideways", None])
def test_what_is_no_phase_is_refused(phase: object) -> None:
    with pytest.raises(TypeError, match="Phase"):
        planes_for_phase((DENSE,), phase, ONE_DIRECTION)  # type: ignore[arg-type]
