"""What the agent calls in the caller's process: hooks, and tools. Each call is a task that ends with its request."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from banksman.core.meaning import Requested, Wants
from banksman.core.session_facts import CallBack, CallbackAnswered
from banksman.errors import BanksmanError, UsageError
from banksman.run.sessions.driver import Driver
from banksman.run.sessions.hooks import Hooks
from banksman.run.sessions.tools import ToolServer

log = logging.getLogger("banksman")


class Callbacks:
    """Those of one session. It owns the calls; what is called is `hooks` and `server`."""

    def __init__(self, driver: Driver, hooks: Hooks, server: ToolServer) -> None:
        self._driver = driver
        self.hooks = hooks
        self.server = server
        # Those that were replaced, and may have something running that was cancelled and has not ended.
        self._former: list[Hooks | ToolServer] = []
        self._tasks: dict[str, asyncio.Task[None]] = {}
        # Every one that is not over, those of closed requests too: the loop alone would not keep them.
        self._running: set[asyncio.Task[None]] = set()

    def replace(self, hooks: Hooks, server: ToolServer) -> None:
        if hooks is not self.hooks:
            # Only those: a session may be opened again and again.
            self._former = [each for each in (*self._former, self.hooks, self.server) if each.is_running]
        self.hooks, self.server = hooks, server

    def call(self, effect: CallBack) -> None:
        # A task, so that nothing of the caller's ever runs inside the door.
        task = asyncio.ensure_future(self._call(effect.process, effect.asked))
        self._tasks[effect.asked.request] = task
        self._running.add(task)
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (exc := task.exception()) is not None:
            log.error("! a callback ended by %s", type(exc).__name__)
        # By the task and not by its name, which another one may have by now.
        for request in [request for request, other in self._tasks.items() if other is task]:
            del self._tasks[request]

    async def _call(self, process: int, asked: Requested) -> None:
        response: Mapping[str, Any] | None = None
        error = ""
        try:
            response = await self._answer(asked)
        except BanksmanError as exc:
            error = str(exc)
        except BaseException as exc:
            error = f"the callback ended by {type(exc).__name__}"
            raise
        finally:
            # Whatever became of it: an agent that is not answered waits for ever.
            self._driver.tell(CallbackAnswered(self._driver.now(), process, asked.request, response, error))

    async def _answer(self, asked: Requested) -> Mapping[str, Any]:
        if asked.wants is Wants.HOOK:
            return await self.hooks.call(asked.tool, asked.input)
        if asked.tool != self.server.name:
            raise UsageError(f"there is no server {asked.tool!r:.60}", hint=f"only {self.server.name}")
        response = await self.server.serve(asked.input)
        # The agent waits for an answer also to what MCP has none for.
        return {"jsonrpc": "2.0", "id": 0, "result": {}} if response is None else response

    def close(self, request: str) -> None:
        task = self._tasks.pop(request, None)
        if task is not None and task is not asyncio.current_task():
            task.cancel()

    def end(self) -> None:
        for request in list(self._tasks):
            self.close(request)

    async def wait_ended(self) -> None:
        """Until none runs any more, and not for ever: see `Calls`."""
        await asyncio.gather(*(each.wait_ended() for each in (self.hooks, self.server, *self._former)))
