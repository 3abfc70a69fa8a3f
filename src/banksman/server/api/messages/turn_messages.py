"""A turn, and what it asks: asked for, waited for, moved, interrupted, answered."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

from banksman.server.api.messages.common_messages import (
    ITEMS_MAX,
    Body,
    ClockName,
    ContentBlock,
    Decision,
    EndedBy,
    GivenAnswer,
    OnBusy,
    OnPreempt,
    OutcomeKind,
    PriorityName,
    QuestionWants,
    Remember,
    Rules,
    Text,
    TurnState,
    Word,
)

Blocks = Annotated[list[ContentBlock], Meta(max_length=ITEMS_MAX)]


class Waiting(Struct):
    """An ask that waits in the queue.

    Attributes:
        turn: Id of its turn.
        priority: Its priority: the higher, the more urgent.
        seconds: For how long it has waited.
        attempt: How often it was begun, this time included.
        prompt: Beginning of its prompt, without secrets.
        at: Since when it waits, in seconds since 1970; null if that is not known.
    """

    turn: str
    priority: int
    seconds: float
    attempt: int
    prompt: str
    at: float | None


class Ask(Body):
    """An ask for one turn.

    Attributes:
        prompt: Text, or content blocks.
        priority: A priority class, or a number: the higher, the more urgent.
        on_busy: What happens if the session is busy.
        on_preempt: What happens if a more urgent ask stops this turn.
        schema: JSON Schema of an object: the agent answers with such an object, in `structured` of the outcome.
        rules: Which tools are allowed, denied or asked about in this turn, before the rules of the session.
    """

    prompt: str | Blocks
    priority: int | PriorityName = "normal"
    on_busy: OnBusy = "enqueue"
    on_preempt: OnPreempt = "end"
    schema: dict[str, Any] | None = None
    rules: Rules | None = None


class Accepted(Struct):
    """An ask that is durable in the log.

    Attributes:
        turn: Id of its turn.
        state: Progress of the turn.
    """

    turn: str
    state: TurnState


class Outcome(Struct):
    """How a turn ended.

    Attributes:
        kind: How it ended.
        stop_reason: Why the agent stopped, in its own words.
        text: The final answer, else what was said so far.
        structured: The answer as a value, if the ask had a `schema`.
        usage: Tokens that were used, as the agent counts them.
        cost: Cost of this turn, in US dollars; null if it is not known.
        error: What went wrong.
        clock: The watchdog that ended it, if one did.
        durable: False if the log could not be written.
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


class Turn(Struct):
    """A turn, as it is now.

    Attributes:
        turn: Id of the turn.
        state: Its progress.
        outcome: How it ended; null until then.
    """

    turn: str
    state: TurnState
    outcome: Outcome | None


class MoveTurn(Body):
    """Another place in the queue.

    Attributes:
        before: Turn of the same priority that it is put before; null: to the head of its priority.
    """

    before: Word | None = None


class Moved(Struct):
    """The queue after a move.

    Attributes:
        queue: Asks that wait, in the order in which they are served.
    """

    queue: list[Waiting]


class Receipt(Struct):
    """What an interrupt did.

    Attributes:
        stopped: Whether it stopped the turn; false if the turn had ended before.
        by: What ended the turn.
        kept: What the turn had said.
        queued: Turns that still wait.
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
        turn: Turn that asks; null if it is a task in the agent's background.
        tool: Tool that the agent wants to use.
        input: Input for that tool.
        wants: What kind of answer is wanted.
        details: What else the agent says about it: a title, a reason, `options` and the like.
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
    """The answer of a question.

    Attributes:
        decision: `allow`, `deny`, or the `optionId` of an option that the agent offers.
        message: Message for the agent.
        updated_input: Input that the tool gets instead of the one that the agent wanted.
        content: What was entered, for an `elicitation`.
        remember: Whether, or where, the agent remembers it.
        interrupt: Whether to stop the turn, too; with `deny`.
    """

    decision: Decision
    message: Text | None = None
    updated_input: dict[str, Any] | None = None
    content: dict[str, Any] | None = None
    remember: bool | Remember = False
    interrupt: bool = False


class Answered(Struct):
    """The one answer that a question has.

    Attributes:
        question: Id of the question.
        answer: The answer.
        by: Origin of the answer: `answer` (a client), `callback`, `failure` (of a callback), `rule`, `expiry`, `kept`,
            or what ended the question: `agent`, `turn`, `exit`, `recovery`, `store`.
        message: Message for the agent.
        first: Whether it was given by this request.
    """

    question: str
    answer: GivenAnswer
    by: str
    message: str | None
    first: bool
