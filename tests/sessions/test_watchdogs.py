"""Watchdogs with a real process: the effect of a silent tool, a compaction, a thought and a question on each."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.sessions.helpers import SHORT_DRAIN, Case, bodies, ended, let_pass, opened, touch

from banksman import Host, Kind, UsageError
from banksman.core.session import event as kinds

COMPACTING = '@@raw {"type":"system","subtype":"status","status":"compacting"}'
COMPACTED = '@@raw {"type":"system","subtype":"compact_boundary"}'
# Long enough for the output of a slow machine, and short enough for a test to wait.
IDLE = {"bytes": 1.0, "progress": 1.0}


def running(case: Case) -> set[str]:
    """Return the running clocks."""
    return {clock.name for clock in case.session.status().clocks if clock.is_running}


# -- paused clocks ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("begin", "end"),
    [
        ("@@tool_use Bash", "@@tool_result done"),
        # The end of the first tool does not end all tools.
        ("@@tool_use Read\n@@tool_use Bash\n@@tool_result one", "@@say more"),
        (COMPACTING, COMPACTED),
    ],
)
async def test_silent_tool_and_compaction_do_not_trip_silence_clocks(tmp_path: Path, begin: str, end: str) -> None:
    go = tmp_path / "go"
    clocks = {**IDLE, "tool": 600.0, "human": 600.0, "overall": 600.0}
    async with opened(tmp_path, options={"clocks": clocks}) as case:
        turn = await case.reaches(f"{begin}\n@@wait {go}")
        assert running(case) == {"tool", "overall"}
        touch(go)
        assert (await case.outcome(turn)).kind is Kind.DONE
        # The pause is longer than any silence clock. After the tool, silence counts again.
        turn = await case.ask(f"{begin}\n@@pause 1.3\n{end}\n@@say went on")
        assert (await case.outcome(turn)).text == "went on"
        assert kinds.TURN_INTERRUPTED not in await case.kinds()


async def test_silence_clocks_resume_after_tool(tmp_path: Path) -> None:
    async with opened(tmp_path, options={"clocks": {**IDLE, "tool": 600.0}}) as case:
        turn = await case.reaches("@@tool_use Bash\n@@tool_result done\n@@hang")
        assert running(case) == {"bytes", "progress"}
        outcome = await case.outcome(turn)
        assert (outcome.kind, outcome.clock) == (Kind.INTERRUPTED, "bytes")


@pytest.mark.thorough
async def test_long_thinking_is_not_silence(tmp_path: Path) -> None:
    async with opened(tmp_path, options={"clocks": {"bytes": 1.0}}) as case:
        assert (await case.answer("@@thinking 65 0.02\n@@say thought")).text == "thought"


async def test_silent_turn_is_warned_and_ended_by_default(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        turn = await case.reaches("@@say begun\n@@hang")
        assert running(case) == {"bytes", "progress"}
        let_pass(900.0)
        warning = await case.wait_kind(kinds.CLOCK_WARNING)
        assert (warning.turn, warning.body["clock"], warning.body["seconds"]) == (turn.id, "bytes", 1800.0)
        let_pass(900.0)
        outcome = await case.outcome(turn)
        assert (outcome.kind, outcome.clock) == (Kind.INTERRUPTED, "bytes")
        assert (await case.answer("@@say next")).text == "next"


async def test_caller_turns_default_clocks_off(tmp_path: Path) -> None:
    async with opened(tmp_path, options={"clocks": {"bytes": None, "progress": None}}) as case:
        turn = await case.reaches("@@say begun\n@@hang")
        assert running(case) == set()
        await turn.interrupt()
        await case.outcome(turn)


@pytest.mark.parametrize("seconds", [0, -1, 1e9, 10**400, float("nan"), float("inf"), "5", True])
async def test_open_refuses_clock_beyond_the_bounds(seconds: float) -> None:
    async with Host() as host:
        for name in ("bytes", "start"):
            with pytest.raises(UsageError, match=f"{name} cannot be"):
                await host.open("claude", options={"clocks": {name: seconds}})


async def test_question_pauses_other_clocks(tmp_path: Path) -> None:
    clocks = {**IDLE, "tool": 1.0, "overall": 1.0, "human": 600.0}
    async with opened(tmp_path, options={"clocks": clocks}) as case:
        # For the agent, the tool of the question has begun.
        turn = await case.ask("@@ask Bash\n@@say went on")
        await case.wait_kind(kinds.QUESTION_ASKED)
        assert running(case) == {"human"}
        left = {clock.name: clock.left for clock in case.session.status().clocks}
        await case.session.answer(case.session.questions()[0].id, "allow")
        assert "human" not in running(case)
        assert (await case.outcome(turn)).text == "went on"
        assert all(seconds > 0 for seconds in left.values())


# -- expired clocks --------------------------------------------------------------------------------------------------
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("prompt", "clocks", "clock"),
    [
        ("@@say a\n@@hang", {"bytes": 1.0, "overall": 600.0}, "bytes"),
        ("@@say a\n@@tool_use Bash\n@@hang", {**IDLE, "tool": 0.3}, "tool"),
        (f"@@say a\n{COMPACTING}\n@@hang", {**IDLE, "tool": 0.3}, "tool"),
        ("@@say a\n@@tool_use Bash\n@@hang", {**IDLE, "tool": 600.0, "overall": 1.0}, "overall"),
        ("@@ask Bash\n@@say went on", {**IDLE, "tool": 1.5, "overall": 1.5, "human": 0.3}, "human"),
        # The agent thinks forever: it is alive, but makes no progress.
        ("@@thinking 5000 0.02", {"bytes": 1.0, "progress": 1.3}, "progress"),
    ],
)
async def test_expired_clock_is_named_and_next_turn_runs(
    tmp_path: Path, prompt: str, clocks: dict[str, float], clock: str
) -> None:
    async with opened(tmp_path, options={"clocks": clocks}) as case:
        turn = await case.ask(prompt)
        outcome = await case.outcome(turn)
        assert (outcome.kind, outcome.clock, outcome.error) == (Kind.INTERRUPTED, clock, None)
        events = await case.events()
        assert ended(events, turn)["clock"] == clock
        assert bodies(events, kinds.TURN_INTERRUPTED) == [{"cause": "clock", "clock": clock}]
        assert (await case.answer("next")).text == "next"
        assert len(case.processes) == 1


async def test_agent_that_ignores_clock_interrupt_is_replaced(tmp_path: Path) -> None:
    options = {**SHORT_DRAIN, "clocks": {"tool": 0.2}}
    async with opened(tmp_path, memory=True, options=options) as case:
        turn = await case.ask("@@on_interrupt ignored\n@@tool_use Bash\n@@hang")
        outcome = await case.outcome(turn)
        assert (outcome.kind, outcome.clock) == (Kind.INTERRUPTED, "tool")
        assert ended(await case.events(), turn)["by"] == "ladder"
        assert (await case.answer("next")).text == "next"


async def test_agent_initiated_turn_is_watched_by_clocks(tmp_path: Path) -> None:
    script = {"prompt 1": ["say one", "at idle own task-notification tool_use Bash ;; hang"]}
    async with opened(tmp_path, script, options={"clocks": {"tool": 0.2}}) as case:
        await case.answer("one")
        over = await case.wait_event(lambda e: e.kind == kinds.TURN_ENDED and "origin" in e.body)
        assert (over.body["outcome"], over.body["clock"]) == ("interrupted", "tool")
        assert (await case.answer("next")).text == "next"


# -- warnings --------------------------------------------------------------------------------------------------------
# Half of each clock is longer than a pause of a busy machine. After a longer pause a clock would expire
# without a warning.
@pytest.mark.thorough
async def test_clocks_warn_once_at_half_time(tmp_path: Path) -> None:
    clocks = {"tool": 8.0, "overall": 24.0, "bytes": 600.0}
    async with opened(tmp_path, options={"clocks": clocks}) as case:
        turn = await case.ask("@@tool_use Bash\n@@hang")
        assert (await case.outcome(turn)).clock == "tool"
        events = await case.events()
        warnings = [event for event in events if event.kind == kinds.CLOCK_WARNING]
        assert {event.turn for event in warnings} == {turn.id}
        said = {event.body["clock"]: event.body for event in warnings}
        assert len(said) == len(warnings)
        assert said["tool"]["seconds"] == 8.0
        assert 0 < said["tool"]["left"] <= 4.0
        assert "bytes" not in said
        # The warning comes before the end of the turn.
        order = [event.kind for event in events if event.kind in (kinds.CLOCK_WARNING, kinds.TURN_INTERRUPTED)]
        assert order[-1] == kinds.TURN_INTERRUPTED


@pytest.mark.thorough
async def test_waiting_question_warns(tmp_path: Path) -> None:
    async with opened(tmp_path, options={"clocks": {"human": 10.0}}) as case:
        turn = await case.ask("@@ask Bash\n@@say went on")
        warning = await case.wait_kind(kinds.CLOCK_WARNING)
        assert (warning.turn, warning.body["clock"], warning.body["seconds"]) == (turn.id, "human", 10.0)
        await case.session.answer(case.session.questions()[0].id, "allow")
        assert (await case.outcome(turn)).text == "went on"
