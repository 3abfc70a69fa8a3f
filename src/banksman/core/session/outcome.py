"""Values for callers: the outcome of an ask, and the receipt of an interrupt."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec

from banksman.core.dialects.meaning import BackgroundTask
from banksman.core.session.usage import Usage
from banksman.errors import AgentError, BanksmanError, ErrorKind


class Kind(enum.StrEnum):
    """How an ask ended. Never inferred from the agent's text."""

    # The boundary came, without an error.
    DONE = "done"
    # A caller, a watchdog or a close stopped it, and it ended by the boundary or by the ladder.
    INTERRUPTED = "interrupted"
    # It was stopped for a more urgent ask.
    PREEMPTED = "preempted"
    # It ended while it was queued.
    WITHDRAWN = "withdrawn"
    # The agent reported a failure or exited while the host lived, or the log could not be written.
    FAILED = "failed"
    # Declined before any byte was sent: the session drains or is closed, or its place was needed.
    REFUSED = "refused"
    # The host died, or lost the session, while the turn was open.
    UNKNOWN = "unknown"


class By(enum.StrEnum):
    """How a turn with a pending interrupt ended."""

    BOUNDARY = "boundary"
    LADDER = "ladder"
    EXIT = "exit"
    WITHDRAWN = "withdrawn"
    ALREADY_OVER = "already_over"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The one outcome of an ask.

    `text`: the final answer, or the text so far. `structured`: the answer as a value, if the ask
    has a schema. `cost`: cost of this turn in US dollars; None: the agent does not report it, or
    only a total over several turns.

    `clock`: the watchdog that ended the turn, if one did, or "deadline". `durable` False: the log
    could not be written. `background`: the agent's background tasks that still ran when the turn
    ended. Only some agents report them. `usage`: tokens as the agent counts them. `used`: tokens,
    cost and working time in one form for all agents; None if the prompt was not sent.

    `error`: an `AgentError` if the agent failed. Its `kind`, `status`, `retry_after` and
    `limited_until` say why, for a program to decide by. `used_tools`: the agent used a tool.
    """

    DONE: ClassVar[Kind] = Kind.DONE
    INTERRUPTED: ClassVar[Kind] = Kind.INTERRUPTED
    PREEMPTED: ClassVar[Kind] = Kind.PREEMPTED
    WITHDRAWN: ClassVar[Kind] = Kind.WITHDRAWN
    FAILED: ClassVar[Kind] = Kind.FAILED
    REFUSED: ClassVar[Kind] = Kind.REFUSED
    UNKNOWN: ClassVar[Kind] = Kind.UNKNOWN

    kind: Kind
    stop_reason: str | None = None
    text: str | None = None
    structured: Any = None
    usage: Mapping[str, Any] | None = None
    cost: float | None = None
    error: BanksmanError | None = None
    clock: str | None = None
    durable: bool = True
    background: tuple[BackgroundTask, ...] = ()
    used: Usage | None = None
    used_tools: bool = False

    @property
    def empty(self) -> bool:
        """Whether the agent reports success after a tool use, but gave no answer at all."""
        has_text = self.text is not None and bool(self.text.strip())
        return (
            self.kind is Kind.DONE and self.used_tools and not has_text and self.structured is None
        )

    @property
    def failure(self) -> dict[str, Any] | None:
        """The fields of the agent's error as JSON; None if the agent did not fail."""
        error = self.error
        if not isinstance(error, AgentError):
            return None
        return {
            "kind": error.kind,
            "status": error.status,
            "retry_after": error.retry_after,
            "limited_until": error.limited_until,
            "message": error.message,
            "hint": error.hint,
            "raw": None if error.raw is None else dict(error.raw),
        }


def _error_of(body: Mapping[str, Any]) -> AgentError | None:
    """Return the error in the body of a `turn.ended` event.

    Events of older versions have only its text, and so have errors that are not the agent's.
    """
    text, failure = body["error"], body.get("failure")
    if text is None or failure is None:
        return None if text is None else AgentError(text)
    return AgentError(
        failure["message"],
        hint=failure["hint"],
        # A newer version may know further kinds.
        kind=next((kind for kind in ErrorKind if kind == failure["kind"]), ErrorKind.OTHER),
        status=failure["status"],
        retry_after=failure["retry_after"],
        limited_until=failure["limited_until"],
        raw=failure["raw"],
    )


def outcome_of(body: Mapping[str, Any]) -> Outcome:
    """Return the outcome in the body of a `turn.ended` event."""
    return Outcome(
        kind=Kind(body["outcome"]),
        stop_reason=body["stop_reason"],
        text=body["text"],
        structured=body["structured"],
        usage=body["usage"],
        cost=body["cost"],
        error=_error_of(body),
        clock=body["clock"],
        # Events of earlier versions lack them.
        background=tasks_of(body.get("background", ())),
        used=msgspec.convert(body.get("used"), Usage | None),
        used_tools=body.get("used_tools", False),
    )


def tasks_of(value: Any) -> tuple[BackgroundTask, ...]:
    """Return the background tasks in the body of an event."""
    return msgspec.convert(value, tuple[BackgroundTask, ...])


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """The result of an interrupt.

    `kept`: the output of the turn. `queued`: the asks that were still waiting, by turn id.
    """

    BOUNDARY: ClassVar[By] = By.BOUNDARY
    LADDER: ClassVar[By] = By.LADDER
    EXIT: ClassVar[By] = By.EXIT
    WITHDRAWN: ClassVar[By] = By.WITHDRAWN
    ALREADY_OVER: ClassVar[By] = By.ALREADY_OVER

    stopped: bool
    by: By
    kept: str | None = None
    queued: tuple[str, ...] = ()
