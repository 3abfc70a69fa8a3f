"""Decode what a server says, so that a reply of another shape is an error that a person can read.

Verbs index replies by name. Every object of a reply raises `UnexpectedReply` for a member that is not there, and the
members on which verbs rely are checked for their type when the reply arrives. What lies deeper is an agent's own JSON,
of which nothing is known.
"""

from __future__ import annotations

import json
from typing import Any, cast

from banksman.errors import BanksmanError

_NUMBER = (int, float)
_MAYBE_TEXT, _MAYBE_NUMBER = (str, type(None)), (int, float, type(None))
# Members of a reply, or of an object that it lists, with one meaning in the whole API.
_TYPES: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("id", "agent", "state", "phase", "kind", "cursor", "question", "answer"), str),
    **dict.fromkeys(("name", "holder", "turn", "hold", "host", "cwd"), _MAYBE_TEXT),
    **dict.fromkeys(("seq", "epoch"), int),
    **dict.fromkeys(("at", "cost"), _MAYBE_NUMBER),
    "created": _NUMBER,
    **dict.fromkeys(("questions", "argv", "queue", "tasks", "threads"), list),
    **dict.fromkeys(("body", "counters", "timers"), dict),
    **dict.fromkeys(("finished", "owner", "last_in", "last_out"), (dict, type(None))),
}
# What a look lists: objects, each with members as above.
_LISTED = ("sessions", "events", "commands", "hosts", "agents", "asked", "tree", "clocks", "requests")
_HINT = "is it a Banksman server of this version? See --url and BANKSMAN_URL"


class UnexpectedReply(BanksmanError):
    """What answers is no server of ours, or one of another version."""


class ServerReply(dict[str, Any]):
    """An object that a server has sent."""

    def __missing__(self, name: str) -> Any:
        raise UnexpectedReply(f"cannot read the server's reply: it has no {name!r}", hint=_HINT)


def decode(text: str | bytes) -> Any:
    """Raises `ValueError` or `RecursionError` for what is no JSON."""
    return json.loads(text, object_hook=ServerReply)


def checked(reply: Any, *, is_look: bool = True) -> ServerReply:
    """The reply, an object whose members are of their types. `is_look`: to a GET, where a list is one of objects."""
    if not isinstance(reply, ServerReply):
        raise UnexpectedReply(f"cannot read the server's reply: it is {_kind(reply)}, and no object", hint=_HINT)
    _check(reply)
    for name in _LISTED if is_look else ():
        listed = reply.get(name, [])
        for each in cast("list[Any]", listed) if isinstance(listed, list) else (listed,):
            if not isinstance(listed, list) or not isinstance(each, ServerReply):
                raise UnexpectedReply(f"cannot read the server's reply: {name!r} has {_kind(each)}", hint=_HINT)
            _check(each)
    return reply


def _check(said: ServerReply) -> None:
    for name, value in said.items():
        expected = _TYPES.get(name)
        if expected is not None and not isinstance(value, expected):
            raise UnexpectedReply(f"cannot read the server's reply: {name!r} is {_kind(value)}", hint=_HINT)


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "nothing"}
    return next((name for kind, name in names.items() if isinstance(value, kind)), "a number")
