"""Entry point of the session state machine: `step(state, fact) -> (state, effects)`.

`step` is pure and total. It passes each fact to the module that handles it: `asks.py`,
`durability.py`, `agent_output.py` and others. The driver runs the stop ladder when it performs
`StopProcess`. Every fact is valid in every state. A late fact has no effect, because it names a
process, a turn or a timer that does not exist now. After each fact, except frames without a
meaning, `grants.advance` checks whether a turn can be served. Only there is a turn granted, a
process started, or a session finished, so no code path can forget it.

The order of events for one ask:

1. `turn.queued` is appended. Once it is durable, the ask is accepted.
2. When no other turn runs and the agent is ready, `turn.started` is appended. Once it is durable,
   the whole prompt is written.
3. The boundary, or the end of the process, ends the turn. `turn.ended` is appended. Once it is
   durable, the ask gets its outcome.
"""

from __future__ import annotations

from typing import assert_never

from banksman.core.process_facts import (
    Exited,
    FrameWritten,
    ProcessGone,
    Report,
    Started,
    StartFailed,
    SweepEnded,
    WriteFailed,
)
from banksman.core.session import (
    agent_output,
    asks,
    budget_gate,
    durability,
    grants,
    hand_over,
    idle_process,
    limit_wait,
    process_life,
    questions,
    settings,
    shutdown,
    timers,
    tool_cleanup,
)
from banksman.core.session.ask_queue import Hold
from banksman.core.session.effects import Effect, EndHold, GiveReceipt, Reject, SettingTaken
from banksman.core.session.facts import (
    AccountLimited,
    AgentFact,
    AppendFailed,
    Asked,
    AskEdited,
    AskMoved,
    AskWithdrawn,
    Begun,
    BudgetChanged,
    BudgetClaimed,
    BudgetWarned,
    CallbackAnswered,
    CallerFact,
    CloseAsked,
    Committed,
    ConversationTaken,
    DrainAsked,
    EvictAsked,
    Fact,
    FramesRead,
    HandedOver,
    HandOverAsked,
    HandOverFailed,
    HoldAsked,
    HoldReleased,
    InterruptAsked,
    LeaveAsked,
    LimitDecided,
    ProcessReported,
    QuestionAnswered,
    Reconfigured,
    SettingAsked,
    ShareAsked,
    TerminalsEnded,
    TimerFired,
)
from banksman.core.session.outcome import By, Receipt
from banksman.core.session.replay import replay
from banksman.core.session.state import OVER, ProcessPhase, Session, not_open
from banksman.core.session.transition import Transition

__all__ = ["replay", "step"]


def step(state: Session, fact: Fact) -> tuple[Session, list[Effect]]:
    """Apply one fact. Total: every state accepts every fact."""
    work = Transition(state, fact.at)
    match fact:
        case FramesRead():
            if _is_current(state, fact):
                agent_output.read_frames(work, fact)
            if not fact.meanings:
                # Without a meaning, no other turn can have become ready.
                return work.done()
        case Committed(seq=seq):
            durability.commit(work, seq)
        case AppendFailed():
            durability.fail(work, fact)
        case TimerFired(subject=(timer, subject)):
            timers.fire(work, timer, subject)
        case ProcessReported() | ConversationTaken() | TerminalsEnded():
            if _is_current(state, fact):
                _from_process(work, fact)
        case HandedOver() | HandOverFailed():
            hand_over.on_result(work, fact)
        case BudgetChanged() | BudgetWarned() | BudgetClaimed():
            if state.mode not in OVER:
                budget_gate.on_fact(work, fact)
        case _ if state.mode in OVER and not shutdown.takes_back(work, fact):
            _from_late_caller(work, fact)
        case _:
            _from_caller(work, fact)
    grants.advance(work)
    # A sent frame may have a meaning itself: for example a setting that the dialect only stores.
    while work.heard:
        agent_output.hear(work, work.heard.pop(0))
        grants.advance(work)
    return work.done()


def _is_current(state: Session, fact: AgentFact) -> bool:
    """Whether a fact comes from the current process. Facts of a replaced process are ignored."""
    return fact.process == state.process.number and state.process.phase is not ProcessPhase.NONE


def _from_process(work: Transition, fact: AgentFact) -> None:
    match fact:
        case ProcessReported(report=report, epoch=epoch):
            _on_report(work, report, epoch)
        case ConversationTaken(error=error, held=held):
            process_life.lose_conversation(work, error, held)
        case TerminalsEnded():
            tool_cleanup.terminals_ended(work, fact)
        case FramesRead():
            agent_output.read_frames(work, fact)
        case _:
            assert_never(fact)


def _on_report(work: Transition, report: Report, epoch: int) -> None:
    match report:
        case Started():
            process_life.started(work, report, epoch)
        case StartFailed(error=error):
            process_life.lost(work, error)
        case FrameWritten():
            work.send_next()
        case WriteFailed(error=error):
            work.break_stdin(error)
        case Exited():
            process_life.exited(work, report)
        case ProcessGone():
            process_life.gone(work, report)
        case SweepEnded():
            tool_cleanup.swept(work, report)
        case _:
            assert_never(report)


def _from_caller(work: Transition, fact: CallerFact) -> None:
    match fact:
        case Begun():
            questions.show(work)
            budget_gate.show(work)
            asks.resume_deadlines(work)  # `grants.advance` serves the queue after every fact.
        case Asked(ask=ask):
            asks.ask(work, ask)
        case AskWithdrawn(turn=turn):
            asks.withdraw(work, turn)
        case InterruptAsked():
            asks.interrupt(work, fact)
        case AskMoved():
            asks.move(work, fact)
        case AskEdited():
            asks.edit(work, fact)
        case HoldAsked(hold=hold, priority=priority, caller=caller):
            asks.hold(work, Hold(hold, priority, fact.at, caller))
        case HoldReleased(hold=hold, caller=caller):
            asks.release(work, hold, caller)
        case QuestionAnswered():
            asks.answer(work, fact)
        case CallbackAnswered():
            questions.on_called(work, fact)
        case SettingAsked() | Reconfigured() | ShareAsked():
            _change(work, fact)
        case EvictAsked():
            idle_process.evict(work, "evicted")
        case DrainAsked() | CloseAsked() | LeaveAsked() | HandOverAsked():
            _shut_down(work, fact)
        case AccountLimited(until=until, agent=agent):
            limit_wait.on_account(work, until, agent)
        case LimitDecided():
            asks.decide_limit(work, fact)
        case _:
            assert_never(fact)


def _change(work: Transition, fact: SettingAsked | Reconfigured | ShareAsked) -> None:
    match fact:
        case SettingAsked():
            settings.ask(work, fact)
        case Reconfigured():
            settings.reconfigure(work, fact)
        case ShareAsked():
            settings.share(work, fact)


def _shut_down(
    work: Transition, fact: DrainAsked | CloseAsked | LeaveAsked | HandOverAsked
) -> None:
    match fact:
        case DrainAsked():
            shutdown.drain(work)
        case CloseAsked(caller=caller):
            shutdown.close(work, caller)
        case LeaveAsked(by=by):
            shutdown.leave(work, by)
        case HandOverAsked(by=by):
            hand_over.begin(work, by)


def _from_late_caller(work: Transition, fact: CallerFact) -> None:
    """Answer a caller of a session that is closed or has left, without any other effect."""
    refusal = not_open(work.state)
    match fact:
        case Asked(ask=ask):
            work.do(Reject(ask.id, refusal))
        case InterruptAsked(turn=turn, interrupt=interrupt) if hand_over.has_taken(
            work.state, turn
        ):
            work.do(hand_over.no_receipt(interrupt))
        case InterruptAsked(interrupt=interrupt):
            # `Session.interrupt` sends no such fact for an ask that was handed over.
            work.do(GiveReceipt(interrupt, Receipt(stopped=False, by=By.ALREADY_OVER)))
        case HoldAsked(hold=hold):
            work.do(EndHold(hold, refusal))
        case SettingAsked(change=change) | ShareAsked(change=change) | AskEdited(change=change):
            work.do(SettingTaken(change, refusal))
        case Reconfigured(change=change) if change:
            work.do(SettingTaken(change, refusal))
        case _:
            pass
