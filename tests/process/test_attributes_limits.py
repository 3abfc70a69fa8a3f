"""Limits by name, by number and as `RLIMIT_…`: what is recorded means the same as what was passed."""

from __future__ import annotations

import resource
from typing import Any

import pytest

from banksman import UsageError
from banksman.process import attributes

NAMES = sorted(name for name in vars(resource) if name.startswith("RLIMIT_"))


@pytest.mark.parametrize("name", NAMES)
def test_recorded_limit_is_the_one_that_was_passed(name: str) -> None:
    """`nice` is a priority, and `RLIMIT_NICE` is not."""
    for key in (name, name.lower(), getattr(resource, name)):
        passed: dict[Any, Any] = {key: (5, 6), "nice": 7}
        recorded = attributes.named_limits(passed)
        wanted = {"rlimits": [(getattr(resource, name), (5, 6))], "nice": 7, "oom_score_adj": None}
        assert attributes.parse_limits(passed) == attributes.parse_limits(recorded) == wanted


@pytest.mark.parametrize(
    "limits",
    [{"nofile": 64, "RLIMIT_NOFILE": 128}, {"core": 1, resource.RLIMIT_CORE: 2}, {"NOFILE": 64, "rlimit_nofile": 64}],
)
def test_limit_that_is_there_twice_is_refused(limits: dict[Any, int]) -> None:
    with pytest.raises(UsageError, match="is there twice"):
        attributes.named_limits(limits)


@pytest.mark.parametrize("key", [True, 7.0, None, "", b"nofile", 10_000, -1, "x" * 1000])
def test_limit_without_a_name_is_refused(key: Any) -> None:
    with pytest.raises(UsageError, match="there is no limit") as caught:
        attributes.named_limits({key: 5})
    assert len(str(caught.value.args[0])) < 100


@pytest.mark.parametrize(
    "value", [-2, 1 << 63, True, 5.0, float("nan"), "5", "9" * 9999, None, [], [1], [1, 2, 3], [6, 5]]
)
def test_limit_with_an_impossible_value_is_refused(value: Any) -> None:
    with pytest.raises(UsageError, match="limit 'core' cannot be") as caught:
        attributes.named_limits({"core": value})
    assert len(str(caught.value.args[0])) < 200
