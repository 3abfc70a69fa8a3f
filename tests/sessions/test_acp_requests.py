"""Requests of an ACP agent to a session: permissions, user input, files, terminals, and unknown methods."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.sessions.acp_case import bodies, opened, replies
from tests.sessions.helpers import Case

from banksman import Answer, Kind, Question, UsageError
from banksman.core.session import event as kinds

ASK = "@@permission ls"


def selected(option: str) -> dict[str, Any]:
    return {"outcome": {"outcome": "selected", "optionId": option}}


CANCELLED = {"outcome": {"outcome": "cancelled"}}


def answering(answer: Any) -> Any:
    def call(question: Question) -> Any:
        return answer

    return call


@pytest.mark.parametrize("is_string", [False, True], ids=["numbers", "words"])
@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("allow", "allow"),
        ("deny", "reject"),
        (Answer("allow", remember=True), "always"),
        ("always", "always"),
        ("reject", "reject"),
    ],
)
async def test_permission_answer_selects_matching_option(
    tmp_path: Path, answer: Any, expected: str, is_string: bool
) -> None:
    character = {"has_string_ids": is_string}
    async with opened(tmp_path, on_question=answering(answer), character=character) as case:
        outcome = await case.answer(ASK)
        assert outcome.text == f"answered {json.dumps(selected(expected))}"
        assert replies(case) == [selected(expected)]
        [asked] = bodies(await case.events(), kinds.QUESTION_ASKED)
        assert (asked["tool"], asked["input"]) == ("execute", {"command": "ls"})
        assert [option["optionId"] for option in asked["details"]["options"]] == ["allow", "always", "reject"]


async def test_rule_answers_by_tool_kind(tmp_path: Path) -> None:
    async with opened(tmp_path, rules={"execute": "deny"}) as case:
        assert (await case.answer(ASK)).text == f"answered {json.dumps(selected('reject'))}"


async def test_question_accepts_one_answer_of_a_caller(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        turn = await case.ask(ASK)
        asked = (await case.wait_kind(kinds.QUESTION_ASKED)).body
        await case.session.answer(asked["question"], "allow")
        assert (await case.outcome(turn)).text == f"answered {json.dumps(selected('allow'))}"
        assert replies(case) == [selected("allow")]


async def test_answer_with_updated_input_is_refused(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        turn = await case.ask(ASK)
        asked = (await case.wait_kind(kinds.QUESTION_ASKED)).body["question"]
        with pytest.raises(UsageError, match="does not support updated_input") as refused:
            await case.session.answer(asked, "allow", updated_input={"command": "pwd"})
        assert "deny with a message" in refused.value.hint
        assert replies(case) == []
        await case.session.answer(asked, "deny", message="use pwd")
        assert (await case.outcome(turn)).text == f"answered {json.dumps(selected('reject'))}"


async def test_callback_answer_with_updated_input_becomes_denial(tmp_path: Path) -> None:
    answer = Answer("allow", updated_input={"command": "pwd"})
    async with opened(tmp_path, on_question=answering(answer)) as case:
        assert (await case.answer(ASK)).text == f"answered {json.dumps(selected('reject'))}"


@pytest.mark.parametrize("value", [object(), "\ud800"], ids=["an object", "half a text"])
async def test_answer_with_unsendable_content_is_refused(tmp_path: Path, value: Any) -> None:
    async with opened(tmp_path) as case:
        turn = await case.ask(f"@@request elicitation/create {json.dumps({'message': 'which?'})}")
        asked = (await case.wait_kind(kinds.QUESTION_ASKED)).body["question"]
        with pytest.raises(UsageError):
            await case.session.answer(asked, "allow", content={"x": value})
        await case.session.answer(asked, "allow", content={"x": "y"})
        assert (await case.outcome(turn)).kind is Kind.DONE


async def test_interrupt_cancels_open_question_after_cancel_is_sent(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        turn = await case.ask(ASK)
        await case.wait_kind(kinds.QUESTION_ASKED)
        assert (await turn.interrupt()).stopped
        assert (await case.outcome(turn)).kind is Kind.INTERRUPTED
        assert replies(case) == [CANCELLED]
        # The cancel comes first. An agent that reads "cancelled" before it would take it for an answer, and continue.
        frames = case.processes[0].frames
        order = [frame.get("method", "answer") for frame in frames][-2:]
        assert order == ["session/cancel", "answer"]
        assert (await case.answer("on")).text == "you said: on"


async def test_elicitation_returns_content_of_user(tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"name": {"type": "string"}}}
    params = {"mode": "form", "message": "Who?", "requestedSchema": schema}
    answer = Answer("allow", content={"name": "x"})
    async with opened(tmp_path, on_question=answering(answer)) as case:
        outcome = await case.answer(f"@@request elicitation/create {json.dumps(params)}")
        assert outcome.text == 'answered {"action": "accept", "content": {"name": "x"}}'


@pytest.mark.parametrize("method", ["no/such", "_vendor/what"])
async def test_unknown_request_is_refused_and_turn_continues(tmp_path: Path, method: str) -> None:
    async with opened(tmp_path) as case:
        outcome = await case.answer(f"@@request {method} {{}}\n@@text on")
        assert outcome.kind is Kind.DONE
        [error] = replies(case)
        assert error["code"] == -32601


# -- files and terminals ---------------------------------------------------------------------------------------------
async def request(case: Case, method: str, **params: Any) -> str:
    outcome = await case.answer(f"@@request {method} {json.dumps(params)}")
    assert outcome.text is not None
    return outcome.text.removeprefix("answered ")


async def test_file_requests_read_and_write_in_session_folder(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        (tmp_path / "a.txt").write_text("one\ntwo\nthree\n")
        path = str(tmp_path / "a.txt")
        assert json.loads(await request(case, "fs/read_text_file", path=path)) == {"content": "one\ntwo\nthree\n"}
        assert (
            json.loads(await request(case, "fs/read_text_file", path=path, line=2, limit=1))["content"].strip() == "two"
        )
        await request(case, "fs/write_text_file", path=str(tmp_path / "b.txt"), content="new")
        assert (tmp_path / "b.txt").read_text() == "new"


async def test_file_requests_outside_session_folder_are_refused(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (tmp_path / "secret").write_text("secret")
    async with opened(root) as case:
        (root / "link").symlink_to(tmp_path / "secret")
        for path in (tmp_path / "secret", root / ".." / "secret", root / "link"):
            assert "secret" not in (await request(case, "fs/read_text_file", path=str(path))).replace(str(path), "")
        await request(case, "fs/write_text_file", path=str(tmp_path / "made"), content="x")
        assert not (tmp_path / "made").exists()
        assert [reply["code"] for reply in replies(case)] == [-32603] * 4


async def test_terminal_runs_in_session_folder(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        outcome = await case.answer("@@terminal sh -c 'pwd; exit 3'")
        assert outcome.text == f"wrote {str(tmp_path) + chr(10)!r} ended 3"


async def test_terminal_ends_with_interrupted_turn(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        pid = tmp_path / "pid"
        turn = await case.ask(f"@@terminal sh -c 'echo $$ > {pid}.new; mv {pid}.new {pid}; exec sleep 60'")
        await case.reached(pid)
        await turn.interrupt()
        assert (await case.outcome(turn)).kind is Kind.INTERRUPTED
        assert (await case.answer("on")).text == "you said: on"
        assert not Path(f"/proc/{pid.read_text().strip()}").exists()
