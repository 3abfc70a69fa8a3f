"""What the agent asks: shown, answered once by a callback or a caller, and never left open by the end of its turn."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.sessions.helpers import SHORT_DRAIN, Case, bodies, opened, sent, touch

from banksman import Answer, Kind, Question, Session, UsageError
from banksman.core import event as kinds

ASK = '@@ask Bash {"command":"ls"}\n@@say went on'


def answers(case: Case) -> list[dict[str, Any]]:
    return [frame["response"] for frame in sent(case) if frame["type"] == "control_response"]


def _plain(answer: Any) -> Any:
    def call(question: Question) -> Any:
        return answer

    return call


def _async(answer: Any) -> Any:
    async def call(question: Question) -> Any:
        await asyncio.sleep(0)
        return answer

    return call


@pytest.mark.parametrize("kind", [_plain, _async])
@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("allow", {"behavior": "allow", "updatedInput": {"command": "ls"}}),
        ("deny", {"behavior": "deny", "message": "denied"}),
        (Answer("deny", message="not that"), {"behavior": "deny", "message": "not that"}),
        (
            Answer("allow", updated_input={"command": "pwd"}),
            {"behavior": "allow", "updatedInput": {"command": "pwd"}},
        ),
    ],
)
async def test_a_callback_answers(tmp_path: Path, kind: Any, answer: Any, expected: dict[str, Any]) -> None:
    asked: list[Question] = []
    inner = kind(answer)

    def on_question(question: Question) -> Any:
        asked.append(question)
        return inner(question)

    async with opened(tmp_path, on_question=on_question) as case:
        turn = await case.ask(ASK)
        assert (await case.outcome(turn)).text == "went on"
        assert [response["response"] for response in answers(case)] == [expected]
        (question,) = asked
        assert (question.tool, question.input, question.turn) == ("Bash", {"command": "ls"}, turn.id)
        assert case.session.questions() == []
        assert bodies(await case.events(), kinds.QUESTION_ASKED)[0]["tool"] == "Bash"
        assert bodies(await case.events(), kinds.QUESTION_ANSWERED)[0]["answer"] == "answered"


@pytest.mark.parametrize("kind", [_plain, _async])
@pytest.mark.parametrize("answer", ["perhaps", None, 1])
async def test_a_callback_that_answers_nonsense_says_no(tmp_path: Path, kind: Any, answer: Any) -> None:
    async with opened(tmp_path, on_question=kind(answer)) as case:
        assert (await case.answer(ASK)).kind is Kind.DONE
        (response,) = answers(case)
        assert response["response"]["behavior"] == "deny"


async def test_a_callback_that_raises_says_no(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def on_question(question: Question) -> str:
        raise RuntimeError("I am broken")

    async with opened(tmp_path, on_question=on_question) as case:
        assert (await case.answer(ASK)).kind is Kind.DONE
        (response,) = answers(case)
        assert response["response"]["behavior"] == "deny"
        assert "I am broken" in response["response"]["message"]
        assert "I am broken" in caplog.text
        assert (await case.answer(ASK)).kind is Kind.DONE


async def test_a_caller_answers_and_the_second_answer_is_nothing(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        turn = await case.ask(ASK)
        await case.wait_kind(kinds.QUESTION_ASKED)
        (question,) = case.session.questions()
        assert case.session.status().questions == (question.id,)
        with pytest.raises(UsageError):
            await case.session.answer(question.id, "perhaps")
        await case.session.answer(question.id, "allow")
        await case.session.answer(question.id, "deny")
        await case.session.answer("none", "allow")
        assert (await case.outcome(turn)).text == "went on"
        assert [response["response"]["behavior"] for response in answers(case)] == ["allow"]
        assert case.session.questions() == []


async def test_nothing_runs_before_the_decision_and_the_other_clocks_stand_still(tmp_path: Path) -> None:
    async with opened(tmp_path, options={"clocks": {"bytes": 0.2, "progress": 0.2, "overall": 0.4}}) as case:
        turn = await case.ask(ASK)
        await case.wait_kind(kinds.QUESTION_ASKED)
        await asyncio.sleep(0.6)  # Longer than any of them.
        assert turn.state == "running"
        await case.session.answer(case.session.questions()[0].id, "allow")
        assert (await case.outcome(turn)).kind is Kind.DONE


async def test_a_question_that_nobody_answers_is_ended_by_the_human_clock(tmp_path: Path) -> None:
    async with opened(tmp_path, options={"clocks": {"human": 0.2}}) as case:
        outcome = await case.answer(ASK)
        assert (outcome.kind, outcome.clock) == (Kind.INTERRUPTED, "human")
        assert case.session.questions() == []
        assert (await case.answer("next")).text == "next"


async def test_an_interrupt_closes_the_question_of_its_turn(tmp_path: Path) -> None:
    called: list[str] = []

    async def on_question(question: Question) -> str:
        try:
            await asyncio.Event().wait()
        finally:
            called.append("ended")
        return "allow"

    async with opened(tmp_path, on_question=on_question) as case:
        turn = await case.ask(ASK)
        await case.wait_kind(kinds.QUESTION_ASKED)
        (question,) = case.session.questions()
        receipt = await turn.interrupt()
        assert receipt.stopped
        assert (await case.outcome(turn)).kind is Kind.INTERRUPTED
        assert case.session.questions() == []
        assert called == ["ended"]
        await case.session.answer(question.id, "allow")
        assert not any("allow" in str(answer) for answer in answers(case))
        assert (await case.answer("next")).text == "next"
        assert len(case.processes) == 1


async def test_a_question_asked_while_the_turn_is_interrupted_is_cancelled(tmp_path: Path) -> None:
    go = tmp_path / "go"
    script = {"prompt 1": ["on_interrupt ignored", "say x", f"wait {go}", "ask Bash {}", "say went on"]}
    async with opened(tmp_path, script, options={"drain_seconds": 5.0}) as case:
        turn = await case.ask("one")
        await case.wait_said('"text":"x"')
        interrupting = asyncio.ensure_future(turn.interrupt())
        await case.wait_kind(kinds.TURN_INTERRUPTED)
        touch(go)
        await interrupting
        await case.outcome(turn)
        assert case.session.questions() == []
        assert kinds.QUESTION_ASKED not in await case.kinds()


async def test_a_question_that_the_agent_withdraws_needs_no_answer(tmp_path: Path) -> None:
    go = tmp_path / "go"
    async with opened(tmp_path) as case:
        turn = await case.ask(f"@@ask_withdrawn Bash {go}\n@@say went on")
        await case.wait_kind(kinds.QUESTION_ASKED)
        (question,) = case.session.questions()
        touch(go)
        assert (await case.outcome(turn)).text == "went on"
        assert case.session.questions() == []
        await case.session.answer(question.id, "allow")
        assert answers(case) == []
        assert bodies(await case.events(), kinds.QUESTION_ANSWERED)[0]["answer"] == "withdrawn"


@pytest.mark.parametrize("how", ["exit", "close"])
async def test_a_question_ends_with_its_process(tmp_path: Path, how: str) -> None:
    async with opened(tmp_path, memory=True, options=SHORT_DRAIN) as case:
        turn = await case.ask(ASK)
        await case.wait_kind(kinds.QUESTION_ASKED)
        if how == "exit":
            os.kill(case.session.status().pids[0], signal.SIGKILL)
            assert (await case.outcome(turn)).kind is Kind.FAILED
        else:
            await case.session.close()
            # Its stdin has ended: an agent takes that for a no, and may well come to its boundary.
            assert (await case.outcome(turn)).kind in (Kind.INTERRUPTED, Kind.DONE)
        assert case.session.questions() == []


async def test_closing_waits_for_a_callback_that_is_still_busy(tmp_path: Path) -> None:
    finished: list[str] = []
    sessions: list[Session] = []

    async def on_question(question: Question) -> str:
        try:
            await asyncio.Event().wait()
        finally:
            # Busy until all else of the session is over, and a little longer.
            while not sessions[0].is_closed:  # noqa: ASYNC110
                await asyncio.sleep(0)
            for _ in range(5):
                await asyncio.sleep(0)
            finished.append("cleaned up")
        return "allow"

    async with opened(tmp_path, on_question=on_question) as case:
        sessions.append(case.session)
        turn = await case.ask(ASK)
        await case.wait_kind(kinds.QUESTION_ASKED)
        await asyncio.sleep(0)
        await case.session.close()
        assert finished == ["cleaned up"]
        await case.outcome(turn)


async def test_a_request_that_is_not_known_is_answered_with_an_error(tmp_path: Path) -> None:
    request = '{"type":"control_request","request_id":"r-9","request":{"subtype":"from_the_future"}}'
    async with opened(tmp_path) as case:
        assert (await case.answer(f"@@raw {request}\n@@say fine")).text == "fine"
        await case.answer("next")
        (response,) = answers(case)
        assert (response["subtype"], response["request_id"]) == ("error", "r-9")
