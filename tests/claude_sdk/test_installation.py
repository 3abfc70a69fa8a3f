"""`install` and `uninstall`: which transport the SDK's clients use, and which SDKs are refused."""

# The SDK declares that its context manager may swallow exceptions, which it never does.
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import claude_agent_sdk
import pytest
from claude_agent_sdk import (
    ClaudeAgentOptions,
    ClaudeSDKClient,
    InMemorySessionStore,
    PermissionResultAllow,
    ToolPermissionContext,
    query,
)
from claude_agent_sdk import types as sdk_types
from claude_agent_sdk._internal import client as query_module
from claude_agent_sdk._internal.query import Query
from claude_agent_sdk._internal.transport import subprocess_cli
from tests.claude_sdk.cli import ask, scripted
from tests.process.helpers import alive, wait_none

from banksman import UsageError, claude_sdk
from banksman.claude_sdk import ClaudeTransport

Original = subprocess_cli.SubprocessCLITransport
connect_inner, close = ClaudeSDKClient._connect_inner, Query.close  # pyright: ignore[reportPrivateUsage]


def replaced() -> tuple[Any, Any, Any]:
    return (
        vars(query_module)["SubprocessCLITransport"],
        ClaudeSDKClient._connect_inner,  # pyright: ignore[reportPrivateUsage]
        Query.close,
    )


def transport_of(client: ClaudeSDKClient) -> Any:
    return client._transport  # pyright: ignore[reportPrivateUsage]


async def test_client_uses_drop_in_only_while_installed(tmp_path: Path, marker: str) -> None:
    options = scripted(tmp_path, marker)
    claude_sdk.install()
    claude_sdk.install()
    try:
        async with ClaudeSDKClient(options) as client:
            transport = transport_of(client)
            await ask(client, "hello")
        assert isinstance(transport, ClaudeTransport)
        assert transport.finished is not None
        assert alive(marker) == []
    finally:
        claude_sdk.uninstall()
    assert replaced() == (Original, connect_inner, close)
    claude_sdk.uninstall()
    assert type(Original("", options)) is Original


async def test_query_runs_on_drop_in(tmp_path: Path, marker: str, installed: None) -> None:
    messages = [message async for message in query(prompt="hello", options=scripted(tmp_path, marker))]
    assert len(messages) == 2
    assert alive(marker) == []


async def test_client_can_connect_again(tmp_path: Path, marker: str, installed: None) -> None:
    client = ClaudeSDKClient(scripted(tmp_path, marker))
    used: list[Any] = []
    for _ in range(2):
        await client.connect()
        used.append(transport_of(client))
        assert len(await ask(client, "hello")) == 2
        await client.disconnect()
    assert used[0] is not used[1]


async def test_transport_of_caller_is_used_unchanged(tmp_path: Path, marker: str, installed: None) -> None:
    options = scripted(tmp_path, marker)
    passed = Original("", options)
    async with ClaudeSDKClient(options, transport=passed) as client:
        assert transport_of(client) is passed
        process: Any = passed._process  # pyright: ignore[reportPrivateUsage]
    # The SDK leaves asyncio's transport open.
    process._process._transport.close()


@pytest.mark.filterwarnings("ignore:Unclosed <MemoryObject:ResourceWarning")
async def test_raw_cancel_while_sdk_flushes_its_store_leaves_nothing(
    tmp_path: Path, marker: str, installed: None
) -> None:
    """The SDK flushes the store before it closes the transport, and the cancellation arrives in between."""
    entered = asyncio.Event()

    class SlowStore(InMemorySessionStore):
        async def append(self, key: Any, entries: Any) -> None:
            if not entered.is_set():
                entered.set()
                await asyncio.sleep(3600)

    code = """
path = os.environ["CLAUDE_CONFIG_DIR"] + "/projects/p/6a8e3f0e-0000-4000-8000-000000000000.jsonl"
for prompt in prompts():
    emit("transcript_mirror", filePath=path, entries=[{"type": "user"}])
    say("flush me")
"""
    env = {"CLAUDE_CONFIG_DIR": str(tmp_path)}
    client = ClaudeSDKClient(scripted(tmp_path, marker, code, session_store=SlowStore(), env=env))
    await client.connect()
    await client.query("go")
    await anext(client.receive_messages())
    closing = asyncio.create_task(client.disconnect())
    await entered.wait()
    closing.cancel()
    await asyncio.wait([closing])
    await asyncio.to_thread(wait_none, marker)
    # The tasks of the SDK end with the output of the CLI.
    while others := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait(others)
    del client, closing
    gc.collect()


# -- refusals --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("version", ["0.2.181", "0.3.0", "1.0.0"])
@pytest.mark.parametrize("use", [claude_sdk.install, claude_sdk.transport])
def test_unknown_version_is_refused_with_both_versions(
    version: str, use: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claude_agent_sdk, "__version__", version)
    with pytest.raises(UsageError, match=rf"claude-agent-sdk {version}, only 0\.2\.182"):
        use()
    assert replaced() == (Original, connect_inner, close)


def test_untested_version_is_warned_of_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    claude_sdk.transport()
    assert caplog.messages == []
    monkeypatch.setattr(claude_agent_sdk, "__version__", "0.2.999")
    claude_sdk.transport()
    claude_sdk.transport()
    (message,) = caplog.messages
    assert "claude-agent-sdk 0.2.999 is untested" in message


def test_transport_refuses_callback_together_with_permission_tool() -> None:
    async def allow(tool: str, given: dict[str, Any], context: ToolPermissionContext) -> PermissionResultAllow:
        return PermissionResultAllow()

    with pytest.raises(ValueError, match="can_use_tool callback cannot be used with permission_prompt_tool_name"):
        claude_sdk.transport(ClaudeAgentOptions(can_use_tool=allow, permission_prompt_tool_name="other"))


class ChangedSdk:
    """Names of the SDK that the drop-in relies on, each with a change that must be noticed."""

    @staticmethod
    def no_version_check(patch: pytest.MonkeyPatch) -> None:
        patch.delattr(Original, "_check_claude_version")

    @staticmethod
    def no_permission_check(patch: pytest.MonkeyPatch) -> None:
        patch.delattr(sdk_types, "_configure_can_use_tool")

    @staticmethod
    def other_connect(patch: pytest.MonkeyPatch) -> None:
        async def connect(self: Any) -> None: ...

        patch.setattr(Original, "connect", connect)

    @staticmethod
    def other_signature(patch: pytest.MonkeyPatch) -> None:
        async def _connect_inner(self: Any, prompt: Any) -> None: ...

        patch.setattr(ClaudeSDKClient, "_connect_inner", _connect_inner)

    @staticmethod
    def other_attributes(patch: pytest.MonkeyPatch) -> None:
        def init(self: Any, prompt: Any, options: ClaudeAgentOptions) -> None: ...

        patch.setattr(Original, "__init__", init)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (ChangedSdk.no_version_check, "_check_claude_version"),
        (ChangedSdk.no_permission_check, "_configure_can_use_tool"),
        (ChangedSdk.other_connect, "open_process"),
        (ChangedSdk.other_signature, "_connect_inner"),
        (ChangedSdk.other_attributes, "_process"),
    ],
)
def test_unknown_internals_are_refused_by_name(
    change: Callable[[pytest.MonkeyPatch], None], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(monkeypatch)
    with pytest.raises(UsageError, match=f"internals differ: .*{named}"):
        claude_sdk.install()
    assert vars(query_module)["SubprocessCLITransport"] is Original
