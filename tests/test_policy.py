"""Policies are values: compared and hashed by what they say, and refused where they could not be honoured."""

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsdp_fn.policy import RELEASE_VARIABLE, PrecisionPolicy, Release, SchedulePolicy, default_release

floating = st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16])
never_cast = st.sampled_from([torch.int64, torch.uint8, torch.bool, torch.complex64])
optional = st.none() | floating
policies = st.builds(PrecisionPolicy, optional, optional, optional, optional)


def test_a_release_may_be_given_by_its_name() -> None:
    assert SchedulePolicy(release="poison") == SchedulePolicy(release=Release.POISON)  # type: ignore[arg-type]
    assert isinstance(SchedulePolicy(release="poison").release, Release)  # type: ignore[arg-type]


def test_an_unknown_release_is_refused() -> None:
    with pytest.raises(ValueError, match="shred"):
        SchedulePolicy(release="shred")  # type: ignore[arg-type]


@pytest.fixture
def fresh_default() -> Iterator[None]:
    """The default is read again, in this test and after it."""
    default_release.cache_clear()
    yield
    default_release.cache_clear()


@pytest.mark.parametrize("named", [None, *Release])
def test_the_environment_says_which_release_is_the_default(
    fresh_default: None, monkeypatch: pytest.MonkeyPatch, named: str | None
) -> None:
    if named is None:
        monkeypatch.delenv(RELEASE_VARIABLE, raising=False)
    else:
        monkeypatch.setenv(RELEASE_VARIABLE, named)
    assert SchedulePolicy().release is Release(named or "free")
    monkeypatch.setenv(RELEASE_VARIABLE, "shred")
    assert SchedulePolicy().release is Release(named or "free"), "it is read once"
    assert SchedulePolicy(release=Release.FREE).release is Release.FREE
    assert SchedulePolicy(release=Release.POISON).release is Release.POISON


@pytest.mark.parametrize("named", ["shred", "", "POISON"])
def test_a_release_that_the_environment_cannot_mean_is_refused(
    fresh_default: None, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    monkeypatch.setenv(RELEASE_VARIABLE, named)
    for _ in range(2):
        with pytest.raises(ValueError, match=rf"FSDP_FN_RELEASE: expected one of 'free', 'poison', got '{named}'"):
            SchedulePolicy()


@pytest.mark.parametrize("value", [0, -1, 2.0, "True", None])
def test_a_group_that_is_no_number_of_ranks_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"reshard_after_forward: expected True, False or a group size of at least 1"):
        SchedulePolicy(reshard_after_forward=value)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [True, False, 1, 8])
def test_a_group_size_and_a_yes_or_no_are_kept_as_given(value: bool | int) -> None:
    assert SchedulePolicy(reshard_after_forward=value).reshard_after_forward is value


@pytest.mark.parametrize("field", ["unshard_all_planes_in_backward", "offload"])
@pytest.mark.parametrize("value", [None, 1, "cpu"])
def test_a_switch_that_is_neither_on_nor_off_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(TypeError, match=rf"SchedulePolicy\.{field}: expected True or False"):
        SchedulePolicy(**{field: value})  # type: ignore[arg-type]


def test_schedule_policies_are_hashed_by_value_and_cannot_be_changed() -> None:
    alike = {
        SchedulePolicy(),
        SchedulePolicy(release=default_release()),
        SchedulePolicy(unshard_all_planes_in_backward=True),
    }
    assert len(alike) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        SchedulePolicy().release = Release.POISON  # type: ignore[misc]


@pytest.mark.parametrize("field", ["main_dtype", "compute_dtype", "reduce_dtype", "accumulate_dtype", "output_dtype"])
@pytest.mark.parametrize("value", [torch.int32, torch.complex64, "bfloat16"])
def test_a_precision_that_is_no_floating_point_dtype_is_refused_by_field_name(field: str, value: object) -> None:
    with pytest.raises(TypeError, match=field):
        PrecisionPolicy(**{field: value})  # type: ignore[arg-type]


@given(policies, never_cast)
def test_only_floating_point_parameters_are_cast(policy: PrecisionPolicy, dtype: torch.dtype) -> None:
    assert {policy.main(dtype), policy.compute(dtype), policy.reduce(dtype), policy.accumulate(dtype)} == {dtype}


@given(floating)
def test_a_policy_that_names_no_dtype_keeps_the_parameters_own(dtype: torch.dtype) -> None:
    policy = PrecisionPolicy()
    assert {policy.main(dtype), policy.compute(dtype), policy.reduce(dtype), policy.accumulate(dtype)} == {dtype}


@given(policies, floating)
def test_named_dtypes_win_and_sums_follow_the_main_weights_where_none_is_named(
    policy: PrecisionPolicy, dtype: torch.dtype
) -> None:
    assert policy.main(dtype) == (policy.main_dtype or dtype)
    assert policy.compute(dtype) == (policy.compute_dtype or dtype)
    assert policy.reduce(dtype) == (policy.reduce_dtype or policy.main_dtype or dtype)
    assert policy.accumulate(dtype) == (policy.accumulate_dtype or policy.main_dtype or dtype)


@pytest.mark.parametrize("value", [None, "yes", 1])
def test_whether_inputs_are_cast_is_a_yes_or_a_no(value: object) -> None:
    with pytest.raises(TypeError, match=r"cast_inputs: expected True or False"):
        PrecisionPolicy(cast_inputs=value)  # type: ignore[arg-type]


def test_inputs_are_cast_to_the_compute_dtype_unless_told_otherwise() -> None:
    assert PrecisionPolicy(compute_dtype=torch.bfloat16).input_dtype is torch.bfloat16
    assert PrecisionPolicy(compute_dtype=torch.bfloat16, cast_inputs=False).input_dtype is None
    assert PrecisionPolicy().input_dtype is None


@given(policies)
def test_precision_policies_are_hashed_by_value(policy: PrecisionPolicy) -> None:
    assert hash(policy) == hash(dataclasses.replace(policy))
