"""Sessions of a live host: another host that uses its store settles, ends and loses nothing of them."""

from __future__ import annotations

import asyncio
import gc
import shutil
import subprocess
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from tests.sessions.helpers import exists

from banksman import Host, Kind, NotOwner, Refused, Session, threads
from banksman.process import orphans
from banksman.sessions.log_reader import LogReaders
from banksman.testing import fake_agent

# Host that dies with a begun turn in its log.
DEAD = """
import asyncio, os, sys
from banksman.core.session.event import TURN_QUEUED, TURN_STARTED, SESSION_OPENED, entry
from banksman.store.sqlite import SqliteLog

async def main(path, command):
    log = SqliteLog(path)
    epoch = await log.claim("s-dead", name="dead", agent="claude")
    opened = dict(agent="claude", cwd="/", command=command, args=[], env=[], inherit_env=True, model=None, rules={},
                  permission_mode=None, system_prompt=None, options={}, mcp_servers=[], hooks=[], tools=[])
    asked = dict(ref="r-0000", prompt="x", priority=10, on_busy="enqueue", on_preempt="end", key=None, rules=[],
                 schema=None, is_last=False)
    entries = [
        entry(None, SESSION_OPENED, **opened, resume=None, fork=False),
        entry("t-1", TURN_QUEUED, **asked),
        entry("t-1", TURN_STARTED, attempt=1, joined=[]),
    ]
    log.append("s-dead", epoch, 0, 1.0, entries, lambda error: os._exit(0 if error is None else 1))
    await asyncio.sleep(60)

asyncio.run(main(sys.argv[1], sys.argv[2:]))
"""


def leave_dead(path: Path) -> None:
    """Create a session whose host has died in the middle of a turn."""
    subprocess.run([sys.executable, "-c", DEAD, str(path), *fake_agent.command()], check=True, timeout=60)


async def outcomes(session: Session) -> dict[str | None, str]:
    return {event.turn: event.body["outcome"] async for event in session.events() if event.kind == "turn.ended"}


async def test_host_on_copied_store_ends_no_live_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orphans, "KEEPER_SECONDS_MAX", 0.2)
    mark = tmp_path / "mark"
    go_on = tmp_path / "go-on"
    async with Host(f"sqlite:{tmp_path}/store.db") as host:
        session = await host.open("claude", name="a", command=fake_agent.command())
        turn = await session.ask(f"@@touch {mark}\n@@wait {go_on}\n@@say still here")
        await exists(mark)
        (tmp_path / "copy").mkdir()
        for name in ("store.db", "store.db-wal"):
            shutil.copy(tmp_path / name, tmp_path / "copy" / name)
        async with Host(f"sqlite:{tmp_path}/copy/store.db") as other:
            with pytest.raises(Refused):
                await other.open("claude", name="a", command=fake_agent.command())
        go_on.touch()
        assert (await turn.outcome()).text == "still here"


async def test_import_of_running_session_ends_and_starts_nothing(tmp_path: Path) -> None:
    go_on = tmp_path / "go-on"
    mark = tmp_path / "mark"
    async with Host(f"sqlite:{tmp_path}/one.db") as host, Host(f"sqlite:{tmp_path}/two.db") as other:
        session = await host.open("claude", name="a", command=fake_agent.command())
        turn = await session.ask(f"@@touch {mark}\n@@wait {go_on}\n@@say still here")
        waiting = await session.ask("later")
        await exists(mark)
        await host.export(session, tmp_path / "exported")
        copy = await other.import_session(tmp_path / "exported", name="a")
        with pytest.raises(ValueError, match="does not record how it was opened"):
            await copy.ask("hello")
        again = await other.open("claude", name="a", command=fake_agent.command())
        assert again.status().queue == ()
        go_on.touch()
        assert (await turn.outcome()).text == "still here"
        assert (await waiting.outcome()).kind is Kind.DONE


async def test_concurrent_ask_and_open_succeed_in_host_not_entered(tmp_path: Path) -> None:
    leave_dead(tmp_path / "store.db")
    host = Host(f"sqlite:{tmp_path}/store.db")
    dead = host.session("dead")
    new, turn = await asyncio.gather(host.open("claude", name="new", command=fake_agent.command()), dead.ask("hello"))
    assert (await turn.outcome()).kind is Kind.DONE
    assert (await (await new.ask("hello")).outcome()).kind is Kind.DONE
    assert (await outcomes(dead))["t-1"] == "unknown"
    assert (await (await dead.ask("again")).outcome()).kind is Kind.DONE
    await host.close()


def test_blocking_host_settles_on_entry(tmp_path: Path) -> None:
    leave_dead(tmp_path / "store.db")
    with threads.Host(f"sqlite:{tmp_path}/store.db") as host:
        assert [session.status().phase for session in host.sessions()] == ["asleep"]
        assert host.session("dead").turn("t-1").outcome().kind is Kind.UNKNOWN


async def test_fenced_session_can_be_opened_again(tmp_path: Path) -> None:
    async with Host(f"sqlite:{tmp_path}/store.db") as host:
        session = await host.open("claude", name="a", command=fake_agent.command())
        sessions: Any = host._sessions  # pyright: ignore[reportPrivateUsage]
        sessions.store.release(session.id, await sessions.store.claim(session.id))
        with pytest.raises(NotOwner):
            await session.ask("hello")
        assert session.status().phase == "fenced"
        again = await host.open("claude", name="a", command=fake_agent.command())
        assert again is not session
        assert (await (await again.ask("hello")).outcome()).kind is Kind.DONE


# -- readers and handles ---------------------------------------------------------------------------------------------
async def test_follower_with_unreferenced_handle_ends_with_host(tmp_path: Path) -> None:
    async def follow(events: AsyncGenerator[Any]) -> list[str]:
        return [event.kind async for event in events]

    async with Host(f"sqlite:{tmp_path}/store.db") as one:
        await one.open("claude", name="a", command=fake_agent.command())
        two = Host(f"sqlite:{tmp_path}/store.db")
        following = asyncio.ensure_future(follow(two.session("a").follow()))
        await asyncio.sleep(0)
        gc.collect()
        await two.close()
        assert set(await following) <= {"session.opened"}


async def test_repeated_listing_keeps_no_readers(tmp_path: Path) -> None:
    async with Host(f"sqlite:{tmp_path}/store.db") as host:
        for name in "abc":
            await (await host.open("claude", name=name, command=fake_agent.command())).close()
        for _ in range(50):
            host.sessions()
        gc.collect()
        assert sum(isinstance(each, LogReaders) for each in gc.get_objects()) <= 20


# -- repeated asks ---------------------------------------------------------------------------------------------------
async def test_key_of_refused_turn_can_be_asked_again(tmp_path: Path) -> None:
    command = fake_agent.command({"prompt 1": ["hang"]}, memory=tmp_path / "memory")
    store = f"sqlite:{tmp_path}/store.db"
    async with Host(store) as host:
        session = await host.open("claude", name="a", command=command)
        await session.ask("first")
        waiting = await session.ask("second", key="k")
    assert (await waiting.outcome()).kind is Kind.REFUSED
    async with Host(store) as host:
        session = await host.open("claude", name="a", command=fake_agent.command())
        again = await session.ask("second", key="k")
        assert (again.id != waiting.id, (await again.outcome()).kind) == (True, Kind.DONE)
        assert (await session.ask("second", key="k")).id == again.id


async def test_refusals_raise_separate_error_objects(tmp_path: Path) -> None:
    async with Host(f"sqlite:{tmp_path}/store.db") as host:
        session = await host.open("claude", name="a", command=fake_agent.command())
        sessions: Any = host._sessions  # pyright: ignore[reportPrivateUsage]
        await sessions.store.claim(session.id)
        errors: list[BaseException] = []
        for _ in range(3):
            with pytest.raises(NotOwner) as caught:
                await session.ask("hello")
            errors.append(caught.value)
        assert len({id(error) for error in errors}) == 3
