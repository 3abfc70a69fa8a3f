"""Several editors on one session: each sees everything and gets each question, and the first answer counts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cli.acp.acp_client import Editor, selected
from tests.server.api.test_session_routes import wait_for
from tests.server.kit import Served, shared
from tests.thorough import thorough

pytestmark = thorough

ASKS = '@@ask Bash {"command": "make"}\n@@say done'


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with shared(tmp_path_factory.mktemp("served")) as served:
        yield served


@pytest.fixture
def one(served: Served, tmp_path: Path) -> Iterator[Editor]:
    with Editor(tmp_path / "one", served=served) as editor:
        yield editor


@pytest.fixture
def other(served: Served, tmp_path: Path) -> Iterator[Editor]:
    with Editor(tmp_path / "other", served=served) as editor:
        yield editor


@pytest.mark.thorough
def test_editors_see_each_others_prompts_and_answers(one: Editor, other: Editor, served: Served) -> None:
    session = one.new()
    other.load(session)
    assert one.prompt(session, "@@say first") == "end_turn"
    other.wait_said(session, "first")
    assert other.prompt(session, "@@say second") == "end_turn"
    one.wait_said(session, "second")
    assert one.said(session) == other.said(session) == "firstsecond"
    # Only the prompts of others: the editor shows its own already.
    assert one.texts(session, "user_message_chunk") == ["@@say second"]
    assert other.texts(session, "user_message_chunk") == ["@@say first"]
    served.ask(session, "@@say third")
    for editor in (one, other):
        editor.wait_said(session, "third")
        assert editor.texts(session, "user_message_chunk")[-1] == "@@say third"


def test_question_answered_by_one_editor_is_cancelled_in_the_other(one: Editor, other: Editor) -> None:
    session = one.new()
    other.load(session)
    request = one.begin_prompt(session, ASKS)
    asked = {editor: editor.wait_asked() for editor in (one, other)}
    other.reply(asked[other], selected("reject_once"))
    cancelled = one.wait(lambda message: message.get("method") == "$/cancel_request")
    assert cancelled["params"]["requestId"] == asked[one]["id"]
    # Too late, and ignored.
    one.reply(asked[one], selected("allow_once"))
    assert one.response(request)["result"]["stopReason"] == "end_turn"
    ends = [each["status"] for each in one.updates(session) if each["sessionUpdate"] == "tool_call_update"]
    assert ends == ["failed"]
    assert not [message for message in other.messages if message.get("method") == "$/cancel_request"]


def test_question_answered_elsewhere_is_cancelled_in_all_editors(one: Editor, other: Editor, served: Served) -> None:
    session = one.new()
    other.load(session)
    request = one.begin_prompt(session, ASKS)
    for editor in (one, other):
        editor.wait_asked()
    [question] = served.get(f"/v1/sessions/{session}/questions")["questions"]
    served.post(f"/v1/sessions/{session}/questions/{question['id']}", {"decision": "allow"})
    for editor in (one, other):
        editor.wait(lambda message: message.get("method") == "$/cancel_request")
    assert one.response(request)["result"]["stopReason"] == "end_turn"


def test_question_of_a_dead_editor_is_answered_by_the_other(one: Editor, other: Editor, served: Served) -> None:
    session = one.new()
    other.load(session)
    one.begin_prompt(session, ASKS)
    one.wait_asked()
    asked = other.wait_asked()
    one.kill()
    other.reply(asked, selected("allow_once"))
    other.wait_said(session, "done")
    turn = wait_for(served, session, "turn.ended")["turn"]
    assert served.outcome(session, turn)["kind"] == "done"


def test_editor_loading_during_an_open_question_is_asked_after_the_replay(one: Editor, other: Editor) -> None:
    session = one.new()
    request = one.begin_prompt(session, f"@@say before\n{ASKS}")
    one.wait_asked()
    other.load(session)
    asked = other.wait_asked()
    assert other.said(session) == "before"
    methods = [message.get("method", "the answer") for message in other.messages]
    assert methods.index("the answer") < methods.index("session/request_permission")
    other.reply(asked, selected("allow_once"))
    assert one.response(request)["result"]["stopReason"] == "end_turn"


def test_answered_question_is_not_asked_again_on_load(one: Editor, other: Editor) -> None:
    session = one.new()
    request = one.begin_prompt(session, ASKS)
    one.reply(one.wait_asked(), selected("allow_once"))
    one.response(request)
    other.load(session)
    assert other.prompt(session, "@@say on") == "end_turn"
    assert not [message for message in other.messages if message.get("method") == "session/request_permission"]


def test_editor_loading_in_the_middle_of_a_text_gets_it_once(one: Editor, other: Editor, tmp_path: Path) -> None:
    go = tmp_path / "go"
    os.mkfifo(go)
    session = one.new()
    request = one.begin_prompt(session, f"@@stream 3 0 a\n@@wait {go}\n@@stream 2 0 b")
    one.wait_said(session, "a2")
    other.load(session)
    go.write_text("now")
    other.wait_said(session, "b1")
    assert other.said(session) == "a0 a1 a2 b0 b1 "
    assert one.response(request)["result"]["stopReason"] == "end_turn"
    assert one.said(session) == other.said(session)
