"""Cleanup of the processes that an interrupted turn leaves: one sweep, before the next turn begins."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from tests.core.session import toy
from tests.core.session.scenarios import ask
from tests.core.session.talk import TELLING, Talk, of, sent

from banksman.core.dialects.meaning import Requested, RequestPurpose
from banksman.core.process_facts import (
    Survivor,
    SweepEnded,
    Swept,
)
from banksman.core.session import event as kinds
from banksman.core.session.ask_queue import INTERACTIVE, NORMAL
from banksman.core.session.effects import CallBack, EndTerminals, StopProcess, SweepTools
from banksman.core.session.facts import (
    InterruptAsked,
    ProcessReported,
    TerminalsEnded,
    Timer,
)
from banksman.core.session.outcome import Kind
from banksman.core.session.tool_cleanup import SWEEP_SECONDS_MAX

A, B = ask("a", NORMAL), ask("b", NORMAL)
LEAVES = replace(TELLING, leaves_tools=True)
SLEEP = Swept(99, "sleep 60")


def _interrupted(config: object = LEAVES) -> Talk:
    talk = Talk(config)  # type: ignore[arg-type]
    talk.ask(A)
    talk.at = 1.0
    talk.begin()
    talk.at = 2.0
    talk.opens("a0000")
    talk.tell(InterruptAsked(talk.at, "a", "stop"))
    talk.hear(b"ok interrupt-a#1-1", b"over a0000! a0000", b"settled a0000")
    assert talk.kinds == {"a": Kind.INTERRUPTED}
    return talk


def test_sweep_covers_processes_started_since_prompt() -> None:
    talk = _interrupted()
    assert of(SweepTools, talk.effects) == [SweepTools(1, 1.0, True)]


def test_sweep_of_later_turn_starts_at_its_own_prompt() -> None:
    talk = Talk(LEAVES)
    talk.serve(A)
    talk.at = 7.0
    talk.ask(B)
    talk.at = 8.0
    talk.opens("b0000")
    talk.tell(InterruptAsked(talk.at, "b", "stop"))
    talk.hear(b"ok interrupt-b#1-1", b"over b0000! b0000", b"settled b0000")
    assert of(SweepTools, talk.effects) == [SweepTools(1, 7.0, True)]


def test_next_prompt_waits_for_sweep() -> None:
    talk = _interrupted()
    assert not sent(talk.ask(B))
    assert sent(talk.tell(ProcessReported(talk.at, 1, SweepEnded()))) == [b"P b0000\n"]


def test_sweep_is_logged_with_turn_that_left_processes() -> None:
    talk = _interrupted()
    talk.tell(ProcessReported(talk.at, 1, SweepEnded((SLEEP,), (Survivor(98, "other", "no permission to signal it"),))))
    (body,) = talk.logged(kinds.PROCESS_SWEPT)
    assert body["swept"] == [{"pid": 99, "command": "sleep 60"}]
    assert body["survivors"] == [{"pid": 98, "command": "other", "why": "no permission to signal it"}]
    assert body["after"] == "a"


def test_sweep_that_found_nothing_is_not_logged() -> None:
    talk = _interrupted()
    talk.tell(ProcessReported(talk.at, 1, SweepEnded()))
    assert not talk.logged(kinds.PROCESS_SWEPT)


def test_sweep_only_reports_when_policy_is_keep() -> None:
    talk = _interrupted(replace(LEAVES, after_interrupt="keep"))
    assert [effect.ends for effect in of(SweepTools, talk.effects)] == [False]
    talk.tell(ProcessReported(talk.at, 1, SweepEnded((SLEEP,))))
    assert not talk.logged(kinds.PROCESS_SWEPT)
    assert talk.logged(kinds.PROCESS_LEFT) == [
        {"process": 1, "left": [{"pid": 99, "command": "sleep 60"}], "after": "a"}
    ]


def test_completed_turn_is_not_swept() -> None:
    talk = Talk(LEAVES)
    talk.serve(A)
    assert not of(SweepTools, talk.effects)


def test_turn_is_not_swept_when_agent_cleans_up() -> None:
    assert not of(SweepTools, _interrupted(TELLING).effects)


def test_preempted_turn_is_swept_before_urgent_one_begins() -> None:
    talk = Talk(LEAVES)
    talk.ask(A)
    talk.begin()
    talk.opens("a0000")
    talk.ask(ask("urgent", INTERACTIVE))
    assert not sent(talk.hear(b"ok interrupt-a#1-1", b"over a0000! a0000", b"settled a0000"))
    assert sent(talk.tell(ProcessReported(talk.at, 1, SweepEnded()))) == [b"P urgent0000\n"]


def test_unanswered_sweep_ends_process() -> None:
    talk = _interrupted()
    assert talk.waits_for(Timer.SWEEP) == ["1"]
    assert of(StopProcess, talk.wait(SWEEP_SECONDS_MAX)) == [StopProcess(1)]


def test_sweep_answer_of_dead_process_is_ignored() -> None:
    talk = _interrupted()
    talk.die(code=1)
    assert not talk.waits_for(Timer.SWEEP)
    talk.ask(B)
    talk.tell(ProcessReported(talk.at, 1, SweepEnded((SLEEP,))))
    assert not talk.logged(kinds.PROCESS_SWEPT)


@pytest.mark.parametrize("count", [1, 3])
def test_agent_initiated_turns_during_sweep_are_swept_too(count: int) -> None:
    talk = _interrupted()
    talk.ask(ask("urgent", INTERACTIVE))
    for number in range(count):
        # A more urgent ask has waited for the sweep, and waits for the end of this turn too.
        talk.hear(b"own")
        request = [data for data in sent(talk.effects) if data.startswith(b"I ")][-1].split()[1]
        talk.hear(b"ok " + request, b"ownover own!")
        assert talk.state.own is None, number
    assert len(of(SweepTools, talk.effects)) == 1
    talk.tell(ProcessReported(talk.at, 1, SweepEnded()))
    assert len(of(SweepTools, talk.effects)) == 2
    assert sent(talk.tell(ProcessReported(talk.at, 1, SweepEnded()))) == [b"P urgent0000\n"]


def test_turn_that_finished_before_interrupt_is_swept_too() -> None:
    talk = Talk(replace(LEAVES, dialect=toy.ToyDialect(acknowledges_interrupts=False)))
    talk.ask(A)
    talk.begin()
    talk.opens("a0000")
    talk.tell(InterruptAsked(talk.at, "a", "stop"))
    talk.hear(b"over a0000 a0000", b"settled a0000")
    assert talk.kinds == {"a": Kind.DONE}
    assert len(of(SweepTools, talk.effects)) == 1


def test_sweep_of_steered_turn_starts_at_end_of_previous_one() -> None:
    talk = Talk(LEAVES)
    talk.ask(A)
    talk.begin()
    talk.opens("a0000")
    talk.ask(ask("more", NORMAL, on_busy="steer"))
    talk.at = 5.0
    talk.hear(b"over a0000 a0000", b"settled a0000")
    talk.wait(0.5)
    began = talk.at
    talk.at = 7.0
    talk.opens("more0000")
    talk.tell(InterruptAsked(talk.at, "more", "stop"))
    talk.hear(b"ok interrupt-more#1-1", b"over more0000! more0000", b"settled more0000")
    (swept,) = of(SweepTools, talk.effects)
    assert 5.0 <= swept.since <= began


# -- terminals ---------------------------------------------------------------------------------------------------------
SERVES = replace(TELLING, serves_terminals=True)


@pytest.mark.parametrize("policy", ["sweep", "keep"])
def test_interrupt_ends_or_reports_workspace_commands_of_turn(policy: str) -> None:
    talk = Talk(replace(SERVES, after_interrupt=policy))
    talk.serve(A)
    talk.at = 7.0
    talk.ask(B)
    talk.opens("b0000")
    effects = talk.tell(InterruptAsked(talk.at, "b", "stop"))
    assert of(EndTerminals, effects) == [EndTerminals(1, "b", 7.0, policy == "sweep")]
    talk.tell(TerminalsEnded(talk.at, 1, "b", (SLEEP,)))
    kind, member = (kinds.PROCESS_SWEPT, "swept") if policy == "sweep" else (kinds.PROCESS_LEFT, "left")
    (body,) = talk.logged(kind)
    assert (body[member], body["after"]) == ([{"pid": 99, "command": "sleep 60"}], "b")


def test_stopping_turn_starts_no_workspace_command() -> None:
    talk = Talk(SERVES)
    talk.ask(A)
    talk.begin()
    talk.opens("a0000")
    asked = Requested("7", RequestPurpose.WORKSPACE, "terminal/create")
    assert of(CallBack, talk.mean(asked))
    talk.tell(InterruptAsked(talk.at, "a", "stop"))
    late = talk.mean(replace(asked, request="8"))
    assert not of(CallBack, late)
    assert sent(late) == [b"R 8 cancelled\n"]
