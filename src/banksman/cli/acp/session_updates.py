"""What the editor is told: events as updates, an outcome as a stop reason, errors as JSON-RPC errors."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Protocol, cast

from banksman.cli.client.client import Problem
from banksman.cli.client.event_stream import Event
from banksman.core.wire.jsonrpc import INTERNAL_ERROR, INVALID_PARAMS
from banksman.errors import BanksmanError, UsageError
from banksman.sessions.profile import DIALECTS, Quirks

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


# A session's events as the protocol's updates: what an editor shows of it, in the order in which it was said.
#
# One value of each kind follows one session from one place on. It is fed every event after that place, by one thread.
#
# - **What the agent says** is told by the dialect's own projection, text as it comes: the frames of a turn are fed to a
#   projector from the turn's beginning. Where the dialect is not known here (of a server elsewhere that is newer, or of
#   an agent whose profile is gone), the updates that the server made are passed on, which tell each text when it is
#   whole.
# - **What users say** is told when the agent hears it, and not when it was asked: two that ask at once are then seen in
#   the order of the conversation. The prompts of this editor are not told back to it, since it shows them already.
# - **A tool whose turn was stopped** never says that it ended. It is told to have failed, or an editor would show it at
#   work for ever.

Update = dict[str, Any]

# Prompts that were asked and not heard yet. A session's queue has a bound of its own, which is below this.
PROMPTS_MAX = 4096
# A turn has a few tools at work at once. Of more than this the oldest are not told to have failed.
TOOLS_MAX = 256
# Texts are put together up to this size when they are told again.
JOINED_CHARACTERS_MAX = 64 << 10
_CHUNKS = ("user_message_chunk", "agent_message_chunk", "agent_thought_chunk")


class EditorProjector(Protocol):
    def project(self, line: bytes) -> list[Update]: ...


def projector_of(dialect: str | None) -> Callable[[], EditorProjector] | None:
    """How frames of this dialect are told as they come; None: it is not known here."""
    make = DIALECTS.get(dialect or "")
    # What an agent does besides its dialect is repaired in the server, and is not seen here.
    return None if make is None else make(Quirks()).projector


class UpdateProjection:
    def __init__(self, projector: Callable[[], EditorProjector] | None) -> None:
        self._projector = projector
        # Of the turn that speaks: there is one at a time.
        self._turn: str | None = None
        self._speaking: EditorProjector | None = None
        # The tools at work, by call, and what they are called.
        self._tools: dict[str, Any] = {}
        # By turn, in the order in which they were asked.
        self._prompts: dict[str, Any] = {}

    def updates(self, event: Event, *, own: Collection[str] = ()) -> list[Update]:
        """What this event says. `own`: the turns that this editor has asked for."""
        turn: str | None = event.get("turn")
        body = cast("dict[str, Any]", event.get("body") or {})
        match event["kind"]:
            case "turn.queued" if turn is not None and turn not in own:
                if len(self._prompts) < PROMPTS_MAX:
                    self._prompts[turn] = body.get("prompt")
                return []
            case "turn.started":
                return self._started(turn, body)
            case "update":
                return self._said(event, turn, body)
            case "turn.ended":
                return self._ended(turn, body)
            case _:
                return []

    def title_of(self, call: Any) -> str | None:
        """What a tool at work is called, as the editor was told. Any thread may ask."""
        title = self._tools.get(call) if isinstance(call, str) else None
        return title if isinstance(title, str) else None

    def _started(self, turn: str | None, body: dict[str, Any]) -> list[Update]:
        if not body.get("into"):
            self._turn, self._speaking, self._tools = turn, None, {}
        heard: tuple[str, ...] = (turn or "", *(body.get("joined") or ()))
        return [update for each in heard for update in _spoken(self._prompts.pop(each, None))]

    def _said(self, event: Event, turn: str | None, body: dict[str, Any]) -> list[Update]:
        frame = event.get("frame")
        if self._projector is None or not isinstance(frame, str) or turn is None or turn != self._turn:
            updates = cast("list[Update]", body.get("updates") or [])
        else:
            if self._speaking is None:
                self._speaking = self._projector()
            updates = self._speaking.project(frame.encode(errors="replace"))
        for update in updates:
            self._note_tool(update)
        return updates

    def _note_tool(self, update: Update) -> None:
        call = update.get("toolCallId")
        if not isinstance(call, str):
            return
        if update.get("status") in ("completed", "failed"):
            self._tools.pop(call, None)
        elif update.get("sessionUpdate") == "tool_call" and len(self._tools) < TOOLS_MAX:
            self._tools[call] = update.get("title")

    def _ended(self, turn: str | None, body: dict[str, Any]) -> list[Update]:
        self._prompts.pop(turn or "", None)
        if turn is None or turn != self._turn:
            return []
        left = [] if body.get("outcome") == "done" else list(self._tools)
        self._turn, self._speaking, self._tools = None, None, {}
        return [{"sessionUpdate": "tool_call_update", "toolCallId": call, "status": "failed"} for call in left]


def _spoken(prompt: Any) -> list[Update]:
    blocks: list[Any] = [{"type": "text", "text": prompt}] if isinstance(prompt, str) else prompt or []
    return [{"sessionUpdate": "user_message_chunk", "content": block} for block in blocks]


class Joined:
    """Texts that follow each other put together: what is told again need not come in the pieces that it came in."""

    def __init__(self) -> None:
        self._last: Update | None = None
        self._texts: list[str] = []
        self._characters = 0

    def add(self, updates: list[Update]) -> list[Update]:
        """What can be told by now."""
        told: list[Update] = []
        for update in updates:
            text = _text(update)
            if text is None or not self._goes_on(update):
                told += self.flush()
            if text is None:
                told.append(update)
                continue
            self._last = update
            self._texts.append(text)
            self._characters += len(text)
            if self._characters > JOINED_CHARACTERS_MAX:
                told += self.flush()
        return told

    def flush(self) -> list[Update]:
        if self._last is None:
            return []
        whole = {**self._last, "content": {**self._last["content"], "text": "".join(self._texts)}}
        self._last, self._texts, self._characters = None, [], 0
        return [whole]

    def _goes_on(self, update: Update) -> bool:
        """It is more of what was said last, and of the same message. Two prompts are two messages."""
        last = self._last
        is_same = last is not None and all(
            last.get(member) == update.get(member) for member in ("sessionUpdate", "messageId")
        )
        return is_same and update["sessionUpdate"] != "user_message_chunk"


def _text(update: Update) -> str | None:
    content = update.get("content")
    if update.get("sessionUpdate") not in _CHUNKS or not isinstance(content, dict):
        return None
    members = cast("dict[str, Any]", content)
    text = members.get("text")
    return text if members.get("type") == "text" and isinstance(text, str) else None
