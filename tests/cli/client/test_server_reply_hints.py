"""Hints of the server in a shell name verbs, and contain no HTTP and no Python."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.thorough import thorough

from banksman.cli.client.server_reply import detail_of, hint_of

pytestmark = thorough

PACKAGE = Path(__file__).resolve().parents[3] / "src" / "banksman"
FOREIGN = re.compile(r"/v1\b|openapi|\b(GET|POST|PATCH|PUT|DELETE)\b|Idempotency|Content-Type|\w\(\)")


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("see /v1/hosts", "see banksman hosts"),
        (
            "compare the versions of the hosts: see /v1/hosts",
            "compare the versions of the hosts: see banksman hosts",
        ),
        ("see /v1/sessions", "see banksman ps"),
        (
            "check the session (GET), and send the request again if it was not done",
            "check the session, and send the request again if it was not done",
        ),
        (
            "try again with the same Idempotency-Key; accepted requests are kept (tried for 12 s)",
            "try again; accepted requests are kept (tried for 12 s)",
        ),
        ("see /openapi.json", ""),
        ("send `Content-Type: application/json`", ""),
        ("use GET, HEAD", ""),
        # Unchanged: Python's words, and words that a shell understands.
        ("pass command=", "add -- COMMAND …"),
        ("list the sessions", "see banksman ps"),
        ("raise the limit (ulimit -n), or --room=9", "raise the limit (ulimit -n), or --room=9"),
    ],
)
def test_hint_names_the_verb_instead_of_the_request(said: str, shown: str) -> None:
    assert hint_of(said) == shown


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("invalid body: Expected `str` of length >= 1 - at `$.name`", "--name cannot be empty"),
        (
            "invalid body: Expected `str` of length >= 1 - at `$.permission_mode`",
            "--permission-mode cannot be empty",
        ),
        ("on_busy cannot be 'foo'", "--on-busy cannot be 'foo'"),
        ("the queue is full", "the queue is full"),
    ],
)
def test_detail_names_the_flag_instead_of_the_argument(said: str, shown: str) -> None:
    assert detail_of(said) == shown


def hints() -> Iterator[str]:
    """Yield every hint in the source of the server and the layers below it, with a dash for each inserted value."""
    for path in sorted(
        file
        for part in ("server", "runtime", "sessions", "commands", "process", "cluster", "store")
        for file in (PACKAGE / part).rglob("*.py")
    ):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.keyword(arg="hint", value=value):
                    yield from _texts(value)
                case ast.Assign(targets=[ast.Name(id="hint")], value=value):
                    yield from _texts(value)
                case _:
                    pass


def _texts(value: ast.expr) -> Iterator[str]:
    match value:
        case ast.Constant(value=str(text)):
            yield text
        case ast.JoinedStr(values=parts):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "-" for part in parts)
        case ast.IfExp(body=one, orelse=other):
            yield from (*_texts(one), *_texts(other))
        case ast.BoolOp(values=parts):
            yield from (text for part in parts for text in _texts(part))
        case _:
            pass


def test_hints_in_the_source_never_show_http_to_a_shell() -> None:
    found = set(hints())
    assert len(found) > 100, "they are found at all"
    assert [said for said in sorted(found) if FOREIGN.search(hint_of(said))] == []
