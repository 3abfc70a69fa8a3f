"""A session under this host: owned or not, opened again, closed, drained, let go of.

It holds no state that decides anything. Each call is a fact for the driver of the session, in the session's loop.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable, Mapping, MutableSet, Sequence
from pathlib import Path
from typing import Any

from banksman.commands.options import check_seconds, clamp_timeout
from banksman.core.dialects.dialect import Dialect
from banksman.core.session.facts import CallerFact, CloseAsked, DrainAsked, LeaveAsked, Reconfigured
from banksman.core.session.state import KEEPING, Mode, Store
from banksman.core.stop_ladder import Timings
from banksman.errors import UsageError
from banksman.sessions.caller_futures import CallerFutures, ignore
from banksman.sessions.driver import Driver
from banksman.sessions.log_reader import LogReaders, ReadableSession
from banksman.sessions.ownership import OwnedSession
from banksman.sessions.questions import OnQuestion
from banksman.sessions.session_spec import SessionSpec
from banksman.store.log import Log

# Of this program: see SessionLifecycle.incarnation.
_incarnations = itertools.count()


class SessionLifecycle(ReadableSession):
    """What the host does with a session, and how callers close it."""

    def __init__(
        self,
        id: str,
        *,
        name: str | None,
        agent: str,
        dialect: Dialect,
        store: Log,
        ends: asyncio.Future[None],
        readers: MutableSet[LogReaders] | None = None,
    ) -> None:
        super().__init__(id, name=name, agent=agent, dialect=dialect, store=store, ends=ends, readers=readers)
        self._owned: OwnedSession | None = None
        # Another one that is made under the same id, after this one was deleted, has another number.
        self.incarnation = next(_incarnations)
        # How often it was opened here.
        self.openings = 0
        # Where its agent works, as far as is known; and by when a process that is being stopped is gone.
        self.cwd: str | None = None
        self._stop_seconds_max = Timings().seconds_max
        # Where its agent keeps a conversation, by the name of that; asks the file system.
        self.transcript_of: Callable[[str], Path | None] | None = None

    @property
    def _here(self) -> OwnedSession:
        if self._owned is None:
            raise UsageError("nothing runs in this session here", hint="ask first, or open it", session=self.id)
        return self._owned

    @property
    def _driver(self) -> Driver:
        return self._here.driver

    @property
    def _futures(self) -> CallerFutures:
        return self._here.futures

    @property
    def is_ours(self) -> bool:
        """It lives here, or did until it was closed."""
        return self._owned is not None

    @property
    def is_open(self) -> bool:
        """It takes asks here: nobody has begun to close it."""
        if self._owned is None or self._driver.error is not None:
            return False
        return self._driver.state.mode is Mode.OPEN and self._driver.state.store is not Store.LOST

    @property
    def is_leaving(self) -> bool:
        """It is let go of, or was, and goes on wherever it is claimed next."""
        return self._owned is not None and self._driver.state.mode in KEEPING - {Mode.OPEN}

    @property
    def is_closed(self) -> bool:
        """It was closed here, or has left."""
        return self._owned is not None and self._owned.is_over

    @property
    def conversation(self) -> str | None:
        """The agent's own name for it, while the session is ours; None: nothing was said in it yet."""
        return self._driver.state.conversation

    @property
    def origin(self) -> str | None:
        """The conversation that a fork begins as a copy of."""
        return self._driver.state.conversation or self._driver.state.fork_of

    @property
    def settings(self) -> tuple[tuple[str, str], ...]:
        """What was changed since it was opened."""
        return self._driver.state.settings

    @property
    def on_question(self) -> OnQuestion | None:
        return self._here.questions.on_question

    # -- opening -----------------------------------------------------------------------------------------------------
    def opened_with(self, spec: SessionSpec) -> None:
        """What is shown of how it was opened."""
        self.cwd = spec.cwd
        self.transcript_of = spec.transcript
        self._stop_seconds_max = spec.stop_seconds_max

    async def reconfigure(
        self,
        spec: SessionSpec,
        *,
        replaces: bool,
        drops: Sequence[str],
        opened: Mapping[str, Any] | None,
        on_question: OnQuestion | None,
    ) -> None:
        """It was opened again. Whoever did is the one that is asked from now on; `replaces`: and what runs is not what
        was asked for, so that the next turn gets another process. `drops`: settings that are as opened again. `opened`:
        what the log is to say of it, and does not yet: returns when it does. Cancelling this only stops waiting."""
        self.openings += 1
        self.opened_with(spec)
        self._here.questions.on_question = on_question
        self._driver.frame_bytes_max = spec.frame_bytes_max
        # One that only waits for its place is started as it is asked for now.
        is_due = replaces and not self._driver.waits_to_start
        if opened is None:
            self._tell(Reconfigured(self._now(), spec.config, is_due, tuple(drops)))
            return
        change = f"c-{os.urandom(8).hex()}"
        written = self._futures.expect_change(change)
        self._tell(Reconfigured(self._now(), spec.config, is_due, tuple(drops), opened, change))
        await self._wait_change(written)

    async def _wait_change(self, taken: asyncio.Future[None]) -> None:
        self._raise_if_failed(taken)
        try:
            await asyncio.shield(taken)
        except asyncio.CancelledError:
            ignore(taken)
            raise

    def check_log(self) -> None:
        """`StoreError`: nothing can be written to it now."""
        if (error := self._driver.state.store_error) is not None:
            raise error

    @property
    def has_broken_log(self) -> bool:
        """The store did not take the last append of this session, which is still open here."""
        return self._owned is not None and not self.is_closed and self._driver.state.store is Store.BROKEN

    # -- closing -----------------------------------------------------------------------------------------------------
    async def close(self) -> None:
        """Stop what runs, by the ladder, and let go. May be called again, and by several; cancelling stops waiting.

        It stays in the store: opened by its name, or asked by `Host.session`, it goes on where it was.
        """
        self.close_nowait()
        await self.wait_closed()

    def close_nowait(self) -> None:
        """Begin to close; `wait_closed` tells when it is."""
        if self._owned is not None:
            self._tell(CloseAsked(self._now()))

    def drain_nowait(self) -> None:
        """Take nothing new, finish what runs, then close."""
        if self._owned is not None:
            self._tell(DrainAsked(self._now()))

    async def leave(self, timeout: float | None = None) -> None:
        """Let go of it, for another host to have it: take nothing new (`Moving`), finish the turn that runs, stop the
        process, release the session. It is not closed, and who waits in it is not refused: they are kept in its log,
        as if this host had died, and whoever claims it next serves them; `turn.outcome()` raises `Moved` for them.

        Past `timeout` seconds what runs is stopped by the ladder (INTERRUPTED); of several deadlines the first one
        counts. If the log cannot be written, that is waited for, and past `timeout` no more. May be called again, and
        by several; cancelling stops waiting. One that is not ours, or is being closed already, is let be; one that is
        closed meanwhile is closed. `Host.session` can claim it again, also here.
        """
        if timeout is not None:
            check_seconds("timeout", timeout)
        self.leave_nowait(timeout)
        await self.wait_closed()

    def leave_nowait(self, timeout: float | None = None) -> None:
        """Begin to leave; `wait_closed` tells when it has left."""
        if self._owned is not None:
            now, seconds = self._now(), clamp_timeout(timeout)
            self._tell(LeaveAsked(now, None if seconds is None else now + seconds))

    def end_nowait(self) -> None:
        """Its host ends. What is closed by that refuses who waits in it; but one that is leaving has to go at once, and
        keeps them."""
        if self.is_leaving:
            self.leave_nowait(0.0)
        else:
            self.close_nowait()

    async def wait_closed(self) -> None:
        """Until it is closed or has left, its callbacks have ended, and who was reading its log by then has what it
        reads."""
        owned = self._owned
        if owned is not None:
            await asyncio.shield(owned.futures.finished)
            await owned.questions.wait_ended()
            await owned.callbacks.wait_ended()
            await owned.futures.wait_read()
            await self._readers.wait_left()

    def when_closed(self, call: Callable[[], None]) -> None:
        self._futures.finished.add_done_callback(lambda _: call())

    def abandon(self) -> None:
        """Its loop was closed under it: see `Driver.abandon`."""
        if self._owned is not None:
            self._owned.callbacks.abandon()
            self._driver.abandon()

    # -- the driver --------------------------------------------------------------------------------------------------
    def _now(self) -> float:
        return self._driver.now()

    def _tell(self, fact: CallerFact) -> None:
        """Through the door, which is in this session's loop and nowhere else."""
        try:
            is_here = asyncio.get_running_loop() is self._futures.loop
        except RuntimeError:
            is_here = False
        if not is_here:
            hint = "call it from the loop it was opened in; banksman.threads is for threads"
            raise UsageError("this session belongs to another event loop", hint=hint, session=self.id)
        self._driver.dispatch(fact)

    def _raise_if_failed(self, waiting: asyncio.Future[Any]) -> None:
        if self._driver.error is not None and not waiting.done():
            raise self._driver.bug()
