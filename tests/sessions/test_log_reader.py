"""Readers of the log: all see the same events, from any start and at any speed, and learn of the end."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.sessions.helpers import QUICK, opened, touch
from tests.store.kit import Writer

from banksman import Event, Host, Kind, StoreError, UsageError
from banksman.core.session import event as kinds
from banksman.core.session.event import Project
from banksman.runtime import base_host as run_host
from banksman.sessions.log_reader import LogReaders
from banksman.store.log_values import Page
from banksman.store.memory import MemoryLog
from banksman.testing import checks, fake_agent


async def test_readers_agree_wherever_they_begin(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:

        async def read(after: str | int | None) -> list[Event]:
            return [event async for event in case.session.follow(after=after)]

        first = asyncio.ensure_future(read(None))
        await case.answer("@@stream 50 0")
        cursor = (await case.events())[20].cursor
        second = asyncio.ensure_future(read(cursor))
        await case.answer("@@stream 50 0")
        third = asyncio.ensure_future(read(7))
        await case.answer("last")
        await case.session.close()
        one, two, three = await first, await second, await third
        checks.log(one)
        checks.readers_agree(one, two, three, await case.events())
        assert two[0].seq == 22
        assert three[0].seq == 8
        assert {events[-1].kind for events in (one, two, three)} == {kinds.SESSION_CLOSED}


async def test_reader_that_holds_an_event_does_not_continue_in_another_session_with_its_id() -> None:
    log = MemoryLog()
    writer = await Writer.claim(log)
    await writer.commit(b"old")
    finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    events = LogReaders(log, "s", finished, Project(lambda _: [])).events(0, waits=True)
    assert (await anext(events)).data == b"old"
    second = asyncio.ensure_future(anext(events))
    await asyncio.sleep(0)
    await writer.commit(b"older")
    assert (await second).data == b"older"
    await log.delete("s")
    again = await Writer.claim(log)
    await again.commit(b"new")
    third = asyncio.ensure_future(anext(events))
    await asyncio.sleep(0)
    again.append(b"newer", b"newest")
    with pytest.raises(StoreError, match="was deleted"):
        await asyncio.wait_for(third, 30)
    await log.close()


async def test_reader_of_deleted_session_gets_no_event_of_another_one_with_its_id() -> None:
    log = MemoryLog()
    await (await Writer.claim(log)).commit(b"old")
    finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    readers = LogReaders(log, "s", finished, Project(lambda _: []))
    seen: list[bytes] = []
    has_begun = asyncio.Event()

    async def read() -> None:
        async for event in readers.events(0, waits=True):
            seen.append(event.data)
            has_begun.set()

    reading = asyncio.ensure_future(read())
    await has_begun.wait()
    await asyncio.sleep(0)
    await log.delete("s")
    # All of it before the reader runs again.
    again = await Writer.claim(log)
    again.append(b"new")
    again.append(b"newer")
    with pytest.raises(StoreError, match="was deleted"):
        await asyncio.wait_for(reading, 30)
    assert seen == [b"old"]
    await log.close()


@pytest.mark.parametrize("prompt", ["@@say x\n@@hang", "@@say x"])
@pytest.mark.parametrize("is_slow", [False, True])
async def test_follower_sees_session_end_when_host_closes(tmp_path: Path, prompt: str, is_slow: bool) -> None:
    """The host closes before the session does.

    The log closes with the host, and the follower still gets the last event.
    """
    seen: list[Event] = []
    async with Host() as host:
        session = await host.open("claude", command=fake_agent.command(), options=QUICK)

        async def follow() -> None:
            async for event in session.follow():
                seen.append(event)
                if is_slow:
                    await asyncio.sleep(0)  # The host may close the log while the follower has the last page.

        following = asyncio.ensure_future(follow())
        turn = await session.ask(prompt)
        async for update in turn:
            if update.get("sessionUpdate") == "agent_message_chunk":
                break
        if "hang" not in prompt:
            await turn.outcome()
    await following
    checks.log(seen)
    checks.turns(seen)
    assert seen[-1].kind == kinds.SESSION_CLOSED


async def test_outcomes_and_receipts_are_available_after_host_closes(tmp_path: Path) -> None:
    async with Host() as host:
        session = await host.open("claude", command=fake_agent.command(), options=QUICK)
        turn = await session.ask("@@say so far\n@@hang")
        async for update in turn:
            if update.get("sessionUpdate") == "agent_message_chunk":
                break
        interrupting = asyncio.ensure_future(session.interrupt("t-none"))
    outcome = await turn.outcome()
    assert outcome.kind is Kind.INTERRUPTED
    assert outcome.text == "so far"
    assert not (await interrupting).stopped
    assert not (await turn.interrupt()).stopped
    assert turn.state == "ended"


async def test_slow_follower_gets_every_event(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        seen: list[Event] = []

        async def follow() -> None:
            async for event in case.session.follow():
                seen.append(event)
                await asyncio.sleep(0)

        following = asyncio.ensure_future(follow())
        assert (await case.answer("@@flood 3000 100\n@@say done")).text == "done"
        await case.session.close()
        await following
        checks.readers_agree(seen, await case.events())
        assert seen[-1].kind == kinds.SESSION_CLOSED


@pytest.mark.parametrize("store", ["memory:", "sqlite:"])
async def test_follower_is_served_to_the_end_after_host_closes(tmp_path: Path, store: str) -> None:
    seen: list[Event] = []
    has_begun, is_closed = asyncio.Event(), asyncio.Event()

    async def follow() -> None:
        async for event in session.follow():
            seen.append(event)
            has_begun.set()
            await is_closed.wait()

    async with Host(store if store == "memory:" else f"{store}{tmp_path / 'store.db'}") as host:
        session = await host.open("claude", command=fake_agent.command(), options=QUICK)
        following = asyncio.ensure_future(follow())
        await has_begun.wait()
        # More than a page.
        assert (await (await session.ask("@@stream 1500 0")).outcome()).kind is Kind.DONE
    is_closed.set()
    await following
    checks.log(seen)
    assert len(seen) > 1500
    assert seen[-1].kind == kinds.SESSION_CLOSED


async def test_rest_is_kept_only_when_no_follower_is_in_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """A follower reads again while `keep_rest` reads the rest.

    The host must not close the store before that read ends.
    """
    store = MemoryLog()
    await (await Writer.claim(store)).commit(*(b"%d" % number for number in range(10)))
    loop = asyncio.get_running_loop()
    finished, next_event, has_begun = loop.create_future(), loop.create_future(), loop.create_future()
    readers = LogReaders(store, "s", finished, Project(lambda _: []), since=0)
    read = store.read
    is_inside, goes_on = asyncio.Event(), asyncio.Event()

    async def slow(session: str, after: int, *args: Any, **how: Any) -> Page:
        if asyncio.current_task() is keeping and not is_inside.is_set():
            next_event.set_result(None)
            await is_inside.wait()
        elif asyncio.current_task() is following and after:
            is_inside.set()
            await goes_on.wait()
        return await read(session, after, *args, **how)

    async def follow() -> None:
        async for event in readers.events(0, waits=True):
            if event.seq == 1:
                has_begun.set_result(None)
                await next_event

    monkeypatch.setattr(store, "read", slow)
    keeping: asyncio.Task[int] | None = None
    following = asyncio.create_task(follow())
    await has_begun
    finished.set_result(None)
    keeping = asyncio.create_task(readers.keep_rest(1 << 20))
    await is_inside.wait()
    for _ in range(20):
        await asyncio.sleep(0)
    assert not keeping.done()
    goes_on.set()
    await keeping
    await store.close()
    await following


async def test_follower_past_what_closed_host_keeps_gets_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("banksman.sessions.session_table.REST_BYTES_MAX", 1)
    seen: list[Event] = []
    async with Host("memory:") as host:
        session = await host.open("claude", command=fake_agent.command(), options=QUICK)
        events = session.follow()
        seen.append(await anext(events))
        assert (await (await session.ask("@@stream 2500 0")).outcome()).kind is Kind.DONE

    with pytest.raises(StoreError, match="closed"):  # noqa: PT012
        while True:
            seen.append(await anext(events))
    checks.log(seen)
    assert 1000 <= len(seen) < 2500


async def test_cancelled_follower_leaves_nothing(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        before = checks.Things.now()
        following = [asyncio.ensure_future(anext(case.session.follow(after=1000))) for _ in range(5)]
        await asyncio.sleep(0)
        for task in following:
            task.cancel()
        await asyncio.wait(following)
        assert checks.Things.now().beyond(before) == []
        assert (await case.answer("next")).text == "next"


async def test_follower_behind_retention_gets_lost_range(tmp_path: Path) -> None:
    host = run_host.Host(lambda: MemoryLog(bytes_max=200_000))
    async with opened(tmp_path, host=host, is_checked=False) as case:  # pyright: ignore[reportArgumentType]
        first = await case.ask("@@say one")
        await case.outcome(first)
        assert (await case.answer("@@flood 1000 1000\n@@say two")).text == "two"
        events = await case.events()
        assert events[0].kind == kinds.STREAM_GAP
        assert events[0].body["first"] == 1
        assert events[0].body["last"] + 1 == events[1].seq
        assert events[0].seq == 0
        # Nothing of the first turn is left, not even its end. An iteration of the turn must not wait.
        assert [update async for update in first] == []


async def test_turn_iteration_ends_with_its_own_turn(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        go = case.path("go")
        first = await case.reaches(f"first\n@@say first\n@@wait {go}")
        second = await case.ask("second")

        async def texts(turn: object) -> str:
            return "".join(
                [u["content"]["text"] async for u in turn if u["sessionUpdate"] == "agent_message_chunk"]  # type: ignore[attr-defined]
            )

        reading = [asyncio.ensure_future(texts(turn)) for turn in (first, second)]
        await asyncio.sleep(0)
        touch(go)
        assert [await task for task in reading] == ["first", "second"]
        await case.outcome(first)
        await case.outcome(second)


async def test_follow_refuses_invalid_cursor(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        for wrong in ("x", "1.x", "", -1, True, 1.5):
            with pytest.raises(UsageError):
                case.session.follow(after=wrong)  # pyright: ignore[reportArgumentType]


async def test_status_reports_each_phase(tmp_path: Path) -> None:
    clocks = {"overall": 60.0, "bytes": None, "progress": None}
    async with opened(tmp_path, name="it", options={"clocks": clocks}) as case:
        status = case.session.status()
        assert (status.name, status.phase, status.holder, status.pids) == ("it", "idle", None, ())
        turn = await case.running("one")
        waiting = await case.ask("two", priority="background")
        status = case.session.status()
        assert status.phase == "running"
        assert status.holder == turn.id
        assert [(w.turn, w.priority, w.attempt) for w in status.queue] == [(waiting.id, 0, 1)]
        assert [(clock.name, clock.is_running) for clock in status.clocks] == [("overall", True)]
        assert status.pids == (case.processes[0].pid,)
        assert status.conversation is not None
        assert status.counters["processes"] == 1
        assert status.counters["frames_out"] == 2
        await turn.interrupt()
        await case.outcome(turn)
        await case.outcome(waiting)
        assert case.session.status().cost == pytest.approx(0.0001)
        await case.session.close()
        assert case.session.status().phase == "closed"
        status = case.host.session("it").status()
        assert (status.id, status.phase, status.seq) == (case.session.id, "asleep", case.session.status().seq)
        assert (await case.host.session("it").look()).phase == "closed"
