"""Appends queued behind an unacknowledged publish: which of them the journal notes."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from banksman.cluster.log import message_codec
from banksman.cluster.log.blocked_appends import BlockedAppends
from banksman.cluster.log.journal import Journal
from banksman.cluster.log.journal_file import noted_report_path
from banksman.cluster.log.message_codec import MessagePart
from banksman.cluster.log.publisher import Advance, Call, QueuedAppend
from banksman.core.session.event import TURN_ENDED, TURN_QUEUED, TURN_STARTED, UPDATE

SUBJECT = "p.ev.s"
EPOCH = 3


def said(seq: int, *kinds: str, epoch: int = EPOCH) -> QueuedAppend:
    """Return an append of events that start at `seq`; the data of each event is its number."""
    entries = [("t", kind, b"%d" % number) for number, kind in enumerate(kinds, seq)]
    return QueuedAppend(epoch, 0, None, expected_seq=seq - 1, part=MessagePart(1.0, entries))


@asynccontextmanager
async def behind(folder: Path) -> AsyncGenerator[tuple[BlockedAppends, Journal]]:
    journal = Journal(folder, "h-1")
    try:
        yield BlockedAppends(journal, SUBJECT), journal
    finally:
        await journal.close()


async def noted(journal: Journal) -> list[int]:
    _, rows = await journal.rows()
    bodies = [(row, message_codec.decode(row.body)) for row in rows]
    events = [event for row, body in bodies for event in message_codec.events("", row.epoch, row.first, body, None)]
    assert [int(event.data) for event in events] == [event.seq for event in events]
    return [event.seq for event in events]


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        pytest.param([said(11, UPDATE), said(12, UPDATE, UPDATE)], [11, 12, 13], id="what an agent says"),
        pytest.param([said(11, UPDATE, TURN_ENDED)], [11, 12], id="and how a turn ended"),
        pytest.param([said(11, UPDATE), said(12, TURN_QUEUED), said(13, UPDATE)], [11], id="up to an ask"),
        pytest.param([said(11, TURN_ENDED, TURN_STARTED), said(13, UPDATE)], [11], id="up to a start"),
        pytest.param([said(11, UPDATE), Advance(EPOCH, 0, None), said(12, UPDATE)], [11], id="up to another epoch"),
        pytest.param([said(11, UPDATE), said(12, UPDATE, epoch=EPOCH + 1)], [11], id="of another epoch"),
        pytest.param([said(11, UPDATE), said(13, UPDATE)], [11], id="what does not follow"),
    ],
)
async def test_journal_notes_appends_behind_overdue_one(tmp_path: Path, calls: list[Call], expected: list[int]) -> None:
    async with behind(tmp_path) as (waiting, journal):
        waiting.note(said(10, UPDATE))
        assert await noted(journal) == []  # No append is overdue yet.
        waiting.begin(EPOCH, 11, calls[:1])
        for call in calls[1:]:
            waiting.note(call)
        assert await noted(journal) == expected
        waiting.forget()


async def test_journal_drops_stored_appends_and_keeps_the_rest(tmp_path: Path) -> None:
    async with behind(tmp_path) as (waiting, journal):
        waiting.begin(EPOCH, 11, [said(11, UPDATE), said(12, UPDATE), said(13, UPDATE)])
        waiting.pass_by(12)
        assert await noted(journal) == [13]
        waiting.note(said(14, UPDATE))
        assert await noted(journal) == [13]  # The server answers again.
        # A commit under another epoch does not drop it.
        waiting.begin(EPOCH + 2, 14, [said(14, UPDATE, epoch=EPOCH + 2)])
        waiting.pass_by(20)
        assert await noted(journal) == [13]
        journal.pass_by(SUBJECT, EPOCH, 13)


async def test_journal_keeps_lost_appends_for_recovery_and_reports_foreign_ones_once(tmp_path: Path) -> None:
    async with behind(tmp_path) as (waiting, journal):
        waiting.begin(EPOCH, 11, [said(11, UPDATE)])
        waiting.stop()
        waiting.note(said(12, UPDATE))
        assert await noted(journal) == [11]
        waiting.begin(EPOCH, 12, [said(12, UPDATE)])
        waiting.report()
        assert await noted(journal) == []
        (report,) = (tmp_path / "reports").iterdir()
        assert report == noted_report_path(journal.path, SUBJECT, EPOCH, 11)
        assert [json.loads(line)["seq"] for line in report.read_text().splitlines()] == [11, 12]
