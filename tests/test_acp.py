"""`banksman.acp`: the SDK's connections on Banksman's processes, with the fake ACP agent."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import signal
import uuid
from collections.abc import Generator
from pathlib import Path
from typing import Any, cast

import acp
import acp.stdio
import acp.transports
import pytest
from acp import PROTOCOL_VERSION, Client, text_block
from acp.schema import ClientCapabilities
from tests import acp_client
from tests.acp_client import client, replies
from tests.agents import count
from tests.process.helpers import run_program, wait_until
from tests.thorough import thorough

import banksman.acp
from banksman import Finished
from banksman.asyncio import Process
from banksman.testing import fake_acp

MODULES = ["acp", "banksman.acp"]


class Side:
    """One client and its agent. `mark`: in the environment of the agent and of all its descendants."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = f"side-{uuid.uuid4().hex}"

    def order(self, *prompts: str) -> acp_client.Order:
        command = fake_acp.command()
        return {"command": command, "env": {"SIDE": self.mark}, "cwd": str(self.folder), "prompts": list(prompts)}

    @property
    def tool(self) -> str:
        """Prompt that runs a tool with several processes, and does not end."""
        return f"@@tool {self.folder / 'pids'}"

    def wait_tool(self) -> None:
        wait_until((self.folder / "pids").exists, "the processes of the tool")

    def alive(self) -> list[int]:
        return list(count.marked(self.mark))


@pytest.fixture
def side(tmp_path: Path) -> Generator[Side]:
    side = Side(tmp_path)
    yield side
    for pid in side.alive():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not side.alive(), "the end of the control's processes")


# -- the same as in the SDK ------------------------------------------------------------------------------------------
def test_functions_have_the_signatures_of_the_sdk() -> None:
    for name in banksman.acp.__all__:
        theirs = getattr(acp.transports, name, None) or getattr(acp.stdio, name)
        expected = inspect.signature(theirs).parameters
        found = inspect.signature(getattr(banksman.acp, name)).parameters
        assert [(p.name, p.kind, p.default) for p in found.values()] == [
            (p.name, p.kind, p.default) for p in expected.values()
        ]
    missing = {name for module in (acp.stdio, acp.transports) for name in module.__all__ if name.startswith("spawn_")}
    assert missing == set(banksman.acp.__all__)


@thorough
def test_conversation_is_the_same_with_and_without_banksman(side: Side) -> None:
    heard: list[list[acp_client.Reply]] = []
    for module in MODULES:
        with client(module, side.order("hello", "@@slow 3 0\n@@stop max_tokens")) as program:
            heard.append(replies(program, 2))
            program.communicate("end\n")
            assert program.returncode == 0
    assert heard[0] == heard[1]
    assert heard[0][0]["stop_reason"] == "end_turn"
    assert "hello" in heard[0][0]["text"]


# -- the difference --------------------------------------------------------------------------------------------------
@thorough
@pytest.mark.parametrize("module", MODULES)
def test_killed_client_leaves_nothing_only_with_banksman(module: str, side: Side) -> None:
    with client(module, side.order("hello", side.tool)) as program:
        replies(program, 1)
        side.wait_tool()
        program.kill()
        program.wait()
    if module == "banksman.acp":
        wait_until(lambda: not side.alive(), "the end of the agent's tree")
    else:
        assert side.alive(), "the control has left nothing, so this test shows nothing"


async def test_cancelled_client_leaves_nothing(side: Side) -> None:
    """A prompt is open, and its tool runs."""
    seen: list[Process] = []
    order = side.order()

    async def talk() -> None:
        spawn = banksman.acp.spawn_agent_process
        async with spawn(
            cast(Client, acp_client.Recorder()),
            *order["command"],
            env=order["env"],
            cwd=order["cwd"],
            transport_kwargs={"shutdown_timeout": 0.1},
        ) as (connection, process):
            seen.append(process)
            await connection.initialize(protocol_version=PROTOCOL_VERSION, client_capabilities=ClientCapabilities())
            session = (await connection.new_session(cwd=order["cwd"], mcp_servers=[])).session_id
            await connection.prompt(session_id=session, prompt=[text_block(side.tool)])

    task = asyncio.create_task(talk())
    await asyncio.to_thread(side.wait_tool)
    task.cancel()
    # Again, while the block is being left.
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await seen[0].wait()
    assert side.alive() == []
    assert isinstance(seen[0].finished, Finished)
    assert seen[0].finished.survivors == ()


async def test_agent_that_ignores_the_end_of_stdin_is_stopped(side: Side) -> None:
    async with banksman.acp.spawn_stdio_transport(
        "sh", "-c", "trap '' TERM; echo up; sleep 100 & wait; sleep 100", env={"SIDE": side.mark}, shutdown_timeout=0.1
    ) as (reader, _writer, process):
        assert await reader.readline() == b"up\n"
        assert isinstance(process, Process)
    assert process.returncode == -signal.SIGKILL
    assert side.alive() == []


async def test_connection_functions_yield_connections_of_the_sdk() -> None:
    never: Any = object()
    async with banksman.acp.spawn_stdio_connection(never, "cat", limit=1000) as (connection, process):
        assert isinstance(connection, acp.connection.Connection)
    assert process.returncode == 0
    async with banksman.acp.spawn_client_process(never, "cat", cwd=Path("/")) as (agent_side, process):
        assert isinstance(agent_side, acp.core.AgentSideConnection)
    assert process.returncode == 0


@thorough
def test_import_without_the_package_says_how_to_install_it(marker: str) -> None:
    code = """
sys.modules["acp"] = None
try:
    import banksman.acp
except ModuleNotFoundError as error:
    print(error)
"""
    done = run_program(code, marker)
    expected = "banksman.acp needs agent-client-protocol, which is not installed (run pip install 'banksman[acp]')\n"
    assert (done.stdout, done.stderr) == (expected, "")
