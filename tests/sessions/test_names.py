"""Valid names of sessions, and commands that run without a usable store."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from banksman import Host, StoreDamaged, StoreError, UsageError
from banksman.testing import fake_agent

SECRET = "sk-not-to-be-seen"
BAD = ["", "\n", "a\0b", "\ud800", "x" * 201, "s-0123456789abcdef", 5, b"x", f"my {SECRET}"]


@pytest.mark.parametrize("name", BAD, ids=repr)
async def test_invalid_session_name_is_refused_everywhere(tmp_path: Path, name: Any) -> None:
    async with Host("memory:", secrets=[SECRET]) as host:
        session = await host.open("claude", command=fake_agent.command(), name="good")
        await (await session.ask("hello")).outcome()
        with pytest.raises(UsageError):
            await host.open("claude", command=fake_agent.command(), name=name)
        with pytest.raises(UsageError):
            await host.fork(session, name=name)
        with pytest.raises(UsageError):
            await session.rename(name)
        await host.export(session, tmp_path / "exported")
        with pytest.raises(UsageError):
            await host.import_session(tmp_path / "exported", name=name)
        assert [(known.name, known.id) for known in host.sessions()] == [("good", session.id)]


@pytest.mark.parametrize("wanted", ["\ud800", "nobody", "", 5, None], ids=repr)
async def test_unknown_session_is_usage_error(wanted: Any) -> None:
    async with Host() as host:
        with pytest.raises(UsageError):
            host.session(wanted)
        with pytest.raises((UsageError, AttributeError)):
            await host.delete(wanted)


async def test_key_that_contains_secret_is_refused() -> None:
    async with Host(secrets=[SECRET]) as host:
        session = await host.open("claude", command=fake_agent.command())
        with pytest.raises(UsageError, match="key"):
            await session.ask("hello", key=f"chat-{SECRET}")


async def test_imported_session_is_redacted(tmp_path: Path) -> None:
    async with Host("memory:") as host:
        session = await host.open("claude", command=fake_agent.command())
        await (await session.ask(f"it is {SECRET}")).outcome()
        await host.export(session, tmp_path / "exported")
    assert SECRET in (tmp_path / "exported").read_text()
    async with Host("memory:", secrets=[SECRET]) as host:
        session = await host.import_session(tmp_path / "exported")
        assert not any(SECRET.encode() in event.data for event in [event async for event in session.events()])


@pytest.mark.parametrize("is_folder", [True, False])
async def test_commands_need_no_store_unless_it_is_named(is_folder: bool) -> None:
    path = Path(os.environ["XDG_STATE_HOME"]) / "banksman" / "store.db"
    path.parent.mkdir(parents=True)
    path.mkdir() if is_folder else path.write_bytes(os.urandom(20_000))
    async with Host() as host:
        assert (await (await host.start(["true"])).wait()).code == 0
        with pytest.raises(StoreError):
            host.sessions()
        with pytest.raises(StoreError):
            await host.open("claude", command=fake_agent.command())
    with pytest.raises(StoreError if is_folder else StoreDamaged):
        async with Host(f"sqlite:{path}"):
            raise AssertionError("it was entered")


async def test_host_without_home_runs_commands_and_refuses_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", "")
    async with Host() as host:
        assert (await (await host.start(["true"])).wait()).code == 0
        with pytest.raises(UsageError, match="home"):
            await host.open("claude", command=fake_agent.command())
