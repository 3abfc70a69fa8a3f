"""Replies of a server: JSON with the members that verbs rely on, and hints in the words of verbs.

An unexpected shape gives a readable error. Verbs index replies by name, and each object of a reply
raises `UnexpectedReply` for a missing member. The members that verbs rely on are type-checked when
the reply arrives. Deeper levels are JSON of an agent, whose shape is unknown.

Errors of a server name arguments and HTTP paths. `detail_of` and `hint_of` translate them to flags
and verbs.
"""

from __future__ import annotations

import json
import re
from typing import Any, cast

from banksman.errors import BanksmanError

_NUMBER = (int, float)
_MAYBE_TEXT, _MAYBE_NUMBER = (str, type(None)), (int, float, type(None))
# Members of a reply, or of an object listed in it, that have one meaning in the whole API.
_TYPES: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("id", "agent", "state", "phase", "kind", "cursor", "question", "answer"), str),
    **dict.fromkeys(
        ("name", "holder", "holder_caller", "turn", "hold", "host", "cwd"), _MAYBE_TEXT
    ),
    **dict.fromkeys(("seq", "epoch"), int),
    **dict.fromkeys(("at", "cost", "limited_until", "holder_since"), _MAYBE_NUMBER),
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
        # The owner of a session is a process; that of `…/shared` is the name of a caller.
        is_caller = name == "owner" and "shared" in said
        expected = _MAYBE_TEXT if is_caller else _TYPES.get(name)
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


_ON_BUSY = re.compile(r'on_busy="(\w+)"')
# Matches `sessions()` and `after=None`, which are Python. Does not match `(ulimit -n)`,
# `--flag=value` or `VARIABLE=value`, which a shell understands.
_PYTHON = re.compile(r"\w\(|(?<![-\w])[a-z_]+=|\ban int\b")
# HTTP paths in hints, and the verb that replaces each. The longer path comes first.
_VERBS = {
    "/v1/hosts": "banksman hosts",
    "/v1/sessions": "banksman ps",
    "/v1/commands": "banksman ps --all",
}
_PATH = re.compile("|".join(map(re.escape, _VERBS)))
_OF_HTTP = re.compile(r",? with the same Idempotency-Key| \((?:GET|POST|PATCH|PUT|DELETE)\)")
_HTTP = re.compile(
    r"/v\d+/|/openapi\.json|\b(?:GET|POST|PATCH|PUT|DELETE|HEAD)\b"
    r"|[A-Z][a-z]+-(?:Key|Type|Length|After)\b"
)
# A part of a hint, and the CLI step that replaces the whole hint.
_STEPS = (
    ("list the sessions", "see banksman ps"),
    ("list the commands", "see banksman ps --all"),
    ("without a cursor", "begin again without --after"),
    ("without a position", "begin again without --after"),
    ("pass command=", "add -- COMMAND …"),
)
# The arguments of the API that are flags of verbs.
_EMPTY = re.compile(
    r"invalid body: Expected `str` of length >= 1 - at `\$\.(name|model|permission_mode|cwd)`"
)
_ON_BUSY_VALUE = re.compile(r"^on_busy cannot be\b")


def detail_of(said: str) -> str:
    """Translate a server's error message: name the flag instead of the argument."""
    empty = _EMPTY.fullmatch(said)
    if empty is not None:
        return f"--{empty[1].replace('_', '-')} cannot be empty"
    return _ON_BUSY_VALUE.sub("--on-busy cannot be", said)


def hint_of(said: str) -> str:
    """Translate a server's hint for a user at a shell.

    Hints are written for callers of Python or HTTP. A hint that names a call, an argument or a path
    is replaced by the matching CLI step, or dropped if no step certainly helps.
    """
    hint = _ON_BUSY.sub(r"--on-busy \1", said)
    hint = _PATH.sub(lambda found: _VERBS[found[0]], _OF_HTTP.sub("", hint))
    step = next((step for named, step in _STEPS if named in hint), "")
    if step or _PYTHON.search(hint):
        return step
    return "" if _HTTP.search(hint) else hint
