"""Questions of the agent: visible, answered once by a callback or a caller, and closed at the end of their turn."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from pathlib import Path
from typing import Any, cast

import pytest
from tests.sessions.helpers import (
    SHORT_DRAIN,
    answers,
    bodies,
    ended,
    interrupts,
    opened,
    prompts,
    requesting,
    touch,
)

from banksman import Answer, Kind, Question, Session, UsageError
from banksman.core.session import event as kinds
from banksman.core.session.questions import QUESTIONS_MAX
from banksman.sessions import questions

ASK = '@@ask Bash {"command":"ls"}\n@@say went on'
ELICITATION = {
    "mcp_server_name": "github",
    "message": "Which repository?",
    "requestedSchema": {"type": "object", "properties": {"name": {"type": "string"}}},
}


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
async def test_callback_answers_question(tmp_path: Path, kind: Any, answer: Any, expected: dict[str, Any]) -> None:
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
        (answered,) = bodies(await case.events(), kinds.QUESTION_ANSWERED)
        assert (answered["answer"], answered["by"]) == (expected["behavior"], "callback")


@pytest.mark.parametrize("kind", [_plain, _async])
@pytest.mark.parametrize("answer", ["perhaps", None, 1])
async def test_callback_with_invalid_answer_denies(tmp_path: Path, kind: Any, answer: Any) -> None:
    async with opened(tmp_path, on_question=kind(answer)) as case:
        assert (await case.answer(ASK)).kind is Kind.DONE
        (response,) = answers(case)
        assert response["response"]["behavior"] == "deny"


async def test_callback_that_raises_denies(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def on_question(question: Question) -> str:
        raise RuntimeError("I am broken")

    async with opened(tmp_path, on_question=on_question) as case:
        assert (await case.answer(ASK)).kind is Kind.DONE
        (response,) = answers(case)
        assert response["response"]["behavior"] == "deny"
        assert "I am broken" in response["response"]["message"]
        assert "I am broken" in caplog.text
        assert (await case.answer(ASK)).kind is Kind.DONE


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize("error", [Mute(), RuntimeError("half \ud800"), RuntimeError("x" * 10_000_000)])
async def test_callback_that_raises_unprintable_error_denies(
    tmp_path: Path, error: Exception, unreported: list[logging.LogRecord]
) -> None:
    def on_question(question: Question) -> str:
        raise error

    async with opened(tmp_path, on_question=on_question, options={"clocks": {"human": 10.0}}) as case:
        assert (await case.answer(ASK)).text == "went on"
        (response,) = answers(case)
        assert response["response"]["behavior"] == "deny"
        assert response["response"]["message"].startswith("the callback failed: ")
        assert len(response["response"]["message"]) < 10_000
        assert [record.getMessage() for record in unreported] == [
            "on_question raised an exception, denying the request"
        ]


async def test_question_ignores_second_answer_of_caller(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        turn = await case.ask(ASK)
        await case.wait_kind(kinds.QUESTION_ASKED)
        (question,) = case.session.questions()
        assert case.session.status().questions == (question.id,)
        with pytest.raises(UsageError):
            await case.session.answer(question.id, "perhaps")
        await case.session.answer(question.id, "allow")
        await case.session.answer(question.id, "deny")
        assert (await case.outcome(turn)).text == "went on"
        assert [response["response"]["behavior"] for response in answers(case)] == ["allow"]
        assert case.session.questions() == []


async def test_open_question_stops_other_clocks(tmp_path: Path) -> None:
    async with opened(tmp_path, options={"clocks": {"bytes": 1.0, "progress": 1.0, "overall": 1.0}}) as case:
        turn = await case.ask(ASK)
        await case.wait_kind(kinds.QUESTION_ASKED)
        await asyncio.sleep(1.2)  # Longer than any of the clocks.
        assert turn.state == "running"
        await case.session.answer(case.session.questions()[0].id, "allow")
        assert (await case.outcome(turn)).kind is Kind.DONE


async def test_unanswered_question_is_ended_by_human_clock(tmp_path: Path) -> None:
    async with opened(tmp_path, options={"clocks": {"human": 0.2}}) as case:
        outcome = await case.answer(ASK)
        assert (outcome.kind, outcome.clock) == (Kind.INTERRUPTED, "human")
        assert case.session.questions() == []
        assert (await case.answer("next")).text == "next"


async def test_interrupt_closes_question_of_its_turn(tmp_path: Path) -> None:
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


async def test_question_during_interrupt_is_cancelled(tmp_path: Path) -> None:
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


async def test_question_withdrawn_by_agent_needs_no_answer(tmp_path: Path) -> None:
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
async def test_question_ends_with_its_process(tmp_path: Path, how: str) -> None:
    async with opened(tmp_path, memory=True, options=SHORT_DRAIN) as case:
        turn = await case.ask(ASK)
        await case.wait_kind(kinds.QUESTION_ASKED)
        if how == "exit":
            os.kill(case.session.status().pids[0], signal.SIGKILL)
            assert (await case.outcome(turn)).kind is Kind.FAILED
        else:
            await case.session.close()
            # The stdin of the agent has ended. An agent takes that for a denial, and may reach its boundary.
            assert (await case.outcome(turn)).kind in (Kind.INTERRUPTED, Kind.DONE)
        assert case.session.questions() == []


async def test_close_waits_for_running_callback(tmp_path: Path) -> None:
    finished: list[str] = []
    sessions: list[Session] = []

    async def on_question(question: Question) -> str:
        try:
            await asyncio.Event().wait()
        finally:
            # Busy until the rest of the session is over, and a little longer.
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


async def test_unknown_control_request_is_answered_with_error(tmp_path: Path) -> None:
    request = '{"type":"control_request","request_id":"r-9","request":{"subtype":"from_the_future"}}'
    async with opened(tmp_path) as case:
        assert (await case.answer(f"@@raw {request}\n@@say fine")).text == "fine"
        await case.answer("next")
        (response,) = answers(case)
        assert (response["subtype"], response["request_id"]) == ("error", "r-9")


# -- answers with more than a decision -------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("remember", "destination"),
    [
        (True, "session"),
        ("session", "session"),
        ("local", "localSettings"),
        ("project", "projectSettings"),
        ("user", "userSettings"),
    ],
)
async def test_answer_is_remembered_at_requested_destination(
    tmp_path: Path, remember: bool | str, destination: str
) -> None:
    bare = requesting("can_use_tool", tool_name="Read", input={"path": "x"})
    async with opened(tmp_path, on_question=_plain(Answer("allow", remember=remember))) as case:
        assert (await case.answer(f"{ASK}\n{bare}")).kind is Kind.DONE
        suggested, plain = (response["response"] for response in answers(case))
        rule = {"type": "addRules", "behavior": "allow", "destination": destination}
        assert suggested == {
            "behavior": "allow",
            "updatedInput": {"command": "ls"},
            "updatedPermissions": [{**rule, "rules": [{"toolName": "Bash", "ruleContent": "ls"}]}],
        }
        # The agent suggested no rule, so the rule is the tool itself.
        assert plain["updatedPermissions"] == [{**rule, "rules": [{"toolName": "Read"}]}]


async def test_denial_with_interrupt_ends_turn(tmp_path: Path) -> None:
    async with opened(tmp_path, on_question=_plain(Answer("deny", message="stop", interrupt=True))) as case:
        turn = await case.ask(ASK)
        assert (await case.outcome(turn)).kind is Kind.INTERRUPTED
        assert answers(case)[0]["response"] == {"behavior": "deny", "message": "stop", "interrupt": True}
        assert ended(await case.events(), turn)["by"] == "boundary"
        assert (await case.answer("next")).text == "next"
        assert interrupts(case) == 1
        assert len(case.processes) == 1


async def test_agent_that_ignores_interrupting_denial_is_ended_by_ladder(tmp_path: Path) -> None:
    deaf = f"@@on_interrupt ignored\n{requesting('can_use_tool', tool_name='Bash', input={})}\n@@say goes on\n@@hang"
    answer = Answer("deny", interrupt=True)
    async with opened(tmp_path, memory=True, options=SHORT_DRAIN, on_question=_plain(answer)) as case:
        turn = await case.ask(deaf)
        outcome = await case.outcome(turn)
        assert (outcome.kind, outcome.text) == (Kind.INTERRUPTED, "goes on")
        assert ended(await case.events(), turn)["by"] == "ladder"
        assert (await case.answer("next")).text == "next"
        assert len(case.processes) == 2
        # The denied ask is not repeated.
        assert len(prompts(case)) == 2


@pytest.mark.parametrize(
    ("decision", "more"),
    [
        ("perhaps", {}),
        ("Allow", {}),
        (None, {}),
        ("allow", {"interrupt": True}),
        ("allow", {"content": {}}),
        ("allow", {"remember": "everywhere"}),
        ("allow", {"remember": 2}),
        ("allow", {"remember": ""}),
        ("allow", {"remember": {}}),
        ("allow", {"updated_input": [1]}),
        ("allow", {"updated_input": "x"}),
        ("allow", {"updated_input": {"command": "\ud800"}}),
        ("allow", {"updated_input": {"command": object()}}),
        ("deny", {"remember": True}),
        ("deny", {"updated_input": {}}),
        ("deny", {"content": {}}),
        ("deny", {"message": "\ud800"}),
        ("deny", {"message": 3}),
    ],
)
async def test_invalid_answer_is_refused_and_not_sent(tmp_path: Path, decision: Any, more: dict[str, Any]) -> None:
    async with opened(tmp_path) as case:
        turn = await case.ask(ASK)
        await case.wait_kind(kinds.QUESTION_ASKED)
        (question,) = case.session.questions()
        with pytest.raises(UsageError):
            await case.session.answer(question.id, decision, **more)
        assert case.session.questions() == [question]
        await case.session.answer(question.id, "allow", updated_input={})
        await case.outcome(turn)
        # An empty input counts: an input that was emptied on purpose must not run as the agent asked for it.
        assert [response["response"] for response in answers(case)] == [{"behavior": "allow", "updatedInput": {}}]


@pytest.mark.parametrize("wrong", [Answer("allow", interrupt=True), Answer("deny", remember="project")])
async def test_callback_with_impossible_answer_denies(tmp_path: Path, wrong: Answer) -> None:
    async with opened(tmp_path, on_question=_plain(wrong)) as case:
        assert (await case.answer(ASK)).text == "went on"
        (response,) = answers(case)
        assert response["response"]["behavior"] == "deny"
        assert "the callback failed" in response["response"]["message"]


async def test_question_shows_details_of_agent(tmp_path: Path) -> None:
    words = {"title": "Run ls", "description": "Lists files", "decision_reason": "no rule", "blocked_path": None}
    async with opened(tmp_path) as case:
        turn = await case.ask(requesting("can_use_tool", tool_name="Bash", input={"command": "ls"}, **words))
        asked = await case.wait_kind(kinds.QUESTION_ASKED)
        (question,) = case.session.questions()
        assert (question.wants, question.tool, question.input) == ("permission", "Bash", {"command": "ls"})
        assert question.details == words
        assert asked.body == {
            "question": question.id,
            "request": asked.body["request"],
            "wants": "permission",
            "tool": "Bash",
            "input": {"command": "ls"},
            "details": words,
        }
        assert asked.turn == question.turn == turn.id
        await case.session.answer(question.id, "deny")
        await case.outcome(turn)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (Answer("allow", content={"name": "crane"}), {"action": "accept", "content": {"name": "crane"}}),
        ("allow", {"action": "accept", "content": {}}),
        ("deny", {"action": "decline"}),
    ],
)
async def test_elicitation_is_answered_by_callback_and_never_by_rule(
    tmp_path: Path, answer: Any, expected: dict[str, Any]
) -> None:
    asked: list[Question] = []

    def on_question(question: Question) -> Any:
        asked.append(question)
        return answer

    async with opened(tmp_path, on_question=on_question, rules={"*": "deny"}) as case:
        assert (await case.answer(f"{requesting('elicitation', **ELICITATION)}\n@@say went on")).text == "went on"
        assert [response["response"] for response in answers(case)] == [expected]
        (question,) = asked
        assert (question.wants, question.tool, question.input) == ("elicitation", "github", {})
        assert question.details == ELICITATION


@pytest.mark.parametrize("more", [{"updated_input": {}}, {"remember": True}, {"content": "crane"}])
async def test_elicitation_refuses_answer_meant_for_tool(tmp_path: Path, more: dict[str, Any]) -> None:
    async with opened(tmp_path) as case:
        turn = await case.ask(f"{requesting('elicitation', **ELICITATION)}\n@@hang")
        await case.wait_kind(kinds.QUESTION_ASKED)
        (question,) = case.session.questions()
        with pytest.raises(UsageError):
            await case.session.answer(question.id, "allow", **more)
        assert case.session.questions() == [question]
        await case.session.answer(question.id, "deny", interrupt=True)
        assert (await case.outcome(turn)).kind is Kind.INTERRUPTED


async def test_callback_cannot_mutate_its_question(tmp_path: Path) -> None:
    def on_question(question: Question) -> Any:
        for given in (question.input, question.details):
            cast(dict[str, Any], given).clear()
        return Answer("allow", remember=True)

    async with opened(tmp_path, on_question=on_question) as case:
        assert (await case.answer(ASK)).text == "went on"
        response = answers(case)[0]["response"]
        assert response["updatedInput"] == {"command": "ls"}
        assert response["updatedPermissions"][0]["rules"] == [{"toolName": "Bash", "ruleContent": "ls"}]


# -- expiry and competing answers ------------------------------------------------------------------------------------
async def _hangs(question: Question) -> str:
    await asyncio.Event().wait()
    return "allow"


@pytest.mark.parametrize("on_question", [None, _hangs])
@pytest.mark.parametrize(
    ("default", "expected"),
    [
        ({}, {"behavior": "deny", "message": "no answer within 0.2 s"}),
        ({"question_default": "deny"}, {"behavior": "deny", "message": "no answer within 0.2 s"}),
        ({"question_default": "allow"}, {"behavior": "allow", "updatedInput": {"command": "ls"}}),
    ],
)
async def test_expired_question_gets_configured_answer(
    tmp_path: Path, on_question: Any, default: dict[str, Any], expected: dict[str, Any]
) -> None:
    async with opened(tmp_path, on_question=on_question, options={"question_seconds": 0.2, **default}) as case:
        turn = await case.ask(ASK)
        asked = await case.wait_kind(kinds.QUESTION_ASKED)
        assert (await case.outcome(turn)).text == "went on"
        assert [response["response"] for response in answers(case)] == [expected]
        (answered,) = bodies(await case.events(), kinds.QUESTION_ANSWERED)
        assert (answered["answer"], answered["by"]) == (expected["behavior"], "expiry")
        assert case.session.questions() == []
        await case.session.answer(asked.body["question"], "allow")
        assert (await case.answer("next")).text == "next"
        assert len(answers(case)) == 1


async def test_cancelled_callback_denies(tmp_path: Path) -> None:
    async def on_question(question: Question) -> str:
        raise asyncio.CancelledError

    async with opened(tmp_path, on_question=on_question) as case:
        assert (await case.answer(ASK)).text == "went on"
        (response,) = answers(case)
        assert response["response"] == {"behavior": "deny", "message": "the callback was cancelled"}


async def test_concurrent_answers_count_once_and_cancel_callback(tmp_path: Path) -> None:
    over = asyncio.Event()

    async def on_question(question: Question) -> str:
        try:
            await asyncio.Event().wait()
        finally:
            over.set()
        return "deny"

    async with opened(tmp_path, on_question=on_question) as case:
        turn = await case.ask(ASK)
        await case.wait_kind(kinds.QUESTION_ASKED)
        (question,) = case.session.questions()
        await asyncio.gather(
            case.session.answer(question.id, "allow"),
            case.session.answer(question.id, "deny", message="too late"),
            case.session.answer(question.id, "deny", interrupt=True),
        )
        assert (await case.outcome(turn)).text == "went on"
        await over.wait()
        assert [response["response"]["behavior"] for response in answers(case)] == ["allow"]
        assert len(bodies(await case.events(), kinds.QUESTION_ANSWERED)) == 1
        assert interrupts(case) == 0


async def test_withdrawn_question_cancels_its_callback(tmp_path: Path) -> None:
    go, over = tmp_path / "go", asyncio.Event()

    async def on_question(question: Question) -> str:
        try:
            await asyncio.Event().wait()
        finally:
            over.set()
        return "allow"

    async with opened(tmp_path, on_question=on_question) as case:
        turn = await case.ask(f"@@ask_withdrawn Bash {go}\n@@say went on")
        await case.wait_kind(kinds.QUESTION_ASKED)
        assert not over.is_set()
        touch(go)
        assert (await case.outcome(turn)).text == "went on"
        await over.wait()
        assert (await case.answer("next")).text == "next"
        assert answers(case) == []
        assert bodies(await case.events(), kinds.QUESTION_ANSWERED)[0]["answer"] == "withdrawn"


async def test_questions_beyond_maximum_are_refused(tmp_path: Path) -> None:
    request = '{"type":"control_request","request_id":"q-%d","request":{"subtype":"can_use_tool","tool_name":"Bash"}}'
    # Each request is sent twice, and is one question.
    asks = [f"@@raw {request % number}" for number in range(QUESTIONS_MAX + 1) for _ in range(2)]
    async with opened(tmp_path) as case:
        turn = await case.reaches("\n".join([*asks, "@@hang"]))
        # The agent has written everything, but the session may not have read it yet.
        await case.wait_said(f"q-{QUESTIONS_MAX}")
        asked = bodies(await case.events(), kinds.QUESTION_ASKED)
        assert [body["request"] for body in asked] == [f"q-{n}" for n in range(QUESTIONS_MAX)]
        assert [question.id for question in case.session.questions()] == [body["question"] for body in asked]
        # The interrupt reaches the agent after the refusals.
        await turn.interrupt()
        refused = [response for response in answers(case) if response["request_id"] == f"q-{QUESTIONS_MAX}"]
        assert [(each["subtype"], each["error"]) for each in refused] == [("error", "too many questions are open")] * 2
        await case.outcome(turn)
        assert case.session.questions() == []


# -- callbacks that use the session ----------------------------------------------------------------------------------
@pytest.mark.parametrize("does", ["ask", "answer", "interrupt", "close"])
async def test_callback_may_use_its_session(tmp_path: Path, does: str) -> None:
    sessions: list[Session] = []
    asked: list[Any] = []

    async def on_question(question: Question) -> str:
        (session,) = sessions
        match does:
            case "ask":
                asked.append(await session.ask("later"))
            case "answer":
                await session.answer(question.id, "allow")
            case "interrupt":
                await session.interrupt()
            case _:
                await session.close()
        return "deny"

    async with opened(tmp_path, on_question=on_question) as case:
        sessions.append(case.session)
        turn = await case.ask(ASK)
        outcome = await case.outcome(turn)
        behaviors = [response.get("response", {}).get("behavior") for response in answers(case)]
        if does in ("ask", "answer"):
            assert outcome.text == "went on"
            assert behaviors == ["deny" if does == "ask" else "allow"]
        else:
            assert "allow" not in behaviors
        for later in asked:
            assert (await case.outcome(later)).text == "later"
        await case.session.close()


@pytest.mark.parametrize("obeys", [True, False])
async def test_close_does_not_wait_forever_for_callback(
    tmp_path: Path, obeys: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # Far longer than the test may take; or very short, for a callback that does not end.
    monkeypatch.setattr(questions, "CALLBACK_SECONDS_MAX", 1000.0 if obeys else 0.05)
    free = asyncio.Event()

    async def on_question(question: Question) -> str:
        while not free.is_set():
            try:
                await free.wait()
            except asyncio.CancelledError:
                if obeys:
                    raise
        return "allow"

    async with opened(tmp_path, on_question=on_question) as case:
        turn = await case.ask(ASK)
        await case.wait_kind(kinds.QUESTION_ASKED)
        await case.session.close()
        await case.outcome(turn)
        warning = "on_question callbacks still run after their cancellation (callbacks=1)"
        has_warned = warning in caplog.text
        free.set()
        await case.session.wait_closed()
        assert has_warned is not obeys
        assert not any("allow" in str(answer) for answer in answers(case))


async def test_question_without_callback_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with opened(tmp_path) as case:
        turn = await case.ask(ASK)
        await case.wait_kind(kinds.QUESTION_ASKED)
        assert "turn waits for an answer: no on_question callback (tool=Bash)" in caplog.text
        assert case.session.status().questions == tuple(question.id for question in case.session.questions())
        assert turn.state == "running"
        await case.session.answer(case.session.questions()[0].id, "allow")
        await case.outcome(turn)


class Odd(BaseException):
    """Exception that is neither an error nor a cancellation."""


async def test_callback_that_raises_base_exception_denies(tmp_path: Path) -> None:
    async def odd(_: object) -> str:
        raise Odd

    async with opened(tmp_path, on_question=odd) as case:
        assert (await case.answer(ASK)).kind is Kind.DONE
        (answered,) = bodies(await case.events(), kinds.QUESTION_ANSWERED)
        assert (answered["answer"], answered["by"]) == ("deny", "failure")
