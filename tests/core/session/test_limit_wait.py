"""The queue waits for the end of a limit of the account: who waits, what is asked again, and what ends the wait."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace
from tests.core.session.scenarios import ask
from tests.core.session.talk import TELLING, Talk, of, sent

from banksman.core.dialects.meaning import (
    BackgroundTask,
    LimitsReported,
    LimitWindow,
    Meaning,
    ProviderFailure,
    Requested,
    RequestPurpose,
    TasksChanged,
    ToolBegan,
    ToolEnded,
    TurnOver,
)
from banksman.core.session import event as kinds
from banksman.core.session import history as pasts
from banksman.core.session.ask_queue import BACKGROUND, INTERACTIVE, NORMAL
from banksman.core.session.effects import Append, CallOnLimit, Effect, ReportIdle, ReportLimit, WaitUntil
from banksman.core.session.facts import (
    AccountLimited,
    AskWithdrawn,
    Begun,
    CloseAsked,
    DrainAsked,
    EvictAsked,
    InterruptAsked,
    LeaveAsked,
    LimitDecided,
    Reconfigured,
    Timer,
)
from banksman.core.session.limit_wait import REQUEUES_MAX
from banksman.core.session.outcome import Kind
from banksman.core.session.state import Mode, ProcessPhase
from banksman.core.session.turn import Turn
from banksman.errors import AgentError, ErrorKind

WAIT = replace(TELLING, on_limit="wait")
CALL = replace(TELLING, on_limit="call")
USED_UP = ProviderFailure(ErrorKind.USAGE_LIMIT, status=429, limited_until=900.0)
FULL = LimitWindow("five_hour", 1.0, 900.0, is_exhausted=True)
A, B = ask("a", NORMAL), ask("b", NORMAL)


def limited(ref: str = "a0000", failure: ProviderFailure = USED_UP) -> TurnOver:
    return TurnOver((ref,), is_error=True, error="limit reached", failure=failure)


def running(config: Any = WAIT) -> Talk:
    talk = Talk(config)
    talk.ask(A)
    talk.begin()
    talk.opens("a0000")
    return talk


def end(talk: Talk, ref: str = "a0000", failure: ProviderFailure = USED_UP) -> list[Effect]:
    return talk.mean(limited(ref, failure)) + talk.hear(b"settled " + ref.encode())


def waits(talk: Talk) -> list[tuple[float, str]]:
    return [(effect.wall, effect.subject[1]) for effect in of(WaitUntil, talk.effects)]


def passes(talk: Talk, until: float = 900.0) -> list[Effect]:
    """Let the wall clock pass the end of a limit."""
    return talk.fire((Timer.LIMIT, repr(until)))


def error_of(talk: Talk, id: str) -> AgentError:
    error = talk.outcomes[id].error
    assert isinstance(error, AgentError)
    return error


# -- the ask that met the limit --------------------------------------------------------------------------------------
def test_limited_ask_is_asked_again_after_the_reset() -> None:
    talk = running()
    assert sent(end(talk)) == []
    assert talk.outcomes == {}
    assert waits(talk) == [(900.0, "900.0")]
    (requeued,) = talk.logged(kinds.TURN_REQUEUED)
    assert (requeued["attempt"], requeued["reason"], requeued["limited_until"]) == (2, "limit", 900.0)
    assert sent(passes(talk)) == [b"P a0002\n"]
    talk.over("a0002")
    assert talk.kinds == {"a": Kind.DONE}


def test_limited_ask_fails_by_default() -> None:
    talk = running(TELLING)
    end(talk)
    assert (talk.kinds["a"], error_of(talk, "a").limited_until) == (Kind.FAILED, 900.0)
    assert waits(talk) == []
    assert sent(talk.ask(B)) == [b"P b0000\n"]


@pytest.mark.parametrize(
    "signs",
    [
        (ToolBegan(("t",)), ToolEnded(("t",))),
        (ToolEnded(("t",)),),
        (Requested("r", RequestPurpose.PERMISSION, "can_use_tool", "Bash"),),
    ],
)
def test_limited_ask_whose_tool_ran_fails_and_the_queue_waits(signs: tuple[Meaning, ...]) -> None:
    talk = running()
    talk.mean(*signs)
    talk.ask(B)
    assert sent(end(talk)) == []
    assert (talk.kinds, error_of(talk, "a").limited_until) == ({"a": Kind.FAILED}, 900.0)
    assert sent(passes(talk)) == [b"P b0000\n"]


def test_limited_ask_with_background_tasks_fails() -> None:
    talk = running()
    talk.mean(TasksChanged((BackgroundTask("t"),)))
    end(talk)
    assert talk.kinds == {"a": Kind.FAILED}


@pytest.mark.parametrize("kind", [ErrorKind.USAGE_LIMIT, ErrorKind.RATE_LIMITED])
def test_limited_ask_fails_if_the_reset_is_unknown(kind: ErrorKind) -> None:
    talk = running()
    end(talk, failure=ProviderFailure(kind))
    assert talk.kinds == {"a": Kind.FAILED}
    assert talk.state.limit_wait is None


def test_other_failure_is_not_asked_again() -> None:
    talk = running()
    end(talk, failure=ProviderFailure(ErrorKind.OVERLOADED, limited_until=900.0))
    assert talk.kinds == {"a": Kind.FAILED}


def test_throttled_ask_waits_as_long_as_the_provider_says() -> None:
    talk = running()
    end(talk, failure=ProviderFailure(ErrorKind.RATE_LIMITED, retry_after=30.0))
    assert talk.wait(29.0) == []
    assert sent(talk.wait(1.0)) == [b"P a0002\n"]
    assert waits(talk) == []


def test_limit_of_known_windows_serves_an_error_without_reset() -> None:
    talk = running()
    talk.mean(LimitsReported((FULL,)))
    end(talk, failure=ProviderFailure(ErrorKind.RATE_LIMITED))
    assert talk.outcomes == {}
    assert sent(passes(talk)) == [b"P a0002\n"]


def test_ask_is_asked_again_a_bounded_number_of_times() -> None:
    talk = running()
    end(talk)
    for attempt in range(2, REQUEUES_MAX + 2):
        assert talk.outcomes == {}
        assert sent(passes(talk)) == [f"P a{attempt:04x}\n".encode()]
        talk.opens(f"a{attempt:04x}")
        end(talk, f"a{attempt:04x}")
    assert talk.kinds == {"a": Kind.FAILED}
    assert len(talk.logged(kinds.TURN_REQUEUED)) == REQUEUES_MAX


def test_collected_asks_are_asked_again_together() -> None:
    talk = Talk(WAIT)
    talk.ask(ask("a", NORMAL, on_busy="collect"))
    talk.ask(ask("b", NORMAL, on_busy="collect"))
    talk.wait(1.0)
    talk.begin()
    talk.opens("a0000")
    end(talk)
    passes(talk)
    talk.over("a0002")
    assert talk.kinds == {"a": Kind.DONE, "b": Kind.DONE}


def test_steered_asks_become_ordinary_asks() -> None:
    talk = running()
    talk.ask(ask("b", NORMAL, on_busy="steer"))
    talk.hear(b"taken b0000")
    talk.mean(replace(limited(), refs=("a0000", "b0000")))
    talk.hear(b"settled a0000", b"settled b0000")
    assert [turn.id for turn in talk.state.queue] == ["a", "b"]
    passes(talk)
    talk.over("a0002")
    talk.over("b0002")
    assert talk.kinds == {"a": Kind.DONE, "b": Kind.DONE}


# -- what wins over a wait -------------------------------------------------------------------------------------------
def test_interrupted_turn_that_met_a_limit_ends_interrupted() -> None:
    talk = running()
    talk.tell(InterruptAsked(talk.at, "a", "stop"))
    end(talk)
    assert talk.kinds == {"a": Kind.INTERRUPTED}


def test_withdrawn_collected_ask_keeps_the_turn_from_being_asked_again() -> None:
    talk = Talk(WAIT)
    talk.ask(ask("a", NORMAL, on_busy="collect"))
    talk.ask(ask("b", NORMAL, on_busy="collect"))
    talk.wait(1.0)
    talk.begin()
    talk.opens("a0000")
    talk.tell(AskWithdrawn(talk.at, "b"))
    end(talk)
    assert talk.kinds == {"a": Kind.FAILED, "b": Kind.FAILED}


def test_draining_session_does_not_ask_again() -> None:
    talk = running()
    talk.tell(DrainAsked(talk.at))
    end(talk)
    assert talk.kinds == {"a": Kind.FAILED}


def test_closed_session_refuses_the_waiting_asks() -> None:
    talk = running()
    end(talk)
    talk.ask(B)
    talk.tell(CloseAsked(talk.at))
    assert talk.kinds == {"a": Kind.REFUSED, "b": Kind.REFUSED}


def test_leaving_session_leaves_the_waiting_asks_to_the_next_owner() -> None:
    talk = running()
    end(talk)
    talk.tell(LeaveAsked(talk.at))
    talk.die(signal=15)
    assert (talk.state.mode, talk.outcomes) == (Mode.LEFT, {})
    again = recovered(talk)
    assert waits(again) == [(900.0, "900.0")]


def test_deadline_in_the_queue_says_that_the_account_is_limited() -> None:
    talk = running()
    end(talk)
    talk.ask(ask("b", NORMAL, deadline=10.0, due=10.0))
    talk.wait(10.0)
    outcome = talk.outcomes["b"]
    assert (outcome.kind, outcome.clock) == (Kind.WITHDRAWN, "deadline")
    assert (error_of(talk, "b").kind, error_of(talk, "b").limited_until) == (ErrorKind.USAGE_LIMIT, 900.0)


# -- the gate --------------------------------------------------------------------------------------------------------
def test_nothing_is_sent_and_no_process_started_during_a_wait() -> None:
    talk = Talk(WAIT)
    talk.tell(AccountLimited(talk.at, 900.0))
    talk.ask(A)
    assert talk.starts == []
    passes(talk)
    assert len(talk.starts) == 1


def test_reported_limit_holds_the_queue_without_a_failed_turn() -> None:
    talk = Talk(WAIT)
    talk.serve(A)
    talk.mean(LimitsReported((FULL,)))
    assert sent(talk.ask(B)) == []
    assert sent(passes(talk)) == [b"P b0000\n"]


def test_granted_turn_that_was_not_sent_waits_again() -> None:
    talk = Talk(WAIT)
    talk.serve(A)
    talk.is_log_slow = True
    talk.ask(B)
    talk.tell(AccountLimited(talk.at, 900.0))
    talk.is_log_slow = False
    assert sent(talk.commit()) == []
    assert sent(passes(talk)) == [b"P b0002\n"]


def test_waiting_start_of_a_process_is_given_up() -> None:
    talk = Talk(WAIT)
    talk.ask(A)
    talk.tell(AccountLimited(talk.at, 900.0))
    assert talk.state.process.phase is ProcessPhase.STOPPING
    talk.die()
    assert talk.outcomes == {}
    passes(talk)
    assert len(talk.starts) == 2


def test_urgent_ask_preempts_nothing_during_a_wait() -> None:
    talk = Talk(WAIT)
    talk.ask(ask("low", BACKGROUND))
    talk.begin()
    talk.opens("low0000")
    talk.tell(AccountLimited(talk.at, 900.0))
    assert sent(talk.ask(ask("urgent", INTERACTIVE))) == []
    assert sent(passes(talk)) == [b"I interrupt-low#1-1\n"]


def test_process_is_idle_while_only_a_limit_keeps_the_queue() -> None:
    talk = running()
    assert of(ReportIdle, end(talk)) != []
    talk.tell(EvictAsked(talk.at))
    talk.die(signal=15)
    assert talk.outcomes == {}
    passes(talk)
    assert len(talk.starts) == 2


# -- the end of a wait -----------------------------------------------------------------------------------------------
def test_timer_of_an_earlier_reset_does_not_end_the_wait() -> None:
    talk = running()
    end(talk)
    talk.tell(AccountLimited(talk.at, 2000.0))
    assert waits(talk) == [(900.0, "900.0"), (2000.0, "2000.0")]
    assert talk.waits_for(Timer.LIMIT) == []
    assert sent(passes(talk, 900.0)) == []
    assert sent(passes(talk, 2000.0)) == [b"P a0002\n"]


def test_wait_ends_when_the_limit_is_lifted() -> None:
    talk = running()
    end(talk)
    assert sent(talk.tell(AccountLimited(talk.at, None))) == [b"P a0002\n"]


def test_wait_ends_when_the_session_is_opened_again_with_fail() -> None:
    talk = running()
    end(talk)
    assert sent(talk.tell(Reconfigured(talk.at, TELLING, False))) == [b"P a0002\n"]
    talk.opens("a0002")
    end(talk, "a0002")
    assert talk.kinds == {"a": Kind.FAILED}
    # Opened once more to wait, the session waits for the limit that it knows.
    talk.tell(Reconfigured(talk.at, WAIT, False))
    assert sent(talk.ask(B)) == []


def test_reset_that_has_passed_is_not_waited_for_again() -> None:
    talk = running()
    end(talk)
    passes(talk)
    talk.opens("a0002")
    talk.mean(LimitsReported((replace(FULL, used=0.99),)))
    assert len(waits(talk)) == 1


def recovered(talk: Talk, config: Any = WAIT) -> Talk:
    """Return the session on another host."""
    entries = [entry for effect in of(Append, talk.effects) for entry in effect.entries]
    past = pasts.fold(pasts.beginning(config), entries)
    again = Talk(state=pasts.decode(pasts.encode(past), config).session)
    again.tell(Begun(0.0))
    return again


def test_wait_survives_the_host() -> None:
    talk = running()
    end(talk)
    again = recovered(talk)
    assert waits(again) == [(900.0, "900.0")]
    assert again.starts == []
    (turn,) = again.state.queue
    assert isinstance(turn, Turn)
    assert (turn.id, turn.attempt, turn.limit_waits) == ("a", 2, 1)
    passes(again)
    assert len(again.starts) == 1


# -- other sessions of the account -----------------------------------------------------------------------------------
def test_limit_is_reported_to_the_account_and_so_is_its_end() -> None:
    talk = running()
    end(talk)
    assert of(ReportLimit, talk.effects) == [ReportLimit(900.0)]
    passes(talk)
    talk.over("a0002")
    assert of(ReportLimit, talk.effects) == [ReportLimit(900.0), ReportLimit(None)]


def test_limit_of_the_account_is_logged_once_and_not_reported_back() -> None:
    talk = Talk(WAIT)
    for _ in range(2):
        talk.tell(AccountLimited(talk.at, 900.0))
    (changed,) = talk.logged(kinds.LIMITS_CHANGED)
    assert (changed["limited_until"], changed["by"]) == (900.0, "account")
    assert of(ReportLimit, talk.effects) == []


def test_turn_that_began_before_the_limit_does_not_lift_it_for_others() -> None:
    talk = running()
    talk.tell(AccountLimited(talk.at, 900.0))
    talk.mean(TurnOver(("a0000",)))
    talk.hear(b"settled a0000")
    assert talk.kinds == {"a": Kind.DONE}
    assert of(ReportLimit, talk.effects) == []


def test_failing_session_lifts_only_a_limit_that_its_turn_knew() -> None:
    talk = running(TELLING)
    end(talk)
    talk.ask(B)
    talk.mean(LimitsReported((replace(FULL, resets_at=1800.0),)))
    talk.over("b0000")
    assert talk.kinds["b"] is Kind.DONE
    assert of(ReportLimit, talk.effects) == [ReportLimit(900.0), ReportLimit(1800.0)]
    talk.serve(ask("c", NORMAL), is_error=True, error="no", failure=USED_UP)
    talk.serve(ask("d", NORMAL))
    assert of(ReportLimit, talk.effects)[2:] == [ReportLimit(900.0), ReportLimit(None)]


def test_report_about_other_windows_does_not_lift_a_limit_of_the_account() -> None:
    talk = running()
    talk.tell(AccountLimited(talk.at, 900.0))
    talk.mean(LimitsReported((LimitWindow("five_hour", 0.5, 900.0),)))
    assert talk.state.limited_until == 900.0
    assert of(ReportLimit, talk.effects) == []


def test_limit_of_another_session_is_ignored_by_default() -> None:
    talk = Talk(TELLING)
    assert talk.tell(AccountLimited(talk.at, 900.0)) == []
    talk.serve(A)
    assert talk.kinds == {"a": Kind.DONE}


# -- the caller decides ----------------------------------------------------------------------------------------------
def test_caller_decides_to_fail_the_waiting_asks_for_this_reset() -> None:
    talk = running(CALL)
    talk.ask(B)
    end(talk)
    (called,) = of(CallOnLimit, talk.effects)
    assert (called.key, called.error.limited_until, called.waiting) == ("900.0", 900.0, ("a", "b"))
    assert talk.outcomes == {}
    talk.tell(LimitDecided(talk.at, called.key, fails=True))
    assert talk.kinds == {"a": Kind.FAILED, "b": Kind.FAILED}
    assert error_of(talk, "b").limited_until == 900.0
    assert talk.state.limit_wait is None
    assert sent(talk.ask(ask("c", NORMAL))) == [b"P c0000\n"]
    talk.opens("c0000")
    end(talk, "c0000")
    assert talk.kinds["c"] is Kind.FAILED
    # The next limit is another decision.
    talk.tell(AccountLimited(talk.at, 2000.0))
    assert [effect.key for effect in of(CallOnLimit, talk.effects)] == ["900.0", "2000.0"]


def test_caller_decides_to_wait() -> None:
    talk = running(CALL)
    end(talk)
    talk.tell(LimitDecided(talk.at, "900.0", fails=False))
    assert talk.outcomes == {}
    assert sent(passes(talk)) == [b"P a0002\n"]


def test_reopen_with_a_function_during_a_wait_calls_it() -> None:
    talk = running()
    end(talk)
    talk.tell(Reconfigured(talk.at, CALL, False))
    talk.tell(Reconfigured(talk.at, CALL, False))
    (called,) = of(CallOnLimit, talk.effects)
    assert (called.key, called.waiting) == ("900.0", ("a",))


def test_late_decision_has_no_effect() -> None:
    talk = running(CALL)
    end(talk)
    passes(talk)
    talk.opens("a0002")
    talk.ask(B)
    talk.tell(LimitDecided(talk.at, "900.0", fails=True))
    assert talk.outcomes == {}


# -- asks that would reach the running turn ----------------------------------------------------------------------------
@pytest.mark.parametrize("on_busy", ["steer", "interrupt"])
def test_running_turn_is_neither_steered_nor_interrupted_during_a_wait(on_busy: str) -> None:
    talk = running()
    talk.tell(AccountLimited(talk.at, 900.0))
    assert sent(talk.ask(ask("s", NORMAL, on_busy=on_busy))) == []
    assert [turn.id for turn in talk.state.queue] == ["s"]


def test_steered_prompt_is_not_sent_when_the_limit_becomes_known_before_its_commit() -> None:
    talk = running()
    talk.is_log_slow = True
    talk.ask(ask("s", NORMAL, on_busy="steer"))
    talk.tell(AccountLimited(talk.at, 900.0))
    talk.is_log_slow = False
    assert sent(talk.commit()) == []
