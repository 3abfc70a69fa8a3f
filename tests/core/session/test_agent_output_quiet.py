"""Output after the boundary belongs to the turn. The turn ends after a quiet time."""

from __future__ import annotations

from msgspec.structs import replace
from tests.core.session.scenarios import ask
from tests.core.session.talk import CONFIG, Talk, of, sent

from banksman.core.dialects.meaning import TurnOver
from banksman.core.session.ask_queue import NORMAL
from banksman.core.session.effects import Append
from banksman.core.session.event import UPDATE
from banksman.core.session.facts import InterruptAsked
from banksman.core.session.outcome import Kind
from banksman.core.session.plain_frames import label_of
from banksman.core.session.turn_boundary import QUIET_TIMES_MAX

A, B = ask("a", NORMAL), ask("b", NORMAL)
QUIET = replace(CONFIG, quiet_seconds=0.1)


def _bounded() -> Talk:
    """The agent has sent the boundary."""
    talk = Talk(QUIET)
    talk.ask(A)
    talk.begin()
    talk.mean(TurnOver(("a0000",), text="a0000"))
    return talk


def test_turn_ends_after_quiet_time() -> None:
    talk = _bounded()
    assert not talk.kinds
    talk.wait(0.05)
    assert not talk.kinds
    talk.wait(0.05)
    assert talk.kinds == {"a": Kind.DONE}


def test_update_in_quiet_time_belongs_to_turn_and_restarts_wait() -> None:
    talk = _bounded()
    talk.wait(0.09)
    heard = talk.hear(b"text")
    assert [entry[0] for append in of(Append, heard) for entry in append.entries] == ["a"]
    talk.wait(0.09)
    assert not talk.kinds
    talk.wait(0.02)
    assert talk.kinds == {"a": Kind.DONE}


def test_frames_take_a_step_while_a_start_or_a_quiet_time_waits_for_them() -> None:
    talk = Talk(QUIET)
    talk.ask(A)
    assert label_of(talk.state) is None
    talk.begin()
    label = label_of(talk.state)
    assert label is not None
    assert label.entries([b"text"]) == [("a", UPDATE, b"text")]
    assert label_of(_bounded().state) is None


def test_quiet_time_is_bounded() -> None:
    talk = _bounded()
    for _ in range(QUIET_TIMES_MAX * 2 + 2):
        talk.wait(0.05)
        talk.hear(b"text")
    assert talk.kinds == {"a": Kind.DONE}


def test_next_prompt_waits_for_quiet_time() -> None:
    talk = _bounded()
    assert not sent(talk.ask(B))
    assert sent(talk.wait(0.1)) == [b"P b0000\n"]


def test_interrupt_in_quiet_time_is_too_late() -> None:
    talk = _bounded()
    talk.tell(InterruptAsked(talk.at, "a", "stop"))
    assert not [data for data in sent(talk.effects) if data.startswith(b"I")]
    talk.wait(0.1)
    assert talk.kinds == {"a": Kind.DONE}
