"""The single answer of a question: its author, its readers, and how long it is known."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
from collections.abc import AsyncGenerator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.sessions.crash_host import Agents
from tests.sessions.helpers import QUICK, Case, answers, bodies, exists, opened, touch
from tests.sessions.takeover_scene import read

from banksman import Answered, Event, Host, Kind, NotFound, NotOwner, Question, Session, UsageError
from banksman.core.session import event as kinds
from banksman.sessions import questions
from banksman.sessions.questions import find_answer

ASK = '@@ask Bash {"command":"ls"}\n@@say went on'
# The agent uses the same request id for every question.
SAME = '@@raw {"type":"control_request","request_id":"same","request":{"subtype":"can_use_tool","tool_name":"Bash"}}'


async def asked(case: Case, prompt: str = ASK) -> str:
    """Ask, and return the id of the question that the agent asks."""
    turn = await case.ask(prompt)
    return str((await case.wait_kind(kinds.QUESTION_ASKED, turn)).body["question"])


async def over(case: Case, question: str) -> None:
    """Wait until the log records the answer."""
    await case.wait_event(lambda e: e.kind == kinds.QUESTION_ANSWERED and e.body["question"] == question)


# -- competing answers -------------------------------------------------------------------------------------------------
async def test_concurrent_answers_have_one_first_and_same_result(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        turn = await case.ask(ASK)
        question = str((await case.wait_kind(kinds.QUESTION_ASKED)).body["question"])
        given = [("deny", "no"), ("allow", None), ("deny", "never")]
        told = await asyncio.gather(*(case.session.answer(question, word, message=why) for word, why in given))
        assert [each.is_first for each in told] == [True, False, False]
        assert {replace(each, is_first=True) for each in told} == {Answered(question, "deny", "answer", "no", True)}
        # Later calls get the same result.
        assert await case.session.answer(question, "allow") == replace(told[0], is_first=False)
        (logged,) = bodies(await case.events(), kinds.QUESTION_ANSWERED)
        assert logged == {"question": question, "answer": "deny", "by": "answer", "message": "no"}
        await case.outcome(turn)
        assert [each["response"]["message"] for each in answers(case)] == ["no"]


async def test_open_question_is_visible_in_status(tmp_path: Path) -> None:
    clocks = {"bytes": 60.0, "progress": 60.0, "tool": 60.0, "overall": 60.0, "human": 600.0}
    async with opened(tmp_path, options={"clocks": clocks}) as case:
        question = await asked(case, f'@@ask Bash {{"command":"rm"}}\n@@touch {case.path("done")}\n@@say went on')
        (shown,) = case.session.questions()
        assert (shown.id, shown.tool, shown.input) == (question, "Bash", {"command": "rm"})
        status = case.session.status()
        assert (status.phase, status.questions) == ("running", (question,))
        assert {clock.name for clock in status.clocks if clock.is_running} == {"human"}
        # The agent has written everything and waits. A step that has not begun at this point does not begin.
        process = case.session._driver.process.driven  # pyright: ignore[reportPrivateUsage]
        assert process is not None
        process.agent.look_now()
        assert not case.path("done").exists()
        assert answers(case) == []
        assert (await case.session.answer(question, "allow")).is_first
        await exists(case.path("done"))
        status = case.session.status()
        assert status.questions == ()
        assert "human" not in {clock.name for clock in status.clocks if clock.is_running}


async def test_answer_is_acknowledged_only_when_durable(tmp_path: Path) -> None:
    """While another connection holds the store's lock, nothing is durable.

    So no caller gets an acknowledgement, not even the second one.
    """
    host = Host(f"sqlite:{tmp_path / 'store.db'}")
    async with opened(tmp_path, host=host) as case:
        question = await asked(case, f"@@ask Bash\n@@touch {case.path('done')}\n@@hang")
        with closing(sqlite3.connect(tmp_path / "store.db", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            first, second, gone = (
                asyncio.create_task(case.session.answer(question, word)) for word in ("allow", "deny", "deny")
            )
            await exists(case.path("done"))
            assert not first.done()
            assert not second.done()
            # A cancelled caller only stops waiting.
            gone.cancel()
            await asyncio.wait((gone,))
        told = await asyncio.gather(first, second)
        assert [(each.answer, each.is_first) for each in told] == [("allow", True), ("allow", False)]
        assert [body["answer"] for body in bodies(await case.events(), kinds.QUESTION_ANSWERED)] == ["allow"]
        await case.session.interrupt()


# -- closed questions --------------------------------------------------------------------------------------------------
def _allow(_: Question) -> str:
    return "allow"


def _fail(_: Question) -> str:
    raise ValueError("oh")


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ({"rules": {"Bash": "deny"}}, ("deny", "rule", "denied by a rule")),
        ({"on_question": _allow}, ("allow", "callback", None)),
        ({"on_question": _fail}, ("deny", "failure", "the callback failed: ValueError: oh")),
        ({"options": {"question_seconds": 0.05}}, ("deny", "expiry", "no answer within 0.05 s")),
    ],
)
async def test_answer_reports_earlier_decision(
    tmp_path: Path, how: dict[str, Any], expected: tuple[str, str, str | None]
) -> None:
    async with opened(tmp_path, **how) as case:
        question = await asked(case)
        await over(case, question)
        told = await case.session.answer(question, "deny", message="late", interrupt=True)
        assert told == Answered(question, *expected, is_first=False)
        assert len(bodies(await case.events(), kinds.QUESTION_ANSWERED)) == 1


@pytest.mark.parametrize("how", ["cancelled turn", "withdrawn agent", "withdrawn exit"])
async def test_answer_to_cancelled_question_reports_why(tmp_path: Path, how: str) -> None:
    async with opened(tmp_path) as case:
        path = case.path("go")
        ask = f"@@ask_withdrawn Bash {path}" if how == "withdrawn agent" else "@@ask Bash"
        question = await asked(case, f"{ask}\n@@hang")
        if how == "cancelled turn":
            await case.session.interrupt()
        elif how == "withdrawn agent":
            touch(path)
        else:
            os.kill(case.processes[0].pid, signal.SIGKILL)
        await over(case, question)
        told = await case.session.answer(question, "allow")
        assert (told.answer, told.by) == tuple(how.split())
        assert not told.is_first
        if how == "withdrawn agent":
            await case.session.interrupt()


async def test_late_answer_does_not_reach_same_named_question_of_next_process(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        first = await asked(case, f"{SAME}\n@@hang")
        os.kill(case.processes[0].pid, signal.SIGKILL)
        await over(case, first)
        turn = await case.ask(f"{SAME}\n@@hang")
        event = await case.wait_kind(kinds.QUESTION_ASKED, turn)
        second = event.body
        assert (second["request"], second["question"] != first) == ("same", True)
        # The id is the position of the question, under the epoch of its process.
        assert second["question"] == f"q-{event.cursor}"
        # A client may still show the first question.
        told = await case.session.answer(first, "allow")
        assert (told.question, told.answer, told.by, told.is_first) == (first, "withdrawn", "exit", False)
        assert [question.id for question in case.session.questions()] == [second["question"]]
        assert (await case.session.answer(second["question"], "deny")).is_first
        await turn.interrupt()
        assert [each["response"]["behavior"] for each in answers(case) if "response" in each] == ["deny"]


async def test_forgotten_answer_is_found_in_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(questions, "ANSWERS_MAX", 2)
    async with opened(tmp_path, on_question=_allow) as case:
        await case.answer("\n".join([ASK] * 5))
        remembered = case.session._here.questions._answers  # pyright: ignore[reportPrivateUsage]
        names = [body["question"] for body in bodies(await case.events(), kinds.QUESTION_ASKED)]
        assert list(remembered) == names[-2:]
        for name in names:
            told = await case.session.answer(name, "deny")
            assert told == Answered(name, "allow", "callback", None, is_first=False)


# -- invalid answers ---------------------------------------------------------------------------------------------------
async def test_unknown_question_is_not_found(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        question = await asked(case)
        epoch, _, seq = question.removeprefix("q-").partition(".")
        strange = ["", "none", "same", f"q-{epoch}.{int(seq) - 1}", f"q-{int(epoch) + 1}.{seq}", f"q-{epoch}.0"]
        for name in [*strange, f"q-{epoch}.0{seq}", f"q-{epoch}.999999999", "q-1." + "9" * 40, question.upper()]:
            with pytest.raises(NotFound):
                await case.session.answer(name, "allow")
        assert [waiting.id for waiting in case.session.questions()] == [question]
        await case.session.answer(question, "allow")


async def test_invalid_answer_is_refused_whatever_the_question_state(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        question = await asked(case)
        # Another question could have this option. This one does not.
        with pytest.raises(UsageError):
            await case.session.answer(question, "perhaps")
        for _ in range(2):
            with pytest.raises(UsageError):
                await case.session.answer(question, "")
            with pytest.raises(UsageError):
                await case.session.answer(question, "allow", interrupt=True)
            await case.session.answer(question, "allow")


# -- other hosts, and restarts -----------------------------------------------------------------------------------------
async def _open(host: Host, agents: Agents, **options: Any) -> Session:
    return await host.open("claude", name="one", command=agents.command(), options={**QUICK, **options})


async def _asked(session: Session, prompt: str) -> str:
    turn = await session.ask(prompt)
    async for event in session.follow():
        if event.kind == kinds.QUESTION_ASKED and event.turn == turn.id:
            return str(event.body["question"])
    raise AssertionError("the session was closed before that")


async def test_other_host_can_read_answered_question_and_not_answer_open_one(tmp_path: Path, marker: str) -> None:
    store, agents = f"sqlite:{tmp_path / 'store.db'}", Agents(tmp_path, marker)
    async with Host(store) as owner, Host(store) as other:
        session = await _open(owner, agents)
        first = await _asked(session, "@@ask Bash\n@@say went on")
        told = await session.answer(first, "allow", message="yes")
        second = await _asked(session, "@@ask Bash\n@@say went on")
        elsewhere = other.session("one")
        assert await elsewhere.answer(first, "deny") == replace(told, is_first=False)
        with pytest.raises(NotFound):
            await elsewhere.answer("none", "deny")
        with pytest.raises(NotOwner):
            await elsewhere.answer(second, "deny")
        assert [question.id for question in session.questions()] == [second]
        assert (await session.answer(second, "allow")).is_first
        assert not (await elsewhere.answer(second, "deny")).is_first
        assert not elsewhere.is_ours


async def test_answer_is_known_after_restart_without_claim(tmp_path: Path, marker: str) -> None:
    store, agents = f"sqlite:{tmp_path / 'store.db'}", Agents(tmp_path, marker)
    async with Host(store) as host:
        session = await _open(host, agents)
        first = await _asked(session, "@@ask Bash\n@@say went on")
        told = await session.answer(first, "deny", message="no")
        second = await _asked(session, "@@ask Bash\n@@hang")
        await session.close()
        assert (await session.answer(second, "allow")).by == "exit"
    async with Host(store) as host:
        session = host.session("one")
        before = await read(session)
        assert await session.answer(first, "allow") == replace(told, is_first=False)
        assert await session.answer(second, "allow") == Answered(second, "withdrawn", "exit", None, is_first=False)
        assert not session.is_ours
        assert await read(session) == before
        # The host that continues the session knows it too.
        assert (await (await session.ask("on")).outcome()).kind is Kind.DONE
        assert await session.answer(first, "allow") == replace(told, is_first=False)


# -- from the log alone ------------------------------------------------------------------------------------------------
def _log(*events: Event) -> Any:
    async def events_after(seq: int) -> AsyncGenerator[Event]:
        for event in events:
            if event.kind == kinds.STREAM_GAP or event.seq > seq:
                yield event

    return events_after


def _events(first: int, said: Sequence[tuple[str, dict[str, Any]]]) -> list[Event]:
    entries = [kinds.entry(None, kind, **body) for kind, body in said]
    return [Event("s", 1, seq, 0.0, *one) for seq, one in enumerate(entries, first)]


async def test_find_answer_reads_log_with_agent_named_questions() -> None:
    """The agent may use its id again. The last question counts."""
    said = [
        (kinds.QUESTION_ASKED, {"question": "theirs"}),
        (kinds.QUESTION_ANSWERED, {"question": "theirs", "answer": "withdrawn"}),
        (kinds.QUESTION_ASKED, {"question": "theirs"}),
    ]
    events = _events(1, said)
    assert await find_answer(_log(*events[:2]), "theirs", 2) == Answered("theirs", "withdrawn", "agent", None, False)
    assert await find_answer(_log(*events), "theirs", 3) is None
    with pytest.raises(NotFound):
        await find_answer(_log(*events), "other", 3)


async def test_find_answer_works_as_long_as_log_keeps_the_answer() -> None:
    """The answer is found even if the question itself is dropped."""
    answered = _events(9, [(kinds.QUESTION_ANSWERED, {"question": "q-1.4", "answer": "allow", "by": "rule"})])
    told = await find_answer(_log(kinds.gap("s", 1, 8), *answered), "q-1.4", 9)
    assert told == Answered("q-1.4", "allow", "rule", None, False)
    with pytest.raises(NotFound, match="find the id with `banksman log SESSION`; old questions may be deleted"):
        await find_answer(_log(kinds.gap("s", 1, 9)), "q-1.4", 9)
