"""Usage table of the SQLite engine: files and events of versions without it, damage, and read-only files."""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
from pathlib import Path

import pytest
from tests.store.conformance_usage import TODAY, ended, reported, used
from tests.store.kit import Writer

from banksman.core.session.event import Entry, entry
from banksman.store.log_values import UsageRow
from banksman.store.sqlite import usage_table
from banksman.store.sqlite.sqlite_log import SqliteLog

OLD = {"usage": {"input_tokens": 3}, "cost": None, "outcome": "done", "by": "boundary"}


async def write(path: Path, *entries: Entry, session: str = "s") -> None:
    log = SqliteLog(path)
    writer = await Writer.claim(log, session)
    for each in entries:
        await writer.commit(each)
    await log.close()


def edit(path: Path, *statements: str) -> None:
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        for statement in statements:
            connection.execute(statement)


def forget(path: Path) -> None:
    """Make the file one of an earlier version."""
    edit(path, "DROP TABLE usage", "ALTER TABLE sessions DROP COLUMN counted")


async def usage(path: Path) -> list[UsageRow]:
    log = SqliteLog(path)
    try:
        return await log.usage()
    finally:
        await log.close()


async def test_file_of_earlier_version_is_counted_at_first_query(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "store.db"
    for number in range(3):
        await write(path, *[ended(used(1))] * 10, entry("t", "turn.ended", **OLD), session=f"s-{number}")
    forget(path)
    # Several pieces are needed.
    monkeypatch.setattr(usage_table, "PIECE_BYTES_MAX", 500)
    log = SqliteLog(path)
    writer = await Writer.claim(log, "s-0")
    # The session is not counted yet, so this append is counted with its history.
    await writer.commit(ended(used(100)))
    expected = [UsageRow(TODAY, used(139, turns=3))]
    assert await log.usage() == expected
    await writer.commit(reported(used(1)))
    assert await log.usage() == [UsageRow(TODAY, used(140, turns=3))]
    await log.close()
    assert await usage(path) == [UsageRow(TODAY, used(140, turns=3))]


async def test_events_of_earlier_version_in_a_newer_file_are_counted_once(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    await write(path, ended(used(1)), ended(used(2)))
    # The earlier version changes `seq`, and knows neither the table nor the column.
    edit(path, "UPDATE sessions SET counted = 1", "UPDATE usage SET input = 1")
    await write(path, ended(used(4)))
    assert await usage(path) == [UsageRow(TODAY, used(7))]
    await write(path, ended(used(8)))
    assert await usage(path) == [UsageRow(TODAY, used(15))]


@pytest.mark.parametrize("is_deleted", [True, False])
async def test_uncounted_events_are_counted_before_they_are_removed(tmp_path: Path, is_deleted: bool) -> None:
    path = tmp_path / "store.db"
    log = SqliteLog(path)
    writer = await Writer.claim(log)
    for count in (1, 2, 4):
        await writer.commit(ended(used(count)), snapshot=b"state")
    await log.close()
    forget(path)
    log = SqliteLog(path)
    if is_deleted:
        await log.delete("s")
    else:
        assert await log.trim("s", 3) == 3
    assert await log.usage() == [UsageRow(TODAY, used(7))]
    await log.close()


async def test_damaged_chunk_is_skipped_and_session_can_be_deleted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "store.db"
    await write(path, ended(used(1)), ended(used(2)), ended(used(4)))
    forget(path)
    edit(path, "UPDATE chunks SET crc = crc + 1 WHERE first = 2")
    log = SqliteLog(path)
    with caplog.at_level(logging.WARNING, "banksman"):
        assert await log.usage() == [UsageRow(TODAY, used(5))]
    assert "usage not counted" in caplog.text
    await log.delete("s")
    assert await log.usage() == [UsageRow(TODAY, used(5))]
    await log.close()


@pytest.mark.parametrize("is_old", [True, False])
async def test_read_only_file_is_counted_by_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_old: bool
) -> None:
    path = tmp_path / "store.db"
    await write(path, ended(used(1)), ended(used(2)))
    if is_old:
        forget(path)
    else:
        edit(path, "UPDATE sessions SET counted = 1", "UPDATE usage SET input = 1")
    real = os.access

    def access(name: str, mode: int, *, effective_ids: bool = False) -> bool:
        # The user of the tests may be root, who can write every file.
        return mode != os.W_OK and real(name, mode, effective_ids=effective_ids)

    monkeypatch.setattr(os, "access", access)
    log = SqliteLog(path)
    for _ in range(2):
        assert await log.usage() == [UsageRow(TODAY, used(3))]
        assert await log.usage("session", until="2000-01-01") == []
    await log.close()
