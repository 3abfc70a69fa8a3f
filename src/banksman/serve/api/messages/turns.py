"""A turn, and what it asks: asked for, waited for, moved, interrupted, answered."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from banksman.serve.api.messages.parts import Body, Objects, Text, Variables, Word


class Waiting(Struct):
    """`prompt`: its beginning. `at`: since when it waits; null: nobody can tell."""

    turn: str
    priority: int
    seconds: float
    attempt: int
    prompt: str
    at: float | None


class Ask(Body):
    prompt: str | Objects
    priority: int | Word = "normal"
    on_busy: Word = "enqueue"
    on_preempt: Word = "end"
    schema: dict[str, Any] | None = None
    rules: Variables | None = None


class Accepted(Struct):
    turn: str
    state: str


class Outcome(Struct):
    kind: str
    stop_reason: str | None
    text: str | None
    structured: Any
    usage: Any
    cost: float | None
    error: str | None
    clock: str | None
    durable: bool


class Turn(Struct):
    turn: str
    state: str
    outcome: Outcome | None


class MoveTurn(Body):
    """Before which other one that waits; null: to the head of its class."""

    before: Word | None = None


class Moved(Struct):
    queue: list[Waiting]


class Receipt(Struct):
    stopped: bool
    by: str
    kept: str | None
    queued: list[str]


class Question(Struct):
    id: str
    turn: str | None
    tool: str
    input: dict[str, Any]
    wants: str
    details: dict[str, Any]


class Questions(Struct):
    questions: list[Question]


class Answer(Body):
    decision: Word
    message: Text | None = None
    updated_input: dict[str, Any] | None = None
    content: dict[str, Any] | None = None
    remember: bool | Word = False
    interrupt: bool = False


class Answered(Struct):
    question: str
    answer: str
    by: str
    message: str | None
    first: bool
