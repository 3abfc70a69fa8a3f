"""Unowned sessions: one with a waiting ask is listed as queued, at a bounded cost."""

from __future__ import annotations

from contextlib import aclosing
from pathlib import Path

import pytest

from banksman import Host, Session
from banksman.cluster.http import host_view
from banksman.cluster.http.host_view import UnownedSessions
from banksman.testing import fake_agent

HANGS = fake_agent.command({"prompt 1": ["hang"]})
QUICK = {"eof_grace": 0.0, "grace": 0.3, "linger": 0.0, "drain_seconds": 0.05}


@pytest.fixture(autouse=True)
def is_patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each look enough time on a busy machine: the tests bound the number of looks."""
    monkeypatch.setattr(host_view, "LOOK_SECONDS_MAX", 60.0)


async def left(host: Host, name: str, *prompts: str) -> None:
    """Leave a session whose first ask was stopped while it ran, and whose other asks wait for the next owner."""
    session = await host.open("claude", command=HANGS, name=name, options=QUICK)
    for prompt in prompts:
        await session.ask(prompt)
    if prompts:
        async with aclosing(session.follow()) as events:
            async for event in events:
                if event.kind == "turn.started":
                    break
    await session.leave(0.0)


async def listed(host: Host, looks: UnownedSessions) -> dict[str | None, tuple[str, list[str]]]:
    statuses = await looks.glance(host.sessions())
    return {status.name: (status.state, [each.prompt for each in status.queue]) for status in statuses}


async def test_unowned_session_with_waiting_asks_is_listed_as_queued(tmp_path: Path) -> None:
    store = f"sqlite:{tmp_path / 'store.db'}"
    async with Host(store) as host:
        await left(host, "waits", "runs", "second", "third")
        await left(host, "empty")
        await (await host.open("claude", command=HANGS, name="closed")).close()
        await host.open("claude", command=HANGS, name="ours")
        found = await listed(host, UnownedSessions(host))
        assert found == {
            "waits": ("queued", ["second", "third"]),
            "empty": ("gone", []),
            "closed": ("gone", []),
            "ours": ("idle", []),
        }
        # The status of the single session agrees.
        status = await host.session("waits").look()
        assert (status.phase, status.state, len(status.queue)) == ("asleep", "queued", 2)


async def test_unowned_sessions_are_looked_at_a_few_per_listing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_view, "LOOKS_MAX", 1)
    async with Host(f"sqlite:{tmp_path / 'store.db'}") as host:
        for name in ("first", "second"):
            await left(host, name, "runs", f"in {name}")
        looks = UnownedSessions(host)
        waits = {"first": ("queued", ["in first"]), "second": ("queued", ["in second"])}
        # The session that changed last is looked at first: a user most likely asks about it.
        assert await listed(host, looks) == {**waits, "first": ("gone", [])}
        assert await listed(host, looks) == waits
        # A session is read again only after it changes.
        monkeypatch.setattr(Session, "look", _not_again)
        assert await listed(host, looks) == waits


async def test_unowned_session_cache_ends_with_its_next_owner(tmp_path: Path) -> None:
    async with Host(f"sqlite:{tmp_path / 'store.db'}") as host:
        await left(host, "x", "runs", "second")
        looks = UnownedSessions(host)
        assert (await listed(host, looks))["x"] == ("queued", ["second"])
        taken = await host.take_over(host.session("x").id)
        await taken.close()
        assert (await listed(host, looks))["x"] == ("gone", [])


async def _not_again(_: Session) -> None:
    raise AssertionError("it is looked at again")
