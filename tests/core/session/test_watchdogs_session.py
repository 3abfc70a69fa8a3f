"""The clocks of a turn in a session: which output counts as life, as progress, or as a tool."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from tests.core.session.scenarios import ask
from tests.core.session.talk import TELLING, Talk, of, sent

from banksman.core.dialects.claude import CLAUDE
from banksman.core.dialects.dialect import DENIED
from banksman.core.dialects.meaning import (
    BackgroundTask,
    Meaning,
    Noise,
    Requested,
    RequestPurpose,
    TasksChanged,
    Thought,
    ToolBegan,
    ToolEnded,
    TurnOpened,
    TurnOver,
)
from banksman.core.session.agent_output import TASKS_MAX
from banksman.core.session.ask_queue import INTERACTIVE, NORMAL
from banksman.core.session.effects import StopProcess
from banksman.core.session.facts import QuestionAnswered
from banksman.core.session.outcome import Kind
from banksman.core.session.watchdogs import ClockName

LIMITS = {"bytes": 10.0, "progress": 20.0, "tool": 100.0, "human": 1000.0, "overall": None}
CLOCKED = replace(TELLING, clocks=LIMITS)
A = ask("a", NORMAL)
TOOL, TOOL_OVER = ToolBegan(("t1",)), ToolEnded(("t1",))


def running() -> Talk:
    talk = Talk(CLOCKED)
    talk.ask(A)
    talk.begin()
    talk.opens("a0000")
    return talk


def ended_by(talk: Talk) -> str | None:
    """Return the clock that ends the turn if nothing else happens."""
    talk.wait(5000.0)
    talk.die(signal=15)
    return talk.outcomes["a"].clock


def runs(talk: Talk) -> set[str]:
    return {clock.name.value for clock in talk.state.clocks if clock.is_running}


def seconds_left(talk: Talk) -> float:
    """Return the seconds until the turn is interrupted."""
    begin = talk.at
    while not sent(talk.wait(0.5)):
        assert talk.at < begin + 5000
    return talk.at - begin


def test_running_tool_runs_only_its_own_clock() -> None:
    talk = running()
    talk.wait(4.0)
    talk.mean(TOOL)
    assert runs(talk) == {"tool"}
    assert not sent(talk.wait(99.5))
    assert sent(talk.wait(0.5)) == [b"I interrupt-a#1-1\n"]
    assert ended_by(talk) == "tool"


def test_silence_clocks_restart_after_tool() -> None:
    talk = running()
    talk.mean(TOOL)
    talk.wait(90.0)
    talk.mean(TOOL_OVER)
    assert runs(talk) == {"bytes", "progress"}
    assert seconds_left(talk) == 10.0
    assert ended_by(talk) == "bytes"


def test_tool_clock_runs_until_last_of_several_tools_ends() -> None:
    talk = running()
    talk.mean(ToolBegan(("t1", "t2")))
    talk.mean(ToolBegan(("t3", "t1")))
    talk.mean(ToolEnded(("t1",)), ToolEnded(("nobody",)))
    talk.mean(ToolEnded(("t2",)))
    assert runs(talk) == {"tool"}
    talk.mean(ToolEnded(("t3",)))
    assert runs(talk) == {"bytes", "progress"}


def test_counted_tools_and_tasks_are_bounded() -> None:
    talk = running()
    talk.mean(ToolBegan(tuple(f"t{number}" for number in range(2 * TASKS_MAX))))
    assert talk.state.turn is not None
    assert len(talk.state.turn.tools) == TASKS_MAX
    talk.mean(TasksChanged(tuple(BackgroundTask(f"t{number}") for number in range(2 * TASKS_MAX))))
    assert len(talk.state.process.tasks) == TASKS_MAX


def test_question_inside_tool_pauses_its_clock() -> None:
    talk = running()
    talk.mean(TOOL, Requested("q", RequestPurpose.PERMISSION, "can_use_tool", "saw"))
    assert runs(talk) == {"human"}
    talk.wait(500.0)
    talk.tell(QuestionAnswered(talk.at, talk.named(), DENIED))
    assert runs(talk) == {"tool"}
    assert seconds_left(talk) == 100.0


@pytest.mark.parametrize(
    ("meaning", "clock"),
    [
        # The agent makes progress: no silence clock ends the turn.
        (None, None),
        # The agent is alive, but only thinks.
        (Thought(), "progress"),
        (Noise(), "progress"),
    ],
)
def test_thought_winds_bytes_clock_and_not_progress(meaning: Meaning | None, clock: str | None) -> None:
    talk = running()
    for _ in range(12):
        talk.wait(4.0)
        if talk.state.turn is None or talk.state.turn.cause is not None:
            break
        if meaning is None:
            talk.hear(b"text")
        else:
            talk.mean(meaning)
    assert talk.state.turn is not None
    assert talk.state.turn.clock == clock


def test_thought_after_text_does_not_wind_progress_clock() -> None:
    talk = running()
    talk.wait(4.0)
    talk.hear(b"text")
    assert {clock.name: clock.since for clock in talk.state.clocks}[ClockName.PROGRESS] == 4.0
    talk.wait(4.0)
    talk.mean(Thought())
    since = {clock.name: clock.since for clock in talk.state.clocks}
    assert (since[ClockName.PROGRESS], since[ClockName.BYTES]) == (4.0, 8.0)


def test_compaction_counts_as_tool() -> None:
    begins = CLAUDE.read(b'{"type":"system","subtype":"status","status":"compacting"}')
    ends = CLAUDE.read(b'{"type":"system","subtype":"compact_boundary"}')
    assert begins is not None
    assert ends is not None
    talk = running()
    talk.mean(begins)
    assert runs(talk) == {"tool"}
    talk.mean(ends)
    assert runs(talk) == {"bytes", "progress"}


def test_tools_end_with_their_turn() -> None:
    talk = running()
    talk.mean(TOOL)
    talk.ask(ask("b", NORMAL))
    talk.hear(b"over a0000 a0000", b"settled a0000")
    talk.opens("b0000")
    assert talk.state.turn is not None
    assert talk.state.turn.tools == ()
    assert runs(talk) == {"bytes", "progress"}
    # The tool of the turn before ends now, and affects no clock.
    talk.mean(TOOL_OVER)
    assert runs(talk) == {"bytes", "progress"}


def test_requeued_turn_has_no_tools() -> None:
    talk = Talk(CLOCKED)
    talk.ask(replace(A, on_preempt="requeue"))
    talk.begin()
    talk.opens("a0000")
    talk.mean(TOOL)
    talk.ask(ask("u", INTERACTIVE))
    talk.hear(b"ok interrupt-a#1-1", b"over a0000! a0000", b"cancelled a0000")
    talk.over("u0000")
    talk.opens("a0002")
    assert talk.kinds == {"u": Kind.DONE}
    assert runs(talk) == {"bytes", "progress"}


def test_agent_initiated_turn_tool_is_watched() -> None:
    talk = Talk(CLOCKED)
    talk.serve(A)
    talk.mean(TurnOpened(origin="task", can_interrupt=True), TOOL)
    assert runs(talk) == {"tool"}
    assert not of(StopProcess, talk.wait(99.0))
    talk.mean(TurnOver(origin="task"))
    assert talk.state.clocks == ()


def test_tool_outside_turns_changes_no_clock() -> None:
    talk = Talk(CLOCKED)
    talk.serve(A)
    before = talk.state
    talk.mean(TOOL)
    assert (talk.state.turn, talk.state.own, talk.state.clocks) == (before.turn, before.own, before.clocks)
