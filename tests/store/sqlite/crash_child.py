"""Run one crash campaign: kill a process that writes to a store, many times, and check each store.

The module runs as a program (`python -m tests.store.sqlite.crash_child`) with the settings of a campaign as JSON, and
prints a report as JSON. It is a separate process because it forks, traces and waits: see `kill_at_syscall`.

The writer claims a session and appends 96 events in 24 appends. Some appends have a snapshot, and some follow the one
before without a wait. The writer reports each acknowledged append immediately, to a pipe that outlives it. The content
of each event follows from its seq, so the check needs no other record.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import json
import os
import random
import re
import shutil
import signal
import sqlite3
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from tests.store.sqlite import kill_at_syscall
from tests.store.sqlite.kill_at_syscall import Call, Death

from banksman.core.session.event import Entry, Event
from banksman.errors import BanksmanError, NotOwner, StoreError
from banksman.store.log_values import Snapshot
from banksman.store.sqlite import SqliteLog, tables
from banksman.store.sqlite.append import AppendOperation
from banksman.store.sqlite.group_writer import GroupWriter
from banksman.store.sqlite.operations import Operation

SESSION = "crash"
# Each death costs as many calls as came before it, so twice as many appends would take four times as long.
APPENDS = 24
EVENTS_PER_APPEND = 4
EVENTS = APPENDS * EVENTS_PER_APPEND
# The writer prints its epoch, each acknowledged append, and the start of its close.
LINES = APPENDS + 2
# A few appends take this long. The start of a writer takes longer.
PAUSE_SECONDS_MAX = 0.003
# A run, its check and the removal of its folder take about 50 ms.
RUNS_MAX = 600


class Campaign(msgspec.Struct, frozen=True):
    """Settings of a campaign.

    `kind`: "calls" (die at each call number from `first` on in steps of `step`, until a run completes), "times" (die at
    `count` random moments, by `seed`), or "migration" (die at each call of an open that migrates). `is_early`: use a
    writer that acknowledges before it commits.
    """

    kind: str
    folder: str
    level: str = "normal"
    first: int = 1
    step: int = 1
    count: int = 0
    seed: int = 0
    is_early: bool = False


class Report(msgspec.Struct):
    """Result of a campaign.

    `deaths`: killed runs. `ended`: completed runs. `before`, `closing`: deaths before the claim was acknowledged, and
    during the close. `problems`: the findings, each with its run, only a few in full.
    """

    deaths: int = 0
    ended: int = 0
    before: int = 0
    closing: int = 0
    acknowledged: int = 0
    backups: int = 0
    calls: dict[str, int] = msgspec.field(default_factory=dict[str, int])
    problems: list[str] = msgspec.field(default_factory=list[str])
    seconds: float = 0.0


# -- contents --------------------------------------------------------------------------------------------------------
def entry_of(seq: int) -> Entry:
    """Return short entries, some that fill pages, and some that are empty, with and without a turn."""
    size = (0, 17, 300, 61, 2500, 120, 700)[seq % 7]
    data = (hashlib.sha256(b"%d" % seq).hexdigest().encode() * (size // 64 + 1))[:size]
    # Every second append has frames of the agent only, and may wait for others before it is committed.
    can_wait = (seq - 1) // EVENTS_PER_APPEND % 2
    return (None if seq % 3 == 0 else f"turn-{seq // 10}", "update" if seq % 2 or can_wait else "sent", data)


def snapshot_of(seq: int) -> bytes | None:
    """Return a snapshot of a few thousand bytes for every fifth append, otherwise None."""
    if seq % (5 * EVENTS_PER_APPEND):
        return None
    return hashlib.sha256(b"snapshot %d" % seq).hexdigest().encode() * 50


async def write(path: str, level: str, fd: int) -> None:
    """Run the process that is killed. It prints `epoch N`, and then the seq of each acknowledged append."""
    log = SqliteLog(path, level=level)
    epoch = await log.claim(SESSION, name="a name", agent="none")
    os.write(fd, b"epoch %d\n" % epoch)
    seq = 0
    places = iter(range(APPENDS))
    # One append, then two, then three at the same time: the appends that wait together are committed together.
    for many in (1 + place % 3 for place in range(APPENDS)):
        answered: asyncio.Queue[None] = asyncio.Queue()
        asked = 0
        for _ in zip(range(many), places, strict=False):
            entries = [entry_of(number) for number in range(seq + 1, seq + 1 + EVENTS_PER_APPEND)]
            done = functools.partial(acknowledge, fd, seq + EVENTS_PER_APPEND, answered)
            log.append(SESSION, epoch, seq, float(seq), entries, done, snapshot_of(seq + EVENTS_PER_APPEND))
            seq += EVENTS_PER_APPEND
            asked += 1
        for _ in range(asked):
            await answered.get()
    assert seq == EVENTS
    os.write(fd, b"closing\n")
    await log.close()


def acknowledge(fd: int, seq: int, answered: asyncio.Queue[None], error: StoreError | NotOwner | None) -> None:
    if error is not None:
        raise error
    os.write(fd, b"%d\n" % seq)
    answered.put_nowait(None)


def acknowledge_early(fd: int) -> None:
    """Break the engine of this process on purpose: it acknowledges an append before it commits it."""
    transact = GroupWriter._transact  # pyright: ignore[reportPrivateUsage]

    def transact_late(self: GroupWriter, group: Sequence[Operation]) -> None:
        for operation in group:
            if isinstance(operation, AppendOperation):
                os.write(fd, b"%d\n" % operation.seq)
        transact(self, group)

    GroupWriter._transact = transact_late  # pyright: ignore[reportPrivateUsage]


# -- checks ----------------------------------------------------------------------------------------------------------
async def look(path: str, level: str, said: bytes) -> list[str]:
    """Return every fault of the store."""
    acknowledged = max((int(line) for line in said.splitlines() if line.isdigit()), default=0)
    epoch = max((int(line.split()[1]) for line in said.splitlines() if line.startswith(b"epoch")), default=0)
    log = SqliteLog(path, level=level)
    try:
        problems = wrong_events(list((await log.read(SESSION, 0)).events), log.head(SESSION).seq, acknowledged)
        problems += wrong_snapshot(await log.snapshot(SESSION), log.head(SESSION).seq)
        problems += await wrong_future(log, epoch)
    finally:
        await log.close()
    return problems


def wrong_events(events: list[Event], head: int, acknowledged: int) -> list[str]:
    problems: list[str] = []
    if acknowledged > head:
        problems.append(f"acknowledged up to {acknowledged}, and only {head} are there")
    if [event.seq for event in events] != list(range(1, head + 1)):
        problems.append(f"not dense from 1 to {head}: {[event.seq for event in events]}")
    if head % EVENTS_PER_APPEND:
        problems.append(f"half an append: the head is {head}")
    for event in events:
        if (event.turn, event.kind, event.data) != entry_of(event.seq):
            problems.append(f"event {event.seq} is not what was written")
        if event.at != (event.seq - 1) // EVENTS_PER_APPEND * EVENTS_PER_APPEND:
            problems.append(f"event {event.seq} is of another time: {event.at}")
    return problems


def wrong_snapshot(snapshot: Snapshot | None, head: int) -> list[str]:
    """Check the snapshot. It is part of its append's commit, so it must match the events exactly."""
    expected = head - head % (5 * EVENTS_PER_APPEND)
    found = 0 if snapshot is None else snapshot.seq
    if found != expected:
        return [f"the snapshot is of {found}, and the last one that was appended of {expected}"]
    if snapshot is not None and snapshot.data != snapshot_of(found):
        return [f"the snapshot of {found} is not what was written"]
    return []


async def wrong_future(log: SqliteLog, epoch_before: int) -> list[str]:
    """Check that a new owner can claim the session immediately and continue it."""
    epoch = await log.claim(SESSION, name="a name", agent="none")
    seq = log.head(SESSION).seq
    answer: asyncio.Future[StoreError | NotOwner | None] = asyncio.get_running_loop().create_future()
    log.append(SESSION, epoch, seq, 1.0, [(None, "sent", b"after")], answer.set_result)
    error = await answer
    if error is not None:
        return [f"it cannot be appended to: {error!r}"]
    problems: list[str] = []
    if epoch <= epoch_before:
        problems.append(f"the epoch {epoch} is not past {epoch_before}")
    if [event.data for event in (await log.read(SESSION, seq)).events] != [b"after"]:
        problems.append("what was appended after the death is not what is read")
    return problems


def looked_at(path: str, level: str, said: bytes) -> list[str]:
    try:
        found = asyncio.run(look(path, level, said))
    except (BanksmanError, AssertionError) as exc:
        return [f"it cannot be opened or read: {exc!r}"]
    with contextlib.closing(sqlite3.connect(path)) as connection:
        ((answer, *_), *_) = connection.execute("PRAGMA integrity_check").fetchall()
    return found if answer == "ok" else [*found, f"SQLite finds it damaged: {answer}"]


# -- the campaigns ---------------------------------------------------------------------------------------------------
class Runs:
    """Runs of one campaign. Each run has a folder, which is removed after the check."""

    def __init__(self, campaign: Campaign) -> None:
        self._campaign = campaign
        self.report = Report()

    def add(self, what: str, run: Callable[[str], Death]) -> Death:
        folder = Path(self._campaign.folder) / "run"
        folder.mkdir()
        path = str(folder / "store")
        death = run(path)
        self._count(death)
        if death.code in {0, -9}:
            problems = looked_at(path, self._campaign.level, death.said)
            kept = {path, f"{path}-hosts", tables.backup_path(path, 1)}
            problems += [f"it was left behind: {left.name}" for left in folder.iterdir() if str(left) not in kept]
        else:
            problems = [f"the child ended by itself with {death.code}"]
        self.report.problems += [f"{what}, {last_of(death.calls)}: {problem}" for problem in problems]
        shutil.rmtree(folder)
        return death

    def _count(self, death: Death) -> None:
        report = self.report
        if death.is_killed:
            report.deaths += 1
            report.before += b"epoch" not in death.said
            report.closing += b"closing" in death.said
            if death.calls:
                name = " ".join(death.calls[-1])
                report.calls[name] = report.calls.get(name, 0) + 1
        else:
            report.ended += 1
        report.acknowledged += sum(line.isdigit() for line in death.said.splitlines())


def last_of(calls: list[Call]) -> str:
    return f"call {len(calls)} {' '.join(calls[-1])!r}" if calls else "no call counted"


def die_at_calls(campaign: Campaign) -> Report:
    runs = Runs(campaign)
    for number in range(campaign.first, RUNS_MAX * campaign.step, campaign.step):
        death = runs.add(f"level {campaign.level}", functools.partial(run_writer, campaign, kill_at=number))
        if not death.is_killed:
            break
        assert runs.report.deaths <= RUNS_MAX, f"more calls than we have time for: {number}"
    return runs.report


def run_writer(campaign: Campaign, path: str, *, kill_at: int | None = None) -> Death:
    def program(fd: int) -> None:
        if campaign.is_early:
            acknowledge_early(fd)
        asyncio.run(write(path, campaign.level, fd))

    return kill_at_syscall.run(program, path, kill_at=kill_at)


def die_at_times(campaign: Campaign) -> Report:
    """Kill each run shortly after it has printed a number of lines.

    The stages are the same on a fast and a slow machine.
    """

    def run(path: str, lines: int, seconds: float) -> Death:
        def program(fd: int) -> None:
            asyncio.run(write(path, campaign.level, fd))
            signal.pause()

        return kill_at_syscall.run_until(program, lines, seconds)

    runs = Runs(campaign)
    chance = random.Random(campaign.seed)
    for number in range(campaign.count):
        lines, seconds = number % (LINES + 1), chance.uniform(0, PAUSE_SECONDS_MAX)
        what = f"level {campaign.level}, seed {campaign.seed}, time {number} (line {lines} + {seconds:.6f} s)"
        runs.add(what, functools.partial(run, lines=lines, seconds=seconds))
    return runs.report


def die_in_migration(campaign: Campaign) -> Report:
    """Open a store of the present schema, in each run, by a process that has a newer schema."""
    old = Path(campaign.folder) / "old"
    run_writer(campaign, str(old))
    today = tables.SCHEMA
    tables.SCHEMA = today + 1

    def add_column(connection: sqlite3.Connection) -> None:
        connection.execute("ALTER TABLE sessions ADD COLUMN more TEXT")

    tables.MIGRATIONS[today] = add_column
    runs = Runs(campaign)

    def migrate(path: str, kill_at: int) -> Death:
        async def open_and_close(fd: int) -> None:
            log = SqliteLog(path, level=campaign.level)
            os.write(fd, b"closing\n")
            await log.close()

        shutil.copy(old, path)
        death = kill_at_syscall.run(lambda fd: asyncio.run(open_and_close(fd)), path, kill_at=kill_at)
        backup = tables.backup_path(path, today)
        if os.path.exists(backup):
            runs.report.backups += 1
            with contextlib.closing(sqlite3.connect(backup)) as connection:
                assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
                assert connection.execute("PRAGMA user_version").fetchall() == [(today,)]
                assert connection.execute("SELECT seq FROM sessions").fetchall() == [(EVENTS,)]
        # In a container the next process can have the pid of the dead one. Rename the files so that their pid is the
        # present one.
        for left in Path(path).parent.iterdir():
            left.rename(left.with_name(re.sub(r"(?<=\.bak\.)\d+", str(os.getpid()), left.name)))
        # All appends were acknowledged before the migration.
        return death._replace(said=death.said + b"epoch 1\n%d\n" % EVENTS)

    for number in range(1, RUNS_MAX):
        if not runs.add("migration", functools.partial(migrate, kill_at=number)).is_killed:
            break
    return runs.report


def main() -> None:
    campaign = msgspec.json.decode(sys.argv[1].encode(), type=Campaign)
    began = time.perf_counter()
    kinds = {"calls": die_at_calls, "times": die_at_times, "migration": die_in_migration}
    report = kinds[campaign.kind](campaign)
    report.seconds = time.perf_counter() - began
    print(json.dumps(msgspec.to_builtins(report)))


if __name__ == "__main__":
    main()
