"""Background tasks of an agent after its turn: their requests are answered, and their process is kept."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from tests.sessions.helpers import SHORT_DRAIN, Case, answers, bodies, exists, opened, requesting, touch

from banksman import BackgroundTask, Kind, Question, UsageError
from banksman.core.session import event as kinds

# Much shorter than the waits of these tests. Other rules keep the processes alive.
IDLE = {"idle_seconds": 0.1}


def tasks(*names: str) -> str:
    """Return the step by which the agent reports its present background tasks."""
    return " ".join(("tasks", *names))


def asking(tool: str) -> str:
    return requesting("can_use_tool", tool_name=tool, input={"command": "ls"}, agent_id="a-1").removeprefix("@@")


async def retired(case: Case) -> list[str]:
    return [body["reason"] for body in bodies(await case.events(), kinds.PROCESS_RETIRED)]


async def test_background_task_is_answered_and_keeps_its_process(tmp_path: Path) -> None:
    go, end, over = (tmp_path / name for name in ("go", "end", "over"))
    later = [f"wait {go}", asking("Bash"), f"touch {over}", f"wait {end}", tasks()]
    script = {"prompt 1": [tasks("b1", "b2"), "say started it", tasks("b1"), *(f"at idle {step}" for step in later)]}
    asked: list[Question] = []

    def on_question(question: Question) -> str:
        asked.append(question)
        return "allow"

    async with opened(tmp_path, script, memory=True, on_question=on_question, options=IDLE) as case:
        assert (await case.answer("one")).text == "started it"
        pids = case.session.status().pids
        await asyncio.sleep(0.4)  # Nothing should happen, so there is no event to wait for.
        assert case.session.status().pids == pids
        touch(go)
        # The task got its answer, so its stdin is open and the session reads its requests.
        await exists(over)
        (question,) = asked
        assert (question.turn, question.tool, question.details) == (None, "Bash", {"agent_id": "a-1"})
        assert answers(case)[0]["response"] == {"behavior": "allow", "updatedInput": {"command": "ls"}}
        await case.wait_kind(kinds.QUESTION_ANSWERED)
        assert [event.turn for event in await case.events() if event.kind.startswith("question.")] == [None, None]
        assert await retired(case) == []
        # After the end of the task the process is idle.
        touch(end)
        await case.wait_kind(kinds.PROCESS_RETIRED)
        assert await retired(case) == ["idle"]
        assert (await case.answer("next")).text == "next"
        assert len(case.processes) == 2


async def test_background_task_question_stays_open_through_other_turns(tmp_path: Path) -> None:
    over = tmp_path / "over"
    script = {"prompt 1": [tasks("b1"), "say started it", f"at idle {asking('Bash')}", f"at idle touch {over}"]}
    async with opened(tmp_path, script, options={**IDLE, "clocks": {"bytes": 600.0, "progress": 600.0}}) as case:
        await case.answer("one")
        await case.wait_kind(kinds.QUESTION_ASKED)
        (question,) = case.session.questions()
        turn = await case.reaches("@@tool_use Read\n@@tool_result done\n@@hang")
        # No turn waits for the question. So the clocks of the turn run, and the end of the turn does not end the
        # question.
        assert [clock.is_running for clock in case.session.status().clocks] == [True, True]
        await turn.interrupt()
        assert (await case.outcome(turn)).kind is Kind.INTERRUPTED
        assert case.session.questions() == [question]
        await case.session.answer(question.id, "deny", message="not now")
        await exists(over)
        assert [answer["response"] for answer in answers(case)] == [{"behavior": "deny", "message": "not now"}]


async def test_background_tasks_end_with_their_process(tmp_path: Path) -> None:
    script = {"prompt 1": [tasks("b1"), "say started it", f"at idle {asking('Bash')}"]}
    async with opened(tmp_path, script, memory=True, options=IDLE) as case:
        await case.answer("one")
        await case.wait_kind(kinds.QUESTION_ASKED)
        os.kill(case.session.status().pids[0], signal.SIGKILL)
        answered = await case.wait_kind(kinds.QUESTION_ANSWERED)
        assert answered.body["answer"] == "withdrawn"
        assert case.session.questions() == []
        assert (await case.answer("next")).text == "next"
        # The next process has no background task, and is retired.
        await case.wait_kind(kinds.PROCESS_RETIRED)


async def test_session_closes_while_background_task_lives(tmp_path: Path) -> None:
    script = {"prompt 1": [tasks("b1"), "say started it", "at eof hang"]}
    async with opened(tmp_path, script, options=SHORT_DRAIN) as case:
        await case.answer("one")
        # Like the real agent, this one does not end at the end of its stdin. The ladder ends it.
        await case.session.close()
        assert case.session.status().phase == "closed"


async def test_outcome_waits_for_background_tasks_on_request(tmp_path: Path) -> None:
    go = tmp_path / "go"
    script = {"prompt 1": [tasks("b1"), "say started it", f"at idle wait {go}", f"at idle {tasks('b2')}"]}
    async with opened(tmp_path, script) as case:
        turn = await case.ask("one")
        outcome = await case.outcome(turn)
        assert outcome.background == (BackgroundTask("b1", "local_bash", "task b1"),)
        waiting = asyncio.create_task(turn.outcome(background="wait"))
        # A turn that is found in the log waits too.
        found = asyncio.create_task((await case.session.turn(turn.id)).outcome(background="wait"))
        await case.answer("@@say meanwhile")
        assert not waiting.done()
        touch(go)
        # Another task runs now, but it is not one of this turn.
        assert (await waiting).text == "started it"
        assert (await found).background == outcome.background
        changes = [[task["id"] for task in body["tasks"]] for body in bodies(await case.events(), kinds.TASKS_CHANGED)]
        assert changes == [["b1"], ["b2"]]


async def test_wait_for_background_tasks_ends_with_their_process(tmp_path: Path) -> None:
    async with opened(tmp_path, {"prompt 1": [tasks("b1"), "say started it"]}) as case:
        turn = await case.ask("one")
        await case.outcome(turn)
        os.kill(case.session.status().pids[0], signal.SIGKILL)
        assert (await turn.outcome(background="wait")).kind is Kind.DONE


async def test_outcome_refuses_unknown_word_for_background_tasks(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        turn = await case.ask("one")
        with pytest.raises(UsageError, match="background cannot be 'ignore'"):
            await turn.outcome(background="ignore")


@pytest.mark.parametrize("is_left", [False, True])
async def test_drain_waits_for_background_tasks(tmp_path: Path, is_left: bool) -> None:
    go = tmp_path / "go"
    script = {"prompt 1": [tasks("b1"), "say started it", f"at idle wait {go}", f"at idle {tasks()}"]}
    async with opened(tmp_path, script) as case:
        await case.answer("one")
        if is_left:
            case.session.leave_nowait(60.0)
        else:
            case.session.drain_nowait()
        closing = asyncio.create_task(case.session.wait_closed())
        await case.session.head()
        assert not closing.done()
        assert case.session.status().pids
        touch(go)
        await closing
        *_, last = await case.kinds()
        assert last == (kinds.SESSION_LEFT if is_left else kinds.SESSION_CLOSED)
        assert bodies(await case.events(), kinds.TASKS_CHANGED)[-1] == {"tasks": []}


async def test_drain_gives_up_background_tasks_after_its_time(tmp_path: Path) -> None:
    async with opened(tmp_path, {"prompt 1": [tasks("b1"), "say it"]}, options={"background_seconds": 0.1}) as case:
        await case.answer("one")
        case.session.drain_nowait()
        await case.session.wait_closed()
