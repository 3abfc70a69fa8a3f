"""A stale reader clears what a new turn has just registered, and nobody knows any more that it runs.

It happens wherever "what is active" is a field that is read, then changed by whoever has read it: the naive stores below
lose the new turn under a certain schedule, and a look before the change only makes that schedule rarer. Here it cannot
happen. What a session *is* is no field: it is what its log folds to, and an append says which event it follows. All else
(the owner, the lease, the name, the snapshot) is changed by who says what it believes to be there, and is refused if it
is not.

First in every schedule of a simulated loop, then with real threads on one file.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.core.test_past import queued
from tests.sim.scene import explored
from tests.store.kit import AT, Answers, known, until

from banksman.core import event as kinds
from banksman.core import past as pasts
from banksman.core.config import Config
from banksman.core.dialects.claude import CLAUDE
from banksman.core.event import Entry, entry
from banksman.core.outcome import Kind
from banksman.core.past import Past
from banksman.errors import NotOwner, UsageError
from banksman.run.sessions import recovery
from banksman.store.log import Log
from banksman.store.sqlite import SqliteLog
from banksman.testing import sim
from banksman.testing.world import WorldLog

CONFIG = Config(dialect=CLAUDE)
SESSION, LEASE = "s", "claude:talk"


def begun(turn: str) -> list[Entry]:
    return [queued(turn), entry(turn, kinds.TURN_STARTED, attempt=1, joined=[])]


def ended(turn: str) -> list[Entry]:
    return [entry(turn, kinds.TURN_ENDED, outcome=Kind.DONE, spent=0.0, cost_in_all=None)]


def active(past: Past) -> str | None:
    return None if past.session.turn is None else past.session.turn.id


async def found(log: Log) -> Past:
    """What the session is when nobody writes: from its last snapshot, and from its first event the same."""
    past = await recovery.load(log, SESSION, CONFIG)
    events = (await log.read(SESSION, 0)).events
    assert pasts.fold_events(pasts.beginning(CONFIG), events) == past
    return past


async def append(log: Log, epoch: int, past: Past, entries: Sequence[Entry]) -> Past | None:
    """The past with these after it, in one with its snapshot; None if it was refused."""
    answers, after = Answers(), pasts.fold(past, entries)
    log.append(SESSION, epoch, past.session.head, AT, entries, answers.done(), pasts.encode(after))
    refusal = await answers.last()
    assert refusal is None or isinstance(refusal, NotOwner)
    return after if refusal is None else None


async def change(log: Log, epoch: int, decide: Callable[[Past], Sequence[Entry]]) -> None:
    """Read, decide, and write if it is still so; if not, read again. Whoever is no longer the writer gives up."""
    while log.head(SESSION).epoch == epoch:
        past = await recovery.load(log, SESSION, CONFIG)
        entries = decide(past)
        if not entries or await append(log, epoch, past, entries) is not None:
            return


# -- in every schedule -------------------------------------------------------------------------------------------------
class NaiveStore:
    """What is active is a field. A call takes a moment, as one over a wire does."""

    def __init__(self) -> None:
        self.active: str | None = None

    async def read(self) -> str | None:
        await asyncio.sleep(0)
        return self.active

    async def write(self, turn: str | None) -> None:
        await asyncio.sleep(0)
        self.active = turn


async def _together(**doing: Coroutine[Any, Any, object]) -> None:
    """Each in a lane of its own: they know nothing of each other."""
    loop = sim.current()
    await asyncio.gather(*(loop.create_lane_task(one, lane=lane) for lane, one in doing.items()))


async def naive() -> None:
    store = NaiveStore()
    await store.write("1")

    async def finalise() -> None:
        """Turn 1 is over. It even looks, before it clears, whether it is its own that it clears."""
        if await store.read() == "1":
            await store.write(None)

    async def begin() -> None:
        await asyncio.sleep(0)  # What a new turn has to do first: it usually comes too late to be harmed.
        await asyncio.sleep(0)
        await store.write("2")

    await _together(finaliser=finalise(), turn=begin())
    assert store.active == "2", "a turn runs, and nobody knows of it"


def test_the_naive_store_loses_the_new_turn_in_a_schedule_that_is_found() -> None:
    with pytest.raises(sim.ScheduleFailed, match="nobody knows of it") as failed:
        sim.explore(naive)
    # Not in asyncio's own order: whoever only runs it sees nothing.
    assert failed.value.schedule
    with pytest.raises(sim.ScheduleFailed):
        sim.replay(naive, failed.value.schedule)


async def late_finaliser() -> None:
    """The same in a log: both write for the same owner, and neither knows of the other."""
    log = WorldLog()
    epoch = await log.claim(SESSION, agent="claude")
    await append(log, epoch, pasts.beginning(CONFIG), begun("1"))

    def finalise(past: Past) -> Sequence[Entry]:
        return ended("1") if active(past) == "1" else ()

    def begin(past: Past) -> Sequence[Entry]:
        return [*finalise(past), *begun("2")]

    await _together(finaliser=change(log, epoch, finalise), turn=change(log, epoch, begin))
    assert active(await found(log)) == "2"
    assert [event.turn for event in (await log.read(SESSION, 0)).events if event.kind == kinds.TURN_ENDED] == ["1"]
    await log.close()


async def stale_host() -> None:
    """A host that had the session says its last words while another takes it over and goes on."""
    log = WorldLog()
    old = await log.claim(SESSION, name="before", agent="claude")
    past = await append(log, old, pasts.beginning(CONFIG), begun("1"))
    assert past is not None
    names: list[str] = []
    answers = Answers()
    new = 0

    async def say_last_words() -> None:
        over = pasts.fold(past, ended("1"))
        # Where it believes the log to be, and where the log is.
        for seq in (past.session.head, log.head(SESSION).seq):
            log.append(SESSION, old, seq, AT, ended("1"), answers.done(), pasts.encode(over))
            log.append(SESSION, old, seq, AT, (), answers.done(), pasts.encode(past))
            log.lease(SESSION, old, None, answers.done())
            log.release(SESSION, old)
            await asyncio.sleep(0)
        log.advance(SESSION, old, answers.done())
        await rename("theirs")
        await answers.all()

    async def take_over() -> None:
        nonlocal new
        new = await log.claim(SESSION)
        mine = await recovery.take_over(log, SESSION, new, CONFIG)
        log.lease(SESSION, new, LEASE, answers.done())
        assert await append(log, new, mine, begun("2")) is not None
        await rename("mine")

    async def rename(name: str) -> None:
        with contextlib.suppress(UsageError):
            await log.rename(SESSION, name, expected="before")
            names.append(name)

    await _together(stale=say_last_words(), owner=take_over())
    assert active(await found(log)) == "2"
    session = known(log)
    assert session.epoch == new
    assert session.owner is not None
    assert [session.name] == names
    other = await log.claim("other")
    log.lease("other", other, LEASE, answers.done())
    assert isinstance(await answers.last(), NotOwner)
    # It ended once, whichever of the two said so.
    ends = [event.body["outcome"] for event in (await log.read(SESSION, 0)).events if event.kind == kinds.TURN_ENDED]
    assert ends in (["done"], ["unknown"])
    await log.close()


@pytest.mark.parametrize("scenario", [late_finaliser, stale_host])
def test_in_no_schedule_is_the_new_turn_lost(scenario: Callable[[], Awaitable[object]]) -> None:
    explored(scenario, departures=2, schedules=4000)
