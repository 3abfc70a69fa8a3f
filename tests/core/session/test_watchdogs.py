"""Watchdogs: when they pause, warn and expire, against a second-by-second model."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from banksman.core.session import watchdogs
from banksman.core.session.watchdogs import ClockName, Watchdog, Watchdogs

LIMITS = {"bytes": 8.0, "progress": 12.0, "tool": 6.0, "human": 10.0, "overall": 40.0}


def _by_name(them: Watchdogs) -> dict[ClockName, Watchdog]:
    return {clock.name: clock for clock in them}


def test_watchdog_without_limit_is_no_clock() -> None:
    assert {clock.name for clock in watchdogs.wound({"bytes": None, "overall": 1.0, "start": 5.0}, 0.0)} == {
        ClockName.OVERALL
    }
    assert watchdogs.next_at(()) is None
    assert watchdogs.expired((), 1e9) is None


def test_tool_and_human_clocks_are_stopped_at_first() -> None:
    running = {name for name, clock in _by_name(watchdogs.wound(LIMITS, 0.0)).items() if clock.is_running}
    assert running == {ClockName.BYTES, ClockName.PROGRESS, ClockName.OVERALL}


def test_question_stops_all_other_clocks() -> None:
    them = watchdogs.attend(watchdogs.wound(LIMITS, 0.0), 3.0, has_tool=True, has_question=True)
    assert {clock.name for clock in them if clock.is_running} == {ClockName.HUMAN}
    assert watchdogs.expired(them, 12.9) is None
    ran_out = watchdogs.expired(them, 13.0)
    assert ran_out is not None
    assert ran_out.name is ClockName.HUMAN
    # The clocks resume where they stopped.
    after = watchdogs.attend(them, 100.0, has_tool=False, has_question=False)
    assert _by_name(after)[ClockName.BYTES].elapsed(101.0) == 4.0
    assert watchdogs.next_at(after) == 101.0  # Half of eight seconds, of which three had passed.


def test_tool_stops_silence_clocks() -> None:
    them = watchdogs.attend(watchdogs.wound(LIMITS, 0.0), 1.0, has_tool=True, has_question=False)
    assert {clock.name for clock in them if clock.is_running} == {ClockName.TOOL, ClockName.OVERALL}


def test_tool_clock_restarts_with_each_tool() -> None:
    them = watchdogs.attend(watchdogs.wound(LIMITS, 0.0), 0.0, has_tool=True, has_question=False)
    them, warned = watchdogs.warn(them, 3.0)
    assert [clock.name for clock in warned] == [ClockName.TOOL]
    them = watchdogs.attend(them, 5.0, has_tool=False, has_question=False)
    them = watchdogs.attend(them, 6.0, has_tool=True, has_question=False)
    assert watchdogs.expired(them, 11.9) is None
    them, warned = watchdogs.warn(them, 9.0)
    assert [clock.name for clock in warned] == [ClockName.TOOL]


def test_clock_warns_once_until_rewound() -> None:
    them = watchdogs.wound({"bytes": 8.0}, 0.0)
    them, warned = watchdogs.warn(them, 4.0)
    assert len(warned) == 1
    them, warned = watchdogs.warn(them, 5.0)
    assert not warned
    assert watchdogs.next_at(them) == 8.0
    them = watchdogs.wind(them, 6.0, ClockName.BYTES)
    assert watchdogs.next_at(them) == 10.0
    them, warned = watchdogs.warn(them, 10.0)
    assert len(warned) == 1


def test_wind_of_absent_clock_changes_nothing() -> None:
    them = watchdogs.wound({"overall": 8.0}, 0.0)
    assert watchdogs.wind(them, 1.0, ClockName.BYTES) is them


_deeds = st.lists(st.tuples(st.sampled_from(["wait", "bytes", "tool", "question"]), st.integers(1, 9)), max_size=40)


@given(deeds=_deeds)
def test_watchdogs_agree_with_model_that_counts_seconds(deeds: list[tuple[str, int]]) -> None:
    them = watchdogs.wound(LIMITS, 0.0)
    passed = dict.fromkeys(LIMITS, 0)
    now = 0
    has_tool = has_question = False
    for deed, seconds in deeds:
        for _ in range(seconds if deed == "wait" else 0):
            now += 1
            for name in passed:
                passed[name] += _runs(name, has_tool, has_question)
        match deed:
            case "bytes":
                them = watchdogs.wind(them, float(now), ClockName.BYTES, ClockName.PROGRESS)
                passed["bytes"] = passed["progress"] = 0
            case "tool":
                passed["tool"] = 0 if not has_tool else passed["tool"]
                has_tool = not has_tool
            case "question":
                passed["human"] = 0 if not has_question else passed["human"]
                # The clock of the tool that waits for the answer restarts.
                passed["tool"] = 0 if has_question and has_tool else passed["tool"]
                has_question = not has_question
            case _:
                pass
        them = watchdogs.attend(them, float(now), has_tool=has_tool, has_question=has_question)
        for clock in them:
            if _runs(clock.name, has_tool, has_question):
                assert clock.elapsed(float(now)) == passed[clock.name], clock
                assert clock.has_run_out(float(now)) == (passed[clock.name] >= clock.seconds)
            else:
                assert not clock.is_running
                assert not clock.has_run_out(1e9)


def _runs(name: str, has_tool: bool, has_question: bool) -> bool:
    if name == "human":
        return has_question
    if has_question:
        return False
    if name == "tool":
        return has_tool
    return name == "overall" or not has_tool


@given(since=st.floats(0, 1e9), seconds=st.floats(0.001, 1e6))
def test_watchdog_timer_never_fires_too_early(since: float, seconds: float) -> None:
    """Despite rounding, at exactly the time of the timer the clock warns or expires."""
    them = watchdogs.wound({"overall": seconds}, since)
    half = watchdogs.next_at(them)
    assert half is not None
    them, warned = watchdogs.warn(them, half)
    assert len(warned) == 1
    end = watchdogs.next_at(them)
    assert end is not None
    assert watchdogs.expired(them, end) is not None
