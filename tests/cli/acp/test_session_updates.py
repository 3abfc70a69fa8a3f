"""Projection of a session's events to updates of an editor, and the ends of its requests: values in, values out."""

from __future__ import annotations

import json
from typing import Any

import pytest

from banksman.cli.acp import open_questions, session_updates
from banksman.cli.acp.session_updates import (
    JOINED_CHARACTERS_MAX,
    EditorRefusal,
    JoinedUpdates,
    Update,
    UpdateProjection,
    ending,
    projector_of,
    refusal_of,
)
from banksman.cli.client.exchange import NoServer, RequestRefused

Event = dict[str, Any]


def event(kind: str, turn: str | None = "t", frame: Any = None, **body: Any) -> Event:
    return {"kind": kind, "turn": turn, "body": body, **({} if frame is None else {"frame": json.dumps(frame)})}


def queued(turn: str, prompt: Any) -> Event:
    return event("turn.queued", turn, prompt=prompt)


def spoken(text: str) -> Update:
    return {"sessionUpdate": "user_message_chunk", "content": {"type": "text", "text": text}}


def said(text: str, message: str = "m") -> Update:
    return {"sessionUpdate": "agent_message_chunk", "content": {"type": "text", "text": text}, "messageId": message}


def tool(call: str, title: str = "Bash: ls") -> Update:
    return {"sessionUpdate": "tool_call", "toolCallId": call, "title": title, "status": "in_progress"}


def delta(text: str) -> Event:
    inner = {"type": "content_block_delta", "delta": {"type": "text_delta", "text": text}}
    return {"type": "stream_event", "event": inner, "parent_tool_use_id": None}


# -- events ----------------------------------------------------------------------------------------------------------
def test_prompt_is_projected_when_its_turn_starts() -> None:
    telling = UpdateProjection(None)
    assert telling.updates(queued("a", "first")) == []
    assert telling.updates(queued("b", [{"type": "text", "text": "second"}])) == []
    assert telling.updates(event("turn.started", "b", attempt=1)) == [spoken("second")]
    assert telling.updates(event("turn.started", "a", attempt=1)) == [spoken("first")]
    # The host started it again after a preemption. The user sent it once.
    assert telling.updates(event("turn.started", "a", attempt=2)) == []


def test_joined_prompts_are_projected_in_their_order() -> None:
    telling = UpdateProjection(None)
    for turn in ("a", "b"):
        telling.updates(queued(turn, turn))
    assert telling.updates(event("turn.started", "a", joined=["b"])) == [spoken("a"), spoken("b")]


def test_prompt_of_this_editor_is_not_projected_back() -> None:
    telling = UpdateProjection(None)
    telling.updates(queued("a", "mine"), own={"a"})
    assert telling.updates(event("turn.started", "a"), own={"a"}) == []


def test_withdrawn_prompt_is_never_projected() -> None:
    telling = UpdateProjection(None)
    telling.updates(queued("a", "withdrawn"))
    telling.updates(event("turn.ended", "a", outcome="withdrawn"))
    assert telling.updates(event("turn.started", "b", joined=["a"])) == []


def test_streamed_text_is_projected_once() -> None:
    telling = UpdateProjection(projector_of("claude"))
    telling.updates(event("turn.started"))
    start = {"type": "stream_event", "event": {"type": "message_start", "message": {"id": "m"}}}
    whole = {"type": "assistant", "message": {"id": "m", "content": [{"type": "text", "text": "hello"}]}}
    frames = (start, delta("hel"), delta("lo"), whole)
    told = [telling.updates(event("update", frame=frame, updates=[said("of the server")])) for frame in frames]
    assert told == [[], [said("hel")], [said("lo")], []]


def test_update_outside_a_turn_is_projected_as_the_server_sent_it() -> None:
    telling = UpdateProjection(projector_of("claude"))
    assert telling.updates(event("update", None, frame=delta("x"), updates=[said("whole")])) == [said("whole")]


@pytest.mark.parametrize("dialect", [None, "", "a dialect of tomorrow"])
def test_update_of_an_unknown_dialect_is_projected_as_the_server_sent_it(dialect: str | None) -> None:
    telling = UpdateProjection(projector_of(dialect))
    telling.updates(event("turn.started"))
    assert telling.updates(event("update", frame=delta("x"), updates=[said("whole")])) == [said("whole")]


@pytest.mark.parametrize("kind", ["sent", "recited", "question.asked", "process.started", "session.closed"])
def test_other_events_are_not_projected(kind: str) -> None:
    assert UpdateProjection(None).updates(event(kind, frame=delta("x"))) == []


def test_tool_of_a_stopped_turn_is_projected_as_failed() -> None:
    telling = UpdateProjection(None)
    telling.updates(event("turn.started"))
    telling.updates(event("update", updates=[tool("1"), tool("2", "Read: x")]))
    telling.updates(
        event("update", updates=[{**tool("1"), "sessionUpdate": "tool_call_update", "status": "completed"}])
    )
    assert (telling.title_of("1"), telling.title_of("2")) == (None, "Read: x")
    failed = {"sessionUpdate": "tool_call_update", "toolCallId": "2", "status": "failed"}
    assert telling.updates(event("turn.ended", outcome="interrupted")) == [failed]
    telling.updates(event("turn.started"))
    telling.updates(event("update", updates=[tool("3")]))
    assert telling.updates(event("turn.ended", outcome="done")) == []


def test_joined_updates_merge_texts_of_one_message() -> None:
    joined = JoinedUpdates()
    assert joined.add([said("a"), said("b")]) == []
    assert joined.add([said("c", "n"), tool("1")]) == [said("ab"), said("c", "n"), tool("1")]
    assert joined.add([spoken("x"), spoken("y")]) == [spoken("x")]
    assert joined.flush() == [spoken("y")]
    assert joined.flush() == []


def test_joined_updates_are_bounded() -> None:
    text = "x" * JOINED_CHARACTERS_MAX
    joined = JoinedUpdates()
    assert joined.add([said(text)]) == []
    assert joined.add([said("y")]) == [said(f"{text}y")]


# -- questions -------------------------------------------------------------------------------------------------------
ASKED = {"question": "q-1.7", "tool": "Bash", "input": {"command": "ls"}, "wants": "permission", "details": {}}
OFFERED = [
    {"optionId": "yes", "name": "Yes", "kind": "allow_once"},
    {"optionId": "no", "name": "Never", "kind": "reject_always"},
]


def chosen(option: str) -> dict[str, Any]:
    return {"outcome": {"outcome": "selected", "optionId": option}}


def nothing(_: Any) -> None:
    return None


def test_question_without_options_offers_the_usual_three() -> None:
    asked = open_questions.request_of("s", ASKED, nothing)
    assert [option["kind"] for option in asked["options"]] == ["allow_once", "allow_always", "reject_once"]
    assert asked["toolCall"]["toolCallId"] == "q-1.7"
    assert asked["toolCall"]["rawInput"] == {"command": "ls"}
    assert open_questions.answer(ASKED, chosen("allow_once")) == {"decision": "allow"}
    assert open_questions.answer(ASKED, chosen("allow_always")) == {"decision": "allow", "remember": True}
    assert open_questions.answer(ASKED, chosen("reject_once")) == {"decision": "deny"}


def test_question_passes_on_the_agents_options() -> None:
    asked = {**ASKED, "details": {"options": [*OFFERED, {"optionId": 1}, "x"], "tool_use_id": "toolu"}}
    put = open_questions.request_of("s", asked, lambda call: f"title of {call}")
    assert put["options"] == OFFERED
    assert put["toolCall"]["title"] == "title of toolu"
    assert open_questions.answer(asked, chosen("no")) == {"decision": "no"}


@pytest.mark.parametrize("result", [None, {}, {"outcome": 1}, {"outcome": {"outcome": "selected"}}, chosen("what?")])
def test_question_answer_not_offered_is_a_denial(result: Any) -> None:
    answer = open_questions.answer(ASKED, result)
    assert answer is not None
    assert answer["decision"] == "deny"
    assert "not offered" in answer["message"]


def test_question_cancelled_by_the_editor_has_no_answer() -> None:
    assert open_questions.answer(ASKED, {"outcome": {"outcome": "cancelled"}}) is None


# -- settings --------------------------------------------------------------------------------------------------------
def test_acp_agent_options_are_advertised_under_our_ids() -> None:
    option = {"id": "m-1", "name": "M", "category": "model", "type": "select", "currentValue": "a"}
    options = [{**option, "options": [{"value": "a", "name": "A"}, {"value": "b", "name": "B"}]}]
    modes = {"currentModeId": "ask", "availableModes": [{"id": "ask", "name": "Ask"}, {"id": "do", "name": "Do"}]}
    frame = json.dumps({"jsonrpc": "2.0", "id": 1, "result": {"modes": modes, "configOptions": options}})
    found = session_updates.after(session_updates.known("acp"), {"kind": "update", "body": {}, "frame": frame})
    assert [(each["id"], each["currentValue"]) for each in session_updates.config_options(found)] == [
        ("model", "a"),
        ("mode", "ask"),
    ]
    assert session_updates.told(found)["modes"] == modes
    setting = {"kind": "session.setting", "body": {"name": "model", "value": "c"}}
    model, _ = session_updates.config_options(session_updates.after(found, setting))
    assert (model["currentValue"], [each["value"] for each in model["options"]]) == ("c", ["c", "a", "b"])


def test_agent_without_known_settings_advertises_none() -> None:
    assert session_updates.told(session_updates.known("acp")) == {}
    assert (
        session_updates.told(
            session_updates.after(session_updates.known(None), {"kind": "update", "frame": '"modes" {'})
        )
        == {}
    )


def test_claude_models_are_advertised_from_its_greeting() -> None:
    models = [{"value": "default", "displayName": "Default"}, {"value": "opus[1m]", "displayName": "Opus 1M"}]
    frame = json.dumps({"type": "control_response", "response": {"response": {"models": models}}})
    found = session_updates.after(session_updates.known("claude"), {"kind": "update", "body": {}, "frame": frame})
    model, mode = session_updates.config_options(found)
    assert [each["name"] for each in model["options"]] == ["Default", "Opus 1M"]
    assert mode["currentValue"] == "default"


# -- endings ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("outcome", "said_by_agent", "reason"),
    [
        ("done", None, "end_turn"),
        ("done", "max_tokens", "max_tokens"),
        ("done", "refusal", "refusal"),
        ("done", "tool_use", "end_turn"),
        # The agent's own word, although the turn was not stopped.
        ("done", "cancelled", "end_turn"),
        ("interrupted", "end_turn", "cancelled"),
        ("preempted", None, "cancelled"),
        ("withdrawn", None, "cancelled"),
    ],
)
def test_turn_outcome_maps_to_a_stop_reason(outcome: str, said_by_agent: str | None, reason: str) -> None:
    result = ending("t", {"outcome": outcome, "stop_reason": said_by_agent})
    assert result == {"stopReason": reason, "_meta": {"banksman": {"turn": "t", "outcome": outcome}}}


@pytest.mark.parametrize("outcome", ["failed", "refused", "unknown"])
def test_failed_turn_outcome_maps_to_an_error(outcome: str) -> None:
    with pytest.raises(EditorRefusal) as raised:
        ending("t", {"outcome": outcome, "error": None, "clock": "turn"})
    assert (raised.value.code, raised.value.data["outcome"], raised.value.data["clock"]) == (-32603, outcome, "turn")
    assert raised.value.message
    with pytest.raises(EditorRefusal, match="the agent's words"):
        ending("t", {"outcome": outcome, "error": "the agent's words"})


def test_refusal_code_says_whose_fault_an_error_is() -> None:
    unknown = refusal_of(RequestRefused("NotFound", "there is no such session", hint="look", status=404))
    assert (unknown.code, unknown.message, unknown.data["hint"]) == (-32602, "there is no such session", "look")
    assert refusal_of(RequestRefused("Closed", "it goes", status=503)).code == -32603
    assert refusal_of(NoServer("nobody is there")).code == -32603
