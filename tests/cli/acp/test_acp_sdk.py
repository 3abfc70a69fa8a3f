"""The client of the protocol's Python SDK drives `banksman acp`, and accepts every message as valid."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from acp import PROTOCOL_VERSION, Client, RequestError, spawn_agent_process, text_block
from acp.client.connection import ClientSideConnection
from acp.schema import (
    AgentMessageChunk,
    AllowedOutcome,
    ClientCapabilities,
    DeniedOutcome,
    PermissionOption,
    RequestPermissionResponse,
    TextContentBlock,
    ToolCallProgress,
    ToolCallStart,
    ToolCallUpdate,
    UserMessageChunk,
)
from tests.cli.acp.acp_client import SECONDS_MAX, environment
from tests.thorough import one_in, thorough

from banksman.testing import fake_agent

pytestmark = thorough

ASKS = '@@ask Bash {"command": "make"}\n@@say done'


class Watcher:
    """Minimal client that records its messages.

    `choice`: the kind of option that its user takes; None if the user does not answer.
    """

    def __init__(self) -> None:
        self.updates: list[Any] = []
        self.asked: asyncio.Queue[tuple[ToolCallUpdate, list[PermissionOption]]] = asyncio.Queue()
        self.choice: str | None = "allow_once"
        self._changed = asyncio.Event()

    async def session_update(self, session_id: str, update: Any, **kwargs: Any) -> None:
        self.updates.append(update)
        self._changed.set()

    async def request_permission(
        self, session_id: str, tool_call: ToolCallUpdate, options: list[PermissionOption], **kwargs: Any
    ) -> RequestPermissionResponse:
        self.asked.put_nowait((tool_call, options))
        chosen = next((option for option in options if option.kind == self.choice), None)
        if chosen is None:
            return RequestPermissionResponse(outcome=DeniedOutcome(outcome="cancelled"))
        return RequestPermissionResponse(outcome=AllowedOutcome(outcome="selected", option_id=chosen.option_id))

    def texts(self, kind: type[AgentMessageChunk | UserMessageChunk] = AgentMessageChunk) -> list[str]:
        contents = [update.content for update in self.updates if isinstance(update, kind)]
        return [content.text for content in contents if isinstance(content, TextContentBlock)]

    async def wait_said(self, text: str) -> None:
        async with asyncio.timeout(SECONDS_MAX):
            while text not in "".join(self.texts()):
                self._changed.clear()
                await self._changed.wait()


@contextlib.asynccontextmanager
async def driven(
    folder: Path, watcher: Watcher, *, agent: str = "claude", command: Sequence[str] | None = None
) -> AsyncGenerator[tuple[ClientSideConnection, Process]]:
    command = fake_agent.command({}, memory=folder / "memory") if command is None else command
    words = [sys.executable, "-m", "banksman", "acp", "--agent", agent, "--", *command]
    async with (
        asyncio.timeout(2 * SECONDS_MAX),
        spawn_agent_process(
            cast(Client, watcher),
            *words,
            env=environment(folder / "state"),
            transport_kwargs={"stderr": DEVNULL, "shutdown_timeout": SECONDS_MAX},
            use_unstable_protocol=True,
        ) as (connection, process),
    ):
        yield connection, process


async def began(connection: ClientSideConnection, folder: Path) -> str:
    await connection.initialize(protocol_version=PROTOCOL_VERSION, client_capabilities=ClientCapabilities())
    return (await connection.new_session(cwd=str(folder), mcp_servers=[])).session_id


async def test_sdk_client_gets_chunks_and_tool_updates(tmp_path: Path) -> None:
    watcher = Watcher()
    async with driven(tmp_path, watcher) as (connection, _):
        told = await connection.initialize(protocol_version=PROTOCOL_VERSION)
        assert told.protocol_version == PROTOCOL_VERSION
        assert told.agent_capabilities is not None
        assert told.agent_capabilities.load_session
        assert told.agent_capabilities.session_capabilities is not None
        assert told.agent_capabilities.session_capabilities.resume is not None
        session = (await connection.new_session(cwd=str(tmp_path), mcp_servers=[])).session_id
        script = '@@tool_use Read {"file_path": "x"}\n@@tool_result found\n@@stream 3 0'
        done = await connection.prompt(session_id=session, prompt=[text_block(script)])
        assert done.stop_reason == "end_turn"
        assert watcher.texts() == ["tick0 ", "tick1 ", "tick2 "]
        kinds: list[Any] = [type(update) for update in watcher.updates]
        assert kinds.index(ToolCallStart) < kinds.index(ToolCallProgress) < kinds.index(AgentMessageChunk)


@pytest.mark.thorough
@pytest.mark.parametrize(("choice", "status"), [("allow_once", "completed"), ("reject_once", "failed")])
async def test_sdk_client_answers_a_permission_request(tmp_path: Path, choice: str, status: str) -> None:
    watcher = Watcher()
    watcher.choice = choice
    async with driven(tmp_path, watcher) as (connection, _):
        session = await began(connection, tmp_path)
        done = await connection.prompt(session_id=session, prompt=[text_block(ASKS)])
        assert done.stop_reason == "end_turn"
        call, options = watcher.asked.get_nowait()
        assert [option.kind for option in options] == ["allow_once", "allow_always", "reject_once"]
        ends = [update for update in watcher.updates if isinstance(update, ToolCallProgress)]
        assert [(end.tool_call_id, end.status) for end in ends] == [(call.tool_call_id, status)]


async def test_sdk_client_cancels_a_turn(tmp_path: Path) -> None:
    watcher = Watcher()
    async with driven(tmp_path, watcher) as (connection, _):
        session = await began(connection, tmp_path)
        prompt = asyncio.ensure_future(
            connection.prompt(session_id=session, prompt=[text_block("@@say begun\n@@hang")])
        )
        await watcher.wait_said("begun")
        await connection.cancel(session_id=session)
        assert (await prompt).stop_reason == "cancelled"


@pytest.mark.thorough
async def test_sdk_client_cancels_with_a_question_open(tmp_path: Path) -> None:
    watcher = Watcher()
    watcher.choice = None
    async with driven(tmp_path, watcher) as (connection, _):
        session = await began(connection, tmp_path)
        prompt = asyncio.ensure_future(connection.prompt(session_id=session, prompt=[text_block(ASKS)]))
        await watcher.asked.get()
        await connection.cancel(session_id=session)
        assert (await prompt).stop_reason == "cancelled"


async def test_sdk_client_gets_request_errors(tmp_path: Path) -> None:
    async with driven(tmp_path, Watcher()) as (connection, _):
        session = await began(connection, tmp_path)
        with pytest.raises(RequestError) as failed:
            await connection.prompt(session_id=session, prompt=[text_block("@@exit 3")])
        assert failed.value.code == -32603
        with pytest.raises(RequestError) as unknown:
            await connection.load_session(cwd=str(tmp_path), session_id="s-nobody", mcp_servers=[])
        assert unknown.value.code == -32602


@pytest.mark.thorough
async def test_sdk_client_loads_a_session_after_banksman_was_killed(tmp_path: Path) -> None:
    first = Watcher()
    async with driven(tmp_path, first) as (connection, process):
        session = await began(connection, tmp_path)
        await connection.prompt(session_id=session, prompt=[text_block("@@say whole")])
        prompt = asyncio.ensure_future(connection.prompt(session_id=session, prompt=[text_block("@@say half\n@@hang")]))
        await first.wait_said("half")
        process.kill()
        with pytest.raises(ConnectionError):
            await prompt
    again = Watcher()
    async with driven(tmp_path, again) as (connection, _):
        await connection.initialize(protocol_version=PROTOCOL_VERSION)
        listed = await connection.list_sessions(cwd=str(tmp_path))
        assert [each.session_id for each in listed.sessions] == [session]
        await connection.load_session(cwd=str(tmp_path), session_id=session, mcp_servers=[])
        await again.wait_said("half")
        assert again.texts() == ["whole", "half"]
        assert again.texts(UserMessageChunk) == ["@@say whole", "@@say half\n@@hang"]
        done = await connection.prompt(session_id=session, prompt=[text_block("@@say on")])
        assert done.stop_reason == "end_turn"


async def test_sdk_client_resumes_changes_and_closes_a_session(tmp_path: Path) -> None:
    watcher = Watcher()
    async with driven(tmp_path, watcher) as (connection, _):
        session = await began(connection, tmp_path)
        await connection.prompt(session_id=session, prompt=[text_block("@@say before")])
        await connection.set_session_mode(session_id=session, mode_id="plan")
        await connection.resume_session(session_id=session, cwd=str(tmp_path), mcp_servers=[])
        assert watcher.texts() == ["before"]
        await connection.close_session(session_id=session)
        with pytest.raises(RequestError):
            await connection.prompt(session_id=session, prompt=[text_block("closed")])


@pytest.mark.parametrize(("choice", "said"), one_in(2, [("allow_once", "make: yes"), ("reject_once", "make: no")]))
async def test_sdk_client_drives_an_sdk_agent_through_banksman(tmp_path: Path, choice: str, said: str) -> None:
    """The input of one end is the output of the other, and the user may choose from the agent's options."""
    watcher = Watcher()
    watcher.choice = choice
    echo = [sys.executable, str(Path(__file__).parents[2] / "sessions" / "sdk_echo_agent.py")]
    async with driven(tmp_path, watcher, agent="custom", command=echo) as (connection, _):
        session = await began(connection, tmp_path)
        done = await connection.prompt(session_id=session, prompt=[text_block("hello"), text_block("ask make")])
        assert done.stop_reason == "end_turn"
        assert watcher.texts() == ["hello", said]
        call, options = watcher.asked.get_nowait()
        assert [option.option_id for option in options] == ["yes", "no"]
        starts = [update for update in watcher.updates if isinstance(update, ToolCallStart)]
        assert [(start.tool_call_id, start.title) for start in starts] == [(call.tool_call_id, "make")]
        hanging = asyncio.ensure_future(connection.prompt(session_id=session, prompt=[text_block("hang")]))
        await watcher.wait_said("hanging")
        await connection.cancel(session_id=session)
        assert (await hanging).stop_reason == "cancelled"
        with pytest.raises(RequestError, match="badly"):
            await connection.prompt(session_id=session, prompt=[text_block("fail badly")])
