"""The workspace of one process of an agent: it answers requests for files and terminals, by ACP version 1.

`Workspace` owns the root, the terminals and the thread that works on files. It lives as long as the process that asks:
the next process of the session has another one, which knows none of these terminals and opens the root anew. All of it
is for the loop it was made in; nothing here suspends but `serve` and `wait_ended`. The parameters of a request may be
anything: each is checked, and the error is written for the agent.
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
from banksman.sessions.workspace.terminals import Start, TerminalEnvironment, TerminalOrder, Terminals, start_command

log = logging.getLogger("banksman")

# How long the end of a session waits for a blocking call: a disk that hangs must not keep it for ever.
ENDING_SECONDS_MAX = 5.0
# Words and variables of one command. The kernel's own limit is in bytes; this one is for what we do with each.
COUNT_MAX = 10_000

T = TypeVar("T")


# -- parameters ------------------------------------------------------------------------------------------------------
def text(params: Mapping[str, Any], name: str) -> str:
    value = params.get(name)
    if not isinstance(value, str):
        raise _wrong(name, value, "text")
    return value


def number(params: Mapping[str, Any], name: str) -> int | None:
    """A whole number from 0 on; None: it is not said."""
    value = params.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise _wrong(name, value, "a whole number, 0 or more")
    return value


def words(params: Mapping[str, Any], name: str) -> list[str]:
    return [_text(name, item) for item in _items(params, name)]


def variables(params: Mapping[str, Any], name: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for item in _items(params, name):
        if not isinstance(item, Mapping):
            raise _wrong(name, item, '{"name": …, "value": …}, both text')
        pair = cast(Mapping[str, Any], item)
        found[_text(name, pair.get("name"))] = _text(name, pair.get("value"))
    return found


def _items(params: Mapping[str, Any], name: str) -> Sequence[Any]:
    value = params.get(name)
    if value is None:
        return ()
    items = cast(Sequence[Any], value) if isinstance(value, list | tuple) else None
    if items is None or len(items) > COUNT_MAX:
        raise _wrong(name, cast(object, value), f"a list of at most {COUNT_MAX}")
    return items


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise _wrong(name, value, "text")
    return value


def _wrong(name: str, value: object, hint: str) -> UsageError:
    # Of a huge value not even its whole repr is made.
    told = f"{value[:60]!r}" if isinstance(value, str) else type(value).__name__
    return UsageError(f"{name} cannot be {told}", hint=hint)


# -- blocking calls --------------------------------------------------------------------------------------------------
class BlockingCalls:
    """Calls that block, in a thread: one at a time, in the order in which they were asked for.

    An agent that writes a file twice, or writes one and runs it, means that order, though it does not wait for the
    answers. One thread per session is the bound. A call cannot be cancelled while it runs; it is given up: it asks
    `is_wanted` before it does what cannot be undone.
    """

    def __init__(self) -> None:
        self._one_at_a_time = asyncio.Lock()
        # Each until its thread is done with it, whoever still waits; and how it is told that nobody does.
        self._calls: dict[asyncio.Task[Any], threading.Event] = {}

    async def run(self, call: Callable[[Callable[[], bool]], T], *, discard: Callable[[T], None] | None = None) -> T:
        """What `call(is_wanted)` returns or raises. Cancelled, it is given up, and its place is kept until it ends;
        `discard` gets what it returned, if nobody does."""
        given_up = threading.Event()
        task = asyncio.ensure_future(self._in_turn(call, given_up))
        self._calls[task] = given_up
        task.add_done_callback(self._over)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            given_up.set()
            if discard is not None:
                # At once, if it is over already: it may have been in the very pass of the loop in which we were
                # cancelled.
                task.add_done_callback(lambda _: _discard(task, discard))
            raise

    async def _in_turn(self, call: Callable[[Callable[[], bool]], T], given_up: threading.Event) -> T:
        # Held across the wait for the thread, which is the point of it; nothing else is called while it is held.
        async with self._one_at_a_time:
            if given_up.is_set():
                raise Closed("nobody waits for this any more; nothing was done")
            return await asyncio.to_thread(call, lambda: not given_up.is_set())

    def _over(self, task: asyncio.Task[Any]) -> None:
        del self._calls[task]
        # Looked at: whoever asked may be gone, and asyncio complains of what nobody looked at.
        if not task.cancelled():
            task.exception()

    @property
    def is_running(self) -> bool:
        return bool(self._calls)

    def give_up(self) -> None:
        for given_up in self._calls.values():
            given_up.set()

    async def wait_ended(self) -> None:
        """Until none is at it any more, and not for ever."""
        if self._calls:
            _, late = await asyncio.wait(set(self._calls), timeout=ENDING_SECONDS_MAX)
            if late:
                log.warning("! %d calls to the file system go on after the end of their session", len(late))


def _discard(task: asyncio.Task[T], discard: Callable[[T], None]) -> None:
    if not task.cancelled() and task.exception() is None:
        discard(task.result())


# -- requests --------------------------------------------------------------------------------------------------------
# What can be served, by the beginning of a method's name.
GROUPS = ("fs", "terminal")
# As much as the kernel takes in one word (MAX_ARG_STRLEN): no program's name and no line for a shell is longer.
COMMAND_CHARS_MAX = 128 << 10

Params = Mapping[str, Any]
Result = Mapping[str, Any]


class Workspace:
    """`root`: the session's folder. `env`, `inherit_env` and `scrub` are those that the agent is started with."""

    def __init__(
        self,
        root: str,
        start: Start = start_command,
        *,
        env: Mapping[str, str] | None = None,
        inherit_env: bool = True,
        scrub: Iterable[str] = (),
        serves: Iterable[str] = GROUPS,
    ) -> None:
        self.serves = tuple(serves)
        self._path = root
        # Opened with the first request: most agents never make one.
        self._root: Root | None = None
        self._is_over = False
        self._blocking = BlockingCalls()
        self._terminals = Terminals(start, TerminalEnvironment(env, inherit_env, tuple(scrub)))

    def __repr__(self) -> str:
        return f"<Workspace {self._path} {'over' if self._is_over else 'open'} {self._terminals}>"

    async def serve(self, method: str, given: Any) -> Result:
        """The result of a request. `BanksmanError`, with a text for the agent, for what cannot be, whatever is in it.

        Cancelled, a wait ends, a command that was to be started is not, and a write that is not done yet is not done.
        """
        return await self.serving(method, given)()

    def serving(self, method: str, given: Any) -> Callable[[], Awaitable[Result]]:
        """The same, as of now, to be awaited later: a turn that is interrupted in between takes it along."""
        return functools.partial(self._serve, method, given, self._terminals.generation)

    async def _serve(self, method: str, given: Any, generation: int) -> Result:
        methods = {name: call for name, call in self._methods().items() if name.partition("/")[0] in self.serves}
        if method not in methods:
            raise UsageError(f"{method[:60]!r} is not served here", hint=f"only {', '.join(methods) or 'nothing'}")
        if self._is_over:
            raise Closed("the session's process is gone, and so is what it worked in")
        if not isinstance(given, Mapping):
            raise UsageError(f"the params of {method} cannot be {type(given).__name__}", hint="an object")
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

    # -- files -------------------------------------------------------------------------------------------------------
    async def _read(self, given: Params, _: int) -> Result:
        root = self._open_root()
        path = safe_paths.check(root, given.get("path"))
        line = number(given, "line")
        limit = number(given, "limit")
        content = await self._blocking.run(lambda _wanted: files.read(root, path, line=line or 1, limit=limit))
        return {"content": content}

    async def _write(self, given: Params, _: int) -> Result:
        root = self._open_root()
        path = safe_paths.check(root, given.get("path"))
        content = text(given, "content")
        try:
            data = content.encode()
        except UnicodeEncodeError as exc:
            raise UsageError("the content holds half a character", hint="text that can be encoded") from exc
        if len(data) > files.FILE_BYTES_MAX:
            raise UsageError(f"the content is larger than {files.FILE_BYTES_MAX} bytes", hint="less of it")
        await self._blocking.run(lambda is_wanted: files.write(root, path, data, is_wanted))
        return {}

    # -- terminals ---------------------------------------------------------------------------------------------------
    async def _create(self, given: Params, generation: int) -> Result:
        root = self._open_root()
        cwd = given.get("cwd")
        folder = root.path if cwd is None else safe_paths.check(root, cwd)
        command = text(given, "command")
        if len(command) > COMMAND_CHARS_MAX:
            hint = f"at most {COMMAND_CHARS_MAX} characters; a longer script can be written to a file"
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

    # -- the end -----------------------------------------------------------------------------------------------------
    def ending_with(self, on_report: OnReport) -> OnReport:
        """Who hears what the agent's process does, and ends this with it."""

        def hear(event: AgentReport) -> None:
            if isinstance(event, Exited | StartFailed | ProcessGone):
                self.end()
            on_report(event)

        return hear

    @property
    def is_running(self) -> bool:
        return self._terminals.is_running or self._blocking.is_running

    def stop_terminals(self, since: float, *, ends: bool) -> tuple[Swept, ...]:
        """A turn is interrupted that was begun then (`loop.time()`): its terminals end, and none that was asked for
        until now begins. Those that were running. `ends` False: they go on, and are only told."""
        return self._terminals.stop(since, ends=ends)

    def end(self, kill_by: float | None = None) -> None:
        """The process is gone, or the session: every terminal ends, and nothing more is served. May be called again:
        `kill_by` (`time.monotonic()`) shortens what is under way."""
        if not self._is_over:
            self._is_over = True
            self._close_root()
            self._blocking.give_up()
            self._terminals.end()
        if kill_by is not None:
            self._terminals.end(kill_by)

    def abandon(self) -> None:
        """The loop is closed: the keepers end what runs."""
        self._is_over = True
        self._close_root()
        self._terminals.abandon()

    def _close_root(self) -> None:
        if self._root is not None:
            self._root.folder.close()

    async def wait_ended(self) -> None:
        """Until no command of it is left, and no thread is at it. Called after `end`."""
        await self._terminals.wait_ended()
        await self._blocking.wait_ended()
