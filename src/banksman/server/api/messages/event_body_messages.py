"""What an event's body has. Nothing is decoded by these types: the log has the bodies as they were written."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from banksman.server.api.messages.command_messages import Step, Survivor, Swept
from banksman.server.api.messages.common_messages import (
    ClockName,
    EndedBy,
    GivenAnswer,
    InterruptCause,
    OnBusy,
    OnPreempt,
    OutcomeKind,
    QuestionWants,
    SessionUpdate,
)
from banksman.server.api.messages.turn_messages import Blocks


class RecitedBody(Struct):
    """A frame from the agent that repeats what was said in an earlier process. It has nothing to show."""


class SentBody(Struct):
    """A frame to the agent. It has nothing to show."""


class UpdateBody(Struct, omit_defaults=True):
    """A frame from the agent.

    Attributes:
        updates: What it says, as ACP has it: none, one or several.
        partial: With `partial`: text that is not complete. The whole text comes later and repeats it.
    """

    updates: list[SessionUpdate]
    partial: list[SessionUpdate] | None = None


class TurnQueuedBody(Struct):
    """An ask was accepted.

    Attributes:
        ref: Name of the prompt for the agent.
        prompt: Text, or content blocks.
        priority: Its priority: the higher, the more urgent.
        on_busy: What happens if the session is busy.
        on_preempt: What happens if a more urgent ask stops this turn.
        key: Idempotency key of the ask.
        rules: Rules of this turn, as pairs of a tool's name and what holds for it.
        schema: JSON Schema of the answer.
        is_last: Whether it is the last ask of a hold.
        into: Turn that it is collected into.
    """

    ref: str
    prompt: str | Blocks
    priority: int
    on_busy: OnBusy
    on_preempt: OnPreempt
    key: str | None
    rules: list[list[str]]
    schema: dict[str, Any] | None
    is_last: bool
    into: str | None


class TurnStartedBody(Struct, omit_defaults=True):
    """A turn began.

    Attributes:
        attempt: How often it was begun, this time included.
        joined: Turns whose asks were collected into it.
        into: Open turn that the prompt is added to.
        origin: Why the agent began a turn by itself.
    """

    attempt: int
    joined: list[str] | None = None
    into: str | None = None
    origin: str | None = None


class TurnInterruptedBody(Struct):
    """A turn was told to stop.

    Attributes:
        cause: Why.
        clock: The watchdog that stops it, if one does.
    """

    cause: InterruptCause
    clock: ClockName | None


class TurnRequeuedBody(Struct):
    """A turn waits again, as if it had never begun.

    Attributes:
        attempt: How often it will have been begun with the next time.
    """

    attempt: int


class TurnEndedBody(Struct, omit_defaults=True):
    """A turn ended.

    Attributes:
        outcome: How it ended.
        by: What ended it.
        stop_reason: Why the agent stopped, in its own words.
        text: The final answer; null where it is not known, and where the updates have it.
        structured: The answer as a value, if the ask had a `schema`.
        usage: Tokens that were used, as the agent counts them.
        cost: Cost of this turn, in US dollars; null if it is not known.
        spent: Cost of the conversation as the agent counts it; null if it is not known.
        cost_in_all: Cost of the session, in US dollars; null if it is not known.
        error: What went wrong.
        clock: The watchdog that ended it, if one did.
        origin: Why the agent began the turn by itself.
    """

    outcome: OutcomeKind
    by: EndedBy
    stop_reason: str | None
    text: str | None
    structured: Any
    usage: dict[str, Any] | None
    cost: float | None
    spent: float | None
    cost_in_all: float | None
    error: str | None
    clock: ClockName | None
    origin: str | None = None


class QueueChangedBody(Struct):
    """An ask was moved in the queue.

    Attributes:
        before: Turn that it was put before; null: to the head of its priority.
    """

    before: str | None


class ProcessStartedBody(Struct):
    """A process of the agent was started.

    Attributes:
        process: Number of the process, counted in the session.
        pid: Process id.
        born: When the kernel started it, for telling processes of one pid apart.
    """

    process: int
    pid: int
    born: Any


class ProcessExitedBody(Struct):
    """The leader of a process ended.

    Attributes:
        process: Number of the process.
        code: Exit code; null if a signal ended it.
        signal: Number of the signal that ended it.
    """

    process: int
    code: int | None
    signal: int | None


class ProcessStoppedBody(Struct):
    """A process was stopped by the stop ladder.

    Attributes:
        process: Number of the process.
        ladder: Rungs that were taken.
    """

    process: int
    ladder: list[Step]


class ProcessSweptBody(Struct, omit_defaults=True):
    """Processes besides the leader had to be ended.

    Attributes:
        process: Number of the process.
        swept: Processes that were ended.
        survivors: Processes that could not be ended.
        drained: False if a process outside the tree still held the output.
        by: `interrupt`, if they were ended after an interrupt.
        after: Turn that was interrupted.
    """

    process: int
    swept: list[Swept]
    survivors: list[Survivor]
    drained: bool
    by: str | None = None
    after: str | None = None


class Left(Struct, omit_defaults=True):
    """A process that goes on.

    Attributes:
        pid: Process id.
        command: Its command line.
        why: Why it could not be ended.
    """

    pid: int
    command: str
    why: str | None = None


class ProcessLeftBody(Struct):
    """An interrupted turn left processes running, as the session's options say.

    Attributes:
        process: Number of the process.
        left: Processes that go on.
        after: Turn that was interrupted.
    """

    process: int
    left: list[Left]
    after: str


class ProcessRetiredBody(Struct):
    """A process is stopped while no turn is open.

    Attributes:
        process: Number of the process.
        reason: Why: `idle`, `old`, `stale` and the like.
    """

    process: int
    reason: str


class ProcessBackedOffBody(Struct):
    """A process crashed, and the next one starts later.

    Attributes:
        crashes: How often it crashed in a row.
        seconds: Seconds until the next start.
    """

    crashes: int
    seconds: float


class QuestionAskedBody(Struct):
    """The agent asks something.

    Attributes:
        question: Id of the question.
        request: The agent's own id for it, in one process.
        wants: What kind of answer is wanted.
        tool: Tool that the agent wants to use.
        input: Input for that tool.
        details: What else the agent says about it: a title, a reason, `options` and the like.
    """

    question: str
    request: str
    wants: QuestionWants
    tool: str
    input: dict[str, Any]
    details: dict[str, Any]


class QuestionAnsweredBody(Struct, omit_defaults=True):
    """A question has its answer.

    Attributes:
        question: Id of the question.
        answer: The answer.
        by: Origin of the answer, as in the response to an answer.
        message: Message for the agent.
        option: Option of the agent that was chosen.
    """

    question: str
    answer: GivenAnswer
    by: str
    message: str | None
    option: str | None = None


class QuestionKeptBody(Struct):
    """The process that asked is gone. The answer is kept for the next one that asks the same.

    Attributes:
        question: Id of the question.
    """

    question: str


class SessionOpenedBody(Struct, omit_defaults=True):
    """The session was opened, or is opened otherwise from now on. There are more members: those of `POST /v1/sessions`.

    Attributes:
        agent: Name of its agent.
        cwd: Folder in which the agent works.
        env: Names of the environment variables that are set.
        resume: Conversation of the agent that it goes on with.
        fork: Whether it goes on with a copy of that conversation.
        labels: Labels that a host must have to run it.
    """

    agent: str
    cwd: str | None
    env: list[str]
    resume: str | None
    fork: bool
    labels: list[str] | None = None


class SessionClosedBody(Struct):
    """The session was closed."""


class SessionImportedBody(Struct):
    """The events before this one were imported.

    Attributes:
        origin: Id of the session that they come from.
        at: When, in seconds since 1970.
    """

    origin: str
    at: float


class SessionRecoveredBody(Struct):
    """The host of the session had died, and what was open is settled.

    Attributes:
        unknown: Turns whose outcome is `unknown`.
        queued: Turns that still wait.
        swept: Command lines of processes that were left, and were ended.
    """

    unknown: list[str]
    queued: list[str]
    swept: list[str]


class SessionConversationBody(Struct):
    """The agent's conversation has an id.

    Attributes:
        conversation: The id; null: the next process begins a new conversation.
    """

    conversation: str | None


class SessionSettingBody(Struct):
    """A setting of the agent changed.

    Attributes:
        name: Which setting: `model` or `permission_mode`.
        value: Its value; null: as the session was opened.
        by: What changed it.
    """

    name: str
    value: str | None
    by: str


class SessionContextLostBody(Struct):
    """The agent does not remember the conversation.

    Attributes:
        conversation: Id of the conversation.
        error: What the agent said.
    """

    conversation: str | None
    error: str


class SessionContextRestoredBody(Struct):
    """Another host goes on with the agent's transcript.

    Attributes:
        conversation: Id of the conversation.
        turn: Last turn that the transcript has.
        missing: Number of turns since then, which the agent does not remember.
    """

    conversation: str
    turn: str | None
    missing: int


class SessionStoreReturnedBody(Struct):
    """The store works again.

    Attributes:
        retries: How often it was tried.
    """

    retries: int


class SessionLeftBody(Struct):
    """The host handed the session over.

    Attributes:
        queued: Turns that wait, and are served by the next host.
    """

    queued: list[str]


class ClockWarningBody(Struct):
    """A watchdog has seen half its time.

    Attributes:
        clock: Which watchdog.
        seconds: Its limit.
        left: Seconds that are left.
    """

    clock: ClockName
    seconds: float
    left: float
