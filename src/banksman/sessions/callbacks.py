"""What the agent calls in the caller's process: hooks and tools, and what it has its client do for it: files and
terminals. Each call is a task that ends with its request."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from banksman.core.dialects.meaning import Requested, Wants
from banksman.core.session.effects import CallBack, EndTerminals
from banksman.core.session.facts import CallbackAnswered, TerminalsEnded
from banksman.errors import BanksmanError, UsageError
from banksman.sessions.driver import Driver
from banksman.sessions.hooks import Hooks, RequestTasks
from banksman.sessions.tools import ToolServer
from banksman.sessions.workspace import Workspace


class Callbacks:
    """Those of one session. It owns the calls; what is called is `hooks`, `server` and `workspace`."""

    def __init__(self, driver: Driver, hooks: Hooks, server: ToolServer) -> None:
        self._driver = driver
        self.hooks = hooks
        self.server = server
        # That of the process that runs, if it is served any.
        self.workspace: Workspace | None = None
        # Those that were replaced, and may have something running that was cancelled and has not ended.
        self._former: list[Hooks | ToolServer | Workspace] = []
        self._tasks = RequestTasks("a callback")

    def replace(self, hooks: Hooks, server: ToolServer) -> None:
        if hooks is not self.hooks:
            # Only those: a session may be opened again and again.
            self._former = [each for each in (*self._former, self.hooks, self.server) if each.is_running]
        self.hooks, self.server = hooks, server

    def work_in(self, workspace: Workspace | None) -> None:
        """Another process is started, and this is what it works in. What the one before had running is ended."""
        former, self.workspace = self.workspace, workspace
        if former is not None:
            former.end()
            self._former = [each for each in (*self._former, former) if each.is_running]

    def end_terminals(self, effect: EndTerminals) -> None:
        """A turn is interrupted: the commands that its agent has had us run in it end with it, or are told of."""
        if self.workspace is None:
            return
        commands = self.workspace.stop_terminals(effect.since, ends=effect.ends)
        if commands:
            now = self._driver.now()
            self._driver.dispatch(TerminalsEnded(now, effect.process, effect.turn, commands))

    def call(self, effect: CallBack) -> None:
        # A task, so that nothing of the caller's ever runs inside the door.
        answer = self._answering(effect.asked)
        request = effect.asked.request
        self._tasks.start(request, self._call(effect.process, request, answer))

    async def _call(self, process: int, request: str, answer: Callable[[], Awaitable[Mapping[str, Any]]]) -> None:
        response: Mapping[str, Any] | None = None
        error = ""
        try:
            response = await answer()
        except BanksmanError as exc:
            error = str(exc)
        except BaseException as exc:
            error = f"the callback ended by {type(exc).__name__}"
            raise
        finally:
            # Whatever became of it: an agent that is not answered waits for ever.
            self._driver.dispatch(CallbackAnswered(self._driver.now(), process, request, response, error))

    def _answering(self, asked: Requested) -> Callable[[], Awaitable[Mapping[str, Any]]]:
        """Who answers it: of a workspace the one that there is now, and before its turn is interrupted. The task begins
        a moment later."""
        if asked.wants is Wants.WORKSPACE and self.workspace is not None:
            return self.workspace.serving(asked.subtype, asked.input)
        return functools.partial(self._answer, asked)

    async def _answer(self, asked: Requested) -> Mapping[str, Any]:
        if asked.wants is Wants.HOOK:
            return await self.hooks.call(asked.tool, asked.input)
        if asked.wants is Wants.WORKSPACE:
            raise UsageError(f"{asked.subtype!r:.60} is not served here", hint="no files, and no terminals")
        if asked.tool != self.server.name:
            raise UsageError(f"there is no server {asked.tool!r:.60}", hint=f"only {self.server.name}")
        response = await self.server.serve(asked.input)
        # The agent waits for an answer also to what MCP has none for.
        return {"jsonrpc": "2.0", "id": 0, "result": {}} if response is None else response

    def close(self, request: str) -> None:
        self._tasks.cancel(request)

    def end(self) -> None:
        self._tasks.cancel_all()
        if self.workspace is not None:
            self.workspace.end()

    def lose(self, kill_by: float) -> None:
        """The session is not ours any more: its terminals end with its process, and not after it."""
        for each in (self.workspace, *self._former):
            if isinstance(each, Workspace):
                each.end(kill_by)

    def abandon(self) -> None:
        """The loop is closed under it: nothing can be waited for any more."""
        for each in (self.workspace, *self._former):
            if isinstance(each, Workspace):
                each.abandon()

    async def wait_ended(self) -> None:
        """Until none runs any more, and not for ever: see `UserCalls`. Of a command that was run, nothing is left."""
        workspaces = () if self.workspace is None else (self.workspace,)
        await asyncio.gather(*(each.wait_ended() for each in (self.hooks, self.server, *workspaces, *self._former)))
