"""Log the agent's frames, assign them to turns, and apply their meanings to the state.

Each frame is tagged with the turn that is speaking. A few frames carry a meaning: the start or the
boundary of a turn, a reply, tools, background tasks, the conversation's name, its cost or its
overflow. `turn_boundary.py` decides which turn a start or a boundary belongs to, `questions.py`
handles the agent's requests, and `agent_conversation.py` follows the conversation.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from banksman.core.dialects import failure_texts
from banksman.core.dialects.meaning import (
    Forgot,
    LimitsReported,
    Meaning,
    NeedsConversation,
    Noise,
    PromptRefused,
    PromptSettled,
    PromptTaken,
    Replied,
    Requested,
    RequestWithdrawn,
    Retrying,
    TasksChanged,
    Thought,
    ToolBegan,
    ToolEnded,
    TurnOpened,
    TurnOver,
    UsageReported,
)
from banksman.core.session import (
    budget_gate,
    idle_process,
    plain_frames,
    provider_limits,
    questions,
    settings,
    turn_boundary,
    turn_end,
    turn_usage,
)
from banksman.core.session.effects import ReportReady
from banksman.core.session.facts import FramesRead, Timer
from banksman.core.session.state import ProcessPhase, PromptNaming
from banksman.core.session.transition import Transition
from banksman.errors import AgentError, ErrorKind

HANDSHAKE = "handshake"
# Limit on concurrent tools, and on background tasks. Only whether any exist matters.
TASKS_MAX = 256
# Frames that show no progress of the turn.
_IDLE = (Noise, Thought, Retrying, LimitsReported)


def read_frames(work: Transition, fact: FramesRead) -> None:
    """Log the agent's frames, and apply their meanings in order."""
    begin = idle = 0
    # The last line that announced a retry, and the idle lines after it.
    retry, idle_since = -1, 0
    # An entry is tagged with the turn that was speaking at its frame. A frame that opens a turn is
    # the first of that turn, and the boundary is its last.
    for index, meaning in fact.meanings:
        if begin < index:
            _keep(work, fact.lines[begin:index])
        was_reciting = _recites(work)
        meanings, answers = _resolved(work, meaning)
        first = meanings[0] if meanings else None
        is_idle = isinstance(first, _IDLE)
        idle += is_idle
        retry, idle_since = (
            (index, 0) if isinstance(first, Retrying) else (retry, idle_since + is_idle)
        )
        if isinstance(first, TurnOpened):
            hear(work, first)
            meanings = meanings[1:]
        elif (
            isinstance(first, TurnOver)
            and work.state.own is None
            and not turn_boundary.is_ours(work, first)
        ):
            turn_boundary.open_own(work, first.origin, first.refs)
        # The frame that begins a replay is not part of it, and neither is the frame that ends it.
        _keep(work, fact.lines[index : index + 1], recites=was_reciting and _recites(work))
        for answer in answers:
            work.send(work.speaker, answer)
        for each in meanings:
            hear(work, each)
        begin = index + 1
    _keep(work, fact.lines[begin:])
    _wait_for_quiet(work)
    has_gone_on = len(fact.lines) - 1 - retry > idle_since
    was_retrying = has_gone_on and provider_limits.end_retry(work)
    if work.state.clocks:
        provider_limits.feed_clocks(work, has_progress=len(fact.lines) > idle)
        if was_retrying and work.state.speaking is not None:
            # The clocks are due earlier than the retry had postponed them to.
            work.arm_clocks(work.state.speaking)


def _recites(work: Transition) -> bool:
    protocol = work.state.process.protocol
    return protocol is not None and protocol.recites


def _keep(work: Transition, lines: Sequence[bytes], *, recites: bool | None = None) -> None:
    if lines:
        work.entries += plain_frames.entries(work.state, lines, recites=recites)


def hear(work: Transition, meaning: Meaning) -> None:
    """Apply one meaning to the state."""
    match meaning:
        case Noise() | Thought():
            pass
        case ToolBegan(calls=calls, reported=reported):
            if reported is not None:
                _on_usage(work, reported)
            _use_tools(work, began=calls)
        case ToolEnded(calls=calls):
            _use_tools(work, ended=calls)
        case TasksChanged(tasks=tasks):
            work.set_tasks(tasks[:TASKS_MAX])
        case Replied():
            _on_reply(work, meaning)
        case PromptTaken(ref=ref):
            work.set_process(naming=PromptNaming.PRESENT)
            turn_boundary.our_prompt_was_named(work, (ref,), is_opened=False)
        case TurnOpened():
            turn_boundary.on_opened(work, meaning)
        case PromptSettled():
            work.set_process(naming=PromptNaming.PRESENT)
            turn_boundary.on_settled(work, meaning)
        case PromptRefused(ref=ref):
            turn_boundary.on_refused(work, ref)
        case TurnOver():
            turn_boundary.on_over(work, meaning)
        case Requested():
            questions.on_request(work, meaning)
        case RequestWithdrawn(request=request):
            questions.on_withdrawn(work, request)
        case Forgot(error=error):
            # The next process learns of the loss and starts an empty conversation: see
            # process_life.py.
            work.set_process(has_forgotten=True)
            work.stop_process(AgentError(error))
        case UsageReported() | Retrying() | LimitsReported():
            _on_provider_report(work, meaning)
        case NeedsConversation():
            raise AssertionError("the reader resolves this meaning")


def _on_provider_report(
    work: Transition, report: UsageReported | Retrying | LimitsReported
) -> None:
    match report:
        case UsageReported():
            _on_usage(work, report)
        case Retrying():
            provider_limits.on_retry(work, report)
        case LimitsReported():
            provider_limits.on_limits(work, report)


def _on_usage(work: Transition, report: UsageReported) -> None:
    """Count a report. A cap that it reaches is acted on before the next frame."""
    turn_usage.report(work, report)
    budget_gate.look(work)


# -- replies -------------------------------------------------------------------------------------
def _on_reply(work: Transition, reply: Replied) -> None:
    process = work.state.process
    if reply.request == f"{HANDSHAKE}-{process.number}":
        if process.phase is ProcessPhase.STARTING:
            work.cancel_timer(Timer.START, str(process.number))
            if reply.error is None:
                work.set_process(phase=ProcessPhase.READY, was_ready=True)
                if process.protocol is not None and process.protocol.conversation is not None:
                    # The agent has found the conversation that it resumes.
                    work.set(is_adopted=False)
                work.set(resume_failures=0)
                work.do(ReportReady(process.number))
                settings.tell_ready(work)
                idle_process.grow_old(work)
            else:
                work.stop_process(
                    AgentError(
                        f"the agent refused the handshake: {reply.error}",
                        kind=failure_texts.kind_of_text(reply.error) or ErrorKind.PROTOCOL,
                    )
                )
        return
    settings.on_reply(work, reply)
    turn_end.on_interrupt_reply(work, reply)

    # More urgent asks in the queue need no check here: `grants.advance` compares them after every
    # fact.


def _resolved(work: Transition, meaning: Meaning) -> tuple[tuple[Meaning, ...], tuple[bytes, ...]]:
    """Resolve a meaning that depends on earlier frames, and return the immediate replies to it."""
    if not isinstance(meaning, NeedsConversation):
        return (meaning,), ()
    protocol = work.state.process.protocol
    if protocol is None:
        return (), ()  # This process was sent nothing: it is being stopped.
    output = protocol.hear(meaning)
    work.set_process(protocol=output.protocol)
    return output.meanings, output.frames


def _wait_for_quiet(work: Transition) -> None:
    """Restart the wait for quiet after each frame that follows a boundary.

    Late frames belong to the turn that has just had its boundary. The wait is bounded, because
    endless output is not the end of a turn. The same applies to an agent that replays its
    conversation and does not mark the end of the replay.
    """
    process = work.state.process
    if (
        process.phase is ProcessPhase.STARTING
        and work.at < process.start_due
        and process.protocol is not None
    ):
        recital_seconds = process.protocol.quiet_seconds
        if recital_seconds:
            work.start_timer(recital_seconds, Timer.START, str(process.number))
    turn = work.state.turn
    seconds = work.state.config.quiet_seconds
    if seconds and turn is not None and turn.quiet_until is not None and work.at < turn.quiet_until:
        work.start_timer(seconds, Timer.SETTLE, turn.key)


def _use_tools(work: Transition, began: tuple[str, ...] = (), ended: tuple[str, ...] = ()) -> None:
    turn = work.state.speaking
    if turn is not None:
        still = tuple(call for call in turn.tools if call not in ended)
        tools = (*still, *(call for call in began if call not in still))[:TASKS_MAX]
        # The frame in which a tool began may have been too large to be read.
        used_tools = turn.used_tools or bool(began or ended)
        work.set_turn(replace(turn, tools=tools, used_tools=used_tools))
        # Otherwise the clocks that pause for a tool are already paused.
        if bool(tools) != bool(turn.tools):
            work.attend_clocks()
