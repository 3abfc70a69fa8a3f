"""The part of the log suite about usage: counted once, by day, session, agent and caller, and kept."""

from __future__ import annotations

from typing import Any

import pytest
from tests.store.kit import AT, Opens, Writer

from banksman.core.dialects.tokens import Tokens
from banksman.core.session.event import Entry, entry
from banksman.core.session.usage import Usage
from banksman.errors import StoreError, UsageError
from banksman.store.log_values import Chunk, UsageRow

DAY = 86_400.0
# Days of AT and of the days around it.
BEFORE, TODAY, AFTER = "2023-11-13", "2023-11-14", "2023-11-15"


def used(read: int = 0, written: int = 0, *, usd: float | None = None, seconds: float = 0.0, turns: int = 0) -> Usage:
    return Usage(Tokens(read, written), usd, seconds, turns)


def reported(added: Usage, caller: str | None = None) -> Entry:
    return entry("t-1", "usage.reported", caller=caller, added=added, used=added)


def ended(added: Usage | None, caller: str | None = None, **more: Any) -> Entry:
    return entry("t-1", "turn.ended", outcome="done", by="boundary", added=added, caller=caller, **more)


class UsageConformance(Opens):
    async def test_usage_is_the_sum_of_all_additions(self) -> None:
        async with self.opened() as log:
            assert await log.usage() == []
            writer = await Writer.claim(log)
            writer.append(reported(used(10, 1, seconds=0.5), "alice"))
            writer.append(b"a frame", ended(used(5, 2, usd=0.25, seconds=0.5, turns=1), "alice"))
            writer.append(entry("t-2", "turn.requeued", attempt=2, added=used(1, turns=1), caller=None))
            writer.append(ended(None))
            await writer.answers.all()
            total = used(16, 3, usd=0.25, seconds=1.0, turns=2)
            assert await log.usage("day") == [UsageRow(TODAY, total)]
            assert await log.usage("session") == [UsageRow("s", total)]
            assert await log.usage("agent") == [UsageRow("claude", total)]
            assert await log.usage("caller") == [
                UsageRow(None, used(1, turns=1)),
                UsageRow("alice", used(15, 3, usd=0.25, seconds=1.0, turns=1)),
            ]

    async def test_usage_is_counted_by_the_day_of_its_event(self) -> None:
        async with self.opened() as log:
            writer = await Writer.claim(log)
            for at, count in ((AT - DAY, 1), (AT, 2), (AT + DAY, 4)):
                writer.append(ended(used(count)), at=at)
            await writer.answers.all()
            assert await log.usage() == [
                UsageRow(day, used(count)) for day, count in ((BEFORE, 1), (TODAY, 2), (AFTER, 4))
            ]
            assert await log.usage("agent", since=TODAY) == [UsageRow("claude", used(6))]
            assert await log.usage("agent", until=TODAY) == [UsageRow("claude", used(3))]
            assert await log.usage("agent", since=TODAY, until=TODAY) == [UsageRow("claude", used(2))]

    async def test_usage_sums_many_sessions(self) -> None:
        async with self.opened() as log:
            for number in range(3):
                writer = await Writer.claim(log, f"s-{number}")
                writer.append(ended(used(10 + number), "alice" if number else "bob"))
                await writer.answers.all()
            assert await log.usage("session") == [UsageRow(f"s-{n}", used(10 + n)) for n in range(3)]
            assert await log.usage("caller") == [UsageRow("alice", used(23)), UsageRow("bob", used(10))]

    async def test_usage_stays_after_deletion(self) -> None:
        async with self.opened() as log:
            for count in (1, 2):
                writer = await Writer.claim(log)
                writer.append(ended(used(count), "alice"))
                await writer.answers.all()
                await log.delete("s")
                assert await log.usage("caller") == [UsageRow("alice", used(1 if count == 1 else 3))]
            assert await log.usage("session") == [UsageRow("s", used(3))]

    async def test_usage_stays_after_trim(self) -> None:
        async with self.opened() as log:
            writer = await Writer.claim(log)
            for count in (1, 2, 4):
                await writer.commit(ended(used(count)), snapshot=b"state")
            assert await log.trim("s", 3) > 1
            assert await log.usage() == [UsageRow(TODAY, used(7))]
            writer.append(ended(used(8)))
            await writer.answers.all()
            assert await log.usage() == [UsageRow(TODAY, used(15))]

    async def test_restored_session_brings_no_usage(self) -> None:
        async with self.opened() as log:
            chunks = [Chunk(1, 1, AT, [ended(used(1))])]
            await log.restore("s", name=None, agent="claude", chunks=lambda: chunks)
            assert await log.usage() == []
            writer = await Writer.claim(log)
            writer.append(ended(used(2)))
            await writer.answers.all()
            assert await log.usage() == [UsageRow(TODAY, used(2))]

    async def test_turn_of_earlier_version_is_counted_from_its_own_report(self) -> None:
        async with self.opened() as log:
            writer = await Writer.claim(log)
            usage = {"input_tokens": 3, "output_tokens": 4, "cache_read_input_tokens": 5}
            writer.append(entry("t-1", "turn.ended", outcome="done", by="boundary", usage=usage, cost=0.5))
            writer.append(entry("t-2", "turn.ended", outcome="withdrawn", by="withdrawn", usage=None, cost=None))
            await writer.answers.all()
            assert await log.usage() == [UsageRow(TODAY, Usage(Tokens(3, 4, 5), 0.5, turns=1))]

    async def test_invalid_usage_adds_nothing(self) -> None:
        async with self.opened() as log:
            writer = await Writer.claim(log)
            for data in (b"", b"[]", b'{"added": 1}', b'{"added": {"tokens": {"input": "x"}}}'):
                writer.append(("t-1", "turn.ended", data))
            writer.append(reported(used(1)))
            await writer.answers.all()
            assert await log.usage() == [UsageRow(TODAY, used(1))]

    @pytest.mark.parametrize(
        "wrong", [{"by": "moon"}, {"since": "yesterday"}, {"until": 3}], ids=["by", "since", "until"]
    )
    async def test_wrong_query_is_refused(self, wrong: dict[str, Any]) -> None:
        async with self.opened() as log:
            with pytest.raises(UsageError):
                await log.usage(**wrong)

    async def test_closed_log_has_no_usage(self) -> None:
        log = await self.open_log()
        await log.close()
        with pytest.raises(StoreError):
            await log.usage()
