"""A turn of Codex: while it runs, what will be said about it at its end; and how it ended."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from banksman.core.dialects.codex_reading import answer_of
from banksman.core.dialects.dialect import Setup
from banksman.core.json_values import items, mapping, text
from banksman.core.meaning import Meaning, PromptSettled, TurnOver


class Running(Struct, frozen=True):
    """`refs`: our prompts that are known to be in it, the one that opened it first. `is_told`: the session knows of it.
    `text`: what the agent has said last. `before` and `after`: what the thread had used, where it is known."""

    id: str
    refs: tuple[str, ...] = ()
    is_told: bool = False
    text: str | None = None
    error: str | None = None
    before: Mapping[str, Any] | None = None
    after: Mapping[str, Any] | None = None

    def named(self, ref: str) -> Running:
        return replace(self, refs=(*self.refs, ref), is_told=True)

    def counted(self, total: Mapping[str, Any], last: Mapping[str, Any]) -> Running:
        """After a call of the model. Of a thread that was resumed nobody may have said what it had used before."""
        before = _less(total, last) if self.before is None else self.before
        return replace(self, before=before, after=total)

    @property
    def usage(self) -> Mapping[str, Any] | None:
        """Of this turn alone: the agent tells what the thread has used, and what the last call of the model has."""
        return None if self.after is None else _less(self.after, self.before or {})

    def over(self, turn: dict[str, Any], conversation: str | None, setup: Setup, *, is_cut: bool) -> Over:
        if is_cut:
            return Over.lost(self.id, "frame_too_large", conversation, self.usage)
        status = turn.get("status")
        said = [text(item.get("text")) for item in map(mapping, items(turn.get("items"))) if _is_said(item)]
        answer = said[-1] if said else self.text
        error = mapping(turn.get("error"))
        is_error = status not in ("completed", "interrupted")
        boundary = TurnOver(
            conversation=conversation,
            is_error=is_error,
            is_aborted=status == "interrupted",
            is_overflow=error.get("codexErrorInfo") == "contextWindowExceeded",
            text=answer,
            structured=answer_of(answer) if setup.schema is not None and status == "completed" else None,
            error=_error(error) or self.error or f"the turn is {status}" if is_error else None,
            stop_reason=text(status),
            usage=self.usage,
        )
        return Over(self.id, boundary)


def _is_said(item: dict[str, Any]) -> bool:
    return item.get("type") == "agentMessage"


def _error(error: dict[str, Any]) -> str | None:
    words = [word for name in ("message", "additionalDetails") if (word := text(error.get(name)))]
    return "\n".join(words) or None


def _less(total: Mapping[str, Any], part: Mapping[str, Any]) -> dict[str, Any]:
    """Counts without those that are in it already."""
    numbers = {name: value for name, value in total.items() if isinstance(value, int)}
    return {name: value - _count(part.get(name)) for name, value in numbers.items()}


def _count(value: Any) -> int:
    return value if isinstance(value, int) else 0


class Over(Struct, frozen=True):
    """A turn that has ended. `result`: its boundary, without names. `is_told`: the session knows."""

    id: str
    result: TurnOver
    refs: tuple[str, ...] = ()
    is_told: bool = True

    @staticmethod
    def lost(id: str, error: str, conversation: str | None = None, usage: Mapping[str, Any] | None = None) -> Over:
        """It is over, and how it ended is not known."""
        return Over(id, TurnOver(conversation=conversation, is_error=True, error=error, usage=usage))

    @staticmethod
    def refused(error: str) -> Over:
        """The turn that a prompt would have had, had the agent taken it."""
        return Over("", TurnOver(is_error=True, error=error))

    def named(self, ref: str) -> Over:
        return replace(self, refs=(*self.refs, ref), is_told=True)

    def boundary(self, *refs: str) -> TurnOver:
        return replace(self.result, refs=refs)

    def told(self, *refs: str) -> tuple[Meaning, ...]:
        """The boundary, and that it is done with each of these. The one that opened the turn comes last: it ends it."""
        return (self.boundary(*refs), *(PromptSettled(ref) for ref in reversed(refs)))
