"""What this host owns: the parts of a session that exist only while it is claimed here, and the loss of all claims.

A store on this machine never takes a session away. A store on other machines knows a host by its heartbeats. When they
stop, it gives the host's sessions to others, and by then no process of theirs may run here. So the host tells the
keeper of each process how long its lease is (`LeasePage`), and a keeper acts on that without the host. And the store
tells the host to let go (`OwnershipGuard.on_lost`) early enough for the stop ladder.

To let go of a session is, in this order: its callers are told UNKNOWN, not durable, because the log belongs to another
host now; its processes walk the ladder, cut to the time that is left; it is closed here. A session that is being opened
at that moment fails. A caller that asks for a session later gets another handle, which claims it under a new lease.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from banksman.core.session.facts import Begun
from banksman.core.session.history import SessionHistory
from banksman.core.session.turn import Turn as QueuedTurn
from banksman.core.wire.framing import FRAME_BYTES_MAX
from banksman.core.wire.redaction import Redactor
from banksman.errors import BanksmanError, Closed, NotOwner
from banksman.process import lease_page as leases
from banksman.process.lease_page import LeasePage
from banksman.sessions.agent_process import Spawn
from banksman.sessions.caller_futures import CallerFutures, KeyedTurns
from banksman.sessions.diagnostics import SessionCounts
from banksman.sessions.driver import Driver
from banksman.sessions.hooks import Hooks
from banksman.sessions.pool import Pool
from banksman.sessions.questions import OnQuestion, Questions
from banksman.sessions.tools import Callbacks, ToolServer
from banksman.sessions.turn import Turn, TurnSession
from banksman.store.log import Log
from banksman.tasks import Waiters

log = logging.getLogger("banksman")

# Only a keeper reads the lease. Without one, the host's own ladder is all there is: see process/portable.py.
HAS_KEEPERS = sys.platform == "linux"


class ClaimGate:
    """Lets callers in that open, claim or delete sessions: one at a time for each session, and nobody once the host
    closes. For one loop. Ranks: `at_work` first, then a name, then a session; never the other way round."""

    def __init__(self) -> None:
        # The host has begun to close: what is being opened will not be.
        self.is_closing = False
        self._working = 0
        self._pauses = Waiters()
        # What somebody is alone with: "name" or "session", and which.
        self._taken: dict[tuple[str, str], asyncio.Future[None]] = {}

    def check_open(self) -> None:
        if self.is_closing:
            raise Closed("the host is closing; it opens nothing more", hint="open another Host")

    @asynccontextmanager
    async def at_work(self) -> AsyncGenerator[None]:
        """Somebody is at it. Who closes the log waits for that."""
        self._working += 1
        try:
            self.check_open()
            yield
        finally:
            self._working -= 1
            self._pauses.wake()

    @asynccontextmanager
    async def alone(self, what: str, which: str) -> AsyncGenerator[None]:
        """Who opens what is just being opened waits, and then finds it open."""
        while (other := self._taken.get((what, which))) is not None:
            await asyncio.shield(other)
        mine = self._taken[what, which] = asyncio.get_running_loop().create_future()
        try:
            yield
        finally:
            del self._taken[what, which]
            mine.set_result(None)

    async def wait_idle(self) -> None:
        """Until nobody is at work."""
        while self._working:
            await self._pauses.wait()


class OwnedSession:
    """One session from its claim by this host to its release. The session itself is in the store before and after."""

    def __init__(
        self,
        id: str,
        past: SessionHistory,
        *,
        epoch: int,
        store: Log,
        spawn: Spawn,
        on_question: OnQuestion | None = None,
        pool: Pool | None = None,
        frame_bytes_max: int = FRAME_BYTES_MAX,
        redactor: Redactor | None = None,
    ) -> None:
        self.futures = futures = CallerFutures()
        self.driver = Driver(
            id,
            past,
            epoch=epoch,
            store=store,
            spawn=spawn,
            listener=futures,
            pool=pool,
            frame_bytes_max=frame_bytes_max,
            redactor=redactor,
        )
        self.questions = futures.questions = Questions(self.driver, on_question)
        self.callbacks = futures.callbacks = Callbacks(self.driver, Hooks({}), ToolServer(()))
        self.keys = KeyedTurns(past.keys)
        # How many callers wait for a turn (id) to be accepted.
        self.callers: dict[str, int] = {}
        # It was taken from us: what is left of it here is only its end.
        self.is_lost = False

    def begin(self, session: TurnSession) -> None:
        """Serve who waits in it since before it was ours: each is an ask like any other, accepted long ago."""
        state = self.driver.state
        for waiting in state.queue:
            for ask in waiting.asks if isinstance(waiting, QueuedTurn) else ():
                # None has begun: what is said in it comes after all that is there now.
                turn = Turn(session, ask.id, state.head)
                accepted = self.futures.expect_turn(turn)
                self.futures.accept(ask.id)
                self.keys.remember(ask.key, (turn, accepted))
        self.driver.dispatch(Begun(self.driver.now()))

    def lose(self, error: NotOwner, kill_by: float) -> None:
        """It is not ours any more. Whoever waits in it is told; its processes come to their KILL by then."""
        self.is_lost = True
        self.driver.lose(error, kill_by)
        self.callbacks.lose(kill_by)

    @property
    def counted(self) -> SessionCounts:
        return SessionCounts(self.driver.counters, self.futures.outcomes, self.driver.turn_times)

    @property
    def is_over(self) -> bool:
        return self.futures.finished.done()


class OwnershipGuard:
    """For one loop. It is the `OwnershipListener` of one log."""

    def __init__(self) -> None:
        # What processes are started under; None: they may live for as long as we do.
        self.lease: LeasePage | None = None
        self._owned: dict[str, OwnedSession] = {}
        # How often all was lost, and by which error the last time.
        self._losses = 0
        self._error: NotOwner | None = None
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<OwnershipGuard {len(self._owned)} sessions, {self.lease or 'no lease'}, lost {self._losses} times>"

    # -- what the store says -----------------------------------------------------------------------------------------
    def on_held(self, fence_at: float, dead_by: float) -> None:
        if self._is_closed or not HAS_KEEPERS:
            return
        if self.lease is not None:
            self.lease.hold(fence_at, dead_by)
            return
        try:
            self.lease = LeasePage(fence_at, dead_by)
        except BanksmanError as exc:
            # No fds. The host's own ladder still holds, and the next heartbeat tries again.
            log.error("! keepers cannot be told how long they may keep what they have: %s", exc)

    def on_lost(self, error: NotOwner, dead_by: float) -> None:
        self._losses += 1
        self._error = error
        self._drop_lease()
        kill_by = leases.kill_by(time.monotonic(), dead_by)
        for id, owned in list(self._owned.items()):
            if not owned.is_lost:
                try:
                    owned.lose(error, kill_by)
                except Exception:
                    # A bug in one of them must not keep the others from their end; its keeper has the page.
                    log.exception("! session %s cannot be let go of", id)

    # -- what is open here -------------------------------------------------------------------------------------------
    def watch(self, id: str, owned: OwnedSession) -> None:
        """It is ours from here on."""
        self._owned[id] = owned
        owned.futures.finished.add_done_callback(lambda _: self._forget(id, owned))

    def _forget(self, id: str, owned: OwnedSession) -> None:
        if self._owned.get(id) is owned:
            del self._owned[id]

    def is_ending(self, id: str) -> bool:
        """It was taken from us, and what we had of it is not gone yet."""
        owned = self._owned.get(id)
        return owned is not None and owned.is_lost

    @property
    def losses(self) -> int:
        """For who claims something, before it does: see `check`."""
        return self._losses

    def check(self, losses: int) -> None:
        """What was claimed when there were so many losses is still ours."""
        if losses != self._losses:
            assert self._error is not None
            raise NotOwner(str(self._error.args[0]), hint="try again") from self._error

    def close(self) -> None:
        self._is_closed = True
        self._drop_lease()

    def _drop_lease(self) -> None:
        if self.lease is not None:
            self.lease.close()
            self.lease = None
