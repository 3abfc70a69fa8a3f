"""What an interrupted turn leaves running: looked for once, before anything else is begun."""

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


def test_what_was_started_since_the_prompt_is_ended() -> None:
    talk = _interrupted()
    assert of(SweepTools, talk.effects) == [SweepTools(1, 1.0, True)]


def test_in_a_later_turn_it_is_since_that_turns_prompt() -> None:
    talk = Talk(LEAVES)
    talk.serve(A)
    talk.at = 7.0
    talk.ask(B)
    talk.at = 8.0
    talk.opens("b0000")
    talk.tell(InterruptAsked(talk.at, "b", "stop"))
    talk.hear(b"ok interrupt-b#1-1", b"over b0000! b0000", b"settled b0000")
    assert of(SweepTools, talk.effects) == [SweepTools(1, 7.0, True)]


def test_the_next_prompt_waits_for_it() -> None:
    talk = _interrupted()
    assert not sent(talk.ask(B))
    assert sent(talk.tell(ProcessReported(talk.at, 1, SweepEnded()))) == [b"P b0000\n"]


def test_what_was_ended_is_told_with_the_name_of_the_turn_that_left_it() -> None:
    talk = _interrupted()
    talk.tell(ProcessReported(talk.at, 1, SweepEnded((SLEEP,), (Survivor(98, "other", "not ours to signal"),))))
    (body,) = talk.logged(kinds.PROCESS_SWEPT)
    assert body["swept"] == [{"pid": 99, "command": "sleep 60"}]
    assert body["survivors"] == [{"pid": 98, "command": "other", "why": "not ours to signal"}]
    assert body["after"] == "a"


def test_if_nothing_was_left_nothing_is_told() -> None:
    talk = _interrupted()
    talk.tell(ProcessReported(talk.at, 1, SweepEnded()))
    assert not talk.logged(kinds.PROCESS_SWEPT)


def test_by_policy_it_is_only_told() -> None:
    talk = _interrupted(replace(LEAVES, after_interrupt="keep"))
    assert [effect.ends for effect in of(SweepTools, talk.effects)] == [False]
    talk.tell(ProcessReported(talk.at, 1, SweepEnded((SLEEP,))))
    assert not talk.logged(kinds.PROCESS_SWEPT)
    assert talk.logged(kinds.PROCESS_LEFT) == [
        {"process": 1, "left": [{"pid": 99, "command": "sleep 60"}], "after": "a"}
    ]


def test_a_turn_that_ended_by_itself_may_leave_what_it_likes() -> None:
    talk = Talk(LEAVES)
    talk.serve(A)
    assert not of(SweepTools, talk.effects)


def test_an_agent_that_cleans_up_is_not_swept_after() -> None:
    assert not of(SweepTools, _interrupted(TELLING).effects)


def test_a_preempted_turn_is_swept_after_before_the_urgent_one_begins() -> None:
    talk = Talk(LEAVES)
    talk.ask(A)
    talk.begin()
    talk.opens("a0000")
    talk.ask(ask("urgent", INTERACTIVE))
    assert not sent(talk.hear(b"ok interrupt-a#1-1", b"over a0000! a0000", b"settled a0000"))
    assert sent(talk.tell(ProcessReported(talk.at, 1, SweepEnded()))) == [b"P urgent0000\n"]


def test_one_that_is_never_answered_ends_the_process() -> None:
    talk = _interrupted()
    assert talk.waits_for(Timer.SWEEP) == ["1"]
    assert of(StopProcess, talk.wait(SWEEP_SECONDS_MAX)) == [StopProcess(1)]


def test_an_answer_of_a_process_that_is_gone_says_nothing() -> None:
    talk = _interrupted()
    talk.die(code=1)
    assert not talk.waits_for(Timer.SWEEP)
    talk.ask(B)
    talk.tell(ProcessReported(talk.at, 1, SweepEnded((SLEEP,))))
    assert not talk.logged(kinds.PROCESS_SWEPT)


@pytest.mark.parametrize("count", [1, 3])
def test_turns_that_the_agent_opens_meanwhile_and_are_stopped_are_swept_after_as_well(count: int) -> None:
    talk = _interrupted()
    talk.ask(ask("urgent", INTERACTIVE))
    for number in range(count):
        # Whoever is more urgent has waited for the sweep, and waits for this one's end too.
        talk.hear(b"own")
        request = [data for data in sent(talk.effects) if data.startswith(b"I ")][-1].split()[1]
        talk.hear(b"ok " + request, b"ownover own!")
        assert talk.state.own is None, number
    assert len(of(SweepTools, talk.effects)) == 1
    talk.tell(ProcessReported(talk.at, 1, SweepEnded()))
    assert len(of(SweepTools, talk.effects)) == 2
    assert sent(talk.tell(ProcessReported(talk.at, 1, SweepEnded()))) == [b"P urgent0000\n"]


def test_one_that_says_that_it_had_finished_may_have_left_its_tools_all_the_same() -> None:
    talk = Talk(replace(LEAVES, dialect=toy.ToyDialect(acknowledges_interrupts=False)))
    talk.ask(A)
    talk.begin()
    talk.opens("a0000")
    talk.tell(InterruptAsked(talk.at, "a", "stop"))
    talk.hear(b"over a0000 a0000", b"settled a0000")
    assert talk.kinds == {"a": Kind.DONE}
    assert len(of(SweepTools, talk.effects)) == 1


def test_a_turn_that_came_of_an_added_prompt_began_when_the_one_before_was_over() -> None:
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
def test_what_the_agent_has_had_us_run_in_the_turn_ends_with_it(policy: str) -> None:
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


def test_nothing_is_begun_for_a_turn_that_is_to_end() -> None:
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
