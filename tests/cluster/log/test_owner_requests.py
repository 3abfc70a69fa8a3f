"""Questions to the owner of a session over real servers: answers, silence, timeouts and limits."""

from __future__ import annotations

import asyncio
import os
import time

import pytest
from tests.cluster.lines import SECONDS_MAX, lines, stored, until

from banksman.cluster.log import owner_requests as bus_module
from banksman.errors import NoOwner, Unanswered
from banksman.testing.nats_servers import Servers


async def echo(data: bytes) -> bytes:
    return b"heard " + data


async def test_owner_answers_a_question(nats_one: Servers, prefix: str) -> None:
    async with lines(nats_one, prefix, 2) as (front, owner):
        await owner.bus.answer_for("s-1", echo)
        await owner.bus.answer_for("name with blanks.and*dots", echo)
        assert await front.bus.ask_owner("s-1", b"you", timeout=SECONDS_MAX) == b"heard you"
        assert await front.bus.ask_owner("name with blanks.and*dots", b"", timeout=SECONDS_MAX) == b"heard "


async def test_question_without_owner_fails_at_once(nats_one: Servers, prefix: str) -> None:
    async with lines(nats_one, prefix, 1) as (front,):
        began = time.monotonic()
        with pytest.raises(NoOwner):
            await front.bus.ask_owner("s-1", b"you", timeout=SECONDS_MAX)
        assert time.monotonic() - began < SECONDS_MAX / 2


async def test_owner_is_reachable_as_soon_as_answer_for_returns(nats_one: Servers, prefix: str) -> None:
    """A subscription stays in the client's buffer for a while, and `flush` returns before the server has it."""
    async with lines(nats_one, prefix, 2) as (front, owner):
        for number in range(200):
            await owner.bus.answer_for(f"s-{number}", echo)
            assert await front.bus.ask_owner(f"s-{number}", b"", timeout=SECONDS_MAX) == b"heard "


async def test_question_given_up_is_not_handled_when_it_arrives_late(prefix: str) -> None:
    """Such as an interrupt that waited in a lost connection and would stop a turn that it was not meant for."""
    heard: list[bytes] = []

    async def answer(data: bytes) -> bytes:
        heard.append(data)
        return data

    with Servers(1) as servers:
        async with lines(servers, prefix, 2) as (front, owner):
            await owner.bus.answer_for("s-1", answer)
            await front.bus.ask_owner("s-1", b"before", timeout=SECONDS_MAX)
            servers.stop(0)
            try:
                with pytest.raises(Unanswered):
                    await front.bus.ask_owner("s-1", b"given up", timeout=0.1)
            finally:
                servers.cont(0)
            await front.bus.ask_owner("s-1", b"after", timeout=SECONDS_MAX)
            await until(lambda: "0 questions" in repr(owner.bus))
    assert heard == [b"before", b"after"]


async def test_owner_answers_questions_concurrently(nats_one: Servers, prefix: str) -> None:
    """A question that waits for the end of a turn must not block the interrupt that ends the turn."""
    ended = asyncio.Event()

    async def answer(data: bytes) -> bytes:
        if data == b"interrupt":
            ended.set()
        await ended.wait()
        return data

    async with lines(nats_one, prefix, 2) as (front, owner):
        await owner.bus.answer_for("s-1", answer)
        outcome = asyncio.create_task(front.bus.ask_owner("s-1", b"outcome", timeout=SECONDS_MAX))
        assert await front.bus.ask_owner("s-1", b"interrupt", timeout=SECONDS_MAX) == b"interrupt"
        assert await outcome == b"outcome"


async def test_large_question_and_answer_pass_and_leave_no_blob(nats_one: Servers, prefix: str) -> None:
    large = os.urandom(3 << 20)

    async def answer(data: bytes) -> bytes:
        return data[::-1]

    async with lines(nats_one, prefix, 2) as (front, owner):
        await owner.bus.answer_for("s-1", answer)
        assert await front.bus.ask_owner("s-1", large, timeout=SECONDS_MAX) == large[::-1]

        # The store keeps a tombstone of each object and no chunk.
        async def chunks() -> int:
            found = await front.nats.api(
                f"STREAM.INFO.OBJ_{prefix}-blobs", {"subjects_filter": f"$O.{prefix}-blobs.C.>"}
            )
            return len(found["state"].get("subjects") or {})

        async def is_empty() -> bool:
            return not await chunks()

        await until(is_empty, "chunks of blobs are left")
        assert await stored(front.nats, f"OBJ_{prefix}-blobs") == 2


async def test_question_raises_unanswered_at_its_timeout(nats_one: Servers, prefix: str) -> None:
    async def answer(data: bytes) -> bytes:
        await asyncio.Event().wait()
        raise AssertionError

    async with lines(nats_one, prefix, 2) as (front, owner):
        await owner.bus.answer_for("s-1", answer)
        with pytest.raises(Unanswered):
            await front.bus.ask_owner("s-1", b"you", timeout=0.2)


async def test_question_wait_is_extended_by_each_working_signal(
    nats_one: Servers, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bus_module, "HAS_IT_SECONDS", 0.05)
    monkeypatch.setattr(bus_module, "WORKING_SECONDS", 0.05)
    for name in ("HAS_IT_SECONDS_MAX", "QUIET_SECONDS_MAX"):
        monkeypatch.setattr(bus_module, name, SECONDS_MAX)
    async with lines(nats_one, prefix, 2) as (front, owner):
        deadlines: set[float] = set()

        def were_extended() -> bool:
            asking = front.bus._asking.values()  # pyright: ignore[reportPrivateUsage]
            deadlines.update(one.quiet_until for one in asking)
            return len(deadlines) > 3

        async def answer(data: bytes) -> bytes:
            await until(were_extended)
            return data

        await owner.bus.answer_for("s-1", answer)
        assert await front.bus.ask_owner("s-1", b"you", timeout=SECONDS_MAX) == b"you"


@pytest.mark.thorough
async def test_question_to_silent_owner_raises_unanswered_before_its_timeout(
    nats_one: Servers, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner has taken the question.

    No server reports its silence, and the timeout of the asker may be as long as a turn.
    """
    monkeypatch.setattr(bus_module, "HAS_IT_SECONDS_MAX", 0.5)
    asked = asyncio.Event()

    async def answer(data: bytes) -> bytes:
        asked.set()
        await asyncio.Event().wait()
        raise AssertionError

    async with lines(nats_one, prefix, 2) as (front, owner):
        await owner.bus.answer_for("s-1", answer)
        question = asyncio.create_task(front.bus.ask_owner("s-1", b"you", timeout=SECONDS_MAX))
        await asked.wait()
        owner.bus.fall_silent_nowait()
        began = time.monotonic()
        with pytest.raises(Unanswered):
            await question
        assert time.monotonic() - began < SECONDS_MAX / 2


async def test_question_raises_unanswered_at_once_when_the_handler_fails(nats_one: Servers, prefix: str) -> None:
    async def answer(data: bytes) -> bytes:
        raise RuntimeError("a bug")

    async with lines(nats_one, prefix, 2) as (front, owner):
        await owner.bus.answer_for("s-1", answer)
        began = time.monotonic()
        with pytest.raises(Unanswered, match="RuntimeError"):
            await front.bus.ask_owner("s-1", b"you", timeout=SECONDS_MAX)
        assert time.monotonic() - began < SECONDS_MAX / 2


async def test_silenced_owner_does_not_answer_earlier_questions(nats_one: Servers, prefix: str) -> None:
    asked, may_answer, was_cancelled = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def answer(data: bytes) -> bytes:
        asked.set()
        try:
            await may_answer.wait()
        except asyncio.CancelledError:
            # As in an application that cleans up on cancellation. The bus drops the value that it returns then.
            was_cancelled.set()
        return b"too late"

    async with lines(nats_one, prefix, 2) as (front, owner):
        await owner.bus.answer_for("s-1", answer)
        question = asyncio.create_task(front.bus.ask_owner("s-1", b"you", timeout=1.0))
        await asked.wait()
        owner.bus.fall_silent_nowait()
        await owner.bus.fall_silent()
        assert was_cancelled.is_set()
        with pytest.raises(Unanswered):
            await question

        async def is_unheard() -> bool:
            try:
                await front.bus.ask_owner("s-1", b"you", timeout=0.5)
            except NoOwner:
                return True
            except Unanswered:
                return False
            raise AssertionError("it was answered")

        await until(is_unheard)
        # The bus can start again: after a fence the host is a new one.
        await owner.bus.answer_for("s-1", echo)
        assert await front.bus.ask_owner("s-1", b"you", timeout=SECONDS_MAX) == b"heard you"


async def test_leaving_owner_still_answers_earlier_questions(nats_one: Servers, prefix: str) -> None:
    async with lines(nats_one, prefix, 2) as (front, owner):

        async def close(data: bytes) -> bytes:
            await owner.bus.leave("s-1")
            return b"closed"

        await owner.bus.answer_for("s-1", close)
        assert await front.bus.ask_owner("s-1", b"close", timeout=SECONDS_MAX) == b"closed"

        async def is_unheard() -> bool:
            try:
                await front.bus.ask_owner("s-1", b"you", timeout=0.5)
            except NoOwner:
                return True
            return False

        await until(is_unheard)


async def test_silenced_owner_drops_questions_of_sessions_it_left(nats_one: Servers, prefix: str) -> None:
    asked = asyncio.Event()

    async def answer(data: bytes) -> bytes:
        asked.set()
        await asyncio.Event().wait()
        raise AssertionError

    async with lines(nats_one, prefix, 2) as (front, owner):
        await owner.bus.answer_for("s-1", answer)
        question = asyncio.create_task(front.bus.ask_owner("s-1", b"you", timeout=0.5))
        await asked.wait()
        await owner.bus.leave("s-1")
        assert "1 questions" in repr(owner.bus)
        await owner.bus.fall_silent()
        assert "0 questions" in repr(owner.bus)
        with pytest.raises(Unanswered):
            await question


async def test_question_beyond_the_limit_is_refused_as_too_many(
    nats_one: Servers, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bus_module, "QUESTIONS_MAX", 2)
    done, asked = asyncio.Event(), asyncio.Semaphore(0)

    async def answer(data: bytes) -> bytes:
        asked.release()
        await done.wait()
        return data

    async with lines(nats_one, prefix, 2) as (front, owner):
        await owner.bus.answer_for("s-1", answer)
        first = [asyncio.create_task(front.bus.ask_owner("s-1", b"%d" % n, timeout=SECONDS_MAX)) for n in range(2)]
        for _ in first:
            await asked.acquire()
        with pytest.raises(NoOwner, match="too many"):
            await front.bus.ask_owner("s-1", b"3", timeout=SECONDS_MAX)
        done.set()
        assert await asyncio.gather(*first) == [b"0", b"1"]
