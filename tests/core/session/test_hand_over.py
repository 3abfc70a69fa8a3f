"""A session is handed over together with its process: when it may be, and what its next host gets.

The explored worlds (scenarios.py) hand it over at every point. These tests show single points, and the codec.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from tests.core.session.scenarios import LOW, USUAL
from tests.core.session.talk import CONFIG, Talk, of

from banksman.core.dialects.acp import ORDINARY, Acp
from banksman.core.dialects.claude import CLAUDE
from banksman.core.dialects.codex import CODEX
from banksman.core.dialects.dialect import Dialect, Setup
from banksman.core.dialects.meaning import ProviderFailure, Requested, RequestPurpose, TurnOver
from banksman.core.process_facts import FrameWritten
from banksman.core.session import event as kinds
from banksman.core.session import live_state
from banksman.core.session.effects import Finish, GiveReceipt, HandOver, LeaveInLog, Reject, StopProcess
from banksman.core.session.facts import (
    AskWithdrawn,
    HandedOver,
    HandOverAsked,
    HandOverFailed,
    InterruptAsked,
    ProcessReported,
    Timer,
)
from banksman.core.session.session_config import Config
from banksman.core.session.state import Mode, Session
from banksman.errors import ErrorKind, Moved, Moving, StoreTooNew

ABOUT = {"hold": "h", "host": 7, "until": 9.0}


def running() -> Talk:
    """A session with an open turn, and an ask that waits."""
    talk = Talk()
    talk.ask(USUAL)
    talk.begin()
    talk.opens(USUAL.ref)
    talk.ask(LOW)
    return talk


def hand_over(talk: Talk, by: float = 10.0) -> bool:
    """Ask for the hand-over. Return whether the driver is to begin it."""
    return bool(of(HandOver, talk.tell(HandOverAsked(talk.at, talk.at + by))))


def test_open_turn_is_handed_over_with_its_process() -> None:
    talk = running()
    assert hand_over(talk)
    effects = talk.tell(HandedOver(talk.at, 1, ABOUT))
    assert [effect.turn for effect in of(LeaveInLog, effects)] == [USUAL.id, LOW.id]
    assert of(Finish, effects)
    assert not of(StopProcess, talk.effects)
    assert talk.logged(kinds.SESSION_HANDED_OVER) == [{**ABOUT, "process": 1, "open": [USUAL.id], "queued": [LOW.id]}]
    assert talk.state.is_handed_over


def test_session_being_handed_over_accepts_and_sends_nothing_new() -> None:
    talk = running()
    talk.is_pipe_full = True
    talk.tell(InterruptAsked(talk.at, USUAL.id, "stop"))
    assert not hand_over(talk), "a frame is on its way"
    (refused,) = of(Reject, talk.ask(replace(USUAL, id="late", ref="late0000")))
    assert isinstance(refused.error, Moving)
    assert of(HandOver, talk.tell(ProcessReported(talk.at, 1, FrameWritten())))
    assert [waiting.id for waiting in talk.state.queue] == [LOW.id]


def test_interrupt_without_receipt_gets_moved_when_its_turn_is_handed_over() -> None:
    talk = running()
    talk.tell(InterruptAsked(talk.at, USUAL.id, "first"))
    assert hand_over(talk)
    (first,) = of(GiveReceipt, talk.tell(HandedOver(talk.at, 1, ABOUT)))
    (second,) = of(GiveReceipt, talk.tell(InterruptAsked(talk.at, USUAL.id, "second")))
    assert isinstance(first.error, Moved)
    assert isinstance(second.error, Moved)
    held = live_state.frozen(talk.state).turn
    assert held is not None
    assert held.interrupts == ()


def test_session_without_process_leaves_instead() -> None:
    talk = Talk()
    assert not hand_over(talk)
    assert talk.state.mode is Mode.LEFT
    assert talk.logged(kinds.SESSION_LEFT) == [{"queued": []}]


def test_session_leaves_when_the_keeper_refuses() -> None:
    talk = running()
    assert hand_over(talk)
    talk.tell(HandOverFailed(talk.at, 1, is_final=True))
    assert talk.state.mode is Mode.LEAVING
    talk.hear(b"over " + USUAL.ref.encode() + b" " + USUAL.ref.encode(), b"settled " + USUAL.ref.encode())
    talk.die(code=0)
    assert talk.logged(kinds.SESSION_LEFT) == [{"queued": [LOW.id]}]


def test_session_leaves_at_its_deadline_when_a_callback_runs() -> None:
    talk = running()
    talk.mean(Requested("r", RequestPurpose.HOOK, tool="hook"))
    assert not hand_over(talk)
    assert talk.fire((Timer.LEAVE, "session"))
    assert talk.state.mode is Mode.PARTING
    assert of(StopProcess, talk.effects)


def test_withdrawal_does_not_bring_a_handed_over_session_back() -> None:
    talk = running()
    assert hand_over(talk)
    talk.is_log_slow = True
    talk.tell(HandedOver(talk.at, 1, ABOUT))
    assert talk.tell(AskWithdrawn(talk.at, LOW.id)) == []
    assert of(Finish, talk.commit())


# -- the codec -------------------------------------------------------------------------------------------------------
def again(state: Session) -> Session:
    return live_state.decode(msgspec.json.decode(msgspec.json.encode(live_state.encode(state))), state.config)


@pytest.mark.parametrize("dialect", [CLAUDE, CODEX, Acp(ORDINARY)], ids=["claude", "codex", "acp"])
def test_state_of_a_dialect_is_the_same_after_encoding(dialect: Dialect) -> None:
    protocol = dialect.begin(Setup(cwd="/", mcp_servers=({"name": "s", "args": [1, None, True, 0.5]},)))
    for _ in range(3):
        protocol = protocol.handshake("h").protocol
    protocol = protocol.prompt("ref", [{"type": "text", "text": "a\u00e9"}]).protocol
    config = Config(dialect=dialect)
    state = Session(config=config)
    state = replace(state, process=replace(state.process, protocol=protocol))
    assert again(state) == state
    found = again(state).process.protocol
    assert found is not None
    assert found.interrupt("i") == protocol.interrupt("i")


def test_failure_of_a_provider_is_the_same_after_encoding() -> None:
    """A turn may wait for the last words of its agent after the boundary that told of the failure."""
    talk = running()
    failure = ProviderFailure(ErrorKind.USAGE_LIMIT, limited_until=9.0)
    talk.mean(TurnOver((USUAL.ref,), is_error=True, error="limited", failure=failure))
    turn = talk.state.turn
    assert turn is not None
    assert turn.boundary is not None
    assert turn.boundary.failure == failure
    assert again(talk.state) == talk.state


# Where the encoded state differs from what this version would write.
CHANGES: dict[str, tuple[tuple[str | int, ...], object]] = {
    "version": (("version",), 2),
    "field of the session": (("fields", "unheard"), 1),
    "field of the turn": (("fields", "turn", 2, "unheard"), 1),
    "class": (("fields", "turn"), ["struct", "Unheard", {}]),
    "member": (("fields", "mode"), ["enum", "Mode", "UNHEARD"]),
    "form": (("fields", "mode"), ["unheard"]),
    "nothing": (("fields",), None),
}


@pytest.mark.parametrize(("path", "value"), CHANGES.values(), ids=list(CHANGES))
def test_state_of_another_version_is_refused(path: tuple[str | int, ...], value: object) -> None:
    encoded = live_state.encode(running().state)
    *above, last = path
    place: Any = encoded
    for name in above:
        place = place[name]
    place[last] = value
    with pytest.raises(StoreTooNew, match="cannot decode the state"):
        live_state.decode(encoded, CONFIG)


def test_value_without_a_form_is_refused() -> None:
    state = running().state
    with pytest.raises(TypeError):
        live_state.encode(replace(state, store_error=Moved("no form")))
    with pytest.raises(TypeError, match="no form for inf"):
        live_state.encode(replace(state, cost=float("inf")))
