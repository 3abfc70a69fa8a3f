"""Access to a session: its owner and the callers that it is shared with, as its log has them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.sessions.helpers import Case, bodies, opened

from banksman import Closed, Host
from banksman.core.session import event as kinds
from banksman.errors import NameTaken, UsageError
from banksman.sessions.session_access import Access, AccessReader
from banksman.sessions.session_hooks import HookCall
from banksman.testing import fake_agent


async def access(reader: AccessReader, case: Case) -> Access:
    known = case.host.log.find(case.session.id)
    assert known is not None
    return await reader.of(known)


async def test_session_belongs_to_the_caller_that_opened_it_first(tmp_path: Path) -> None:
    async with opened(tmp_path, {}, name="one", caller="alice") as case:
        reader = AccessReader(case.host.log)
        assert await access(reader, case) == Access("alice")
        command = fake_agent.command({})
        await case.host.open(name="one", command=command, caller="bob", model="other")
        assert [body.get("caller") for body in bodies(await case.events(), kinds.SESSION_OPENED)] == ["alice", "bob"]
        assert await access(reader, case) == await access(AccessReader(case.host.log), case) == Access("alice")


async def test_session_without_caller_stays_without_owner(tmp_path: Path) -> None:
    async with opened(tmp_path, {}, name="one") as case:
        await case.host.open(name="one", command=fake_agent.command({}), caller="bob", model="other")
        assert await access(AccessReader(case.host.log), case) == Access(None)


async def test_shares_are_seen_at_once_and_survive_a_restart(tmp_path: Path) -> None:
    store = f"sqlite:{tmp_path / 'store.db'}"
    async with opened(tmp_path, {}, host=Host(store=store), name="one", caller="alice") as case:
        reader = AccessReader(case.host.log)
        for callers in (["bob", "carol", "bob"], ["carol"], []):
            await case.session.share(callers, caller="alice")
            assert await access(reader, case) == Access("alice", frozenset(callers))
        await case.session.share(["dave"])
        found = bodies(await case.events(), kinds.SESSION_SHARED)
        assert [(body["caller"], " ".join(body["shared"])) for body in found] == [
            *(("alice", "bob carol"), ("alice", "carol"), ("alice", "")),
            (None, "dave"),
        ]
        # Events that concern nobody's access are skipped.
        await case.answer("hello")
        assert await access(reader, case) == Access("alice", frozenset(("dave",)))
        id = case.session.id
        await case.session.close()
        assert await access(reader, case) == Access("alice", frozenset(("dave",)))
    async with Host(store=store) as host:
        known = host.log.find(id)
        assert known is not None
        assert await AccessReader(host.log).of(known) == Access("alice", frozenset(("dave",)))


async def test_draining_session_cannot_be_shared(tmp_path: Path) -> None:
    async with opened(tmp_path, {}, caller="alice") as case:
        await case.host.finish()
        with pytest.raises(Closed):
            await case.session.share(["bob"])
        assert bodies(await case.events(), kinds.SESSION_SHARED) == []


async def test_only_own_refuses_the_session_of_another_caller_and_changes_nothing(tmp_path: Path) -> None:
    store = f"sqlite:{tmp_path / 'store.db'}"
    command = fake_agent.command({})
    begun, go = asyncio.Event(), asyncio.Event()

    async def waits(_: HookCall) -> None:
        begun.set()
        await go.wait()

    async with Host(store=store) as host, asyncio.TaskGroup() as group:
        first = group.create_task(host.open(name="one", command=command, caller="alice", on_open=waits))
        await begun.wait()

        async def refused() -> None:
            with pytest.raises(NameTaken, match="another caller"):
                await host.open(name="one", command=command, caller="bob", model="x", only_own=True)

        others = [group.create_task(refused()) for _ in range(2)]
        # They begin, and wait for the first open.
        await asyncio.sleep(0)
        go.set()
        await asyncio.wait(others)
        session = await first
        assert await host.open(name="one", command=command, caller="alice", on_open=waits, only_own=True) is session
        await session.close()
        await refused()
        events = [event async for event in session.events(0, waits=False)]
        assert [body["caller"] for body in bodies(events, kinds.SESSION_OPENED)] == ["alice"]
        again = await host.open(name="one", command=command, caller="alice", only_own=True, model="x")
        assert again.id == session.id


@pytest.mark.parametrize("is_closed", [True, False])
async def test_session_that_its_log_cannot_open_is_shared_without_opening_it(tmp_path: Path, is_closed: bool) -> None:
    store = f"sqlite:{tmp_path / 'store.db'}"
    async with opened(tmp_path, {}, host=Host(store=store), name="one", caller="alice", env={"A": "b"}) as case:
        await case.session.share(["bob"], caller="alice")
        id = case.session.id
        if not is_closed:
            await case.session.leave()
    async with Host(store=store) as host:
        session = host.session(id)
        before = [event.kind async for event in session.events(0, waits=False)]
        await asyncio.gather(session.share([], caller="alice"), session.share([], caller="alice"))
        assert not session.is_ours
        known = host.log.find(id)
        assert known is not None
        assert await AccessReader(host.log).of(known) == Access("alice")
        after = [event.kind async for event in session.events(0, waits=False)]
        # A closed session stays closed: its last event says so.
        shared = [kinds.SESSION_SHARED, *[kinds.SESSION_CLOSED] * is_closed]
        assert after == before + 2 * shared
        with pytest.raises(UsageError, match="from its log alone"):
            await session.ask("hello")
        again = await host.open(name="one", command=fake_agent.command({}), caller="alice", only_own=True)
        assert again.id == id
        await again.share(["carol"])
        assert await AccessReader(host.log).of(known) == Access("alice", frozenset(("carol",)))
