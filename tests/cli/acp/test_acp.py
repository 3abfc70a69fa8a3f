"""`banksman acp` from the view of an editor, with a real server and a scripted agent."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.cli.acp.acp_client import Editor, Message, is_update, selected
from tests.server.api.test_session_routes import wait_for
from tests.server.kit import Served, shared

ASKS = '@@ask Bash {"command": "make"}'


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with shared(tmp_path_factory.mktemp("served")) as served:
        yield served


@pytest.fixture
def editor(served: Served, tmp_path: Path) -> Iterator[Editor]:
    with Editor(tmp_path / "editor", served=served) as editor:
        yield editor


def fifo(path: Path) -> Path:
    os.mkfifo(path)
    return path


# -- the connection --------------------------------------------------------------------------------------------------
def test_initialize_answers_version_1_to_any_version(editor: Editor) -> None:
    for version in (0, 1, 2, 65535):
        told = editor.call("initialize", protocolVersion=version)
        shown = (told["protocolVersion"], told["authMethods"], told["agentInfo"]["name"])
        assert shown == (1, [], "banksman"), version
        can = told["agentCapabilities"]
        assert (can["loadSession"], can["promptCapabilities"]["image"]) == (True, True), version
        assert editor.call("authenticate", methodId="none") == {}, version


@pytest.mark.thorough
def test_initialize_refuses_unknown_agent_with_a_hint(served: Served, tmp_path: Path) -> None:
    with Editor(tmp_path / "editor", served=served, words=["--agent", "nobody"]) as editor:
        error = editor.fail("initialize", protocolVersion=1)
    assert error["code"] == -32602
    assert "claude" in error["data"]["hint"]


def test_malformed_message_is_answered_with_its_error_code(editor: Editor) -> None:
    bad = {
        b"\xff\xfe": -32700,
        b"what?": -32700,
        b'{"jsonrpc":"2.0","id":1,': -32700,
        b'{"a":' * 100_000: -32600,
        b"17": -32600,
        b"[" + b"0," * 1_000_000 + b"0]": -32600,
        b' [{"jsonrpc":"2.0","id":1,"method":"authenticate"}]': -32600,
        b'{"jsonrpc":"2.0","method":7}': -32600,
    }
    for count, (line, code) in enumerate(bad.items(), 1):
        editor.send(line)
        response = editor.wait(lambda message: "error" in message, count - 1)
        assert (response["id"], response["error"]["code"]) == (None, code), line[:50]
    editor.send(b"")
    editor.send(b'{"jsonrpc":"2.0","id":"a","method":"nothing"}')
    assert editor.response("a")["error"]["code"] == -32601
    editor.send(b'{"jsonrpc":"2.0","id":0,"method":"authenticate"}')
    assert editor.response(0)["result"] == {}
    assert len(editor.messages) == len(bad) + 2


def test_request_with_invalid_params_is_refused_with_words(editor: Editor, tmp_path: Path) -> None:
    session = editor.new()
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("session/new", {}),
        ("session/new", {"cwd": "here"}),
        ("session/new", {"cwd": str(tmp_path), "mcpServers": {}}),
        ("session/prompt", {"sessionId": session}),
        ("session/prompt", {"sessionId": session, "prompt": "text"}),
        ("session/prompt", {"sessionId": session, "prompt": []}),
        ("session/prompt", {"sessionId": session, "prompt": [{"type": "audio"}]}),
        ("session/prompt", {"sessionId": "s-nobody", "prompt": [{"type": "text", "text": "x"}]}),
        ("session/load", {"sessionId": "s-nobody", "cwd": str(tmp_path)}),
        ("session/load", {"sessionId": 7}),
        ("session/resume", {"sessionId": "s-nobody"}),
        ("session/set_mode", {"sessionId": session}),
        ("session/close", {"sessionId": "s-nobody"}),
        ("session/list", {"cursor": 7}),
    ]
    for method, params in wrong:
        error = editor.fail(method, **params)
        assert (error["code"], bool(error["message"])) == (-32602, True), (method, params, error)
    assert "s-nobody" in editor.fail("session/load", sessionId="s-nobody", cwd="/")["message"]
    assert editor.prompt(session, "still there") == "end_turn"


def test_stdout_carries_only_messages_and_ids_keep_their_type(editor: Editor) -> None:
    editor.send(b'{"jsonrpc":"2.0","id":"7","method":"authenticate"}')
    editor.send(b'{"jsonrpc":"2.0","id":7,"method":"authenticate"}')
    assert editor.response("7")["id"] == "7"
    assert editor.response(7)["id"] == 7
    assert editor.leave() == 0


# -- prompts ---------------------------------------------------------------------------------------------------------
def test_prompt_text_streams_before_the_answer(editor: Editor, tmp_path: Path) -> None:
    go = fifo(tmp_path / "go")
    session = editor.new()
    request = editor.begin_prompt(session, f"@@stream 3 0\n@@wait {go}")
    editor.wait_said(session, "tick2")
    assert editor.texts(session) == ["tick0 ", "tick1 ", "tick2 "]
    assert not [message for message in editor.messages if message.get("id") == request]
    go.write_text("now")
    assert editor.response(request)["result"]["stopReason"] == "end_turn"
    # All of it came before: the answer is the last message of its turn.
    assert editor.messages[-1]["id"] == request
    assert editor.texts(session, "user_message_chunk") == []


def test_prompt_updates_include_thoughts_and_tool_calls(editor: Editor) -> None:
    session = editor.new()
    editor.prompt(session, '@@think hm\n@@tool_use Read {"file_path": "x"}\n@@tool_result found\n@@say done')
    kinds = [update["sessionUpdate"] for update in editor.updates(session)]
    assert kinds == [
        "config_option_update",
        "agent_thought_chunk",
        "tool_call",
        "tool_call_update",
        "agent_message_chunk",
        "usage_update",
    ]
    began, ended = editor.updates(session)[2:4]
    assert (began["title"], ended["status"], ended["toolCallId"]) == ("Read: x", "completed", began["toolCallId"])


def test_prompt_that_fails_is_an_error_with_its_outcome(editor: Editor) -> None:
    session = editor.new()
    response = editor.response(editor.begin_prompt(session, "@@say before\n@@exit 3"))
    assert response["error"]["code"] == -32603
    assert response["error"]["data"]["outcome"] == "failed"
    assert editor.said(session) == "before"
    assert editor.prompt(session, "again") == "end_turn"


@pytest.mark.thorough
def test_prompt_of_8_megabytes_is_accepted(editor: Editor, served: Served) -> None:
    session = editor.new()
    assert editor.prompt(session, "x" * (8 << 20) + "\n@@say heard") == "end_turn"
    assert editor.said(session) == "heard"


@pytest.mark.thorough
def test_prompt_too_large_for_the_server_is_an_error_and_session_continues(editor: Editor) -> None:
    session = editor.new()
    response = editor.response(editor.begin_prompt(session, "x" * (33 << 20)))
    assert response["error"]["data"]["status"] == 413
    assert editor.prompt(session, "@@say there") == "end_turn"


def test_prompts_are_answered_in_order(editor: Editor, tmp_path: Path) -> None:
    go = fifo(tmp_path / "go")
    session = editor.new()
    words = [f"word {number}" for number in range(10)]
    # The first prompt is large, so it is on its way for longer than those behind it.
    requests = [editor.begin_prompt(session, f"{'x' * (4 << 20)}\n@@wait {go}\n@@say first")]
    requests += [editor.begin_prompt(session, f"@@say {word}") for word in words]
    go.write_text("now")
    assert editor.response(requests[-1])["result"]["stopReason"] == "end_turn"
    answers = [message["id"] for message in editor.messages if message.get("id") in requests]
    assert answers == requests
    assert editor.texts(session) == ["first", *words]


# -- interrupts ------------------------------------------------------------------------------------------------------
def test_cancel_stops_the_turn_and_reports_its_tool_as_failed(editor: Editor) -> None:
    session = editor.new()
    request = editor.begin_prompt(session, '@@tool_use Bash {"command": "make"}\n@@hang')
    call = editor.wait(lambda m: is_update(m, session) and m["params"]["update"]["sessionUpdate"] == "tool_call")
    editor.notify("session/cancel", sessionId=session)
    assert editor.response(request)["result"]["stopReason"] == "cancelled"
    ends = [update for update in editor.updates(session) if update["sessionUpdate"] == "tool_call_update"]
    assert [end["toolCallId"] for end in ends] == [call["params"]["update"]["toolCallId"]]
    assert ends[0]["status"] == "failed"
    assert editor.prompt(session, "@@say on") == "end_turn"


def test_cancel_right_behind_the_prompt_stops_only_that_prompt(editor: Editor) -> None:
    session = editor.new()
    for _ in range(10):
        stopped = editor.begin_prompt(session, "@@hang")
        editor.notify("session/cancel", sessionId=session)
        goes_on = editor.begin_prompt(session, "@@say on")
        assert editor.response(stopped)["result"]["stopReason"] == "cancelled"
        assert editor.response(goes_on)["result"]["stopReason"] == "end_turn"


def test_cancel_request_stops_one_prompt_by_its_id(editor: Editor) -> None:
    session = editor.new()
    runs = editor.begin_prompt(session, "@@say begun\n@@hang")
    editor.wait_said(session, "begun")
    waits = editor.begin_prompt(session, "never heard")
    editor.notify("$/cancel_request", requestId=waits)
    assert editor.response(waits)["result"]["stopReason"] == "cancelled"
    editor.notify("$/cancel_request", requestId=99)
    editor.notify("session/cancel", sessionId="s-nobody")
    editor.notify("session/cancel")
    editor.notify("$/cancel_request", requestId=runs)
    assert editor.response(runs)["result"]["stopReason"] == "cancelled"


def test_cancel_stops_only_prompts_of_this_editor(editor: Editor, served: Served, tmp_path: Path) -> None:
    go = fifo(tmp_path / "go")
    session = editor.new()
    turn = served.ask(session, f"@@say theirs\n@@wait {go}")
    editor.wait_said(session, "theirs")
    mine = editor.begin_prompt(session, "mine")
    editor.notify("session/cancel", sessionId=session)
    assert editor.response(mine)["result"]["stopReason"] == "cancelled"
    go.write_text("now")
    assert served.outcome(session, turn)["kind"] == "done"


# -- questions -------------------------------------------------------------------------------------------------------
def test_question_is_put_to_the_editor_and_its_answer_counts(editor: Editor) -> None:
    for option, status in (("allow_once", "completed"), ("reject_once", "failed")):
        session = editor.new()
        before = len(editor.messages)
        request = editor.begin_prompt(session, ASKS)
        asked = editor.wait_asked(before)
        call = asked["params"]["toolCall"]
        shown = (asked["params"]["sessionId"], call["title"], call["rawInput"])
        assert shown == (session, "Bash: make", {"command": "make"}), option
        editor.reply(asked, selected(option))
        assert editor.response(request)["result"]["stopReason"] == "end_turn", option
        ends = [each for each in editor.updates(session) if each["sessionUpdate"] == "tool_call_update"]
        assert [(end["toolCallId"], end["status"]) for end in ends] == [(call["toolCallId"], status)], option


def test_question_answered_with_an_option_not_offered_is_denied(editor: Editor) -> None:
    session = editor.new()
    request = editor.begin_prompt(session, ASKS)
    editor.reply(editor.wait_asked(), selected("proceed_always"))
    assert editor.response(request)["result"]["stopReason"] == "end_turn"
    ends = [each for each in editor.updates(session) if each["sessionUpdate"] == "tool_call_update"]
    assert [end["status"] for end in ends] == ["failed"]
    assert "'proceed_always', which was not offered" in editor.stderr.read_text()


def test_question_answered_with_an_error_is_denied(editor: Editor) -> None:
    session = editor.new()
    request = editor.begin_prompt(session, ASKS)
    editor.refuse(editor.wait_asked(), -32601, "no\x1b such method")
    assert editor.response(request)["result"]["stopReason"] == "end_turn"
    ends = [each for each in editor.updates(session) if each["sessionUpdate"] == "tool_call_update"]
    assert [end["status"] for end in ends] == ["failed"]
    said = editor.stderr.read_text()
    assert "denied: the editor answered with error -32601" in said
    assert "\x1b" not in said


def test_question_allowed_for_the_session_is_remembered(editor: Editor, served: Served) -> None:
    session = editor.new()
    request = editor.begin_prompt(session, ASKS)
    editor.reply(editor.wait_asked(), selected("allow_always"))
    editor.response(request)
    sent = [each["frame"] for each in served.get(f"/v1/sessions/{session}/events?limit=1000&raw=1")["events"]
            if each["kind"] == "sent"]  # fmt: skip
    assert any("updatedPermissions" in frame for frame in sent)


def test_cancel_with_an_open_question_ends_the_prompt(editor: Editor) -> None:
    session = editor.new()
    request = editor.begin_prompt(session, ASKS)
    asked = editor.wait_asked()
    editor.notify("session/cancel", sessionId=session)
    editor.reply(asked, {"outcome": {"outcome": "cancelled"}})
    assert editor.response(request)["result"]["stopReason"] == "cancelled"


def test_question_answered_by_a_rule_is_not_put_to_the_editor(editor: Editor) -> None:
    session = editor.new(_meta={"banksman": {"rules": {"Bash": "allow"}}})
    assert editor.prompt(session, ASKS) == "end_turn"
    assert not [message for message in editor.messages if message.get("method") == "session/request_permission"]


def test_question_the_editor_cancels_is_left_to_other_clients(editor: Editor, served: Served) -> None:
    session = editor.new()
    request = editor.begin_prompt(session, ASKS)
    asked = editor.wait_asked()
    editor.reply({"id": 4711}, selected("allow_once"))
    editor.reply(asked, {"outcome": {"outcome": "cancelled"}})
    [question] = served.get(f"/v1/sessions/{session}/questions")["questions"]
    served.post(f"/v1/sessions/{session}/questions/{question['id']}", {"decision": "allow"})
    assert editor.response(request)["result"]["stopReason"] == "end_turn"


# -- sessions --------------------------------------------------------------------------------------------------------
def test_load_replays_all_updates_before_its_answer(editor: Editor, served: Served, tmp_path: Path) -> None:
    session = editor.new()
    editor.prompt(session, "@@stream 3 0 word")
    editor.prompt(session, '@@tool_use Read {"file_path": "x"}\n@@tool_result found\n@@say done')
    with Editor(tmp_path / "other", served=served) as other:
        other.load(session)
        assert set(other.messages[-1]["result"]) == {"modes", "models", "configOptions"}
        assert other.texts(session, "user_message_chunk")[0] == "@@stream 3 0 word"
        # In one piece, however it came.
        assert other.texts(session) == ["word0 word1 word2 ", "done"]
        kinds = [update["sessionUpdate"] for update in other.updates(session)]
        assert kinds.index("tool_call") < kinds.index("tool_call_update") < len(kinds) - 1
        assert other.prompt(session, "@@say more") == "end_turn"
        assert other.texts(session)[-1] == "more"
    # Again, in the editor that has it open.
    before = len(editor.messages)
    editor.load(session)
    again = [message for message in editor.messages[before:] if is_update(message, session)]
    assert len(again) > len(kinds)


def test_resume_replays_nothing(editor: Editor, served: Served, tmp_path: Path) -> None:
    session = editor.new()
    editor.prompt(session, "@@say before")
    with Editor(tmp_path / "other", served=served) as other:
        assert other.call("session/resume", sessionId=session, cwd=str(tmp_path))["configOptions"]
        other.prompt(session, "@@say after")
        assert other.said(session) == "after"


def test_load_of_a_session_at_work_in_the_same_editor_is_refused(editor: Editor) -> None:
    session = editor.new()
    request = editor.begin_prompt(session, "@@say begun\n@@hang")
    editor.wait_said(session, "begun")
    assert editor.fail("session/load", sessionId=session, cwd="/")["code"] == -32602
    editor.notify("session/cancel", sessionId=session)
    editor.response(request)


def test_list_filters_by_cwd_and_pages(editor: Editor, tmp_path: Path) -> None:
    here = [editor.new(cwd=str(tmp_path)) for _ in range(2)]
    found: list[Message] = []
    cursor: dict[str, Any] = {}
    while True:
        page = editor.call("session/list", cwd=str(tmp_path), **cursor)
        found += page["sessions"]
        if "nextCursor" not in page:
            break
        cursor = {"cursor": page["nextCursor"]}
    assert [each["sessionId"] for each in found] == here
    assert all(each["cwd"] == str(tmp_path) and each["updatedAt"].endswith("Z") for each in found)


def test_meta_settings_of_new_reach_the_session(editor: Editor, served: Served) -> None:
    session = editor.new(_meta={"banksman": {"name": "from-an-editor", "model": "opus", "what": 1}, "other": {}})
    assert served.get("/v1/sessions/from-an-editor")["id"] == session
    opened = served.get(f"/v1/sessions/{session}/events?limit=1")["events"][0]["body"]
    assert opened["model"] == "opus"


def test_set_mode_and_set_model_change_the_session(editor: Editor, served: Served) -> None:
    session = editor.new()
    assert editor.call("session/set_mode", sessionId=session, modeId="plan") == {}
    assert editor.call("session/set_model", sessionId=session, modelId="opus") == {}
    events = served.get(f"/v1/sessions/{session}/events?limit=100")["events"]
    found = {each["body"]["name"]: each["body"]["value"] for each in events if each["kind"] == "session.setting"}
    assert found == {"permission_mode": "plan", "model": "opus"}


def test_modes_and_config_options_are_advertised_and_set(editor: Editor, tmp_path: Path) -> None:
    told = editor.call("session/new", cwd=str(tmp_path), mcpServers=[], _meta={"banksman": {"model": "opus"}})
    assert told["modes"]["currentModeId"] == "default"
    assert "plan" in [mode["id"] for mode in told["modes"]["availableModes"]]
    assert [(each["id"], each["category"], each["currentValue"]) for each in told["configOptions"]] == [
        ("model", "model", "opus"),
        ("mode", "mode", "default"),
    ]
    session = told["sessionId"]
    answer = editor.call("session/set_config_option", sessionId=session, configId="model", value="sonnet")
    assert [each["currentValue"] for each in answer["configOptions"]] == ["sonnet", "default"]
    editor.call("session/set_mode", sessionId=session, modeId="plan")
    editor.wait(lambda message: message.get("params", {}).get("update", {}).get("currentModeId") == "plan")
    resumed = editor.call("session/resume", sessionId=session, cwd=str(tmp_path), mcpServers=[])
    assert [each["currentValue"] for each in resumed["configOptions"]] == ["sonnet", "plan"]
    loaded = editor.call("session/load", sessionId=session, cwd=str(tmp_path), mcpServers=[])
    assert loaded["configOptions"] == resumed["configOptions"]
    assert (
        "mode" in editor.fail("session/set_config_option", sessionId=session, configId="x", value="y")["data"]["hint"]
    )


def test_close_cancels_prompts_of_this_editor(editor: Editor, served: Served) -> None:
    session = editor.new()
    request = editor.begin_prompt(session, "@@say begun\n@@hang")
    editor.wait_said(session, "begun")
    assert editor.call("session/close", sessionId=session) == {}
    assert editor.response(request)["result"]["stopReason"] == "cancelled"
    assert served.get(f"/v1/sessions/{session}")["phase"] == "closed"
    assert editor.fail("session/prompt", sessionId=session, prompt=[{"type": "text", "text": "x"}])["code"] == -32602
    editor.load(session)
    assert editor.prompt(session, "@@say awake") == "end_turn"


def test_delete_forgets_the_session(editor: Editor, served: Served) -> None:
    session = editor.new()
    editor.prompt(session, "x")
    assert editor.call("session/delete", sessionId=session) == {}
    assert served.request("GET", f"/v1/sessions/{session}").status == 404


# -- an editor that does not read ------------------------------------------------------------------------------------
@pytest.mark.thorough
def test_unread_stdout_delays_updates_and_stops_no_turn(served: Served, editor: Editor) -> None:
    """The editor only falls behind the log.

    The turn runs to its end, and another can be stopped. When the editor reads again, it gets everything in order.
    """
    session = editor.new()
    editor.pause()
    floods = editor.begin_prompt(session, "@@flood 6000 1000")
    hangs = editor.begin_prompt(session, "@@hang")
    ended = wait_for(served, session, "turn.ended")
    running = wait_for(served, session, "turn.started", turn=next_turn(served, session, ended["turn"]))
    editor.send(b"what?")
    editor.notify("session/cancel", sessionId=session)
    assert served.outcome(session, running["turn"])["kind"] == "interrupted"
    editor.go_on()
    assert editor.response(hangs)["result"]["stopReason"] == "cancelled"
    assert editor.response(None)["error"]["code"] == -32700
    at = [message.get("id") for message in editor.messages].index(floods)
    before = [message for message in editor.messages[:at] if is_update(message, session)]
    said = sum(len(m["params"]["update"]["content"]["text"]) for m in before if "content" in m["params"]["update"])
    assert said == 6000 * 1000


def next_turn(served: Served, session: str, turn: str) -> str:
    """Return the turn that was queued after this one."""
    with served.stream(f"/v1/sessions/{session}/events") as stream:
        for message in stream.messages():
            if message.data["kind"] == "turn.queued" and message.data["turn"] != turn:
                return message.data["turn"]
    raise AssertionError("there is no other")
