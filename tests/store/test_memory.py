"""Log in memory: the conformance suite, and the behaviour that is specific to this engine."""

from __future__ import annotations

import asyncio
import os
import tracemalloc

import pytest
from tests.thorough import one_in

from banksman.core.session.event import UPDATE
from banksman.errors import HistoryLost, NotOwner, UsageError
from banksman.store.log import Log
from banksman.store.log_values import Head, Owner
from banksman.store.memory import MemoryLog
from banksman.store.memory_session import CHUNK_BYTES, ENTRY_BYTES

# Before the import: otherwise a failed assert shows no values.
pytest.register_assert_rewrite("tests.store.conformance")

from tests.store.conformance import (  # noqa: E402
    AT,
    Answers,
    LogConformance,
    Refusal,
    Writer,
    data,
    everything,
    known,
    lines,
)


class TestMemoryLog(LogConformance):
    async def open_log(self, *, retained_bytes: int | None = None) -> Log:
        return MemoryLog() if retained_bytes is None else MemoryLog(bytes_max=retained_bytes)


# Behaviour that the protocol leaves open.


async def test_memory_log_commits_nothing_before_the_loop_runs() -> None:
    log = MemoryLog()
    writer = await Writer.claim(log)
    writer.append(b"a")
    assert log.head("s") == Head(epoch=1, seq=0, first=1)
    await log.close()


async def test_memory_log_commits_all_sessions_in_one_loop_pass() -> None:
    log = MemoryLog()
    writers = [await Writer.claim(log, name) for name in "abc"]
    for writer in writers * 2:
        writer.append(b"x")
    await asyncio.sleep(0)
    assert [writer.answers.kinds for writer in writers] == [[None, None]] * 3
    await log.close()


async def test_claim_sees_every_append_accepted_before_it() -> None:
    log = MemoryLog()
    old = await Writer.claim(log)
    old.append(b"a", b"b")
    old.append(b"c")
    new = await Writer.claim(log)
    assert new.seq == 3
    assert await old.answers.all() == [None, None]
    await log.close()


async def test_delete_answers_accepted_appends_as_committed() -> None:
    log = MemoryLog()
    writer = await Writer.claim(log)
    wait = asyncio.ensure_future(log.wait_past("s", 0))
    await asyncio.sleep(0)
    writer.append(b"a")
    await log.delete("s")
    assert await writer.answers.all() == [None]
    await wait
    await log.close()


async def test_release_sees_every_append_accepted_before_it() -> None:
    log = MemoryLog()
    writer = await Writer.claim(log)
    writer.append(b"a", b"b", snapshot=b"at 2")
    writer.release()
    assert known(log)[4:7] == (2, 1, None)
    assert await log.snapshot("s") == (2, b"at 2")
    assert await writer.answers.all() == [None]
    await log.close()


async def test_owner_is_this_process_and_has_no_address() -> None:
    log = MemoryLog()
    await log.claim("s", agent="claude")
    assert known(log).owner == Owner(pid=os.getpid(), address="", is_here=True, is_alive=True)
    await log.close()


async def test_claim_skips_the_epoch_a_live_owner_may_advance_to() -> None:
    log = MemoryLog()
    assert [await log.claim("s", agent="claude"), await log.claim("s", agent="claude")] == [1, 3]
    log.release("s", 3)
    assert await log.claim("s", agent="claude") == 4
    await log.delete("s")
    assert await log.claim("s", agent="claude") == 6
    await log.close()


async def test_position_is_chunk_number_and_count_of_read_events() -> None:
    log = MemoryLog()
    one, two = await Writer.claim(log, "one"), await Writer.claim(log, "two")
    assert (await log.read_many(None)).position == "0.0"
    one.append(b"a", b"b")
    two.append(b"c")
    one.append(b"d")
    await one.answers.all()
    assert [placed.position for placed in (await log.read_many(None)).events] == ["1.1", "1.2", "2.1", "3.1"]
    # The position of a filtered reader is past all events that the read looked at.
    assert (await log.read_many("0.0", 2, sessions=["one"])).position == "1.2"
    assert (await log.read_many("0.0", 9, sessions=["two"])).position == "3.1"
    for never_given in ("0.1", "4.0", "01.1"):
        with pytest.raises(UsageError):
            await log.read_many(never_given)
    for given_elsewhere in ("3.2", "4.1"):
        with pytest.raises(HistoryLost):
            await log.read_many(given_elsewhere)
    await log.close()


async def test_failure_inside_an_answer_is_not_cleared_by_an_older_failure() -> None:
    log = MemoryLog()
    writer = await Writer.claim(log)
    await writer.commit(b"a", b"b")
    answers = Answers()
    again, fits = answers.done(), answers.done()

    def told(error: Refusal) -> None:
        log.append("s", writer.epoch, 0, AT, lines(b"x", b"y"), again)

    def told_too(error: Refusal) -> None:
        # This append follows the one above, whose failure is not reported yet. Its seq fits only by accident.
        log.append("s", writer.epoch, 2, AT, lines(b"z"), fits)

    log.append("s", writer.epoch, 7, AT, lines(b"x"), told)
    log.append("s", writer.epoch, 8, AT, lines(b"x"), told_too)
    assert await answers.all() == [NotOwner, NotOwner]
    assert data(await everything(log)) == [b"a", b"b"]
    await log.close()


async def test_read_yields_to_the_event_loop() -> None:
    log = MemoryLog()
    await (await Writer.claim(log)).commit(b"a")
    ran: list[bool] = []
    asyncio.get_running_loop().call_soon(ran.append, True)
    await log.read("s", 0)
    assert ran == [True]
    await log.close()


async def test_ended_wait_leaves_no_waiter_behind() -> None:
    log = MemoryLog()
    writer = await Writer.claim(log)
    empty = repr(log)
    assert empty == "<MemoryLog OPEN sessions=1 unanswered=0 waiting=0>"
    waits = [asyncio.ensure_future(log.wait_past(name, 0)) for name in ("s", "s", "unknown")]
    waits += [asyncio.ensure_future(log.wait_past_position("0.0")) for _ in range(2)]
    await asyncio.sleep(0)
    assert repr(log) == "<MemoryLog OPEN sessions=1 unanswered=0 waiting=5>"
    for wait in (waits[0], waits[2], waits[3]):
        wait.cancel()
    await asyncio.wait([waits[0], waits[2], waits[3]])
    await writer.commit(b"a")
    await waits[1]
    await waits[4]
    assert repr(log) == empty
    assert log._waiters == {}  # pyright: ignore[reportPrivateUsage]  No entry for the unknown session either.
    await log.close()


def test_keyboard_interrupt_in_one_answer_does_not_lose_the_others() -> None:
    """Ctrl-C propagates through the loop, and the rest of the program runs in the loop again."""
    answers = Answers()

    async def interrupted() -> MemoryLog:
        log = MemoryLog()
        epoch = await log.claim("s", agent="claude")

        def interrupt(error: Refusal) -> None:
            raise KeyboardInterrupt

        log.append("s", epoch, 0, AT, lines(b"a"), interrupt)
        log.append("s", epoch, 1, AT, lines(b"b"), answers.done())
        logs.append(log)
        await asyncio.get_running_loop().create_future()
        raise AssertionError

    logs: list[MemoryLog] = []
    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        task = loop.create_task(interrupted())
        with pytest.raises(KeyboardInterrupt):
            loop.run_until_complete(task)
        assert loop.run_until_complete(answers.all()) == [None]
        task.cancel()
        loop.run_until_complete(asyncio.wait([task]))
        loop.run_until_complete(logs[0].close())


# Retention.

CHUNK = CHUNK_BYTES + 2 * (ENTRY_BYTES + 100)


async def test_retention_keeps_what_fits_to_the_byte_and_then_drops_oldest_chunk() -> None:
    log = MemoryLog(bytes_max=4 * CHUNK)
    writer = await Writer.claim(log)
    for _ in range(4):
        await writer.commit(b"x" * 100, b"y" * 100, snapshot=b"so far")
    assert log.head("s") == Head(epoch=1, seq=8, first=1)
    # A chunk of exactly one chunk's weight drops exactly one chunk.
    await writer.commit(b"x" * 150, b"y" * 50, snapshot=b"so far")
    assert log.head("s") == Head(epoch=1, seq=10, first=3)
    # One byte more drops two.
    await writer.commit(b"x" * 151, b"y" * 50, snapshot=b"so far")
    assert log.head("s") == Head(epoch=1, seq=12, first=7)
    page = await log.read("s", 1)
    assert page.gap == (2, 6)
    assert [event.seq for event in page.events] == [7, 8, 9, 10, 11, 12]
    await log.close()


async def test_retention_keeps_the_newest_chunk_whatever_its_size() -> None:
    log = MemoryLog(bytes_max=1)
    writer = await Writer.claim(log)
    writer.append(b"a")
    writer.append(b"b", b"c" * 5000, snapshot=b"so far")
    await writer.commit()
    assert log.head("s") == Head(epoch=1, seq=3, first=2)
    page = await log.read("s", 0, 1)
    assert page.gap == (1, 1)
    assert data(page.events) == [b"b"]
    assert await log.trim("s", 100) == 2
    await log.close()


async def test_read_is_correct_at_every_stage_of_retention() -> None:
    """The log shortens its list of chunks now and then. The search must work before, at and after that."""
    log = MemoryLog(bytes_max=5 * CHUNK)
    writer = await Writer.claim(log)
    for number in range(40):
        await writer.commit(b"%100d" % (2 * number + 1), b"%100d" % (2 * number + 2), snapshot=b"so far")
        head = log.head("s")
        assert head.first == max(1, 2 * number - 7)
        # Five chunks, and at most as many empty places.
        assert len(log._sessions["s"].chunks) <= 10  # pyright: ignore[reportPrivateUsage]
        for after in range(head.seq):
            page = await log.read("s", after)
            assert [int(event.data) for event in page.events] == list(range(max(after + 1, head.first), head.seq + 1))
            assert page.gap == ((after + 1, head.first - 1) if after + 1 < head.first else None)
        # The search by number must work too.
        placed = (await log.read_many(None)).events
        assert [one.event.seq for one in placed] == list(range(head.first, head.seq + 1))
        for index, (position, _) in enumerate(placed):
            assert (await log.read_many(position)).events == placed[index + 1 :]
    await log.close()


@pytest.mark.parametrize("per_chunk", [1, 3, 200])
@pytest.mark.parametrize("size", one_in(5, [1000, 0, 1, 15, 16]))
async def test_retention_bounds_memory_for_every_size_of_entry_and_chunk(per_chunk: int, size: int) -> None:
    bytes_max = 1 << 20
    log = MemoryLog(bytes_max=bytes_max)
    epoch, seq = await log.claim("s", agent="claude"), 0
    answers = Answers()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        # Three times the limit, so that the log drops chunks most of the time.
        for number in range(3 * bytes_max // (CHUNK_BYTES + per_chunk * (ENTRY_BYTES + size))):
            # Each entry has new data and numbers, because shared objects would weigh nothing.
            entries = [("t-1", UPDATE, bytes(bytearray(size))) for _ in range(per_chunk)]
            log.append("s", epoch, seq, AT + number, entries, _ignore, b"so far")
            seq += per_chunk
            if number % 50 == 0:
                await asyncio.sleep(0)
        log.append("s", epoch, seq, AT, (), answers.done())
        assert await answers.all() == [None]
        assert log.head("s").first > 1
        kept = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert kept < bytes_max * 1.05
    # The bound must match the real use, otherwise a session would drop events too early.
    assert kept > bytes_max * 0.5
    await log.close()


def _ignore(error: Refusal) -> None:
    assert error is None


async def test_memory_log_refuses_bytes_max_of_zero() -> None:
    with pytest.raises(UsageError):
        MemoryLog(bytes_max=0)
