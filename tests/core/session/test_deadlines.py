"""Deadlines of asks: in the queue, before the prompt is sent, in a running or shared turn, and after a crash."""

from __future__ import annotations

from msgspec.structs import replace
from tests.core.session.scenarios import ask
from tests.core.session.talk import TELLING, Talk, sent

from banksman.core.dialects.meaning import TurnOver
from banksman.core.session import ask_queue, crash_recovery
from banksman.core.session import event as kinds
from banksman.core.session import history as pasts
from banksman.core.session.ask_queue import INTERACTIVE, NORMAL
from banksman.core.session.effects import Append
from banksman.core.session.event import Entry
from banksman.core.session.facts import AskWithdrawn, Begun, LeaveAsked, Timer
from banksman.core.session.outcome import Kind
from banksman.core.session.state import Mode
from banksman.core.session.turn import Ask

A, B = ask("a", NORMAL), ask("b", NORMAL)


def bound(id: str = "late", seconds: float = 10.0, *, priority: int = NORMAL, at: float = 0.0, **others: object) -> Ask:
    """Return an ask that must be over within so many seconds. The Unix time is 1000 at the time 0."""
    return ask(id, priority, deadline=1000.0 + at + seconds, due=at + seconds, **others)


def running(first: Ask) -> Talk:
    talk = Talk(TELLING)
    talk.ask(first)
    talk.begin()
    talk.opens(first.ref)
    return talk


def ended(talk: Talk, id: str) -> tuple[Kind, str | None]:
    return talk.outcomes[id].kind, talk.outcomes[id].clock


def test_queued_ask_is_withdrawn_at_its_deadline_and_never_sent() -> None:
    talk = running(A)
    talk.ask(bound())
    talk.wait(9.0)
    assert talk.outcomes == {}
    talk.wait(1.0)
    assert ended(talk, "late") == (Kind.WITHDRAWN, "deadline")
    talk.over(A.ref)
    assert [frame for frame in sent(talk.effects) if b"late" in frame] == []
    assert talk.logged(kinds.TURN_QUEUED)[1]["deadline"] == 1010.0
    assert talk.logged(kinds.TURN_ENDED)[0]["clock"] == "deadline"


def test_ask_is_withdrawn_at_its_deadline_while_the_agent_starts() -> None:
    talk = Talk(TELLING)
    talk.ask(bound())
    talk.wait(10.0)
    assert ended(talk, "late") == (Kind.WITHDRAWN, "deadline")


def test_granted_turn_that_was_not_sent_ends_at_its_deadline() -> None:
    talk = Talk(TELLING)
    talk.serve(A)
    talk.is_log_slow = True
    talk.ask(bound())
    assert talk.state.turn is not None
    talk.wait(10.0)
    talk.is_log_slow = False
    talk.commit()
    assert ended(talk, "late") == (Kind.WITHDRAWN, "deadline")
    assert [frame for frame in sent(talk.effects) if b"late" in frame] == []


def test_running_turn_is_interrupted_at_its_deadline() -> None:
    talk = running(bound())
    assert [frame[:1] for frame in sent(talk.wait(10.0))] == [b"I"]
    assert talk.logged(kinds.TURN_INTERRUPTED) == [{"cause": "clock", "clock": "deadline"}]
    talk.mean(TurnOver(("late0000",), is_aborted=True))
    talk.hear(b"settled late0000")
    assert ended(talk, "late") == (Kind.INTERRUPTED, "deadline")


def test_deadline_ends_process_that_ignores_the_interrupt() -> None:
    talk = running(bound())
    talk.wait(10.0 + TELLING.drain_seconds)
    talk.die(signal=15)
    assert ended(talk, "late") == (Kind.INTERRUPTED, "deadline")


def test_preempted_ask_is_not_requeued_after_its_deadline() -> None:
    talk = running(bound(on_preempt="requeue"))
    talk.ask(ask("urgent", INTERACTIVE))
    talk.timers = {subject: at for subject, at in talk.timers.items() if subject[0] is Timer.DEADLINE}
    talk.wait(10.0)
    talk.mean(TurnOver(("late0000",), is_aborted=True))
    talk.hear(b"settled late0000")
    assert ended(talk, "late") == (Kind.INTERRUPTED, "deadline")


def test_ask_that_is_over_has_no_deadline() -> None:
    talk = running(bound())
    talk.ask(bound("gone"))
    assert sorted(talk.waits_for(Timer.DEADLINE)) == ["gone", "late"]
    talk.over("late0000")
    talk.over("gone0000")
    assert talk.waits_for(Timer.DEADLINE) == []
    assert set(talk.kinds.values()) == {Kind.DONE}


def test_deadline_of_one_collected_ask_leaves_the_others_queued() -> None:
    talk = running(A)
    talk.ask(bound("first", on_busy="collect"))
    talk.ask(ask("second", NORMAL, on_busy="collect"))
    talk.wait(10.0)
    assert ended(talk, "first") == (Kind.WITHDRAWN, "deadline")
    talk.over(A.ref)
    talk.over("second0000")
    assert talk.kinds["second"] is Kind.DONE


def test_deadline_of_steered_ask_does_not_stop_the_turn_of_others() -> None:
    talk = running(A)
    talk.ask(bound("steered", on_busy="steer"))
    assert sent(talk.wait(10.0)) == []
    # The other caller does not want the turn either, so that nobody does.
    assert [frame[:1] for frame in sent(talk.tell(AskWithdrawn(talk.at, "a")))] == [b"I"]


def test_steered_ask_that_the_agent_reaches_after_its_deadline_names_it() -> None:
    """The agent ends the turn, and would begin the steered prompt, which no caller waits for."""
    talk = running(bound("first", 5.0))
    talk.ask(bound("steered", on_busy="steer"))
    talk.wait(10.0)
    talk.mean(TurnOver(("first0000",), is_aborted=True))
    talk.hear(b"settled first0000")
    assert ended(talk, "first") == (Kind.INTERRUPTED, "deadline")
    talk.opens("steered0000")
    talk.mean(TurnOver(("steered0000",), is_aborted=True))
    talk.hear(b"settled steered0000")
    assert ended(talk, "steered") == (Kind.INTERRUPTED, "deadline")


def entries_of(talk: Talk) -> list[Entry]:
    return [entry for effect in talk.effects if isinstance(effect, Append) for entry in effect.entries]


def recovered(talk: Talk, at: float, wall: float) -> Talk:
    """Return the session on another host, whose clock says `at` at the Unix time `wall`."""
    past = pasts.fold(pasts.beginning(TELLING), entries_of(talk))
    past = pasts.fold(past, crash_recovery.settle(past))
    past = pasts.decode(pasts.encode(past), TELLING)
    queue = ask_queue.restart_waits(past.session.queue, at, wall)
    again = Talk(state=replace(past.session, queue=queue))
    again.at = at
    again.tell(Begun(at))
    return again


def test_deadline_survives_the_host_by_unix_time() -> None:
    talk = running(A)
    talk.ask(bound())
    # Four seconds of Unix time have passed, whatever the other host's clock says.
    again = recovered(talk, at=500.0, wall=1004.0)
    again.wait(5.9)
    assert again.outcomes == {}
    again.wait(0.1)
    assert ended(again, "late") == (Kind.WITHDRAWN, "deadline")


def test_ask_past_its_deadline_is_withdrawn_when_the_session_is_claimed() -> None:
    talk = running(A)
    talk.ask(bound("first", on_busy="collect"))
    talk.ask(bound("second", seconds=100.0, on_busy="collect"))
    again = recovered(talk, at=500.0, wall=1011.0)
    assert ended(again, "first") == (Kind.WITHDRAWN, "deadline")
    assert again.waits_for(Timer.DEADLINE) == ["second"]
    assert again.timers[Timer.DEADLINE, "second"] == 589.0


def test_session_that_has_left_leaves_deadlines_to_the_next_owner() -> None:
    talk = running(A)
    talk.ask(bound())
    talk.tell(LeaveAsked(talk.at))
    talk.over(A.ref)
    talk.die(signal=15)
    assert talk.state.mode is Mode.LEFT
    talk.fire((Timer.DEADLINE, "late"))
    assert "late" not in talk.outcomes
    again = recovered(talk, at=0.0, wall=2000.0)
    assert ended(again, "late") == (Kind.WITHDRAWN, "deadline")
