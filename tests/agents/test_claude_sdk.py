"""The drop-in for claude-agent-sdk with the real CLI: the features of the SDK that cross the process border.

The scenarios are those of the SDK's own end-to-end tests, against the fake model. After each test, no process is left.
"""

# The SDK declares that its context manager may swallow exceptions, which it never does.
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

import asyncio
import json
import os
import shutil
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import pytest
from claude_agent_sdk import (
    AgentDefinition,
    AssistantMessage,
    ClaudeAgentOptions,
    ClaudeSDKClient,
    HookMatcher,
    InMemorySessionStore,
    Message,
    PermissionResultAllow,
    PermissionResultDeny,
    ProcessError,
    ResultError,
    ResultMessage,
    StreamEvent,
    SystemMessage,
    TextBlock,
    ToolPermissionContext,
    ToolUseBlock,
    create_sdk_mcp_server,
    get_session_messages,
    get_subagent_messages,
    get_subagent_messages_from_store,
    list_subagents,
    list_subagents_from_store,
    query,
    tool,
)
from claude_agent_sdk.types import ConversationResetMessage
from tests.agents import count
from tests.agents.case import exists
from tests.agents.ground import WAIT_SECONDS_MAX, Ground, bash, messages, remove

from banksman import claude_sdk
from banksman.claude_sdk import ClaudeTransport
from banksman.testing.fake_model import FakeModel

M = TypeVar("M")
GREETER = AgentDefinition(description="Greets.", prompt="Greet.", background=False)
GREET = "@@tool Agent " + json.dumps(
    {
        "description": "greet",
        "subagent_type": "greeter",
        "prompt": "@@text hi from inside",
        "run_in_background": False,
    }
)


@pytest.fixture
def ground(claude: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ground]:
    """Ground with the drop-in installed, in a bare environment: the SDK hands the environment to the CLI."""
    with FakeModel() as model:
        made = Ground(tmp_path, claude, model)
        for name in list(os.environ):
            if name not in ("PATH", "TMPDIR", "PYTEST_CURRENT_TEST"):
                monkeypatch.delenv(name)
        for name, value in made.env().items():
            monkeypatch.setenv(name, value)
        claude_sdk.install()
        yield made
        claude_sdk.uninstall()
        left = count.marked(made.mark)
        made.clean_up()
    remove(tmp_path)
    assert not left


def options_of(ground: Ground, **how: Any) -> ClaudeAgentOptions:
    return ClaudeAgentOptions(cli_path=ground.claude, cwd=ground.work, **how)


async def run(ground: Ground, prompt: str, **how: Any) -> list[Message]:
    """Run one query to its end."""
    async with asyncio.timeout(WAIT_SECONDS_MAX):
        return [message async for message in query(prompt=prompt, options=options_of(ground, **how))]


async def ask(client: ClaudeSDKClient, prompt: str | AsyncIterator[dict[str, Any]]) -> list[Message]:
    async with asyncio.timeout(WAIT_SECONDS_MAX):
        await client.query(prompt)
        return [message async for message in client.receive_response()]


def only(kind: type[M], found: list[Message]) -> list[M]:
    return [message for message in found if isinstance(message, kind)]


def result_of(found: list[Message]) -> ResultMessage:
    (result,) = only(ResultMessage, found)
    return result


def init_of(found: list[Message]) -> dict[str, Any]:
    return next(message.data for message in only(SystemMessage, found) if message.subtype == "init")


def texts(found: list[Message], *, inside: bool = False) -> list[str]:
    """Return the texts of the main agent, or of its subagents."""
    return [
        block.text
        for message in only(AssistantMessage, found)
        for block in message.content
        if isinstance(block, TextBlock) and (message.parent_tool_use_id is not None) is inside
    ]


def last_call(ground: Ground) -> str:
    return messages(ground.plays()[-1])


# -- conversation and control ----------------------------------------------------------------------------------------
async def test_sdk_client_converses_and_leaves_nothing(ground: Ground) -> None:
    client = ClaudeSDKClient(options_of(ground))
    await client.connect()
    transport = client._transport  # pyright: ignore[reportPrivateUsage]
    assert isinstance(transport, ClaudeTransport)
    assert texts(await ask(client, "my word is heron\n@@text noted")) == ["noted"]
    assert texts(await ask(client, "@@text again")) == ["again"]
    assert "heron" in last_call(ground)
    await client.disconnect()
    assert transport.finished is not None
    assert (transport.finished.survivors, transport.finished.code) == ((), 0)


async def test_sdk_tool_in_background_is_gone_after_disconnect(ground: Ground) -> None:
    async with ClaudeSDKClient(
        options_of(ground, permission_mode="bypassPermissions", allowed_tools=["Bash"])
    ) as client:
        await ask(client, f"{ground.tool()}\n@@text it runs")
        await exists(ground.path("tool"))
        ground.check_tool()
    assert not count.marked(ground.mark)


async def test_sdk_permission_mode_and_model_can_be_changed(ground: Ground) -> None:
    async with ClaudeSDKClient(options_of(ground)) as client:
        first = init_of(await ask(client, "@@text one"))
        await client.set_permission_mode("acceptEdits")
        await client.set_model("claude-other-model")
        second = init_of(await ask(client, "@@text two"))
    assert (first["permissionMode"], second["permissionMode"]) == ("default", "acceptEdits")
    assert ground.plays()[-1].body["model"] == "claude-other-model"


async def test_sdk_interrupt_ends_turn_and_session_continues(ground: Ground) -> None:
    async with ClaudeSDKClient(options_of(ground)) as client:
        await client.query("@@text begin\n@@hang")
        await asyncio.to_thread(ground.wait_play, 1)
        await client.interrupt()
        async with asyncio.timeout(WAIT_SECONDS_MAX):
            assert [message async for message in client.receive_response()]
        assert texts(await ask(client, "@@text still here")) == ["still here"]


async def test_sdk_clear_resets_conversation(ground: Ground) -> None:
    async with ClaudeSDKClient(options_of(ground)) as client:
        first = result_of(await ask(client, "@@text one"))
        cleared = await ask(client, "/clear")
    (reset,) = only(ConversationResetMessage, cleared)
    assert reset.session_id == first.session_id
    assert result_of(cleared).session_id != first.session_id


async def test_sdk_result_names_origin_of_its_prompt(ground: Ground) -> None:
    async def one(**more: Any) -> AsyncIterator[dict[str, Any]]:
        message = {"role": "user", "content": "@@text one"}
        yield {"type": "user", "message": message, "parent_tool_use_id": None, **more}

    async with ClaudeSDKClient(options_of(ground)) as client:
        stamped = result_of(await ask(client, one(origin={"kind": "human"})))
        plain = result_of(await ask(client, one()))
    assert (stamped.origin, plain.origin) == ({"kind": "human"}, None)


async def test_sdk_api_error_raises_result_error_with_payload(ground: Ground) -> None:
    found: list[Message] = []

    async def collect() -> None:
        async for message in query(prompt="@@error 400", options=options_of(ground)):
            found.append(message)  # noqa: PERF401  (the messages before the error are needed)

    with pytest.raises(ResultError) as raised:
        await collect()
    result = result_of(found)
    assert result.is_error
    assert isinstance(raised.value, ProcessError)
    assert raised.value.exit_code is not None
    assert (raised.value.result, raised.value.session_id) == (result.result, result.session_id)
    assert raised.value.terminal_reason == "api_error"


@pytest.mark.parametrize("wanted", [True, False])
async def test_sdk_partial_messages_come_only_on_demand(ground: Ground, wanted: bool) -> None:
    found = await run(ground, "@@think hm\n@@slow 3 0.01", include_partial_messages=wanted)
    events = [event.event for event in only(StreamEvent, found)]
    assert bool(events) is wanted
    assert any(event.get("delta", {}).get("type") == "thinking_delta" for event in events) is wanted
    assert texts(found) == ["tick1 tick2 tick3 "]


async def test_sdk_stderr_callback_gets_nothing_in_clean_run(ground: Ground) -> None:
    lines: list[str] = []
    await run(ground, "@@text fine", stderr=lines.append)
    assert lines == []


# -- tools, hooks, permissions ---------------------------------------------------------------------------------------
def server(called: list[str]) -> Any:
    @tool("echo", "Echo", {"text": str})
    async def echo(given: dict[str, Any]) -> dict[str, Any]:
        called.append("echo")
        return {"content": [{"type": "text", "text": f"echo: {given['text']}"}]}

    @tool("greet", "Greet", {"name": str})
    async def greet(given: dict[str, Any]) -> dict[str, Any]:
        called.append("greet")
        return {"content": [{"type": "text", "text": f"hello {given['name']}"}]}

    return {"mine": create_sdk_mcp_server("mine", tools=[echo, greet])}


ECHO, GREET_TOOL = '@@tool mcp__mine__echo {"text": "abc"}', '@@tool mcp__mine__greet {"name": "Bob"}'


async def test_sdk_mcp_tools_run_in_this_process(ground: Ground) -> None:
    called: list[str] = []
    allowed = ["mcp__mine__echo", "mcp__mine__greet"]
    prompt = f"{ECHO}\n@@next\n{GREET_TOOL}\n@@text done"
    found = await run(ground, prompt, mcp_servers=server(called), allowed_tools=allowed)
    assert (called, texts(found)) == (["echo", "greet"], ["done"])
    assert "echo: abc" in last_call(ground)
    assert "hello Bob" in last_call(ground)


@pytest.mark.parametrize("how", [{"disallowed_tools": ["mcp__mine__echo"]}, {}], ids=["disallowed", "not allowed"])
async def test_sdk_mcp_tool_without_permission_does_not_run(ground: Ground, how: Mapping[str, Any]) -> None:
    called: list[str] = []
    prompt = f"{ECHO}\n@@next\n{GREET_TOOL}\n@@text done"
    await run(ground, prompt, mcp_servers=server(called), allowed_tools=["mcp__mine__greet"], **how)
    assert called == ["greet"]


class Hooks:
    """A hook that records its calls and returns one answer."""

    def __init__(self, answer: Mapping[str, Any] | None = None) -> None:
        self.calls: list[tuple[str, str | None]] = []
        self._answer = dict(answer or {})

    async def __call__(self, given: Any, tool_use_id: str | None, _context: Any) -> Any:
        self.calls.append((given["hook_event_name"], tool_use_id))
        return self._answer

    def matchers(self, *events: str) -> dict[str, Any]:
        return {"hooks": {event: [HookMatcher(hooks=[self])] for event in events}}


async def test_sdk_hook_can_deny_tool_with_reason(ground: Ground) -> None:
    made = ground.path("made")
    denial = {"permissionDecision": "deny", "permissionDecisionReason": "not today"}
    hooks = Hooks({"hookSpecificOutput": {"hookEventName": "PreToolUse", **denial}})
    await run(ground, f"{bash(f'touch {made}')}\n@@text done", allowed_tools=["Bash"], **hooks.matchers("PreToolUse"))
    assert not made.exists()
    assert "not today" in last_call(ground)


async def test_sdk_hook_can_add_context_and_gets_tool_use_id(ground: Ground) -> None:
    for event in ("PreToolUse", "PostToolUse"):
        hooks = Hooks({"hookSpecificOutput": {"hookEventName": event, "additionalContext": f"context of {event}"}})
        await run(ground, f"{bash('true')}\n@@text done", allowed_tools=["Bash"], **hooks.matchers(event))
        ((name, tool_use_id),) = hooks.calls
        assert name == event
        assert tool_use_id
        assert f"context of {event}" in last_call(ground)


async def test_sdk_hook_can_stop_turn(ground: Ground) -> None:
    hooks = Hooks({"continue_": False, "stopReason": "enough"})
    found = await run(
        ground, f"{bash('true')}\n@@text went on", allowed_tools=["Bash"], **hooks.matchers("PostToolUse")
    )
    assert hooks.calls
    assert "went on" not in texts(found)


async def test_sdk_hooks_of_several_events_are_called_in_order(ground: Ground) -> None:
    hooks = Hooks()
    events = ("UserPromptSubmit", "PreToolUse", "PostToolUse", "Stop", "Notification")
    await run(ground, f"{bash('true')}\n@@text done", allowed_tools=["Bash"], **hooks.matchers(*events))
    assert [name for name, _ in hooks.calls] == ["UserPromptSubmit", "PreToolUse", "PostToolUse", "Stop"]


class Decide:
    """A permission callback that denies commands with `forbidden` in them."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def __call__(
        self, name: str, given: dict[str, Any], context: ToolPermissionContext
    ) -> PermissionResultAllow | PermissionResultDeny:
        self.asked.append(name)
        return PermissionResultDeny(message="no") if "forbidden" in given["command"] else PermissionResultAllow()


@pytest.mark.parametrize("kind", ["client", "query", "stream"])
async def test_sdk_permission_callback_decides(ground: Ground, kind: str) -> None:
    decide = Decide()
    made, denied = ground.path("made"), ground.path("forbidden")
    prompt = f"{bash(f'touch {made}')}\n@@next\n{bash(f'touch {denied}')}\n@@text done"
    if kind == "client":
        async with ClaudeSDKClient(options_of(ground, can_use_tool=decide)) as client:
            found = await ask(client, prompt)
    elif kind == "query":
        found = await run(ground, prompt, can_use_tool=decide)
    else:

        async def stream() -> AsyncIterator[dict[str, Any]]:
            yield {"type": "user", "message": {"role": "user", "content": prompt}, "parent_tool_use_id": None}

        options = options_of(ground, can_use_tool=decide)
        found = [message async for message in query(prompt=stream(), options=options)]
    assert decide.asked == ["Bash", "Bash"]
    assert (made.exists(), denied.exists(), texts(found)) == (True, False, ["done"])


async def test_sdk_structured_output_follows_schema(ground: Ground) -> None:
    item = {"type": "object", "properties": {"kind": {"enum": ["a", "b"]}, "n": {"type": "integer"}}}
    schema = {"type": "object", "properties": {"items": {"type": "array", "items": item}}, "required": ["items"]}
    value = {"items": [{"kind": "a", "n": 1}]}
    prompt = f"{bash('true')}\n@@next\n@@tool StructuredOutput {json.dumps(value)}\n@@text done"
    how: dict[str, Any] = {"output_format": {"type": "json_schema", "schema": schema}, "allowed_tools": ["Bash"]}
    assert result_of(await run(ground, prompt, **how)).structured_output == value


# -- agents and settings ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["client", "query"])
async def test_sdk_agents_reach_cli_even_if_large(ground: Ground, kind: str) -> None:
    """The SDK sends the definitions through stdin, because a command line could not hold them."""
    agents = {f"agent-{n}": AgentDefinition(description="x", prompt="p" * 60_000) for n in range(5)}
    if kind == "client":
        async with ClaudeSDKClient(options_of(ground, agents=agents)) as client:
            found = await ask(client, "@@text hello")
    else:
        found = await run(ground, "@@text hello", agents=agents)
    assert agents.keys() <= set(init_of(found)["agents"])


async def test_sdk_setting_sources_choose_files_of_project(ground: Ground) -> None:
    folder = ground.work / ".claude"
    (folder / "agents").mkdir(parents=True)
    (folder / "agents" / "filed.md").write_text("---\nname: filed\ndescription: from a file\n---\nHello.\n")
    (folder / "settings.local.json").write_text(json.dumps({"outputStyle": "Explanatory"}))
    cases = [(["user"], False, "default"), (["user", "project"], True, "default"), (None, True, "Explanatory")]
    for sources, has_agent, style in cases:
        init = init_of(await run(ground, "@@text hello", setting_sources=sources))
        assert ("filed" in init["agents"], init["output_style"]) == (has_agent, style), sources


@pytest.mark.parametrize("forwards", [True, False])
async def test_sdk_subagent_text_comes_only_on_demand(ground: Ground, forwards: bool) -> None:
    how = {"agents": {"greeter": GREETER}, "allowed_tools": ["Agent", "Task"], "forward_subagent_text": forwards}
    found = await run(ground, f"{GREET}\n@@text done", **how)
    assert texts(found) == ["done"]
    assert ("hi from inside" in texts(found, inside=True)) is forwards


async def test_sdk_subagent_messages_name_tool_use_that_started_it(ground: Ground) -> None:
    store = InMemorySessionStore()
    how = {"agents": {"greeter": GREETER}, "allowed_tools": ["Agent", "Task"], "session_store": store}
    found = await run(ground, f"{GREET}\n@@text done", **how)
    uses = [block.id for m in only(AssistantMessage, found) for block in m.content if isinstance(block, ToolUseBlock)]
    id = result_of(found).session_id
    work = str(ground.work)
    (agent,) = list_subagents(id, directory=work)
    (mirrored,) = await list_subagents_from_store(store, id, directory=work)
    assert agent == mirrored
    for read in (
        get_subagent_messages(id, agent, directory=work),
        await get_subagent_messages_from_store(store, id, agent, directory=work),
    ):
        assert {message.parent_tool_use_id for message in read} == set(uses)


# -- resume ----------------------------------------------------------------------------------------------------------
async def test_sdk_session_resumes_from_store_with_settings_of_user(ground: Ground) -> None:
    """The drop-in is no custom transport for the SDK, so the session is loaded from the store."""
    config = ground.path("config")
    config.mkdir()
    how: dict[str, Any] = {"session_store": InMemorySessionStore(), "env": {"CLAUDE_CONFIG_DIR": str(config)}}
    first = result_of(await run(ground, "my word is heron\n@@text one", **how))
    (config / "settings.json").write_text(json.dumps({"outputStyle": "Explanatory"}))
    shutil.rmtree(config / "projects")
    found = await run(ground, "@@text two", resume=first.session_id, **how)
    assert result_of(found).session_id == first.session_id
    assert init_of(found)["output_style"] == "Explanatory"
    assert "heron" in last_call(ground)


def prompts_of(ground: Ground, id: str) -> list[Any]:
    found: list[Any] = get_session_messages(id, directory=str(ground.work))
    return [m.message["content"] for m in found if m.type == "user" and isinstance(m.message["content"], str)]


async def test_sdk_resume_can_drop_last_turn_by_its_id(ground: Ground) -> None:
    one, two, three = "@@text one", "@@text two", "@@text three"
    async with ClaudeSDKClient(options_of(ground)) as client:
        kept = only(AssistantMessage, await ask(client, one))[-1].uuid
        id = result_of(await ask(client, two)).session_id
    chain: list[Any] = get_session_messages(id, directory=str(ground.work))
    (dropped,) = [m.uuid for m in chain if m.message.get("content") == two]
    how: dict[str, Any] = {"resume": id, "fork_session": True, "resume_session_at": kept}
    forked = result_of(await run(ground, three, **how, resume_drops_turn=dropped)).session_id
    assert prompts_of(ground, forked) == [one, three]
    with pytest.raises(ProcessError, match="Resume rejected"):
        await run(ground, three, **how, resume_drops_turn=str(uuid.uuid4()))
    assert prompts_of(ground, id) == [one, two]
