"""A stale reader must not clear the state that a new turn has just registered.

The fault occurs where "the active turn" is a field that a reader reads and then changes. The naive stores here lose the
new turn under a certain schedule, and a check before the change only makes that schedule rarer. The log cannot lose it.
The state of a session is not a field: it is the fold of its log, and an append names the event that it follows. Every
other value (the owner, the lease, the name, the snapshot) changes by compare-and-set: a caller with a wrong expectation
is refused.

The tests use every schedule of a simulated loop first, and then real threads on one file.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.core.session.test_history import queued
from tests.simulation.scene import explored
from tests.store.kit import AT, Answers, everything, known, until
from tests.thorough import IS_THOROUGH

from banksman.core.dialects.claude import CLAUDE
from banksman.core.session import event as kinds
from banksman.core.session import history as pasts
from banksman.core.session.event import Entry, entry
from banksman.core.session.history import SessionHistory
from banksman.core.session.outcome import Kind
from banksman.core.session.session_config import Config
from banksman.errors import NotOwner, UsageError
from banksman.sessions import recovery
from banksman.store.log import Log
from banksman.store.log_values import Done
from banksman.store.sqlite import SqliteLog
from banksman.testing import sim
from banksman.testing.world import WorldLog

CONFIG = Config(dialect=CLAUDE)
SESSION, LEASE = "s", "claude:talk"


def begun(turn: str) -> list[Entry]:
    return [queued(turn), entry(turn, kinds.TURN_STARTED, attempt=1, joined=[])]


def ended(turn: str) -> list[Entry]:
    return [entry(turn, kinds.TURN_ENDED, outcome=Kind.DONE, spent=0.0, cost_in_all=None)]


def active(past: SessionHistory) -> str | None:
    return None if past.session.turn is None else past.session.turn.id


async def found(log: Log) -> SessionHistory:
    """Return the state of the session while no writer writes.

    The snapshot and the full history must give the same state.
    """
    past = await recovery.load(log, SESSION, CONFIG)
    assert pasts.fold_events(pasts.beginning(CONFIG), await everything(log)) == past
    return past


def say_nothing(_: SessionHistory) -> Sequence[Entry]:
    """Append nothing after the entries that a takeover settles."""
    return ()


async def append(log: Log, epoch: int, past: SessionHistory, entries: Sequence[Entry]) -> SessionHistory | None:
    """Append the entries and the new snapshot, and return the new history. Return None if the append was refused."""
    answers, after = Answers(), pasts.fold(past, entries)
    log.append(SESSION, epoch, past.session.head, AT, entries, answers.done(), pasts.encode(after))
    refusal = await answers.last()
    assert refusal is None or isinstance(refusal, NotOwner)
    return after if refusal is None else None


async def change(log: Log, epoch: int, decide: Callable[[SessionHistory], Sequence[Entry]]) -> None:
    """Read, decide, and append if nothing changed meanwhile; otherwise read again. Stop if the epoch is lost."""
    while log.head(SESSION).epoch == epoch:
        past = await recovery.load(log, SESSION, CONFIG)
        entries = decide(past)
        if not entries or await append(log, epoch, past, entries) is not None:
            return


# -- in every schedule -------------------------------------------------------------------------------------------------
class NaiveStore:
    """Store whose active turn is a field. Each call takes a moment, as over a network."""

    def __init__(self) -> None:
        self.active: str | None = None

    async def read(self) -> str | None:
        await asyncio.sleep(0)
        return self.active

    async def write(self, turn: str | None) -> None:
        await asyncio.sleep(0)
        self.active = turn


async def _together(**doing: Coroutine[Any, Any, object]) -> None:
    """Run the coroutines concurrently, each in a separate lane: they know nothing of each other."""
    loop = sim.current()
    await asyncio.gather(*(loop.create_lane_task(one, lane=lane) for lane, one in doing.items()))


async def naive() -> None:
    store = NaiveStore()
    await store.write("1")

    async def finalise() -> None:
        """End turn 1. Before it clears the field, it even checks that the field has its turn."""
        if await store.read() == "1":
            await store.write(None)

    async def begin() -> None:
        await asyncio.sleep(0)  # Other work of a new turn comes first, so it usually comes too late to be harmed.
        await asyncio.sleep(0)
        await store.write("2")

    await _together(finaliser=finalise(), turn=begin())
    assert store.active == "2", "a turn runs, and nobody knows of it"


def test_naive_store_loses_the_new_turn_in_a_found_schedule() -> None:
    with pytest.raises(sim.ScheduleFailed, match="nobody knows of it") as failed:
        sim.explore(naive)
    # The fault does not occur in asyncio's own order, so a plain run does not show it.
    assert failed.value.schedule
    with pytest.raises(sim.ScheduleFailed):
        sim.replay(naive, failed.value.schedule)


class CarelessLog(WorldLog):
    """Log that accepts every append, from any writer, at any place."""

    def append(
        self,
        session: str,
        epoch: int,
        expected_seq: int,
        at: float,
        entries: Sequence[Entry],
        done: Done,
        snapshot: bytes | None = None,
    ) -> None:
        state = self._sessions[session]
        super().append(session, state.epoch, state.tail, at, entries, done, snapshot)


async def watch(log: Log, until_turn: str) -> None:
    """Follow the log as a reader. Once the new turn was seen, it must never disappear."""
    seq, seen = 0, None
    while seen != until_turn:
        await log.wait_past(SESSION, seq)
        past = await recovery.load(log, SESSION, CONFIG)
        seq, seen = past.session.head, active(past)


async def late_finaliser(log: Log) -> None:
    """The same race in a log: both tasks write for the same owner, and neither knows of the other."""
    epoch = await log.claim(SESSION, agent="claude")
    await append(log, epoch, pasts.beginning(CONFIG), begun("1"))

    def finalise(past: SessionHistory) -> Sequence[Entry]:
        return ended("1") if active(past) == "1" else ()

    def begin(past: SessionHistory) -> Sequence[Entry]:
        return [*finalise(past), *begun("2")]

    await _together(
        finaliser=change(log, epoch, finalise), turn=change(log, epoch, begin), watcher=watch(log, until_turn="2")
    )
    assert active(await found(log)) == "2"
    assert [event.turn for event in (await log.read(SESSION, 0)).events if event.kind == kinds.TURN_ENDED] == ["1"]
    await log.close()


async def stale_host(log: Log) -> None:
    """A former owner makes its last calls while another host takes the session over and continues it."""
    old = await log.claim(SESSION, name="before", agent="claude")
    past = await append(log, old, pasts.beginning(CONFIG), begun("1"))
    assert past is not None
    names: list[str] = []
    answers = Answers()
    new = 0

    async def say_last_words() -> None:
        over = pasts.fold(past, ended("1"))
        # At the seq that the old host assumes, and at the seq of the log.
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
        new = await log.claim(SESSION, agent="claude")
        mine = await recovery.take_over(log, SESSION, new, CONFIG, say_nothing)
        log.lease(SESSION, new, LEASE, answers.done())
        assert await append(log, new, mine, begun("2")) is not None
        await rename("mine")

    async def rename(name: str) -> None:
        with contextlib.suppress(UsageError):
            await log.rename(SESSION, name, expected="before")
            names.append(name)

    await _together(stale=say_last_words(), owner=take_over(), watcher=watch(log, until_turn="2"))
    assert active(await found(log)) == "2"
    session = known(log)
    assert session.epoch == new
    assert session.owner is not None
    assert [session.name] == names
    other = await log.claim("other", agent="claude")
    log.lease("other", other, LEASE, answers.done())
    assert isinstance(await answers.last(), NotOwner)
    # The turn ended once, whichever host recorded it.
    ends = [event.body["outcome"] for event in (await log.read(SESSION, 0)).events if event.kind == kinds.TURN_ENDED]
    assert ends in (["done"], ["unknown"])
    await log.close()


SCENARIOS = [late_finaliser, stale_host]


@pytest.mark.explored
@pytest.mark.parametrize("scenario", [late_finaliser, pytest.param(stale_host, marks=pytest.mark.thorough)])
def test_log_never_loses_the_new_turn_in_any_schedule(scenario: Callable[[Log], Awaitable[object]]) -> None:
    explored(lambda: scenario(WorldLog()), departures=3 if IS_THOROUGH else 2, schedules=6000)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_explorer_catches_a_log_that_does_not_compare_epochs(scenario: Callable[[Log], Awaitable[object]]) -> None:
    with pytest.raises(sim.ScheduleFailed):
        explored(lambda: scenario(CarelessLog()), departures=3, schedules=6000)


# -- with real threads -------------------------------------------------------------------------------------------------
ROUNDS = 20
BLOWS = 100
SECONDS_MAX = 60.0


def run_threads(*doing: Callable[[], object], barrier: threading.Barrier | None = None) -> None:
    """Run the functions concurrently, each in a thread, and raise the error of the first that failed."""
    errors: list[BaseException] = []

    def run(one: Callable[[], object]) -> None:
        try:
            one()
        except BaseException as exc:
            errors.append(exc)
            if barrier is not None:
                barrier.abort()  # The other threads must not wait for this one.

    threads = [threading.Thread(target=run, args=(one,)) for one in doing]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        # A BrokenBarrierError is only a consequence of another thread's failure, so another error comes first.
        raise next((exc for exc in errors if not isinstance(exc, threading.BrokenBarrierError)), errors[0])


@contextlib.asynccontextmanager
async def opened(path: Path) -> AsyncGenerator[SqliteLog]:
    log = SqliteLog(path)
    try:
        yield log
    finally:
        await log.close()


async def make(path: Path) -> None:
    """Create an empty store. These tests do not cover concurrent creation."""
    async with opened(path):
        pass


def met(barrier: threading.Barrier) -> Awaitable[int]:
    """Wait for the other thread while the loop runs."""
    return asyncio.get_running_loop().run_in_executor(None, barrier.wait)


@pytest.mark.parametrize("compares", [False, True])
def test_naive_sqlite_file_loses_the_new_turn_unless_it_compares(tmp_path: Path, compares: bool) -> None:
    path = str(tmp_path / "naive.db")
    barrier = threading.Barrier(2, timeout=SECONDS_MAX)
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("CREATE TABLE sessions (id TEXT PRIMARY KEY, active TEXT)")
        connection.execute("INSERT INTO sessions VALUES ('s', NULL)")
    lost: list[int] = []

    def finalise() -> None:
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
            for _ in range(ROUNDS):
                barrier.wait()  # Turn 1 is registered.
                [(seen,)] = connection.execute("SELECT active FROM sessions WHERE id = 's'")
                barrier.wait()
                barrier.wait()  # Turn 2 is registered.
                if compares:
                    connection.execute("UPDATE sessions SET active = NULL WHERE id = 's' AND active = ?", (seen,))
                elif seen is not None:
                    connection.execute("UPDATE sessions SET active = NULL WHERE id = 's'")
                barrier.wait()

    def begin() -> None:
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
            for number in range(ROUNDS):
                connection.execute("UPDATE sessions SET active = '1' WHERE id = 's'")
                barrier.wait()
                barrier.wait()
                connection.execute("UPDATE sessions SET active = '2' WHERE id = 's'")
                barrier.wait()
                barrier.wait()
                if connection.execute("SELECT active FROM sessions WHERE id = 's'").fetchall() != [("2",)]:
                    lost.append(number)

    run_threads(finalise, begin, barrier=barrier)
    assert lost == ([] if compares else list(range(ROUNDS)))


def test_sqlite_log_keeps_the_new_turn_in_the_same_schedule(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    asyncio.run(make(path))
    barrier = threading.Barrier(2, timeout=SECONDS_MAX)

    async def finalise() -> None:
        async with opened(path) as log:
            for number in range(ROUNDS):
                epoch = await log.claim(SESSION, agent="claude")
                past = await recovery.take_over(log, SESSION, epoch, CONFIG, say_nothing)
                read = await append(log, epoch, past, begun(f"{number}-1"))
                assert read is not None
                log.release(SESSION, epoch)
                await until(lambda: known(log).owner is None)
                await met(barrier)
                await met(barrier)  # Another host has begun turn 2.
                over, answers = ended(f"{number}-1"), Answers()
                for seq in (read.session.head, log.head(SESSION).seq):
                    log.append(SESSION, epoch, seq, AT, over, answers.done(), pasts.encode(read))
                log.lease(SESSION, epoch, None, answers.done())
                log.release(SESSION, epoch)
                log.advance(SESSION, epoch, answers.done())
                assert await answers.all() == [NotOwner] * 4
                with pytest.raises(NotOwner):
                    await log.claim(SESSION, agent="claude")
                await met(barrier)
                await met(barrier)  # The other thread has checked the state.

    async def begin() -> None:
        async with opened(path) as log:
            for number in range(ROUNDS):
                await met(barrier)
                epoch = await log.claim(SESSION, agent="claude")
                past = await recovery.take_over(log, SESSION, epoch, CONFIG, say_nothing)
                answers = Answers()
                log.lease(SESSION, epoch, LEASE, answers.done())
                assert await append(log, epoch, past, begun(f"{number}-2")) is not None
                await met(barrier)
                await met(barrier)
                assert active(await found(log)) == f"{number}-2"
                assert known(log).epoch == epoch
                assert await answers.all() == [None]
                log.release(SESSION, epoch)
                await until(lambda: known(log).owner is None)
                await met(barrier)

    run_threads(lambda: asyncio.run(finalise()), lambda: asyncio.run(begin()), barrier=barrier)


class Hammer:
    """Host that had the session once, and does not know that it lost it."""

    def __init__(self, path: Path, number: int, is_over: threading.Event) -> None:
        self._path = path
        self._other = f"other-{number}"
        self._is_over = is_over
        # The events: this host may claim the session; it has released the session; the owner has the session.
        self.may_claim, self.has_left, self.may_strike = (threading.Event() for _ in range(3))
        self.blows = 0
        self.has_ended = threading.Event()

    def run(self) -> None:
        try:
            asyncio.run(self._run())
        finally:
            self.has_ended.set()
            self.has_left.set()

    async def _run(self) -> None:
        assert self.may_claim.wait(SECONDS_MAX)
        async with opened(self._path) as log:
            epoch = await log.claim(SESSION, name="before", agent="claude")
            past = await recovery.take_over(log, SESSION, epoch, CONFIG, say_nothing)
            assert await append(log, epoch, past, begun(self._other)) is not None
            other = await log.claim(self._other, agent="claude")
            log.release(SESSION, epoch)
            await until(lambda: known(log).owner is None)
            self.has_left.set()
            assert self.may_strike.wait(SECONDS_MAX)
            while not self._is_over.is_set():
                await self._strike(log, epoch, past, other)
                self.blows += 1

    async def _strike(self, log: Log, old: int, past: SessionHistory, other: int) -> None:
        head, answers = log.head(SESSION), Answers()
        snapshot = pasts.encode(past)
        # Under its own epoch, and under the owner's epoch, which every host can read.
        for epoch in (old, head.epoch):
            for seq in (past.session.head, head.seq):
                log.append(SESSION, epoch, seq, AT, ended(self._other), answers.done(), snapshot)
                log.append(SESSION, epoch, seq, AT, (), answers.done(), snapshot)
            log.lease(SESSION, epoch, None, answers.done())
            log.release(SESSION, epoch)
            log.advance(SESSION, epoch, answers.done())
        log.lease(self._other, other, LEASE, answers.done())
        assert set(await answers.all()) == {NotOwner}
        for refused in (log.claim, log.delete):
            with pytest.raises(NotOwner):
                await refused(SESSION)
        with pytest.raises(UsageError):
            await log.rename(SESSION, self._other, expected="before")


@pytest.mark.thorough
def test_owner_loses_nothing_under_writes_of_stale_hosts(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    is_over = threading.Event()
    hammers = [Hammer(path, number, is_over) for number in range(3)]

    async def own() -> None:
        for hammer in hammers:
            hammer.may_claim.set()
            assert hammer.has_left.wait(SECONDS_MAX)
        async with opened(path) as log:
            epoch = await log.claim(SESSION, agent="claude")
            await log.rename(SESSION, "mine", expected="before")
            past = await recovery.take_over(log, SESSION, epoch, CONFIG, say_nothing)
            first, answers = past.session.head, Answers()
            log.lease(SESSION, epoch, LEASE, answers.done())
            assert await answers.all() == [None]
            for hammer in hammers:
                hammer.may_strike.set()
            number = 0
            written: list[Entry] = []
            while number < ROUNDS or any(hammer.blows < BLOWS and not hammer.has_ended.is_set() for hammer in hammers):
                number += 1
                for entries in (begun(f"{number}"), ended(f"{number}")):
                    after = await append(log, epoch, past, entries)
                    assert after is not None
                    past = after
                    written += entries
                    assert await recovery.load(log, SESSION, CONFIG) == past
                    assert await log.snapshot(SESSION) == (past.session.head, pasts.encode(past))
            # The owner releases the session only after they have ended.
            is_over.set()
            for hammer in hammers:
                assert hammer.has_ended.wait(SECONDS_MAX)
            session = known(log)
            assert (session.epoch, session.name, session.seq) == (epoch, "mine", past.session.head)
            assert session.owner is not None
            assert session.owner.is_here
            assert await found(log) == past
            events = await everything(log, after=first)
            assert [(event.turn, event.kind, event.data) for event in events] == written
            assert {event.epoch for event in events} == {epoch}

    def begin() -> None:
        try:
            asyncio.run(own())
        finally:
            is_over.set()
            for hammer in hammers:
                hammer.may_claim.set()
                hammer.may_strike.set()

    run_threads(*(hammer.run for hammer in hammers), begin)
    assert min(hammer.blows for hammer in hammers) >= BLOWS
