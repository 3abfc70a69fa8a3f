"""The turn machine: its transition table, and the name and representation of a turn."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from banksman.core.session.ask_queue import NORMAL
from banksman.core.session.turn import TABLE, Ask, Cause, Move, Turn, TurnPhase, own, queued

ARCHITECTURE = Path(__file__).resolve().parents[3] / "docs" / "architecture.md"


def _diagram() -> str:
    """The transition table as a Mermaid diagram."""
    moves = [f"    {phase} --> {end}: {move.name.lower()}" for phase in TABLE for move, end in TABLE[phase].items()]
    return "\n".join(["stateDiagram-v2", "    [*] --> queued", *moves, "    ended --> [*]"])


def test_architecture_page_shows_turn_table() -> None:
    page = ARCHITECTURE.read_text(encoding="utf-8")
    assert f"```mermaid\n{_diagram()}\n```" in page, f"paste this into {ARCHITECTURE.name}:\n{_diagram()}"


def _ask(id: str = "a", **others: object) -> Ask:
    return Ask(id=id, ref=f"{id}-0000", prompt=others.pop("prompt", id), priority=NORMAL, **others)  # pyright: ignore[reportArgumentType]


def _paths(phase: TurnPhase, length: int) -> Iterator[tuple[Move, ...]]:
    yield ()
    if length:
        for move, following in TABLE[phase].items():
            yield from ((move, *rest) for rest in _paths(following, length - 1))


def test_turn_table_paths_can_be_walked() -> None:
    paths = list(_paths(TurnPhase.QUEUED, 8))
    assert len(paths) > 50
    for path in paths:
        turn = queued(_ask())
        for move in path:
            expected = TABLE[turn.phase][move]
            turn = turn.moved(move)
            assert turn.phase is expected


@pytest.mark.parametrize("phase", TurnPhase)
@pytest.mark.parametrize("move", Move)
def test_turn_move_outside_table_raises_and_changes_nothing(phase: TurnPhase, move: Move) -> None:
    turn = Turn(id="a", ask=_ask(), priority=NORMAL, phase=phase)
    if move in TABLE[phase]:
        assert turn.moved(move).phase is TABLE[phase][move]
        return
    with pytest.raises(AssertionError):
        turn.moved(move)
    assert turn.phase is phase


def test_ended_phase_is_final_and_reachable_from_every_phase() -> None:
    assert not TABLE[TurnPhase.ENDED]
    reaching = {TurnPhase.ENDED}
    while more := {p for p in TurnPhase if p not in reaching and set(TABLE[p].values()) & reaching}:
        reaching |= more
    assert reaching == set(TurnPhase)


def test_ended_turn_cannot_be_requeued() -> None:
    coming_back = {phase for phase in TurnPhase if Move.REQUEUE in TABLE[phase]}
    assert coming_back == {TurnPhase.STARTING, TurnPhase.RUNNING, TurnPhase.INTERRUPTING}


@given(attempts=st.integers(1, 70_000))
def test_requeued_turn_has_new_key_and_ref(attempts: int) -> None:
    turn = Turn(id="a", ask=_ask(), priority=NORMAL, phase=TurnPhase.STARTING, attempt=attempts, cause=Cause.PREEMPT)
    again = turn.requeued()
    assert again.phase is TurnPhase.QUEUED
    assert again.key != turn.key
    assert again.ref != turn.ref
    assert len(again.ref) == len(turn.ref)
    assert again.cause is None


def test_requeued_turn_keeps_collected_asks_and_drops_steered_ones() -> None:
    turn = Turn(
        id="a", ask=_ask(), priority=NORMAL, phase=TurnPhase.INTERRUPTING, joined=(_ask("b"),), steered=(_ask("c"),)
    )
    assert [ask.id for ask in turn.asks] == ["a", "b", "c"]
    assert [ask.id for ask in turn.requeued().asks] == ["a", "b"]


def test_collected_prompts_are_joined_into_one() -> None:
    texts = Turn(id="a", ask=_ask(), priority=NORMAL, joined=(_ask("b"),))
    assert texts.prompt == "a\n\nb"
    block = {"type": "image", "data": "…"}
    mixed = Turn(id="a", ask=_ask(), priority=NORMAL, joined=(_ask("b", prompt=[block]),))
    assert mixed.prompt == [{"type": "text", "text": "a"}, block]


def test_agent_initiated_turn_has_no_asks() -> None:
    turn = own("own-1", "task", 0, seq=7, heard=(), at=0.0)
    assert turn.is_own
    assert turn.is_open
    assert not turn.asks
    assert turn.ref == ""
    with pytest.raises(AssertionError):
        turn.moved(Move.STOP).requeued()
