"""Base class of `Session`: its state on this host, close, drain, leave, and a new spec.

`registry.py` opens sessions and attaches the owned parts (`OwnedSession`). The properties
(`is_open`, `is_leaving`, `conversation` and others) read the driver's state. This class keeps no
state that decides anything. Each change (close, drain, leave, reconfigure) becomes a fact for the
driver, in the session's event loop. The state machine of a shutdown is `core/session/shutdown.py`.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from banksman.commands.options import check_seconds, clamp_timeout
from banksman.core.session import fallback
from banksman.core.session.facts import (
    CallerFact,
    CloseAsked,
    DrainAsked,
    HandOverAsked,
    LeaveAsked,
    Reconfigured,
)
from banksman.core.session.state import KEEPING, AgentState, Mode, Store
from banksman.core.session.state import Session as SessionState
from banksman.core.stop_ladder import Timings
from banksman.errors import UsageError
from banksman.sessions.arguments import check_caller
from banksman.sessions.caller_futures import CallerFutures, ignore
from banksman.sessions.driver import Driver
from banksman.sessions.ownership import OwnedSession
from banksman.sessions.questions import OnQuestion
from banksman.sessions.readable_session import ReadableSession, SessionParts
from banksman.sessions.session_spec import SessionSpec

# Claims a session (a `Session`): see the table.
Claim = Callable[[Any], Awaitable[None]]

# Process-wide counter for `SessionLifecycle.incarnation`.
_incarnations = itertools.count()


class SessionLifecycle(ReadableSession):
    """Calls by which the host manages a session and callers close it."""

    def __init__(self, parts: SessionParts) -> None:
        super().__init__(parts)
        self._owned: OwnedSession | None = None
        # A session that is created under the same id after a deletion gets another number.
        self.incarnation = next(_incarnations)
        # Number of times that this host opened the session.
        self.openings = 0
        # The agent's working folder, if it is known, and the longest time that a stop of its
        # process takes.
        self.cwd: str | None = None
        # What the agent may use, as plain JSON: see containment.py.
        self.containment: Mapping[str, Any] = {}
        self._stop_seconds_max = Timings().seconds_max
        self._spec: SessionSpec | None = None
        self._claim: Claim | None = None

    async def _own(self) -> OwnedSession:
        """Claim the session if this host does not own it yet."""
        if self._owned is None:
            assert self._claim is not None
            await self._claim(self)
        return self._here

    @property
    def _here(self) -> OwnedSession:
        if self._owned is None:
            message = f"session {self.id} does not run on this host"
            raise UsageError(message, hint="ask first, or open it", session=self.id)
        return self._owned

    @property
    def _driver(self) -> Driver:
        return self._here.driver

    @property
    def _futures(self) -> CallerFutures:
        return self._here.futures

    @property
    def is_ours(self) -> bool:
        """Whether this host owns the session, or owned it until it was closed."""
        return self._owned is not None

    @property
    def is_open(self) -> bool:
        """Whether the session accepts asks here. False once a close has begun."""
        if self._owned is None or self._driver.error is not None:
            return False
        return self._driver.state.mode is Mode.OPEN and self._driver.state.store is not Store.LOST

    @property
    def is_leaving(self) -> bool:
        """Whether the session is being released or was released.

        A released session continues on the host that claims it next.
        """
        return self._owned is not None and self._driver.state.mode in KEEPING - {Mode.OPEN}

    @property
    def is_closed(self) -> bool:
        """Whether the session was closed or released by this host."""
        return self._owned is not None and self._owned.is_over

    @property
    def opened_by(self) -> str | None:
        """The caller that opened an owned session first."""
        return self._here.opened_by

    @property
    def conversation(self) -> str | None:
        """The agent's name of the conversation; None if the conversation has no content yet.

        Only for an owned session.
        """
        return self._driver.state.conversation

    @property
    def first_conversation(self) -> str | None:
        """The conversation of the session's first agent."""
        return self._first.conversation

    @property
    def transcript_of(self) -> Callable[[str], Path | None] | None:
        """Maps the name of a conversation to the file of the agent that serves the session now.

        The call reads the file system.
        """
        return None if self._spec is None else self._spec.of(self._driver.state.agent).transcript

    @property
    def origin(self) -> str | None:
        """The conversation that a fork copies: that of the session's first agent."""
        return self._first.conversation or self._first.fork_of

    @property
    def settings(self) -> tuple[tuple[str, str], ...]:
        """Settings of the first agent that were changed since the session was opened."""
        return self._first.settings

    @property
    def _first(self) -> AgentState | SessionState:
        """The state of the session's first agent, also while another one serves the session."""
        return fallback.state_of(self._driver.state, self.agent)

    @property
    def on_question(self) -> OnQuestion | None:
        return self._here.questions.on_question

    # -- opening ----------------------------------------------------------------------------------
    def opened_with(self, spec: SessionSpec) -> None:
        """Store the shown parts of the spec."""
        self.cwd = spec.cwd
        self.containment = spec.containment.record()
        self._spec = spec
        self._stop_seconds_max = spec.stop_seconds_max

    async def reconfigure(
        self,
        spec: SessionSpec,
        *,
        replaces: bool,
        drops: Sequence[str],
        opened: Mapping[str, Any] | None,
        on_question: OnQuestion | None,
        on_applied: Callable[[], None],
    ) -> None:
        """Apply a new spec to a session that was opened again.

        The caller of this open receives the questions from now on. Cancelling the call only stops
        the wait.

        `replaces`: the running process does not match the spec, so the next turn gets a new
        process. `drops`: settings that return to the values of the spec. `opened`: the record that
        the log must get. The call then returns when the log has it; None means that the log already
        has it. `on_applied` is called once the spec applies, before the wait for the log.
        """
        self.openings += 1
        self.opened_with(spec)
        self._here.questions.on_question = on_question
        self._here.limits.on_limit = spec.on_limit
        self._driver.process.frame_bytes_max = spec.frame_bytes_max
        # A process that still waits for its slot is started with the new spec in any case.
        is_due = replaces and not self._driver.process.waits_to_start
        if opened is None:
            self._tell(Reconfigured(self._now(), spec.config, is_due, tuple(drops)))
            on_applied()
            return
        change = f"c-{os.urandom(8).hex()}"
        written = self._futures.expect_change(change)
        self._tell(Reconfigured(self._now(), spec.config, is_due, tuple(drops), opened, change))
        on_applied()
        await self._wait_change(written)

    async def _wait_change(self, taken: asyncio.Future[None]) -> None:
        self._raise_if_failed(taken)
        try:
            await asyncio.shield(taken)
        except asyncio.CancelledError:
            ignore(taken)
            raise

    def check_log(self) -> None:
        """Raise `StoreError` if the log cannot be written now."""
        if (error := self._driver.state.store_error) is not None:
            raise error

    @property
    def has_broken_log(self) -> bool:
        """Whether the store failed the last append of this session, which is still open here."""
        return (
            self._owned is not None
            and not self.is_closed
            and self._driver.state.store is Store.BROKEN
        )

    # -- closing ----------------------------------------------------------------------------------
    async def close(self, *, caller: str | None = None) -> None:
        """Stop the process by the ladder and release the session.

        The call may be repeated, also concurrently. Cancelling it only stops the wait. The session
        stays in the store. It resumes when it is opened by its name, or asked through
        `Host.session`. `caller`: the person or program that closes it, for the log.
        """
        self.close_nowait(caller=caller)
        await self.wait_closed()

    def close_nowait(self, *, caller: str | None = None) -> None:
        """Begin to close. `wait_closed` waits for the end."""
        check_caller(caller)
        if self._owned is not None:
            self._tell(CloseAsked(self._now(), caller))

    def drain_nowait(self) -> None:
        """Refuse new and queued asks, finish the running turn, then close."""
        if self._owned is not None:
            self._tell(DrainAsked(self._now()))

    async def leave(self, timeout: float | None = None) -> None:
        """Release the session so that another host can claim it.

        The session refuses new asks (`Moving`), finishes the running turn, stops the process and
        releases its log. The session is not closed, and queued asks are not refused. They stay in
        the log, as if this host had died, and the next owner serves them. `turn.outcome()` raises
        `Moved` for them.

        `timeout`: seconds after which the ladder stops the running turn (INTERRUPTED). The earliest
        of several deadlines applies. If the log cannot be written, the call waits for it, but only
        until `timeout`.

        The call may be repeated, also concurrently. Cancelling it only stops the wait. A session
        that this host does not own, or that is already closing, is left unchanged. A session that
        is closed meanwhile ends as closed. `Host.session` can claim the session again, also on this
        host.
        """
        if timeout is not None:
            check_seconds("timeout", timeout)
        self.leave_nowait(timeout)
        await self.wait_closed()

    def leave_nowait(self, timeout: float | None = None) -> None:
        """Begin to leave. `wait_closed` waits for the end."""
        if self._owned is not None:
            now, seconds = self._now(), clamp_timeout(timeout)
            self._tell(LeaveAsked(now, None if seconds is None else now + seconds))

    def hand_over_nowait(self, seconds: float, hold_seconds: float) -> None:
        """Begin to hand the session over together with its process. `wait_closed` waits for it.

        `seconds`: after this time the session leaves instead, and its running turn is stopped.
        `hold_seconds`: how long the process waits for the next host.
        """
        if self._owned is not None:
            now = self._now()
            self._driver.hold_seconds = hold_seconds
            self._tell(HandOverAsked(now, now + seconds))

    def end_nowait(self) -> None:
        """End the session because its host ends.

        A closed session refuses its queued asks. A session that is already leaving must keep them,
        so it leaves immediately instead.
        """
        if self.is_leaving:
            self.leave_nowait(0.0)
        else:
            self.close_nowait()

    async def wait_closed(self) -> None:
        """Wait until the session is closed or released.

        Also waits for its callbacks and for reads of its log that are in progress.
        """
        owned = self._owned
        if owned is not None:
            await asyncio.shield(owned.futures.finished)
            await owned.questions.wait_ended()
            await owned.limits.wait_ended()
            await owned.callbacks.wait_ended()
            await owned.futures.wait_read()
            await self._readers.wait_left()

    def when_closed(self, call: Callable[[], None]) -> None:
        self._futures.finished.add_done_callback(lambda _: call())

    def abandon(self) -> None:
        """Drop the session because its event loop was closed. See `Driver.abandon`."""
        if self._owned is not None:
            self._owned.callbacks.abandon()
            self._driver.process.abandon()

    # -- the driver -------------------------------------------------------------------------------
    def _now(self) -> float:
        return self._driver.now()

    def _tell(self, fact: CallerFact) -> None:
        """Dispatch a fact, and raise `UsageError` outside the session's event loop."""
        try:
            is_here = asyncio.get_running_loop() is self._futures.loop
        except RuntimeError:
            is_here = False
        if not is_here:
            hint = "call it from the loop that opened it, or use banksman.threads"
            raise UsageError(
                "this session belongs to another event loop", hint=hint, session=self.id
            )
        self._driver.dispatch(fact)

    def _raise_if_failed(self, waiting: asyncio.Future[Any]) -> None:
        if self._driver.error is not None and not waiting.done():
            raise self._driver.bug()
