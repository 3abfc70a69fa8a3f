"""JSON replies of a server: decoding, and type checks of the members that verbs rely on.

An unexpected shape gives a readable error. Verbs index replies by name, and each object of a reply
raises `UnexpectedReply` for a missing member. The members that verbs rely on are type-checked when
the reply arrives. Deeper levels are JSON of an agent, whose shape is unknown.
"""

from __future__ import annotations

import json
from typing import Any, cast

from banksman.errors import BanksmanError

_NUMBER = (int, float)
_MAYBE_TEXT, _MAYBE_NUMBER = (str, type(None)), (int, float, type(None))
# Members of a reply, or of an object listed in it, that have one meaning in the whole API.
_TYPES: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("id", "agent", "state", "phase", "kind", "cursor", "question", "answer"), str),
    **dict.fromkeys(("name", "holder", "turn", "hold", "host", "cwd"), _MAYBE_TEXT),
    **dict.fromkeys(("seq", "epoch"), int),
    **dict.fromkeys(("at", "cost", "limited_until"), _MAYBE_NUMBER),
    "created": _NUMBER,
    **dict.fromkeys(("questions", "argv", "queue", "tasks", "threads"), list),
    **dict.fromkeys(("body", "counters", "timers"), dict),
    **dict.fromkeys(("finished", "owner", "last_in", "last_out"), (dict, type(None))),
}
# Members of GET replies that are lists of objects. These objects are checked, too.
_LISTED = (
    "sessions",
    "events",
    "commands",
    "hosts",
    "agents",
    "asked",
    "tree",
    "clocks",
    "requests",
    "budget",
    "budgets",
)
_HINT = "check that --url or BANKSMAN_URL names a Banksman server of this version"


class UnexpectedReply(BanksmanError):
    """The server is not Banksman, or is another version of it."""


class ServerReply(dict[str, Any]):
    """A JSON object from a server. A missing member raises `UnexpectedReply`."""

    def __missing__(self, name: str) -> Any:
        raise UnexpectedReply(f"cannot read the server's reply: it has no {name!r}", hint=_HINT)


def decode(text: str | bytes) -> Any:
    """Decode JSON into `ServerReply` objects. Raises `ValueError` or `RecursionError`."""
    return json.loads(text, object_hook=ServerReply)


def checked(reply: Any, *, is_look: bool = True) -> ServerReply:
    """Check that the reply is an object whose known members have the right types.

    `is_look`: the reply answers a GET, in which listed members must be objects, too.
    """
    if not isinstance(reply, ServerReply):
        raise UnexpectedReply(
            f"cannot read the server's reply: it is {_kind(reply)}, not an object", hint=_HINT
        )
    _check(reply)
    for name in _LISTED if is_look else ():
        listed = reply.get(name, [])
        for each in cast("list[Any]", listed) if isinstance(listed, list) else (listed,):
            if not isinstance(listed, list) or not isinstance(each, ServerReply):
                raise UnexpectedReply(
                    f"cannot read the server's reply: {name!r} contains {_kind(each)}", hint=_HINT
                )
            _check(each)
    return reply


def _check(said: ServerReply) -> None:
    for name, value in said.items():
        expected = _TYPES.get(name)
        if expected is not None and not isinstance(value, expected):
            raise UnexpectedReply(
                f"cannot read the server's reply: {name!r} is {_kind(value)}", hint=_HINT
            )


def _kind(value: Any) -> str:
    names = {
        dict: "an object",
        list: "a list",
        str: "a string",
        bool: "a boolean",
        type(None): "null",
    }
    return next((name for kind, name in names.items() if isinstance(value, kind)), "a number")
