"""Translate the hints of a server, which name Python calls and HTTP paths, to CLI steps."""

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
_STEPS = (
    ("sessions()", "see banksman ps"),
    ("commands()", "see banksman ps --all"),
    ("an int", "interactive, normal, background, or a number"),
    ("after=None", "begin again without --after"),
    ("pass command=", "add -- COMMAND …"),
)


def hint_of(said: str) -> str:
    """Translate a server's hint for a user at a shell.

    Hints are written for callers of Python or HTTP. A hint that names a call, an argument or a path
    is replaced by the matching CLI step, or dropped if no step certainly helps.
    """
    hint = _ON_BUSY.sub(r"--on-busy \1", said)
    hint = _PATH.sub(lambda found: _VERBS[found[0]], _OF_HTTP.sub("", hint))
    if not _PYTHON.search(hint):
        return "" if _HTTP.search(hint) else hint
    return next((step for named, step in _STEPS if named in hint), "")
