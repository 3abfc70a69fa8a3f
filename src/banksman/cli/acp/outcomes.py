"""How a request of the editor's ends: a turn's outcome as a stop reason, and errors as JSON-RPC has them. Pure."""

from __future__ import annotations

from typing import Any

from banksman.cli.client.client import Problem
from banksman.core.wire.jsonrpc import INTERNAL_ERROR, INVALID_PARAMS
from banksman.errors import BanksmanError, UsageError

_STOPPED = ("interrupted", "preempted", "withdrawn")
# The protocol has no others. What an agent says besides (that a tool came last, or a word of its own) means the end of
# the turn and no more.
_REASONS = ("end_turn", "max_tokens", "max_turn_requests", "refusal")
# What is wrong with the request itself; else the server, the agent or the machine has to act.
_CALLERS = (400, 404, 413, 415, 422)


class EditorRefusal(Exception):
    """An error that a request is answered with."""

    def __init__(self, code: int, message: str, data: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.data = data or {}


def bad_params(message: str, hint: str = "") -> EditorRefusal:
    return EditorRefusal(INVALID_PARAMS, message, {"hint": hint} if hint else {})


def bug(error: Exception) -> EditorRefusal:
    return EditorRefusal(INTERNAL_ERROR, f"a bug in banksman: {error!r:.200}")


def refusal_of(error: BanksmanError) -> EditorRefusal:
    message = str(error.args[0]) if error.args else type(error).__name__
    data: dict[str, Any] = {"hint": error.hint} if error.hint else {}
    if isinstance(error, Problem):
        data |= {"title": error.title, "status": error.status, "ids": error.ids}
        return EditorRefusal(INVALID_PARAMS if error.status in _CALLERS else INTERNAL_ERROR, message, data)
    return EditorRefusal(INVALID_PARAMS if isinstance(error, UsageError) else INTERNAL_ERROR, message, data)


def ending(turn: str, outcome: dict[str, Any]) -> dict[str, Any]:
    """The result of a prompt whose turn ended so: the body of a `turn.ended`. Raises `EditorRefusal` if it did not end
    as
    the protocol knows it."""
    kind = str(outcome.get("outcome"))
    about = {"turn": turn, "outcome": kind}
    if kind in _STOPPED:
        return {"stopReason": "cancelled", "_meta": {"banksman": about}}
    if kind == "done":
        reason = outcome.get("stop_reason")
        return {"stopReason": reason if reason in _REASONS else "end_turn", "_meta": {"banksman": about}}
    clock = outcome.get("clock")
    raise EditorRefusal(
        INTERNAL_ERROR,
        str(outcome.get("error") or _WORDS.get(kind, f"the turn ended as {kind!r}")),
        {**about, **({"clock": clock} if clock else {}), **({"hint": _HINTS[kind]} if kind in _HINTS else {})},
    )


_WORDS = {
    "failed": "the agent failed",
    "refused": "the prompt was declined, and nothing of it was sent",
    "unknown": "the server died while the turn was open",
}
_HINTS = {
    "refused": "it can be asked again",
    "unknown": "what the agent did until then is not known for sure; look before it is asked again",
}
