"""Close of a session and of its host: every ask has an outcome, and nothing is left."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
from pathlib import Path

import pytest
from tests.process.helpers import wait_until
from tests.sessions.helpers import QUICK, exists, opened, prompts, touch

from banksman import Closed, Host, Kind, Session, Turn
from banksman.core.session import event as kinds
from banksman.testing import checks, fake_agent


async def test_close_interrupts_running_turn_and_refuses_queued_asks(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        turn = await case.running("one")
        waiting = [await case.ask(f"waiting {number}") for number in range(3)]
        asking = asyncio.ensure_future(case.ask("about to be accepted"))
        await asyncio.sleep(0)
        await case.session.close()
        outcome = await case.outcome(turn)
        assert outcome.kind is Kind.INTERRUPTED
        assert outcome.text == "one"
        for each in (*waiting, await asking):
            refused = await case.outcome(each)
            assert refused.kind is Kind.REFUSED
            assert isinstance(refused.error, Closed)
        with pytest.raises(Closed, match=r"^the session is closed \(open it again by its id or its name\)"):
            await case.ask("too late")
        assert (await case.session.interrupt()).stopped is False
        assert prompts(case) == ["one"]


async def test_close_is_idempotent_and_concurrent(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        await case.answer("one")
        first = asyncio.ensure_future(case.session.close())
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.gather(*(case.session.close() for _ in range(3)))
        await asyncio.wait([first])
        await case.session.close()
        assert case.session.is_closed
        assert (await case.kinds()).count(kinds.SESSION_CLOSED) == 1


async def test_unused_session_closes_at_once(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        await case.session.close()
        assert await case.kinds() == [kinds.SESSION_OPENED, kinds.SESSION_CLOSED]
        assert case.processes == []


@pytest.mark.parametrize("point", ["initialize", "read", "started", "init", "result", "completed", "idle", "interrupt"])
async def test_close_at_any_point_ends_turn_and_process(tmp_path: Path, point: str) -> None:
    reached = tmp_path / "reached"
    script = [f"at {point} touch {reached}", f"at {point} wait {tmp_path / 'never'}"]
    async with opened(tmp_path, script) as case:
        turn = await case.ask("@@say x\n@@hang" if point == "interrupt" else "one")
        if point == "interrupt":
            await case.wait_said('"text":"x"')
            interrupting = asyncio.ensure_future(turn.interrupt())
            await exists(reached)
            await case.session.close()
            assert (await interrupting).stopped
        await exists(reached)
        await case.session.close()
        assert (await case.outcome(turn)).kind in (Kind.INTERRUPTED, Kind.REFUSED, Kind.DONE)
        assert not os.path.exists(f"/proc/{case.processes[0].pid}")


async def test_close_during_process_start_leaves_no_process(tmp_path: Path) -> None:
    for passes in range(6):
        async with opened(tmp_path / str(passes)) as case:
            turn = await case.ask("one")
            for _ in range(passes):
                await asyncio.sleep(0)
            await case.session.close()
            assert (await case.outcome(turn)).kind in (Kind.REFUSED, Kind.INTERRUPTED)


async def test_close_ends_blocked_agent_quickly(tmp_path: Path) -> None:
    """The agent writes all the time, and ignores the end of its stdin."""
    script = ["ignore eof", "on_interrupt unanswered"]
    async with opened(tmp_path, script, options={"drain_seconds": 60.0}) as case:
        turn = await case.ask("@@flood 1000000 1000")
        await case.wait_said("content_block_delta")
        async with asyncio.timeout(30):
            await case.session.close()
        assert (await case.outcome(turn)).kind is Kind.INTERRUPTED


async def test_host_exit_closes_its_sessions(tmp_path: Path) -> None:
    async with Host() as host:
        before = checks.Things.now()
        sessions = [
            await host.open("claude", command=fake_agent.command(evidence=tmp_path / str(n)), options=QUICK)
            for n in range(3)
        ]
        turns = [await session.ask("@@say x\n@@hang") for session in sessions]
        await asyncio.gather(*(anext(aiter(turn)) for turn in turns))
    for turn in turns:
        assert (await turn.outcome()).kind is Kind.INTERRUPTED
    assert all(session.is_closed for session in sessions)
    assert checks.Things.now().beyond(before) == []
    with pytest.raises(Closed):
        await host.open("claude", command=fake_agent.command())


async def test_host_cancelled_twice_still_ends_its_sessions(tmp_path: Path) -> None:
    running = asyncio.Event()
    sessions: list[Session] = []

    async def work() -> None:
        async with Host() as host:
            session = await host.open("claude", command=fake_agent.command(evidence=tmp_path), options=QUICK)
            sessions.append(session)
            turn = await session.ask("@@say x\n@@hang")
            async for _ in turn:
                running.set()

    task = asyncio.ensure_future(work())
    await running.wait()
    task.cancel()
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    # The caller stopped waiting. The close continues.
    await sessions[0].wait_closed()
    (process,) = fake_agent.Evidence(tmp_path).processes
    assert not os.path.exists(f"/proc/{process.pid}")


def test_loop_that_ends_without_close_ends_sessions(tmp_path: Path) -> None:
    turns: list[Turn] = []

    async def work() -> None:
        host = Host()
        session = await host.open("claude", command=fake_agent.command(evidence=tmp_path), options=QUICK)
        turns.append(await session.ask("@@say x\n@@hang"))
        async for _ in turns[0]:
            return

    asyncio.run(work())
    (process,) = fake_agent.Evidence(tmp_path).processes
    assert not os.path.exists(f"/proc/{process.pid}")
    assert turns[0].state == "ended"


def test_session_keeps_its_host_from_the_garbage_collector(tmp_path: Path) -> None:
    """The collector would end the sessions of the host, or, at the end of the loop, leave them running."""
    turns: list[Turn] = []

    async def begin() -> None:
        session = await Host().open("claude", command=fake_agent.command(evidence=tmp_path), options=QUICK)
        turns.append(await session.ask("@@say x\n@@hang"))
        async for _ in turns[0]:
            return

    async def work() -> None:
        await begin()
        gc.collect()
        for _ in range(10):  # The loop gives a collected host some passes to begin its drain.
            await asyncio.sleep(0)
        assert turns[0].state == "running"

    asyncio.run(work())
    (process,) = fake_agent.Evidence(tmp_path).processes
    assert not os.path.exists(f"/proc/{process.pid}")
    assert turns[0].state == "ended"


def test_loop_closed_abruptly_leaves_no_agent_after_next_use(tmp_path: Path) -> None:
    async def work() -> int:
        host = Host()
        session = await host.open("claude", command=fake_agent.command(evidence=tmp_path), options=QUICK)
        turn = await session.ask("@@say x\n@@hang")
        async with contextlib.aclosing(aiter(turn)) as updates:
            await anext(updates)
        return session.status().pids[0]

    async def use() -> None:
        async with Host() as host:
            session = await host.open("claude", command=fake_agent.command(), options=QUICK)
            assert (await (await session.ask("fine")).outcome()).text == "fine"

    loop = asyncio.new_event_loop()
    pid = loop.run_until_complete(work())
    loop.close()
    asyncio.run(use())
    wait_until(lambda: not os.path.exists(f"/proc/{pid}"), "the agent to be ended by its keeper")


# -- drain -----------------------------------------------------------------------------------------------------------
async def test_drain_finishes_running_turn_and_refuses_new_asks(tmp_path: Path) -> None:
    async with Host() as host, opened(tmp_path, host=host, is_checked=False) as case:
        go = case.path("go")
        turn = await case.reaches(f"one\n@@say one\n@@wait {go}")
        waiting = await case.ask("two")
        idle = await host.open("claude", command=fake_agent.command(), options=QUICK)
        draining = asyncio.ensure_future(host.drain())
        await asyncio.sleep(0)
        assert (await case.outcome(waiting)).kind is Kind.REFUSED
        with pytest.raises(Closed):
            await case.ask("three")
        with pytest.raises(Closed):
            await host.open("claude", command=fake_agent.command())
        await idle.wait_closed()
        assert case.session.status().phase == "draining"
        touch(go)
        assert (await case.outcome(turn)).kind is Kind.DONE
        await draining
        assert case.session.is_closed
        assert prompts(case) == ["one"]


async def test_drain_stops_running_turn_after_timeout(tmp_path: Path) -> None:
    async with Host() as host, opened(tmp_path, host=host, is_checked=False) as case:
        turn = await case.running("one")
        await host.drain(timeout=0.1)
        assert (await case.outcome(turn)).kind is Kind.INTERRUPTED
        assert case.session.is_closed


async def test_cancelled_drain_continues(tmp_path: Path) -> None:
    async with Host() as host, opened(tmp_path, host=host, is_checked=False) as case:
        go = case.path("go")
        turn = await case.reaches(f"one\n@@say one\n@@wait {go}")
        draining = asyncio.ensure_future(host.drain())
        await asyncio.sleep(0)
        draining.cancel()
        await asyncio.wait([draining])
        touch(go)
        assert (await case.outcome(turn)).kind is Kind.DONE
        await case.session.wait_closed()


async def test_drain_does_not_wait_for_agent_initiated_turn(tmp_path: Path) -> None:
    script = {"prompt 1": ["say one", "at idle own task-notification say mine ;; hang"]}
    async with Host() as host, opened(tmp_path, script, host=host, is_checked=False) as case:
        await case.answer("one")
        await case.wait_said("mine")
        await host.drain()
        assert case.session.is_closed


async def test_drain_deadline_applies_after_its_caller_is_cancelled(tmp_path: Path) -> None:
    async with Host() as host, opened(tmp_path, host=host, is_checked=False) as case:
        turn = await case.running("for ever")
        draining = asyncio.ensure_future(host.drain(timeout=0.2))
        await asyncio.sleep(0)
        draining.cancel()
        await asyncio.wait([draining])
        assert (await case.outcome(turn)).kind is Kind.INTERRUPTED
        await case.session.wait_closed()


async def test_session_name_is_unique_while_open(tmp_path: Path) -> None:
    async with Host() as host:
        one = await host.open("claude", command=fake_agent.command(), name="it")
        assert await host.open("claude", command=fake_agent.command(), name="it") is one
        await one.close()
        assert host.session("it") is not one
        two = await host.open("claude", command=fake_agent.command(), name="it")
        assert (two.id, one.is_closed, two.is_closed) == (one.id, True, False)
        assert host.session("it") is host.session(one.id) is two
        assert host.sessions() == [two]
        with pytest.raises(ValueError, match="no session"):
            host.session("other")
