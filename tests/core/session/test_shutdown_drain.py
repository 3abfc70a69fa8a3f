"""A session that leaves its host: which asks are passed on, and requests that arrive during the leave.

test_step.py explores every order (the scenarios that begin with "a leave"). This file checks single orders in detail.
"""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from tests.core.session.scenarios import ask
from tests.core.session.talk import TELLING, Talk, of, sent

from banksman.core.dialects.meaning import Requested, RequestPurpose, TurnOpened
from banksman.core.process_facts import (
    ProcessGone,
    Started,
    StartFailed,
)
from banksman.core.session import event as kinds
from banksman.core.session.ask_queue import BACKGROUND, INTERACTIVE, NORMAL
from banksman.core.session.effects import (
    Append,
    CloseQuestion,
    Effect,
    EndHold,
    Finish,
    GiveReceipt,
    LeaveInLog,
    Reject,
    SettingTaken,
    StopProcess,
)
from banksman.core.session.event import Event
from banksman.core.session.facts import (
    AppendFailed,
    Asked,
    AskWithdrawn,
    CloseAsked,
    DrainAsked,
    EvictAsked,
    Fact,
    HoldAsked,
    InterruptAsked,
    LeaveAsked,
    ProcessReported,
    SettingAsked,
    Timer,
    TimerFired,
)
from banksman.core.session.outcome import By, Kind
from banksman.core.session.replay import replay
from banksman.core.session.state import Mode, ProcessPhase, Session, Store
from banksman.core.session.step import step
from banksman.core.session.turn import Turn, TurnPhase
from banksman.errors import AgentError, Closed, Moving, NotOwner, StoreError

LEAVE = (Timer.LEAVE, "session")
FULL = StoreError("the disk is full")


def passed_on(effects: list[Effect]) -> list[str]:
    return [effect.turn for effect in of(LeaveInLog, effects)]


def folded(talk: Talk) -> Session:
    """Replay the log."""
    entries = [entry for append in of(Append, talk.effects) for entry in append.entries]
    events = [Event("s", 1, seq, 0.0, *entry) for seq, entry in enumerate(entries, 1)]
    return replay(events, talk.state.config)


def waiting(state: Session) -> list[str]:
    return [each.id for turn in state.queue if isinstance(turn, Turn) for each in turn.asks]


def running() -> Talk:
    """A session with a running turn and two waiting asks."""
    talk = Talk(TELLING)
    talk.ask(ask("a", NORMAL))
    talk.begin()
    talk.opens("a0000")
    for id in ("b", "c"):
        talk.ask(ask(id, NORMAL))
    return talk


def granted() -> Talk:
    """A session with a granted turn whose start is not durable, so no prompt was sent."""
    talk = Talk(TELLING)
    talk.serve(ask("z", NORMAL))
    talk.is_log_slow = True
    talk.ask(ask("a", NORMAL))
    assert talk.state.turn is not None
    assert talk.state.turn.phase is TurnPhase.STARTING
    return talk


# -- running and waiting turns ---------------------------------------------------------------------------------------
def test_leaving_session_finishes_running_turn_and_passes_queue_on() -> None:
    talk = running()
    assert not of(StopProcess, talk.tell(LeaveAsked(0.0)))
    assert talk.state.mode is Mode.LEAVING
    ended = talk.hear(b"over a0000 a0000", b"settled a0000")
    assert talk.kinds == {"a": Kind.DONE}
    assert sent(ended) == [], "nothing new is granted"
    assert of(StopProcess, ended)
    gone = talk.die(signal=15)
    assert [type(effect) for effect in gone if isinstance(effect, LeaveInLog | Finish)] == [
        LeaveInLog,
        LeaveInLog,
        Finish,
    ]
    assert passed_on(gone) == ["b", "c"]
    assert talk.logged(kinds.SESSION_LEFT) == [{"queued": ["b", "c"]}]
    assert not talk.logged(kinds.SESSION_CLOSED)
    assert talk.kinds == {"a": Kind.DONE}, "no outcome is made up"


def test_leaving_session_ignores_a_timer_that_it_did_not_start() -> None:
    talk = running()
    talk.tell(LeaveAsked(0.0))
    before = talk.state
    assert step(before, TimerFired(1.0, (Timer.LEAVE, "nobody"))) == (before, [])


def test_left_session_log_names_queue_and_is_not_closed() -> None:
    talk = running()
    talk.tell(LeaveAsked(0.0))
    talk.hear(b"over a0000 a0000", b"settled a0000")
    talk.die(signal=15)
    found = folded(talk)
    assert found.mode is Mode.OPEN
    assert (found.turn, found.own) == (None, None)
    assert waiting(found) == ["b", "c"]
    assert found.conversation == "talk"


def test_leaving_session_requeues_granted_turn_that_was_not_sent() -> None:
    talk = granted()
    talk.tell(LeaveAsked(0.0))
    assert talk.state.turn is None
    talk.is_log_slow = False
    assert sent(talk.commit()) == []
    gone = talk.die(signal=15)
    assert passed_on(gone) == ["a"]
    assert waiting(folded(talk)) == ["a"]
    assert talk.logged(kinds.TURN_REQUEUED) == [{"attempt": 2}]


@pytest.mark.parametrize("is_there", [True, False])
def test_leaving_session_stops_starting_process_and_passes_its_ask_on(is_there: bool) -> None:
    talk = Talk(TELLING)
    talk.ask(ask("a", NORMAL))
    if is_there:
        talk.tell(ProcessReported(0.0, 1, Started(77, 0.0)))
    assert of(StopProcess, talk.tell(LeaveAsked(0.0)))
    gone = talk.die(signal=15) if is_there else talk.tell(ProcessReported(0.0, 1, ProcessGone()))
    assert passed_on(gone) == ["a"]
    # A failed start does not count against the ask either.
    fails = Talk(TELLING)
    fails.ask(ask("a", NORMAL))
    fails.tell(LeaveAsked(0.0))
    assert passed_on(fails.tell(ProcessReported(0.0, 1, StartFailed(AgentError("no such program"))))) == ["a"]


def test_leaving_session_passes_preempted_turn_on() -> None:
    talk = Talk(TELLING)
    talk.ask(ask("low", BACKGROUND, on_preempt="requeue"))
    talk.begin()
    talk.opens("low0000")
    talk.ask(ask("urgent", INTERACTIVE))
    talk.tell(LeaveAsked(0.0, 0.0))
    assert passed_on(talk.die(signal=15)) == ["urgent", "low"]
    assert waiting(folded(talk)) == ["urgent", "low"]


def test_leaving_session_does_not_wait_for_agent_initiated_turn() -> None:
    talk = Talk(TELLING)
    talk.serve(ask("a", NORMAL))
    talk.mean(TurnOpened(origin="task", can_interrupt=True))
    assert [frame[:11] for frame in sent(talk.tell(LeaveAsked(0.0)))] == [b"I interrupt"]


def test_leaving_session_passes_unsent_steered_prompt_on() -> None:
    talk = Talk(TELLING)
    talk.ask(ask("a", NORMAL))
    talk.begin()
    talk.opens("a0000")
    talk.is_log_slow = True
    talk.ask(ask("more", NORMAL, on_busy="steer"))
    talk.tell(LeaveAsked(0.0, 0.0))
    talk.is_log_slow = False
    assert passed_on(talk.die(signal=15)) == ["more"]
    assert talk.kinds == {"a": Kind.INTERRUPTED}
    assert waiting(folded(talk)) == ["more"]


def test_leaving_session_ends_holds_and_collect_windows() -> None:
    talk = Talk(TELLING)
    talk.tell(HoldAsked(0.0, "h", NORMAL))
    talk.ask(ask("a", NORMAL, hold="h"))
    talk.begin()
    talk.tell(HoldAsked(0.0, "other", NORMAL))
    talk.ask(ask("one", NORMAL, on_busy="collect"))
    talk.ask(ask("two", NORMAL, on_busy="collect"))
    ended = {effect.hold: effect.error for effect in of(EndHold, talk.tell(LeaveAsked(0.0)))}
    assert ended.keys() == {"h", "other"}
    assert ended["h"] is None
    assert isinstance(ended["other"], Moving)
    assert (talk.state.hold, talk.state.collecting) == (None, ())
    talk.over("a0000")
    assert passed_on(talk.die(signal=15)) == ["one", "two"]


def test_leaving_session_keeps_unanswered_setting_for_next_process() -> None:
    talk = Talk(TELLING)
    talk.serve(ask("a", NORMAL))
    talk.tell(SettingAsked(0.0, "c", "model", "large"))
    talk.tell(LeaveAsked(0.0))
    assert of(SettingTaken, talk.die(signal=15)) == [SettingTaken("c")]
    assert folded(talk).settings == (("model", "large"),)


def test_leaving_session_withdraws_questions_with_its_process() -> None:
    talk = running()
    talk.mean(Requested("q", RequestPurpose.PERMISSION, "can_use_tool", "Bash"))
    talk.tell(LeaveAsked(0.0, 0.0))
    gone = talk.die(signal=15)
    assert [effect.question for effect in of(CloseQuestion, gone)] == [talk.named()]
    assert [body["answer"] for body in talk.logged(kinds.QUESTION_ANSWERED)] == ["withdrawn"]
    assert of(Finish, gone)


# -- the deadline ----------------------------------------------------------------------------------------------------
def test_leave_uses_earliest_of_several_deadlines() -> None:
    talk = running()
    for by in (None, 9.0, 5.0, 7.0):
        talk.tell(LeaveAsked(0.0, by))
    assert talk.timers[LEAVE] == 5.0
    talk.at = 5.0
    assert of(StopProcess, talk.fire(LEAVE))
    assert talk.state.mode is Mode.PARTING
    talk.die(signal=15)
    assert talk.kinds == {"a": Kind.INTERRUPTED}
    assert talk.state.mode is Mode.LEFT


def test_leave_with_past_deadline_stops_at_once() -> None:
    talk = running()
    assert of(StopProcess, talk.tell(LeaveAsked(talk.at, talk.at)))
    assert LEAVE not in talk.timers


def test_draining_session_is_closed_by_leave_deadline() -> None:
    talk = running()
    talk.tell(DrainAsked(0.0))
    assert talk.kinds == {"b": Kind.REFUSED, "c": Kind.REFUSED}
    talk.tell(LeaveAsked(0.0, 5.0))
    talk.at = 5.0
    assert of(StopProcess, talk.fire(LEAVE))
    talk.die(signal=15)
    assert talk.state.mode is Mode.CLOSED


def test_drain_of_leaving_session_refuses_nobody() -> None:
    talk = running()
    talk.tell(LeaveAsked(0.0))
    assert talk.tell(DrainAsked(0.0)) == []
    assert waiting(talk.state) == ["b", "c"]


# -- requests at the last moment -------------------------------------------------------------------------------------
def leaving_now(*asks: str) -> Talk:
    """The append of `session.left` is pending."""
    talk = Talk(TELLING)
    for id in asks:
        talk.ask(ask(id, NORMAL))
    talk.tell(LeaveAsked(0.0))
    talk.is_log_slow = True
    talk.tell(ProcessReported(0.0, 1, ProcessGone()))
    assert talk.state.mode is Mode.LEFT
    assert not of(Finish, talk.effects)
    return talk


def test_withdrawal_counts_until_leave_is_durable() -> None:
    for fact in (AskWithdrawn(0.0, "a"), InterruptAsked(0.0, "a", "i")):
        talk = leaving_now("a", "b")
        talk.tell(fact)
        effects = talk.commit()
        assert talk.kinds == {"a": Kind.WITHDRAWN}
        assert passed_on(effects) == ["b"]
        assert isinstance(effects[-1], Finish)
        assert waiting(folded(talk)) == ["b"]
        receipts = [(effect.receipt.stopped, effect.receipt.by) for effect in of(GiveReceipt, effects)]
        assert receipts == ([] if isinstance(fact, AskWithdrawn) else [(True, By.WITHDRAWN)])


def test_close_counts_until_leave_is_durable() -> None:
    talk = leaving_now("a")
    talk.tell(CloseAsked(0.0))
    effects = talk.commit()
    assert talk.kinds == {"a": Kind.REFUSED}
    assert passed_on(effects) == []
    assert len(of(Finish, effects)) == 1
    assert folded(talk).mode is Mode.CLOSED


def test_leave_waits_until_last_ask_is_acknowledged() -> None:
    """Otherwise the ask could be cancelled when no host is left to withdraw it."""
    talk = Talk(TELLING)
    talk.is_log_slow = True
    talk.ask(ask("a", NORMAL))
    talk.tell(LeaveAsked(0.0))
    talk.tell(ProcessReported(0.0, 1, ProcessGone()))
    assert not talk.logged(kinds.SESSION_LEFT)
    talk.commit()
    assert talk.logged(kinds.SESSION_LEFT)
    assert passed_on(talk.commit()) == ["a"]


def test_left_session_rejects_later_facts_unchanged() -> None:
    talk = Talk(TELLING)
    talk.ask(ask("a", NORMAL))
    talk.tell(LeaveAsked(0.0))
    talk.tell(ProcessReported(0.0, 1, ProcessGone()))
    left = talk.state
    answered: list[Fact] = [
        *(Asked(0.0, ask("z", NORMAL)), HoldAsked(0.0, "h", NORMAL), SettingAsked(0.0, "c", "model", "large"))
    ]
    for fact in answered:
        state, (told,) = step(left, fact)
        assert state == left
        assert isinstance(told, Reject | EndHold | SettingTaken)
        assert isinstance(told.error, Moving)
    silent: list[Fact] = [
        *(AskWithdrawn(0.0, "a"), CloseAsked(0.0), DrainAsked(0.0), LeaveAsked(0.0, 0.0), EvictAsked(0.0)),
        # The append of an answer without a caller: the waiting asks belong to another host now.
        *(AppendFailed(0.0, FULL), AppendFailed(0.0, NotOwner("another has it"), is_final=True)),
    ]
    for fact in silent:
        assert step(left, fact) == (left, [])


def test_leaving_session_rejects_new_asks_with_reason() -> None:
    talk = running()
    talk.tell(LeaveAsked(0.0))
    for fact in (Asked(0.0, ask("z", NORMAL)), HoldAsked(0.0, "h", NORMAL), SettingAsked(0.0, "c", "model", "large")):
        (told,) = talk.tell(fact)
        assert isinstance(told, Reject | EndHold | SettingTaken)
        assert isinstance(told.error, Moving)
    talk.tell(CloseAsked(0.0))
    (told,) = talk.tell(Asked(0.0, ask("z", NORMAL)))
    assert isinstance(told, Reject)
    assert isinstance(told.error, Closed)


# -- a log that fails ------------------------------------------------------------------------------------------------
def test_leave_waits_until_failed_outcomes_are_logged() -> None:
    """Otherwise the next host would serve asks whose callers got a failure."""
    talk = leaving_now("a")
    talk.tell(AppendFailed(0.0, FULL))
    assert talk.kinds == {"a": Kind.FAILED}
    assert not of(Finish, talk.effects)
    assert talk.state.mode is Mode.PARTING
    talk.is_log_slow = False
    effects = talk.fire((Timer.STORE, "1"))
    assert talk.logged(kinds.SESSION_LEFT)[-1] == {"queued": []}
    assert passed_on(effects) == []
    assert len(of(Finish, effects)) == 1
    assert [body["outcome"] for body in talk.logged(kinds.TURN_ENDED)] == ["failed"]


def test_leave_with_failed_log_ends_at_deadline() -> None:
    talk = leaving_now("a")
    talk.tell(AppendFailed(0.0, FULL))
    talk.tell(LeaveAsked(0.0, 5.0))
    talk.at = 5.0
    assert len(of(Finish, talk.fire(LEAVE))) == 1
    # If the deadline has passed already, the session ends immediately.
    late = running()
    late.tell(LeaveAsked(0.0, 0.0))
    late.tell(AppendFailed(0.0, FULL))
    assert len(of(Finish, late.die(signal=15))) == 1


def test_leave_ends_at_once_when_session_was_taken_over() -> None:
    talk = leaving_now("a")
    effects = talk.tell(AppendFailed(0.0, NotOwner("another has it"), is_final=True))
    assert talk.state.store is Store.LOST
    assert talk.kinds == {"a": Kind.UNKNOWN}
    assert passed_on(effects) == []
    assert len(of(Finish, effects)) == 1


def test_leaving_session_passes_queue_on_when_its_process_dies() -> None:
    talk = running()
    talk.tell(LeaveAsked(0.0))
    gone = talk.die(code=1, stderr="oh")
    assert talk.kinds == {"a": Kind.FAILED}
    assert passed_on(gone) == ["b", "c"]
    assert talk.state.process.phase is ProcessPhase.NONE


def test_unused_session_leaves_at_once() -> None:
    talk = Talk(replace(TELLING, idle_seconds=60.0))
    assert [type(effect) for effect in talk.tell(LeaveAsked(0.0)) if not isinstance(effect, Append)] == [Finish]
    used = Talk(replace(TELLING, idle_seconds=60.0))
    used.serve(ask("a", NORMAL))
    used.tell(LeaveAsked(0.0))
    assert not used.waits_for(Timer.IDLE)
    assert of(Finish, used.die(signal=15))
