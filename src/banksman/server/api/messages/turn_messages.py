"""Messages about turns and questions: ask, show, move, interrupt, answer."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

from banksman.server.api.messages.common_messages import (
    ITEMS_MAX,
    Body,
    CallerName,
    ClockName,
    ContentBlock,
    Decision,
    EndedBy,
    ErrorKindName,
    GivenAnswer,
    OnBusy,
    OnPreempt,
    OutcomeKind,
    PriorityName,
    Query,
    QuestionWants,
    Remember,
    Rules,
    Text,
    TurnState,
    Usage,
    Wait,
    Word,
)

Blocks = Annotated[list[ContentBlock], Meta(max_length=ITEMS_MAX)]


class Waiting(Struct):
    """An ask that waits in the queue.

    Attributes:
        turn: Id of its turn.
        priority: Its priority; a higher number is more urgent.
        seconds: How long it has waited.
        attempt: Number of the attempt, counted from 1.
        prompt: Beginning of its prompt, without secrets.
        at: When it entered the queue, in seconds since 1970; null if unknown.
        caller: The person or program that asked; null if it has no name.
    """

    turn: str
    priority: int
    seconds: float
    attempt: int
    prompt: str
    at: float | None
    caller: str | None = None


class QueueHold(Struct):
    """A hold: the session is reserved for the asks of one caller. Other asks wait.

    Attributes:
        hold: Id of the hold.
        priority: Its priority. Asks of a higher one still pass.
        caller: The caller that holds; null if it has no name.
        at: When it was granted, in seconds since 1970; null if it waits in the queue.
    """

    hold: str
    priority: int
    caller: str | None
    at: float | None


class BeginHold(Body):
    """A hold to begin.

    Attributes:
        priority: A priority class, or a number. All asks of the hold have it.
        caller: The person or program that holds.
    """

    priority: int | PriorityName = "normal"
    caller: CallerName | None = None


class WaitForHold(Query):
    """How long to wait for the grant.

    Attributes:
        wait: Seconds to wait until the hold is granted, at most 60.
    """

    wait: Wait = 0.0


class Ask(Body):
    """An ask for one turn.

    Attributes:
        prompt: Text, or content blocks.
        priority: A priority class, or a number; a higher number is more urgent.
        on_busy: What happens if the session is busy.
        on_preempt: What happens if a more urgent ask stops this turn.
        schema: JSON Schema of an object. The agent answers with an object of this schema, in
            `structured` of the outcome.
        rules: Which tools are allowed, denied or asked about in this turn. They precede the rules
            of the session.
        deadline: Seconds from now in which the ask must be over. An ask that still waits then is
            withdrawn, and a running turn is interrupted.
        caller: The person or program that wants the turn. Its usage is counted under this name.
        hold: Hold that the ask belongs to.
    """

    prompt: str | Blocks
    priority: int | PriorityName = "normal"
    on_busy: OnBusy = "enqueue"
    on_preempt: OnPreempt = "end"
    schema: dict[str, Any] | None = None
    rules: Rules | None = None
    deadline: float | None = None
    caller: CallerName | None = None
    hold: Word | None = None


class Accepted(Struct):
    """An accepted ask, which is durable in the log.

    Attributes:
        turn: Id of its turn.
        state: Progress of the turn.
    """

    turn: str
    state: TurnState


class BackgroundTask(Struct):
    """Work that an agent does beside its turns.

    Attributes:
        id: The agent's name for it.
        kind: Kind of task, as the agent reports it.
        description: Its purpose, as the agent reports it.
    """

    id: str
    kind: str
    description: str


class AgentFailure(Struct):
    """Why the agent failed.

    Attributes:
        kind: Kind of the error, for a program to decide by.
        status: HTTP status of the provider; null if unknown.
        retry_after: Seconds to wait before the next ask, as the provider said; null if unknown.
        limited_until: When the account's limit ends, in seconds since 1970; null if unknown.
        message: Error message without the hint.
        hint: What to do.
        raw: Fields of the agent's frame that decided the kind.
    """

    kind: ErrorKindName
    status: int | None
    retry_after: float | None
    limited_until: float | None
    message: str
    hint: str
    raw: dict[str, Any] | None


class Outcome(Struct):
    """How a turn ended.

    Attributes:
        kind: How it ended.
        stop_reason: Why the agent stopped, as the agent reports it.
        text: The final answer, or the text so far if the turn has none.
        structured: The answer as a value, if the ask had a `schema`.
        usage: Number of tokens used, as the agent counts them.
        cost: Cost of this turn, in US dollars; null if unknown.
        error: Error message, if the turn failed.
        clock: Watchdog that ended the turn, if one did.
        durable: Whether the outcome is in the log; false if the log could not be written.
        background: Background tasks of the agent that still ran when the turn ended.
        used: Tokens, cost and working time of the turn; null if the prompt was not sent.
        failure: Why the agent failed; null if it did not, or if another part failed.
        used_tools: Whether the agent used a tool.
        empty: Whether the agent reports success after a tool use, but gave no answer at all.
    """

    kind: OutcomeKind
    stop_reason: str | None
    text: str | None
    structured: Any
    usage: dict[str, Any] | None
    cost: float | None
    error: str | None
    clock: ClockName | None
    durable: bool
    background: list[BackgroundTask]
    used: Usage | None
    failure: AgentFailure | None = None
    used_tools: bool = False
    empty: bool = False


class Turn(Struct):
    """The present state of a turn.

    Attributes:
        turn: Id of the turn.
        state: Progress of the turn.
        outcome: How the turn ended; null until then.
    """

    turn: str
    state: TurnState
    outcome: Outcome | None


class EditTurn(Body):
    """A change of a waiting ask. A member that is null or missing stays as it is.

    Attributes:
        prompt: Text, or content blocks.
        priority: A priority class, or a number. The ask becomes the last one of it.
    """

    prompt: str | Blocks | None = None
    priority: int | PriorityName | None = None


class MoveTurn(Body):
    """A new place in the queue for a turn.

    Attributes:
        before: Turn of the same priority before which it is placed; null: the head of its priority.
    """

    before: Word | None = None


class MovedQueue(Struct):
    """The queue after a move.

    Attributes:
        queue: Waiting asks, in the order in which they will run.
    """

    queue: list[Waiting]


# The name in the OpenAPI document. In Python, `Moved` is the error.
MovedQueue.__name__ = "Moved"


class Receipt(Struct):
    """Effect of an interrupt.

    Attributes:
        stopped: Whether it stopped the turn; false if the turn had ended before.
        by: What ended the turn.
        kept: Text of the turn up to its end.
        queued: Ids of the turns that still wait.
    """

    stopped: bool
    by: EndedBy
    kept: str | None
    queued: list[str]


class Question(Struct, kw_only=True):
    """A question of the agent that waits for an answer.

    Attributes:
        question: Id of the question, as in the log and in the path of the answer.
        id: The same id, under its older name.
        turn: Turn that asks; null for a background task of the agent.
        tool: Tool that the agent wants to use.
        input: Input for that tool.
        wants: Kind of answer that the agent expects.
        details: Further information from the agent: a title, a reason, `options` and others.
    """

    question: str
    id: str
    turn: str | None
    tool: str
    input: dict[str, Any]
    wants: QuestionWants
    details: dict[str, Any]


class Questions(Struct):
    """The questions of a session that wait for an answer.

    Attributes:
        questions: The questions, oldest first.
    """

    questions: list[Question]


class Answer(Body):
    """The answer to a question.

    Attributes:
        decision: `allow`, `deny`, or the `optionId` of an option that the agent offers.
        message: Message for the agent.
        updated_input: Input for the tool, in place of the agent's own.
        content: The entered values, for an `elicitation`.
        remember: With `allow`: whether the agent stores the permission and does not ask again. True
            means `session`; a string names the place.
        interrupt: With `deny`: whether to stop the turn, too.
    """

    decision: Decision
    message: Text | None = None
    updated_input: dict[str, Any] | None = None
    content: dict[str, Any] | None = None
    remember: bool | Remember = False
    interrupt: bool = False


class Answered(Struct):
    """The answer of a question. The first answer counts, so it may come from another request.

    Attributes:
        question: Id of the question.
        answer: The answer.
        by: Origin of the answer: `answer` (a client), `callback`, `failure` (of a callback),
            `rule`, `expiry`, `kept`, or what ended the question: `agent`, `turn`, `exit`,
            `recovery`, `store`.
        message: Message for the agent.
        first: Whether this request gave the answer.
        caller: The caller that gave it; null if it has no name, or if no caller did.
    """

    question: str
    answer: GivenAnswer
    by: str
    message: str | None
    first: bool
    caller: str | None = None
