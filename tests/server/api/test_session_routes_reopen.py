"""Reopening a known name with other settings: the answer, the process and the log agree."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.cluster.http.test_forwarded_request import put_through
from tests.sessions.test_durability import RETRIES, Disk

from banksman import Host, Session
from banksman.cluster.http.forwarded_request import ForwardedRequest
from banksman.errors import StoreFull
from banksman.testing import fake_agent


async def bodies(session: Session) -> Sequence[dict[str, Any]]:
    return [event.body for event in (await session.page()).events if event.kind == "session.opened"]


async def works_in(session: Session) -> str:
    """Return the working folder of the agent that answers."""
    await (await session.ask("hello")).outcome()
    (pid,) = session.status().pids
    return os.readlink(f"/proc/{pid}/cwd")


async def test_reopen_with_another_cwd_is_logged_and_used_by_takeover(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    store = f"sqlite:{tmp_path / 'store.db'}"
    command = fake_agent.command()
    async with Host(store) as host:
        session = await host.open("claude", command=command, name="x", cwd=one)
        assert await works_in(session) == str(one)
        assert await host.open("claude", command=command, name="x", cwd=two) is session
        assert [body["cwd"] for body in await bodies(session)] == [str(one), str(two)]
        assert session.cwd == str(two)
        assert await works_in(session) == str(two)
    async with Host(store) as other:
        # As a host that finds the session in the store and has no spec from a caller.
        taken = await other.take_over(session.id)
        assert (taken.cwd, await works_in(taken)) == (str(two), str(two))


async def test_reopen_with_same_settings_logs_nothing(tmp_path: Path) -> None:
    async with Host("memory:") as host:
        how: dict[str, Any] = {"command": fake_agent.command(), "name": "x", "cwd": tmp_path}
        session = await host.open("claude", **how)
        await host.open("claude", **how)
        assert len(await bodies(session)) == 1
        # A changed number starts no new process, but the log needs it for the next take-over.
        await host.open("claude", **how, options={"drain_seconds": 9})
        await host.open("claude", **how, options={"drain_seconds": 9})
        assert [body["options"] for body in await bodies(session)] == [{}, {"drain_seconds": 9}]


async def test_reopen_is_refused_when_log_is_full_and_logged_on_retry(tmp_path: Path) -> None:
    how: dict[str, Any] = {"command": fake_agent.command(), "name": "x", "options": RETRIES}
    # More than the free space in the file.
    long = "be brief\n" * 50_000
    async with Host(f"sqlite:{tmp_path / 'store.db'}") as host:
        session = await host.open("claude", **how)
        disk = Disk(host)
        await disk.fill()
        with pytest.raises(StoreFull):
            await host.open("claude", **how, system_prompt=long)
        await disk.make_room()
        async with asyncio.timeout(30):
            while len(await bodies(session)) < 2:
                with suppress(StoreFull):
                    await host.open("claude", **how, system_prompt=long)
                await asyncio.sleep(0.002)
        assert [body["system_prompt"] for body in await bodies(session)] == [None, long]


async def test_reopen_answer_and_log_name_the_same_cwd(tmp_path: Path) -> None:
    (tmp_path / "two").mkdir()

    def opening(cwd: Path) -> ForwardedRequest:
        body = msgspec.json.encode({"command": fake_agent.command(), "name": "x", "cwd": str(cwd)})
        return ForwardedRequest("POST", "/v1/sessions", {"content-type": "application/json"}, body)

    events = ForwardedRequest("GET", "/v1/sessions/x/events?frames=false")
    first, again, log = await put_through(opening(tmp_path), opening(tmp_path / "two"), events)
    assert msgspec.json.decode(first.body)["id"] == (answer := msgspec.json.decode(again.body))["id"]
    opened = [each["body"] for each in msgspec.json.decode(log.body)["events"] if each["kind"] == "session.opened"]
    assert opened[-1]["cwd"] == answer["cwd"] == str(tmp_path / "two")
