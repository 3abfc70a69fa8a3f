"""Handler of an agent's file and terminal requests, according to ACP version 1.

`Workspace` checks the parameters and passes each request to `files.py` or `terminals.py`. It owns
the root, the terminals and the thread for file operations (`BlockingCalls`). It lives as long as
the agent process that sends the requests. The next process of the session gets a new workspace,
which does not know these terminals and opens the root again.

All calls belong to the event loop that created the workspace. Only `serve` and `wait_ended`
suspend. The parameters of a request are untrusted: each is checked, and the error text is written
for the agent.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

from banksman.core.process_facts import Exited, ProcessGone, StartFailed, Swept
from banksman.errors import Closed, UsageError
from banksman.sessions.agent_process import AgentReport, OnReport
from banksman.sessions.workspace import files, safe_paths
from banksman.sessions.workspace.safe_paths import Folder, Root
from banksman.sessions.workspace.terminals import (
    Start,
    TerminalEnvironment,
    TerminalOrder,
    Terminals,
    start_command,
)

log = logging.getLogger("banksman")

# Time that the end of a session waits for a blocking call. A hanging disk must not block it
# forever.
ENDING_SECONDS_MAX = 5.0
# Limit on arguments and variables of one command. The kernel limits only the bytes; this limit
# bounds the work per item.
COUNT_MAX = 10_000

T = TypeVar("T")


# -- parameters ----------------------------------------------------------------------------------
def text(params: Mapping[str, Any], name: str) -> str:
    """Return a required text."""
    value = params.get(name)
    if not isinstance(value, str):
        raise _wrong(name, value, "use text")
    return value


def number(params: Mapping[str, Any], name: str) -> int | None:
    """Return a whole number of at least 0; None if it is missing."""
    value = params.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise _wrong(name, value, "use a whole number, 0 or more")
    return value


def words(params: Mapping[str, Any], name: str) -> list[str]:
    """Return an optional list of texts."""
    return [_text(name, item) for item in _items(params, name)]


def variables(params: Mapping[str, Any], name: str) -> dict[str, str]:
    """Return an optional list of name and value pairs as a dict."""
    found: dict[str, str] = {}
    for item in _items(params, name):
        if not isinstance(item, Mapping):
            raise _wrong(name, item, 'use {"name": …, "value": …}, both text')
        pair = cast(Mapping[str, Any], item)
        found[_text(name, pair.get("name"))] = _text(name, pair.get("value"))
    return found


def _items(params: Mapping[str, Any], name: str) -> Sequence[Any]:
    value = params.get(name)
    if value is None:
        return ()
    items = cast(Sequence[Any], value) if isinstance(value, list | tuple) else None
    if items is None or len(items) > COUNT_MAX:
        raise _wrong(name, cast(object, value), f"use a list of at most {COUNT_MAX}")
    return items


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise _wrong(name, value, "use text")
    return value


def _wrong(name: str, value: object, hint: str) -> UsageError:
    # The repr of a huge value is never built as a whole.
    told = f"{value[:60]!r}" if isinstance(value, str) else type(value).__name__
    return UsageError(f"{name} cannot be {told}", hint=hint)


# -- blocking calls ------------------------------------------------------------------------------
class BlockingCalls:
    """Runs blocking calls in a thread, one at a time, in the order of the requests.

    An agent that writes a file twice, or writes a file and runs it, relies on that order without
    waiting for the answers. The limit is one thread per session. A running call cannot be
    cancelled, only abandoned: it checks `is_wanted` before its irreversible step.
    """

    def __init__(self) -> None:
        self._one_at_a_time = asyncio.Lock()
        # Calls that have not ended in their thread, even without a waiting caller. The event
        # signals that the call is abandoned.
        self._calls: dict[asyncio.Task[Any], threading.Event] = {}

    async def run(
        self, call: Callable[[Callable[[], bool]], T], *, discard: Callable[[T], None] | None = None
    ) -> T:
        """Return the result of `call(is_wanted)` or raise its exception.

        A cancelled call is abandoned, and the next call starts only after it has ended. `discard`:
        gets the result of an abandoned call.
        """
        given_up = threading.Event()
        task = asyncio.ensure_future(self._in_turn(call, given_up))
        self._calls[task] = given_up
        task.add_done_callback(self._over)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            given_up.set()
            if discard is not None:
                # Runs immediately if the call has ended. It may have ended in the same pass of the
                # loop as the cancellation.
                task.add_done_callback(lambda _: _discard(task, discard))
            raise

    async def _in_turn(
        self, call: Callable[[Callable[[], bool]], T], given_up: threading.Event
    ) -> T:
        # Held across the wait for the thread, to run one call at a time. No other code is called
        # under the lock.
        async with self._one_at_a_time:
            if given_up.is_set():
                raise Closed("the request was cancelled: nothing was done")
            return await asyncio.to_thread(call, lambda: not given_up.is_set())

    def _over(self, task: asyncio.Task[Any]) -> None:
        del self._calls[task]
        # Retrieve the exception, because the caller may be gone. Otherwise asyncio logs a warning.
        if not task.cancelled():
            task.exception()

    @property
    def is_running(self) -> bool:
        return bool(self._calls)

    def give_up(self) -> None:
        """Abandon all calls."""
        for given_up in self._calls.values():
            given_up.set()

    async def wait_ended(self) -> None:
        """Wait a limited time until the calls have ended."""
        if self._calls:
            _, late = await asyncio.wait(set(self._calls), timeout=ENDING_SECONDS_MAX)
            if late:
                message = "file system calls still run after the end of their session (calls=%d)"
                log.warning(message, len(late))


def _discard(task: asyncio.Task[T], discard: Callable[[T], None]) -> None:
    if not task.cancelled() and task.exception() is None:
        discard(task.result())


# -- requests ------------------------------------------------------------------------------------
# Groups of methods that can be served, by the prefix of the method.
GROUPS = ("fs", "terminal")
# The kernel's limit for one argument (MAX_ARG_STRLEN). No program name and no shell line can be
# longer.
COMMAND_CHARS_MAX = 128 << 10

Params = Mapping[str, Any]
Result = Mapping[str, Any]


class Workspace:
    """File and terminal requests of one agent process.

    `root`: the session's folder. `env`, `inherit_env`, `scrub`, `keep`, `limits`: the environment
    and the limits that the agent is started with.
    """

    def __init__(
        self,
        root: str,
        start: Start = start_command,
        *,
        env: Mapping[str, str] | None = None,
        inherit_env: bool = True,
        scrub: Iterable[str] = (),
        keep: Iterable[str] = (),
        limits: Mapping[str, Any] | None = None,
        serves: Iterable[str] = GROUPS,
    ) -> None:
        self.serves = tuple(serves)
        self._path = root
        # Opened by the first request, because most agents never send one.
        self._root: Root | None = None
        self._is_over = False
        self._blocking = BlockingCalls()
        environment = TerminalEnvironment(env, inherit_env, tuple(scrub), tuple(keep), limits)
        self._terminals = Terminals(start, environment)

    def __repr__(self) -> str:
        return f"<Workspace {self._path} {'over' if self._is_over else 'open'} {self._terminals}>"

    async def serve(self, method: str, given: Any) -> Result:
        """Serve a request and return its result.

        `BanksmanError`: the request failed; the error's text is for the agent. Cancelling the call
        ends a wait, prevents the start of a command and prevents a write that has not happened yet.
        """
        return await self.serving(method, given)()

    def serving(self, method: str, given: Any) -> Callable[[], Awaitable[Result]]:
        """Return a function that serves the request later, in the current generation.

        If the turn is interrupted in between, the request is cancelled with it.
        """
        return functools.partial(self._serve, method, given, self._terminals.generation)

    async def _serve(self, method: str, given: Any, generation: int) -> Result:
        methods = {
            name: call
            for name, call in self._methods().items()
            if name.partition("/")[0] in self.serves
        }
        if method not in methods:
            hint = f"served methods: {', '.join(methods) or 'none'}"
            raise UsageError(f"{method[:60]!r} is not served here", hint=hint)
        if self._is_over:
            raise Closed("the session's process has ended, and its workspace is closed")
        if not isinstance(given, Mapping):
            message = f"the params of {method} cannot be {type(given).__name__}"
            raise UsageError(message, hint="use an object")
        return await methods[method](cast(Params, given), generation)

    def _methods(self) -> dict[str, Callable[[Params, int], Awaitable[Result]]]:
        return {
            "fs/read_text_file": self._read,
            "fs/write_text_file": self._write,
            "terminal/create": self._create,
            "terminal/output": self._output,
            "terminal/wait_for_exit": self._wait_for_exit,
            "terminal/kill": self._kill,
            "terminal/release": self._release,
        }

    # -- files ------------------------------------------------------------------------------------
    async def _read(self, given: Params, _: int) -> Result:
        root = self._open_root()
        path = safe_paths.check(root, given.get("path"))
        line = number(given, "line")
        limit = number(given, "limit")
        content = await self._blocking.run(
            lambda _wanted: files.read(root, path, line=line or 1, limit=limit)
        )
        return {"content": content}

    async def _write(self, given: Params, _: int) -> Result:
        root = self._open_root()
        path = safe_paths.check(root, given.get("path"))
        content = text(given, "content")
        try:
            data = content.encode()
        except UnicodeEncodeError as exc:
            message = f"cannot write {safe_paths.shown(path)}: the content has a lone surrogate"
            raise UsageError(message, hint="use text that can be encoded as UTF-8") from exc
        if len(data) > files.FILE_BYTES_MAX:
            reason = f"the content is larger than {files.FILE_BYTES_MAX} bytes"
            message = f"cannot write {safe_paths.shown(path)}: {reason}"
            raise UsageError(message, hint="write less")
        await self._blocking.run(lambda is_wanted: files.write(root, path, data, is_wanted))
        return {}

    # -- terminals --------------------------------------------------------------------------------
    async def _create(self, given: Params, generation: int) -> Result:
        root = self._open_root()
        cwd = given.get("cwd")
        folder = root.path if cwd is None else safe_paths.check(root, cwd)
        command = text(given, "command")
        if len(command) > COMMAND_CHARS_MAX:
            hint = f"use at most {COMMAND_CHARS_MAX} characters, or write the script to a file"
            raise UsageError("the command is too long", hint=hint)
        order = TerminalOrder(
            command=command,
            args=words(given, "args"),
            env=variables(given, "env"),
            cwd=folder,
            output_bytes_max=number(given, "outputByteLimit"),
        )
        find = functools.partial(
            self._blocking.run, lambda _: safe_paths.open_folder(root, folder), discard=Folder.close
        )
        return {"terminalId": await self._terminals.create(order, find, generation)}

    async def _output(self, given: Params, _: int) -> Result:
        return self._terminals.output(text(given, "terminalId"))

    async def _wait_for_exit(self, given: Params, _: int) -> Result:
        return await self._terminals.wait_for_exit(text(given, "terminalId"))

    async def _kill(self, given: Params, _: int) -> Result:
        await self._terminals.kill(text(given, "terminalId"))
        return {}

    async def _release(self, given: Params, _: int) -> Result:
        await self._terminals.release(text(given, "terminalId"))
        return {}

    def _open_root(self) -> Root:
        if self._root is None:
            self._root = safe_paths.open_root(self._path)
        return self._root

    # -- the end ----------------------------------------------------------------------------------
    def ending_with(self, on_report: OnReport) -> OnReport:
        """Return a report callback that also ends the workspace with the agent's process."""

        def hear(event: AgentReport) -> None:
            if isinstance(event, Exited | StartFailed | ProcessGone):
                self.end()
            on_report(event)

        return hear

    @property
    def has_terminals(self) -> bool:
        """Whether the agent may still use a terminal, even one whose command has ended."""
        return self._terminals.are_used

    @property
    def is_running(self) -> bool:
        return self._terminals.is_running or self._blocking.is_running

    def stop_terminals(self, since: float, *, ends: bool) -> tuple[Swept, ...]:
        """Stop the terminals of an interrupted turn, and return the running commands.

        Requests from before this call start no command afterwards. `since`: the begin of the turn
        (`loop.time()`). `ends`: False only returns the running commands and lets them run.
        """
        return self._terminals.stop(since, ends=ends)

    def end(self, kill_by: float | None = None) -> None:
        """End the workspace: stop every terminal and serve nothing more.

        Called when the process or the session ends. May be called again: `kill_by`
        (`time.monotonic()`) shortens a stop that is already running.
        """
        if not self._is_over:
            self._is_over = True
            self._close_root()
            self._blocking.give_up()
            self._terminals.end()
        if kill_by is not None:
            self._terminals.end(kill_by)

    def abandon(self) -> None:
        """Drop the workspace because the event loop is closed. The keepers end the commands."""
        self._is_over = True
        self._close_root()
        self._terminals.abandon()

    def _close_root(self) -> None:
        if self._root is not None:
            self._root.folder.close()

    async def wait_ended(self) -> None:
        """Wait until no command and no thread of the workspace is left.

        Must be called after `end`.
        """
        await self._terminals.wait_ended()
        await self._blocking.wait_ended()
