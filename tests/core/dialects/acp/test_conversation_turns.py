"""Turns of an ACP agent: how they end, corrections of known quirks, and prompt content."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.core.dialects.acp.acp_talk import SESSION, Talk, begun, ready

from banksman.core.dialects.dialect import ERROR_CHARACTERS_MAX, Quirks
from banksman.core.dialects.meaning import Noise, Thought, ToolBegan, ToolEnded, TurnOver, UsageReported
from banksman.core.dialects.tokens import Tokens
from banksman.errors import UsageError


# -- turns -----------------------------------------------------------------------------------------------------------
def test_prompt_is_sent_and_its_answer_ends_turn() -> None:
    talk = ready()
    frame = talk.prompts("say hello")
    assert frame["method"] == "session/prompt"
    assert frame["params"] == {"sessionId": SESSION, "prompt": [{"type": "text", "text": "say hello"}]}
    assert talk.says("hello") == []
    [over] = talk.replies({"stopReason": "end_turn", "usage": {"totalTokens": 7}}, frame["id"])
    tokens = Tokens(7)
    usage = {"totalTokens": 7}
    assert over == TurnOver(("p1",), conversation=SESSION, stop_reason="end_turn", usage=usage, tokens=tokens)


@pytest.mark.parametrize(
    ("reason", "is_error", "is_aborted"),
    [
        ("end_turn", False, False),
        ("max_tokens", False, False),
        ("max_turn_requests", True, False),
        ("refusal", True, False),
        # The client did not cancel this turn.
        ("cancelled", False, True),
        ("something_new", False, False),
    ],
)
def test_stop_reason_maps_to_turn_end(reason: str, is_error: bool, is_aborted: bool) -> None:
    talk = ready()
    over = talk.over(talk.prompts()["id"], reason)
    assert (over.stop_reason, over.is_error, over.is_aborted) == (reason, is_error, is_aborted)
    assert (over.error is not None) is (is_error or is_aborted)


def test_error_reply_ends_turn() -> None:
    talk = ready()
    frame = talk.prompts()
    error = {"code": 400, "message": "bad", "data": {"details": "prompt is too long: 9 > 8"}}
    [over] = talk.hears({"id": frame["id"], "error": error})
    assert isinstance(over, TurnOver)
    assert (over.refs, over.is_error, over.is_overflow) == (("p1",), True, True)
    assert over.error == "bad (400): prompt is too long: 9 > 8"


def test_late_unknown_and_duplicate_answers_end_nothing() -> None:
    talk = ready()
    first = talk.prompts(ref="p1")["id"]
    assert talk.over(first).refs == ("p1",)
    second = talk.prompts(ref="p2")["id"]
    for id in (first, 999, str(first), float(first), second + 0.5, f"0{second}", None):
        assert talk.hears({"jsonrpc": "2.0", "id": id, "result": {"stopReason": "end_turn"}}) == [Noise()], id
    assert talk.over(second).refs == ("p2",)


@pytest.mark.parametrize("kind", [str, float])
def test_answer_id_matches_in_any_number_form(kind: Any) -> None:
    talk = ready()
    assert talk.over(kind(talk.prompts()["id"])).refs == ("p1",)


def test_interrupt_is_notification_and_answer_ends_turn() -> None:
    talk = ready()
    id = talk.prompts()["id"]
    assert talk.take(talk.protocol.interrupt("stop")) == []
    assert talk.told() == {"jsonrpc": "2.0", "method": "session/cancel", "params": {"sessionId": SESSION}}
    assert talk.over(id, "cancelled").is_aborted


def test_error_reply_after_cancel_is_aborted_turn() -> None:
    talk = ready()
    id = talk.prompts()["id"]
    talk.take(talk.protocol.interrupt("stop"))
    [over] = talk.hears({"id": id, "error": {"code": -32800, "message": "cancelled"}})
    assert isinstance(over, TurnOver)
    assert over.is_aborted


BAD_COSTS = [{"amount": amount, "currency": "USD"} for amount in (-1, 10**400, 1e300, "1")]


def test_turn_end_reports_last_cost() -> None:
    talk = ready()
    id = talk.prompts()["id"]
    dollars = {"amount": 0.25, "currency": "USD"}
    assert talk.update("usage_update", used=1, size=2, cost=dollars) == [UsageReported(spent=0.25)]
    for cost in ({"amount": 9, "currency": "EUR"}, {"amount": True}, "x", None, *BAD_COSTS):
        assert talk.update("usage_update", used=1, size=2, cost=cost) == []
    assert talk.over(id).spent == 0.25


def test_tokens_of_turn_are_difference_of_totals_for_an_agent_that_reports_totals() -> None:
    talk = ready(quirks=Quirks(usage_is_total=True))
    found: list[Tokens | None] = []
    # The third total is of an agent that has started to count again.
    for total in (10, 30, 7):
        usage = {"inputTokens": total, "outputTokens": 1}
        [over] = talk.replies({"stopReason": "end_turn", "usage": usage}, talk.prompts()["id"])
        assert isinstance(over, TurnOver)
        found.append(over.tokens)
    assert found == [Tokens(10, 1), Tokens(20, 0), Tokens(7, 1)]


def test_tokens_beside_text_are_summed_over_model_calls_of_turn() -> None:
    talk = ready()
    for _ in range(2):
        id = talk.prompts()["id"]
        for count in (3, 8):
            meta = {"usage": {"inputTokens": 3 if count == 3 else 5, "outputTokens": 0}}
            content = {"type": "text", "text": ""}
            told = talk.update("agent_message_chunk", content=content, _meta=meta)
            assert told == [UsageReported(tokens=Tokens(count))]
        assert talk.over(id).tokens == Tokens(8)


def test_tool_updates_of_own_conversation_only_count() -> None:
    talk = ready()
    talk.prompts()
    assert talk.update("tool_call", toolCallId="a", status="pending") == [ToolBegan(("a",))]
    assert talk.update("tool_call_update", toolCallId="a") == []
    assert talk.update("tool_call_update", toolCallId="a", status="in_progress") == [ToolBegan(("a",))]
    assert talk.update("tool_call_update", toolCallId="a", status="completed") == [ToolEnded(("a",))]
    assert talk.update("tool_call", toolCallId="b", status="failed") == [ToolEnded(("b",))]
    assert talk.update("tool_call", toolCallId="c") == [ToolBegan(("c",))]
    assert talk.update("tool_call", toolCallId=5) == []
    assert talk.update("tool_call", session="a subagent's", toolCallId="d") == []
    assert talk.update("agent_thought_chunk", content={}) == [Thought()]


def test_update_of_another_conversation_is_an_aside() -> None:
    talk = ready()
    ours, other = (
        json.dumps({"method": "session/update", "params": {"sessionId": session, "update": {}}}).encode()
        for session in (SESSION, "a subagent's")
    )
    assert not talk.protocol.is_aside(ours)
    assert talk.protocol.is_aside(other)
    assert talk.protocol.is_aside(b"[%s,%s]" % (other, other))
    for line in (b"[%s,%s]" % (ours, other), b"[%s,5]" % other, b"garbage", b'{"id":9,"result":{}}', b"[]"):
        assert not talk.protocol.is_aside(line), line
    assert not Talk().protocol.is_aside(other), "which one is ours is not known yet"


# -- corrections of quirks -------------------------------------------------------------------------------------------
def test_end_turn_after_cancel_is_aborted_only_with_quirk() -> None:
    quirks = Quirks(cancel_may_say=("end_turn",))
    for known, is_cancelled, expected in ((quirks, True, True), (quirks, False, False), (Quirks(), True, False)):
        talk = ready(quirks=known)
        id = talk.prompts()["id"]
        if is_cancelled:
            talk.take(talk.protocol.interrupt("stop"))
        over = talk.over(id)
        # The recorded stop reason stays the agent's own word.
        assert (over.is_aborted, over.stop_reason, over.is_error) == (expected, "end_turn", False)


def test_cancel_is_forgotten_with_its_turn() -> None:
    talk = ready(quirks=Quirks(cancel_may_say=("end_turn",)))
    first = talk.prompts(ref="p1")["id"]
    talk.take(talk.protocol.interrupt("stop"))
    assert talk.over(first).is_aborted
    talk.sent.clear()
    assert not talk.over(talk.prompts(ref="p2")["id"]).is_aborted


def test_error_text_fails_turn_only_with_quirk() -> None:
    talk = ready(quirks=Quirks(error_texts=("^Error: [45]",)))

    def over(*texts: str) -> TurnOver:
        id = talk.prompts()["id"]
        for text in texts:
            talk.update("tool_call", toolCallId="t") if text == "TOOL" else talk.says(text)
        return talk.over(id)

    assert over("Err", "or: 400 no").error == "Error: 400 no"
    assert over("Error: 400 no").stop_reason == "end_turn"
    assert over("Looking.", "TOOL", "Error: 500").is_error
    assert not over("Error: 500", "TOOL", "all is well").is_error
    assert not over("It says: Error: 400").is_error
    # The text of one turn does not count for the next turn.
    assert not over().is_error
    # A long text that begins like an error is an answer about an error.
    assert not over("Error: 400 ", *["x" * 100] * (ERROR_CHARACTERS_MAX // 100)).is_error


def test_messages_with_ids_are_told_apart() -> None:
    talk = ready(quirks=Quirks(error_texts=("^Error: ",)))
    id = talk.prompts()["id"]
    talk.says("Thinking about it.", messageId="m1")
    talk.says("Error: 400", messageId="m2")
    assert talk.over(id).is_error


def test_silent_turn_fails_only_with_quirk() -> None:
    talk = ready(quirks=Quirks(silence_is_error=True))

    def over(kind: str | None = None, reason: str = "end_turn", **members: Any) -> TurnOver:
        id = talk.prompts()["id"]
        if kind is not None:
            talk.update(kind, **members)
        return talk.over(id, reason)

    text = {"type": "text", "text": "x"}
    assert over().error == "the agent gave no output and reported no error"
    assert over("agent_message_chunk", content={"type": "text", "text": ""}).is_error
    assert over("usage_update", used=1, size=2).is_error
    assert not over("agent_message_chunk", content=text).is_error
    assert not over("agent_thought_chunk", content=text).is_error
    assert not over("tool_call", toolCallId="t").is_error
    assert not over(reason="cancelled").is_error


def test_quirks_do_not_change_meanings_of_updates() -> None:
    plain, close = ready(), ready(quirks=Quirks(silence_is_error=True))
    for talk in (plain, close):
        talk.prompts()
        assert talk.says("hello") == []
        assert talk.update("agent_thought_chunk", content={"type": "text", "text": "hm"}) == [Thought()]
        assert talk.update("plan", entries=[]) == []
        assert talk.update("of_a_new_kind") == []
        assert talk.hears(b"garbage") == [Noise()]


# -- prompts ---------------------------------------------------------------------------------------------------------
IMAGE = {"type": "image", "data": "AA==", "mimeType": "image/png"}
RESOURCE = {"type": "resource", "resource": {"uri": "file:///a", "text": "inside"}}


def test_content_blocks_are_sent_unchanged() -> None:
    talk = ready()
    blocks = [{"type": "text", "text": "look"}, IMAGE, RESOURCE, {"type": "resource_link", "uri": "file:///x/b.txt"}]
    sent = talk.prompts(blocks)["params"]["prompt"]
    assert sent[:3] == blocks[:3]
    assert sent[3] == {"type": "resource_link", "uri": "file:///x/b.txt", "name": "b.txt"}


def test_unsupported_content_becomes_text_or_fails_turn() -> None:
    talk = begun(can={})
    talk.replies({"sessionId": SESSION})
    [told] = talk.prompts([RESOURCE])["params"]["prompt"]
    assert told == {"type": "text", "text": '<context ref="file:///a">\ninside\n</context>'}
    blob = {"type": "resource", "resource": {"uri": "file:///a", "blob": "AA=="}}
    for block, word in ((IMAGE, "image"), ({**IMAGE, "type": "audio"}, "audio"), (blob, "embedded file")):
        [over] = talk.take(talk.protocol.prompt("p9", [block]))
        assert isinstance(over, TurnOver)
        assert (over.refs, over.is_error) == (("p9",), True)
        assert word in (over.error or "")
        assert not talk.sent


@pytest.mark.parametrize(
    "prompt",
    [
        "",
        [],
        b"bytes",
        {"type": "text"},
        5,
        ["text"],
        [{"type": "video"}],
        [{"type": "text"}],
        [{"type": "image", "data": 5, "mimeType": "image/png"}],
        [{"type": "resource"}],
        [{"type": "resource", "resource": {"uri": "x"}}],
        [{"type": "resource_link"}],
        "half a pair \ud83d",
    ],
)
def test_invalid_prompt_is_refused_in_any_phase(prompt: Any) -> None:
    for talk in (Talk(), ready()):
        with pytest.raises(UsageError):
            talk.protocol.prompt("p1", prompt)
    assert Talk().protocol.prompt("p1", [IMAGE]).meanings == ()
