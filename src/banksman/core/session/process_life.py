"""React to reports about the agent's process: started, exited, gone, or failed to start.

A start begins the handshake. The end of a process ends its turn and its requests, and leaves its
pending settings to the next process. An end may count as a crash, or lose the conversation.
`grants.py` starts processes. `idle_process.py` and `Transition.stop_process` stop them.
"""

from __future__ import annotations

from msgspec.structs import replace

from banksman.core.dialects.dialect import StatelessProtocol
from banksman.core.process_facts import Exited, ProcessGone, Started
from banksman.core.session import (
    agent_output,
    asks,
    fallback,
    grants,
    idle_process,
    questions,
    settings,
    timers,
    turn_end,
)
from banksman.core.session import event as kinds
from banksman.core.session.effects import HoldConversation
from banksman.core.session.facts import Timer
from banksman.core.session.outcome import By, Kind
from banksman.core.session.state import Mode, ProcessPhase, ProcessState
from banksman.core.session.transition import Transition
from banksman.core.session.turn import Turn, TurnPhase
from banksman.errors import AgentError, BanksmanError, ErrorKind

# Length of the end of stderr that goes into each outcome which the process's death has failed.
STDERR_CHARACTERS_MAX = 4096
# If an agent fails this often to resume a conversation without a reason, the conversation is lost.
RESUME_FAILURES_MAX = 3
# An agent that dies this often before it is sent anything will not answer.
START_ATTEMPTS_MAX = 3


def started(work: Transition, fact: Started, epoch: int) -> None:
    """Record the start of the process, and begin the handshake."""
    number = work.state.process.number
    work.log(None, kinds.PROCESS_STARTED, process=number, pid=fact.pid, born=fact.born)
    work.set_process(is_there=True, epoch=epoch)
    state = work.state
    process = state.process
    if process.phase is ProcessPhase.STARTING:
        setup = replace(
            state.config.setup,
            schema=process.schema,
            conversation=process.resumes,
            forks=process.forks,
            **dict(state.settings),
        )
        work.set_process(protocol=state.config.dialect.begin(setup))
        work.speak(None, lambda protocol: protocol.handshake(f"{agent_output.HANDSHAKE}-{number}"))
        seconds = state.config.start_seconds
        work.set_process(start_due=work.at + seconds)
        is_plain = isinstance(work.state.process.protocol, StatelessProtocol)
        work.start_timer(
            seconds if is_plain else min(seconds, timers.HURRY_SECONDS), Timer.START, str(number)
        )


def exited(work: Transition, fact: Exited) -> None:
    """Record the exit of the leader. Its tree and its output may not have ended yet."""
    if work.state.process.exit is not None:
        return  # The next host of a process that survives its host hears of the exit again.
    how = (
        f"signal {fact.signal}"
        if fact.signal is not None
        else f"code {fact.code}"
        if fact.code is not None
        else "?"
    )
    work.log(
        None,
        kinds.PROCESS_EXITED,
        process=work.state.process.number,
        code=fact.code,
        signal=fact.signal,
        **({"out_of_memory": True} if fact.is_out_of_memory else {}),
    )
    if fact.is_out_of_memory:
        error = AgentError("the agent ran out of memory", kind=ErrorKind.OUT_OF_MEMORY)
        work.set_process(error=work.state.process.error or error)
    work.set_process(
        phase=ProcessPhase.STOPPING,
        exit=how,
        exited_by_itself=not work.state.process.was_told_to_stop,
        was_killed=fact.signal is not None,
        outbox=(),
    )


def lose_conversation(work: Transition, error: BanksmanError, held: str | None) -> None:
    """Leave a conversation that another session drives.

    The process has joined it and must be stopped. The next process must not follow it there.
    """
    work.set(conversation=held)
    work.log(None, kinds.SESSION_CONVERSATION, conversation=held)
    work.give_up_process(error)


def gone(work: Transition, fact: ProcessGone) -> None:
    """Record the end of the process's tree, and end everything that depended on it."""
    process = work.state.process
    if fact.ladder:
        rungs = [{"rung": each.rung, "at": each.at} for each in fact.ladder]
        work.log(None, kinds.PROCESS_STOPPED, process=process.number, ladder=rungs)
    if fact.swept or fact.survivors or not fact.drained:
        work.log(
            None,
            kinds.PROCESS_SWEPT,
            process=process.number,
            swept=[{"pid": swept.pid, "command": swept.command} for swept in fact.swept],
            survivors=[
                {"pid": left.pid, "command": left.command, "why": left.why}
                for left in fact.survivors
            ],
            drained=fact.drained,
        )
    exited_how = f"the agent exited ({process.exit or 'exit status unknown'})"
    message = exited_how if process.error is None else f"{process.error.args[0]}; {exited_how}"
    has_forgotten = process.has_forgotten or work.state.config.dialect.has_forgotten(
        fact.stderr.text
    )
    stderr = fact.stderr.text[-STDERR_CHARACTERS_MAX:].strip()
    given_up = process.error.kind if isinstance(process.error, AgentError) else ErrorKind.OTHER
    kind = ErrorKind.AGENT_EXITED if given_up is ErrorKind.OTHER else given_up
    hint = work.state.config.hint_of(kind, stderr)
    error = AgentError(message, hint=hint, kind=kind, process=process.number)
    lost(work, error, has_forgotten=has_forgotten)


def lost(work: Transition, error: BanksmanError, *, has_forgotten: bool = False) -> None:
    """End all work of a process that is gone. The next turn gets a new process."""
    state = work.state
    process = state.process
    questions.forget_all(work)
    settings.forget_all(work)
    work.set_tasks(())
    # A loop: the end of a boundary that was not yet certain may promote a steered prompt to the
    # open turn.
    while (turn := work.state.own or work.state.turn) is not None:
        if turn.phase is TurnPhase.STARTING:
            _begin_again(work, turn, error)
        else:
            turn_end.end_by_exit(work, turn, error)
    for _, key in process.unacknowledged:
        work.cancel_timer(Timer.DRAIN, key)
    work.cancel_timer(Timer.START, str(process.number))
    work.cancel_timer(Timer.WRITE, f"{process.number}.{process.frames_sent}")
    work.cancel_timer(Timer.AGE, str(process.number))
    work.cancel_timer(Timer.SWEEP, str(process.number))
    idle_process.drop_saving(work)
    work.set(process=ProcessState(number=process.number))
    if state.mode is Mode.OPEN and fallback.notice_missing(work, error):
        return  # Another agent serves the ask that needed the process.
    # A process that completed a turn, or that the session stopped without an error, has not
    # crashed.
    is_crash = not process.has_served and (
        process.error is not None or not process.was_told_to_stop
    )
    if is_crash and not has_forgotten and state.mode is Mode.OPEN:
        idle_process.count_crash(work, process)
    if process.was_ready or state.mode is not Mode.OPEN:
        return
    if process.was_told_to_stop and process.error is None:
        # The process was stopped because it was not needed. The next process serves asks that have
        # come since.
        return
    has_spoken = process.exited_by_itself and not process.was_killed and process.error is None
    if process.resumes is not None and (has_forgotten or has_spoken):
        failures = state.resume_failures + 1
        if has_forgotten or failures >= RESUME_FAILURES_MAX:
            error = _lose_memory(work, error)
            for waiting in work.state.queue if state.is_adopted else ():
                if isinstance(waiting, Turn):
                    asks.drop(work, waiting, Kind.FAILED, error)
            return
        # The conversation may be lost. But a full disk or a bad setting look the same, so count
        # first. A process that was killed, never ran, or was stopped by the session proves nothing
        # about it.
        work.set(resume_failures=failures)
    # Each failed start ends the ask that caused it. So there are never more starts than asks.
    chosen = grants.choose(
        work, tuple(waiting for waiting in work.state.queue if isinstance(waiting, Turn))
    )
    if isinstance(chosen, Turn):
        asks.drop(work, chosen, Kind.FAILED, error)


def _lose_memory(work: Transition, error: BanksmanError) -> AgentError:
    """Start over with an empty conversation, because the agent does not know the old one.

    A note in the log and a new start are better than failing forever. But a caller may want to
    continue a conversation from elsewhere in which no turn has succeeded here yet. That caller must
    not get an answer out of an empty conversation. The returned error is for it.
    """
    conversation = work.state.conversation or work.state.fork_of
    work.log(None, kinds.SESSION_CONTEXT_LOST, conversation=conversation, error=str(error))
    work.set(conversation=None, fork_of=None, spent=0.0, resume_failures=0, is_adopted=False)
    work.do(HoldConversation(None))
    return AgentError(f"the agent does not know the conversation {conversation!r}", hint=str(error))


def _begin_again(work: Transition, turn: Turn, error: BanksmanError) -> None:
    """Requeue a turn whose process died between the grant and the first byte.

    The prompt was not sent, so the turn may use another process, up to `START_ATTEMPTS_MAX` times.
    """
    if turn.restarts + 1 >= START_ATTEMPTS_MAX:
        turn_end.end(work, turn, Kind.FAILED, By.EXIT, error=error)
        return
    turn_end.put_back(work, replace(turn.requeued(), restarts=turn.restarts + 1))
