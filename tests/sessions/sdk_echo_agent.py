"""Agent made with the Python SDK of the protocol, for Banksman to drive: `python sdk_echo_agent.py [FOLDER]`.

It repeats each prompt, one update per block. A text that begins with a keyword of `Echo.prompt` does that instead. For
`session/load` it keeps the conversation in the folder, for the next process, or in this process if there is no folder.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

from acp import (
    PROTOCOL_VERSION,
    Agent,
    InitializeResponse,
    LoadSessionResponse,
    NewSessionResponse,
    PromptResponse,
    RequestError,
    run_agent,
    start_tool_call,
    text_block,
    update_agent_message,
    update_agent_thought_text,
    update_tool_call,
    update_user_message_text,
)
from acp.interfaces import Client
from acp.schema import AgentCapabilities, AllowedOutcome, PermissionOption, ToolCallUpdate


class Echo:
    """The parts of an agent that the tests need."""

    _client: Client

    def __init__(self, folder: str | None) -> None:
        self._folder = None if folder is None else Path(folder)
        self._said: dict[str, list[str]] = {}
        self._stops: dict[str, asyncio.Event] = {}

    def on_connect(self, conn: Client) -> None:
        self._client = conn

    async def initialize(self, protocol_version: int, **kwargs: Any) -> InitializeResponse:
        return InitializeResponse(
            protocol_version=PROTOCOL_VERSION, agent_capabilities=AgentCapabilities(load_session=True)
        )

    async def new_session(self, cwd: str, **kwargs: Any) -> NewSessionResponse:
        session = uuid4().hex
        self._said[session] = []
        self._keep(session)
        return NewSessionResponse(session_id=session)

    async def load_session(self, cwd: str, session_id: str, **kwargs: Any) -> LoadSessionResponse:
        file = None if self._folder is None else self._folder / f"{session_id}.json"
        if file is not None and file.exists():
            self._said[session_id] = json.loads(file.read_text())
        if session_id not in self._said:
            raise RequestError.invalid_params({"sessionId": session_id})
        for text in self._said[session_id]:
            await self._client.session_update(session_id, update_user_message_text(text))
            await self._say(session_id, text)
        return LoadSessionResponse()

    async def prompt(self, session_id: str, prompt: list[Any], **kwargs: Any) -> PromptResponse:
        stop = self._stops[session_id] = asyncio.Event()
        for block in prompt:
            text: str = getattr(block, "text", "")
            self._said[session_id].append(text)
            self._keep(session_id)
            match text.split():
                case ["think", *words]:
                    await self._client.session_update(session_id, update_agent_thought_text(" ".join(words)))
                case ["ask", *words]:
                    await self._ask(session_id, " ".join(words))
                case ["fail", *words]:
                    raise RequestError(-32603, " ".join(words) or "failed")
                case ["hang", *_]:
                    await self._say(session_id, "hanging")
                    await stop.wait()
                case _:
                    await self._say(session_id, text)
        return PromptResponse(stop_reason="cancelled" if stop.is_set() else "end_turn")

    async def cancel(self, session_id: str, **kwargs: Any) -> None:
        stop = self._stops.get(session_id)
        if stop is not None:
            stop.set()

    def _keep(self, session: str) -> None:
        if self._folder is not None:
            (self._folder / f"{session}.json").write_text(json.dumps(self._said[session]))

    async def _say(self, session: str, text: str) -> None:
        await self._client.session_update(session, update_agent_message(text_block(text)))

    async def _ask(self, session: str, title: str) -> None:
        call = uuid4().hex
        await self._client.session_update(session, start_tool_call(call, title, kind="execute", status="pending"))
        options = [
            PermissionOption(option_id="yes", name="Yes", kind="allow_once"),
            PermissionOption(option_id="no", name="No", kind="reject_once"),
        ]
        given = await self._client.request_permission(session, ToolCallUpdate(tool_call_id=call, title=title), options)
        outcome = given.outcome
        is_allowed = isinstance(outcome, AllowedOutcome) and outcome.option_id == "yes"
        status = "completed" if is_allowed else "failed"
        await self._client.session_update(session, update_tool_call(call, status=status))
        await self._say(
            session, f"{title}: {outcome.option_id if isinstance(outcome, AllowedOutcome) else 'cancelled'}"
        )


if __name__ == "__main__":
    asyncio.run(run_agent(cast(Agent, Echo(sys.argv[1] if len(sys.argv) > 1 else None))))
