"""Policies are values: compared and hashed by what they say, and refused where they could not be honoured."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsdp_fn.policy import PrecisionPolicy, Release, SchedulePolicy

floating = st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16])
never_cast = st.sampled_from([torch.int64, torch.uint8, torch.bool, torch.complex64])
policies = st.builds(PrecisionPolicy, st.none() | floating, st.none() | floating, st.none() | floating)


def test_a_release_may_be_given_by_its_name() -> None:
    assert SchedulePolicy(release="poison") == SchedulePolicy(release=Release.POISON)  # type: ignore[arg-type]
    assert isinstance(SchedulePolicy(release="poison").release, Release)  # type: ignore[arg-type]


def test_an_unknown_release_is_refused() -> None:
    with pytest.raises(ValueError, match="shred"):
        SchedulePolicy(release="shred")  # type: ignore[arg-type]


def test_schedule_policies_are_hashed_by_value_and_cannot_be_changed() -> None:
    assert len({SchedulePolicy(), SchedulePolicy(release=Release.FREE), SchedulePolicy(True)}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        SchedulePolicy().release = Release.POISON  # type: ignore[misc]


@pytest.mark.parametrize("field", ["main_dtype", "compute_dtype", "reduce_dtype"])
@pytest.mark.parametrize("value", [torch.int32, torch.complex64, "bfloat16"])
def test_a_precision_that_is_no_floating_point_dtype_is_refused_by_field_name(field: str, value: object) -> None:
    with pytest.raises(TypeError, match=field):
        PrecisionPolicy(**{field: value})  # type: ignore[arg-type]


@given(policies, never_cast)
def test_only_floating_point_parameters_are_cast(policy: PrecisionPolicy, dtype: torch.dtype) -> None:
    assert policy.main(dtype) == policy.compute(dtype) == policy.reduce(dtype) == dtype


@given(floating)
def test_a_policy_that_names_no_dtype_keeps_the_parameters_own(dtype: torch.dtype) -> None:
    policy = PrecisionPolicy()
    assert policy.main(dtype) == policy.compute(dtype) == policy.reduce(dtype) == dtype


@given(policies, floating)
def test_named_dtypes_win_and_reduction_follows_the_main_weights_where_it_names_none(
    policy: PrecisionPolicy, dtype: torch.dtype
) -> None:
    assert policy.main(dtype) == (policy.main_dtype or dtype)
    assert policy.compute(dtype) == (policy.compute_dtype or dtype)
    assert policy.reduce(dtype) == (policy.reduce_dtype or policy.main_dtype or dtype)


@given(policies)
def test_precision_policies_are_hashed_by_value(policy: PrecisionPolicy) -> None:
    assert hash(policy) == hash(dataclasses.replace(policy))
