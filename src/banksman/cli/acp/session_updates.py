"""Translate a session to ACP: events to updates, outcomes to stop reasons, settings to options.

`UpdateProjection` translates the events of one session in their order, and keeps state between
them. `JoinedUpdates` joins the text chunks of a replayed history. The functions about settings find
the models and modes that an agent offers. `EditorRefusal` is the JSON-RPC error for the editor.
Nothing here does I/O: `editor_session.py` follows the log and sends the updates.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

from banksman.cli.client.event_stream import Event
from banksman.cli.client.exchange import RequestRefused
from banksman.core.wire.jsonrpc import INTERNAL_ERROR, INVALID_PARAMS
from banksman.errors import BanksmanError, UsageError
from banksman.sessions.profile import DIALECTS, Quirks

_STOPPED = ("interrupted", "preempted", "withdrawn")
# The stop reasons of the protocol. Any other reason of an agent (a tool came last, or a word that
# ACP lacks) only means the end of the turn.
_REASONS = ("end_turn", "max_tokens", "max_turn_requests", "refusal")
# HTTP statuses of a faulty request. For other statuses the server, the agent or the machine is at
# fault.
_CALLERS = (400, 404, 413, 415, 422)

_WORDS = {
    "failed": "the agent failed",
    "refused": "the prompt was refused, and not sent to the agent",
    "unknown": "the server died while the turn was open",
}
_HINTS = {
    "refused": "send the prompt again",
    "unknown": "check what the agent has done before you send the prompt again",
}
# Maximum number of prompts that were asked and not started. The limit of a session's queue is below
# this.
PROMPTS_MAX = 4096
# A turn has a few running tools. Above this number, further tools are not tracked and not reported
# as failed.
TOOLS_MAX = 256
# Texts are joined up to this size when the history is replayed.
JOINED_CHARACTERS_MAX = 64 << 10
_CHUNKS = ("user_message_chunk", "agent_message_chunk", "agent_thought_chunk")
# Banksman's name for each option id. The ids are the categories of the protocol.
NAMES = {"model": "model", "mode": "permission_mode"}
_LABELS = {"model": "Model", "mode": "Mode"}
# More values than a person could choose from.
VALUES_MAX = 1000
# Words that a frame with offers contains. Frames without them are not decoded.
_OFFERING = ('"modes"', '"models"', '"configOptions"', '"current_mode_update"')
# The agent's updates about settings, with ids that only the agent knows. The editor gets
# Banksman's.
UPDATES = ("config_option_update", "current_mode_update")


class EditorRefusal(Exception):
    """JSON-RPC error that answers a request."""

    def __init__(self, code: int, message: str, data: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.data = data or {}


def bad_params(message: str, hint: str = "") -> EditorRefusal:
    """Return the error for invalid parameters."""
    return EditorRefusal(INVALID_PARAMS, message, {"hint": hint} if hint else {})


def bug(error: Exception) -> EditorRefusal:
    """Return the error for an unexpected exception."""
    return EditorRefusal(INTERNAL_ERROR, f"a bug in banksman: {error!r:.200}")


def refusal_of(error: BanksmanError) -> EditorRefusal:
    """Translate an error to the protocol."""
    message = str(error.args[0]) if error.args else type(error).__name__
    data: dict[str, Any] = {"hint": error.hint} if error.hint else {}
    if isinstance(error, RequestRefused):
        data |= {"title": error.title, "status": error.status, "ids": error.ids}
        return EditorRefusal(
            INVALID_PARAMS if error.status in _CALLERS else INTERNAL_ERROR, message, data
        )
    return EditorRefusal(
        INVALID_PARAMS if isinstance(error, UsageError) else INTERNAL_ERROR, message, data
    )


def ending(turn: str, outcome: dict[str, Any]) -> dict[str, Any]:
    """Return the result of a prompt. `outcome`: the body of its `turn.ended`.

    Raises `EditorRefusal` for an outcome that ACP has no stop reason for.
    """
    kind = str(outcome.get("outcome"))
    about = {"turn": turn, "outcome": kind}
    if kind in _STOPPED:
        return {"stopReason": "cancelled", "_meta": {"banksman": about}}
    if kind == "done":
        reason = outcome.get("stop_reason")
        return {
            "stopReason": reason if reason in _REASONS else "end_turn",
            "_meta": {"banksman": about},
        }
    clock = outcome.get("clock")
    raise EditorRefusal(
        INTERNAL_ERROR,
        str(outcome.get("error") or _WORDS.get(kind, f"the turn ended as {kind!r}")),
        {
            **about,
            **({"clock": clock} if clock else {}),
            **({"hint": _HINTS[kind]} if kind in _HINTS else {}),
        },
    )


# Events of a session as ACP updates, in the order in which they happened.
#
# An `UpdateProjection` follows one session from one position. One thread feeds it every later
# event.
#
# - **The agent's text** goes through a projector of the dialect. The projector gets the frames of a
#   turn from its beginning and emits text as it streams. The dialect may be unknown here: the
#   server is newer, or the agent's profile is gone. Then the server's updates are passed on, which
#   contain complete texts.
# - **Prompts of users** are shown when the agent gets them, not when they were asked. Two
#   concurrent prompts thus appear in the order of the conversation. An editor does not get its
#   prompts back, because it shows them already.
# - **Tools of a stopped turn** never report their end. They are reported as failed, so that the
#   editor does not show them as running forever.

Update = dict[str, Any]


class EditorProjector(Protocol):
    """Translator of the frames of one turn to updates."""

    def project(self, line: bytes) -> list[Update]: ...


def projector_of(dialect: str | None) -> Callable[[], EditorProjector] | None:
    """Return the projector factory of a dialect; None if the dialect is unknown here."""
    make = DIALECTS.get(dialect or "")
    # The server repairs the quirks of an agent. They do not matter here.
    return None if make is None else make(Quirks()).projector


class UpdateProjection:
    """Translate the events of one session to updates."""

    def __init__(self, projector: Callable[[], EditorProjector] | None) -> None:
        self._projector = projector
        # The turn that runs now. There is one at a time.
        self._turn: str | None = None
        self._speaking: EditorProjector | None = None
        # The titles of the running tools, by call id.
        self._tools: dict[str, Any] = {}
        # The waiting prompts by turn, in the order in which they were asked.
        self._prompts: dict[str, Any] = {}

    def updates(self, event: Event, *, own: Collection[str] = ()) -> list[Update]:
        """Return the updates of an event. `own`: the turns that this editor asked for."""
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
        """Return the title of a running tool, as the editor knows it. Thread-safe."""
        title = self._tools.get(call) if isinstance(call, str) else None
        return title if isinstance(title, str) else None

    def _started(self, turn: str | None, body: dict[str, Any]) -> list[Update]:
        if not body.get("into"):
            self._turn, self._speaking, self._tools = turn, None, {}
        heard: tuple[str, ...] = (turn or "", *(body.get("joined") or ()))
        return [update for each in heard for update in _spoken(self._prompts.pop(each, None))]

    def _said(self, event: Event, turn: str | None, body: dict[str, Any]) -> list[Update]:
        frame = event.get("frame")
        if (
            self._projector is None
            or not isinstance(frame, str)
            or turn is None
            or turn != self._turn
        ):
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
        return [
            {"sessionUpdate": "tool_call_update", "toolCallId": call, "status": "failed"}
            for call in left
        ]


def _spoken(prompt: Any) -> list[Update]:
    blocks: list[Any] = (
        [{"type": "text", "text": prompt}] if isinstance(prompt, str) else prompt or []
    )
    return [{"sessionUpdate": "user_message_chunk", "content": block} for block in blocks]


class JoinedUpdates:
    """Join consecutive text chunks: a replayed history does not need its original pieces."""

    def __init__(self) -> None:
        self._last: Update | None = None
        self._texts: list[str] = []
        self._characters = 0

    def add(self, updates: list[Update]) -> list[Update]:
        """Add updates and return those that are complete."""
        told: list[Update] = []
        for update in updates:
            text = _chunk_text(update)
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
        """Return the text that was held back."""
        if self._last is None:
            return []
        whole = {**self._last, "content": {**self._last["content"], "text": "".join(self._texts)}}
        self._last, self._texts, self._characters = None, [], 0
        return [whole]

    def _goes_on(self, update: Update) -> bool:
        """Return whether the chunk continues the last message. Two prompts are two messages."""
        last = self._last
        is_same = last is not None and all(
            last.get(member) == update.get(member) for member in ("sessionUpdate", "messageId")
        )
        return is_same and update["sessionUpdate"] != "user_message_chunk"


def _chunk_text(update: Update) -> str | None:
    content = update.get("content")
    if update.get("sessionUpdate") not in _CHUNKS or not isinstance(content, dict):
        return None
    members = cast("dict[str, Any]", content)
    text = members.get("text")
    return text if members.get("type") == "text" and isinstance(text, str) else None


# Model and permission mode of a session, as ACP's modes, models and config options. Pure.
#
# The choices come from the dialect, or from the agent's offers when its process starts. The
# follower finds these offers in the log, and the editor gets a `config_option_update`. If neither
# is known, the editor is offered nothing. A value that is set anyway goes to the agent unchanged.


@dataclass(frozen=True, slots=True)
class SettingChoice:
    """Values of one setting.

    `values`: each with its display name. `current`: None if the current value is unknown.
    """

    current: str | None
    values: tuple[tuple[str, str], ...]


# By Banksman's name of the setting.
Offers = Mapping[str, SettingChoice]


def _among(current: str, *values: str) -> SettingChoice:
    return SettingChoice(current, tuple((value, value) for value in values))


_KNOWN: dict[str, Offers] = {
    "claude": {
        "model": _among("default", "default", "opus", "sonnet", "haiku"),
        "permission_mode": _among("default", "default", "acceptEdits", "plan", "bypassPermissions"),
    },
    "codex": {
        "permission_mode": _among("on-request", "untrusted", "on-request", "never", "on-failure")
    },
}


def known(dialect: str | None) -> Offers:
    """Return the settings of a dialect, before an agent has offered any."""
    return _KNOWN.get(dialect or "", {})


def chosen(found: Offers, name: str, value: Any) -> Offers:
    """Return the settings with one value changed."""
    choice = found.get(name)
    if choice is None or not isinstance(value, str):
        return found
    return {**found, name: replace(choice, current=value)}


def after(found: Offers, event: Mapping[str, Any]) -> Offers:
    """Return the settings after an event of the session's log."""
    body = _mapping(event.get("body"))
    match event.get("kind"):
        case "session.opened":
            for name in NAMES.values():
                found = chosen(found, name, body.get(name))
        case "session.setting":
            found = chosen(found, str(body.get("name")), body.get("value"))
        case "update" if any(word in (event.get("frame") or "") for word in _OFFERING):
            found = _heard(found, event["frame"])
        case _:
            pass
    return found


def _heard(found: Offers, frame: str) -> Offers:
    try:
        said = _mapping(json.loads(frame))
    except (ValueError, RecursionError):
        return found
    # An ACP agent sends its offers in the reply to session/new or in an update. Claude sends them
    # in the reply to Banksman's `initialize` request.
    update = _mapping(_mapping(said.get("params")).get("update"))
    if "currentModeId" in update:
        return chosen(found, "permission_mode", update["currentModeId"])
    greeting = _mapping(_mapping(said.get("response")).get("response"))
    offered = _mapping(said.get("result")) or update or greeting
    models, modes = offered.get("models"), _mapping(offered.get("modes"))
    if isinstance(models, list):
        known_model = found.get("model")
        current = known_model.current if known_model is not None else None
        found = {**found, "model": SettingChoice(current, _values(models, "value", "displayName"))}
    elif isinstance(models, dict):
        said_models = _mapping(models)
        values = _values(said_models.get("availableModels"), "modelId")
        found = {**found, "model": SettingChoice(_text(said_models.get("currentModelId")), values)}
    if modes:
        values = _values(modes.get("availableModes"), "id")
        found = {
            **found,
            "permission_mode": SettingChoice(_text(modes.get("currentModeId")), values),
        }
    # Config options are the newer mechanism, and win where an agent has both.
    for option in _mappings(offered.get("configOptions")):
        name = NAMES.get(str(option.get("category")))
        if name is not None:
            groups = [
                _mappings(each.get("options")) or [each]
                for each in _mappings(option.get("options"))
            ]
            values = _values([each for group in groups for each in group], "value")
            found = {**found, name: SettingChoice(_text(option.get("currentValue")), values)}
    return found


def _values(listed: Any, value: str, name: str = "name") -> tuple[tuple[str, str], ...]:
    pairs = ((_text(each.get(value)), _text(each.get(name))) for each in _mappings(listed))
    return tuple((found, shown or found) for found, shown in pairs if found is not None)[
        :VALUES_MAX
    ]


def told(found: Offers) -> dict[str, Any]:
    """Return the members for the reply to `session/new`, `load` and `resume`.

    `models` is for older clients.
    """
    result: dict[str, Any] = {}
    mode, model = _shown(found, "mode"), _shown(found, "model")
    if mode is not None:
        modes = [{"id": value, "name": name} for value, name in mode.values]
        result["modes"] = {"currentModeId": mode.current, "availableModes": modes}
    if model is not None:
        models = [{"modelId": value, "name": name} for value, name in model.values]
        result["models"] = {"currentModelId": model.current, "availableModels": models}
    if options := config_options(found):
        result["configOptions"] = options
    return result


def config_options(found: Offers) -> list[dict[str, Any]]:
    """Return the settings as ACP config options."""
    return [
        {
            "id": id,
            "name": _LABELS[id],
            "category": id,
            "type": "select",
            "currentValue": choice.current,
            "options": [{"value": value, "name": name} for value, name in choice.values],
        }
        for id in NAMES
        if (choice := _shown(found, id)) is not None
    ]


def _shown(found: Offers, id: str) -> SettingChoice | None:
    """Return the choice in a form that ACP can express: the current value is one of the values.

    Returns None if the current value is unknown.
    """
    choice = found.get(NAMES[id])
    if choice is None or choice.current is None:
        return None
    if choice.current in dict(choice.values):
        return choice
    return replace(choice, values=((choice.current, choice.current), *choice.values))


def _mapping(value: Any) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _mappings(value: Any) -> list[dict[str, Any]]:
    listed: Iterable[Any] = cast("list[Any]", value) if isinstance(value, list) else ()
    return [cast("dict[str, Any]", each) for each in listed if isinstance(each, dict)]


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None
