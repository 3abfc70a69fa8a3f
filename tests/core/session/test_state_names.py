"""A version of Banksman says whether it can decode the state of a session that another version hands over."""

from __future__ import annotations

from typing import Any, cast

import pytest
from tests.core.session.test_hand_over import running

from banksman.core.dialects.acp import ORDINARY, Acp
from banksman.core.dialects.claude import CLAUDE
from banksman.core.dialects.codex import CODEX
from banksman.core.dialects.dialect import Dialect, ProtocolState, Setup
from banksman.core.session import live_state
from banksman.core.session.session_config import Config
from banksman.core.session.state import ProcessState, Session
from banksman.runtime import formats

OURS = formats.names()


@pytest.mark.parametrize(
    ("name", "members", "why"),
    [
        ("Turn", OURS["Turn"], ""),
        ("Turn", [*OURS["Turn"], "unheard"], "Turn.unheard is unknown in this version"),
        ("Turn", [name for name in OURS["Turn"] if name != "attempt"], ""),
        ("Turn", [name for name in OURS["Turn"] if name != "ask"], "Turn.ask is new in this version"),
        ("Mode", [*OURS["Mode"], "UNHEARD"], "Mode.UNHEARD is unknown in this version"),
        ("Mode", ["OPEN"], ""),
        ("Unheard", [], "'Unheard' is unknown in this version"),
        ("records", ["banksman-held-99"], "records in the format 'banksman-held-99' are unknown in this version"),
        ("Session", [*OURS["Session"], "config"], "Session.config is unknown in this version"),
        ("HeldSession", [*OURS["HeldSession"], "unheard"], "HeldSession.unheard is unknown in this version"),
    ],
)
def test_names_that_cannot_be_decoded_are_found(name: str, members: list[str], why: str) -> None:
    assert formats.misfit({**OURS, name: members}) == why


def said(value: Any) -> set[tuple[str, str]]:
    """Return the names in an encoded value: the fields of its Structs, the members of its enums."""
    match value:
        case ["struct", str(name), fields]:
            told = cast("dict[str, Any]", fields)
            return {(name, field) for field in told}.union(*map(said, told.values()))
        case ["enum", str(name), str(member)]:
            return {(name, member)}
        case list():
            return set[tuple[str, str]]().union(*map(said, cast("list[Any]", value)))
        case dict():
            return set[tuple[str, str]]().union(*map(said, cast("dict[str, Any]", value).values()))
        case _:
            return set()


def in_use(dialect: Dialect) -> ProtocolState:
    protocol = dialect.begin(Setup(cwd="/", mcp_servers=({"name": "s"},)))
    for _ in range(3):
        protocol = protocol.handshake("h").protocol
    return protocol.prompt("ref", "prompt").protocol


@pytest.mark.parametrize("dialect", [CLAUDE, CODEX, Acp(ORDINARY)], ids=["claude", "codex", "acp"])
def test_names_have_everything_that_is_encoded(dialect: Dialect) -> None:
    known = {(name, member) for name, members in OURS.items() for member in members}
    process = ProcessState(protocol=in_use(dialect))
    found = said(live_state.encode(Session(config=Config(dialect=dialect), process=process))["fields"])
    found |= said(live_state.encode(running().state)["fields"])
    assert {name for name, _ in found} > {"Turn", "Ask", "Priority", "ProcessState", "ProcessPhase"}
    assert found <= known
