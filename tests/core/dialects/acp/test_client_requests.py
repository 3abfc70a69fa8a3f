"""Requests of an ACP agent and the answers to them; batches, oversize and malformed lines."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace
from tests.core.dialects.acp.acp_talk import ALL, SESSION, permission, ready

from banksman.core.dialects.acp import Acp
from banksman.core.dialects.dialect import Decision, Quirks
from banksman.core.dialects.meaning import (
    Meaning,
    NeedsConversation,
    Noise,
    Requested,
    RequestPurpose,
    RequestWithdrawn,
    ToolBegan,
    ToolEnded,
    TurnOver,
)
from banksman.core.wire import jsonrpc
from banksman.core.wire.pending_requests import THEIRS_MAX


# -- requests of the agent -------------------------------------------------------------------------------------------
def test_permission_request_becomes_question_with_all_details() -> None:
    asked = permission(ready(), id="uuid")
    assert (asked.request, asked.wants, asked.tool) == ('"uuid"', RequestPurpose.PERMISSION, "execute")
    assert asked.subtype == "session/request_permission"
    assert asked.input == {"command": "ls"}
    assert asked.details == {"toolCallId": "t", "title": "ls", "options": ALL}
    assert permission(ready(), kind=None).tool == "other"
    strange = permission(ready(), rawInput=["ls"], options=[*ALL, 5, {"name": "no id"}])
    assert (strange.input, strange.details["rawInput"], strange.details["options"]) == ({}, ["ls"], ALL)


@pytest.mark.parametrize(
    ("decision", "kinds", "expected"),
    [
        (Decision(allows=True), "all", "yes"),
        (Decision(allows=True, remember="session"), "all", "ever"),
        (Decision(allows=False), "all", "no"),
        (Decision(allows=True, option="ever"), "all", "ever"),
        (Decision(allows=False, option="never"), "all", "never"),
        (Decision(allows=True), "allow_always", "ever"),
        (Decision(allows=True, remember="user"), "allow_once", "yes"),
        (Decision(allows=False), "reject_always", "never"),
        # The selected option never contradicts the decision.
        (Decision(allows=True), "reject_once", None),
        (Decision(allows=False), "allow_once", None),
        (Decision(allows=True), "", None),
        (Decision(allows=False, option="gone"), "all", "no"),
    ],
)
def test_decision_selects_nearest_option(decision: Decision, kinds: str, expected: str | None) -> None:
    talk = ready()
    options = [option for option in ALL if kinds in ("all", option["kind"])]
    asked = permission(talk, 0, options)
    assert talk.take(talk.protocol.answer(asked, decision)) == []
    outcome = {"outcome": "cancelled"} if expected is None else {"outcome": "selected", "optionId": expected}
    assert talk.told() == {"jsonrpc": "2.0", "id": 0, "result": {"outcome": outcome}}


def test_allow_with_updated_input_is_never_sent() -> None:
    talk = ready()
    asked = permission(talk)
    with pytest.raises(AssertionError):
        talk.protocol.answer(asked, Decision(allows=True, updated_input={"command": "pwd"}))


@pytest.mark.parametrize("id", [1.5, True, [], {"a": 1}, 1 << 70, "x" * 10_000], ids=repr)
@pytest.mark.parametrize("is_batch", [False, True])
def test_request_with_invalid_id_is_answered_under_null_id(id: Any, is_batch: bool) -> None:
    talk = ready()
    call: dict[str, Any] = {"jsonrpc": "2.0", "id": id, "method": "fs/read_text_file"}
    assert talk.hears([call, 5] if is_batch else call)[0] == Noise()
    error = talk.told()
    assert (error["id"], error["error"]["code"]) == (None, jsonrpc.INVALID_REQUEST)


def test_request_is_answered_once_under_its_own_id() -> None:
    talk = ready()
    number, text = permission(talk, 0), permission(talk, "0")
    assert (number.request, text.request) == ("0", '"0"')
    talk.take(talk.protocol.answer(text, Decision(allows=True)))
    assert talk.told()["id"] == "0"
    for again in (
        talk.protocol.answer(text, Decision(allows=False)),
        talk.protocol.refuse(text, "no"),
        talk.protocol.cancel(text),
        talk.protocol.respond(text, {}),
        talk.protocol.cancel(replace(text, request="never asked")),
    ):
        assert again.frames == ()
    talk.take(talk.protocol.cancel(number))
    assert talk.told() == {"jsonrpc": "2.0", "id": 0, "result": {"outcome": {"outcome": "cancelled"}}}
    # The agent may reuse an id after it got its answer.
    assert permission(talk, 0).request == "0"


def test_repeated_request_id_is_noise() -> None:
    talk = ready()
    permission(talk, 3)
    assert talk.hears({"id": 3, "method": "session/request_permission", "params": {}}) == [Noise()]


def test_request_ids_of_agent_and_client_are_separate() -> None:
    talk = ready()
    id = talk.prompts()["id"]
    asked = permission(talk, id)
    talk.take(talk.protocol.answer(asked, Decision(allows=True)))
    assert talk.told()["id"] == id
    assert talk.over(id).refs == ("p1",)


def test_denial_with_interrupt_cancels_turn() -> None:
    talk = ready(quirks=Quirks(cancel_may_say=("end_turn",)))
    id = talk.prompts()["id"]
    asked = permission(talk)
    talk.take(talk.protocol.answer(asked, Decision(allows=False, interrupts=True)))
    answer, cancel = talk.sent
    assert answer["result"]["outcome"]["optionId"] == "no"
    assert cancel["method"] == "session/cancel"
    assert talk.over(id).is_aborted


def test_withdrawn_request_is_answered_as_cancelled() -> None:
    talk = ready()
    asked = permission(talk, 7)
    withdraw = {"method": "$/cancel_request", "params": {"requestId": 7}}
    assert talk.hears(withdraw) == [RequestWithdrawn("7")]
    assert talk.told()["error"]["code"] == -32800
    assert talk.hears(withdraw) == [Noise()]
    assert talk.protocol.answer(asked, Decision(allows=True)).frames == ()


@pytest.mark.parametrize(
    "method",
    ["fs/read_text_file", "fs/write_text_file", "terminal/create", "terminal/output", "terminal/release"],
)
def test_file_and_terminal_requests_go_to_workspace(method: str) -> None:
    talk = ready()
    params = {"sessionId": SESSION, "path": "/srv/ws/a"}
    tools = {"terminal/create": "execute", "fs/write_text_file": "edit", "fs/read_text_file": "read"}
    asked = Requested("5", RequestPurpose.WORKSPACE, method, tools.get(method, ""), params)
    call = {"jsonrpc": "2.0", "id": 5, "method": method, "params": params}
    assert talk.hears(call) == [asked]
    talk.take(talk.protocol.respond(asked, {"content": "x"}))
    assert talk.told() == {"jsonrpc": "2.0", "id": 5, "result": {"content": "x"}}
    talk.hears(call)
    talk.take(talk.protocol.refuse(asked, "outside of the root"))
    assert talk.told()["error"] == {"code": -32603, "message": "outside of the root"}
    talk.hears(call)
    talk.take(talk.protocol.cancel(asked))
    assert talk.told()["error"]["code"] == -32800
    # A request for a capability that was not offered is not served.
    assert ready(quirks=Quirks(serves=())).hears(call) == [Requested("5", RequestPurpose.UNKNOWN, method)]


def test_elicitation_form_is_asked_and_answered() -> None:
    talk = ready()
    params = {"sessionId": SESSION, "mode": "form", "message": "Which?", "requestedSchema": {"type": "object"}}
    call = {"id": 1, "method": "elicitation/create", "params": params}
    for decision, expected in (
        (Decision(allows=True, content={"name": "x"}), {"action": "accept", "content": {"name": "x"}}),
        (Decision(allows=False), {"action": "decline"}),
        (None, {"action": "cancel"}),
    ):
        [asked] = talk.hears(call)
        assert isinstance(asked, Requested)
        assert (asked.wants, asked.details) == (RequestPurpose.ELICITATION, params)
        output = talk.protocol.cancel(asked) if decision is None else talk.protocol.answer(asked, decision)
        talk.take(output)
        assert talk.told()["result"] == expected
    [unknown] = talk.hears({**call, "params": {**params, "mode": "url"}})
    assert isinstance(unknown, Requested)
    assert unknown.wants is RequestPurpose.UNKNOWN


@pytest.mark.parametrize("method", ["no/such", "_vendor/ask", "fs", "session/update", ""])
def test_unknown_request_is_refused(method: str) -> None:
    talk = ready()
    update = {"sessionId": SESSION, "update": {"sessionUpdate": "agent_message_chunk"}}
    [asked] = talk.hears({"id": 1, "method": method, "params": update})
    assert isinstance(asked, Requested)
    assert asked == Requested("1", RequestPurpose.UNKNOWN, method)
    talk.take(talk.protocol.refuse(asked, "unknown"))
    assert talk.told()["error"] == {"code": -32601, "message": "unknown"}


def test_requests_beyond_maximum_are_refused_at_once() -> None:
    talk = ready()
    for id in range(THEIRS_MAX):
        assert len(talk.hears({"id": id, "method": "fs/read_text_file", "params": {}})) == 1
    assert not talk.sent
    assert talk.hears({"id": "one more", "method": "fs/read_text_file", "params": {}}) == []
    assert talk.told()["id"] == "one more"


# -- batches, oversize and malformed lines ---------------------------------------------------------------------------
def test_batch_is_split_into_messages() -> None:
    talk = ready()
    id = talk.prompts()["id"]
    over = {"id": id, "result": {"stopReason": "end_turn"}}
    tool = {
        "method": "session/update",
        "params": {"sessionId": SESSION, "update": {"sessionUpdate": "tool_call", "toolCallId": "t"}},
    }
    meanings = talk.hears([5, tool, over, over])
    assert [type(meaning) for meaning in meanings] == [Noise, ToolBegan, TurnOver, Noise]
    assert talk.hears([]) == talk.hears([1, 2]) == [Noise()]


@pytest.mark.parametrize("code", [-32700, -32600])
def test_parse_error_reply_ends_only_prompt(code: int) -> None:
    talk = ready()
    talk.prompts()
    [over] = talk.hears({"jsonrpc": "2.0", "id": None, "error": {"code": code, "message": "Parse error"}})
    assert isinstance(over, TurnOver)
    assert (over.refs, over.is_error) == (("p1",), True)


def test_parse_error_reply_is_noise_when_it_may_concern_another_line() -> None:
    error = {"jsonrpc": "2.0", "error": {"code": -32700, "message": "Parse error"}}
    assert ready().hears(error) == [Noise()]
    talk = ready()
    id = talk.prompts()["id"]
    asked = permission(talk)
    talk.take(talk.protocol.answer(asked, Decision(allows=True)))
    assert talk.hears(error) == [Noise()]
    assert talk.over(id).refs == ("p1",)


def test_oversized_answer_ends_its_turn() -> None:
    def heard(head: bytes, tail: bytes) -> list[Meaning]:
        talk = ready()
        assert talk.prompts()["id"] == 3
        meaning = talk.dialect.read_head(head, tail)
        assert isinstance(meaning, NeedsConversation)
        return talk.take(talk.protocol.hear(meaning))

    long = b'{"jsonrpc":"2.0","result":{"_meta":{"x":"' + b"x" * 1000
    # The id is last. The stop reason is in the lost middle.
    [over] = heard(long, b'xx"}},"id":3}')
    assert isinstance(over, TurnOver)
    assert (over.refs, over.is_error, over.error) == (("p1",), True, "frame_too_large")
    # The id is lost. The frame may be the end of the turn, and then no other frame reports that end.
    [over] = heard(long, b"xxx")
    assert isinstance(over, TurnOver)
    assert over.error == "frame_too_large"
    # The head has all that matters.
    [over] = heard(b'{"id":3,"result":{"stopReason":"end_turn","_meta":"' + b"x" * 1000, b'x"}}')
    assert isinstance(over, TurnOver)
    assert (over.is_error, over.stop_reason) == (False, "end_turn")
    # The end of another request has no effect.
    assert heard(long, b'xx"}},"id":99}') == [Noise()]


def test_oversized_request_is_refused() -> None:
    talk = ready()
    head = b'{"id":1,"method":"session/request_permission","params":{"toolCall":{"content":"' + b"x" * 1000
    meaning = talk.dialect.read_head(head, b'x"}}}')
    assert isinstance(meaning, NeedsConversation)
    assert talk.take(talk.protocol.hear(meaning)) == []
    assert talk.told()["result"] == {"outcome": {"outcome": "cancelled"}}
    meaning = talk.dialect.read_head(head.replace(b"session/request_permission", b"fs/write_text_file"), b'x"}}}')
    assert isinstance(meaning, NeedsConversation)
    assert talk.take(talk.protocol.hear(meaning)) == []
    assert talk.told()["error"]["code"] == -32603


def test_tool_end_is_known_from_head_of_oversized_update() -> None:
    talk = ready()
    update = b'{"method":"session/update","params":{"sessionId":"s-1","update":{"sessionUpdate":"tool_call_update",'
    head = update + b'"toolCallId":"t","status":"completed","content":[{"text":"' + b"x" * 1000
    meaning = talk.dialect.read_head(head, b'x"}]}}}')
    assert isinstance(meaning, NeedsConversation)
    assert talk.take(talk.protocol.hear(meaning)) == [ToolEnded(("t",))]


def test_boundary_with_undecodable_part_is_still_a_boundary() -> None:
    for extra in (rb'"\ud83d"', b"[" * 5000 + b"]" * 5000, b"1e999999", b'"\xff"'):
        talk = ready()
        assert talk.prompts()["id"] == 3
        [over] = talk.hears(b'{"id":3,"_meta":' + extra + b',"result":{"stopReason":"end_turn"}}')
        assert isinstance(over, TurnOver), extra[:20]
        assert over.stop_reason == "end_turn"
        [over] = [
            *(t := ready()).take(t.protocol.prompt("p1", "x")),
            *t.hears(b'{"id":3,"result":{"x":' + extra + b"}}"),
        ]
        assert isinstance(over, TurnOver), extra[:20]


def test_read_cost_is_bounded_by_its_line() -> None:
    """Read ten thousand open brackets, and ten thousand messages in one line."""
    dialect = Acp()
    assert dialect.read(b"[" * 10_000) == Noise()
    batch = dialect.read(b"[" + b",".join([b'{"id":1,"result":{}}'] * 10_000) + b"]")
    assert isinstance(batch, NeedsConversation)
    talk = ready()
    assert set(map(type, talk.take(talk.protocol.hear(batch)))) == {Noise}
