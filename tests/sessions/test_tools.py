"""Tool server (MCP): answers to each message, return values of tools, and failures as results."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from banksman.errors import UsageError
from banksman.sessions import tools
from banksman.sessions.tools import RESULT_BYTES_MAX, VERSIONS, Tool, ToolServer, tool
from banksman.testing import sim

ANY = {"type": "object"}
ADD = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


def add(arguments: Mapping[str, Any]) -> str:
    return str(arguments["a"] + arguments["b"])


IT = Tool("it", "does it", ANY, add)


def server(call: Any = add, schema: Mapping[str, Any] = ANY, **how: Any) -> ToolServer:
    return ToolServer([Tool("it", "does it", schema, call)], **how)


def request(method: str, id: Any = 1, **params: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": id, "method": method, "params": params}


def calling(id: Any = 1, **arguments: Any) -> dict[str, Any]:
    return request("tools/call", id, name="it", arguments=arguments)


async def called(served: ToolServer, **arguments: Any) -> dict[str, Any]:
    """Return the result of a call, and check that it is valid JSON."""
    response = await served.serve(calling(**arguments))
    assert response is not None
    assert response["id"] == 1
    assert json.loads(json.dumps(response, allow_nan=False).encode()) == response
    return response["result"]


async def error(served: ToolServer, message: Any) -> tuple[int, Any]:
    response = await served.serve(message)
    assert response is not None
    assert response["jsonrpc"] == "2.0"
    assert "result" not in response
    assert response["error"]["message"]
    return response["error"]["code"], response["id"]


def said(result: Mapping[str, Any]) -> str:
    """Return the reason of a failed call."""
    assert result["isError"] is True
    (block,) = result["content"]
    assert block["type"] == "text"
    return block["text"]


# -- construction ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "made",
    [
        ("", "d", ANY, add),
        ("a b", "d", ANY, add),
        ("ä", "d", ANY, add),
        ("a\n", "d", ANY, add),
        ("x" * 65, "d", ANY, add),
        (3, "d", ANY, add),
        ("a", None, ANY, add),
        ("a", "half \ud800", ANY, add),
        ("a", "d", ANY, None),
        ("a", "d", None, add),
        ("a", "d", True, add),
        ("a", "d", {}, add),
        ("a", "d", {"type": "string"}, add),
        ("a", "d", {"type": ["object", "null"]}, add),
        ("a", "d", {"type": "object", "propertys": {}}, add),
        ("a", "d", {"type": "object", "default": object()}, add),
    ],
)
def test_tool_refuses_invalid_arguments(made: tuple[Any, Any, Any, Any]) -> None:
    with pytest.raises(UsageError):
        Tool(*made)


@pytest.mark.parametrize("tools_given", [[IT, Tool("it", "other", ANY, add)], [add]])
def test_tool_server_refuses_invalid_tools(tools_given: Any) -> None:
    with pytest.raises(UsageError):
        ToolServer(tools_given)


@pytest.mark.parametrize("how", [{"name": "two words"}, {"seconds": 0}, {"seconds": float("inf")}, {"seconds": None}])
def test_tool_server_refuses_invalid_options(how: Any) -> None:
    with pytest.raises(UsageError):
        ToolServer([IT], **how)


def test_tool_keeps_schema_it_was_made_with() -> None:
    properties: dict[str, Any] = {"a": {"type": "integer"}}
    made = Tool("x" * 64, "", MappingProxyType({"type": "object", "properties": properties}), add)
    properties["a"] = 3
    assert made.schema == {"type": "object", "properties": {"a": {"type": "integer"}}}


def test_tool_decorator_makes_tool_of_function() -> None:
    @tool(description="adds", schema=ADD)
    def plus(arguments: Mapping[str, Any]) -> str:
        return add(arguments)

    assert (plus.name, plus.description, plus.schema) == ("plus", "adds", ADD)
    assert plus.call({"a": 1, "b": 2}) == "3"
    assert tool(description="", schema=ANY, name="other")(add).name == "other"
    with pytest.raises(UsageError):
        tool(description="", schema=ANY)(lambda arguments: None)


# -- messages --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("wanted", "spoken"),
    [
        *((version, version) for version in VERSIONS),
        ("1999-01-01", VERSIONS[-1]),
        (None, VERSIONS[-1]),
        ([], VERSIONS[-1]),
    ],
)
async def test_tool_server_answers_initialize(wanted: Any, spoken: str) -> None:
    response = await server(name="mine").serve(request("initialize", "a", protocolVersion=wanted, capabilities={}))
    assert response == {
        "jsonrpc": "2.0",
        "id": "a",
        "result": {
            "protocolVersion": spoken,
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "mine", "version": "0"},
        },
    }


async def test_tool_server_lists_tools_in_order() -> None:
    served = ToolServer([Tool("add", "adds", ADD, add), Tool("any", "", ANY, add)])
    response = await served.serve({"jsonrpc": "2.0", "id": 0, "method": "tools/list"})
    assert response is not None
    assert response["result"] == {
        "tools": [
            {"name": "add", "description": "adds", "inputSchema": ADD},
            {"name": "any", "description": "", "inputSchema": ANY},
        ]
    }
    assert repr(served) == "<ToolServer tools: add, any>"


async def test_tool_server_answers_ping() -> None:
    assert await server().serve(request("ping")) == {"jsonrpc": "2.0", "id": 1, "result": {}}


@pytest.mark.parametrize(
    "message",
    [
        {"jsonrpc": "2.0", "method": "notifications/initialized"},
        {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 7}},
        {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": []}},
        {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": [7]},
        {"jsonrpc": "2.0", "method": "notifications/of/tomorrow", "params": {}},
        # A call without an id is not made, because it would get no answer.
        {"jsonrpc": "2.0", "method": "tools/call", "params": {"name": "it"}},
        {"jsonrpc": "2.0", "id": 1, "result": {}},
        {"jsonrpc": "2.0", "id": 1, "error": {"code": 1, "message": "x"}},
    ],
)
async def test_tool_server_does_not_answer_notifications(message: Any) -> None:
    made: list[Any] = []
    assert await server(made.append).serve(message) is None
    assert not made


@pytest.mark.parametrize(
    ("message", "code", "id"),
    [
        ([], -32600, None),
        (None, -32600, None),
        ({}, -32600, None),
        ({"id": 1, "method": "ping"}, -32600, 1),
        ({"jsonrpc": "1.0", "id": "a", "method": "ping"}, -32600, "a"),
        ({"jsonrpc": "2.0", "id": 1}, -32600, 1),
        ({"jsonrpc": "2.0"}, -32600, None),
        ({"jsonrpc": "2.0", "id": 1, "method": 3}, -32600, 1),
        ({"jsonrpc": "2.0", "id": None, "method": "ping"}, -32600, None),
        ({"jsonrpc": "2.0", "id": True, "method": "ping"}, -32600, None),
        ({"jsonrpc": "2.0", "id": [1], "method": "ping"}, -32600, None),
        (request("resources/list"), -32601, 1),
        (request("notifications/initialized"), -32601, 1),
        ({"jsonrpc": "2.0", "id": 1, "method": "ping", "params": [1]}, -32602, 1),
        (request("tools/call"), -32602, 1),
        (request("tools/call", name=["it"]), -32602, 1),
        (request("tools/call", name="other"), -32602, 1),
        (request("tools/call", name="it", arguments=[1]), -32602, 1),
    ],
)
async def test_tool_server_answers_invalid_message_with_error_code(message: Any, code: int, id: Any) -> None:
    made: list[Any] = []
    assert await error(server(made.append), message) == (code, id)
    assert not made


_json: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
_methods = st.sampled_from(["initialize", "ping", "tools/list", "tools/call", "notifications/cancelled", "x"]) | _json
_params = (
    st.fixed_dictionaries({}, optional={"name": st.just("it") | _json, "arguments": _json, "requestId": _json}) | _json
)
_messages = st.fixed_dictionaries(
    {}, optional={"jsonrpc": st.just("2.0"), "id": _json, "method": _methods, "params": _params}
)


@given(message=_messages | _json)
def test_tool_server_answers_every_request_and_nothing_else(message: Any) -> None:
    response = asyncio.run(server(dict).serve(message))
    is_request = isinstance(message, dict) and "id" in message
    assert response is None or (response["jsonrpc"] == "2.0" and ("result" in response) != ("error" in response))
    if response is not None and "result" in response:
        assert is_request
        assert response["id"] == cast(dict[str, Any], message)["id"]


# -- return values ---------------------------------------------------------------------------------------------------
TEXT = {"type": "text", "text": "hello"}
IMAGE = {"type": "image", "data": "AAAA", "mimeType": "image/png"}


def _plainly(answer: Any) -> Any:
    def call(arguments: Mapping[str, Any]) -> Any:
        return answer

    return call


def _async(answer: Any) -> Any:
    async def call(arguments: Mapping[str, Any]) -> Any:
        await asyncio.sleep(0)
        return answer

    return call


@pytest.mark.parametrize("kind", [_plainly, _async])
@pytest.mark.parametrize(
    ("answer", "content", "structured"),
    [
        ("hello", [TEXT], None),
        ("", [{"type": "text", "text": ""}], None),
        ([TEXT, IMAGE], [TEXT, IMAGE], None),
        ((MappingProxyType(TEXT),), [TEXT], None),
        (None, "null", None),
        (3, "3", None),
        ([], "[]", None),
        (["ä"], '["ä"]', None),
        ({"a": (1, None)}, '{"a": [1, null]}', {"a": [1, None]}),
        ({}, "{}", {}),
        # One item that is not content makes the whole list a plain value.
        ([TEXT, {"type": "bug"}], json.dumps([TEXT, {"type": "bug"}]), None),
        ([{"type": "text"}], '[{"type": "text"}]', None),
        ([{"type": ["text"], "text": "a"}], '[{"type": ["text"], "text": "a"}]', None),
        (TEXT, json.dumps(TEXT), TEXT),
    ],
)
async def test_tool_return_value_becomes_content(kind: Any, answer: Any, content: Any, structured: Any) -> None:
    result = await called(server(kind(answer)))
    expected = [{"type": "text", "text": content}] if isinstance(content, str) else content
    assert result == {"content": expected, **({} if structured is None else {"structuredContent": structured})}


async def test_tool_gets_arguments_of_agent() -> None:
    got: list[Mapping[str, Any]] = []
    served = server(got.append)
    await called(served, a=1)
    await served.serve(request("tools/call", name="it"))
    await served.serve(request("tools/call", name="it", arguments=None))
    assert got == [{"a": 1}, {}, {}]


async def test_tool_is_not_called_with_unfitting_input() -> None:
    made: list[Any] = []
    served = server(made.append, ADD)
    assert said(await called(served, a=1)) == "the input does not match the schema: b: is missing"
    assert (
        said(await called(served, a=1, b="2"))
        == "the input does not match the schema: b: must be a whole number, not '2'"
    )
    assert not made
    assert "isError" not in await called(served, a=1, b=2)


# -- failures --------------------------------------------------------------------------------------------------------
def _raises(exc: BaseException) -> Any:
    def call(arguments: Mapping[str, Any]) -> None:
        raise exc

    return call


def _itself() -> list[Any]:
    held: list[Any] = []
    held.append(held)
    return held


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (_raises(RuntimeError("I am broken")), "the tool failed: RuntimeError: I am broken"),
        (_raises(RuntimeError("half \ud800")), "the tool failed: RuntimeError: half ?"),
        (_raises(TimeoutError("of its own")), "the tool failed: TimeoutError: of its own"),
        (_raises(asyncio.CancelledError()), "the tool was cancelled"),
        (_plainly(object()), "a object is not a JSON value"),
        (_plainly({"a": {1, 2}}), "a set is not a JSON value"),
        (_plainly(b"bytes"), "a bytes is not a JSON value"),
        (_plainly(float("inf")), "JSON"),
        (_plainly(_itself()), "Circular"),
        (_plainly("half \ud800"), "surrogates not allowed"),
        (_plainly([{"type": "text", "text": "\ud800"}]), "cannot send the value as JSON: UnicodeEncodeError"),
    ],
)
async def test_failing_tool_returns_error_result(call: Any, why: str, unreported: list[logging.LogRecord]) -> None:
    assert why in said(await called(server(call)))
    errors = [record for record in unreported if record.levelno >= logging.ERROR]
    assert len(errors) == 1
    assert errors[0].getMessage() in ("tool call failed (tool=it)", "tool call was cancelled (tool=it)")


async def test_tool_result_size_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert RESULT_BYTES_MAX == 4 << 20
    monkeypatch.setattr(tools, "RESULT_BYTES_MAX", 100)
    room = 100 - len(json.dumps({"content": [{"type": "text", "text": ""}]}))
    assert "isError" not in await called(server(_plainly("x" * room)))
    assert "the result is too large: 101 bytes" in said(await called(server(_plainly("x" * (room + 1)))))
    # The limit counts bytes, not characters, and a mapping is sent twice.
    assert "the result is too large" in said(await called(server(_plainly("ä" * room))))
    assert "the result is too large" in said(await called(server(_plainly({"a": "x" * (room - 15)}))))


def test_slow_tool_is_cancelled_with_error_result(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        loop, over = asyncio.get_running_loop(), list[float]()

        async def call(arguments: Mapping[str, Any]) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                over.append(loop.time())

        served = server(call)
        begun = loop.time()
        assert said(await called(served)) == "the tool did not answer within 600 seconds"
        await served.wait_ended()
        assert over == [begun + 600]
        assert "within 1.5 seconds" in said(await called(server(call, seconds=1.5)))

    sim.replay(scenario, "")
    assert "tool call did not answer within 600 seconds (tool=it)" in caplog.text


def _waiting(started: asyncio.Event, ended: list[str]) -> Any:
    async def call(arguments: Mapping[str, Any]) -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("ended")

    return call


async def test_cancelled_serve_cancels_tool_call() -> None:
    started, ended = asyncio.Event(), list[str]()
    served = server(_waiting(started, ended))
    task = asyncio.ensure_future(served.serve(calling()))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await served.wait_ended()
    assert ended == ["ended"]


async def test_cancel_notification_ends_only_named_tool_call() -> None:
    started, ended = asyncio.Event(), list[str]()
    served = server(_waiting(started, ended))
    task = asyncio.ensure_future(served.serve(calling("a")))
    await started.wait()
    for other in ("b", 1, None):
        await served.serve({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": other}})
    await asyncio.sleep(0)
    assert not ended
    await served.serve({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": "a"}})
    response = await task
    assert response is not None
    assert said(response["result"]) == "the tool was cancelled"
    assert ended == ["ended"]


async def test_tool_calls_run_concurrently() -> None:
    both = asyncio.Barrier(2)

    async def call(arguments: Mapping[str, Any]) -> str:
        await both.wait()
        return arguments["name"]

    served = server(call)
    responses = await asyncio.gather(*(served.serve(calling(name, name=name)) for name in ("a", "b")))
    assert [(response or {})["id"] for response in responses] == ["a", "b"]
    assert [(response or {})["result"]["content"][0]["text"] for response in responses] == ["a", "b"]
