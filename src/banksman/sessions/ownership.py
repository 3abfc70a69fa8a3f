"""Sessions that this host owns: their parts, the locks of a claim, and the loss of ownership.

`OwnedSession` holds the parts of a claimed session, and `Startup` the specs of its processes.
`ClaimGate` serialises calls that open, claim or delete. `OwnershipGuard` ends all sessions when the
host loses its lease. `registry.py` claims sessions, through `recovery.py`.

A local store never takes a session away from its owner. A store on other machines knows a host only
by its heartbeats. When they stop, it gives the host's sessions to other hosts, and by then no
process of these sessions may run here. Two mechanisms ensure this:

- The host writes the deadline of its lease to a shared page (`LeasePage`). The keeper of each
  process reads it and acts on it without the host.
- The store notifies the host (`OwnershipGuard.on_lost`) early enough for the stop ladder.

After a loss, each session ends here in this order:

1. Its callers get UNKNOWN, not durable, because the log belongs to another host now.
2. Its processes go through the stop ladder, shortened to the time that is left.
3. The session is closed on this host.

A session that is being opened at that moment fails. A caller that asks for a session later gets a
new handle, which claims the session under a new lease.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial

from banksman.core.redaction.redactor import Redactor
from banksman.core.session.effects import StartProcess
from banksman.core.session.facts import AccountLimited, Begun
from banksman.core.session.history import SessionHistory
from banksman.core.session.turn import Turn as QueuedTurn
from banksman.core.wire.framing import FRAME_BYTES_MAX
from banksman.errors import BanksmanError, Closed, NotOwner, Refused
from banksman.process import lease_page as leases
from banksman.process.adoption import Claimed
from banksman.process.lease_page import LeasePage
from banksman.process.tree_hand_over import Survival
from banksman.sessions.accounts import SessionAccounts
from banksman.sessions.agent_process import AgentProcess, OnReport, Spawn
from banksman.sessions.budgets import HostBudgets
from banksman.sessions.caller_futures import CallerFutures, KeyedTurns
from banksman.sessions.diagnostics import SessionCounts
from banksman.sessions.driver import Driver
from banksman.sessions.held_session import Adopted
from banksman.sessions.hooks import Hooks
from banksman.sessions.limit_callback import LimitCallback
from banksman.sessions.pool import Pool
from banksman.sessions.questions import OnQuestion, OpenQuestions
from banksman.sessions.session_spec import Permit, SessionSpec
from banksman.sessions.tools import Callbacks, ToolServer
from banksman.sessions.turn import Turn, TurnSession
from banksman.store.log import Log
from banksman.tasks import Waiters

log = logging.getLogger("banksman")

# Only a keeper reads the lease. Without keepers, only the host's ladder stops the processes: see
# process/portable.py.
HAS_KEEPERS = sys.platform == "linux"


class ClaimGate:
    """Serialises calls that open, claim or delete sessions, and rejects them once the host closes.

    Belongs to one event loop. At most one call runs per session. Lock order: `at_work`, then a
    name, then a session. The reverse order could deadlock.
    """

    def __init__(self) -> None:
        # The host has begun to close, so an open that is in progress must fail.
        self.is_closing = False
        self._working = 0
        self._pauses = Waiters()
        # Held locks: "name" or "session", and its value.
        self._taken: dict[tuple[str, str], asyncio.Future[None]] = {}

    def check_open(self) -> None:
        if self.is_closing:
            raise Closed("cannot open a session: the host is closing", hint="open another Host")

    @asynccontextmanager
    async def at_work(self) -> AsyncGenerator[None]:
        """Count a call as in progress.

        The close of the log waits until no call is in progress.
        """
        self._working += 1
        try:
            self.check_open()
            yield
        finally:
            self._working -= 1
            self._pauses.wake()

    @asynccontextmanager
    async def alone(self, what: str, which: str) -> AsyncGenerator[None]:
        """Lock a name or a session.

        A second open of the same session waits here, and then finds the session open.
        """
        while (other := self._taken.get((what, which))) is not None:
            await asyncio.shield(other)
        mine = self._taken[what, which] = asyncio.get_running_loop().create_future()
        try:
            yield
        finally:
            del self._taken[what, which]
            mine.set_result(None)

    async def wait_idle(self) -> None:
        """Wait until no call is in progress."""
        while self._working:
            await self._pauses.wait()


class OwnedSession:
    """One session from its claim by this host to its release.

    The session itself is in the store before and after.
    """

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
        accounts: SessionAccounts | None = None,
        budgets: HostBudgets | None = None,
        adopted: Adopted | None = None,
    ) -> None:
        self._adopted = adopted
        # The caller that opened the session first.
        self.opened_by: str | None = (past.opened or {}).get("caller")
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
            accounts=accounts,
            budgets=budgets,
            adopted=adopted,
        )
        self._accounts = accounts
        self.limits = futures.limits = LimitCallback(self.driver)
        self.questions = futures.questions = OpenQuestions(self.driver, on_question)
        self.callbacks = futures.callbacks = Callbacks(self.driver, Hooks({}), ToolServer(()))
        self.keys = KeyedTurns(past.keys)
        # Number of callers that wait for the acceptance of each turn, by turn id.
        self.callers: dict[str, int] = {}
        # The ownership was lost. The remaining parts only run to their end.
        self.is_lost = False

    def begin(self, session: TurnSession) -> None:
        """Start the driver and serve the asks that were accepted before the claim.

        Each of them is an ordinary ask that an earlier owner has accepted.
        """
        state = self.driver.state
        after: Mapping[str, int] = {} if self._adopted is None else self._adopted.held.turns
        turns = [waiting for waiting in state.queue if isinstance(waiting, QueuedTurn)]
        if state.turn is not None:
            turns.append(state.turn)
        for waiting in turns:
            for ask in waiting.asks:
                # No queued turn has started, so its output comes after the current head.
                turn = Turn(session, ask.id, after.get(ask.id, state.head))
                accepted = self.futures.expect_turn(turn)
                self.futures.accept(ask.id)
                self.keys.remember(ask.key, (turn, accepted))
        if self._adopted is not None:
            begin = partial(self.driver.process.continue_claimed, self._adopted.claimed)
            self.driver.adopt(self._adopted, begin)
        self.driver.dispatch(Begun(self.driver.now()))
        if self._accounts is not None:
            self._accounts.begin(self._on_limited)
            self.futures.finished.add_done_callback(lambda _: self._leave_accounts())

    def _on_limited(self, agent: str, until: float | None) -> None:
        self.driver.dispatch(AccountLimited(self.driver.now(), until, agent))

    def _leave_accounts(self) -> None:
        assert self._accounts is not None
        self._accounts.leave()

    def lose(self, error: NotOwner, kill_by: float) -> None:
        """End the session here after the loss of ownership.

        Its callers get an error. `kill_by`: the deadline for KILL of its processes.
        """
        self.is_lost = True
        self.driver.lose(error, kill_by)
        self.callbacks.lose(kill_by)

    @property
    def counted(self) -> SessionCounts:
        driver = self.driver
        return SessionCounts(
            driver.counters, self.futures.outcomes, driver.turn_times, usage=driver.usage
        )

    @property
    def is_over(self) -> bool:
        return self.futures.finished.done()


class Startup:
    """Specs of the running process and of the next process of one session.

    They differ from the moment when the session is opened again until its process is replaced.
    Until then the agent calls the hooks and tools of the running spec. Its ids for them may mean
    other hooks and tools in the next spec.
    """

    def __init__(
        self,
        spec: SessionSpec,
        lease: LeasePage | None,
        permit: Permit | None,
        accounts: SessionAccounts,
        session: str,
    ) -> None:
        """Create the startup for a claimed session.

        `lease`: the lease page of the session's claim; later claims have other pages. `permit`: the
        host's check of a spec. `accounts`: the accounts of the session's agents. `session`: its id.
        """
        self.accounts = accounts
        self._session = session
        self._permit = permit
        self.next = spec
        # The record of the last `session.opened` event.
        self.record = spec.record()
        self._lease = lease
        # How the next process survives this host; set before the first start.
        self.survival: Callable[[], Survival | None] = lambda: None
        self.running: SessionSpec | None = None
        # The callbacks of the process, set before the first start.
        self.callbacks: Callbacks | None = None

    def spawn(self, effect: StartProcess, on_report: OnReport) -> AgentProcess:
        spec = self.next.of(effect.agent)
        self._check(spec)
        self.running = spec
        begin = partial(
            spec.spawn,
            effect,
            lease=self._lease,
            session=self._session,
            survival=self.survival(),
        )
        return self._begin(spec, on_report, begin)

    def adopt(self, driver: Driver, claimed: Claimed, on_report: OnReport) -> AgentProcess:
        """Continue the process of the driver, which this host has claimed."""
        self.running = self.next.of(driver.state.config.agent)
        # A process that has survived a host survives this one by the same hold.
        survival = None if claimed.is_lasting else self.survival()
        adopt = partial(self.running.adopt, claimed, survival=survival)
        return self._begin(self.running, on_report, adopt)

    def _begin(
        self, spec: SessionSpec, on_report: OnReport, begin: Callable[[OnReport], AgentProcess]
    ) -> AgentProcess:
        self._call_its_own()
        workspace = spec.workspace(self._lease)
        assert self.callbacks is not None
        self.callbacks.work_in(workspace)
        return begin(on_report if workspace is None else workspace.ending_with(on_report))

    def _check(self, spec: SessionSpec) -> None:
        """Check the spec again before each start of a process.

        The session's folder may have become a link to another place since the open.
        """
        if self._permit is None:
            return
        first = self.next.record()
        # A fall-back has the containment of the session, and may add that of its own profile.
        contained = {name: first.get(name) for name in ("agent", "containment")}
        try:
            self._permit({**spec.record(), **contained})
        except BanksmanError:
            raise
        except Exception as exc:
            hint = "close the session, and open it in an allowed folder"
            raise Refused(f"cannot start a process of the session: {exc}", hint=hint) from exc

    def replace(self, spec: SessionSpec) -> bool:
        """Set the next spec, and return whether the running process must be replaced."""
        before, self.next = self.next, spec
        before.close()
        if self.running is not None:
            spec = spec.of(self.running.profile.name)
        # An equal fingerprint means that the running process already matches. Only its hooks and
        # tools are exchanged.
        if self.running is None or self.running.fingerprint != spec.fingerprint:
            return self.running is not None
        self.running = spec
        self._call_its_own()
        return False

    def _call_its_own(self) -> None:
        assert self.running is not None
        assert self.callbacks is not None
        self.callbacks.replace(self.running.hooks, self.running.server)


class OwnershipGuard:
    """Ownership listener of one log: keeps the lease page and ends lost sessions.

    Belongs to one event loop.
    """

    def __init__(self) -> None:
        # The lease page that new processes are started with. None: processes may live as long as
        # this host.
        self.lease: LeasePage | None = None
        self._owned: dict[str, OwnedSession] = {}
        # Number of losses, and the error of the last loss. A claim compares the number before and
        # after it.
        self._losses = 0
        self._error: NotOwner | None = None
        self._is_closed = False

    def __repr__(self) -> str:
        return (
            f"<OwnershipGuard {len(self._owned)} sessions, "
            f"{self.lease or 'no lease'}, lost {self._losses} times>"
        )

    # -- notifications of the store ---------------------------------------------------------------
    def on_held(self, fence_at: float, dead_by: float) -> None:
        if self._is_closed or not HAS_KEEPERS:
            return
        if self.lease is not None:
            self.lease.hold(fence_at, dead_by)
            return
        try:
            self.lease = LeasePage(fence_at, dead_by)
        except BanksmanError as exc:
            # No file descriptors are left. The host's ladder still works, and the next heartbeat
            # tries again.
            log.error("cannot create the lease page, retrying at the next heartbeat: %s", exc)

    def on_lost(self, error: NotOwner, dead_by: float) -> None:
        self._losses += 1
        self._error = error
        # The page is not renewed after the loss. Keepers with a copy act on its last deadlines, and
        # no further process can be started under it.
        self._drop_lease()
        kill_by = leases.kill_by(time.monotonic(), dead_by)
        for id, owned in list(self._owned.items()):
            if not owned.is_lost:
                try:
                    owned.lose(error, kill_by)
                except Exception:
                    # A bug in one session must not keep the others from ending. The keeper of the
                    # failed session still reads the lease page and ends the process at its
                    # deadline.
                    log.exception("session %s: cannot end it after the loss of its ownership", id)

    # -- owned sessions ---------------------------------------------------------------------------
    def watch(self, id: str, owned: OwnedSession) -> None:
        """Track a claimed session until it is finished."""
        self._owned[id] = owned
        owned.futures.finished.add_done_callback(lambda _: self._forget(id, owned))

    def _forget(self, id: str, owned: OwnedSession) -> None:
        # The id may already belong to a newer claim by this host.
        if self._owned.get(id) is owned:
            del self._owned[id]

    def is_ending(self, id: str) -> bool:
        """Return whether the session was lost and its parts still run here."""
        owned = self._owned.get(id)
        return owned is not None and owned.is_lost

    @property
    def losses(self) -> int:
        """Number of losses. Read it before a claim and pass it to `check` after the claim."""
        return self._losses

    def check(self, losses: int) -> None:
        """Raise `NotOwner` if ownership was lost since `losses` was read."""
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
