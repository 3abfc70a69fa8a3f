"""Fall-back between turns: which agent serves an ask, when the session changes it, and what each agent keeps."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace
from tests.core.session.scenarios import ask
from tests.core.session.talk import TELLING, Talk, Telling, of

from banksman.core.dialects.meaning import Meaning, ProviderFailure, ToolBegan, ToolEnded, TurnOpened, TurnOver
from banksman.core.process_facts import StartFailed
from banksman.core.session import event as kinds
from banksman.core.session import fallback
from banksman.core.session import history as pasts
from banksman.core.session.ask_queue import BACKGROUND, INTERACTIVE, NORMAL
from banksman.core.session.budget import Budget
from banksman.core.session.effects import Append, CallOnLimit, HoldConversation, ReportLimit, WaitUntil, WriteFrame
from banksman.core.session.event import entry
from banksman.core.session.facts import (
    AccountLimited,
    AppendFailed,
    Asked,
    Begun,
    CloseAsked,
    LeaveAsked,
    ProcessReported,
    Reconfigured,
    SettingAsked,
    Timer,
)
from banksman.core.session.history import SessionHistory
from banksman.core.session.outcome import Kind
from banksman.core.session.session_config import Config
from banksman.core.session.state import AgentState, Mode, ProcessPhase
from banksman.core.session.turn import Turn, queued
from banksman.errors import AgentError, ErrorKind, ProgramNotFound, StoreError


class Second(Telling):
    """The dialect of the second agent, which has another conversation."""

    def read(self, line: bytes) -> Meaning | None:
        meaning = super().read(line)
        if isinstance(meaning, TurnOpened) and meaning.conversation is not None:
            return replace(meaning, conversation="second")
        return meaning


ONE = replace(TELLING, agent="one")
TWO = Config(dialect=Second(), agent="two", capabilities=frozenset(("images",)))
THREE = Config(dialect=Telling(), agent="three")
BOTH = replace(ONE, roster=(ONE, TWO))
ALL = replace(ONE, roster=(ONE, TWO, THREE))
A, B, C = (ask(id, NORMAL) for id in "abc")
LIMIT = ProviderFailure(ErrorKind.USAGE_LIMIT, limited_until=900.0)
MISSING = ProgramNotFound("there is no program one")


def limited(config: Config = BOTH, until: float = 900.0) -> Talk:
    """A session whose first agent has answered once, with its limit."""
    talk = Talk(config)
    meet_limit(talk, "a", until)
    assert talk.kinds == {"a": Kind.FAILED}
    return talk


def meet_limit(talk: Talk, id: str, until: float) -> None:
    failure = replace(LIMIT, limited_until=until)
    talk.serve(ask(id, NORMAL), is_error=True, error="no", failure=failure)


def leave_process(talk: Talk) -> None:
    """End the process that the session has retired."""
    assert talk.state.process.phase is ProcessPhase.STOPPING
    talk.die(signal=15)


def fallen_back(config: Config = BOTH) -> Talk:
    """A session whose second agent has answered an ask."""
    talk = limited(config)
    talk.ask(B)
    leave_process(talk)
    talk.begin()
    talk.over(B.ref)
    assert talk.kinds == {"a": Kind.FAILED, "b": Kind.DONE}
    return talk


def reset(talk: Talk, until: float = 900.0, agent: str = "one") -> None:
    """Let the limit of an agent end."""
    [wait] = [each for each in of(WaitUntil, talk.effects) if each.subject[1] == f"{agent} {until!r}"]
    assert wait.wall == until
    talk.fire(wait.subject)


def changes(talk: Talk) -> list[tuple[str, str, str]]:
    return [(body["from"], body["to"], body["why"]) for body in talk.logged(kinds.SESSION_FELL_BACK)]


def agents(talk: Talk) -> list[str]:
    return [start.agent for start in talk.starts]


def replayed(talk: Talk) -> SessionHistory:
    entries = [each for append in of(Append, talk.effects) for each in append.entries]
    return pasts.fold(pasts.beginning(talk.state.config), entries)


# -- which agent -----------------------------------------------------------------------------------------------------
def test_ask_goes_to_first_agent_while_it_is_available() -> None:
    talk = Talk(BOTH)
    talk.serve(A)
    talk.serve(B)
    assert agents(talk) == ["one"]
    assert not changes(talk)
    assert not of(WaitUntil, talk.effects)


def test_ask_falls_back_while_first_agent_is_limited() -> None:
    talk = limited()
    talk.ask(B)
    # The process of the first agent is retired first, and nothing is sent to it.
    assert talk.logged(kinds.PROCESS_RETIRED) == [{"process": 1, "reason": "fallback"}]
    assert not changes(talk)
    leave_process(talk)
    assert talk.logged(kinds.SESSION_FELL_BACK) == [
        {"from": "one", "to": "two", "why": "limited", "limited_until": 900.0}
    ]
    assert agents(talk) == ["one", "two"]
    talk.begin()
    talk.over(B.ref)
    assert talk.kinds == {"a": Kind.FAILED, "b": Kind.DONE}


def test_change_is_logged_before_turn_is_started() -> None:
    talk = fallen_back()
    logged = [kind for append in of(Append, talk.effects) for _, kind, _ in append.entries]
    assert (
        logged.index(kinds.SESSION_FELL_BACK)
        < [index for index, kind in enumerate(logged) if kind == kinds.TURN_STARTED][1]
    )


def test_next_ask_goes_back_once_limit_has_ended() -> None:
    talk = fallen_back()
    reset(talk)
    # The reset alone changes nothing: the process may have background tasks, and no ask needs another one.
    assert talk.state.process.phase is ProcessPhase.READY
    talk.ask(C)
    leave_process(talk)
    assert changes(talk)[1:] == [("two", "one", "available again")]
    assert agents(talk) == ["one", "two", "one"]
    talk.begin()
    talk.over(C.ref)
    assert talk.kinds["c"] is Kind.DONE


def test_early_timer_of_another_limit_does_not_end_the_wait() -> None:
    talk = fallen_back()
    talk.fire((Timer.FALLBACK, "one 800.0"))
    talk.fire((Timer.FALLBACK, "two 900.0"))
    talk.serve(C)
    assert agents(talk) == ["one", "two"]


def test_asks_go_to_agent_that_resets_first_when_all_are_limited() -> None:
    talk = fallen_back()
    meet_limit(talk, "c", 500.0)
    talk.serve(ask("d", NORMAL))
    assert agents(talk) == ["one", "two"]
    assert talk.kinds["d"] is Kind.DONE
    meet_limit(talk, "e", 1000.0)
    talk.ask(ask("f", NORMAL))
    leave_process(talk)
    assert agents(talk) == ["one", "two", "one"]
    assert changes(talk)[-1] == ("two", "one", "limited")


def test_missing_agent_is_passed_over_until_reopen() -> None:
    talk = Talk(BOTH)
    talk.ask(A)
    talk.tell(ProcessReported(talk.at, 1, StartFailed(MISSING)))
    assert changes(talk) == [("one", "two", "missing")]
    assert agents(talk) == ["one", "two"]
    talk.begin()
    talk.over(A.ref)
    assert talk.kinds == {"a": Kind.DONE}
    assert not talk.logged(kinds.PROCESS_BACKED_OFF)
    talk.serve(B)
    assert agents(talk) == ["one", "two"]
    talk.tell(Reconfigured(talk.at, BOTH, False))
    talk.ask(C)
    leave_process(talk)
    assert changes(talk)[-1] == ("two", "one", "available again")


def test_ask_fails_when_no_agent_is_installed() -> None:
    talk = Talk(BOTH)
    talk.ask(A)
    for number in (1, 2):
        talk.tell(ProcessReported(talk.at, number, StartFailed(MISSING)))
    assert talk.kinds == {"a": Kind.FAILED}
    assert talk.outcomes["a"].error is MISSING
    assert agents(talk) == ["one", "two"]


def test_failed_start_for_another_reason_does_not_fall_back() -> None:
    talk = Talk(BOTH)
    talk.ask(A)
    talk.tell(ProcessReported(talk.at, 1, StartFailed(AgentError("no memory"))))
    assert talk.kinds == {"a": Kind.FAILED}
    assert not changes(talk)


def test_third_agent_serves_when_first_is_limited_and_second_is_missing() -> None:
    talk = limited(ALL)
    talk.ask(B)
    leave_process(talk)
    talk.tell(ProcessReported(talk.at, 2, StartFailed(MISSING)))
    assert changes(talk) == [("one", "two", "limited"), ("two", "three", "missing")]
    assert agents(talk) == ["one", "two", "three"]


def test_ask_goes_only_to_agent_that_supports_it() -> None:
    talk = limited()
    exact = replace(B, schema={"type": "object"})
    talk.ask(exact)
    leave_process(talk)  # Its answers have no schema.
    assert agents(talk) == ["one", "one"]
    picture = [{"type": "image", "data": "", "mimeType": "image/png"}]
    assert fallback.can_serve(TWO, _turn(prompt=picture))
    assert not fallback.can_serve(TWO, _turn(prompt=[{"type": "audio"}]))
    assert not fallback.can_serve(TWO, _turn(schema={}))
    assert fallback.can_serve(THREE, _turn(schema={}, prompt=[{"type": "audio"}]))


def _turn(**members: Any) -> Turn:
    return queued(replace(A, **members))


def test_steered_ask_is_queued_when_serving_agent_cannot_steer() -> None:
    deaf = Telling()
    deaf.can_steer = False
    talk = fallen_back(replace(ONE, roster=(ONE, replace(TWO, dialect=deaf))))
    talk.ask(C)
    talk.opens(C.ref)
    talk.ask(ask("d", NORMAL, on_busy="steer"))
    assert [turn.id for turn in talk.state.queue] == ["d"]


# -- never within a turn, never a sent ask ---------------------------------------------------------------------------
def test_limit_within_turn_changes_nothing_before_its_end() -> None:
    talk = Talk(BOTH)
    talk.ask(A)
    talk.begin()
    talk.opens(A.ref)
    talk.ask(B)
    talk.hear(b"limit")
    assert talk.state.limited_until == 9.0
    assert talk.state.process.phase is ProcessPhase.READY
    talk.hear(b"over a0000 a0000", b"settled a0000")
    # The answer shows that the account is not limited any more.
    assert talk.kinds == {"a": Kind.DONE}
    assert agents(talk) == ["one"]


def test_agent_initiated_turn_is_not_cut_by_change() -> None:
    talk = limited()
    talk.hear(b"own")
    talk.ask(ask("b", BACKGROUND))
    assert talk.state.process.phase is ProcessPhase.READY
    talk.mean(TurnOver(origin="task", is_error=True))
    leave_process(talk)
    assert agents(talk) == ["one", "two"]


def test_preempted_ask_stays_with_agent_that_got_it() -> None:
    talk = Talk(BOTH)
    talk.ask(ask("low", BACKGROUND, on_preempt="requeue"))
    talk.begin()
    talk.opens("low0000")
    talk.mean(ToolBegan(("t1",)))
    talk.ask(ask("urgent", INTERACTIVE))
    talk.hear(b"ok interrupt-low#1-1", b"over low0000! low0000", b"cancelled low0000")
    talk.opens("urgent0000")
    talk.mean(TurnOver(("urgent0000",), is_error=True, error="no", failure=LIMIT))
    talk.hear(b"settled urgent0000")
    assert talk.kinds == {"urgent": Kind.FAILED}
    # The second attempt of `low` goes to the same agent, although it is limited; a new ask does not.
    assert [body["agent"] for body in talk.logged(kinds.TURN_REQUEUED)] == ["one"]
    assert talk.state.turn is not None
    assert talk.state.turn.id == "low"
    assert agents(talk) == ["one"]


def test_pin_of_preempted_ask_survives_restart() -> None:
    talk = Talk(BOTH)
    talk.ask(ask("low", BACKGROUND, on_preempt="requeue"))
    talk.begin()
    talk.opens("low0000")
    talk.ask(ask("urgent", INTERACTIVE))
    talk.hear(b"ok interrupt-low#1-1", b"over low0000! low0000", b"cancelled low0000")
    past = replayed(talk)
    again = pasts.decode(pasts.encode(past), BOTH)
    assert [turn.agent for turn in again.session.queue if isinstance(turn, Turn)] == ["one"]


def test_ask_of_removed_agent_fails() -> None:
    talk = fallen_back()
    talk.ask(ask("low", BACKGROUND, on_preempt="requeue"))
    talk.opens("low0000")
    talk.ask(ask("urgent", INTERACTIVE))
    talk.tell(Reconfigured(talk.at, replace(ONE, roster=(ONE,)), True))
    talk.hear(b"ok interrupt-low#1-1", b"over low0000! low0000", b"cancelled low0000")
    leave_process(talk)
    assert changes(talk)[-1] == ("two", "one", "removed")
    talk.begin()
    talk.over("urgent0000")
    assert talk.kinds["low"] is Kind.FAILED
    assert "two" in str(talk.outcomes["low"].error)


def without_second(**changes: Any) -> Reconfigured:
    """The reopen that removes the second agent."""
    one = replace(ONE, **changes)
    return Reconfigured(0.0, replace(one, roster=(one,)), True)


def test_reopen_that_removes_the_serving_agent_applies_its_budget() -> None:
    one, two = (replace(each, budget=Budget(turns=2)) for each in (ONE, TWO))
    talk = fallen_back(replace(one, roster=(one, two)))
    talk.ask(C)
    assert talk.state.turn is None
    talk.tell(without_second(budget=Budget(turns=100), queue_max=7))
    config = talk.state.config
    assert (config.agent, config.dialect, config.queue_max) == ("two", TWO.dialect, 7)
    leave_process(talk)
    talk.begin()
    talk.over(C.ref)
    assert talk.kinds["c"] is Kind.DONE
    assert agents(talk) == ["one", "two", "one"]


def test_removed_agent_without_process_is_left_at_once() -> None:
    talk = fallen_back()
    talk.die(code=0)
    talk.tell(without_second(queue_max=7))
    assert changes(talk)[-1] == ("two", "one", "removed")
    assert (talk.state.agent, talk.state.config.agent, talk.state.config.queue_max) == ("one", "one", 7)


def test_reopen_drops_settings_of_the_first_agent_only() -> None:
    talk = Talk(BOTH)
    talk.tell(SettingAsked(0.0, "c1", "model", "large"))
    meet_limit(talk, "a", 900.0)
    talk.ask(B)
    leave_process(talk)
    talk.begin()
    talk.over(B.ref)
    talk.tell(SettingAsked(0.0, "c2", "model", "small"))
    talk.hear(b"ok setting-2-1")
    talk.tell(SettingAsked(0.0, "c3", "model", "tiny"))
    talk.tell(Reconfigured(0.0, BOTH, False, ("model",)))
    # The change that the serving agent has not answered is not dropped either.
    assert [change.id for change in talk.state.process.changes] == ["c3"]
    for state in (talk.state, replayed(talk).session):
        assert state.settings == (("model", "small"),)
        assert dict(state.agents)["one"].settings == ()


def test_background_tasks_keep_a_fallback_that_serves_well() -> None:
    talk = fallen_back()
    talk.hear(b"tasks t1")
    reset(talk)
    talk.serve(C)
    assert agents(talk) == ["one", "two"]
    talk.hear(b"tasks")
    talk.ask(ask("d", NORMAL))
    leave_process(talk)
    assert agents(talk) == ["one", "two", "one"]


def test_start_that_waits_for_place_is_given_up_for_change() -> None:
    talk = limited()
    talk.die(code=0)
    reset(talk)
    talk.ask(B)  # A process of the first agent was requested and has no place yet.
    assert agents(talk) == ["one", "one"]
    talk.state = replace(talk.state, limited_until=1000.0)
    talk.tell(Begun(talk.at))
    assert talk.state.process.phase is ProcessPhase.STOPPING


# -- waiting for limits --------------------------------------------------------------------------------------------
def waiting(config: Config = BOTH) -> Config:
    roster = tuple(replace(each, on_limit="wait") for each in config.roster)
    return replace(config, on_limit="wait", roster=roster)


def test_ask_that_met_limit_without_effect_falls_back() -> None:
    talk = Talk(waiting())
    meet_limit(talk, "a", 900.0)
    assert not talk.outcomes
    assert talk.state.limit_wait is None
    leave_process(talk)
    talk.begin()
    assert agents(talk) == ["one", "two"]
    [turn] = [each for each in (talk.state.turn,) if each is not None]
    assert (turn.id, turn.attempt) == ("a", 2)
    talk.over(turn.ref)
    assert talk.kinds == {"a": Kind.DONE}


def test_ask_whose_tool_ran_fails_and_only_next_one_falls_back() -> None:
    talk = Talk(waiting())
    talk.ask(A)
    talk.begin()
    talk.opens(A.ref)
    talk.mean(ToolBegan(("t1",)), ToolEnded(("t1",)))
    talk.mean(TurnOver((A.ref,), is_error=True, error="no", failure=LIMIT))
    talk.hear(b"settled a0000")
    assert talk.kinds == {"a": Kind.FAILED}
    talk.ask(B)
    leave_process(talk)
    talk.begin()
    talk.over(B.ref)
    assert talk.kinds == {"a": Kind.FAILED, "b": Kind.DONE}


def test_queue_waits_for_agent_that_resets_first_when_all_are_limited() -> None:
    talk = Talk(waiting())
    meet_limit(talk, "a", 900.0)
    leave_process(talk)
    talk.begin()
    assert talk.state.turn is not None
    ref = talk.state.turn.ref
    talk.opens(ref)
    talk.mean(TurnOver((ref,), is_error=True, error="no", failure=replace(LIMIT, limited_until=500.0)))
    talk.hear(b"settled " + ref.encode())
    # Both are limited: the queue waits for the second agent, and nothing is sent meanwhile.
    assert not talk.outcomes
    assert talk.state.limit_wait is not None
    assert talk.state.limit_wait.until == 500.0
    talk.effects.clear()
    talk.ask(B)
    assert not of(WriteFrame, talk.effects)
    assert not talk.starts
    talk.fire((Timer.LIMIT, "500.0"))
    assert [turn.id for turn in (talk.state.turn,) if turn is not None] == ["a"]


def test_wait_ends_when_another_agent_is_available_again() -> None:
    talk = Talk(waiting())
    talk.state = replace(
        fallback.switched(talk.state, "one", "two"),
        limited_until=900.0,
        agents=(("one", AgentState(limited_until=990.0)),),
    )
    talk.ask(A)
    assert talk.state.limit_wait is not None
    assert not talk.starts
    talk.fire((Timer.FALLBACK, "one 990.0"))
    assert talk.state.limit_wait is None
    assert agents(talk) == ["one"]


def test_ask_that_fallback_cannot_serve_waits_for_limited_agent() -> None:
    talk = Talk(waiting())
    talk.state = replace(talk.state, limited_until=900.0)
    talk.ask(replace(A, schema={"type": "object"}))
    assert not talk.starts
    talk.fire((Timer.FALLBACK, "one 900.0"))
    assert agents(talk) == ["one"]


def test_function_is_called_with_the_agent_that_is_limited() -> None:
    roster = tuple(replace(each, on_limit="call") for each in BOTH.roster)
    talk = Talk(replace(roster[0], roster=roster))
    meet_limit(talk, "a", 900.0)
    leave_process(talk)
    talk.begin()
    talk.tell(AccountLimited(talk.at, 800.0, "two"))
    assert [call.agent for call in of(CallOnLimit, talk.effects)] == ["two"]


def test_agent_that_names_a_passed_reset_again_is_left_for_fallback() -> None:
    talk = Talk(waiting())
    talk.tell(AccountLimited(talk.at, 900.0, "one"))
    reset(talk)
    meet_limit(talk, "a", 900.0)
    assert of(WaitUntil, talk.effects)[-1].seconds_min == fallback.RESEND_SECONDS
    leave_process(talk)
    assert agents(talk) == ["one", "two"]


EXACT = replace(ask("x", NORMAL), schema={"type": "object"})


def waiting_for_one(**members: Any) -> Talk:
    """A session with an ask that only its limited first agent supports."""
    talk = Talk(waiting())
    talk.serve(A)
    talk.tell(AccountLimited(talk.at, 900.0, "one"))
    talk.ask(replace(EXACT, **members))
    return talk


def test_ask_that_waits_for_one_agent_does_not_block_others() -> None:
    talk = waiting_for_one()
    assert talk.state.idle_since is not None  # It needs no process.
    talk.ask(B)
    leave_process(talk)
    talk.begin()
    talk.over(B.ref)
    assert talk.kinds == {"a": Kind.DONE, "b": Kind.DONE}
    assert talk.state.idle_since is not None
    reset(talk)
    leave_process(talk)
    assert agents(talk) == ["one", "two", "one"]


def test_ask_that_waits_for_one_agent_neither_preempts_nor_interrupts() -> None:
    talk = waiting_for_one()
    talk.ask(ask("low", BACKGROUND, on_preempt="requeue"))
    leave_process(talk)
    talk.begin()
    talk.opens("low0000")
    talk.ask(replace(EXACT, id="u", ref="u0000", priority=INTERACTIVE))
    talk.ask(replace(EXACT, id="v", ref="v0000", on_busy="interrupt"))
    assert talk.state.turn is not None
    assert talk.state.turn.cause is None


def test_ask_of_removed_limited_agent_fails_and_does_not_wait() -> None:
    talk = Talk(waiting())
    talk.state = replace(
        talk.state,
        agents=(("gone", AgentState(limited_until=900.0)),),
        queue=(replace(_turn(), agent="gone"),),
    )
    talk.tell(Begun(talk.at))
    assert talk.kinds == {"a": Kind.FAILED}


def test_deadline_of_ask_that_waits_for_one_agent_names_the_limit() -> None:
    talk = waiting_for_one(due=10.0, deadline=10.0)
    talk.wait(20.0)
    error = talk.outcomes["x"].error
    assert isinstance(error, AgentError)
    assert (talk.kinds["x"], error.limited_until) == (Kind.WITHDRAWN, 900.0)


def test_granted_turn_of_one_agent_is_put_back_when_limit_becomes_known() -> None:
    config = waiting()
    talk = Talk(config)
    talk.serve(A)
    talk.is_log_slow = True
    talk.ask(replace(B, prompt=[{"type": "audio"}]))
    talk.tell(AccountLimited(talk.at, 900.0, "one"))
    talk.is_log_slow = False
    talk.effects.clear()
    talk.commit()
    assert not of(WriteFrame, talk.effects)
    assert [turn.id for turn in talk.state.queue] == ["b"]


def test_granted_turn_is_put_back_when_limit_becomes_known_before_its_prompt() -> None:
    talk = Talk(waiting())
    talk.ask(A)
    talk.is_log_slow = True
    talk.begin()
    talk.tell(AccountLimited(talk.at, 900.0, "one"))
    talk.is_log_slow = False
    talk.effects.clear()
    talk.commit()
    assert not of(WriteFrame, talk.effects)
    leave_process(talk)
    assert agents(talk) == ["two"]


def test_account_of_other_agent_is_noted_and_replayed() -> None:
    talk = fallen_back()
    talk.tell(AccountLimited(talk.at, 1500.0, "one"))
    assert talk.state.limited_until is None
    assert dict(talk.state.agents)["one"].limited_until == 1500.0
    assert replayed(talk).session.agents == talk.state.agents
    assert WaitUntil(1500.0, (Timer.FALLBACK, "one 1500.0"), "one") in talk.effects
    talk.tell(AccountLimited(talk.at, None, "one"))
    talk.ask(C)
    leave_process(talk)
    assert agents(talk) == ["one", "two", "one"]


def test_turn_that_began_before_the_limit_does_not_lift_it_while_fallback_is_free() -> None:
    talk = Talk(waiting())
    talk.ask(A)
    talk.begin()
    talk.opens(A.ref)
    talk.tell(AccountLimited(talk.at, 900.0, "one"))
    talk.over(A.ref)
    assert talk.kinds == {"a": Kind.DONE}
    assert not of(ReportLimit, talk.effects)


def test_limits_are_reported_for_their_agent() -> None:
    talk = fallen_back()
    meet_limit(talk, "c", 500.0)
    assert of(ReportLimit, talk.effects) == [ReportLimit(900.0, "one"), ReportLimit(500.0, "two")]


# -- what each agent keeps -------------------------------------------------------------------------------------------
def test_each_agent_resumes_its_own_conversation() -> None:
    talk = fallen_back()
    assert talk.state.conversation == "second"
    reset(talk)
    talk.ask(C)
    leave_process(talk)
    assert [start.conversation for start in talk.starts] == [None, None, "talk"]
    talk.begin()
    talk.over(C.ref)
    meet_limit(talk, "d", 2000.0)
    talk.ask(ask("e", NORMAL))
    leave_process(talk)
    assert talk.starts[-1].agent == "two"
    assert talk.starts[-1].conversation == "second"


def test_lease_is_given_up_at_change() -> None:
    talk = limited()
    talk.ask(B)
    talk.effects.clear()
    leave_process(talk)
    assert of(HoldConversation, talk.effects) == [HoldConversation(None)]


def test_settings_cost_and_limits_belong_to_one_agent() -> None:
    talk = limited()
    talk.state = replace(talk.state, settings=(("model", "large"),), spent=2.0, crashes=1)
    talk.ask(B)
    leave_process(talk)
    state = talk.state
    assert (state.settings, state.spent, state.limited_until, state.crashes) == ((), 0.0, None, 0)
    assert talk.starts[-1].settings == ()
    parked = dict(state.agents)["one"]
    assert (parked.settings, parked.spent, parked.limited_until) == ((("model", "large"),), 2.0, 900.0)


def test_crashes_of_one_agent_do_not_delay_the_other() -> None:
    talk = limited()
    talk.die(code=1)
    talk.state = replace(talk.state, is_backing_off=True, crashes=4)
    talk.ask(B)
    assert agents(talk) == ["one", "two"]
    assert not talk.state.is_backing_off


# -- the log ---------------------------------------------------------------------------------------------------------
def test_agents_are_replayed_and_saved() -> None:
    talk = fallen_back()
    past = replayed(talk)
    assert past.session.agent == "two"
    assert past.session.config == replace(TWO, roster=BOTH.roster)
    assert past.session.agents == talk.state.agents
    assert past.session.conversation == talk.state.conversation == "second"
    again = pasts.decode(pasts.encode(past), BOTH)
    assert again == past


def test_reader_without_roster_replays_the_same() -> None:
    talk = fallen_back()
    reset(talk)
    talk.ask(C)
    leave_process(talk)
    entries = [each for append in of(Append, talk.effects) for each in append.entries]
    plain = pasts.fold(pasts.beginning(Config(dialect=Telling())), entries).session
    known = replayed(talk).session
    for name in ("agent", "agents", "conversation", "limited_until", "spent"):
        assert getattr(plain, name) == getattr(known, name), name


def test_limit_is_awaited_again_after_restart() -> None:
    talk = fallen_back()
    past = replayed(talk)
    again = Talk(state=past.session)
    again.tell(Begun(again.at))
    assert of(WaitUntil, again.effects) == [WaitUntil(900.0, (Timer.FALLBACK, "one 900.0"), "one")]
    again.ask(C)
    assert agents(again) == ["two"]
    assert again.starts[-1].conversation == "second"


def test_imported_copy_forks_conversation_of_each_agent() -> None:
    past = replayed(fallen_back())
    copied = pasts.fold(past, [entry(None, kinds.SESSION_IMPORTED, session="s", epoch=1, seq=1, host="")]).session
    parked = dict(copied.agents)["one"]
    assert (copied.conversation, copied.fork_of, copied.is_adopted) == (None, "second", True)
    assert (parked.conversation, parked.fork_of, parked.is_adopted) == (None, "talk", True)
    assert (parked.limited_until, parked.limits) == (None, ())


def test_change_lost_by_broken_log_is_logged_again() -> None:
    talk = limited()
    talk.is_log_slow = True
    durable = len([each for append in of(Append, talk.effects) for each in append.entries])
    talk.ask(B)
    leave_process(talk)
    assert fallback.current(talk.state) == "two"
    entries = [each for append in of(Append, talk.effects) for each in append.entries][:durable]
    talk.effects.clear()
    talk.tell(AppendFailed(talk.at, StoreError("the disk is full")))
    talk.wait(60.0)
    for _ in range(3):
        talk.commit()
    entries += [each for append in of(Append, talk.effects) for each in append.entries]
    session = pasts.fold(pasts.beginning(BOTH), _kept(entries)).session
    assert session.agent == "two"
    assert dict(session.agents)["one"].conversation == "talk"
    assert dict(session.agents)["one"].limited_until == 900.0
    assert session.conversation is None


def test_each_agent_keeps_its_cost_when_log_loses_fall_back() -> None:
    talk = Talk(BOTH)
    talk.serve(ask("z", NORMAL), spent=5.0)
    meet_limit(talk, "a", 900.0)
    talk.ask(B)
    talk.is_log_slow = True
    leave_process(talk)
    entries = [each for append in of(Append, talk.effects) for each in append.entries][: talk.state.committed]
    assert fallback.current(talk.state) == "two"
    talk.effects.clear()
    talk.tell(AppendFailed(talk.at, StoreError("the disk is full")))
    talk.is_log_slow = False
    talk.wait(5.0)
    entries += [each for append in of(Append, talk.effects) for each in append.entries]
    session = pasts.fold(pasts.beginning(BOTH), entries).session
    assert (session.agent, session.spent, dict(session.agents)["one"].spent) == ("two", 0.0, 5.0)


def _kept(entries: list[Any]) -> list[Any]:
    """The entries that are not about turns: retries of the log repeat those."""
    return [each for each in entries if each[1].startswith(("session.", "limits."))]


# -- shutdown --------------------------------------------------------------------------------------------------------
def test_close_while_process_of_other_agent_ends() -> None:
    talk = limited()
    talk.ask(B)
    talk.tell(CloseAsked(talk.at))
    leave_process(talk)
    assert talk.kinds == {"a": Kind.FAILED, "b": Kind.REFUSED}
    assert talk.state.mode is Mode.CLOSED
    assert not changes(talk)


def test_leave_hands_ask_over_without_change() -> None:
    talk = limited()
    talk.ask(B)
    talk.tell(LeaveAsked(talk.at))
    leave_process(talk)
    assert talk.state.mode is Mode.LEFT
    past = replayed(talk)
    again = Talk(state=past.session)
    again.tell(Begun(again.at))
    assert changes(again) == [("one", "two", "limited")]


def test_nothing_is_written_to_agent_that_is_left() -> None:
    talk = limited()
    talk.effects.clear()
    talk.tell(Asked(talk.at, B))
    assert not of(WriteFrame, talk.effects)
    assert talk.state.process.was_told_to_stop
