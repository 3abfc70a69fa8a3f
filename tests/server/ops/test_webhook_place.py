"""The stored place of a webhook target: which store it belongs to, and what happens when it cannot be used."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from tests.server.ops.webhook_receiver import Receiver

from banksman import Host
from banksman.folders import state_folder
from banksman.server.ops import webhooks
from banksman.server.ops.webhook_cursor import CursorFile, address_of
from banksman.server.server_settings import ServerSettings
from banksman.testing import fake_agent

SECRET = "a-secret-of-the-tests"
LOST = "its place in the log is lost, starting at the newest event"


@pytest.fixture
def store(tmp_path: Path) -> str:
    return f"sqlite:{tmp_path / 'store.db'}"


@pytest.fixture
def folder() -> Path:
    path = state_folder() / "webhooks"
    path.mkdir(parents=True, mode=0o700)
    return path


def settings(store: str, receiver: Receiver) -> ServerSettings:
    return ServerSettings(port=0, store=store, webhooks=[receiver.url()], webhook_events=["turn.ended"])


async def turn(host: Host, folder: Path) -> None:
    session = await host.open("claude", command=fake_agent.command(), cwd=str(folder))
    await (await session.ask("hello")).outcome()
    await session.close()


async def wait_accepted(receiver: Receiver, count: int) -> None:
    await asyncio.to_thread(receiver.wait_accepted, count)


async def wait_place(folder: Path) -> None:
    async with asyncio.timeout(60):
        while not any(path.is_file() for path in folder.glob("*.json")):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def copy(store: str, to: Path) -> None:
    """Copy a store whose host is closed, as a backup does."""
    with closing(sqlite3.connect(store.removeprefix("sqlite:"))) as source, closing(sqlite3.connect(to)) as target:
        source.backup(target)


def restore(backup: Path, store: str) -> None:
    path = Path(store.removeprefix("sqlite:"))
    # While the old file exists, the new one cannot have its inode.
    shutil.copy(backup, f"{path}.new")
    os.chmod(f"{path}.new", 0o600)
    os.replace(f"{path}.new", path)
    for name in ("-wal", "-shm"):
        Path(f"{path}{name}").unlink(missing_ok=True)


async def test_sender_waits_while_its_folder_cannot_be_used(
    store: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(webhooks, "RETRY_SECONDS", 3600.0)
    folder.chmod(0o777)
    with Receiver() as receiver:
        async with Host(store) as host, webhooks.sending(host, settings(store, receiver), SECRET):
            await turn(host, tmp_path)
    found = [message for message in caplog.messages if "webhook " in message and "cursor" not in message]
    (warning,) = found
    assert "cannot send events, trying again: cannot use" in warning


async def test_sender_loses_nothing_when_its_folder_can_be_used_again(
    store: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(webhooks, "RETRY_SECONDS", 0.01)
    folder.chmod(0o777)
    with Receiver() as receiver:
        async with Host(store) as host, webhooks.sending(host, settings(store, receiver), SECRET):
            await turn(host, tmp_path)
            folder.chmod(0o700)
            await wait_accepted(receiver, 1)
    assert not any(LOST in message for message in caplog.messages)


async def test_server_starts_although_the_place_cannot_be_read(
    store: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(webhooks, "RETRY_SECONDS", 0.01)
    with Receiver() as receiver:
        given = settings(store, receiver)
        cursor = CursorFile(folder, receiver.url(), address=address_of(given), identity="")
        cursor.save("1")
        (path,) = folder.glob("*.json")
        path.unlink()
        path.mkdir()
        async with Host(store) as host, webhooks.sending(host, given, SECRET):
            assert "Is a directory" in caplog.messages[0]
            path.rmdir()
            await wait_place(folder)
            await turn(host, tmp_path)
            await wait_accepted(receiver, 1)


async def test_damaged_place_is_replaced_by_the_newest_event(
    store: str, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Receiver() as receiver:
        given = settings(store, receiver)
        for number in (1, 2):
            async with Host(store) as host, webhooks.sending(host, given, SECRET):
                await turn(host, tmp_path)
                await wait_accepted(receiver, number)
            (path,) = folder.glob("*.json")
            path.write_bytes(path.read_bytes()[:-1])
        assert sum(LOST in message for message in caplog.messages) == 1


async def test_restored_store_goes_on_at_the_stored_place(
    store: str, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    backup = tmp_path / "backup.db"
    with Receiver() as receiver:
        given = settings(store, receiver)
        async with Host(store) as host:
            async with webhooks.sending(host, given, SECRET):
                await turn(host, tmp_path)
                await wait_accepted(receiver, 1)
            # No server sends it.
            await turn(host, tmp_path)
        copy(store, backup)
        restore(backup, store)
        async with Host(store) as host, webhooks.sending(host, given, SECRET):
            await wait_accepted(receiver, 2)
        assert len(list(folder.glob("*.json"))) == 1
        assert sum("the store is another file than before" in message for message in caplog.messages) == 1
        caplog.clear()
        async with Host(store) as host, webhooks.sending(host, given, SECRET):
            pass
        assert caplog.messages == []


async def test_older_copy_of_a_store_starts_at_the_newest_event(
    store: str, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    backup = tmp_path / "backup.db"
    async with Host(store) as host:
        await turn(host, tmp_path)
    copy(store, backup)
    with Receiver() as receiver:
        given = settings(store, receiver)
        async with Host(store) as host, webhooks.sending(host, given, SECRET):
            # The second one is sent when the place after the first one is known.
            for number in (1, 2):
                await turn(host, tmp_path)
                await wait_accepted(receiver, number)
        restore(backup, store)
        async with Host(store) as host, webhooks.sending(host, given, SECRET):
            async with asyncio.timeout(60):
                while not any(LOST in message for message in caplog.messages):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            await turn(host, tmp_path)
            await wait_accepted(receiver, 3)
        assert len(receiver.accepted) == 3


def test_place_belongs_to_the_address_of_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def of(store: str) -> str:
        return address_of(ServerSettings(port=0, store=store))

    assert of("nats://u:p@a,b:4333") == of("tls://b:4333,a/banksman?lease=20") != of("nats://a,b:4333/staging")
    assert of("nats://a") != of("nats://b")
    assert "p@" not in of("nats://u:p@a")
    monkeypatch.chdir(tmp_path)
    assert of("sqlite:x.db") == of(f"sqlite:{tmp_path}/x.db?level=1") != of("sqlite:y.db")


@pytest.fixture(autouse=True)
def warnings(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "banksman.webhooks")
