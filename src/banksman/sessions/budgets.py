"""Shared budgets of a host: keep the ledger, decide claims, and tell the sessions which caps hold.

`budget_ledger.py` has the rules. This module feeds the ledger with the usage that sessions append,
and with `Log.usage`: at the start of the host, before each claim, and every second while a turn is
open. So a restart forgets nothing, and usage on other hosts of the store counts.
`core/session/budget_gate.py` acts on the caps in each session.

Accuracy: a cap on tokens, cost or time is exceeded by at most one usage report of each running
turn, and by what other hosts of the store use in `REFRESH_SECONDS`. A cap on turns is exact on one
host. Two hosts that grant a turn at the same moment may both take the last one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

from banksman.core.session.budget import CapUse
from banksman.core.session.facts import BudgetChanged, BudgetClaimed, BudgetWarned, Fact
from banksman.core.session.state import Session
from banksman.core.session.usage import Addition
from banksman.errors import BanksmanError
from banksman.sessions import budget_ledger
from banksman.sessions.budget_ledger import BudgetClaim, Ledger, SharedBudgets
from banksman.store.log import Log
from banksman.store.log_values import day_of

log = logging.getLogger("banksman")

# Interval at which the usage of other hosts is read while a turn is open.
REFRESH_SECONDS = 1.0
# The day is compared at least this often. The clock may be set, or the machine may sleep.
DAY_SECONDS_MAX = 60.0


class BudgetMember(Protocol):
    """A session that shares the budgets. The driver implements it."""

    id: str

    @property
    def state(self) -> Session: ...
    def now(self) -> float: ...
    def dispatch(self, fact: Fact) -> None: ...


class HostBudgets:
    """Shared budgets of one host. Belongs to one event loop."""

    def __init__(self, store: Log, budgets: SharedBudgets) -> None:
        self._store = store
        self._ledger = Ledger(budgets, day_of(time.time()))
        self._members: dict[str, BudgetMember] = {}
        # Claims that wait for a decision, each with its session.
        self._wanted: list[tuple[BudgetMember, BudgetClaim]] = []
        self._told: tuple[CapUse, ...] = ()
        # Whether the usage of the day was read from the store.
        self._has_read = False
        # Caps whose warning was given on this day.
        self._warned: set[tuple[str, str | None, str]] = set()
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False
        # A claim waits, so the next read is due.
        self._is_due = asyncio.Event()

    def __repr__(self) -> str:
        return f"<HostBudgets {self._ledger.day}, {len(self._ledger.claims)} claims>"

    def uses(self) -> tuple[CapUse, ...]:
        """Return the use of every cap on this day."""
        self._look_at_day()
        return budget_ledger.uses(self._ledger)

    # -- members ----------------------------------------------------------------------------------
    def join(self, member: BudgetMember) -> None:
        """Add a session. It learns of the caps before its first turn."""
        self._members[member.id] = member
        if self._has_read:
            asyncio.get_running_loop().call_soon(self._tell, member)
        # Otherwise `_read` tells it. A session that was handed over knows which caps its last host
        # has seen reached: a guess that none is would withdraw its question about them.
        if self._timer is None:
            self._wait_for_day()
        self.read_soon()

    def leave(self, member: BudgetMember) -> None:
        """Remove a session that is over."""
        if self._members.get(member.id) is member:
            del self._members[member.id]
        self._wanted = [pair for pair in self._wanted if pair[0] is not member]
        self._set(budget_ledger.release(self._ledger, member.id))
        if not self._members and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def claim(self, member: BudgetMember, key: str, caller: str | None) -> None:
        """Decide whether a granted turn may spend. `BudgetClaimed` reports the decision."""
        self._wanted.append((member, BudgetClaim(member.id, key, caller)))
        self._is_due.set()
        self.read_soon()

    def note(self, member: BudgetMember, state: Session, added: Sequence[Addition]) -> None:
        """Count what the session appends, and release the claims of turns that are over."""
        ledger = budget_ledger.on_day(self._ledger, day_of(time.time()))
        ledger = budget_ledger.release(ledger, member.id, _open_key(state))
        for caller, _, usage in added:
            ledger = budget_ledger.add(ledger, caller, usage)
        if added:
            self._warn(member, ledger)
        self._set(ledger)
        if state.speaking is not None:
            self.read_soon()  # It may be a turn without a claim: see `_is_needed`.

    def _warn(self, member: BudgetMember, ledger: Ledger) -> None:
        for use in budget_ledger.uses(ledger):
            name = (use.scope, use.caller, use.unit)
            if use.is_near and not use.is_reached and name not in self._warned:
                self._warned.add(name)
                member.dispatch(BudgetWarned(member.now(), use))

    # -- the ledger -------------------------------------------------------------------------------
    def _set(self, ledger: Ledger) -> None:
        if ledger is self._ledger:
            return
        if ledger.day != self._ledger.day:
            self._warned.clear()
        self._ledger = ledger
        self._tell_all()

    def _tell_all(self) -> None:
        reached = budget_ledger.reached(self._ledger)
        # The exact amount beyond a cap changes with each report, and matters to no session.
        if [_name(use) for use in reached] != [_name(use) for use in self._told]:
            self._told = reached
            for member in list(self._members.values()):
                self._tell(member)

    def _tell(self, member: BudgetMember) -> None:
        if self._members.get(member.id) is member:
            member.dispatch(BudgetChanged(member.now(), self._told))

    # -- claims and the log -----------------------------------------------------------------------
    def read_soon(self) -> None:
        """Read the usage of the day from the store, in a task."""
        if self._task is None and not self._is_closed:
            self._task = asyncio.get_running_loop().create_task(self._refresh())

    async def _refresh(self) -> None:
        """Read the usage, decide the claims, and repeat as long as a turn is open."""
        try:
            while True:
                self._is_due.clear()
                wanted, self._wanted = self._wanted, []
                try:
                    await self._read()
                    while wanted:
                        self._decide(*wanted.pop(0))
                except Exception:
                    # Without a decision, the turns would wait for ever.
                    log.exception("budget claims not decided, retrying: a bug in Banksman")
                    self._wanted = wanted + self._wanted
                if not self._is_needed():
                    return
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._is_due.wait(), REFRESH_SECONDS)
        finally:
            self._task = None

    def _is_needed(self) -> bool:
        """Whether a claim or a session waits for the usage, or a turn is open.

        Turns that the agent begins by itself, or with a steered prompt, have no claim.
        """
        if self._wanted or self._ledger.claims:
            return True
        if self._members and not self._has_read:
            return True
        return any(member.state.speaking is not None for member in self._members.values())

    async def _read(self) -> None:
        day = day_of(time.time())
        try:
            await self._store.ready()
            rows = await self._store.usage("caller", since=day, until=day)
        except BanksmanError as exc:
            # The sessions cannot write their logs either. The last known usage decides.
            log.warning("cannot read the usage for the budgets: %s", exc)
            return
        ledger = budget_ledger.on_day(self._ledger, day)
        self._set(budget_ledger.read(ledger, {row.key: row.usage for row in rows}))
        if not self._has_read:
            self._has_read = True
            for member in list(self._members.values()):
                self._tell(member)

    def _decide(self, member: BudgetMember, claim: BudgetClaim) -> None:
        if self._members.get(member.id) is not member:
            return  # The session is over.
        ledger, granted = budget_ledger.claim(self._ledger, claim)
        self._set(ledger)
        reached = budget_ledger.reached(self._ledger)
        member.dispatch(BudgetClaimed(member.now(), claim.key, granted, reached))
        # The turn may have been withdrawn while the claim waited.
        self._set(budget_ledger.release(self._ledger, member.id, _open_key(member.state)))

    # -- days -------------------------------------------------------------------------------------
    def _look_at_day(self) -> None:
        self._set(budget_ledger.on_day(self._ledger, day_of(time.time())))

    def _wait_for_day(self) -> None:
        seconds = min(86_400 - time.time() % 86_400 + 0.05, DAY_SECONDS_MAX)
        self._timer = asyncio.get_running_loop().call_later(seconds, self._on_day_timer)

    def _on_day_timer(self) -> None:
        self._look_at_day()
        self._wait_for_day()

    async def close(self) -> None:
        """Stop the timer and the task."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        task = self._task
        if task is not None:
            task.cancel()
            await asyncio.wait([task])


def _open_key(state: Session) -> str | None:
    return None if state.turn is None else state.turn.key


def _name(use: CapUse) -> tuple[str, str | None, str, float]:
    return use.scope, use.caller, use.unit, use.cap
