"""A tree does not outlive the lease of its session, whether the host or only the keeper acts.

The tests read the clock that the keepers read, and count the dead from outside. The window is long for a test, so that
a busy machine has a reserve for the KILL.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.process.helpers import (
    alive,
    child,
    frozen,
    leave_keepers_untold,
    rungs,
    running_program,
    state_of,
    wait_pass,
    wait_said,
    wait_until,
    zygote_pid,
)

from banksman import Command
from banksman.commands.options import Options
from banksman.commands.result import Finished
from banksman.core.process_facts import KeeperActed, ProcessFact
from banksman.errors import NotOwner
from banksman.process.keeper import lease_timer
from banksman.process.launch import prepare
from banksman.process.lease_page import HOST_FIRST_SHARE, KILL_SHARE, LeasePage, kill_by

pytestmark = pytest.mark.thorough

# Long enough for a machine that stalls for a second or two: a late end here is a failure.
HELD_SECONDS, WINDOW_SECONDS = 3.0, 9.0
# A leader, a process that left its session, and one that left it and whose parent is gone. All ignore TERM.
STUBBORN = """
be_deaf()
if not fork():
    os.setsid()
    stay()
middle = fork()
if not middle:
    os.setsid()
    if not fork():
        stay()
    os._exit(0)
os.waitpid(middle, 0)
say("ready")
stay()
"""
# It reports TERM, and exits.
POLITE = """
def go(*_):
    say("asked", time.monotonic())
    os._exit(0)
signal.signal(signal.SIGTERM, go)
say("ready")
stay()
"""


class Times(NamedTuple):
    fence_at: float
    dead_by: float

    @property
    def term_at(self) -> float:
        return self.fence_at + HOST_FIRST_SHARE * (self.dead_by - self.fence_at)

    @property
    def kill_at(self) -> float:
        return self.dead_by - KILL_SHARE * (self.dead_by - self.fence_at)


def times(held: float = HELD_SECONDS, window: float = WINDOW_SECONDS) -> Times:
    now = time.monotonic()
    return Times(now + held, now + held + window)


@contextmanager
def leased(until: Times) -> Generator[LeasePage]:
    lease = LeasePage(*until)
    try:
        yield lease
    finally:
        lease.close()


class Kept:
    """A command with a lease, and the actions of its keeper without an order."""

    def __init__(self, argv: list[str], lease: LeasePage, *, grace: float = 60.0, eof: float | None = None) -> None:
        self.acted: list[KeeperActed] = []
        options = Options(stdin="pipe", grace=grace, eof=eof, linger=0.1)
        self.command = Command(
            prepare(argv), options, id="kept", on_end=lambda _: None, on_fact=self._hear, lease=lease
        )

    def _hear(self, fact: ProcessFact) -> None:
        if isinstance(fact, KeeperActed):
            self.acted.append(fact)

    async def ready(self, lease: LeasePage) -> Times:
        """Renew the lease until the command is ready, however long that takes. Return the times that hold then."""
        said = asyncio.ensure_future(wait_said(self.command, "ready"))
        while True:
            until = times()
            lease.hold(*until)
            await asyncio.wait((said,), timeout=0.05)
            if said.done():
                await said
                return until

    async def wait(self) -> Finished:
        return await self.command.wait()


def died(marker: str, until: float, *, but: int = 0) -> float:
    """Return when the last marked process was gone. The loop does not run meanwhile, so the host cannot act."""
    while left := others(marker, but):
        assert time.monotonic() < until + 5, f"still there: {left}"
        time.sleep(0.005)
    return time.monotonic()


def others(marker: str, but: int) -> list[int]:
    return [pid for pid in alive(marker) if pid != but]


# -- the keeper alone ------------------------------------------------------------------------------------------------
async def test_lease_keeps_its_tree_alive_only_while_it_is_renewed(marker: str) -> None:
    """Processes that left the session or ignore TERM are dead by then too, even if the command's grace is long."""
    with leased(times()) as lease:
        kept = Kept(child(STUBBORN, marker), lease)
        until = first = await kept.ready(lease)
        while time.monotonic() < first.dead_by + 1:
            await asyncio.sleep(0.05)
            until = times()
            lease.hold(*until)
        assert len(alive(marker)) == 3
        assert kept.acted == []
        gone = died(marker, until.dead_by)
        assert until.kill_at <= gone < until.dead_by
        done = await kept.wait()
    assert [fact.rung for fact in kept.acted] == ["term", "kill"]
    assert kept.acted[0].by_lease
    assert until.term_at <= kept.acted[0].at < until.kill_at
    assert done.survivors == ()


async def test_lease_end_asks_the_tree_before_it_kills(marker: str) -> None:
    with leased(times()) as lease:
        kept = Kept(child(POLITE, marker), lease)
        until = await kept.ready(lease)
        done = await kept.wait()
    _ready, _asked, at = done.stdout.text.split()
    assert until.term_at <= float(at) < until.kill_at
    assert rungs(done) == ["term"]


async def test_lease_is_not_shortened_by_an_overtaken_heartbeat() -> None:
    now = time.monotonic()
    with leased(Times(now + 10, now + 20)) as lease:
        before = list(lease._times)  # pyright: ignore[reportPrivateUsage]
        lease.hold(now + 5, now + 15)
        assert list(lease._times) == before  # pyright: ignore[reportPrivateUsage]


async def test_lease_timer_closes_only_its_own_fd() -> None:
    """The mapping has another fd. A keeper closes it with all unneeded fds, and its number is reused."""
    with leased(times()) as lease:
        page = lease.copy_fd()
        before = _fds()
        seen = lease_timer.LeaseTimer(page)
        (mapped,) = _fds() - before
        os.dup2(page, mapped)  # This closes the mapped fd, and its number now belongs to another file.
        seen.take_over(1.0, 2.0)
        gc.collect()
        assert mapped in _fds()
        assert (seen.due("running"), seen.due("termed"), seen.due("killing")) == (1.02, 2.02, lease_timer.NEVER)
        os.close(page)


def _fds() -> set[int]:
    """Return the open fds without the one that reads the folder."""
    return {int(name) for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")}


@pytest.mark.parametrize("stops", [False, True], ids=["renewed", "renewed, and stopped with a long grace"])
async def test_lease_renewed_too_late_gives_no_more_time(marker: str, stops: bool) -> None:
    with leased(times()) as lease:
        kept = Kept(child(STUBBORN, marker), lease)
        until = await kept.ready(lease)
        await wait_pass(lambda: bool(kept.acted))
        lease.hold(*times(held=100))
        if stops:
            kept.command.stop_nowait()
        assert died(marker, until.dead_by) < until.dead_by
        await kept.wait()


@pytest.mark.parametrize("eof", [None, 60.0], ids=["in its grace", "waiting for it to see the end of its input"])
async def test_lease_cuts_a_stop_that_is_under_way(marker: str, eof: float | None) -> None:
    with leased(times()) as lease:
        kept = Kept(child(STUBBORN, marker), lease, eof=eof)
        until = await kept.ready(lease)
        kept.command.stop_nowait()
        assert until.fence_at < died(marker, until.dead_by) < until.dead_by
        done = await kept.wait()
    assert done.survivors == ()


async def test_lease_that_ended_before_the_start_starts_nothing(marker: str, tmp_path: Path) -> None:
    until = times(0.2, 0.6)
    started = tmp_path / "started"
    with leased(until) as lease:
        with frozen(zygote_pid()):
            kept = Kept(child("touch(WORDS[0]); stay()", marker, started), lease)
            wait_until(lambda: time.monotonic() > until.dead_by, "the end of the lease")
        with pytest.raises(NotOwner, match="lease"):
            await kept.wait()
    assert not started.exists()
    assert alive(marker) == []


async def test_lost_lease_starts_nothing(marker: str) -> None:
    with leased(times()) as lease:
        lease.close()
        with pytest.raises(NotOwner):
            Kept(child("stay()", marker), lease)
    assert alive(marker) == []


# -- the ladder of the host ------------------------------------------------------------------------------------------
async def test_stop_with_little_time_takes_every_rung_in_time(marker: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A minute each for the end of stdin and for TERM is cut to the remaining time, and neither is skipped."""
    leave_keepers_untold(monkeypatch)
    with leased(times(held=100)) as lease:
        kept = Kept(child(STUBBORN, marker), lease, eof=60.0)
        await wait_said(kept.command, "ready")
        now = time.monotonic()
        dead_by = now + WINDOW_SECONDS
        kept.command.stop_nowait(kill_by=kill_by(now, dead_by))
        done = await kept.wait()
        assert time.monotonic() < dead_by
    assert rungs(done) == ["eof", "term", "kill"]
    eof, term, kill = (step.at for step in done.ladder)
    # Never early. The machine decides how late.
    assert term - eof > 0.5
    assert kill - eof > 2 * 0.5
    assert alive(marker) == []


async def test_keeper_finishes_a_stop_when_the_host_freezes(marker: str) -> None:
    with leased(times(held=100)) as lease:
        kept = Kept(child(STUBBORN, marker), lease, eof=60.0)
        await wait_said(kept.command, "ready")
        now = time.monotonic()
        dead_by = now + WINDOW_SECONDS
        kept.command.stop_nowait(kill_by=kill_by(now, dead_by))
        assert died(marker, dead_by) < dead_by  # The loop does not run during this call.
        done = await kept.wait()
    assert [fact.rung for fact in kept.acted] == ["term", "kill"]
    assert done.survivors == ()


async def test_second_stop_with_more_time_changes_nothing(marker: str) -> None:
    with leased(times(held=100)) as lease:
        kept = Kept(child(STUBBORN, marker), lease)
        await wait_said(kept.command, "ready")
        dead_by = time.monotonic() + WINDOW_SECONDS
        kept.command.stop_nowait(kill_by=dead_by - 1)
        kept.command.stop_nowait(kill_by=dead_by + 60)
        await kept.wait()
        assert time.monotonic() < dead_by


# -- a stopped or killed host ----------------------------------------------------------------------------------------
# A host with one session, whose agent ignores every signal and has a child in a new session. The host renews its lease
# until all of that is up, prints the end of the lease, and falls silent, like a stopped host. Its store acts at the
# fence when the loop gets to it. Then the host prints the outcome of the turn, and whether the session can be claimed
# again.
HOST = """
from banksman.runtime.base_host import Host
from banksman.testing import fake_agent
from tests.sessions.leased_log import LeasedLog, times

DEAF = fake_agent.command(["ignore term", "ignore eof"])

async def main():
    held, window = map(float, WORDS)
    store = LeasedLog(fences=True)
    async with Host(lambda: store) as host:
        host.sessions()
        store.hold(times(held, window))
        options = {"eof_grace": 60.0, "grace": 60.0}
        session = await host.open("claude", command=DEAF, args=[MARKER], options=options)
        turn = await session.ask("hello\\n@@hold 50 setsid\\n@@say ready\\n@@hang")
        queued = await session.ask("later")
        async for event in session.follow():
            if b"ready" in event.data and event.kind == "update":
                break
            store.hold(times(held, window))
        print("held", *store.until, flush=True)
        for each in (turn, queued):
            outcome = await each.outcome()
            print(outcome.kind.value, outcome.durable, outcome.error, flush=True)
        await session.wait_closed()
        store.hold(times(60, 60))
        again = host.session(session.id)
        print("again", (await (await again.ask("hello\\n@@say hi")).outcome()).kind.value, flush=True)

asyncio.run(main())
"""


def test_trees_of_a_stopped_host_are_dead_when_its_lease_ends(marker: str) -> None:
    with running_program(HOST, marker, 2.0, WINDOW_SECONDS) as host:
        until = _held(host)
        os.kill(host.pid, signal.SIGSTOP)
        wait_until(lambda: state_of(host.pid) == "T", "the host to be stopped")
        assert len(others(marker, host.pid)) == 2
        assert time.monotonic() < until.fence_at, "too slow to have shown anything"
        gone = died(marker, until.dead_by, but=host.pid)
        assert until.kill_at <= gone < until.dead_by
        os.kill(host.pid, signal.SIGCONT)
        assert host.stdout is not None
        turn, queued, again = (host.stdout.readline().split(maxsplit=2) for _ in range(3))
    assert turn[0] == queued[0] == "unknown"
    assert queued[1] == "False"
    assert again == ["again", "done"]


def test_trees_of_a_killed_host_are_dead_when_its_lease_ends(marker: str) -> None:
    with running_program(HOST, marker, 2.0, WINDOW_SECONDS) as host:
        until = _held(host)
        host.kill()
        host.wait()
        assert died(marker, until.dead_by, but=host.pid) < until.dead_by


def _held(host: subprocess.Popen[str]) -> Times:
    assert host.stdout is not None
    word, fence_at, dead_by = host.stdout.readline().split()
    assert word == "held"
    return Times(float(fence_at), float(dead_by))
