"""Fuzz the ACP dialect with arbitrary agent messages in any order.

Nothing raises. Each prompt ends once, each request of the agent is answered once, and only whole lines are written.
`Watched` checks these invariants from outside, over all messages in both directions.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import strategies as st
from tests.fuzz.bounded import for_a_while

from banksman.core.dialects.acp import acp
from banksman.core.dialects.acp.conversation import AcpProtocolState
from banksman.core.dialects.dialect import Decision, ProtocolOutput, Quirks, Setup
from banksman.core.dialects.meaning import (
    Forgot,
    Meaning,
    NeedsConversation,
    Replied,
    Requested,
    RequestWithdrawn,
    TurnOver,
)
from banksman.core.wire.jsonrpc import InvalidMessage, RpcCall

pytestmark = pytest.mark.thorough

# -- messages of the agent -------------------------------------------------------------------------------------------
SCALARS: st.SearchStrategy[Any] = st.one_of(
    st.none(), st.booleans(), st.integers(-5, 12), st.floats(allow_nan=False), st.text(max_size=6)
)
IDS: st.SearchStrategy[Any] = st.one_of(st.integers(0, 8), st.sampled_from(["a", "1", None, True, 1.0, [], {}]))
METHODS = st.sampled_from(
    [
        *("session/update", "session/request_permission", "fs/read_text_file", "terminal/create", "elicitation/create"),
        *("$/cancel_request", "_vendor/x", "no/such", ""),
    ]
)
KINDS: st.SearchStrategy[Any] = st.sampled_from(
    [
        *("agent_message_chunk", "agent_thought_chunk", "tool_call", "tool_call_update", "plan", "usage_update"),
        *("current_mode_update", "config_option_update", "new_kind", None, 5),
    ]
)
MEMBERS = st.sampled_from(
    [
        *(
            "sessionId",
            "update",
            "toolCall",
            "toolCallId",
            "status",
            "kind",
            "options",
            "optionId",
            "requestId",
            "mode",
        ),
        *("stopReason", "usage", "protocolVersion", "agentCapabilities", "sessionCapabilities", "resume", "fork"),
        *("loadSession", "models", "modes", "availableModels", "availableModes", "currentModeId", "configOptions"),
        *("category", "id", "value", "currentValue", "authMethods", "cost", "amount", "currency", "content", "text"),
        *("code", "message", "data", "details", "promptCapabilities", "_meta", "quota", "token_count", "messageId"),
    ]
)
WORDS = st.sampled_from(
    [
        "s-1",
        "end_turn",
        "cancelled",
        "refusal",
        "allow_once",
        "reject_once",
        "completed",
        "in_progress",
        "model",
        "mode",
    ]
)
Strategy = st.SearchStrategy[Any]


def nested(inner: Strategy) -> Strategy:
    return st.one_of(st.lists(inner, max_size=3), st.dictionaries(MEMBERS, inner, max_size=4))


def with_members(members: dict[str, Strategy]) -> Strategy:
    """Objects with these members and arbitrary others."""

    def joined(pair: tuple[dict[str, Any], dict[str, Any]]) -> dict[str, Any]:
        return {**pair[0], **pair[1]}

    return st.tuples(st.dictionaries(MEMBERS, VALUES, max_size=4), st.fixed_dictionaries(members)).map(joined)


def as_line(message: Any) -> bytes:
    return json.dumps(message).encode()


def cut(pair: tuple[Any, int]) -> bytes:
    return as_line(pair[0])[: pair[1]]


VALUES: Strategy = st.recursive(st.one_of(SCALARS, WORDS), nested, max_leaves=12)
UPDATES = with_members({"sessionUpdate": KINDS})
PARAMS: Strategy = st.one_of(
    VALUES,
    st.fixed_dictionaries({"sessionId": st.just("s-1"), "update": UPDATES}),
    st.fixed_dictionaries({"requestId": IDS}),
)
CODES: Strategy = st.sampled_from([-32000, -32002, -32600, -32601, -32602, -32603, -32700, -32800, 400, "x"])
ERRORS: Strategy = st.one_of(VALUES, st.fixed_dictionaries({"code": CODES, "message": SCALARS, "data": VALUES}))
GOOD: Strategy = st.sampled_from(
    [
        {"protocolVersion": 1, "agentCapabilities": {"loadSession": True}},
        {"protocolVersion": 1, "agentCapabilities": {"sessionCapabilities": {"resume": {}, "fork": {}}}},
        {"sessionId": "s-1", "models": {"availableModels": [{"modelId": "big"}]}},
        {"stopReason": "end_turn"},
        {"stopReason": "cancelled"},
        {},
        None,
    ]
)
MESSAGES: Strategy = st.one_of(
    st.fixed_dictionaries({"id": IDS, "result": st.one_of(GOOD, VALUES)}),
    st.fixed_dictionaries({"id": IDS, "error": ERRORS}),
    st.fixed_dictionaries({"method": METHODS, "params": PARAMS}),
    st.fixed_dictionaries({"id": IDS, "method": METHODS, "params": PARAMS}),
    VALUES,
)
LINES: Strategy = st.one_of(
    MESSAGES.map(as_line),
    st.lists(MESSAGES, max_size=4).map(as_line),
    st.tuples(MESSAGES, st.integers(0, 200)).map(cut),
    st.binary(max_size=20),
)


# -- the client and its invariants -----------------------------------------------------------------------------------
class Watched:
    """An ACP conversation that checks its invariants after every message."""

    def __init__(self, setup: Setup, quirks: Quirks) -> None:
        self.dialect = acp(quirks)
        self.protocol = self.dialect.begin(setup)
        # Prompts that were sent, and prompts that have ended.
        self.prompted: list[str] = []
        self.ended: Counter[str] = Counter()
        self.asked: dict[str, Requested] = {}
        self.handshakes = 0
        # Requests of the agent and answers to them, counted by id: no id may get more answers than it had requests.
        self.requests: Counter[str] = Counter()
        self.answers: Counter[str] = Counter()
        self.numbers: set[int] = set()
        self.take(self.protocol.handshake("hand"))

    @property
    def is_ready(self) -> bool:
        assert isinstance(self.protocol, AcpProtocolState)
        return self.protocol.stage.value == "ready"

    def take(self, spoken: ProtocolOutput) -> None:
        self.protocol = spoken.protocol
        for frame in spoken.frames:
            assert frame.endswith(b"\n")
            assert frame.count(b"\n") == 1
            message = json.loads(frame)
            assert message["jsonrpc"] == "2.0"
            if "method" in message and "id" in message:
                assert message["id"] not in self.numbers, "a number was used twice"
                self.numbers.add(message["id"])
            elif "method" not in message:
                self.answers[json.dumps(message["id"])] += 1
        for meaning in spoken.meanings:
            self.mean(meaning)
        for id, count in self.answers.items():
            assert count <= self.requests[id], f"{id} has more answers than requests"

    def mean(self, meaning: Meaning) -> None:
        match meaning:
            case TurnOver(refs=refs):
                [ref] = refs
                self.ended[ref] += 1
                assert ref in self.prompted
                assert self.ended[ref] == 1, f"{ref} ended twice"
            case Replied(request="hand") | Forgot():
                self.handshakes += 1
                assert self.handshakes == 1, "the handshake ended twice"
            case Requested(request=request):
                assert request not in self.asked, f"{request} is open, and was asked again"
                self.asked[request] = meaning
            case RequestWithdrawn(request=request):
                del self.asked[request]
            case _:
                pass

    def hear(self, line: bytes) -> None:
        meaning = self.dialect.read(line)
        self.dialect.project(line)
        self.dialect.transcript().add(line)
        if isinstance(meaning, NeedsConversation):
            for message in meaning.message:
                if isinstance(message, RpcCall) or (isinstance(message, InvalidMessage) and message.is_request):
                    self.requests[json.dumps(message.id)] += 1
            self.take(self.protocol.hear(meaning))
        elif meaning is not None:
            self.mean(meaning)

    def act(self, deed: str, number: int) -> None:
        """Perform an action that a session may perform now."""
        match deed:
            case "prompt" if self.is_ready and len(self.prompted) == sum(self.ended.values()):
                self.prompted.append(f"p{len(self.prompted)}")
                self.take(self.protocol.prompt(self.prompted[-1], "x"))
            case "hurry":
                self.take(self.protocol.hurry())
            case "interrupt":
                self.take(self.protocol.interrupt("stop"))
            case "set" if self.is_ready:
                self.take(self.protocol.setting(f"set-{number}", "model", "big"))
            case "answer" | "refuse" | "cancel" | "respond" if self.asked:
                asked = self.asked.pop(sorted(self.asked)[number % len(self.asked)])
                how: dict[str, Any] = {
                    "answer": lambda: self.protocol.answer(asked, Decision(allows=number % 2 == 0)),
                    "refuse": lambda: self.protocol.refuse(asked, "no"),
                    "cancel": lambda: self.protocol.cancel(asked),
                    "respond": lambda: self.protocol.respond(asked, {}),
                }
                before = self.answers[asked.request]
                self.take(how[deed]())
                assert self.answers[asked.request] == before + 1, "it was not answered"
            case _:
                pass


DEEDS = st.tuples(
    st.sampled_from(["prompt", "interrupt", "hurry", "set", "answer", "refuse", "cancel", "respond"]), st.integers(0, 9)
)
SETUPS = st.sampled_from(
    [Setup(), Setup(conversation="s-1"), Setup(conversation="s-0", forks=True), Setup(model="big", permission_mode="x")]
)
QUIRKS = st.sampled_from(
    [Quirks(), Quirks(recites_late=True), Quirks(("end_turn",), ("^s",), silence_is_error=True, serves=())]
)
# First messages that bring most runs as far as a turn.
BEGINNINGS: Strategy = st.sampled_from(
    [
        [],
        [{"id": 1, "result": {"protocolVersion": 1}}, {"id": 2, "result": {"sessionId": "s-1"}}],
        [
            {"id": 1, "result": {"protocolVersion": 1, "agentCapabilities": {"loadSession": True}}},
            {"id": 2, "result": {}},
        ],
    ]
)


def test_acp_prompts_end_once_and_requests_are_answered_once_for_any_input() -> None:
    def check(case: tuple[Setup, Quirks, list[Any], list[bytes | tuple[str, int]]]) -> None:
        setup, quirks, beginning, moves = case
        watched = Watched(setup, quirks)
        for message in beginning:
            watched.hear(json.dumps(message).encode())
        watched.act("prompt", 0)
        for move in moves:
            if isinstance(move, bytes):
                watched.hear(move)
            else:
                watched.act(*move)

    moves = st.lists(st.one_of(LINES, LINES, DEEDS), max_size=30)
    assert for_a_while(check, st.tuples(SETUPS, QUIRKS, BEGINNINGS, moves))


def test_acp_read_head_accepts_any_two_ends() -> None:
    def check(case: tuple[bytes, int, int]) -> None:
        line, head, tail = case
        acp().read_head(line[:head], line[-tail:] if tail else b"")

    assert for_a_while(check, st.tuples(LINES, st.integers(0, 200), st.integers(0, 60)))
