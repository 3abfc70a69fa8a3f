"""A version of Banksman says whether it can decode the state of a session that another version hands over."""

from __future__ import annotations

from typing import Any, cast, get_args

import pytest
from msgspec.structs import replace
from tests.core.session.test_hand_over import running

from banksman.core.dialects.acp import ORDINARY, Acp
from banksman.core.dialects.claude import CLAUDE
from banksman.core.dialects.codex import CODEX
from banksman.core.dialects.dialect import Dialect, ProtocolState, Setup
from banksman.core.session import live_state
from banksman.core.session.ask_queue import Hold
from banksman.core.session.effects import Accept, Finish, GiveReceipt, LeaveInLog, Resolve, SettingTaken, TellAnswer
from banksman.core.session.outcome import By, Kind, Outcome, Receipt
from banksman.core.session.session_config import Config
from banksman.core.session.state import AgentTurnEnded, Deferred, MaySteer, MayWrite, ProcessState, Session
from banksman.core.session.usage import NO_USAGE, Counted
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
        # Older versions offer effects that no record has.
        ("Accept", ["turn"], ""),
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


def test_names_have_everything_that_outlives_a_killed_host_and_nothing_else_that_waits() -> None:
    known = {(name, member) for name, members in OURS.items() for member in members}
    effects = (
        Accept("a"),
        Resolve("a", Outcome(kind=Kind.DONE)),
        LeaveInLog("a"),
        GiveReceipt("i", Receipt(stopped=True, by=By.BOUNDARY)),
        MayWrite("a 1"),
        AgentTurnEnded("a", 1),
        Finish(),
        MaySteer("a 1", "b"),
        SettingTaken("c"),
        TellAnswer("q", "yes", "human"),
        Counted(None, None, NO_USAGE),
    )
    kinds = {type(effect) for effect in effects}
    assert kinds == set(get_args(Deferred))
    hold = Hold("h", 0, 0.0)
    state = replace(running().state, hold=hold, deferred=tuple(enumerate(effects)))
    state = replace(state, queue=(hold, *state.queue))
    found = said(live_state.encode(live_state.surviving(state))["fields"])
    assert found <= known
    recorded = {name for name, _ in found}
    waiting = {kind.__name__ for kind in kinds} | {"Hold"}
    assert waiting & recorded == waiting & OURS.keys() == {"MayWrite", "MaySteer"}
