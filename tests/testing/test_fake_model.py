"""The fake model over plain sockets: its output on the wire, each directive, each limit, and its close.

This file uses Anthropic's API. test_fake_model_apis.py has the differences of the other APIs. The conversations have
the format that Claude Code 2.1.325 sends; the real agent is not needed.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.testing import model_client
from tests.testing.model_client import SECONDS_MAX, Json

from banksman.testing.fake_model import FakeModel, http1, model, record

TOOLS = [{"name": "Bash", "input_schema": {"type": "object"}}]


class Client(model_client.Client):
    """A client of Anthropic's API."""

    def ask(self, prompt: str, *, stream: bool = True) -> None:
        self.send("POST", "/v1/messages?beta=true", request(prompt, stream=stream))

    def says(self, prompt: str) -> str:
        """Ask, and join the text of a streamed reply."""
        self.ask(prompt)
        return said(self.stream())


def request(prompt: str, *, stream: bool = True) -> Json:
    return conversation(user(prompt), stream=stream)


def conversation(*messages: Json, stream: bool = True) -> Json:
    return {"model": "claude-x", "max_tokens": 9, "stream": stream, "tools": TOOLS, "messages": list(messages)}


def user(*blocks: str | Json) -> Json:
    return {"role": "user", "content": [{"type": "text", "text": b} if isinstance(b, str) else b for b in blocks]}


def assistant(text: str = "so it is") -> Json:
    return {"role": "assistant", "content": [{"type": "text", "text": text}]}


def system(text: str) -> Json:
    return {"role": "system", "content": text}


def said(events: list[Json]) -> str:
    return "".join(e["delta"].get("text", "") for e in events if e["type"] == "content_block_delta")


def outcomes(fake: FakeModel) -> list[str]:
    """Outcomes of all requests. The server records an outcome after the last byte, so this waits for each."""
    return [request.wait_outcome(SECONDS_MAX) for request in fake.requests]


@pytest.fixture
def fake() -> Iterator[FakeModel]:
    with FakeModel() as running:
        yield running


@pytest.fixture
def client(fake: FakeModel) -> Iterator[Client]:
    with Client(fake.url) as connected:
        yield connected


# ── Replies ──


def test_stream_has_the_events_of_the_real_model(fake: FakeModel, client: Client) -> None:
    client.ask('please\n@@think hm\n@@text one \n@@text two\n@@tool Bash {"command": "ls"}')
    events = client.stream()
    assert client.headers["content-type"].startswith("text/event-stream")
    assert client.headers["request-id"].startswith("req_")
    start = events[0]["message"]
    assert start["model"] == "claude-x"
    assert start["content"] == []
    # A plausible count: about a token for four bytes of the request.
    size = int(fake.requests[0].headers["content-length"])
    assert start["usage"]["input_tokens"] == size // 4 + 1
    tool = events[-5]["content_block"]["id"]
    assert tool.startswith("toolu_")
    block, delta, stop = "content_block_start", "content_block_delta", "content_block_stop"
    signature = events[4]["delta"]["signature"]
    assert signature
    assert events[1:] == [
        {"type": "ping"},
        {"type": block, "index": 0, "content_block": {"type": "thinking", "thinking": "", "signature": ""}},
        {"type": delta, "index": 0, "delta": {"type": "thinking_delta", "thinking": "hm"}},
        {"type": delta, "index": 0, "delta": {"type": "signature_delta", "signature": signature}},
        {"type": stop, "index": 0},
        {"type": block, "index": 1, "content_block": {"type": "text", "text": ""}},
        {"type": delta, "index": 1, "delta": {"type": "text_delta", "text": "one "}},
        {"type": delta, "index": 1, "delta": {"type": "text_delta", "text": "two"}},
        {"type": stop, "index": 1},
        {"type": block, "index": 2, "content_block": {"type": "tool_use", "id": tool, "name": "Bash", "input": {}}},
        {"type": delta, "index": 2, "delta": {"type": "input_json_delta", "partial_json": '{"command": "ls"}'}},
        {"type": stop, "index": 2},
        # The reply has 26 characters.
        {
            "type": "message_delta",
            "delta": {"stop_reason": "tool_use", "stop_sequence": None},
            "usage": {"output_tokens": 7},
        },
        {"type": "message_stop"},
    ]


def test_whole_answer_equals_the_streamed_one(client: Client) -> None:
    client.ask('@@think hm\n@@text one \n@@text two\n@@tool Bash {"command": "ls"}', stream=False)
    status, message = client.answer()
    assert status == 200
    thinking, text, tool = message["content"]
    assert (thinking["type"], thinking["thinking"]) == ("thinking", "hm")
    assert text == {"type": "text", "text": "one two"}
    assert (tool["name"], tool["input"]) == ("Bash", {"command": "ls"})
    assert message["stop_reason"] == "tool_use"
    assert message["usage"]["output_tokens"] == 7


def test_adjacent_tools_are_called_in_parallel_and_end_the_step(client: Client) -> None:
    script = '@@tool A {}\n@@tool B {"x": 1}\n@@text then'
    client.ask(script)
    starts = [e["content_block"] for e in client.stream() if e["type"] == "content_block_start"]
    assert [block["name"] for block in starts] == ["A", "B"]
    assert starts[0]["id"] != starts[1]["id"]
    results: list[Json] = [{"type": "tool_result", "tool_use_id": block["id"], "content": "x"} for block in starts]
    client.send("POST", "/v1/messages", conversation(user(script), assistant(), user(*results)))
    assert said(client.stream()) == "then"


def test_script_plays_one_step_per_call_and_then_says_ok(fake: FakeModel, client: Client) -> None:
    script = "@@text one\n@@next\n@@text two\n@@next"
    heard: list[str] = []
    for calls_before in range(3):
        answers = [message for _ in range(calls_before) for message in (assistant(), user({"type": "tool_result"}))]
        client.send("POST", "/v1/messages", conversation(user(script), *answers))
        heard.append(said(client.stream()))
    assert heard == ["one", "two", "ok"]
    assert outcomes(fake) == ["done", "done", "done"]
    assert [(r.play, r.step) for r in fake.requests] == [(1, ("@@text one",)), (2, ("@@text two",)), (3, ())]


@pytest.mark.parametrize("stream", [True, False])
def test_slow_big_and_sleep_produce_their_text(client: Client, stream: bool) -> None:
    client.ask("@@slow 3 0\n@@sleep 0.001\n@@slow 2 0.001 so \n@@big 10000", stream=stream)
    text = said(client.stream()) if stream else client.answer()[1]["content"][0]["text"]
    words, big = text[: len("tick1 tick2 tick3 so so ")], text[len("tick1 tick2 tick3 so so ") :]
    assert words == "tick1 tick2 tick3 so so "
    assert len(big) == 10_000
    assert set(big) == {"x", "\n"}


def test_slow_waits_between_deltas_and_not_after_the_last(client: Client) -> None:
    assert client.says("@@slow 1 3600") == "tick1 "


def test_wait_pauses_until_the_file_exists(fake: FakeModel, client: Client, tmp_path: Path) -> None:
    client.ask(f"@@text a\n@@wait {tmp_path}/go\n@@text b")
    waiting = fake.wait_request(1, SECONDS_MAX)
    assert waiting.outcome is None
    (tmp_path / "go").touch()
    assert said(client.stream()) == "ab"
    assert waiting.wait_outcome(SECONDS_MAX) == "done"


def test_sleep_alone_says_ok(client: Client) -> None:
    assert client.says("@@sleep 0") == "ok"


def test_request_without_tools_plays_nothing(fake: FakeModel, client: Client) -> None:
    client.send("POST", "/v1/messages", {**request("@@text played"), "tools": []})
    assert said(client.stream()) == "ok"
    assert client.says("@@text played") == "played"
    assert [r.play for r in fake.requests] == [None, 1]


REMINDER = "<system-reminder>\nbe kind\n</system-reminder>\n"
RESULT: Json = {"type": "tool_result", "tool_use_id": "t", "content": "@@text not this"}


@pytest.mark.parametrize(
    ("messages", "heard"),
    [
        pytest.param([{"role": "user", "content": "@@text a"}], "a", id="a string"),
        pytest.param([user(REMINDER, "hello\r\n@@text a\r\nbye"), system("# Environment")], "a", id="reminders around"),
        pytest.param([user("@@text a"), assistant(), user("hello")], "ok", id="plain words after a script"),
        pytest.param([user("@@text a", REMINDER)], "a", id="a reminder after it"),
        pytest.param([user("@@hang\n", "[Request interrupted by user]\n", "hi")], "ok", id="plain after an interrupt"),
        pytest.param([user("@@hang\n", "[Request interrupted by user]\n", "@@text b")], "b", id="after an interrupt"),
        pytest.param([user("@@next", "@@text a")], "a", id="only the last script"),
        pytest.param(
            [user("@@tool A {}\n@@text b"), assistant(), user(RESULT, "words of the agent's"), user(REMINDER)],
            "b",
            id="words beside a result",
        ),
        pytest.param(
            [user("@@tool A {}\n@@text b"), assistant(), user(RESULT), system("The user sent:\nno\n@@text c\n\nSo…")],
            "c",
            id="a prompt that came in mid-turn",
        ),
        pytest.param(
            [user("@@tool A {}\n@@text b"), assistant(), user(RESULT), system("The user sent:\nno")],
            "b",
            id="plain words that came in mid-turn",
        ),
        pytest.param(
            [user("@@text a\n@@next\n@@text b"), assistant(), user("[structured-output-enforce] You MUST…")],
            "b",
            id="structured output demanded",
        ),
        pytest.param(
            [user("@@text a\n@@next\n@@text b"), assistant(), assistant()], "b", id="one call in two messages"
        ),
        pytest.param([user("@@text a\u2028b")], "a\u2028b", id="a line separator among the words"),
        pytest.param([user("no\n @@text a\nuse @@text b")], "ok", id="not at the beginning of a line"),
        pytest.param([assistant()], "ok", id="nobody said anything"),
    ],
)
def test_script_is_the_last_user_message(client: Client, messages: list[Json], heard: str) -> None:
    client.send("POST", "/v1/messages", conversation(*messages))
    assert said(client.stream()) == heard


# ── Scripted failures ──


@pytest.mark.parametrize(
    "line",
    [
        "@@",
        "@@ -1 +1 @@",
        "@@txt hello",
        "@@text",
        "@@think ",
        "@@slow 3",
        "@@slow x 1",
        "@@slow 3 nan",
        "@@slow 0 1",
        "@@sleep -1",
        "@@sleep 1e9",
        "@@sleep",
        "@@wait",
        "@@big",
        "@@big 1_0",
        "@@big 67108865",
        "@@tool Bash",
        "@@tool Bash {",
        "@@tool Bash []",
        "@@hang 3",
        "@@stall 3",
        "@@error",
        "@@error 200",
        "@@error 529 0",
        "@@error 529 1 1",
        "@@overflow x",
        "@@throttle",
        "@@throttle x",
        "@@limit -1",
        "@@limit 5 1 1",
        "@@used 42",
        "@@used 101 5",
        "@@sseerror",
        "@@drop x",
        "@@next",
        "@@next 1",
    ],
)
def test_malformed_directive_is_refused_by_name(client: Client, fake: FakeModel, line: str) -> None:
    client.ask(f"words\n{line}\n@@text fine")
    status, body = client.answer()
    assert status == 400
    assert body["error"]["type"] == "invalid_request_error"
    assert repr(line) in body["error"]["message"]
    assert fake.wait_request(1, SECONDS_MAX).wait_outcome(SECONDS_MAX) == "http_400"


def test_error_directive_after_text_is_refused(client: Client) -> None:
    client.ask("@@text hello\n@@error 500")
    assert client.answer()[0] == 400


def test_script_is_limited_in_length(client: Client) -> None:
    assert client.says("\n".join(["@@text x"] * 1_000)) == "x" * 1_000
    client.ask("\n".join(["@@text x"] * 1_001))
    assert client.answer()[0] == 400


@pytest.mark.parametrize("stream", [True, False])
def test_error_directive_repeats_and_then_the_rest_plays(fake: FakeModel, client: Client, stream: bool) -> None:
    script = "@@error 529 2\n@@overflow 1\n@@next\n@@text recovered"
    for status, kind in [(529, "overloaded_error"), (529, "overloaded_error"), (400, "invalid_request_error")]:
        client.ask(script, stream=stream)
        answer, body = client.answer()
        assert answer == status
        assert body["type"] == "error"
        assert body["error"]["type"] == kind
    assert client.says(script) == "recovered"
    # Another prompt fails again from the start. A newline that the agent adds does not make another prompt.
    assert client.says(script + "\n") == "recovered"
    client.ask(f"again\n{script}")
    assert client.answer()[0] == 529
    assert outcomes(fake)[:4] == ["http_529", "http_529", "http_400", "done"]


def test_throttle_says_when_to_retry(client: Client) -> None:
    client.ask("@@throttle 7 1\n@@text better")
    status, body = client.answer()
    assert (status, body["error"]["type"], client.headers["retry-after"]) == (429, "rate_limit_error", "7")
    assert client.says("@@throttle 7 1\n@@text better") == "better"


def test_limit_reports_used_up_window_of_account(client: Client) -> None:
    before = int(time.time())
    client.ask("@@limit 60")
    assert client.answer()[0] == 429
    assert client.headers["anthropic-ratelimit-unified-status"] == "rejected"
    assert before + 60 <= int(client.headers["anthropic-ratelimit-unified-reset"]) <= time.time() + 61


@pytest.mark.parametrize("stream", [True, False])
def test_used_reports_window_beside_the_answer(client: Client, stream: bool) -> None:
    client.ask("@@used 42 60\n@@text fine", stream=stream)
    assert (said(client.stream()) if stream else client.answer()[1]["content"][0]["text"]) == "fine"
    assert client.headers["anthropic-ratelimit-unified-5h-utilization"] == "0.42"


@pytest.mark.parametrize("line", ["@@throttle 1", "@@limit 1", "@@used 1 1"])
def test_headers_after_text_are_refused(client: Client, line: str) -> None:
    client.ask(f"@@text hello\n{line}")
    assert client.answer()[0] == 400


def test_overflow_has_the_words_of_the_real_model(client: Client) -> None:
    client.ask("@@overflow")
    message = "prompt is too long: 250000 tokens > 200000 maximum"
    assert client.answer() == (400, {"type": "error", "error": {"type": "invalid_request_error", "message": message}})


def test_sseerror_ends_the_stream_with_an_error_event(fake: FakeModel, client: Client) -> None:
    script = "@@text half\n@@sseerror overloaded_error 1\n@@text whole"
    client.ask(script)
    events = client.stream()
    assert said(events) == "half"
    assert events[-1]["type"] == "error"
    assert events[-1]["error"]["type"] == "overloaded_error"
    assert client.says(script) == "halfwhole"
    assert outcomes(fake) == ["sse_overloaded_error", "done"]


def test_sseerror_is_a_status_without_a_stream(client: Client) -> None:
    client.ask("@@text half\n@@sseerror rate_limit_error", stream=False)
    status, body = client.answer()
    assert (status, body["error"]["type"]) == (429, "rate_limit_error")


def test_drop_cuts_a_stream(fake: FakeModel, client: Client) -> None:
    client.ask("@@text half\n@@drop")
    assert client.head() == 200
    heard: list[Json] = []

    def hear() -> None:
        for event in client.events():
            heard.append(event)  # noqa: PERF402 -- it keeps the events before the stream broke

    with pytest.raises(ConnectionResetError):
        hear()
    assert said(heard) == "half"
    assert outcomes(fake) == ["dropped"]


def test_drop_cuts_a_whole_answer(fake: FakeModel, client: Client) -> None:
    client.ask("@@text half\n@@drop", stream=False)
    with pytest.raises(ConnectionResetError):
        client.answer()
    assert 0 < len(client.buffer) < int(client.headers["content-length"])
    assert outcomes(fake) == ["dropped"]


# ── Waits, and clients that leave during a wait ──


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("line", ["@@hang", "@@sleep 3600", "@@wait /nowhere/file", "@@stall", "@@slow 2 3600"])
def test_client_that_leaves_is_recorded_as_gone(fake: FakeModel, line: str, stream: bool) -> None:
    with Client(fake.url) as client:
        client.ask(line, stream=stream)
        waiting = fake.wait_request(1, SECONDS_MAX)
        assert waiting.outcome is None
        with pytest.raises(TimeoutError, match="not over"):
            waiting.wait_outcome(0)
    assert waiting.wait_outcome(SECONDS_MAX) == "client_gone"


def test_client_that_leaves_after_more_bytes_is_recorded_as_gone(fake: FakeModel) -> None:
    with Client(fake.url) as client:
        client.ask("@@hang")
        waiting = fake.wait_request(1, SECONDS_MAX)
        client.ask("@@text the next one, which nobody will read")
    assert waiting.wait_outcome(SECONDS_MAX) == "client_gone"
    assert len(fake.requests) == 1


def test_client_that_leaves_without_reading_is_recorded_as_gone(fake: FakeModel) -> None:
    with Client(fake.url) as client:
        client.ask("@@big 67108864")
        assert client.head() == 200
        waiting = fake.wait_request(1, SECONDS_MAX)
    assert waiting.wait_outcome(SECONDS_MAX) == "client_gone"


def test_hang_sends_nothing_and_stall_sends_the_start(fake: FakeModel) -> None:
    with Client(fake.url) as hung, Client(fake.url) as stalled:
        hung.ask("@@hang")
        stalled.ask("@@stall")
        fake.wait_request(2, SECONDS_MAX)
        assert stalled.head() == 200
        assert next(stalled.events())["type"] == "message_start"
        fake.close()
        # The connection got no bytes before its end.
        assert hung.is_over()


def test_close_ends_every_waiting_connection() -> None:
    with contextlib.ExitStack() as stack:
        fake = stack.enter_context(FakeModel())
        idle, half, unread, *hanging = [stack.enter_context(Client(fake.url)) for _ in range(8)]
        half.sock.sendall(b"POST /v1/messages HTTP/1.1\r\nContent-Length: 100\r\n\r\n{")
        unread.ask("@@big 67108864")
        for client in hanging:
            client.ask("@@text x\n@@hang")
        streams = [(client.head(), client.events())[1] for client in hanging]
        for events in streams:
            assert [next(events)["type"] for _ in range(4)][-1] == "content_block_delta"
        fake.wait_request(6, SECONDS_MAX)
        fake.close()
        assert [r.outcome for r in fake.requests] == ["stopped"] * 6
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("fake-model")]
        assert idle.is_over()
        for events in streams:
            with pytest.raises(EOFError):
                next(events)
        # A second close does nothing, and the requests stay available.
        fake.close()
        assert repr(fake).startswith("<FakeModel closed")
        assert fake.wait_request(6, 0).outcome == "stopped"


def test_wait_request_times_out_with_what_was_seen(fake: FakeModel, client: Client) -> None:
    with pytest.raises(TimeoutError, match="seen:\n  none"):
        fake.wait_request(1, 0)
    client.send("GET", "/v1/models")
    client.answer()
    with pytest.raises(TimeoutError, match="GET /v1/models"):
        fake.wait_request(1, 0)
    assert client.says("hello") == "ok"
    assert fake.wait_request(1, 0) is fake.requests[1]


def test_requests_kept_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "REQUESTS_KEPT_MAX", 2)
    with FakeModel() as fake, Client(fake.url) as client:
        for _ in range(3):
            client.says("hello")
        assert [r.number for r in fake.requests] == [2, 3]
        with pytest.raises(LookupError):
            fake.wait_request(1, 0)


# ── HTTP ──


def test_other_paths_are_answered_and_recorded(fake: FakeModel, client: Client) -> None:
    client.send("HEAD", "/")
    assert client.head() == 200
    client.send("GET", "/")
    assert client.answer() == (200, {})
    client.send("GET", "/v1/models?limit=1000")
    assert client.answer()[1]["data"][0]["type"] == "model"
    client.send("POST", "/v1/messages/count_tokens", {"messages": ["x" * 389]})
    assert client.answer() == (200, {"input_tokens": 102})
    for method, path in [("GET", "/v1/messages"), ("POST", "/api/event_logging/batch"), ("PUT", "/")]:
        client.send(method, path, {})
        status, body = client.answer()
        assert status == 404
        assert body == {
            "type": "error",
            "error": {"type": "not_found_error", "message": f"there is no {method} {path}"},
        }
    assert outcomes(fake) == [*["done"] * 4, *["http_404"] * 3]
    assert [r.path for r in fake.requests][2:5] == ["/v1/models", "/v1/messages/count_tokens", "/v1/messages"]
    assert {r.play for r in fake.requests} == {None}


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"[]",
        b"",
        pytest.param(b"[" * 100_000, id="nested"),
        pytest.param({"tools": TOOLS}, id="no messages"),
        pytest.param({"tools": TOOLS, "messages": []}, id="empty messages"),
        pytest.param({"tools": TOOLS, "messages": ["hello"]}, id="a message that is a string"),
        pytest.param({"tools": TOOLS, "messages": [{"role": "user", "content": 5}]}, id="content that is a number"),
        pytest.param({"tools": TOOLS, "messages": [{"role": "user", "content": ["x"]}]}, id="a block that is a string"),
    ],
)
def test_malformed_body_is_refused_and_the_connection_lives(client: Client, body: object) -> None:
    client.send("POST", "/v1/messages", body)
    status, answer = client.answer()
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
    assert client.says("@@text alive") == "alive"


def test_pipelined_requests_are_answered_in_order(client: Client) -> None:
    client.ask("@@text one")
    client.ask("@@text two")
    assert said(client.stream()) == "one"
    assert said(client.stream()) == "two"


def test_connection_is_closed_on_request(client: Client) -> None:
    client.send("POST", "/v1/messages", request("@@text bye"), Connection="close")
    assert said(client.stream()) == "bye"
    assert client.headers["connection"] == "close"
    assert client.is_over()


def test_expect_continue_is_honoured(client: Client) -> None:
    body = json.dumps(request("@@text hello")).encode()
    length = str(len(body))
    client.send("POST", "/v1/messages", None, **{"Content-Length": length, "Expect": "100-continue"})
    assert client.head() == 100
    client.sock.sendall(body)
    assert said(client.stream()) == "hello"


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"hello\r\n\r\n", 400),
        (b"GET / HTTP/1.0\r\n\r\n", 505),
        (b"GET / HTTP/2\r\n\r\n", 505),
        (b"GET / HTTP/1.1\r\nno colon\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nA : b\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nA: b\r\na: b\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: 33554433\r\n\r\n", 413),
        (b"POST / HTTP/1.1\r\nContent-Length: 9999999999999\r\n\r\n", 413),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 411),
        pytest.param(b"GET / HTTP/1.1\r\nA: " + b"x" * (1 << 16) + b"\r\n\r\n", 431, id="long head"),
        pytest.param(b"GET / HTTP/1.1\r\nA: " + b"x" * (1 << 17), 431, id="endless head"),
    ],
)
def test_malformed_request_is_answered_and_the_connection_closed(client: Client, raw: bytes, status: int) -> None:
    client.sock.sendall(raw)
    answer, body = client.answer()
    assert answer == status
    assert body["type"] == "error"
    assert client.headers["connection"] == "close"
    assert client.is_over()


def test_body_is_limited_in_size(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    body = json.dumps(request("@@text fits")).encode()
    monkeypatch.setattr(http1, "BODY_BYTES_MAX", len(body))
    client.send("POST", "/v1/messages", body)
    assert said(client.stream()) == "fits"
    # The server answers although it does not read the body.
    client.send("POST", "/v1/messages", body + b" ")
    status, answer = client.answer()
    assert (status, answer["error"]["type"]) == (413, "request_too_large")
    assert client.is_over()


def test_connections_are_limited_in_number(fake: FakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "CONNECTIONS_MAX", 2)
    with Client(fake.url) as first, Client(fake.url) as second:
        # An answer shows that the connection is accepted.
        assert first.says("hello") == "ok"
        assert second.says("hello") == "ok"
        with Client(fake.url) as third:
            assert third.head() == 503
            assert third.is_over()
        assert first.says("hello") == "ok"


# ── Environment and log ──


def test_env_is_complete_and_repeatable(fake: FakeModel, tmp_path: Path) -> None:
    home = tmp_path / "home"
    environment = fake.env(home)
    assert environment["ANTHROPIC_BASE_URL"] == fake.url
    assert environment["ANTHROPIC_API_KEY"].startswith("fake")
    assert environment["HOME"] == str(home)
    for name in ("TMPDIR", "CLAUDE_CODE_TMPDIR"):
        assert Path(environment[name]).is_dir()
        assert Path(environment[name]).is_relative_to(home)
    assert environment["PATH"] == "/usr/local/bin:/usr/bin:/bin"
    switches = {name for name, value in environment.items() if value == "1"}
    assert switches == {
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC",
        "DISABLE_TELEMETRY",
        "DISABLE_AUTOUPDATER",
        "DISABLE_ERROR_REPORTING",
        "IS_SANDBOX",
    }
    # Again, for an agent that is restarted.
    assert fake.env(str(home)) == environment


def test_log_has_begin_and_end_of_each_request(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with FakeModel(log=log) as fake, Client(fake.url) as client:
        client.says("@@text hello")
        fake.requests[0].wait_outcome(SECONDS_MAX)
    begun, over = (json.loads(line) for line in log.read_text().splitlines())
    assert (begun["request"], begun["path"], begun["step"]) == (1, "/v1/messages", ["@@text hello"])
    assert begun["body"] == request("@@text hello")
    assert (over["request"], over["outcome"]) == (1, "done")


def test_taken_port_raises_and_leaves_nothing(fake: FakeModel) -> None:
    port = int(fake.url.rpartition(":")[2])
    with pytest.raises(OSError, match="in use"), FakeModel(port=port):
        pass


def test_unwritable_log_raises_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), FakeModel(log=tmp_path / "no" / "log"):
        pass


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_fake_model_runs_as_a_process_and_ends_by_signal(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "banksman.testing.fake_model", "--port", "0", "--log", str(tmp_path / "log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            with Client(url) as client, Client(url) as hanging:
                hanging.ask("@@hang")
                assert client.says("@@text hello") == "hello"
                process.send_signal(number)
                assert process.wait(SECONDS_MAX) == 0
        finally:
            process.kill()
    assert '"outcome": "done"' in (tmp_path / "log").read_text()
