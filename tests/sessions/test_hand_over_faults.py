"""A planned restart on a machine in trouble: no folder for sockets, no room on the disk, no fds, a clock that jumps.

test_hand_over_races.py has other disturbances.
"""

from __future__ import annotations

import itertools
import resource
import shutil
import time
from pathlib import Path

import pytest
from tests.sessions.helpers import bodies
from tests.sessions.test_hand_over import HOLD_SECONDS, STREAM, opened, state
from tests.thorough import thorough

from banksman import Host, Kind
from banksman.core.session import event as kinds
from banksman.folders import held_folder
from banksman.testing import checks

pytestmark = thorough

__all__ = ["state"]


async def test_turn_ends_at_the_old_host_when_no_socket_can_be_made(state: Path, marker: str) -> None:
    async with opened(state / "it", marker) as it:
        turns = [await it.ask(STREAM), await it.ask("@@say after")]
        await it.reached()
        shutil.rmtree(held_folder(), ignore_errors=True)
        held_folder().parent.mkdir(parents=True, exist_ok=True)
        held_folder().touch()
        leaving = it.host.call("hand_over", hold_seconds=HOLD_SECONDS)
        await it.host.ping()
        it.go()
        await leaving
        await it.host.leave()
        held_folder().unlink()
        await it.come()
        assert await it.results(turns) == [["done", "three"], ["done", "after"]]
        await it.host.close(it.session)
        await it.host.leave()
        events = await it.events()
        checks.log(events)
        checks.turns(events)
        assert bodies(events, kinds.SESSION_HANDED_OVER) == []
        assert it.agents.alive() == []


def with_free_fds(pid: int, count: int) -> int:
    """Return the limit below which this process has so many free fds."""
    used = {int(fd.name) for fd in Path(f"/proc/{pid}/fd").iterdir()}
    free = (fd for fd in itertools.count() if fd not in used)
    return next(itertools.islice(free, count, None))


@pytest.mark.parametrize("how", ["restart", "crash"])
@pytest.mark.parametrize("limit", ["disk", "fds"])
async def test_next_host_without_room_leaves_the_turn_to_another_one(
    state: Path, marker: str, limit: str, how: str
) -> None:
    survival = ("crash", HOLD_SECONDS) if how == "crash" else ()
    async with opened(state / "it", marker, survival=survival) as it:
        turns = [await it.ask(STREAM), await it.ask("@@say after")]
        await it.reached()
        if how == "crash":
            await it.host.ping()
            it.host.kill()
        else:
            await it.leave()
        await it.start_host()
        pid = it.host.pid
        if limit == "disk":
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (1, 1))
        else:
            # Room for the store, which is open then, but not for all fds of a claimed process.
            await it.host.call("questions", session=it.session)
            fds = with_free_fds(pid, 4)
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (fds, fds))
        assert await it.host.call("take_up_held") == []
        it.host.kill()
        await it.come()
        it.go()
        assert await it.results(turns) == [["done", "three"], ["done", "after"]]
        await it.end()


@pytest.mark.parametrize("seconds", [-3600.0, 3600.0])
async def test_turn_goes_on_when_the_wall_clock_jumps(
    state: Path, marker: str, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    async with opened(state / "it", marker) as it:
        turn = await it.ask(STREAM)
        await it.reached()
        await it.leave()
        now = time.time
        monkeypatch.setattr(time, "time", lambda: now() + seconds)
        async with Host(f"sqlite:{it.store}") as host:
            await host.take_up()
            it.go()
            outcome = await (await host.session(it.session).turn(turn)).outcome()
            assert (outcome.kind, outcome.text) == (Kind.DONE, "three")
            await host.session(it.session).close()
        it.check(await it.events())
