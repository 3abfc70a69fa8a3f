"""Project a session to ACP: events as updates, outcomes as stop reasons, settings as config options. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
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

_WORDS = {
    "failed": "the agent failed",
    "refused": "the prompt was declined, and nothing of it was sent",
    "unknown": "the server died while the turn was open",
}
_HINTS = {
    "refused": "it can be asked again",
    "unknown": "what the agent did until then is not known for sure; look before it is asked again",
}
# Prompts that were asked and not heard yet. A session's queue has a bound of its own, which is below this.
PROMPTS_MAX = 4096
# A turn has a few tools at work at once. Of more than this the oldest are not told to have failed.
TOOLS_MAX = 256
# Texts are put together up to this size when they are told again.
JOINED_CHARACTERS_MAX = 64 << 10
_CHUNKS = ("user_message_chunk", "agent_message_chunk", "agent_thought_chunk")
# By the id of an option, our word for it. The ids are the categories of the protocol.
NAMES = {"model": "model", "mode": "permission_mode"}
_LABELS = {"model": "Model", "mode": "Mode"}
# More values than anybody could choose from.
VALUES_MAX = 1000
# What may stand in a frame that offers something: all others are not even decoded.
_OFFERING = ('"modes"', '"models"', '"configOptions"', '"current_mode_update"')
# Updates of the agent's about them, with ids that only it knows. The editor is told in ours.
UPDATES = ("config_option_update", "current_mode_update")


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


class JoinedUpdates:
    """Texts that follow each other put together: what is told again need not come in the pieces that it came in."""

    def __init__(self) -> None:
        self._last: Update | None = None
        self._texts: list[str] = []
        self._characters = 0

    def add(self, updates: list[Update]) -> list[Update]:
        """What can be told by now."""
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


def _chunk_text(update: Update) -> str | None:
    content = update.get("content")
    if update.get("sessionUpdate") not in _CHUNKS or not isinstance(content, dict):
        return None
    members = cast("dict[str, Any]", content)
    text = members.get("text")
    return text if members.get("type") == "text" and isinstance(text, str) else None


# Model and permission mode of a session, as ACP's modes, models and config options. Pure.
#
# What can be chosen is known from the agent's dialect, or from what the agent itself offers when its process starts:
# that is heard in the log, and the editor is told by a `config_option_update`. An agent of which neither is known
# offers nothing; what is set there all the same goes to the agent as it is.


@dataclass(frozen=True, slots=True)
class SettingChoice:
    """`values`: each with the name that a person sees. `current` None: nobody has said which it is."""

    current: str | None
    values: tuple[tuple[str, str], ...]


# By our word for it.
Offers = Mapping[str, SettingChoice]


def _among(current: str, *values: str) -> SettingChoice:
    return SettingChoice(current, tuple((value, value) for value in values))


_KNOWN: dict[str, Offers] = {
    "claude": {
        "model": _among("default", "default", "opus", "sonnet", "haiku"),
        "permission_mode": _among("default", "default", "acceptEdits", "plan", "bypassPermissions"),
    },
    "codex": {"permission_mode": _among("on-request", "untrusted", "on-request", "never", "on-failure")},
}


def known(dialect: str | None) -> Offers:
    """What agents of this dialect have, before one of them has said anything."""
    return _KNOWN.get(dialect or "", {})


def chosen(found: Offers, name: str, value: Any) -> Offers:
    """With one of them set."""
    choice = found.get(name)
    if choice is None or not isinstance(value, str):
        return found
    return {**found, name: replace(choice, current=value)}


def after(found: Offers, event: Mapping[str, Any]) -> Offers:
    """What can be chosen, and what is, after an event of the session's log."""
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
    # An agent of ACP's offers in its answer to session/new or in an update, Claude in its answer to our greeting.
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
        found = {**found, "permission_mode": SettingChoice(_text(modes.get("currentModeId")), values)}
    # Options are the newer way, and where an agent has both, they are meant to be used.
    for option in _mappings(offered.get("configOptions")):
        name = NAMES.get(str(option.get("category")))
        if name is not None:
            groups = [_mappings(each.get("options")) or [each] for each in _mappings(option.get("options"))]
            values = _values([each for group in groups for each in group], "value")
            found = {**found, name: SettingChoice(_text(option.get("currentValue")), values)}
    return found


def _values(listed: Any, value: str, name: str = "name") -> tuple[tuple[str, str], ...]:
    pairs = ((_text(each.get(value)), _text(each.get(name))) for each in _mappings(listed))
    return tuple((found, shown or found) for found, shown in pairs if found is not None)[:VALUES_MAX]


def told(found: Offers) -> dict[str, Any]:
    """Members of the answer to `session/new`, `load` and `resume`. `models` is for older clients."""
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
    """The choice, if the protocol can express it: with a value that is chosen, which is one of those offered."""
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
