"""Turns of a session: answer, single outcome, and all other output of an agent."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.sessions.helpers import bodies, ended, exists, opened, prompts, touch
from tests.thorough import thorough

from banksman import AgentError, By, Kind, UsageError
from banksman.core.session import event as kinds
from banksman.testing import checks

# Agents that omit frames: those that name a prompt, and those that announce a turn.
NAMING = {
    "names everything": [],
    "no lifecycle": ["omit lifecycle"],
    "no completed": ["omit completed"],
    "no uuids": ["omit uuids"],
    "no init": ["omit init"],
    "only uuids of results": ["omit lifecycle", "omit init"],
    "only lifecycle": ["omit uuids", "omit init"],
    "only init": ["omit uuids", "omit lifecycle"],
    "nothing": ["omit uuids", "omit lifecycle", "omit init"],
}
POINTS = ("read", "queued", "started", "init")


async def test_ask_gets_answer_of_agent(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        outcome = await case.answer("hello")
        assert outcome.kind is Kind.DONE
        assert outcome.text == "hello"
        assert outcome.stop_reason == "end_turn"
        assert outcome.error is None
        assert outcome.durable


async def test_process_starts_with_first_ask_and_serves_all(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        assert case.session.status().pids == ()
        assert case.processes == []
        assert (await case.answer("one")).text == "one"
        assert case.session.status().pids == (case.processes[0].pid,)
        assert (await case.answer("two")).text == "two"
        assert len(case.processes) == 1


async def test_turn_reports_state_and_updates(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        go = case.path("go")
        turn = await case.reaches(f"@@stream 3 0\n@@wait {go}")
        other = await case.ask("other")
        assert turn.state == "running"
        assert other.state == "queued"
        touch(go)
        assert (await case.outcome(turn)).text == "tick0 tick1 tick2 "
        assert turn.state == "ended"
        said = [u["content"]["text"] async for u in turn if u["sessionUpdate"] == "agent_message_chunk"]
        assert "".join(said).startswith("tick0 tick1 tick2 ")
        said = [u["content"]["text"] async for u in other if u["sessionUpdate"] == "agent_message_chunk"]
        assert "".join(said) == "other"
        await case.outcome(other)


async def test_ask_accepts_content_blocks(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        turn = await case.session.ask([{"type": "text", "text": "in blocks"}])
        assert (await case.outcome(turn)).text == "in blocks"


async def test_ask_refuses_unsendable_prompt_before_any_effect(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        for wrong in ("", [], [{"type": "video"}], b"bytes", "half a pair \ud800"):
            with pytest.raises(UsageError):
                await case.session.ask(wrong)  # pyright: ignore[reportArgumentType]
        for how in ({"on_busy": "no"}, {"on_preempt": "no"}, {"priority": "no"}, {"priority": True}, {"key": 1}):
            with pytest.raises(UsageError):
                await case.ask("x", **how)
        assert await case.kinds() == ["session.opened"]
        assert (await case.answer("still fine")).kind is Kind.DONE


async def test_cancelled_outcome_call_only_stops_waiting(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        go = case.path("go")
        turn = await case.reaches(f"@@say done\n@@wait {go}")
        waiting = asyncio.ensure_future(turn.outcome())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        touch(go)
        assert (await case.outcome(turn)).kind is Kind.DONE


# -- failures of an agent --------------------------------------------------------------------------------------------
async def test_exit_during_turn_fails_it_with_end_of_stderr(tmp_path: Path) -> None:
    async with opened(tmp_path, memory=True) as case:
        outcome = await case.answer("@@say half an answer\n@@stderr why it died\n@@exit 3")
        assert outcome.kind is Kind.FAILED
        assert isinstance(outcome.error, AgentError)
        assert "code 3" in str(outcome.error)
        assert "why it died" in outcome.error.hint
        assert outcome.text == "half an answer"
        assert (await case.answer("again")).text == "again"
        assert len(case.processes) == 2


async def test_signal_during_turn_fails_it_and_is_named(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        outcome = await case.answer("@@kill 9")
        assert outcome.kind is Kind.FAILED
        assert "signal 9" in str(outcome.error)


async def test_stderr_flood_keeps_its_end(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        outcome = await case.answer("@@stderr_flood 3000000\n@@stderr the last word\n@@exit 1")
        assert isinstance(outcome.error, AgentError)
        assert outcome.error.hint.endswith("the last word")
        assert len(outcome.error.hint) <= 4096


async def test_stderr_flood_does_not_block_agent(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        assert (await case.answer("@@stderr_flood 3000000\n@@say done")).text == "done"


@pytest.mark.parametrize("verb", ["error", "failure"])
async def test_agent_error_fails_only_its_turn(tmp_path: Path, verb: str) -> None:
    async with opened(tmp_path) as case:
        outcome = await case.answer(f"@@say so far\n@@{verb} overloaded")
        assert outcome.kind is Kind.FAILED
        assert isinstance(outcome.error, AgentError)
        assert "overloaded" in str(outcome.error)
        assert (await case.answer("next")).text == "next"
        assert len(case.processes) == 1


async def test_exit_right_after_boundary_does_not_fail_turn(tmp_path: Path) -> None:
    async with opened(tmp_path, memory=True) as case:
        assert (await case.answer("@@say all of it\n@@at result exit 7")).kind is Kind.DONE
        assert (await case.answer("next")).text == "next"
        assert len(case.processes) == 2


@pytest.mark.parametrize("when", ["in a turn", "idle"])
async def test_agent_that_closes_stdout_is_replaced(tmp_path: Path, when: str) -> None:
    """Without stdout the agent could never answer, and nothing else would end the turn."""
    async with opened(tmp_path, memory=True) as case:
        if when == "idle":
            assert (await case.answer("@@at completed close_stdout\n@@say one")).kind is Kind.DONE
        outcome = await case.answer("two\n@@say so far\n@@close_stdout\n@@hang")
        assert outcome.kind is Kind.FAILED
        assert isinstance(outcome.error, AgentError)
        assert "stdout" in str(outcome.error)
        assert outcome.text == ("so far" if when == "in a turn" else None)
        assert (await case.answer("three")).text == "three"


async def test_half_a_frame_before_exit_is_no_answer(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        outcome = await case.answer("@@say whole\n@@half this is cut\n@@exit 0")
        assert outcome.kind is Kind.FAILED
        assert outcome.text == "whole"


async def test_result_without_newline_before_exit_counts(tmp_path: Path) -> None:
    """The end of the stream ends its last line. A result counts whatever the end of its process."""
    result = '{"type":"result","subtype":"success","is_error":false,"result":"last words"}'
    async with opened(tmp_path, ["omit uuids", "omit lifecycle", "split 4096"]) as case:
        outcome = await case.answer(f"@@raw {result}\n@@exit 0")
        assert outcome.text == "last words"
        assert outcome.kind is Kind.DONE


# -- chatter ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("point", ["", "at read ", "at started ", "at init ", "at result ", "at completed "])
async def test_junk_on_stdout_is_neither_fatal_nor_an_answer(tmp_path: Path, point: str) -> None:
    async with opened(tmp_path) as case:
        for junk in ("text", "blank", "unknown", "not_utf8", "not_object"):
            outcome = await case.answer(f"@@{point}junk {junk}\n@@say the answer")
            assert outcome.kind is Kind.DONE, junk
            assert outcome.text == "the answer", junk
            assert (await case.answer("next")).text == "next", junk
        assert len(case.processes) == 1


async def test_chatter_is_logged_and_counted(tmp_path: Path) -> None:
    async with opened(tmp_path, ["junk text", "at initialize junk text"]) as case:
        outcome = await case.answer("@@junk text\n@@exit 0")
        assert outcome.kind is Kind.FAILED
        assert outcome.text is None
        lines = [e.data for e in await case.events() if e.kind == kinds.UPDATE]
        assert lines.count(b"Info: this is not for you") == 3
        assert case.session.status().counters["noise"] >= 3


# -- late results ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("naming", NAMING)
async def test_agents_with_sparse_naming_are_understood(tmp_path: Path, naming: str) -> None:
    async with opened(tmp_path, NAMING[naming], options={"settle_seconds": 0.1}) as case:
        for word in ("one", "two", "three"):
            outcome = await case.answer(word)
            assert outcome.kind is Kind.DONE
            assert outcome.text == word
        turn = await case.running("four")
        assert (await turn.interrupt()).stopped
        assert (await case.outcome(turn)).kind is Kind.INTERRUPTED
        assert (await case.answer("five")).text == "five"
        assert len(case.processes) == 1


@pytest.mark.parametrize("naming", NAMING)
async def test_second_result_does_not_answer_next_ask(tmp_path: Path, naming: str) -> None:
    script = {"process": NAMING[naming], "prompt 1": ["say one", "result one", "result one again"]}
    async with opened(tmp_path, script, options={"settle_seconds": 0.1}) as case:
        assert (await case.answer("first")).text == "one"
        await case.wait_said("one again")
        assert (await case.answer("second")).text == "second"
        assert (await case.answer("third")).text == "third"


@pytest.mark.parametrize("naming", NAMING)
async def test_late_result_while_idle_does_not_answer_next_ask(tmp_path: Path, naming: str) -> None:
    go = tmp_path / "go"
    late = ["say one", "result one", "lifecycle completed", "detach", f"wait {go}", "result late"]
    script = {"process": NAMING[naming], "prompt 1": late}
    async with opened(tmp_path, script, options={"settle_seconds": 0.1}) as case:
        assert (await case.answer("first")).text == "one"
        touch(go)
        await case.wait_said("late")
        assert (await case.answer("second")).text == "second"
        assert (await case.answer("third")).text == "third"


@pytest.mark.parametrize(
    ("naming", "point"),
    [
        *(
            pytest.param(naming, point, marks=[] if naming in ("names everything", "no lifecycle") else thorough)
            for naming in ("names everything", "no lifecycle", "no completed", "no init")
            for point in POINTS
        ),
        # After the agent has announced a turn, an unnamed result belongs to it.
        *(("no uuids", point) for point in ("read", "queued")),
    ],
)
async def test_late_result_of_previous_turn_does_not_end_next(tmp_path: Path, naming: str, point: str) -> None:
    """The late result comes when the agent has the next prompt, but has not begun it or has not said anything yet."""
    late = ["say one", "result one", "lifecycle completed", "detach", f"await {point}", "result late"]
    script = {"process": NAMING[naming], "prompt 1": late}
    async with opened(tmp_path, script, options={"settle_seconds": 0.1}) as case:
        assert (await case.answer("first")).text == "one"
        assert (await case.answer("second")).text == "second"
        assert (await case.answer("third")).text == "third"


@pytest.mark.parametrize("point", ["read", "queued"])
async def test_unnamed_result_before_turn_begins_is_no_boundary(tmp_path: Path, point: str) -> None:
    stray = '{"type":"result","subtype":"success","is_error":false,"result":"stray"}'
    async with opened(tmp_path) as case:
        assert (await case.answer(f"@@at {point} raw {stray}\n@@say mine")).text == "mine"
        assert (await case.answer("second")).text == "second"


async def test_empty_result_is_answer_and_no_failure(tmp_path: Path) -> None:
    empty = '{"type":"result","subtype":"success","is_error":false,"result":""}'
    async with opened(tmp_path, ["omit result", "omit completed"]) as case:
        outcome = await case.answer(f"@@raw {empty}\n@@lifecycle completed")
        assert outcome.kind is Kind.DONE
        assert outcome.text == ""


async def test_concurrent_turns_keep_their_own_text(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        words = [f"word{n}x" for n in range(40)]
        turns = await asyncio.gather(*(case.ask(f"{word}\n@@stream 2 0 {word}") for word in words))
        texts = [(await case.outcome(turn)).text for turn in turns]
        checks.attribution(await case.events(), dict(zip(words, texts, strict=True)))
        assert texts == [f"{word}0 {word}1 " for word in words]
        assert prompts(case) == words


# -- turns without an ask --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("origin", ["task-notification", "auto-continuation", "none"])
@pytest.mark.parametrize("naming", ["names everything", "no lifecycle", "no uuids", "no init"])
async def test_agent_initiated_turn_while_idle_is_logged_and_answers_nobody(
    tmp_path: Path, origin: str, naming: str
) -> None:
    go = tmp_path / "go"
    idle = [f"at idle wait {go}", f"at idle own {origin} say by myself"]
    script = {"process": NAMING[naming], "prompt 1": ["say one", *idle]}
    async with opened(tmp_path, script, options={"settle_seconds": 0.1}) as case:
        assert (await case.answer("first")).text == "one"
        touch(go)
        over = await case.wait_event(lambda e: e.kind == kinds.TURN_ENDED and str(e.turn).startswith("own"))
        assert over.body["outcome"] == "done"
        assert over.body["text"] == "by myself"
        assert (await case.answer("second")).text == "second"
        begun = [body["origin"] for body in bodies(await case.events(), kinds.TURN_STARTED) if "origin" in body]
        # An announced turn names its origin only at its end.
        assert begun == [origin if naming == "no init" and origin != "none" else "agent"]
        ended = [body["origin"] for body in bodies(await case.events(), kinds.TURN_ENDED) if "origin" in body]
        assert ended == ["agent" if origin == "none" else origin]


@pytest.mark.parametrize("origin", ["task-notification", "none"])
@pytest.mark.parametrize("naming", ["names everything", "no lifecycle", "no completed"])
async def test_agent_initiated_turn_that_races_prompt_does_not_answer_it(
    tmp_path: Path, naming: str, origin: str
) -> None:
    """The agent's turn begins after it has read the prompt, and ends before it serves the prompt."""
    go = tmp_path / "go"
    script = {"process": NAMING[naming], "prompt 1": ["say one", f"at idle own {origin} say by myself ;; wait {go}"]}
    async with opened(tmp_path, script, options={"settle_seconds": 0.1}) as case:
        first = await case.ask("first", priority="BACKGROUND")
        assert (await case.outcome(first)).text == "one"
        second = await case.ask("second", priority="BACKGROUND")
        await case.wait_said("by myself")
        touch(go)
        assert (await case.outcome(second)).text == "second"
        assert (await case.answer("third")).text == "third"
        assert ended(await case.events(), second)["text"] == "second"


async def test_agent_initiated_turn_can_be_interrupted(tmp_path: Path) -> None:
    script = {"prompt 1": ["say one", "at idle own task-notification say by myself ;; hang"]}
    async with opened(tmp_path, script) as case:
        await case.answer("first")
        await case.wait_said("by myself")
        status = case.session.status()
        assert (status.phase, status.holder) == ("running", "own-1")
        receipt = await case.session.interrupt()
        assert (receipt.stopped, receipt.by) == (True, By.BOUNDARY)
        assert (await case.answer("second")).text == "second"


async def test_agent_initiated_turn_is_preempted_by_ask(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    script = {"prompt 1": ["say one", f"at idle own task-notification say by myself ;; touch {begun} ;; hang"]}
    async with opened(tmp_path, script) as case:
        assert (await case.answer("first")).text == "one"
        await exists(begun)
        await case.wait_said("by myself")
        assert (await case.answer("second")).text == "second"
        over = await case.wait_event(lambda e: e.kind == kinds.TURN_ENDED and str(e.turn).startswith("own"))
        assert over.body["outcome"] == "preempted"
        assert len(case.processes) == 1
