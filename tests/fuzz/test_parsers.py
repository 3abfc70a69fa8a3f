"""Fuzz the parsers of external input: the lines of an agent, the frames of its dialect, the events of a stream.

Each parser is compared with a small reference implementation, written from the specification alone. Where there is no
reference, the test checks invariants of every result.
"""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import pytest
from hypothesis import strategies as st
from tests.fuzz.bounded import for_a_while

from banksman.cli.client.event_stream import RETRY_MILLISECONDS_MAX, SseMessage, SseParser
from banksman.core.dialects.claude import reader, updates
from banksman.core.dialects.claude.frame import ClaudeFrame
from banksman.core.dialects.codex import CODEX
from banksman.core.dialects.dialect import Decision, ProtocolOutput, Setup
from banksman.core.dialects.meaning import Meaning, NeedsConversation, Requested
from banksman.core.wire import jsonrpc
from banksman.core.wire.framing import Framing, MixedChunk, OversizeBegan, OversizeEnded, OversizePiece

pytestmark = pytest.mark.thorough

SEEDS = st.integers(0, 1 << 32)
# Cuts at random places, or after every byte.
CUTS = st.one_of(st.lists(st.integers(0, 400), max_size=10), st.just([*range(2000)]))


def cut(data: bytes, cuts: list[int]) -> list[bytes]:
    places = [0, *sorted({place % (len(data) + 1) for place in cuts}), len(data)]
    return [data[start:end] for start, end in itertools.pairwise(places)]


# -- framing ----------------------------------------------------------------------------------------------------------
PIECES = st.sampled_from(
    [b"\n", b"\r", b"\r\n", b"\n\n", b"{}", b'{"type":"x"}', b"\0", b"\xff", b"\xe2\x80\xa8", b"x" * 30]
)
LINES = st.lists(st.one_of(PIECES, st.binary(max_size=12)), max_size=60).map(b"".join)


def lines_by_the_byte(data: bytes, limit: int) -> list[bytes | tuple[int, bytes, bytes]]:
    """Reference implementation, byte by byte: each line, or for an oversize line its length and its content twice."""
    found: list[bytes | tuple[int, bytes, bytes]] = []
    line = bytearray()
    for byte in data + b"\n" if data and not data.endswith(b"\n") else data:
        if byte != 0x0A:
            line.append(byte)
            continue
        if line and line[-1] == 0x0D:
            del line[-1]
        if line:
            found.append(bytes(line) if len(line) <= limit else (len(line), bytes(line), bytes(line)))
        line.clear()
    return found


def test_framing_is_independent_of_cuts() -> None:
    def check(case: tuple[bytes, list[int], int]) -> None:
        data, cuts, limit = case
        framing = Framing(frame_bytes_max=limit)
        answers = [framing.feed(piece) for piece in cut(data, cuts)]
        answers.append(framing.end())
        found: list[Any] = []
        pieces = bytearray()
        for answer in answers:
            for item in answer.items if isinstance(answer, MixedChunk) else answer:
                if isinstance(item, OversizeBegan):
                    pieces.clear()
                elif isinstance(item, OversizePiece):
                    pieces += item.data
                elif isinstance(item, OversizeEnded):
                    assert item.length == len(pieces)
                    assert pieces.startswith(item.head)
                    assert pieces.endswith(item.tail)
                    found.append((item.length, bytes(pieces), bytes(pieces)))
                else:
                    found.append(item)
        assert found == lines_by_the_byte(data, limit)
        assert framing.bytes_in == len(data)

    assert for_a_while(check, st.tuples(LINES, CUTS, st.sampled_from([1, 2, 3, 7, 64, 1000])))


# -- the Claude dialect -----------------------------------------------------------------------------------------------
WORDS = (
    *("type", "subtype", "result", "system", "init", "assistant", "user", "stream_event", "control_request", "success"),
    *("control_response", "control_cancel_request", "command_lifecycle", "request_id", "request", "response", "uuid"),
    *("session_id", "is_error", "message", "content", "tool_use", "tool_result", "id", "tool_use_id", "can_use_tool"),
    *("tool_name", "input", "hook_callback", "callback_id", "mcp_message", "server_name", "elicitation", "state", "x"),
    *("started", "queued", "completed", "cancelled", "command_uuid", "total_cost_usd", "usage", "event", "delta", ""),
    *("thinking_delta", "errors", "error", "user_message_uuids", "user_message_uuid", "status", "compacting", "origin"),
    *("kind", "costUSD", "tasks", "task_id", "terminal_reason", "still_queued", "text", "\0", "é", '"', "\\", "\n"),
)
PLAIN = (None, True, False, 0, 1, -1, 1.5, 2**63 - 1, -(2**63), 1e308, 5e-324)
# Values that Python's JSON accepts and other parsers reject: NaN, infinity, huge numbers, a lone surrogate.
ODD = (float("nan"), float("inf"), 2**64, 10**309, -(10**400), "\ud800")
NAMES = (*ClaudeFrame.__struct_fields__, "other")
TYPES = sorted(reader._MEANINGS)  # pyright: ignore[reportPrivateUsage]
# Lines for each seed: hypothesis makes a hundred examples a second, this generator thousands.
LINES_EACH = 50


class Making:
    """Generator of frames from one seed, each different from the one before."""

    def __init__(self, seed: int, *, is_json: bool) -> None:
        self.random = random.Random(seed)
        self._leaves = (*PLAIN, *WORDS) if is_json else (*PLAIN, *WORDS, *ODD * 4)

    def value(self, depth: int = 3) -> Any:
        choose = self.random
        match choose.randrange(6) if depth else 0:
            case 4:
                return [self.value(depth - 1) for _ in range(choose.randrange(4))]
            case 5:
                return {choose.choice(WORDS): self.value(depth - 1) for _ in range(choose.randrange(6))}
            case _:
                return choose.choice(self._leaves)

    def frame(self) -> dict[str, Any]:
        members = {self.random.choice(NAMES): self.value() for _ in range(self.random.randrange(9))}
        return self.shuffled({**members, "type": self.random.choice(TYPES)})

    def shuffled(self, frame: dict[str, Any]) -> dict[str, Any]:
        return dict(self.random.sample([*frame.items()], len(frame)))

    def line(self) -> bytes:
        """A frame, mostly valid: whole, cut, with bytes changed, or with several frames in one line."""
        choose = self.random
        line = as_line(self.frame(), is_tight=choose.random() < 0.5)
        for _ in range(choose.choice((0, 0, 1, 2, 3))):
            place = choose.randrange(len(line) + 1)
            new = choose.choice((b"", choose.randbytes(3), line[:20], b"[" * 2000, b'"', b"\\u", b"}", line))
            line = line[:place] + new + line[place + choose.randrange(7) :]
        return line


def as_line(value: Any, *, is_tight: bool = True) -> bytes:
    text = json.dumps(value, separators=(",", ":") if is_tight else (", ", ": "), ensure_ascii=not is_tight)
    return text.encode("utf-8", "surrogatepass")


def test_claude_reader_never_raises() -> None:
    def check(seed: int) -> None:
        making = Making(seed, is_json=False)
        for line in (making.line() for _ in range(LINES_EACH)):
            try:
                meanings = reader.read(line), reader.read_head(line[: len(line) // 2 + 1])
                # The projection is stored and sent, so it must be JSON.
                json.dumps(updates.project(line))
            except Exception as exc:
                exc.add_note(repr(line))
                raise
            assert all(meaning is None or isinstance(meaning, Meaning) for meaning in meanings), line

    assert for_a_while(check, SEEDS)


def test_claude_reader_ignores_member_order() -> None:
    def check(seed: int) -> None:
        making = Making(seed, is_json=True)
        for frame in (making.frame() for _ in range(LINES_EACH)):
            if frame["type"] != "stream_event":  # The reader detects stream events by a word at any place.
                one, other = as_line(frame), as_line(making.shuffled(frame))
                assert repr(reader.read(one)) == repr(reader.read(other)), (one, other)

    assert for_a_while(check, SEEDS)


# -- JSON-RPC ---------------------------------------------------------------------------------------------------------
MEMBERS = ("id", "method", "params", "result", "error", "jsonrpc", "x")
# An id that the client has used, ids that it never uses, and values that are not ids.
IDS: tuple[Any, ...] = (0, 1, 2, 3, 4, "1", "", None, 1.0, True, [], {}, 2**63, -(2**70), "x" * 2000)
CODEX_METHODS = (
    *("turn/started", "turn/completed", "item/started", "item/completed", "thread/tokenUsage/updated", "error", "x"),
    *("serverRequest/resolved", "item/agentMessage/delta", "item/reasoning/textDelta", "turn/plan/updated", ""),
    *("item/commandExecution/requestApproval", "item/fileChange/requestApproval", "item/permissions/requestApproval"),
    *("item/tool/requestUserInput", "mcpServer/elicitation/request", "execCommandApproval", "applyPatchApproval"),
)
CODEX_NAMES = (
    *("threadId", "turnId", "turn", "item", "id", "type", "status", "items", "text", "clientId", "thread", "error"),
    *("message", "willRetry", "tokenUsage", "total", "last", "totalTokens", "requestId", "availableDecisions", "plan"),
    *("command", "permissions", "changes", "diff", "kind", "path", "step", "delta", "itemId", "summary", "content"),
)
CODEX_WORDS = (
    *("t", "u", "v", "r", "s", "completed", "failed", "interrupted", "agentMessage", "userMessage", "commandExecution"),
    *("fileChange", "mcpToolCall", "webSearch", "reasoning", "accept", "cancel", "acceptForSession", "inProgress"),
)


class MakingCodex(Making):
    """Generator of messages close to those of the Codex app-server, about two turns and two prompts of one thread."""

    def value(self, depth: int = 3) -> Any:
        choose = self.random
        match choose.randrange(7) if depth else 0:
            case 4:
                return [self.value(depth - 1) for _ in range(choose.randrange(3))]
            case 5 | 6:
                return {choose.choice(CODEX_NAMES): self.value(depth - 1) for _ in range(choose.randrange(6))}
            case 0:
                return choose.choice(self._leaves)
            case _:
                return choose.choice(CODEX_WORDS)

    def frame(self) -> dict[str, Any]:
        choose = self.random
        if choose.random() < 0.1:
            return {choose.choice(MEMBERS): self.value() for _ in range(choose.randrange(6))}
        params = {choose.choice(CODEX_NAMES): self.value() for _ in range(choose.randrange(5))}
        turn = {"id": choose.choice("uv"), "status": choose.choice(("completed", "failed", None))}
        odd = {name: self.value(2) for name in CODEX_NAMES if choose.random() < 0.2}
        item = {"id": "i", "type": choose.choice(CODEX_WORDS), "clientId": choose.choice("rs")} | odd
        plan = [{"step": "x", "status": self.value(1)}]
        usual = {"threadId": "t", "turnId": "u", "turn": turn, "item": item, "plan": plan}
        params = choose.choice(({}, usual, usual)) | params
        match choose.randrange(4):
            case 0:
                return self.shuffled({"id": choose.choice(IDS), "result": params})
            case 1:
                return self.shuffled({"id": choose.choice(IDS), "error": self.value()})
            case 2:
                return self.shuffled(
                    {"id": choose.choice(IDS), "method": choose.choice(CODEX_METHODS), "params": params}
                )
            case _:
                return self.shuffled({"method": choose.choice(CODEX_METHODS), "params": params})


def test_jsonrpc_decode_accepts_any_line() -> None:
    def check(seed: int) -> None:
        making = MakingCodex(seed, is_json=False)
        for line in (making.line() for _ in range(LINES_EACH)):
            half = len(line) // 2 + 1
            try:
                messages = (*jsonrpc.decode(line), jsonrpc.decode_head(line[:half], line[half:]))
            except Exception as exc:
                exc.add_note(repr(line))
                raise
            assert len(messages) > 1, line
            assert all(isinstance(message, jsonrpc.Message) for message in messages), line
            for message in messages:
                # Every id that is read can be written back.
                id = getattr(message, "id", None)
                assert id is None or jsonrpc.id_from(jsonrpc.id_text(id)) == id

    assert for_a_while(check, SEEDS)


def test_jsonrpc_decode_is_independent_of_order_and_batching() -> None:
    def check(seed: int) -> None:
        making = MakingCodex(seed, is_json=True)
        for frame in (making.frame() for _ in range(LINES_EACH)):
            (one,) = jsonrpc.decode(as_line(frame))
            assert jsonrpc.decode(as_line(making.shuffled(frame))) == (one,)
            assert jsonrpc.decode(as_line([frame, making.shuffled(frame)])) == (one, one)

    assert for_a_while(check, SEEDS)


def test_codex_protocol_accepts_any_input_and_writes_single_lines() -> None:
    def check(seed: int) -> None:
        making = MakingCodex(seed, is_json=False)
        choose = making.random
        protocol = CODEX.begin(Setup(schema=choose.choice((None, {}))))
        projector, transcript = CODEX.projector(), CODEX.transcript()
        said: list[bytes] = []
        asked: list[Requested] = []

        def do(spoken: ProtocolOutput) -> None:
            nonlocal protocol
            protocol = spoken.protocol
            asked.extend(meaning for meaning in spoken.meanings if isinstance(meaning, Requested))
            assert not any(isinstance(meaning, NeedsConversation) for meaning in spoken.meanings)
            for frame in spoken.frames:
                assert frame.index(b"\n") == len(frame) - 1
                assert isinstance(json.loads(frame), dict)

        do(protocol.handshake("h"))
        for line in (b'{"id":1,"result":{}}', b'{"id":2,"result":{"thread":{"id":"t"}}}'):
            meaning = CODEX.read(line)
            assert isinstance(meaning, NeedsConversation)
            do(protocol.hear(meaning))
        try:
            for _ in range(LINES_EACH):
                match choose.randrange(8):
                    case 0:
                        do(protocol.prompt(choose.choice("rs"), "do"))
                    case 1:
                        do(protocol.interrupt("i"))
                    case 2 if asked:
                        question = asked.pop()
                        decision = Decision(allows=choose.random() < 0.5, option=choose.choice((None, "accept", "x")))
                        do(choose.choice((protocol.answer(question, decision), protocol.cancel(question))))
                    case _:
                        line = making.line()
                        said.append(line)
                        json.dumps([CODEX.project(line), projector.project(line)])
                        transcript.add(line)
                        half = len(line) // 2 + 1
                        for meaning in (CODEX.read(line), CODEX.read_head(line[:half], line[half:])):
                            assert meaning is None or isinstance(meaning, Meaning)
                            if isinstance(meaning, NeedsConversation):
                                do(protocol.hear(meaning))
        except Exception as exc:
            exc.add_note(repr(said[-1:]))
            raise

    assert for_a_while(check, SEEDS)


# -- event streams ----------------------------------------------------------------------------------------------------
FIELDS = st.sampled_from(
    [
        *(
            b"data: x",
            b"data:x",
            b"data",
            b"data:",
            b"data:  x",
            b"id: 1",
            b"id",
            b"id: a\0b",
            b"id:2",
            b"event: e",
            b"event",
        ),
        *(
            b"retry: 10",
            b"retry: x",
            b"retry:",
            b"retry: 99999999999999999999",
            b": comment",
            b":",
            b"other: x",
            b"da",
            b"DATA: x",
        ),
        *(b"\xef\xbb\xbf", b"\xff", b"data: \xe2\x82", b"\0", b"x" * 20, b"retry: \xd9\xa1", b"retry: 1 "),
    ]
)
ENDS = st.sampled_from([b"\n", b"\r", b"\r\n", b"\n\n", b"\r\r", b"\r\n\r\n", b"\n\r", b""])
EVENTS = st.lists(st.one_of(FIELDS, ENDS, st.binary(max_size=6)), max_size=40).map(b"".join)


def events_by_the_rules(data: bytes) -> tuple[list[SseMessage], str, int | None]:
    """Parse the whole stream as the standard says: return the messages, the last id and the requested retry time."""
    text = data.removeprefix(b"\xef\xbb\xbf").decode("utf-8", "replace").replace("\r\n", "\n").replace("\r", "\n")
    messages: list[SseMessage] = []
    buffer, event, seen_id, last_id = "", "", "", ""
    retry: int | None = None
    for line in text.split("\n")[:-1]:
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if not line:
            last_id = seen_id
            if buffer:
                messages.append(SseMessage(event, buffer.removesuffix("\n"), last_id))
            buffer, event = "", ""
        elif name == "data":
            buffer += value + "\n"
        elif name == "event":
            event = value
        elif name == "id" and "\0" not in value:
            seen_id = value
        elif name == "retry" and value.isascii() and value.isdigit():
            retry = min(int(value), RETRY_MILLISECONDS_MAX)
    return messages, last_id, retry


def test_sse_parser_follows_standard_for_any_cut() -> None:
    def check(case: tuple[bytes, list[int]]) -> None:
        data, cuts = case
        parser = SseParser()
        found = [message for piece in cut(data, cuts) for message in parser.feed(piece)]
        assert (found, parser.id, parser.retry) == events_by_the_rules(data)

    assert for_a_while(check, st.tuples(EVENTS, CUTS))
