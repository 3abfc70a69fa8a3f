"""Group commits of the journal: one for each pass of the event loop, deletions with the next one."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from tests.store.kit import until

from banksman.cluster.log import journal as journals
from banksman.cluster.log.journal import Journal
from banksman.cluster.log.journal_file import JournalRow


def row(number: int) -> JournalRow:
    return JournalRow(f"p.ev.s{number}", f"s{number}.1.0.x", 0, "1 1 1 0 1.0 -", b"body")


def stored(journal: Journal) -> list[str]:
    """Return the ids in the file, as another process sees them."""
    db = sqlite3.connect(f"file:{journal.path}?mode=ro", uri=True)
    try:
        return [id for (id,) in db.execute("select id from pending order by number")]
    finally:
        db.close()


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the groups that the thread commits."""
    sizes: list[int] = []
    commit = Journal._commit  # pyright: ignore[reportPrivateUsage]

    def counted(self: Journal, db: sqlite3.Connection, group: list[Any]) -> None:
        sizes.append(len(group))
        commit(self, db, group)

    monkeypatch.setattr(Journal, "_commit", counted)
    return sizes


async def test_messages_of_one_pass_of_the_loop_share_a_commit(tmp_path: Path, groups: list[int]) -> None:
    journal = Journal(tmp_path, "h")
    await asyncio.gather(*(journal.put(row(number)) for number in range(20)))
    assert groups == [20]
    assert stored(journal) == [row(number).id for number in range(20)]
    await journal.close()


async def test_deletion_waits_for_the_next_message(
    tmp_path: Path, groups: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journals, "DROP_SECONDS_MAX", 600.0)
    journal = Journal(tmp_path, "h")
    await journal.put(row(1))
    journal.drop(row(1).id)
    await asyncio.sleep(0.05)
    assert stored(journal) == [row(1).id]
    await journal.put(row(2))
    assert groups == [1, 2]
    assert stored(journal) == [row(2).id]
    journal.drop(row(2).id)
    await journal.close()
    # The close has performed the last deletion: an empty journal is removed.
    assert not journal.path.exists()


async def test_deletion_without_further_messages_is_performed(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "h")
    await journal.put(row(1))
    journal.drop(row(1).id)
    async with asyncio.timeout(20):
        await until(lambda: not stored(journal))
    await journal.close()
