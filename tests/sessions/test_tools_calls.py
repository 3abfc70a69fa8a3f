"""Hooks and tools of the caller, called by an agent through its session: registered, answered, and ended with it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.sessions.helpers import Case, answers, opened, requesting, requests, touch

from banksman import Hook, Host, Kind, Session, Tool, UsageError
from banksman.core.session.questions import CALLBACKS_MAX
from banksman.core.wire.jsonrpc import INVALID_PARAMS, METHOD_NOT_FOUND
from banksman.sessions import hooks as run_hooks
from banksman.testing import fake_agent

INPUT = {"hook_event_name": "PreToolUse", "tool_name": "Bash", "tool_input": {"command": "ls"}}
GUARDS = {"onFailure": "block"}
RULES = {"matcher": None, "hookCallbackIds": ["banksman-rules"], **GUARDS}
TEXT = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}


def hooked(id: str = "hook-1") -> str:
    """Return the request by which the agent calls a hook and waits."""
    return requesting("hook_callback", callback_id=id, input=INPUT, tool_use_id="toolu_1")


def message(method: str, id: int | None = 1, **params: Any) -> str:
    """Return the request by which the agent sends a message to the tool server."""
    return requesting("mcp_message", server_name="banksman", message=rpc(method, id, **params))


def rpc(method: str, id: int | None = 1, **params: Any) -> dict[str, Any]:
    named = {} if id is None else {"id": id}
    return {"jsonrpc": "2.0", "method": method, **named, "params": params}


def calling(name: str = "it", **arguments: Any) -> str:
    return message("tools/call", name=name, arguments=arguments)


def outputs(case: Case) -> list[dict[str, Any]]:
    return [answer["response"] for answer in answers(case)]


def results(case: Case) -> list[dict[str, Any]]:
    return [output["mcp_response"]["result"] for output in outputs(case)]


def quiet(said: Mapping[str, Any]) -> None:
    """Hook without output."""


class Hanging:
    """Callable that begins, never returns, and reports its cancellation."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.over = asyncio.Event()

    async def __call__(self, given: Mapping[str, Any]) -> Any:
        self.begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.over.set()


# -- hooks -----------------------------------------------------------------------------------------------------------
async def test_hooks_are_registered_with_every_process(tmp_path: Path) -> None:
    hooks = {"PreToolUse": [Hook(quiet, matcher="Bash|Edit", seconds=5), quiet], "Stop": quiet}
    async with opened(tmp_path, memory=True, hooks=hooks) as case:
        assert (await case.answer("@@exit 1")).kind is Kind.FAILED
        assert (await case.answer(hooked("hook-3"))).kind is Kind.DONE
        first, second = requests(case, "initialize")
        assert first == second
        assert first["hooks"] == {
            "PreToolUse": [
                RULES,
                {"matcher": "Bash|Edit", "hookCallbackIds": ["hook-1"], "timeout": 10.0, **GUARDS},
                {"matcher": None, "hookCallbackIds": ["hook-2"], "timeout": 65.0, **GUARDS},
            ],
            "Stop": [{"matcher": None, "hookCallbackIds": ["hook-3"], "timeout": 65.0}],
        }
        assert outputs(case) == [{}]


async def test_hook_gets_agent_input_and_returns_output(tmp_path: Path) -> None:
    given: list[Mapping[str, Any]] = []

    async def hook(said: Mapping[str, Any]) -> dict[str, Any]:
        given.append(said)
        await asyncio.sleep(0)
        return {"hookSpecificOutput": {"hookEventName": "PreToolUse", "permissionDecision": "allow"}}

    async with opened(tmp_path, hooks={"PreToolUse": hook, "Stop": quiet}) as case:
        assert (await case.answer(f"{hooked()}\n{hooked('hook-2')}\n@@say went on")).text == "went on"
        assert given == [INPUT]
        allowed = {"hookEventName": "PreToolUse", "permissionDecision": "allow"}
        assert outputs(case) == [{"hookSpecificOutput": allowed}, {}]


def _raises(said: Mapping[str, Any]) -> None:
    raise RuntimeError("I am broken")


async def _hangs(said: Mapping[str, Any]) -> None:
    await asyncio.Event().wait()


async def _cancelled(said: Mapping[str, Any]) -> None:
    raise asyncio.CancelledError


def _nonsense(said: Mapping[str, Any]) -> Any:
    return "allow"


def _unsendable(given: Mapping[str, Any]) -> object:
    return object()


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (_raises, "the hook failed: RuntimeError: I am broken"),
        (_hangs, "the hook did not answer within 0.1 seconds"),
        (_cancelled, "the hook was cancelled"),
        (_nonsense, "a hook cannot return 'allow'"),
    ],
)
async def test_failing_hook_denies_only_where_agent_asks(tmp_path: Path, call: Any, why: str) -> None:
    hook = Hook(call, seconds=0.1)
    async with opened(tmp_path, hooks={"PreToolUse": hook, "PostToolUse": hook}) as case:
        assert (await case.answer(f"{hooked()}\n{hooked('hook-2')}\n@@say went on")).text == "went on"
        before, after = outputs(case)
        specific = before["hookSpecificOutput"]
        assert (specific["hookEventName"], specific["permissionDecision"]) == ("PreToolUse", "deny")
        assert why in specific["permissionDecisionReason"]
        assert after == {}
        assert (await case.answer("next")).text == "next"
        assert len(case.processes) == 1


async def test_unknown_hook_is_answered_with_error(tmp_path: Path) -> None:
    async with opened(tmp_path, hooks={"Stop": quiet}) as case:
        assert (await case.answer(f"{hooked('hook-7')}\n@@say went on")).text == "went on"
        (answer,) = answers(case)
        assert (answer["subtype"], "hook-7" in answer["error"]) == ("error", True)


@pytest.mark.parametrize("how", ["withdrawn", "exit", "close"])
async def test_hook_ends_with_its_request_process_or_session(tmp_path: Path, how: str) -> None:
    go, hanging = tmp_path / "go", Hanging()
    request = hooked().removeprefix("@@request ")
    async with opened(tmp_path, memory=True, hooks={"PreToolUse": hanging}) as case:
        rest = "@@exit 1" if how == "exit" else "@@say went on"
        turn = await case.ask(f"@@request_withdrawn {go} {request}\n{rest}" if how != "close" else hooked())
        await hanging.begun.wait()
        assert not hanging.over.is_set()
        if how == "close":
            await case.session.close()
        touch(go)
        outcome = await case.outcome(turn)
        await hanging.over.wait()
        assert answers(case) == []
        if how == "withdrawn":
            assert outcome.text == "went on"
            # No answer comes later either.
            assert (await case.answer("next")).text == "next"
            assert answers(case) == []


async def test_hook_ends_when_its_process_is_killed(tmp_path: Path) -> None:
    hanging = Hanging()
    async with opened(tmp_path, memory=True, hooks={"PreToolUse": hanging}) as case:
        raw = hooked().removeprefix("@@request ")
        frame = f'{{"type":"control_request","request_id":"r-1","request":{raw}}}'
        turn = await case.ask(f"@@raw {frame}\n@@wait {tmp_path / 'go'}\n@@kill 9")
        await hanging.begun.wait()
        touch(tmp_path / "go")
        assert (await case.outcome(turn)).kind is Kind.FAILED
        await hanging.over.wait()
        assert (await case.answer("next")).text == "next"


@pytest.mark.parametrize("does", ["ask", "outcome", "interrupt", "close"])
async def test_hook_may_use_its_session(tmp_path: Path, does: str) -> None:
    sessions: list[Session] = []
    later: list[Any] = []

    async def hook(said: Mapping[str, Any]) -> None:
        (session,) = sessions
        match does:
            case "ask":
                later.append(await session.ask("later"))
            case "outcome":
                # The hook waits for a turn, which waits for the turn of the hook. Only the timeout of the hook can end
                # this.
                later.append(await session.ask("later"))
                await later[0].outcome()
            case "interrupt":
                await session.interrupt()
            case _:
                await session.close()

    async with opened(tmp_path, hooks={"PreToolUse": Hook(hook, seconds=0.3)}) as case:
        sessions.append(case.session)
        turn = await case.ask(f"{hooked()}\n@@say went on")
        outcome = await case.outcome(turn)
        if does in ("ask", "outcome"):
            assert outcome.text == "went on"
            (output,) = outputs(case)
            assert (output == {}) is (does == "ask")
        elif does == "interrupt":
            assert outcome.kind is Kind.INTERRUPTED
        for each in later:
            assert (await case.outcome(each)).text == "later"
        await case.session.close()


async def test_close_does_not_wait_forever_for_hook(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(run_hooks, "ENDING_SECONDS_MAX", 0.05)
    begun, free = asyncio.Event(), asyncio.Event()

    async def stubborn(said: Mapping[str, Any]) -> None:
        begun.set()
        while not free.is_set():
            try:
                await free.wait()
            except asyncio.CancelledError:
                continue

    async with opened(tmp_path, hooks={"PreToolUse": stubborn}) as case:
        turn = await case.ask(hooked())
        await begun.wait()
        await case.session.close()
        await case.outcome(turn)
        has_warned = "callbacks still run after the end of their session (callbacks=1)" in caplog.text
        free.set()
        await case.session.wait_closed()
        assert has_warned


async def test_callbacks_beyond_maximum_are_refused(tmp_path: Path) -> None:
    hanging = Hanging()
    request = '{"type":"control_request","request_id":"r-%d","request":%s}'
    body = hooked().removeprefix("@@request ")
    # Each request is sent twice, and is one call.
    calls = [f"@@raw {request % (number, body)}" for number in range(CALLBACKS_MAX + 1) for _ in range(2)]
    async with opened(tmp_path, hooks={"PreToolUse": hanging}) as case:
        turn = await case.reaches("\n".join([*calls, "@@hang"]))
        await turn.interrupt()
        refused = [(answer["request_id"], answer["subtype"], answer["error"]) for answer in answers(case)]
        assert refused == [(f"r-{CALLBACKS_MAX}", "error", "too many callbacks are running")] * 2
        await case.outcome(turn)


@pytest.mark.parametrize("hooks", [{"PreTool": quiet}, {"PreToolUse": "quiet"}, [quiet]])
async def test_open_refuses_invalid_hooks(hooks: Any) -> None:
    async with Host() as host:
        with pytest.raises(UsageError):
            await host.open("claude", command=fake_agent.command(), hooks=hooks)
        assert host.sessions() == []


async def test_reopened_session_keeps_no_former_callbacks(tmp_path: Path) -> None:
    async with Host() as host:
        for _ in range(5):
            session = await host.open("claude", command=fake_agent.command(), name="x", hooks={"Stop": quiet})
            await (await session.ask("hi")).outcome()
        assert host.session("x")._here.callbacks._former == []  # pyright: ignore[reportPrivateUsage]


# -- tools -----------------------------------------------------------------------------------------------------------
def shout(given: Mapping[str, Any]) -> str:
    return str(given["text"]).upper()


async def shout_later(given: Mapping[str, Any]) -> str:
    await asyncio.sleep(0)
    return shout(given)


def tool(call: Any = shout, name: str = "it") -> Tool:
    return Tool(name, "makes it loud", TEXT, call)


async def test_tools_are_offered_with_every_process_and_listed(tmp_path: Path) -> None:
    async with opened(tmp_path, memory=True, tools=[tool(), tool(name="other")]) as case:
        assert (await case.answer("@@exit 1")).kind is Kind.FAILED
        hello = message("initialize", protocolVersion="2025-06-18", capabilities={})
        ready = message("notifications/initialized", None)
        assert (await case.answer(f"{hello}\n{ready}\n{message('tools/list', 2)}")).kind is Kind.DONE
        assert [each["sdkMcpServers"] for each in requests(case, "initialize")] == [["banksman"], ["banksman"]]
        introduced, acknowledged, listed = (output["mcp_response"] for output in outputs(case))
        assert introduced["result"]["serverInfo"]["name"] == "banksman"
        # MCP has no answer to a notification, but the agent waits for one.
        assert acknowledged == {"jsonrpc": "2.0", "id": 0, "result": {}}
        assert listed == {
            "jsonrpc": "2.0",
            "id": 2,
            "result": {
                "tools": [
                    {"name": name, "description": "makes it loud", "inputSchema": TEXT} for name in ("it", "other")
                ]
            },
        }


async def test_session_without_tools_offers_no_server(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        await case.answer("one")
        assert "sdkMcpServers" not in requests(case, "initialize")[0]


@pytest.mark.parametrize("call", [shout, shout_later])
async def test_tool_is_called(tmp_path: Path, call: Any) -> None:
    async with opened(tmp_path, tools=[tool(call)]) as case:
        assert (await case.answer(f"{calling(text='ship ahoy')}\n@@say went on")).text == "went on"
        assert results(case) == [{"content": [{"type": "text", "text": "SHIP AHOY"}]}]


@pytest.mark.parametrize(
    ("call", "given", "why"),
    [
        (_raises, {"text": "a"}, "the tool failed: RuntimeError: I am broken"),
        (_cancelled, {"text": "a"}, "the tool was cancelled"),
        (_unsendable, {"text": "a"}, "a object is not a JSON value"),
        (shout, {"text": 3}, "the input does not match the schema: text: must be text"),
        (shout, {}, "the input does not match the schema: text: is missing"),
    ],
)
async def test_failing_tool_call_is_reported_to_model(
    tmp_path: Path, call: Any, given: dict[str, Any], why: str
) -> None:
    async with opened(tmp_path, tools=[tool(call)]) as case:
        assert (await case.answer(f"{calling(**given)}\n@@say went on")).text == "went on"
        (result,) = results(case)
        assert result["isError"] is True
        assert why in result["content"][0]["text"]
        assert (await case.answer(calling(text="next"))).kind is Kind.DONE


async def test_call_of_unknown_tool_or_method_is_protocol_error(tmp_path: Path) -> None:
    async with opened(tmp_path, tools=[tool()]) as case:
        await case.answer(f"{calling('other', text='a')}\n{message('resources/list')}")
        unknown, method = (output["mcp_response"]["error"] for output in outputs(case))
        assert unknown["code"] == INVALID_PARAMS
        assert method["code"] == METHOD_NOT_FOUND


@pytest.mark.parametrize("tools", [[], [tool()]])
async def test_message_to_foreign_server_is_answered_with_error(tmp_path: Path, tools: list[Tool]) -> None:
    other = requesting("mcp_message", server_name="other", message=rpc("tools/list"))
    async with opened(tmp_path, tools=tools) as case:
        assert (await case.answer(f"{other}\n@@say went on")).text == "went on"
        (answer,) = answers(case)
        assert (answer["subtype"], "other" in answer["error"]) == ("error", True)


async def test_slow_tool_does_not_delay_other_calls(tmp_path: Path) -> None:
    go = asyncio.Event()

    async def slow(given: Mapping[str, Any]) -> str:
        await go.wait()
        return "at last"

    raw = calling("slow", text="a").removeprefix("@@request ")
    frame = f'{{"type":"control_request","request_id":"r-1","request":{raw}}}'
    async with opened(tmp_path, tools=[tool(slow, "slow"), tool()]) as case:
        assert (await case.answer(f"@@raw {frame}\n{calling(text='quick')}")).kind is Kind.DONE
        assert results(case) == [{"content": [{"type": "text", "text": "QUICK"}]}]
        go.set()
        # The turn of the request is over, and the request is still answered.
        assert (await case.answer(calling(text="next"))).kind is Kind.DONE
        assert results(case)[1] == {"content": [{"type": "text", "text": "at last"}]}


async def test_tool_call_is_cancelled_by_agent(tmp_path: Path) -> None:
    go, hanging = tmp_path / "go", Hanging()
    raw = calling("it", text="a").removeprefix("@@request ")
    frame = f'{{"type":"control_request","request_id":"r-1","request":{raw}}}'
    cancelled = message("notifications/cancelled", None, requestId=1)
    async with opened(tmp_path, tools=[tool(hanging)]) as case:
        turn = await case.ask(f"@@raw {frame}\n@@wait {go}\n{cancelled}\n@@say went on")
        await hanging.begun.wait()
        touch(go)
        assert (await case.outcome(turn)).text == "went on"
        await hanging.over.wait()
        await case.answer(message("ping", 2))
        # The call, its cancellation, and the later message each have a result.
        assert len(results(case)) == 3
        assert "the tool was cancelled" in str(results(case))


async def test_requests_before_handshake_reply_are_answered(tmp_path: Path) -> None:
    """The real agent lists the tools before it answers the handshake.

    Without an answer it would wait for half a minute.
    """
    steps = [hooked(), message("initialize", protocolVersion="2025-06-18"), message("tools/list", 2)]
    script = {"process": [f"at initialize {step.removeprefix('@@')}" for step in steps]}
    async with opened(tmp_path, script, hooks={"PreToolUse": quiet}, tools=[tool()]) as case:
        assert (await case.answer(calling(text="a"))).kind is Kind.DONE
        hook, introduced, listed, called = outputs(case)
        assert hook == {}
        assert introduced["mcp_response"]["result"]["protocolVersion"] == "2025-06-18"
        assert listed["mcp_response"]["result"]["tools"][0]["name"] == "it"
        assert called["mcp_response"]["result"]["content"][0]["text"] == "A"


@pytest.mark.parametrize("does", ["ask", "close"])
async def test_tool_may_use_its_session(tmp_path: Path, does: str) -> None:
    sessions: list[Session] = []
    later: list[Any] = []

    async def call(given: Mapping[str, Any]) -> str:
        if does == "close":
            await sessions[0].close()
        later.append(await sessions[0].ask("later"))
        return "asked"

    async with opened(tmp_path, tools=[tool(call)]) as case:
        sessions.append(case.session)
        turn = await case.ask(f"{calling(text='a')}\n@@say went on")
        outcome = await case.outcome(turn)
        if does == "ask":
            assert outcome.text == "went on"
            assert results(case) == [{"content": [{"type": "text", "text": "asked"}]}]
            assert (await case.outcome(later[0])).text == "later"
        await case.session.close()
        assert len(later) == (does == "ask")


@pytest.mark.parametrize("tools", [[shout], [tool(), tool()], "it"])
async def test_open_refuses_invalid_tools(tools: Any) -> None:
    async with Host() as host:
        with pytest.raises(UsageError):
            await host.open("claude", command=fake_agent.command(), tools=tools)


async def test_open_refuses_mcp_server_named_banksman(tmp_path: Path) -> None:
    async with Host() as host:
        with pytest.raises(UsageError, match="banksman"):
            await host.open("claude", command=fake_agent.command(), mcp_servers=[{"name": "banksman", "command": "x"}])


async def test_hooks_of_last_open_are_called(tmp_path: Path) -> None:
    called: list[str] = []

    def hook(name: str) -> Any:
        def call(said: Mapping[str, Any]) -> None:
            called.append(name)

        return call

    async with opened(tmp_path, memory=True, name="shared", hooks={"PreToolUse": hook("first")}) as case:
        await case.answer(hooked())
        command = fake_agent.command(evidence=tmp_path / "evidence", memory=tmp_path / "memory")
        hooks = {"PreToolUse": hook("second"), "Stop": hook("stop")}
        again = await case.host.open("claude", name="shared", command=command, hooks=hooks)
        assert again is case.session
        await case.answer(f"{hooked()}\n{hooked('hook-2')}")
        assert called == ["first", "second", "stop"]
        # Only a new process gets the new hooks.
        assert len(case.processes) == 2
        assert list(requests(case, "initialize")[1]["hooks"]) == ["PreToolUse", "Stop"]
