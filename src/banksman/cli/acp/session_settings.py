"""Model and permission mode of a session, as ACP's modes, models and config options. Pure.

What can be chosen is known from the agent's dialect, or from what the agent itself offers when its process starts: that
is heard in the log, and the editor is told by a `config_option_update`. An agent of which neither is known offers
nothing; what is set there all the same goes to the agent as it is.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

# By the id of an option, our word for it. The ids are the categories of the protocol.
NAMES = {"model": "model", "mode": "permission_mode"}
_LABELS = {"model": "Model", "mode": "Mode"}

# More values than anybody could choose from.
VALUES_MAX = 1000
# What may stand in a frame that offers something: all others are not even decoded.
_OFFERING = ('"modes"', '"models"', '"configOptions"', '"current_mode_update"')
# Updates of the agent's about them, with ids that only it knows. The editor is told in ours.
UPDATES = ("config_option_update", "current_mode_update")


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
