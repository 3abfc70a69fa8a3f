"""Hooks of a session's opening and closing: `on_open` and `on_close`, programs or functions.

They make and remove what a session works in: a worktree, a container, a checkout.

- `on_open` runs when a host begins to serve the session: at its open, and after a close, a crash or
  a move. No process of an earlier owner is left then, and the log has nothing of this opening. If
  the hook fails, the opening fails, with the stderr of the hook.
- `on_close` runs when the session is closed, and no process of it is left. If it fails, the failure
  is logged, and the session is closed all the same.

A session whose process continues (a hand-over, `survive`) is not opened again, so no hook runs. A
session that leaves for another host is not closed. A host that dies during `on_close` leaves it
undone, and the next host that settles the session runs it again (recovery.py). So both hooks must
accept that their work is done already.

A plain function runs in a thread, because it may block. After its time limit the opening fails, and
the thread ends when the function returns.

**Bounds.** A program is a command like any other: a keeper ends its whole tree, after the time
limit, a cancelled open, a lost lease, or the death of the host. It has the environment of the agent
with `BANKSMAN_CWD` and `BANKSMAN_SESSION`, the user of the host, and no prefix. Its
output is kept up to `OUTPUT_BYTES_MAX`.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
import os
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, cast

from banksman.commands.command import Command
from banksman.commands.options import Options
from banksman.commands.result import Finished
from banksman.core.redaction.redactor import Redactor
from banksman.core.session.history import SessionHistory
from banksman.errors import BanksmanError, Closed, HookFailed
from banksman.sessions import recovery, spec_record
from banksman.sessions.hooks import error_text
from banksman.sessions.ownership import OwnershipGuard
from banksman.sessions.session_spec import Permit, SessionSpec
from banksman.store.log import Log
from banksman.store.log_values import KnownSession
from banksman.tasks import OwnedTasks

log = logging.getLogger("banksman")

OUTPUT_BYTES_MAX = 64 << 10
# Length of the end of stderr in an error.
STDERR_CHARACTERS_MAX = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class HookCall:
    """Argument of a hook that is a function.

    `session`: the id of the session. `cwd`: its folder.
    """

    session: str
    name: str | None
    cwd: str


HookFunction = Callable[[HookCall], "Awaitable[None] | None"]


class SessionHooks:
    """Runs the hooks of the sessions of one host. Belongs to one event loop."""

    def __init__(
        self,
        guard: OwnershipGuard,
        redactor: Redactor | None,
        permit: Permit | None,
        user_helper: Sequence[str],
    ) -> None:
        """`guard`: has the present lease page of the host. The others: see the registry."""
        self._guard = guard
        self._redactor = redactor
        self._permit = permit
        self._user_helper = user_helper
        # The time limits of the opening hooks: `stop_opening` moves them to now.
        self._opening: set[asyncio.Timeout] = set()
        self._commands: set[Command] = set()
        self._closing = OwnedTasks()
        self._is_closing = False

    # -- opening ----------------------------------------------------------------------------------
    @asynccontextmanager
    async def opening(
        self, spec: SessionSpec, session: str, name: str | None
    ) -> AsyncGenerator[recovery.Prepares]:
        """Yield the function that runs `on_open`. Raises `HookFailed`.

        If a new session cannot be opened after that, `on_close` runs. The place of another session
        stays, because it may have work in it.
        """
        call = HookCall(session=session, name=name, cwd=spec.cwd)
        is_made = False

        async def prepares(past: SessionHistory) -> None:
            nonlocal is_made
            if spec.containment.on_open:
                await self._open(spec, call)
                is_made = past.opened is None
                # The hook may have made the folder, which decides what a program is.
                spec.check_programs()

        try:
            yield prepares
        except BaseException:
            if is_made:
                await self._close(spec, call)
            raise

    async def _open(self, spec: SessionSpec, call: HookCall) -> None:
        if self._is_closing:
            raise _closing()
        limit = asyncio.timeout(spec.hook_seconds)
        self._opening.add(limit)
        try:
            failure = await self._run("on_open", spec, call, limit)
        finally:
            self._opening.discard(limit)
        if failure is None:
            return
        if self._is_closing:
            raise _closing()
        raise HookFailed(f"cannot open session {call.session}: {failure}", session=call.session)

    def stop_opening(self) -> None:
        """End the opening hooks, because the host closes. It may be called again."""
        if self._is_closing:
            return  # No hook has begun since.
        self._is_closing = True
        now = asyncio.get_running_loop().time()
        for limit in self._opening:
            # A limit that has expired cannot be moved. Its hook is being stopped already.
            if not limit.expired():
                limit.reschedule(now)

    # -- closing ----------------------------------------------------------------------------------
    async def _close(self, spec: SessionSpec, call: HookCall) -> None:
        """Run `on_close`. A failure is logged."""
        failure = await self._run("on_close", spec, call, asyncio.timeout(spec.hook_seconds))
        if failure is not None:
            log.warning("session %s: %s", call.session, failure)

    def close_soon(
        self, spec: SessionSpec, session: str, name: str | None, release: Callable[[], None]
    ) -> None:
        """Run `on_close` of a session that is closed, then release the session."""

        async def close() -> None:
            try:
                await self._close(spec, HookCall(session=session, name=name, cwd=spec.cwd))
            finally:
                release()

        if spec.containment.on_close:
            self._closing.start(close())
        else:
            release()

    async def close_recorded(self, known: KnownSession, past: SessionHistory) -> None:
        """Run the `on_close` of a session without a live owner, as its log records it."""
        opened = past.opened or {}
        if not _records_on_close(past):
            return
        try:
            if self._permit is not None:
                self._permit(opened)
            spec = spec_record.rebuild(known.agent, opened, user_helper=self._user_helper)
        except Exception as exc:
            log.warning("session %s: cannot run on_close: %s", known.id, exc)
            return
        try:
            await self._close(spec, HookCall(session=known.id, name=known.name, cwd=spec.cwd))
        finally:
            spec.close()

    async def close_deleted(self, store: Log, session: str) -> None:
        """Run the `on_close` of a session that has no live owner and was not closed."""
        if (known := store.find(session)) is None:
            return
        owner = known.owner
        # This host has released the session before, and the release may not be committed yet.
        if owner is not None and owner.is_alive and not owner.is_here:
            return
        try:
            if _records_on_close(await recovery.load_known(store, known)):
                await recovery.clean_up(store, known, self.close_recorded, is_deleted=True)
        except BanksmanError as exc:
            # A session with a damaged log can be deleted, too.
            log.warning("session %s: cannot run on_close: %s", known.id, exc)

    async def wait_closed(self) -> None:
        """Wait until every session that is closing is released."""
        await self._closing.wait()

    def abandon(self) -> None:
        """Give up the hooks, because the event loop is closed. The keepers end their trees."""
        for command in self._commands:
            command.abandon()

    # -- a run ------------------------------------------------------------------------------------
    async def _run(
        self, name: str, spec: SessionSpec, call: HookCall, limit: asyncio.Timeout
    ) -> str | None:
        """Run a hook, and return why it has failed."""
        hook = getattr(spec.containment, name)
        if not hook:
            return None
        command: Command | None = None
        failure: str | None = None
        try:
            async with limit:
                if callable(hook):
                    await _call(cast(HookFunction, hook), call)
                else:
                    command = self._start(spec, name, call)
                    await _wait_over(command)
                    failure = _failure_of(command.result())
        except Exception as exc:
            # A function may raise anything, and a program may not start.
            failure = str(exc) if isinstance(exc, BanksmanError) else error_text(exc)
            if isinstance(exc, TimeoutError) and limit.expired():
                failure = f"it has not ended within {spec.hook_seconds:g} s (options: hook_seconds)"
        return None if failure is None else self._told(f"{name} failed: {failure}", command)

    def _start(self, spec: SessionSpec, name: str, call: HookCall) -> Command:
        command = Command(
            spec.hook_launch(name, call.session),
            Options(grace=spec.grace, output_bytes_max=OUTPUT_BYTES_MAX),
            id=os.urandom(6).hex(),
            on_end=self._commands.discard,
            lease=self._guard.lease,
        )
        self._commands.add(command)
        return command

    def _told(self, failure: str, command: Command | None) -> str:
        """Return a failure with the end of the hook's stderr, without secrets."""
        stderr = ""
        if command is not None and command.pid is not None:
            stderr = command.result().stderr.text[-STDERR_CHARACTERS_MAX:].strip()
        text = f"{failure}: {stderr}" if stderr else failure
        return text if self._redactor is None else self._redactor.redact_text(text)


def _closing() -> Closed:
    return Closed("cannot open a session: the host is closing", hint="open another Host")


def _records_on_close(past: SessionHistory) -> bool:
    contained: Mapping[str, Any] = (past.opened or {}).get("containment") or {}
    return bool(contained.get("on_close"))


async def _call(hook: HookFunction, call: HookCall) -> None:
    """Call a function: a coroutine function in the event loop, and any other in a thread."""
    try:
        is_async = inspect.iscoroutinefunction(hook)
        answer = hook(call) if is_async else await _in_thread(hook, call)
        if inspect.isawaitable(answer):
            await answer
    except (SystemExit, asyncio.CancelledError) as exc:
        # Only a hook that raises it by itself has failed.
        task = asyncio.current_task()
        if isinstance(exc, asyncio.CancelledError) and task is not None and task.cancelling():
            raise
        raise BanksmanError(error_text(exc)) from exc


async def _in_thread(hook: HookFunction, call: HookCall) -> Any:
    """Call a function that may block. A call that is cancelled leaves its thread alone.

    The thread is a daemon, and not one of the loop's executor: a function that never returns must
    not delay the end of the program.
    """
    loop = asyncio.get_running_loop()
    over: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

    def settle(answer: Any, error: BaseException | None) -> None:
        if not over.done():
            over.set_result((answer, error))

    def run() -> None:
        answer, error = None, None
        try:
            answer = hook(call)
        except BaseException as exc:
            error = exc
        # The loop may be closed meanwhile.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, answer, error)

    context = contextvars.copy_context()
    name = f"banksman-hook-{call.session}"
    threading.Thread(target=context.run, args=(run,), name=name, daemon=True).start()
    answer, error = await over
    if error is not None and not isinstance(error, Exception):
        # No Ctrl-C reaches a thread: the hook has raised it by itself. Here it would end the loop.
        raise BanksmanError(error_text(error)) from error
    if error is not None:
        raise error
    return answer


async def _wait_over(command: Command) -> None:
    """Wait for the end of a program and of its tree. A cancelled call stops it first."""
    try:
        await command.wait_over()
    except asyncio.CancelledError:
        command.stop_nowait()
        while not command.is_over:
            with suppress(asyncio.CancelledError):
                await command.wait_settled()
        raise


def _failure_of(finished: Finished) -> str | None:
    if finished.code == 0:
        return None
    if finished.signal is not None:
        return f"it was ended by signal {finished.signal}"
    return f"it exited with code {finished.code}"
