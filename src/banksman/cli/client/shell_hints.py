"""Translate the errors of a server, which name arguments and HTTP paths, to flags and verbs."""

from __future__ import annotations

import re

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
