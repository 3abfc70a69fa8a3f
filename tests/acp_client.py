"""ACP client on the protocol's Python SDK, with the spawn functions of a given module: `python acp_client.py MODULE`.

MODULE is `acp` or `banksman.acp`. The program gets its order as one line of JSON on stdin: the command, the environment
and the folder of the agent, and the prompts. It answers each permission request with the first option that allows. For
each prompt it prints one line of JSON: the stop reason and the text. After the next line on stdin it closes the agent
and exits.

`client` runs the program, and `replies` reads its answers.
"""

from __future__ import annotations

import asyncio
import asyncio.subprocess
import contextlib
import importlib
import json
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any, TypedDict, cast

from acp import PROTOCOL_VERSION, Client, text_block
from acp.schema import AllowedOutcome, ClientCapabilities, PermissionOption, RequestPermissionResponse

REPOSITORY = Path(__file__).resolve().parents[1]
LIFE_SECONDS_MAX = 250


class Order(TypedDict):
    command: list[str]
    env: dict[str, str]
    cwd: str
    prompts: list[str]


class Reply(TypedDict):
    stop_reason: str
    text: str


# -- from outside ----------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def client(module: str, order: Order) -> Generator[subprocess.Popen[str]]:
    """Run the program with this order, and kill it at the end if it still lives."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-m", "tests.acp_client", module], cwd=REPOSITORY, stdin=pipe, stdout=pipe, text=True
    ) as program:
        try:
            assert program.stdin is not None
            print(json.dumps(order), file=program.stdin, flush=True)
            yield program
        finally:
            program.kill()


def replies(program: subprocess.Popen[str], number: int) -> list[Reply]:
    """Read the answers to the next prompts."""
    assert program.stdout is not None
    return [json.loads(program.stdout.readline()) for _ in range(number)]


# -- the program -----------------------------------------------------------------------------------------------------
class Recorder:
    """Client that records the agent's text and allows everything."""

    text = ""

    async def session_update(self, session_id: str, update: Any, **kwargs: Any) -> None:
        if update.session_update == "agent_message_chunk":
            self.text += update.content.text

    async def request_permission(
        self, session_id: str, tool_call: Any, options: list[PermissionOption], **kwargs: Any
    ) -> RequestPermissionResponse:
        allow = next(option for option in options if option.kind.startswith("allow"))
        return RequestPermissionResponse(outcome=AllowedOutcome(outcome="selected", option_id=allow.option_id))


async def talk(module: str, order: Order) -> None:
    spawn_agent_process = importlib.import_module(module).spawn_agent_process
    recorder = Recorder()
    async with spawn_agent_process(cast(Client, recorder), *order["command"], env=order["env"], cwd=order["cwd"]) as (
        connection,
        process,
    ):
        assert isinstance(process, asyncio.subprocess.Process)
        await connection.initialize(protocol_version=PROTOCOL_VERSION, client_capabilities=ClientCapabilities())
        session = (await connection.new_session(cwd=order["cwd"], mcp_servers=[])).session_id
        for prompt in order["prompts"]:
            recorder.text = ""
            done = await connection.prompt(session_id=session, prompt=[text_block(prompt)])
            print(json.dumps(Reply(stop_reason=done.stop_reason, text=recorder.text)), flush=True)
        await asyncio.to_thread(sys.stdin.readline)


async def main(module: str) -> None:
    async with asyncio.timeout(LIFE_SECONDS_MAX):
        await talk(module, json.loads(sys.stdin.readline()))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
