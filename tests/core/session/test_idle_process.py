"""Idle processes, old processes, and processes that fail."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace
from tests.core.session.scenarios import ask
from tests.core.session.talk import TELLING, Talk, of, sent

from banksman.core.dialects.dialect import DENIED
from banksman.core.dialects.meaning import (
    BackgroundTask,
    Replied,
    Requested,
    RequestPurpose,
    TasksChanged,
    TurnOpened,
    TurnOver,
)
from banksman.core.process_facts import (
    FrameWritten,
    ProcessGone,
    Started,
    StartFailed,
)
from banksman.core.session import event as kinds
from banksman.core.session.ask_queue import BACKGROUND, NORMAL
from banksman.core.session.effects import AskToSave, Effect, ReportIdle, ReportReady, StartProcess, StopProcess
from banksman.core.session.facts import (
    AskWithdrawn,
    CallbackAnswered,
    CloseAsked,
    EvictAsked,
    HoldAsked,
    HoldReleased,
    InterruptAsked,
    ProcessReported,
    QuestionAnswered,
    Reconfigured,
    SettingAsked,
    Timer,
)
from banksman.core.session.outcome import Kind
from banksman.core.session.session_config import Config
from banksman.core.session.state import ProcessPhase, Replacement
from banksman.errors import MachineError

A, B, C = (ask(name, NORMAL) for name in "abc")
IDLE = replace(TELLING, idle_seconds=10.0)
SAW = Requested("q", RequestPurpose.PERMISSION, "can_use_tool", "saw")
HOOK = Requested("c", RequestPurpose.HOOK, "hook_callback", "h")


def rested(config: Config = IDLE) -> Talk:
    talk = Talk(config)
    talk.serve(A)
    return talk


def stopped(effects: list[Effect]) -> bool:
    return bool(of(StopProcess, effects))


def retired(talk: Talk) -> list[str]:
    return [body["reason"] for body in talk.logged(kinds.PROCESS_RETIRED)]


# -- idle ------------------------------------------------------------------------------------------------------------
def test_process_reports_ready_and_idle_to_pool() -> None:
    talk = Talk(TELLING)
    talk.ask(A)
    talk.tell(ProcessReported(0.0, 1, Started(77, 0.0)))
    assert not of(ReportReady, talk.effects)
    assert of(ReportReady, talk.hear(b"ok handshake-1")) == [ReportReady(1)]
    assert not of(ReportIdle, talk.effects)
    talk.at = 3.0
    assert len(of(ReportIdle, talk.over("a0000"))) == 1
    assert talk.state.idle_since == 3.0
    # The session reports once for each idle period, not for each fact in it.
    talk.at = 4.0
    assert not of(ReportIdle, talk.hear(b"text"))
    assert talk.state.idle_since == 3.0
    talk.ask(B)
    assert talk.state.idle_since is None
    talk.at = 5.0
    assert len(of(ReportIdle, talk.over("b0000"))) == 1
    assert talk.state.idle_since == 5.0


def test_idle_process_is_retired_and_next_ask_resumes() -> None:
    talk = rested()
    assert talk.waits_for(Timer.IDLE) == ["1.1"]
    assert not stopped(talk.wait(9.9))
    assert stopped(talk.wait(0.1))
    assert retired(talk) == ["idle"]
    talk.die(signal=15)
    assert talk.state.crashes == 0
    assert of(StartProcess, talk.ask(B)) == [StartProcess(2, "talk")]
    talk.begin()
    talk.over("b0000")
    assert talk.kinds == {"a": Kind.DONE, "b": Kind.DONE}


def test_ask_during_retirement_is_served_by_next_process() -> None:
    talk = rested()
    talk.wait(10.0)
    assert not of(StartProcess, talk.ask(B))
    assert of(StartProcess, talk.die(signal=15)) == [StartProcess(2, "talk")]
    talk.begin()
    talk.over("b0000")
    assert talk.kinds["b"] is Kind.DONE


def test_idle_timer_of_earlier_rest_does_not_end_later_one() -> None:
    talk = rested()
    talk.at = 9.0
    talk.ask(B)
    assert not talk.waits_for(Timer.IDLE)
    talk.over("b0000")
    assert talk.waits_for(Timer.IDLE) == ["1.2"]
    talk.at = 10.0
    assert talk.fire((Timer.IDLE, "1.1")) == []
    assert stopped(talk.fire((Timer.IDLE, "1.2")))


def test_idle_process_is_kept_without_limit() -> None:
    talk = rested(TELLING)
    assert not talk.waits_for(Timer.IDLE)
    assert not stopped(talk.wait(1e6))


def test_process_is_evicted_only_while_idle() -> None:
    talk = Talk(TELLING)
    assert talk.tell(EvictAsked(0.0)) == []
    talk.ask(A)
    assert talk.tell(EvictAsked(0.0)) == []
    talk.begin()
    assert talk.tell(EvictAsked(0.0)) == []
    talk.opens("a0000")
    assert talk.tell(EvictAsked(0.0)) == []
    talk.hear(b"over a0000 a0000", b"settled a0000")
    assert stopped(talk.tell(EvictAsked(0.0)))
    assert retired(talk) == ["evicted"]
    assert talk.tell(EvictAsked(0.0)) == []
    assert talk.state.idle_since is None


# The needs of a process: how each begins, and how it ends.
NEEDS: dict[str, tuple[Callable[[Talk], object], Callable[[Talk], object]]] = {
    "task": (lambda talk: talk.mean(TasksChanged((BackgroundTask("t"),))), lambda talk: talk.mean(TasksChanged(()))),
    "question": (lambda talk: talk.mean(SAW), lambda talk: talk.tell(QuestionAnswered(talk.at, talk.named(), DENIED))),
    "callback": (lambda talk: talk.mean(HOOK), lambda talk: talk.tell(CallbackAnswered(talk.at, 1, "c", {}))),
    "setting": (
        lambda talk: talk.tell(SettingAsked(talk.at, "c", "model", "large")),
        lambda talk: talk.mean(Replied("setting-1-1")),
    ),
    "hold": (
        lambda talk: talk.tell(HoldAsked(talk.at, "h", NORMAL)),
        lambda talk: talk.tell(HoldReleased(talk.at, "h")),
    ),
    "own turn": (
        lambda talk: talk.mean(TurnOpened(origin="task", can_interrupt=True)),
        lambda talk: talk.mean(TurnOver(origin="task")),
    ),
    "queue": (
        lambda talk: talk.ask(replace(B, on_busy="collect")),
        lambda talk: (talk.fire((Timer.COLLECT, "b")), talk.over("b0000")),
    ),
}


@pytest.mark.parametrize("need", NEEDS)
def test_needed_process_is_neither_evicted_nor_idle(need: str) -> None:
    begin, end = NEEDS[need]
    # A short time in which no other timer fires: a hold and a setting have their own timers.
    talk = rested(replace(IDLE, idle_seconds=0.25))
    begin(talk)
    assert talk.state.idle_since is None
    assert not stopped(talk.tell(EvictAsked(0.0)))
    assert not stopped(talk.wait(0.25))
    end(talk)
    assert talk.state.idle_since is not None
    assert stopped(talk.wait(0.25))


def test_process_with_unacknowledged_interrupt_is_not_idle() -> None:
    """The interrupt would hit the next turn, so the session watches the process until it has answered."""
    talk = Talk(IDLE)
    talk.ask(A)
    talk.begin()
    talk.opens("a0000")
    talk.tell(InterruptAsked(0.0, "a", "i"))
    talk.hear(b"over a0000! a0000", b"cancelled a0000")
    assert talk.kinds == {"a": Kind.INTERRUPTED}
    assert talk.state.idle_since is None
    assert talk.tell(EvictAsked(0.0)) == []
    assert len(of(ReportIdle, talk.hear(b"ok interrupt-a#1-1"))) == 1


def test_process_with_unsent_frames_is_not_idle() -> None:
    talk = rested()
    talk.is_pipe_full = True
    talk.mean(
        replace(SAW, request="one", wants=RequestPurpose.UNKNOWN),
        replace(SAW, request="two", wants=RequestPurpose.UNKNOWN),
    )
    assert talk.state.idle_since is None
    assert len(of(ReportIdle, talk.tell(ProcessReported(0.0, 1, FrameWritten())))) == 1


def test_closed_session_is_not_idle() -> None:
    talk = rested()
    talk.tell(CloseAsked(0.0))
    assert talk.state.idle_since is None
    assert not talk.waits_for(Timer.IDLE)
    assert talk.tell(EvictAsked(0.0)) == []


# -- old -------------------------------------------------------------------------------------------------------------
OLD = replace(TELLING, recycle_seconds=60.0)


def test_old_process_is_replaced_when_idle() -> None:
    talk = rested(OLD)
    assert talk.waits_for(Timer.AGE) == ["1"]
    assert not stopped(talk.wait(59.9))
    assert stopped(talk.wait(0.1))
    talk.die(signal=15)
    assert of(StartProcess, talk.ask(B)) == [StartProcess(2, "talk")]
    # The next process has its own age.
    talk.begin()
    assert talk.waits_for(Timer.AGE) == ["2"]


def test_old_process_ends_its_turn_and_is_replaced_before_next() -> None:
    talk = Talk(OLD)
    talk.ask(A)
    talk.begin()
    talk.opens("a0000")
    talk.ask(B)
    assert not stopped(talk.wait(60.0))
    effects = talk.hear(b"over a0000 a0000", b"settled a0000")
    assert stopped(effects)
    assert sent(effects) == []
    assert retired(talk) == ["old"]
    assert of(StartProcess, talk.die(signal=15)) == [StartProcess(2, "talk")]


def test_old_process_serves_while_background_tasks_run() -> None:
    talk = rested(OLD)
    talk.mean(TasksChanged((BackgroundTask("t"),)))
    assert not stopped(talk.wait(60.0))
    assert talk.state.process.stale is Replacement.WHEN_QUIET
    talk.serve(B)
    assert talk.kinds == {"a": Kind.DONE, "b": Kind.DONE}
    assert len(talk.starts) == 1
    assert stopped(talk.mean(TasksChanged(())))


@pytest.mark.parametrize("need", ["question", "callback"])
def test_old_process_serves_while_it_waits_for_answer(need: str) -> None:
    begin, end = NEEDS[need]
    talk = rested(OLD)
    begin(talk)
    talk.wait(60.0)
    talk.serve(B)
    assert talk.kinds == {"a": Kind.DONE, "b": Kind.DONE}
    assert len(talk.starts) == 1
    end(talk)
    assert len(of(StopProcess, talk.effects)) == 1


def test_process_age_does_not_weaken_pending_replacement() -> None:
    talk = rested(OLD)
    talk.mean(TasksChanged((BackgroundTask("t"),)))
    talk.tell(Reconfigured(0.0, OLD, True))
    talk.wait(60.0)
    assert talk.state.process.stale is Replacement.NOW
    assert stopped(talk.ask(B))


def test_reconfigured_process_is_replaced_despite_background_tasks() -> None:
    talk = rested(TELLING)
    talk.mean(TasksChanged((BackgroundTask("t"),)))
    talk.tell(Reconfigured(0.0, TELLING, True))
    assert talk.state.process.stale is Replacement.NOW
    # Without an ask there is no reason to replace the process yet.
    assert not of(StopProcess, talk.effects)
    assert stopped(talk.ask(B))
    assert retired(talk) == ["stale"]


def test_reopened_session_keeps_its_process_when_unchanged() -> None:
    talk = rested(TELLING)
    again = replace(TELLING, drain_seconds=1.0)
    talk.tell(Reconfigured(0.0, again, False))
    assert talk.state.config is again
    talk.serve(B)
    assert len(talk.starts) == 1


def test_reopened_session_without_age_limit_keeps_its_process() -> None:
    saving = replace(OLD, save_prompt="save")
    for config in (OLD, saving):
        talk = rested(config)
        talk.tell(Reconfigured(0.0, replace(config, recycle_seconds=None), False))
        assert not stopped(talk.wait(1e6))
        assert not of(AskToSave, talk.effects)


def test_reopened_session_restarts_idle_time() -> None:
    talk = rested()
    talk.wait(9.0)
    assert len(of(ReportIdle, talk.tell(Reconfigured(9.0, replace(IDLE, idle_seconds=20.0), False)))) == 1
    assert not stopped(talk.wait(19.9))
    assert stopped(talk.wait(0.1))


def test_age_timer_of_dead_process_is_ignored() -> None:
    talk = rested(OLD)
    talk.die(code=1)
    assert not talk.waits_for(Timer.AGE)
    talk.serve(B)
    assert talk.fire((Timer.AGE, "1")) == []


# -- save before the replacement -------------------------------------------------------------------------------------
SAVING = replace(OLD, save_prompt="put it down")


def test_old_process_is_asked_to_save_and_replaced_after() -> None:
    talk = rested(SAVING)
    effects = talk.wait(60.0)
    assert of(AskToSave, effects) == [AskToSave("put it down")]
    assert not stopped(effects)
    save = replace(ask("save", BACKGROUND), is_last=True)
    assert sent(talk.ask(save)) == [b"P save0000\n"]
    assert stopped(talk.over("save0000"))
    talk.die(signal=15)
    assert of(StartProcess, talk.ask(B)) == [StartProcess(2, "talk")]


@pytest.mark.parametrize("how", ["over save0000! save0000", "error save0000? save0000"])
def test_old_process_is_replaced_when_save_fails(how: str) -> None:
    talk = rested(SAVING)
    talk.wait(60.0)
    talk.ask(replace(ask("save", BACKGROUND), is_last=True))
    talk.opens("save0000")
    assert stopped(talk.hear(how.encode(), b"settled save0000"))
    assert talk.kinds["save"] is Kind.FAILED


def test_save_that_was_not_taken_is_asked_for_again_later() -> None:
    talk = rested(SAVING)
    assert len(of(AskToSave, talk.wait(60.0))) == 1
    assert not of(AskToSave, talk.wait(59.9))
    assert len(of(AskToSave, talk.wait(0.1))) == 1


def test_save_that_is_queued_is_not_asked_for_again() -> None:
    talk = Talk(SAVING)
    talk.ask(A)
    talk.begin()
    talk.opens("a0000")
    assert len(of(AskToSave, talk.wait(60.0))) == 1
    # The turn is long, and the save waits behind it.
    talk.ask(replace(ask("save", BACKGROUND), is_last=True))
    assert not of(AskToSave, talk.wait(300.0))
    talk.hear(b"over a0000 a0000", b"settled a0000")
    assert not of(AskToSave, talk.wait(300.0))
    assert stopped(talk.over("save0000"))
    talk.die(signal=15)
    assert of(StartProcess, talk.ask(B)) == [StartProcess(2, "talk")]


def test_save_is_refused_when_its_process_is_gone() -> None:
    """The next process has nothing to save, and would be replaced for it."""
    talk = Talk(SAVING)
    talk.ask(A)
    talk.begin()
    talk.opens("a0000")
    talk.wait(60.0)
    talk.ask(replace(ask("save", BACKGROUND), is_last=True))
    talk.ask(B)
    talk.die(code=1)
    assert talk.kinds == {"a": Kind.FAILED, "save": Kind.REFUSED}
    talk.begin()
    talk.over("b0000")
    assert talk.kinds["b"] is Kind.DONE
    assert len(talk.starts) == 2


def test_save_that_was_withdrawn_is_asked_for_again() -> None:
    talk = Talk(SAVING)
    talk.ask(A)
    talk.begin()
    talk.opens("a0000")
    talk.wait(60.0)
    talk.ask(replace(ask("save", BACKGROUND), is_last=True))
    talk.wait(30.0)
    talk.tell(AskWithdrawn(talk.at, "save"))
    assert len(of(AskToSave, talk.wait(30.0))) == 1


# -- withdrawn before the start --------------------------------------------------------------------------------------
def test_start_is_cancelled_when_its_ask_is_withdrawn() -> None:
    talk = Talk(TELLING)
    talk.ask(A)
    effects = talk.tell(AskWithdrawn(0.0, "a"))
    assert of(StopProcess, effects) == [StopProcess(1)]
    # A new ask is served by the next process. The first process does not count as a crash.
    talk.ask(B)
    effects = talk.tell(ProcessReported(0.0, 1, ProcessGone()))
    assert of(StartProcess, effects) == [StartProcess(2, None)]
    assert talk.state.crashes == 0
    talk.begin()
    talk.over("b0000")
    assert talk.kinds == {"a": Kind.WITHDRAWN, "b": Kind.DONE}


def test_started_process_becomes_ready_though_its_ask_is_withdrawn() -> None:
    talk = Talk(TELLING)
    talk.ask(A)
    talk.tell(ProcessReported(0.0, 1, Started(77, 0.0)))
    assert not stopped(talk.tell(AskWithdrawn(0.0, "a")))
    assert len(of(ReportIdle, talk.hear(b"ok handshake-1"))) == 1


# -- crashes ---------------------------------------------------------------------------------------------------------
CRASHING = replace(TELLING, backoff_seconds=1.0, backoff_seconds_max=5.0)


def _crash(talk: Talk, number: int) -> list[Effect]:
    """Let a requested process die before it has served a turn. Its ask fails."""
    talk.ask(ask(f"t{number}", NORMAL))
    talk.tell(ProcessReported(talk.at, talk.state.process.number, Started(77, talk.at)))
    return talk.die(code=1)


def test_crashes_back_off_longer_after_the_first() -> None:
    talk = Talk(CRASHING)
    waits: list[float] = []
    for number in range(6):
        before = len(talk.logged(kinds.PROCESS_BACKED_OFF))
        _crash(talk, number)
        told = talk.logged(kinds.PROCESS_BACKED_OFF)[before:]
        seconds = told[0]["seconds"] if told else 0.0
        waits.append(seconds)
        if seconds:
            assert talk.state.is_backing_off
            # No process starts before the end of the backoff. An ask waits, and the first process after it serves the
            # ask.
            assert not of(StartProcess, talk.ask(ask(f"w{number}", NORMAL)))
            assert not of(StartProcess, talk.wait(seconds - 0.1))
            assert len(of(StartProcess, talk.wait(0.1))) == 1
            talk.tell(ProcessReported(talk.at, talk.state.process.number, Started(77, talk.at)))
            talk.die(code=1)
            waits.append(talk.logged(kinds.PROCESS_BACKED_OFF)[-1]["seconds"])
            talk.wait(waits[-1])
    assert waits == [0.0, 1.0, 2.0, 4.0, *[5.0] * 7]
    assert set(talk.kinds.values()) == {Kind.FAILED}


def test_ask_during_backoff_is_served_after_it() -> None:
    talk = Talk(CRASHING)
    for number in range(2):
        _crash(talk, number)
    talk.ask(A)
    talk.wait(1.0)
    talk.begin()
    talk.over("a0000")
    assert talk.kinds["a"] is Kind.DONE
    # A boundary resets the count: the next crash is the first again.
    assert talk.state.crashes == 0
    talk.die(code=1)
    assert talk.state.crashes == 0  # A process that has served a turn does not count.
    _crash(talk, 9)
    assert talk.state.crashes == 1
    assert not talk.state.is_backing_off


def test_process_that_never_served_counts_as_crash() -> None:
    talk = Talk(CRASHING)
    for number in range(2):
        talk.ask(ask(f"t{number}", NORMAL))
        talk.begin()
        talk.opens(f"t{number}0000")
        talk.die(code=1)
    assert talk.state.crashes == 2
    assert talk.state.is_backing_off


def test_failed_start_counts_as_crash_and_stopped_one_does_not() -> None:
    talk = Talk(CRASHING)
    talk.ask(A)
    talk.tell(ProcessReported(0.0, 1, StartFailed(MachineError("no fds"))))
    assert talk.state.crashes == 1
    calm = Talk(CRASHING)
    calm.ask(A)
    calm.tell(ProcessReported(0.0, 1, Started(77, 0.0)))
    calm.tell(Reconfigured(0.0, CRASHING, True))
    calm.hear(b"ok handshake-1")
    calm.die(signal=15)
    assert calm.state.crashes == 0
    assert calm.state.process.phase is ProcessPhase.STARTING


def test_process_not_ready_in_time_counts_as_crash() -> None:
    talk = Talk(replace(CRASHING, start_seconds=7.0))
    talk.ask(A)
    # No timer runs while the process waits for its place in the pool.
    assert not stopped(talk.wait(100.0))
    talk.tell(ProcessReported(talk.at, 1, Started(77, talk.at)))
    assert not stopped(talk.wait(6.9))
    assert stopped(talk.wait(0.1))
    talk.die(signal=15)
    assert talk.state.crashes == 1
    assert talk.kinds == {"a": Kind.FAILED}
    assert "start" in str(talk.outcomes["a"].error)


def test_backoff_timer_of_earlier_wait_is_ignored() -> None:
    talk = Talk(CRASHING)
    for number in range(2):
        _crash(talk, number)
    talk.wait(1.0)
    _crash(talk, 2)
    assert talk.state.is_backing_off
    assert talk.fire((Timer.BACKOFF, "2")) == []
    assert talk.state.is_backing_off
