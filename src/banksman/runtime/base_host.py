"""The host: the owner of every command and every session of one loop.

It promises that nothing it started outlives it: closing it, leaving its `async with`, or the end of its loop ends every
session and every command by the ladder. Its commands are in commands/registry.py; here are its sessions, and its own
life from the loop that it is bound to, to the last close.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import enum
import logging
import os
import threading
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, cast

from banksman.commands.options import check_seconds, clamp_timeout
from banksman.commands.registry import CommandStarter
from banksman.commands.result import Ended
from banksman.errors import BanksmanError, Closed, NotFound, StoreError, UsageError

if TYPE_CHECKING:
    from banksman.core.wire.redaction import Redactor
    from banksman.sessions.cluster_hooks import ClusterHooks
    from banksman.sessions.questions import OnQuestion
    from banksman.sessions.registry import SessionRegistry
    from banksman.sessions.session import Session
    from banksman.sessions.session_spec import Permit
    from banksman.sessions.tools import Tool
    from banksman.store.log import KnownSession, Log, MultiSessionPage

log = logging.getLogger("banksman")


class SettleTime(enum.Enum):
    """When what dead hosts have left in the store is settled: as the host is entered, or with its first session."""

    AT_START = enum.auto()
    # And whoever wants no sessions can do without a store that cannot be opened.
    AT_START_IF_IT_CAN = enum.auto()
    WHEN_NEEDED = enum.auto()


def running_loop() -> asyncio.AbstractEventLoop:
    """`UsageError` where asyncio runs no loop: in plain code, and under trio, which has a loop of its own."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        hint = "run it by asyncio.run(); under trio, or without any loop, use banksman.threads (in a worker thread)"
        raise UsageError("there is no running asyncio event loop here", hint=hint) from None


class Host(CommandStarter):
    """Owns sessions and commands. `async with Host() as host`, or call `close()`. It belongs to the loop it is first
    used in."""

    def __init__(
        self,
        store: Callable[[], Log] | None = None,
        *,
        settles: SettleTime = SettleTime.WHEN_NEEDED,
        secrets: Sequence[str] = (),
        processes_max: int | None = None,
        starts_max: int | None = None,
        permit: Permit | None = None,
        finished_max: int = 256,
        finished_seconds_max: float = 3600.0,
        user_helper: Sequence[str] | None = None,
    ) -> None:
        """`store` makes the log, when the first session needs it; None: there will be no sessions. What it has to know
        first (`Log.ready`) is waited for by whatever is awaited first; what answers at once may be refused until then.
        `settles`: when it is needed for what hosts that died may have left in it. `secrets` are taken out of each event
        before it is written there: `core/wire/redaction.py` and `core/wire/stream_redaction.py` have the limits.

        `processes_max`: so many agents' processes at most; who was not needed for the longest time makes room, and
        resumes its conversation when it is asked again. `starts_max`: so many start at once; None: one a core.
        `user_helper`: see `process/attributes.py`.

        `permit` raises if a session that is found in the store may not be opened again as it was. It is asked before
        each start of a process, too.
        """
        for limit_name, limit in (("processes_max", processes_max), ("starts_max", starts_max)):
            if limit is not None and (isinstance(limit, bool) or not isinstance(cast(object, limit), int) or limit < 1):
                raise UsageError(f"{limit_name} cannot be {limit!r:.60}", hint="a whole number, 1 or more, or None")
        super().__init__(finished_max=finished_max, finished_seconds_max=finished_seconds_max, user_helper=user_helper)
        self._open_store = store
        self._settles = settles
        self._secrets = secrets
        self._limits = processes_max, starts_max
        self._permit = permit
        self._sessions: SessionRegistry | None = None
        # When the store could not be opened the last time; None: it was not tried, or is open.
        self._open_failed_at: float | None = None
        # Weak, because the default host of a loop is found by it and must not keep it.
        self._loop: Callable[[], asyncio.AbstractEventLoop | None] | None = None
        self._guard: AsyncGenerator[None] | None = None
        self._draining: asyncio.Task[None] | None = None
        self._deadlines: list[asyncio.TimerHandle] = []

    async def __aenter__(self) -> Self:
        self._bind()
        if self.settles_at_start:
            try:
                await self._own_sessions().settle()
            except BaseException as exc:
                if self._settles is SettleTime.AT_START_IF_IT_CAN and isinstance(exc, StoreError):
                    log.warning("! the store cannot be used, and sessions need it: %s", exc)
                else:
                    await self.close()  # Nobody else will: it was not entered.
                    raise
        return self

    @property
    def settles_at_start(self) -> bool:
        """There is something to be done on entering it."""
        return self._settles is not SettleTime.WHEN_NEEDED

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        sessions = sum(not session.is_closed for session in self.our_sessions())
        return f"<Host {sessions} sessions, {self._command_registry}{', closing' * self._is_closing}>"

    # -- sessions ----------------------------------------------------------------------------------------------------
    async def open(
        self,
        agent: str = "claude",
        *,
        cwd: str | os.PathLike[str] | None = None,
        name: str | None = None,
        command: str | Sequence[str] | None = None,
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        inherit_env: bool = True,
        model: str | None = None,
        permission_mode: str | None = None,
        system_prompt: str | None = None,
        mcp_servers: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] | None = None,
        resume: str | None = None,
        fork: bool = False,
        on_question: OnQuestion | None = None,
        hooks: Mapping[str, Any] | None = None,
        tools: Sequence[Tool] = (),
        rules: Mapping[str, str] | None = None,
        labels: Sequence[str] = (),
        id: str | None = None,
    ) -> Session:
        """Open a session with an agent. Its process starts with the first ask.

        `command` replaces the profile's whole command; what its dialect needs is still added, then `args`. `resume`: a
        conversation of the agent's own, to go on with: `NotOwner` if another session of this store has it. `fork`: to
        begin as a copy of it, and leave it as it is. `mcp_servers` as ACP has them. `options`: see
        `sessions/arguments.py`.

        Questions of the agent go to `on_question`, its hooks to `hooks` (by event: a callable, a `Hook`, or several),
        and `tools` are offered to it; all of these live in this process. `rules`, from names of tools to "allow",
        "deny" or "ask", say what needs no question; with Claude Code "deny" and "ask" hold whatever its own settings
        are, with the others for what they ask about and what they have us do: see docs/agents.md.

        Names are unique in a store. Under the `name` of a session that is open here it is that session, opened anew:
        callbacks, rules and numbers hold at once (but for the ladder's and `frame_bytes_max`, which are a process's),
        and what a process is started with from its next turn on. Under the name of any other session of the store it
        is that one, claimed and taken over: the conversation goes on, who waits in it is served, and a turn that was
        open when its host died has the outcome UNKNOWN. `NotOwner`: a live host elsewhere has it.

        `labels`: what a host must have to take the session over, in a store that many hosts share: docs/server.md.

        `id`: the one that a new session gets, for who must find it again though it was never told of it; `UsageError`
        if the store has a session of that id.
        """
        # Loaded with the first session: whoever only runs commands pays for none of it.
        from banksman.sessions.session_spec import SessionSpec  # noqa: PLC0415

        self._bind()
        if self._is_closing or self._is_draining:
            raise Closed("the host is closing; it opens nothing more", hint="open another Host")
        spec = SessionSpec(
            agent,
            cwd=cwd,
            command=command,
            args=args,
            env=env,
            inherit_env=inherit_env,
            model=model,
            permission_mode=permission_mode,
            system_prompt=system_prompt,
            mcp_servers=mcp_servers,
            options=options,
            resume=resume,
            forks=fork,
            hooks=hooks,
            tools=tools,
            rules_wanted=rules,
            labels=labels,
        )
        sessions = self._own_sessions()
        try:
            return await sessions.open(spec, name=name, on_question=on_question, id=id)
        except BaseException:
            spec.close()
            raise

    async def fork(
        self, session: Session | str, *, name: str | None = None, on_question: OnQuestion | None = None
    ) -> Session:
        """Another session that begins as a copy of this one's conversation, opened as this one was, with its settings
        and its `on_question` unless another is given.

        The copy is made when the fork's process starts, at its first ask: what is said here until then is in it, what
        is said after that is not.
        """
        self._bind()
        if self._is_closing or self._is_draining:
            raise Closed("the host is closing; it opens nothing more", hint="open another Host")
        id = session if isinstance(session, str) else session.id
        return await self._own_sessions().fork(self.session(id), name, on_question)

    def session(self, id_or_name: str) -> Session:
        """Any session of the store, by its id or its name. To read it needs nothing more; the first ask claims it:
        `NotOwner` if a live host elsewhere has it. Of a host that is closed: one that it had."""
        return self._own_sessions().find(id_or_name)

    def sessions(self, after: str | None = None, *, limit: int | None = None) -> list[Session]:
        """Every session of the store, whoever has it, oldest first; or so many after the one of this id. Of a host that
        is closed: those that it had."""
        if self._is_closing and self._sessions is None:
            return []
        return self._own_sessions().all(after, limit)

    async def delete(self, session: Session | str) -> None:
        """Forget a session for good, with all its history; one that is open here is closed first. `NotOwner` if a live
        host elsewhere has it. `NotFound`: there is none, and what a deletion that was cut short had left is gone."""
        self._bind()
        sessions = self._own_sessions()
        try:
            found = self.session(session) if isinstance(session, str) else session
        except NotFound:
            await sessions.delete_remains(str(session))
            raise
        await sessions.delete(found)

    async def has_waiting_asks(self, known: KnownSession) -> bool:
        """Whether somebody still waits in a session that nobody has."""
        from banksman.sessions.recovery import has_waiting_asks  # noqa: PLC0415

        return await has_waiting_asks(self._own_sessions().store, known)

    async def take_over(self, id: str) -> Session:
        """Go on with a session of the store that nobody has, or whose host has died, as it was opened the last time.
        `NotOwner`: a live host elsewhere has it. `UsageError`: what its log says is not enough to open it again."""
        self._bind()
        return await self._own_sessions().take_over(id)

    async def take_up(self) -> None:
        """Go on with the sessions in which an ask was accepted by a host that died, and that nobody has opened since.
        For a host that serves its store to others: they do not know that they should ask again."""
        self._bind()
        await self._own_sessions().take_up()

    # -- reading many ------------------------------------------------------------------------------------------------
    async def read_many(
        self, after: str | None = None, *, limit: int = 1000, sessions: Collection[str] | None = None
    ) -> MultiSessionPage:
        """Events of every session of the store, or of these, in the order in which they were committed, after a
        position; None: from the first. `position` of the page is where to go on."""
        self._bind()
        return await self._own_sessions().read_many(after, limit, sessions)

    async def wait_past(self, position: str) -> None:
        """Until something is committed after a position, in whichever session."""
        self._bind()
        await self._own_sessions().wait_past(position)

    def our_sessions(self) -> list[Session]:
        """Those that this host has, or had until they were closed, without a look into the store."""
        return [] if self._sessions is None else self._sessions.ours()

    @property
    def log(self) -> Log:
        """What keeps its sessions."""
        return self._own_sessions().store

    @property
    def redactor(self) -> Redactor | None:
        """What takes secrets out of what is stored; None: there are none."""
        return self._own_sessions().redactor

    def set_cluster_hooks(self, hooks: ClusterHooks | None) -> None:
        """Who tells other hosts which sessions are here; None: nobody any more."""
        self._own_sessions().cluster_hooks = hooks

    def _own_sessions(self) -> SessionRegistry:
        if self._sessions is None:
            if self._is_closing:
                raise Closed("the host is closed", hint="open another Host")
            self._bind()
            from banksman.core.wire.redaction import Redactor  # noqa: PLC0415
            from banksman.sessions.pool import Pool, starts_at_once  # noqa: PLC0415
            from banksman.sessions.registry import SessionRegistry  # noqa: PLC0415

            assert self._open_store is not None
            processes_max, starts_max = self._limits
            pool = Pool(processes_max=processes_max, starts_max=starts_max or starts_at_once())
            redactor = Redactor(self._secrets) if self._secrets else None
            try:
                store = self._open_store()
            except BanksmanError:
                self._open_failed_at = time.monotonic()
                raise
            self._open_failed_at = None
            self._sessions = SessionRegistry(store, pool, redactor, self._permit)
        return self._sessions

    async def drain(self, *, timeout: float | None = None) -> None:
        """Take nothing new, finish what runs, then close. Past `timeout` seconds what still runs is stopped.

        Cancelling only stops the waiting: the draining goes on.
        """
        self._finish_nowait(timeout)
        if self._draining is None:
            self._draining = asyncio.get_running_loop().create_task(self._finish_and_close())
        await asyncio.shield(self._draining)

    async def finish(self, *, timeout: float | None = None) -> None:
        """Take nothing new and finish what runs, as `drain` does, without closing: what was said can still be read.

        Cancelling only stops the waiting.
        """
        self._finish_nowait(timeout)
        await self._wait_finished()

    def _finish_nowait(self, timeout: float | None) -> None:
        self._bind()
        if timeout is not None:
            check_seconds("timeout", timeout)
        self._is_draining = True
        self._open_no_more()
        loop = asyncio.get_running_loop()
        for session in self.our_sessions():
            session.drain_nowait()
        seconds = clamp_timeout(timeout)
        if seconds is not None:
            # Neither it nor the draining is the caller's: of several deadlines the first one counts.
            self._deadlines.append(loop.call_later(seconds, self._stop_all))

    async def _finish_and_close(self) -> None:
        await self._wait_finished()
        await self.close()

    async def _wait_finished(self) -> None:
        # All at once: a command whose output is held for a reader runs on only while its end is waited for.
        closed = (session.wait_closed() for session in self.our_sessions())
        await asyncio.gather(self._command_registry.wait_empty(), *closed)
        # While a session finished, a `watch` may have started a search: that is a process too.
        await self._command_registry.wait_empty()
        for deadline in self._deadlines:
            deadline.cancel()

    def _open_no_more(self) -> None:
        if self._sessions is not None:
            self._sessions.open_no_more()

    def _stop_all(self) -> None:
        self._is_closing = True
        self._open_no_more()
        for session in self.our_sessions():
            session.end_nowait()
        for command in self._command_registry.running():
            command.stop_nowait(Ended.HOST_CLOSED)

    # -- closing -----------------------------------------------------------------------------------------------------
    async def close(self) -> None:
        """Close every session, stop every command by the ladder, and return when all are over. May be called again, and
        by several at once.

        Cancelling only stops the waiting.
        """
        self._bind()
        await self._drain()
        if self._draining is not None and self._draining is not asyncio.current_task():
            await asyncio.shield(self._draining)  # It has nothing left to wait for, and ends with us.
        self.dismiss_guard()

    async def _drain(self) -> None:
        self._stop_all()
        await asyncio.gather(*(session.wait_closed() for session in self.our_sessions()))
        await self._command_registry.wait_empty()
        if self._sessions is not None:
            await self._sessions.close()
            # Cancelled here, it is closed by whoever closes next: a log may be closed again.
            await self._sessions.store.close()

    def abandon_if_loop_is_closed(self) -> None:
        """A loop that was closed without a word to us takes its commands with it: the keepers end what is left."""
        loop = None if self._loop is None else self._loop()
        if loop is not None and loop.is_closed():
            self._is_closing = True
            self.dismiss_guard()
            for session in self.our_sessions():
                session.abandon()
            if self._sessions is not None:
                self._sessions.store.abandon()
            self._command_registry.abandon()

    def _bind(self) -> None:
        loop = running_loop()
        if self._loop is None:
            self._loop = weakref.ref(loop)
            _note_bound(self)
            # A loop that ends closes its async generators, and does so after it has cancelled its tasks. A suspended
            # one is therefore the place where we learn of the end in time to drain.
            self._guard = self._drain_at_loop_end()
            with contextlib.suppress(StopIteration):
                self._guard.__anext__().__await__().__next__()
        elif self._loop() is not loop:
            raise UsageError("this host belongs to another event loop", hint="make one Host per loop")

    async def _drain_at_loop_end(self) -> AsyncGenerator[None]:
        try:
            yield
        finally:
            # Without a guard there is no loop to drain in any more: see `dismiss_guard`.
            if self._guard is not None:
                await self._drain()
                # The generator holds its loop, and we are found by ours: one of the two must let go.
                self._guard = None

    def dismiss_guard(self) -> None:
        """At interpreter exit, with the loop left open: close the generator here, since nobody else can any more.

        Left to the collector it would be handed to a loop that never runs again, which warns about it.
        """
        guard, self._guard = self._guard, None
        if guard is not None:
            with contextlib.suppress(StopIteration, RuntimeError):
                guard.aclose().__await__().__next__()


# Every host that has a loop: to let go of those whose loop was closed without a word to them, and for the exit.
_bound: weakref.WeakSet[Host] = weakref.WeakSet()
# Protects `_bound`, which hosts of several threads share. Nothing is called while it is held.
_lock = threading.Lock()


def _note_bound(host: Host) -> None:
    """Note that a host is in use, and look after the others."""
    with _lock:
        others = list(_bound)
        _bound.add(host)
    for other in others:
        other.abandon_if_loop_is_closed()


def _dismiss_guards() -> None:
    for host in list(_bound):
        host.dismiss_guard()


def _renew_lock() -> None:
    """In a forked child: whichever thread held it is not here to release it."""
    global _lock  # noqa: PLW0603
    _lock = threading.Lock()


atexit.register(_dismiss_guards)
os.register_at_fork(after_in_child=_renew_lock)
