"""Bodies of the events of turns, one type for each kind, for the OpenAPI description.

The server decodes nothing with these types: it sends each body as the log has it.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from banksman.server.api.messages.common_messages import (
    BudgetScope,
    Caps,
    ClockName,
    EndedBy,
    ErrorKindName,
    GivenAnswer,
    InterruptCause,
    OnBusy,
    OnPreempt,
    OutcomeKind,
    QuestionWants,
    SessionUpdate,
    Unit,
    Usage,
)
from banksman.server.api.messages.session_messages import LimitWindow
from banksman.server.api.messages.turn_messages import AgentFailure, BackgroundTask, Blocks


class RecitedBody(Struct):
    """A frame in which the agent repeats a message of an earlier process. The body is empty."""


class SentBody(Struct):
    """A frame to the agent. The body is empty."""


class UpdateBody(Struct, omit_defaults=True):
    """A frame from the agent.

    Attributes:
        updates: Content of the frame as ACP session updates; the list may be empty.
        partial: With `partial`: incomplete text. A later event repeats it with the whole text.
    """

    updates: list[SessionUpdate]
    partial: list[SessionUpdate] | None = None


class TurnQueuedBody(Struct, omit_defaults=True):
    """An ask was accepted.

    Attributes:
        ref: Id of the prompt in frames to the agent.
        prompt: Text, or content blocks.
        priority: Its priority; a higher number is more urgent.
        on_busy: What happens if the session is busy.
        on_preempt: What happens if a more urgent ask stops this turn.
        key: Idempotency key of the ask.
        rules: Rules of this turn, as pairs of a tool's name and a ruling.
        schema: JSON Schema of the answer.
        is_last: Whether it is the last ask before the process is replaced because of its age.
        into: Turn into which the ask is collected.
        deadline: When the ask must be over, in seconds since 1970; null if it has no deadline.
        caller: The person or program that wants the turn; null if the ask has no caller.
        trace: The W3C `traceparent` of the ask; absent if it has none.
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
    deadline: float | None = None
    caller: str | None = None
    trace: str | None = None


class TurnStartedBody(Struct, omit_defaults=True):
    """A turn began.

    Attributes:
        attempt: Number of the attempt, counted from 1.
        joined: Turns whose asks were collected into this turn.
        into: Open turn to which the prompt is added.
        origin: Why the agent began a turn without an ask.
    """

    attempt: int
    joined: list[str] | None = None
    into: str | None = None
    origin: str | None = None


class TurnInterruptedBody(Struct, omit_defaults=True):
    """The interrupt of a turn began.

    Attributes:
        cause: Why the turn is interrupted.
        clock: Watchdog that interrupts the turn, if one does.
        caller: The caller that interrupts it, or whose more urgent ask preempts it; null if it has
            no name, or if no caller does.
    """

    cause: InterruptCause
    clock: ClockName | None
    caller: str | None = None


class TurnRequeuedBody(Struct, omit_defaults=True):
    """A turn returned to the queue, as if it had never started.

    Attributes:
        attempt: Number of the next attempt.
        added: Usage of the attempt that no earlier event has; null if its prompt was not sent.
        caller: The caller under which it is counted.
        used_by: The agent that it is counted for; null: the first one of the session.
        reason: `limit` if a limit of the account failed the turn before a tool ran.
        limited_until: When that limit ends, in seconds since 1970; null if it is unknown.
        agent: The agent that got the prompt, if the session has several. No other one gets it.
        spent: Cost of the conversation as the agent counts it; null if unknown.
        cost_in_all: Cost of the session, in US dollars; null if unknown.
    """

    attempt: int
    added: Usage | None = None
    caller: str | None = None
    used_by: str | None = None
    reason: str | None = None
    limited_until: float | None = None
    agent: str | None = None
    spent: float | None = None
    cost_in_all: float | None = None


class TurnEndedBody(Struct, omit_defaults=True):
    """A turn ended.

    Attributes:
        outcome: How the turn ended.
        by: What ended the turn.
        stop_reason: Why the agent stopped, as the agent reports it.
        text: The final answer; null if it is unknown, or if the updates contain it.
        structured: The answer as a value, if the ask had a `schema`.
        usage: Number of tokens used, as the agent counts them.
        cost: Cost of this turn, in US dollars; null if unknown.
        spent: Cost of the conversation as the agent counts it; null if unknown.
        cost_in_all: Cost of the session, in US dollars; null if unknown.
        error: Error message, if the turn failed.
        clock: Watchdog that ended the turn, if one did.
        origin: Why the agent began the turn without an ask.
        background: Background tasks of the agent that still ran when the turn ended.
        used: Tokens, cost and working time of the turn; null if its prompt was not sent.
        added: The part of `used` that no earlier event has; null if another ask of the turn has it.
        caller: The caller under which the usage is counted.
        used_by: The agent that it is counted for; null: the first one of the session.
        failure: Why the agent failed; null if it did not, or if another part failed.
        used_tools: Whether the agent used a tool.
        stopped_by: The caller that interrupted or withdrew it; null if it has no name, or if no
            caller did.
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
    background: list[BackgroundTask] = []
    used: Usage | None = None
    added: Usage | None = None
    caller: str | None = None
    used_by: str | None = None
    failure: AgentFailure | None = None
    used_tools: bool = False
    stopped_by: str | None = None


class TurnEditedBody(Struct):
    """A queued ask was edited.

    Attributes:
        prompt: Its new prompt; null: as before.
        priority: Its new priority, in which it is the last one; null: as before.
        caller: The caller that edited it; null if none was named.
    """

    prompt: str | Blocks | None
    priority: int | None
    caller: str | None


class QueueChangedBody(Struct, omit_defaults=True):
    """An ask was moved in the queue.

    Attributes:
        before: Turn before which it was placed; null: the head of its priority.
        caller: The caller that moved it; null if none was named.
    """

    before: str | None
    caller: str | None = None


class HoldGrantedBody(Struct, omit_defaults=True):
    """The session is reserved for the asks of one holder.

    Attributes:
        hold: Id of the hold.
        priority: Its priority. Asks of a higher one still pass.
        caller: The caller that holds; null if it has no name.
    """

    hold: str
    priority: int
    caller: str | None = None


class HoldEndedBody(Struct, omit_defaults=True):
    """The session is free for other asks again. A hold also ends with its host, without this event.

    Attributes:
        hold: Id of the hold.
        by: `released`, `idle` (no ask for long), `preempted` (by a more urgent hold; it waits
            again), or `shutdown` (of the session or its host).
        caller: The caller that released it; null if none was named.
    """

    hold: str
    by: str
    caller: str | None = None


class QuestionAskedBody(Struct):
    """The agent asked a question.

    Attributes:
        question: Id of the question.
        request: The agent's id of the question, unique in one process.
        wants: Kind of answer that the agent expects.
        tool: Tool that the agent wants to use.
        input: Input for that tool.
        details: Further information from the agent: a title, a reason, `options` and others.
    """

    question: str
    request: str
    wants: QuestionWants
    tool: str
    input: dict[str, Any]
    details: dict[str, Any]


class QuestionAnsweredBody(Struct, omit_defaults=True):
    """A question was answered.

    Attributes:
        question: Id of the question.
        answer: The answer.
        by: Origin of the answer, as in the response to an answer.
        message: Message for the agent.
        option: Chosen option of those that the agent offered.
        caller: The caller that answered it; null if it has no name, or if no caller did.
    """

    question: str
    answer: GivenAnswer
    by: str
    message: str | None
    option: str | None = None
    caller: str | None = None


class QuestionKeptBody(Struct):
    """A question outlived its process. The next process that asks the same gets its answer.

    Attributes:
        question: Id of the question.
    """

    question: str


class ClockWarningBody(Struct):
    """Half the time of a watchdog has passed.

    Attributes:
        clock: Name of the watchdog.
        seconds: Time limit.
        left: Seconds left.
    """

    clock: ClockName
    seconds: float
    left: float


class TasksChangedBody(Struct):
    """The background tasks of the agent's process changed.

    Attributes:
        tasks: All background tasks that run now.
    """

    tasks: list[BackgroundTask]


class UsageReportedBody(Struct, omit_defaults=True):
    """The agent reported the usage of the open turn.

    Attributes:
        caller: The caller under which the usage is counted.
        used_by: The agent that it is counted for; null: the first one of the session.
        added: The part that no earlier event has. The sum of all `added` is the session's usage.
        used: Tokens, cost and working time of the turn until now.
        spent: Cost of the conversation as the agent counts it; null if unknown.
    """

    caller: str | None
    added: Usage
    used: Usage
    used_by: str | None = None
    spent: float | None = None


class ProviderRetryingBody(Struct):
    """The agent repeats a failed model call by itself.

    Attributes:
        attempt: Number of the coming retry.
        attempts_max: Number of retries that the agent makes; null if unknown.
        delay: Seconds until the retry; null if unknown.
        cause: Why the call failed, in the agent's words.
        error: Kind of the error.
        status: HTTP status of the provider; null if unknown.
    """

    attempt: int
    attempts_max: int | None
    delay: float | None
    cause: str
    error: ErrorKindName
    status: int | None


class LimitsChangedBody(Struct):
    """The usage windows of the agent's account, or the end of its limit, have changed.

    Attributes:
        windows: All known windows, as the agent last reported them.
        limited_until: When the account's limit ends, in seconds since 1970; null if it is not
            limited.
        by: `agent`, or `account` if another session of the account met the limit.
        agent: The agent of the account, if another agent of the session serves it now.
    """

    windows: list[LimitWindow]
    limited_until: float | None
    by: str = "agent"
    agent: str | None = None


class BudgetWarningBody(Struct):
    """Most of a cap is used: 80 % of it.

    Attributes:
        scope: Scope of the cap.
        unit: Unit of its count.
        used: The used amount.
        cap: The cap.
        caller: The caller, if the cap is that of a caller.
    """

    scope: BudgetScope
    unit: Unit
    used: float
    cap: float
    caller: str | None


class BudgetExceededBody(BudgetWarningBody):
    """A cap is reached: no turn is sent until it is raised, or until the next day."""


class BudgetRaisedBody(Struct):
    """A person raised the budget of the session.

    Attributes:
        base: Caps as the session was opened with.
        budget: Caps from now on.
    """

    base: Caps
    budget: Caps
