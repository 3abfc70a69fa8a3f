"""The scan finds sessions that no death announces: unowned ones with work left, and ones owned by record alone."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from tests.cluster.leases import LEASE_SECONDS
from tests.cluster.lines import stored, until
from tests.cluster.members import Here, command, here, store

from banksman.cluster.host import session_offers
from banksman.cluster.interfaces import ClusterHosts, HostSeen
from banksman.cluster.log import ClusterLog
from banksman.core.session.event import SESSION_LEFT
from banksman.store.log_values import KnownSession, Owner
from banksman.testing.nats_servers import Servers


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_offers, "LOOK_LEASES", 0.1 / LEASE_SECONDS)


def log_of(member: Here) -> ClusterLog:
    log = member.host.log
    assert isinstance(log, ClusterLog)
    return log


async def left(member: Here, folder: Path) -> str:
    """Return a session that has left its host and was offered to no other."""
    session = await member.host.open("claude", cwd=str(folder), command=command(folder))
    await session.leave()
    assert [event.kind async for event in session.events()][-1] == SESSION_LEFT
    return session.id


def known(id: str, epoch: int, *, is_here: bool = True) -> KnownSession:
    owner = Owner(1, "h-1@here", is_here=is_here, is_alive=True)
    return KnownSession(id, None, "claude", epoch, 1, 1, owner, created=1.0, changed=1.0)


def test_scan_releases_a_session_owned_by_record_alone_only_after_grace() -> None:
    strays, grace = session_offers.UnownedSince(), session_offers.GRACE_SECONDS
    mine, others = known("s-1", 1), known("s-2", 1, is_here=False)
    assert strays.look([mine, others], [], 0.0) == []
    assert strays.look([mine, others], [], grace - 0.1) == []
    assert strays.look([mine, others], [], grace) == [mine]
    # A session that is open here is not a stray, and its earlier sighting does not count afterwards.
    assert strays.look([mine], ["s-1"], grace + 1) == []
    assert strays.look([mine], [], grace + 2) == []
    # A claim meanwhile makes it another opening.
    again = known("s-1", 2)
    assert strays.look([again], [], 2 * grace + 2) == []
    assert strays.look([again], [], 3 * grace + 2) == [again]
    assert strays.look([], [], 3 * grace + 3) == []
    assert strays.look([again], [], 3 * grace + 4) == []


def test_draining_hosts_and_readers_speak_for_no_session() -> None:
    def host(id: str, *, room: int = 1, is_draining: bool = False) -> HostSeen:
        return HostSeen(id, id, 1, (), (), room, 0, "1", is_draining, since=1.0, seen=1.0)

    def spoken_for(*others: HostSeen) -> int:
        hosts = cast(ClusterHosts, SimpleNamespace(id="h-0", all=lambda: [host("h-0"), *others]))
        speaks_for = session_offers.speaker(hosts)
        return sum(speaks_for(f"s-{number}") for number in range(100))

    numbers = range(1, 2 * session_offers.SPEAKERS)
    assert spoken_for(*(host(f"h-{number}", is_draining=True) for number in numbers)) == 100
    assert spoken_for(*(host(f"h-{number}", room=0) for number in numbers)) == 100
    assert 0 < spoken_for(*(host(f"h-{number}") for number in numbers)) < 100


@pytest.mark.parametrize("how", ["claimed", "recorded", "advanced"])
async def test_session_owned_by_record_alone_is_released(
    how: str, nats_one: Servers, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No host takes over a session of a live host, so the session would stay without an owner."""
    url = store(nats_one, prefix)
    async with here(url, "one", room=1) as one, here(url, "two", room=1) as two:
        log = log_of(one)
        if how == "recorded":
            # The record alone, without the host's own memory: as after a release that was lost.
            await log._ownership.claim("s-1", None, "claude")  # pyright: ignore[reportPrivateUsage]
        else:
            await log.claim("s-1", agent="claude")
        if how == "advanced":
            # An unanswered advance raised the epoch. The release then names the epoch before, which is not the current
            # one.
            owned_epoch = log._lines.owned_epoch_of("s-1")  # pyright: ignore[reportPrivateUsage]
            assert owned_epoch is not None
            before = owned_epoch.record
            await log._ownership.advance(owned_epoch)  # pyright: ignore[reportPrivateUsage]
            owned_epoch.record = before
            log.release("s-1", before.epoch)
        await until(lambda: (found := log_of(two).find("s-1")) is not None and found.owner is not None)
        monkeypatch.setattr(session_offers, "GRACE_SECONDS", 0.0)
        await until(lambda: (found := log_of(two).find("s-1")) is not None and found.owner is None)
        assert await log_of(two).claim("s-1")


async def test_late_release_does_not_end_a_newer_claim(nats_one: Servers, prefix: str) -> None:
    """A stray is seen under one epoch. A later claim has another epoch."""
    async with here(store(nats_one, prefix), "one", room=1) as one:
        log = log_of(one)
        await log._ownership.claim("s-1", None, "claude")  # pyright: ignore[reportPrivateUsage]
        seen = log.find("s-1")
        assert seen is not None
        log.release("s-1", seen.epoch)
        epoch = await log.claim("s-1")
        log.release("s-1", seen.epoch)
        await log._lines.of("s-1").wait_idle()  # pyright: ignore[reportPrivateUsage]
        now = log.find("s-1")
        assert now is not None
        assert (now.epoch, now.owner is not None) == (epoch, True)


async def test_scan_offers_long_unowned_sessions_a_few_per_look(
    nats_one: Servers, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_offers, "LATELY_SECONDS", -1e6)
    monkeypatch.setattr(session_offers, "LOOKS_MAX", 1)
    url = store(nats_one, prefix)
    async with here(url, "old") as old:
        sessions = {await left(old, tmp_path) for _ in range(3)}
        closed = await old.host.open("claude", cwd=str(tmp_path), command=command(tmp_path))
        await closed.close()
        async with here(url, "new", room=4) as new:
            await until(lambda: new.member.used == 3)
            assert {session.id for session in new.host.our_sessions()} == sessions


async def test_scan_is_not_held_up_by_sessions_of_other_speakers(
    nats_one: Servers, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_offers, "LOOKS_MAX", 2)
    async with here(store(nats_one, prefix), "one") as one:
        all_of_them = session_offers.UnownedScan(log_of(one), one.cluster, list, lambda: True)
        some = [known(f"s-{number}", 1) for number in range(5)]
        looked_at = [[each.id for each in all_of_them._next_of(some)] for _ in range(3)]  # pyright: ignore[reportPrivateUsage]
        assert looked_at == [["s-0", "s-1"], ["s-2", "s-3"], ["s-4", "s-0"]]
        # The scan also looks at sessions that changed lately.
        late = known("s-9", 1)._replace(changed=time.time())
        assert [each.id for each in all_of_them._next_of([*some, late])] == ["s-9", "s-1", "s-2"]  # pyright: ignore[reportPrivateUsage]


async def test_session_whose_job_was_lost_is_offered_again(nats_one: Servers, prefix: str, tmp_path: Path) -> None:
    url = store(nats_one, prefix)
    async with here(url, "old") as old:
        nats = log_of(old)._nats  # pyright: ignore[reportPrivateUsage]
        session = await left(old, tmp_path)

        async def is_offered() -> bool:
            found = await nats.api(f"STREAM.INFO.{prefix}-work", {})
            return "error" not in found and found["state"]["messages"] == 1

        await until(is_offered)
        # No host has room for hours.
        await nats.api(f"STREAM.PURGE.{prefix}-work", {})
        await until(is_offered)
        await nats.api(f"STREAM.DELETE.{prefix}-work", {})
        await until(is_offered)
        async with here(url, "new", room=1) as new:
            await until(lambda: new.member.used == 1)
            assert new.host.our_sessions()[0].id == session

            async def is_taken() -> bool:
                return await stored(nats, f"{prefix}-work") == 0

            await until(is_taken)
