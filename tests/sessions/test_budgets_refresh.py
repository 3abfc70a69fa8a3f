"""Tests of the reads of shared usage: a failed read loses no claim, and each open turn keeps the reads going."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from msgspec.structs import replace
from tests.core.session.histories import Told
from tests.core.session.scenarios import ask
from tests.core.session.talk import TELLING

from banksman.core.dialects.meaning import TurnOpened, TurnOver
from banksman.core.session.ask_queue import NORMAL
from banksman.core.session.budget import Budget
from banksman.core.session.facts import BudgetClaimed, Fact
from banksman.core.session.state import Session
from banksman.sessions import budgets
from banksman.sessions.budget_ledger import SharedBudgets
from banksman.sessions.budgets import HostBudgets
from banksman.store.log_values import UsageRow

# Only ends a test that would hang.
TIMEOUT_SECONDS = 60.0


class Member:
    """A session without a driver."""

    id = "s"

    def __init__(self, talk: Told) -> None:
        self.talk = talk
        self.claimed: asyncio.Queue[BudgetClaimed] = asyncio.Queue()

    @property
    def state(self) -> Session:
        return self.talk.state

    def now(self) -> float:
        return 0.0

    def dispatch(self, fact: Fact) -> None:
        if isinstance(fact, BudgetClaimed):
            self.claimed.put_nowait(fact)
        self.talk.tell(fact)


class Store:
    """A store without usage. Its first reads fail."""

    def __init__(self, failures: int = 0) -> None:
        self.failures = failures
        self.reads: asyncio.Queue[None] = asyncio.Queue()

    async def ready(self) -> None:
        pass

    async def usage(self, by: str, **days: str) -> list[UsageRow]:
        self.reads.put_nowait(None)
        self.failures -= 1
        if self.failures >= 0:
            raise RuntimeError("a bug")
        return []


@asynccontextmanager
async def joined(store: Any, member: Member) -> AsyncGenerator[HostBudgets]:
    shared = HostBudgets(store, SharedBudgets(Budget(tokens=100)))
    try:
        async with asyncio.timeout(TIMEOUT_SECONDS):
            shared.join(member)
            yield shared
    finally:
        shared.leave(member)
        await shared.close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budgets, "REFRESH_SECONDS", 0.001)


def granted() -> Told:
    """A session with a granted turn, whose claim waits."""
    talk = Told(config=replace(TELLING, shares_budget=True))
    talk.ask(ask("a", NORMAL))
    talk.begin()
    return talk


async def test_claim_is_decided_after_read_failed_unexpectedly(caplog: pytest.LogCaptureFixture) -> None:
    member = Member(granted())
    async with joined(Store(failures=3), member) as shared:
        shared.claim(member, "a#1", None)
        assert (await member.claimed.get()).granted
    assert "budget claims not decided" in caplog.text


@pytest.mark.parametrize("kind", ["steered", "own"])
async def test_open_turn_without_claim_keeps_usage_read(kind: str) -> None:
    talk = granted()
    talk.tell(BudgetClaimed(0.0, "a#1", granted=True))
    talk.opens("a0000")
    if kind == "steered":
        talk.ask(ask("s", NORMAL, on_busy="steer"))
    talk.mean(TurnOver(("a0000",)))
    talk.hear(b"settled a0000")
    member, store = Member(talk), Store()
    async with joined(store, member) as shared:
        if kind == "own":
            # The reads have ended, and begin again with the turn.
            await store.reads.get()
            await asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()}))
            talk.mean(TurnOpened(origin="task", can_interrupt=True))
            shared.note(member, talk.state, ())
        assert talk.state.speaking is not None
        for _ in range(3):
            await store.reads.get()
