"""Retries and usage limits in a session: what is logged, how the clocks react, and when a limit ends."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace
from tests.core.session.scenarios import ask
from tests.core.session.talk import TELLING, Talk, sent

from banksman.core.dialects.meaning import (
    LimitsReported,
    LimitWindow,
    Noise,
    ProviderFailure,
    Retrying,
    ToolBegan,
    ToolEnded,
    TurnOver,
)
from banksman.core.session import event as kinds
from banksman.core.session.account_limits import WINDOWS_MAX, limited_until, merge
from banksman.core.session.ask_queue import NORMAL
from banksman.core.session.outcome import Kind, Outcome, outcome_of
from banksman.core.session.provider_limits import RETRY_SECONDS_MAX
from banksman.errors import HINTS, AgentError, ErrorKind

CLOCKED = replace(TELLING, clocks={"bytes": 10.0, "progress": 20.0})
RETRY = Retrying(1, "overloaded", ErrorKind.OVERLOADED, attempts_max=10, delay=30.0, status=529)
FREE = LimitWindow("five_hour", 0.5, 900.0)
FULL = LimitWindow("five_hour", 1.0, 900.0, is_exhausted=True)
WEEK = LimitWindow("seven_day", 1.0, 9000.0, is_exhausted=True)


def running() -> Talk:
    talk = Talk(CLOCKED)
    talk.ask(ask("a", NORMAL))
    talk.begin()
    talk.opens("a0000")
    return talk


def seconds_left(talk: Talk) -> float:
    """Return the seconds until a clock interrupts the turn."""
    begin = talk.at
    while not sent(talk.wait(0.5)):
        assert talk.at < begin + 10_000
    return talk.at - begin


def failed(talk: Talk, id: str, kind: ErrorKind, **members: Any) -> AgentError:
    talk.serve(ask(id, NORMAL), is_error=True, error="no", failure=ProviderFailure(kind, **members))
    error = talk.outcomes[id].error
    assert isinstance(error, AgentError)
    return error


# -- retries -----------------------------------------------------------------------------------------------------------
def test_retry_is_logged_and_postpones_clocks() -> None:
    talk = running()
    talk.mean(RETRY)
    assert talk.logged(kinds.PROVIDER_RETRYING) == [
        {
            **{"attempt": 1, "attempts_max": 10, "delay": 30.0, "cause": "overloaded"},
            **{"error": "overloaded", "status": 529},
        }
    ]
    # The clocks begin when the retry is due: 30 s, then the 10 s of the clock `bytes`.
    assert seconds_left(talk) == 40.0


def test_noise_after_retry_keeps_its_delay() -> None:
    talk = running()
    talk.mean(RETRY)
    talk.wait(5.0)
    talk.mean(Noise())
    assert seconds_left(talk) == 35.0


def test_progress_ends_retry() -> None:
    talk = running()
    talk.mean(RETRY)
    assert talk.state.turn is not None
    assert talk.state.turn.retry is not None
    talk.wait(5.0)
    talk.hear(b"text")
    assert talk.state.turn.retry is None
    assert seconds_left(talk) == 10.0


def test_retry_after_progress_in_one_read_stays() -> None:
    talk = running()
    talk.hear(b"text", b"retry", b"odd")
    assert talk.state.turn is not None
    assert talk.state.turn.retry is not None
    talk.hear(b"retry", b"text")
    assert talk.state.turn.retry is None


def test_delay_of_retry_is_bounded() -> None:
    talk = running()
    talk.mean(replace(RETRY, delay=1e9))
    assert seconds_left(talk) == RETRY_SECONDS_MAX + 10.0


def test_retry_without_turn_is_logged() -> None:
    talk = running()
    talk.mean(TurnOver(("a0000",)))
    talk.mean(RETRY)
    assert len(talk.logged(kinds.PROVIDER_RETRYING)) == 1


# -- limits ------------------------------------------------------------------------------------------------------------
def test_limits_are_logged_only_when_they_change() -> None:
    talk = running()
    for _ in range(3):
        talk.mean(LimitsReported((FREE,)))
    talk.mean(LimitsReported((WEEK,)))
    assert talk.state.limits == (FREE, WEEK)
    windows = [[window["name"] for window in body["windows"]] for body in talk.logged(kinds.LIMITS_CHANGED)]
    assert windows == [["five_hour"], ["five_hour", "seven_day"]]
    assert [body["limited_until"] for body in talk.logged(kinds.LIMITS_CHANGED)] == [None, 9000.0]


def test_limited_turn_ends_with_reset_time_of_its_window() -> None:
    talk = Talk(TELLING)
    talk.serve(ask("first", NORMAL))
    talk.mean(LimitsReported((FULL, WEEK)))
    assert failed(talk, "a", ErrorKind.USAGE_LIMIT).limited_until == 9000.0
    # Another failure does not blame the window, and the agent's own figure counts more.
    assert failed(talk, "b", ErrorKind.OVERLOADED).limited_until is None
    assert failed(talk, "c", ErrorKind.USAGE_LIMIT, limited_until=77.0).limited_until == 77.0
    assert talk.state.limited_until == 77.0


def test_answer_of_provider_ends_limit() -> None:
    talk = Talk(TELLING)
    failed(talk, "a", ErrorKind.USAGE_LIMIT, limited_until=77.0)
    failed(talk, "b", ErrorKind.NETWORK)
    assert talk.state.limited_until == 77.0
    talk.serve(ask("c", NORMAL))
    assert talk.state.limited_until is None


def test_windows_are_bounded_and_last_reset_counts() -> None:
    many = tuple(LimitWindow(f"w{number}") for number in range(WINDOWS_MAX + 5))
    assert merge((), many) == many[:WINDOWS_MAX]
    assert limited_until((FREE,)) is None
    assert limited_until((FULL, replace(WEEK, resets_at=None))) == 900.0


# -- outcomes ----------------------------------------------------------------------------------------------------------
def test_outcome_in_log_has_same_error() -> None:
    talk = Talk(TELLING)
    error = failed(talk, "a", ErrorKind.RATE_LIMITED, status=429, retry_after=2.0, raw={"a": 1})
    (body,) = talk.logged(kinds.TURN_ENDED)
    again = outcome_of(body)
    assert again.failure == talk.outcomes["a"].failure == body["failure"]
    assert isinstance(again.error, AgentError)
    # The text is only the agent's, as in older versions. The hint is beside it.
    assert (str(again.error), again.error.message, again.error.hint) == ("no", "no", HINTS[error.kind])


def test_outcome_of_older_version_has_kind_other() -> None:
    talk = Talk(TELLING)
    failed(talk, "a", ErrorKind.AUTH)
    (body,) = talk.logged(kinds.TURN_ENDED)
    old = {name: value for name, value in body.items() if name not in ("failure", "used_tools")}
    error = outcome_of(old).error
    assert isinstance(error, AgentError)
    assert (error.kind, str(error)) == (ErrorKind.OTHER, "no")
    newer = {**body, "failure": {**body["failure"], "kind": "of a newer version"}}
    error = outcome_of(newer).error
    assert isinstance(error, AgentError)
    assert error.kind is ErrorKind.OTHER


@pytest.mark.parametrize(
    ("text", "uses_tool", "is_empty"),
    [("", True, True), (" \n", True, True), ("done", True, False), ("", False, False)],
)
def test_success_without_answer_after_tool_is_empty(text: str, uses_tool: bool, is_empty: bool) -> None:
    talk = running()
    if uses_tool:
        talk.mean(ToolBegan(("t",)), ToolEnded(("t",)))
    talk.mean(TurnOver(("a0000",), text=text))
    talk.wait(60.0)
    outcome = talk.outcomes["a"]
    assert (outcome.kind, outcome.used_tools, outcome.empty) == (Kind.DONE, uses_tool, is_empty)
    assert outcome_of(talk.logged(kinds.TURN_ENDED)[0]).empty == is_empty


def test_failed_or_structured_outcome_is_not_empty() -> None:
    assert not Outcome(kind=Kind.FAILED, used_tools=True).empty
    assert not Outcome(kind=Kind.DONE, used_tools=True, structured={}).empty


def test_exit_of_agent_has_its_kind_and_stderr() -> None:
    talk = running()
    talk.die(code=3)
    error = talk.outcomes["a"].error
    assert isinstance(error, AgentError)
    assert error.kind is ErrorKind.AGENT_EXITED
    assert str(error) == "the agent exited (code 3)"
