"""Hosts that share a store on real servers place sessions, answer for them, take them over and leave."""

from __future__ import annotations

import asyncio
import signal
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.lines import SECONDS_MAX, until
from tests.cluster.members import Here, here, store, there

from banksman import Host
from banksman.cluster.host import session_offers
from banksman.core.session import event as kinds
from banksman.errors import NoOwner
from banksman.testing import checks
from banksman.testing.nats_servers import Servers

pytestmark = pytest.mark.thorough

# For tests of an expired lease. The other tests use a long lease.
LEASE = 5.0


async def read_all(front: Here, session: str) -> list[str]:
    events = [event async for event in front.host.session(session).events()]
    checks.log(events)
    checks.turns(events)
    return [event.kind for event in events]


async def test_front_end_places_a_session_and_forwards_asks_to_its_host(
    nats_one: Servers, prefix: str, tmp_path: Path
) -> None:
    url = store(nats_one, prefix)
    async with here(url, "front") as front, here(url, "one", room=2) as one:
        session, name = await front.place(tmp_path)
        assert name == "one"
        said = await front.ask(session, do="ask", prompt="hello", key="k-1")
        assert (said["host"], said["outcome"]) == ("one", "done")
        # The same key is the same turn, whichever host forwards it.
        again = await front.ask(session, do="ask", prompt="hello", key="k-1")
        assert again["turn"] == said["turn"]
        assert [each.name for each in front.cluster.hosts.all()] == ["front", "one"]
        await until(lambda: {each.name: each.used for each in front.cluster.hosts.all()} == {"front": 0, "one": 1})
        assert await front.ask(session, do="close") == {"host": "one"}
        with pytest.raises(NoOwner):
            await front.cluster.bus.ask_owner(session, b"{}", timeout=SECONDS_MAX)
        await until(lambda: {each.name: each.used for each in front.cluster.hosts.all()} == {"front": 0, "one": 0})
        assert one.member.has_room


async def test_session_opened_on_host_is_answered_for_at_once(nats_one: Servers, prefix: str, tmp_path: Path) -> None:
    url = store(nats_one, prefix)
    async with here(url, "front") as front, here(url, "one", room=2) as one:
        for _ in range(5):
            session = await one.host.open("claude", cwd=str(tmp_path), command=["true"])
            answer = await front.cluster.bus.ask_owner(session.id, b'{"do": "who"}', timeout=SECONDS_MAX)
            assert b"one" in answer
        assert await front.cluster.bus.ask_owner(f"host:{one.cluster.hosts.id}", b'{"do": "who"}', timeout=SECONDS_MAX)


async def test_host_takes_no_more_sessions_than_its_room(nats_one: Servers, prefix: str, tmp_path: Path) -> None:
    url = store(nats_one, prefix)
    async with here(url, "front") as front, here(url, "one", room=2) as one, here(url, "two", room=3) as two:
        async with asyncio.TaskGroup() as group:
            placed = [group.create_task(front.place(tmp_path)) for _ in range(5)]
        names = [task.result()[1] for task in placed]
        assert (names.count("one"), names.count("two")) == (2, 3)
        with pytest.raises(NoOwner):
            await front.cluster.placement.place("s-more", [], b"{}", timeout=0.5)
        assert (one.member.used, two.member.used) == (2, 3)
        # A closed session makes room.
        await front.ask(placed[0].result()[0], do="close")
        assert (await front.place(tmp_path))[1] == names[0]


async def test_sessions_of_killed_host_continue_elsewhere(
    nats_one: Servers, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The announcement of the death triggers the take-over, not the periodic scan.
    monkeypatch.setattr(session_offers, "LOOK_LEASES", 1000.0)
    url = store(nats_one, prefix)
    async with AsyncExitStack() as stack:
        front = await stack.enter_async_context(here(url, "front"))
        old = await stack.enter_async_context(there(url, "old", room=8))
        for _ in range(6):
            # A host that only reads takes no part in the take-over.
            reader = await stack.enter_async_context(Host(url))
            await reader.ready()
        sessions = [(await front.place(tmp_path))[0] for _ in range(3)]
        for session in sessions:
            assert (await front.ask(session, do="ask", prompt="first", key="1"))["host"] == "old"
        async with here(url, "new", room=8):
            # The first session has a running turn and a waiting ask. The others are idle.
            mark = tmp_path / "reached"
            await front.ask(sessions[0], do="put", prompt=f"second\n@@touch {mark}\n@@hang")
            await until(mark.exists)
            await front.ask(sessions[0], do="put", prompt="third")
            await old.lose()
            async with asyncio.TaskGroup() as group:
                asked = [group.create_task(front.ask(each, do="ask", prompt="last", key="2")) for each in sessions]
            for task in asked:
                assert (task.result()["host"], task.result()["outcome"]) == ("new", "done")
            ends = [
                event.body["outcome"]
                async for event in front.host.session(sessions[0]).events()
                if event.kind == kinds.TURN_ENDED
            ]
            assert ends == ["done", "unknown", "done", "done"]
            for session in sessions:
                await read_all(front, session)


async def test_session_of_host_that_died_unobserved_is_found(nats_one: Servers, prefix: str, tmp_path: Path) -> None:
    """No other host was running when it died."""
    url = store(nats_one, prefix, LEASE)
    async with there(url, "old", room=1) as old:
        async with here(url, "front") as front:
            session, _ = await front.place(tmp_path)
        await old.lose()
        async with here(url, "new", room=1) as new:
            await until(lambda: new.member.used == 1)
            assert new.host.our_sessions()[0].id == session


async def test_frozen_host_loses_its_session_and_its_late_writes(
    nats_one: Servers, prefix: str, tmp_path: Path
) -> None:
    url = store(nats_one, prefix, LEASE)
    async with here(url, "front") as front, there(url, "old", room=8) as old:
        session, _ = await front.place(tmp_path)
        assert (await front.ask(session, do="ask", prompt="first", key="1"))["host"] == "old"
        async with here(url, "new", room=8):
            old.process.send_signal(signal.SIGSTOP)
            said = await front.ask(session, do="ask", prompt="second", key="2")
            assert (said["host"], said["outcome"]) == ("new", "done")
            old.process.send_signal(signal.SIGCONT)
            # The host has registered again when it appears under another id.
            await until(lambda: any(each.name == "old" and each.id != old.id for each in front.cluster.hosts.all()))
            for number in range(10):
                said = await front.ask(session, do="ask", prompt="more", key=f"more-{number}")
                assert (said["host"], said["outcome"]) == ("new", "done")
            await read_all(front, session)


async def test_drained_host_hands_over_its_sessions_and_waiting_asks(
    nats_one: Servers, prefix: str, tmp_path: Path
) -> None:
    # The lease is so long that no host finds the released sessions by its scan.
    url = store(nats_one, prefix, 60)
    async with here(url, "front") as front, here(url, "old", room=8) as old:
        sessions = [(await front.place(tmp_path))[0] for _ in range(3)]
        mark, go_on = tmp_path / "reached", tmp_path / "go-on"
        await front.ask(sessions[0], do="put", prompt=f"first\n@@touch {mark}\n@@wait {go_on}")
        await until(mark.exists)
        await front.ask(sessions[0], do="put", prompt="second")
        draining = asyncio.create_task(old.member.drain())
        await until(lambda: any(each.name == "old" and each.is_draining for each in front.cluster.hosts.all()))
        async with here(url, "new", room=8) as new:
            # Idle sessions are handed over immediately. The busy session finishes its turn first.
            await until(lambda: new.member.used == 2)
            assert not draining.done()
            go_on.touch()
            await draining
            assert old.member.used == 0
            await until(lambda: new.member.used == 3)
            for session in sessions:
                said = await front.ask(session, do="ask", prompt="last", key="last")
                assert (said["host"], said["outcome"]) == ("new", "done")
            all_kinds = await read_all(front, sessions[0])
            assert all_kinds.count(kinds.SESSION_LEFT) == 1
            assert kinds.SESSION_CLOSED not in all_kinds
            assert all_kinds.count(kinds.TURN_ENDED) == 3
            # A draining host takes no new session.
            assert (await front.place(tmp_path))[1] == "new"


async def test_session_closed_while_its_host_drains_stays_closed(
    nats_one: Servers, prefix: str, tmp_path: Path
) -> None:
    url = store(nats_one, prefix, LEASE)
    async with here(url, "front") as front, here(url, "old", room=2) as old:
        closed, other = [(await front.place(tmp_path))[0] for _ in range(2)]
        mark = tmp_path / "reached"
        await front.ask(closed, do="put", prompt=f"first\n@@touch {mark}\n@@hang")
        await until(mark.exists)
        draining = asyncio.create_task(old.member.drain())
        async with here(url, "new", room=2) as new:
            await until(lambda: new.member.used == 1)
            # Close it directly: a request over the bus would wait for the next owner.
            await old.host.session(closed).close()
            await draining
            assert (await read_all(front, closed))[-1] == kinds.SESSION_CLOSED
            looks_at = time.monotonic() + 2 * LEASE
            await until(lambda: time.monotonic() > looks_at)
            assert (await read_all(front, closed))[-1] == kinds.SESSION_CLOSED
            assert [session.id for session in new.host.our_sessions()] == [other]


async def test_drain_stops_running_turns_at_its_timeout(nats_one: Servers, prefix: str, tmp_path: Path) -> None:
    url = store(nats_one, prefix)
    async with here(url, "front") as front, here(url, "old", room=1) as old, here(url, "new", room=0):
        session, _ = await front.place(tmp_path)
        mark = tmp_path / "reached"
        await front.ask(session, do="put", prompt=f"first\n@@touch {mark}\n@@hang")
        await until(mark.exists)
        async with asyncio.timeout(SECONDS_MAX):
            await old.member.drain(timeout=0.2)
        assert old.member.used == 0


async def test_session_waits_and_reports_stuck_when_its_folder_is_missing(
    nats_one: Servers, prefix: str, tmp_path: Path
) -> None:
    url = store(nats_one, prefix, LEASE)
    folder, elsewhere = tmp_path / "work", tmp_path / "moved"
    folder.mkdir()
    async with AsyncExitStack() as stack:
        front = await stack.enter_async_context(here(url, "front"))
        old = await stack.enter_async_context(here(url, "old", room=1))
        session, _ = await front.place(folder)
        folder.rename(elsewhere)
        await old.member.drain(timeout=SECONDS_MAX)
        new = await stack.enter_async_context(here(url, "new", room=1))
        records = front.cluster.records
        why = await until(lambda: records.stuck_of(session))
        assert "new" in why
        assert str(folder) in why
        assert new.member.used == 0
        elsewhere.rename(folder)
        assert (await front.ask(session, do="ask", prompt="hello", key="1"))["host"] == "new"
        await until(lambda: records.stuck_of(session) is None)


async def test_session_with_any_workspace_moves_without_its_folder(
    nats_one: Servers, prefix: str, tmp_path: Path
) -> None:
    url = store(nats_one, prefix)
    folder = tmp_path / "work"
    folder.mkdir()
    async with here(url, "front") as front, here(url, "old", room=1) as old:
        session, _ = await front.place(folder, labels=["workspace=any"])
        folder.rmdir()
        await old.member.drain(timeout=SECONDS_MAX)
        async with here(url, "new", room=1) as new:
            await until(lambda: new.member.used == 1)
            assert folder.is_dir()
            assert (await front.ask(session, do="ask", prompt="hello", key="1"))["outcome"] == "done"


async def test_session_is_offered_when_drain_overlaps_another_open(
    nats_one: Servers, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = store(nats_one, prefix)
    async with here(url, "front") as front, here(url, "old", room=2) as old:
        session, _ = await front.place(tmp_path)
        begun, may_open = asyncio.Event(), asyncio.Event()
        open_now = old.application.open

        async def open_late(**question: Any) -> dict[str, Any]:
            begun.set()
            await may_open.wait()
            return await open_now(**question)

        monkeypatch.setattr(old.application, "open", open_late)
        placing = asyncio.ensure_future(front.place(tmp_path))
        await begun.wait()
        draining = asyncio.ensure_future(old.member.drain(timeout=SECONDS_MAX))
        await until(lambda: old.member.used == 0)
        may_open.set()
        other, _ = await placing
        await draining
        async with here(url, "new", room=2) as new:
            await until(lambda: {each.id for each in new.host.our_sessions()} == {session, other})


async def test_session_left_and_never_offered_is_found(nats_one: Servers, prefix: str, tmp_path: Path) -> None:
    """The draining host may die between the two steps. Then the scan, once per lease, finds the session."""
    url = store(nats_one, prefix, LEASE)
    async with here(url, "front") as front, here(url, "one", room=1) as one:
        session, _ = await front.place(tmp_path)
        await one.host.session(session).leave()
        await until(lambda: one.member.used == 1)
        assert (await front.ask(session, do="ask", prompt="hello", key="1"))["host"] == "one"


async def test_host_without_lease_stops_and_registers_anew(nats_one: Servers, prefix: str, tmp_path: Path) -> None:
    """The host's own clock ends the lease, while the servers may still consider it valid."""
    url = store(nats_one, prefix, LEASE)
    async with here(url, "front") as front, here(url, "one", room=4) as one:
        session, _ = await front.place(tmp_path)
        before = one.cluster.hosts.id
        await asyncio.to_thread(nats_one.stop, 0)
        try:
            await until(lambda: one.cluster.hosts.id != before)
        finally:
            await asyncio.to_thread(nats_one.cont, 0)
        await until(lambda: not one.host.our_sessions() or one.host.our_sessions()[0].is_closed)
        # The first host that comes takes the session over; here it is the same host.
        said = await front.ask(session, do="ask", prompt="hello", key="1")
        assert (said["host"], said["outcome"]) == ("one", "done")
        assert await front.cluster.bus.ask_owner(f"host:{one.cluster.hosts.id}", b'{"do": "who"}', timeout=SECONDS_MAX)


async def test_node_death_loses_no_session_and_placement_continues(
    nats_three: Servers, prefix: str, tmp_path: Path
) -> None:
    """The node that dies leads the queues, so the other nodes must elect a leader first."""
    url = store(nats_three, prefix, 15)
    async with here(url, "front") as front, here(url, "one", room=4) as one:
        before = one.cluster.hosts.id
        session, _ = await front.place(tmp_path)
        node = await asyncio.to_thread(nats_three.leader_of, f"{prefix}-work")
        await asyncio.to_thread(nats_three.kill, node)
        try:
            assert (await front.place(tmp_path))[1] == "one"
            assert (await front.ask(session, do="ask", prompt="hello", key="1"))["outcome"] == "done"
            assert one.cluster.hosts.id == before
        finally:
            await asyncio.to_thread(nats_three.restart, node)
            await asyncio.to_thread(nats_three.wait_ready)
