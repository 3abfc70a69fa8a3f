"""The four APIs of the fake model: every directive in each API, and the differences between them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from tests.testing.model_client import SECONDS_MAX, Client, Json
from tests.testing.model_spellings import SPELLINGS, Spelling, Turn

from banksman.testing.fake_model import FakeModel

# Any value works, because the server does not read it.
TOOLS = ["a tool"]
BOTH = pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])


@pytest.fixture
def fake() -> Iterator[FakeModel]:
    with FakeModel() as running:
        yield running


@pytest.fixture
def client(fake: FakeModel) -> Iterator[Client]:
    with Client(fake.url) as connected:
        yield connected


@pytest.fixture(params=list(SPELLINGS))
def api(request: pytest.FixtureRequest) -> Spelling:
    return SPELLINGS[request.param]


# ── Every directive in each API ──


def test_whole_answer_equals_the_streamed_one(api: Spelling, client: Client) -> None:
    script = '@@think hm\n@@text one \n@@text two\n@@tool run {"command": "ls"}\n@@tool look {"at": [1, {"é": null}]}'
    streamed = api.ask(client, ("user", script))
    whole = api.ask(client, ("user", script), stream=False)
    assert (streamed.text, streamed.thought) == ("one two", "hm")
    assert streamed.calls == [("run", {"command": "ls"}), ("look", {"at": [1, {"é": None}]})]
    assert len(streamed.ids) == 2
    assert streamed.end == api.ends[1]
    # The bodies differ by a character or two, because `stream` is true in one of them.
    assert abs(streamed.tokens[0] - whole.tokens[0]) <= 1
    whole.tokens = (streamed.tokens[0], whole.tokens[1])
    assert streamed.same() == whole.same()
    assert not streamed.ids & whole.ids


@BOTH
def test_text_reply_ends_with_the_text_stop_reason(api: Spelling, client: Client, stream: bool) -> None:
    said = api.ask(client, ("user", "@@text hello"), stream=stream)
    assert (said.text, said.calls, said.end) == ("hello", [], api.ends[0])
    assert said.tokens[0] > 10
    assert said.tokens[1] == 1 + len("hello") // 4


def test_script_plays_one_step_per_call_and_then_says_ok(api: Spelling, client: Client, fake: FakeModel) -> None:
    script = "@@text going\n@@tool run {}\n@@tool run {}\n@@text between\n@@next\n@@text last"
    # Text and two calls are one answer of the model. Tool results are not answers.
    turns: list[Turn] = [("user", "hello"), ("model", "hi"), ("user", script)]
    assert api.ask(client, *turns).text == "going"
    turns += [("model", "going"), ("call", "run"), ("call", "run"), ("result", "@@text no"), ("result", "1")]
    assert api.ask(client, *turns).text == "between"
    turns += [("model", "between"), ("result", "2")]
    assert api.ask(client, *turns).text == "last"
    turns += [("model", "last"), ("user", "and now?")]
    assert api.ask(client, *turns).text == "ok"
    assert [(request.api, request.play) for request in fake.requests] == [(api.name, n) for n in range(1, 5)]
    assert fake.requests[1].step == ("@@text between",)


@BOTH
def test_slow_big_and_sleep_produce_their_text(api: Spelling, client: Client, stream: bool) -> None:
    said = api.ask(client, ("user", "@@slow 3 0.001\n@@sleep 0.001\n@@big 10000\n@@slow 2 0 x"), stream=stream)
    assert said.text[:18] + said.text[-2:] == "tick1 tick2 tick3 xx"
    assert len(said.text) == 18 + 10_000 + 2


@BOTH
def test_request_without_tools_plays_nothing(api: Spelling, client: Client, fake: FakeModel, stream: bool) -> None:
    api.send(client, ("user", "@@error 500"), stream=stream, has_tools=False)
    if stream:
        assert client.head() == 200
        assert api.stream(client).text == "ok"
    else:
        assert api.whole(client.answer()[1]).text == "ok"
    (request,) = fake.requests
    assert (request.api, request.play) == (api.name, None)


@pytest.mark.parametrize("status", [400, 429, 500, 502])
@BOTH
def test_error_directive_has_the_shape_of_its_api(api: Spelling, client: Client, status: int, stream: bool) -> None:
    prompt = ("user", f"@@error {status} 1\n@@text better")
    api.send(client, prompt, stream=stream)
    given, body = client.answer()
    assert (given, api.kind(body)) == (status, api.kinds[status])
    assert body["error"]["message"] == f"scripted: @@error {status} 1"
    assert api.ask(client, prompt, stream=stream).text == "better"


def test_overflow_has_the_words_of_the_real_model(api: Spelling, client: Client) -> None:
    api.send(client, ("user", "@@overflow"))
    status, body = client.answer()
    assert status == 400
    words = {"anthropic": "prompt is too long", "gemini": "input token count"}
    assert words.get(api.name, "exceeds the context window") in body["error"]["message"]
    kinds = {"responses": "context_length_exceeded", "chat": "context_length_exceeded"}
    assert api.kind(body) == kinds.get(api.name, api.kinds[400])


def test_limit_has_the_shape_of_its_api(api: Spelling, client: Client) -> None:
    api.send(client, ("user", "@@limit 60"))
    status, body = client.answer()
    assert (status, client.headers["retry-after"]) == (429, "60")
    if api.name == "responses":
        assert body["error"]["type"] == "usage_limit_reached"
        assert str(body["error"]["resets_at"]) == client.headers["x-codex-primary-reset-at"]
        assert client.headers["x-codex-primary-used-percent"] == "100"


def test_sseerror_ends_the_stream_with_an_error_event(api: Spelling, client: Client, fake: FakeModel) -> None:
    api.send(client, ("user", f"@@text so \n@@sseerror {api.kinds[429]}"))
    assert client.head() == 200
    event = json.loads(list(client.raw_events())[-1].split(b"data: ")[1])
    if api.name == "responses":
        assert (event["type"], event["response"]["status"]) == ("response.failed", "failed")
        event = event["response"]
    assert api.kind(event) == api.kinds[429]
    assert event["error"]["message"].startswith("scripted: ")
    assert fake.requests[0].wait_outcome(SECONDS_MAX) == f"sse_{api.kinds[429]}"


def test_sseerror_is_a_status_without_a_stream(api: Spelling, client: Client) -> None:
    for kind, status in ((api.kinds[429], 429), ("nobody_knows_it", 500)):
        api.send(client, ("user", f"@@text so \n@@sseerror {kind}"), stream=False)
        given, body = client.answer()
        assert (given, api.kind(body)) == (status, kind)


@BOTH
def test_drop_cuts_an_answer(api: Spelling, client: Client, fake: FakeModel, stream: bool) -> None:
    api.send(client, ("user", "@@text half\n@@drop"), stream=stream)
    assert client.head() == 200
    with pytest.raises((EOFError, ConnectionResetError)):
        list(client.raw_events()) if stream else client.answer()
    assert fake.requests[0].wait_outcome(SECONDS_MAX) == "dropped"


def test_hang_sends_nothing_and_stall_sends_the_start(api: Spelling, fake: FakeModel) -> None:
    with Client(fake.url) as hanging, Client(fake.url) as stalling:
        api.send(hanging, ("user", "@@hang"))
        api.send(stalling, ("user", "@@stall"))
        assert stalling.head() == 200
        if api.name != "gemini":  # Gemini's streams have no start event.
            assert next(stalling.raw_events())
        hung = fake.wait_request(1, SECONDS_MAX)
        assert hung.outcome is None
        assert not hanging.buffer
    # Both clients disconnected, and the server noticed.
    assert [fake.wait_request(n, SECONDS_MAX).wait_outcome(SECONDS_MAX) for n in (1, 2)] == ["client_gone"] * 2


# ── Content that is not a user prompt ──


@pytest.mark.parametrize(
    ("turns", "heard"),
    [
        pytest.param([("user", "@@text old"), ("user", "@@text new")], "new", id="two prompts, the first unanswered"),
        pytest.param([("user", "@@text old"), ("user", "plain")], "ok", id="plain words after a script"),
        pytest.param(
            [("user", "@@text old"), ("user", "<turn_aborted>\nby the user\n</turn_aborted>"), ("user", "plain")],
            "ok",
            id="plain words after an interrupt",
        ),
        pytest.param([("user", "@@text new"), ("user", "<note>\nof the agent's\n</note>")], "new", id="a frame behind"),
        pytest.param([("user", "<note>\n@@text framed\n</note>")], "framed", id="a script in a frame"),
        pytest.param([("user", "@@text new"), ("user", "<a>plain</b>")], "ok", id="two tags are no frame"),
        pytest.param([("user", "@@text one\n@@next\n@@text two"), ("model", "one")], "two", id="no tool between"),
        pytest.param([("model", "hello")], "ok", id="no user at all"),
    ],
)
def test_script_is_the_last_user_message(api: Spelling, client: Client, turns: list[Turn], heard: str) -> None:
    assert api.ask(client, *turns).text == heard


def test_codex_developer_message_is_not_taken_as_a_directive(client: Client) -> None:
    body = SPELLINGS["responses"].body([("user", "@@text hello")])
    patch = {"type": "input_text", "text": "*** Update File: x\n@@ class X\n"}
    body["input"].append({"type": "message", "role": "developer", "content": [patch]})
    body["input"].append({"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "…"})
    client.send("POST", "/v1/responses", body)
    # Reasoning counts as an answer of the model, so the script is used up.
    assert _response_text(client.answer()[1]) == "ok"
    del body["input"][-1]
    client.send("POST", "/v1/responses", body)
    assert _response_text(client.answer()[1]) == "hello"


def test_responses_input_may_be_one_string(client: Client) -> None:
    client.send("POST", "/v1/responses", {"tools": TOOLS, "input": "@@text hello"})
    assert _response_text(client.answer()[1]) == "hello"


def test_gemini_message_may_have_several_texts(client: Client) -> None:
    spelling = SPELLINGS["gemini"]
    body = spelling.body([("user", "@@text hello")])
    body["contents"][0]["parts"].insert(0, {"text": "<session_context>\nToday is …\n</session_context>"})
    body["contents"][0]["parts"].append({"text": "<session_context>\nmore\n</session_context>"})
    client.send("POST", spelling.path(False), body)
    assert spelling.whole(client.answer()[1]).text == "hello"


def test_gemini_text_beside_a_tool_result_is_not_a_prompt(client: Client) -> None:
    spelling = SPELLINGS["gemini"]
    body = spelling.body([("user", "@@tool run {}\n@@text then"), ("call", "run"), ("result", "1")])
    body["contents"][-1]["parts"].append({"text": "The user changed a file meanwhile."})
    client.send("POST", spelling.path(False), body)
    assert spelling.whole(client.answer()[1]).text == "then"


def test_chat_stream_sends_usage_only_if_requested(client: Client) -> None:
    body = {**SPELLINGS["chat"].body([("user", "@@text hello")]), "stream": True, "stream_options": None}
    client.send("POST", "/v1/chat/completions", body)
    assert client.head() == 200
    chunks = [chunk for chunk in client.chunks() if isinstance(chunk, dict)]
    assert all(chunk["choices"] for chunk in chunks)
    assert not any("usage" in chunk for chunk in chunks)


def _response_text(response: Json) -> str:
    return "".join(part["text"] for item in response["output"] for part in item["content"])


# ── The events of a stream ──


def test_responses_stream_has_the_events_of_the_real_api(client: Client) -> None:
    SPELLINGS["responses"].send(client, ("user", '@@think hm\n@@text one \n@@text two\n@@tool run {"a": 1}'))
    assert client.head() == 200
    events = list(client.events())
    assert [event["type"].removeprefix("response.") for event in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "reasoning_summary_part.added",
        "reasoning_summary_text.delta",
        "reasoning_summary_text.done",
        "reasoning_summary_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    # Each event of an item names it by index and by id.
    places = [event["output_index"] for event in events if "output_index" in event]
    assert places == sorted(places)
    finished = events[-1]["response"]["output"]
    for event in events:
        if "output_index" in event:
            identity = event.get("item_id") or event["item"]["id"]
            assert identity == finished[event["output_index"]]["id"]
    assert events[0]["response"]["output"] == []
    assert events[0]["response"]["usage"] is None


def test_chat_stream_sends_a_call_in_two_pieces(client: Client) -> None:
    SPELLINGS["chat"].send(client, ("user", '@@tool run {"a": 1}'))
    assert client.head() == 200
    chunks: list[Any] = list(client.chunks())
    assert {chunk["object"] for chunk in chunks[:-1]} == {"chat.completion.chunk"}
    first, second = (c["choices"][0]["delta"]["tool_calls"][0] for c in chunks[1:3])
    assert (first["function"], second["function"]) == ({"name": "run", "arguments": ""}, {"arguments": '{"a": 1}'})
    assert "id" not in second


def test_gemini_marks_thoughts_and_signs_calls(client: Client) -> None:
    SPELLINGS["gemini"].send(client, ("user", "@@think hm\n@@tool run {}"))
    assert client.head() == 200
    parts = [chunk["candidates"][0]["content"]["parts"][0] for chunk in client.chunks() if isinstance(chunk, dict)]
    assert parts[0] == {"text": "hm", "thought": True}
    assert parts[1]["thoughtSignature"]
    assert parts[2] == {"text": ""}


# ── Errors and other routes ──


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"tools": TOOLS}),
        ("/v1/responses", {"tools": TOOLS, "input": []}),
        ("/v1/responses", {"tools": TOOLS, "input": [{"type": 5}]}),
        ("/v1/responses", {"tools": TOOLS, "input": [{"role": "user", "content": 5}]}),
        ("/v1/chat/completions", {"tools": TOOLS, "messages": []}),
        ("/v1/chat/completions", {"tools": TOOLS, "messages": ["hello"]}),
        ("/v1/chat/completions", {"tools": TOOLS, "messages": [{"role": "user"}]}),
        ("/v1beta/models/m:generateContent", {"tools": TOOLS, "contents": {}}),
        ("/v1beta/models/m:generateContent", {"tools": TOOLS, "contents": [{"parts": "hello"}]}),
        ("/v1/chat/completions", b"{"),
        ("/v1beta/models/m:generateContent", b"[]"),
        ("/v1/responses", {"tools": TOOLS, "input": "@@nonsense"}),
    ],
)
def test_malformed_body_is_refused_and_the_connection_lives(client: Client, path: str, body: object) -> None:
    spelling = next(s for s in SPELLINGS.values() if s.path(False) == path)
    client.send("POST", path, body)
    status, answer = client.answer()
    assert (status, spelling.kind(answer)) == (400, spelling.kinds[400])
    assert spelling.ask(client, ("user", "@@text alive")).text == "alive"


def test_other_paths_are_answered(fake: FakeModel, client: Client) -> None:
    def answer(method: str, path: str, body: object = None) -> Json:
        client.send(method, path, body)
        status, answer = client.answer()
        assert status == 200
        return answer

    listed = answer("GET", "/v1/models")
    assert (listed["object"], {model["object"] for model in listed["data"]}) == ("list", {"model"})
    assert answer("GET", "/v1beta/models?pageSize=50")["models"][0]["name"].startswith("models/")
    assert answer("POST", "/v1beta/models/m:countTokens", {"contents": ["x" * 386]}) == {"totalTokens": 102}
    compacted = answer("POST", "/v1/responses/compact", {"input": "@@text no"})
    assert compacted["object"] == "response.compaction"
    assert _response_text(compacted) == "ok"
    assert {request.api for request in fake.requests} == {None}


def test_path_prefix_is_ignored(client: Client, fake: FakeModel) -> None:
    for spelling in SPELLINGS.values():
        body = {**spelling.body([("user", "@@text hello")]), "stream": False}
        client.send("POST", f"/some/where{spelling.path(False)}", body)
        assert spelling.whole(client.answer()[1]).text == "hello"
    assert [request.api for request in fake.requests] == list(SPELLINGS)
    for method, path in [("GET", "/v1/responses"), ("POST", "/v1/responses/x"), ("POST", "/v1beta/models/m:embed")]:
        client.send(method, path, {})
        assert client.answer()[0] == 404
