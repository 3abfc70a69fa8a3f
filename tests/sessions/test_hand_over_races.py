"""A planned restart that meets something else: an exit, an old host that wakes up late, the end of a hold, a full disk.

tests/process/test_tree_hand_over.py has the same races of the process alone. Each host is a program of its own, or the
test itself.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.process.helpers import PATIENCE_SECONDS
from tests.sessions.crash_host import Agents, Refusal
from tests.sessions.helpers import QUICK, bodies, exists
from tests.sessions.test_hand_over import HOLD_SECONDS, SHORT_SECONDS, STREAM, Scene, hanging, opened, state
from tests.thorough import thorough

from banksman import Host, Kind, Turn
from banksman.core.session import event as kinds
from banksman.process import adoption
from banksman.sessions.frame_reader import FrameReader
from banksman.testing import checks

pytestmark = thorough

__all__ = ["state"]


async def gone(it: Scene) -> None:
    """Wait until no agent is left."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while it.agents.alive():  # noqa: ASYNC110  Another process ends it.
            await asyncio.sleep(0.01)


async def test_agent_that_exits_while_it_is_held_fails_its_turn_and_loses_no_word(state: Path, marker: str) -> None:
    async with opened(state / "it", marker) as it:
        turns = [await it.ask("@@say one\n@@touch {at}/reached\n@@wait {at}/go\n@@raw last\n@@exit 3")]
        turns.append(await it.ask("@@say two"))
        await it.reached()
        await it.leave()
        it.go()
        await gone(it)
        await it.come()
        assert await it.results(turns) == [["failed", "one"], ["done", "two"]]
        await it.host.close(it.session)
        await it.host.leave()
        events = await it.events()
        checks.log(events)
        checks.turns(events)
        assert [event.data for event in events].count(b"last") == 1
        (exited, _) = bodies(events, kinds.PROCESS_EXITED)
        assert exited["code"] == 3
        # It was the first process that exited, and the second one had the other ask.
        assert len(bodies(events, kinds.PROCESS_ADOPTED)) == 1
        assert len(bodies(events, kinds.PROCESS_STARTED)) == len(it.agents.evidence.processes) == 2
        assert bodies(events, kinds.SESSION_RECOVERED) == []
        assert it.agents.alive() == []


async def in_a_large_frame(host: Host, agents: Agents) -> list[Turn]:
    """Return a turn in the middle of a frame that is too large for the log, and an ask behind it."""
    options = {**QUICK, "frame_bytes_max": 4096}
    session = await host.open("claude", command=agents.command(), options=options)
    at = agents.folder
    beginning = f"@@half {'x' * 20_000}\n@@touch {at}/reached\n@@wait {at}/go\n@@raw the rest"
    turns = [await session.ask(f"{beginning}\n@@wait {at}/end\n@@say three"), await session.ask("@@say after")]
    await exists(at / "reached")
    driver = session._driver  # pyright: ignore[reportPrivateUsage]
    assert driver.process.driven is not None
    # The agent has written the beginning, and this host may not have read it yet.
    driver.process.driven.agent.look_now()
    return turns


@pytest.mark.parametrize("sees_it", ["at once", "after it has stopped reading"])
async def test_hand_over_waits_for_the_end_of_a_frame_that_is_too_large_for_the_log(
    state: Path, marker: str, monkeypatch: pytest.MonkeyPatch, sees_it: str
) -> None:
    """The old host has written the beginning of the frame to a file of its own."""
    agents, store = Agents(state, marker), f"sqlite:{state / 'store.db'}"
    is_oversize = FrameReader.is_oversize
    is_blind, has_seen = sees_it != "at once", asyncio.Event()

    def look(frames: FrameReader) -> bool:
        nonlocal is_blind
        was_blind, is_blind = is_blind, False
        if was_blind or not is_oversize.__get__(frames):
            return False
        has_seen.set()
        return True

    monkeypatch.setattr(FrameReader, "is_oversize", property(look))
    async with Host(store) as host:
        turns = await in_a_large_frame(host, agents)
        draining = asyncio.create_task(host.drain(hand_over=True, hold_seconds=HOLD_SECONDS))
        await has_seen.wait()
        (state / "go").touch()
        await draining
    async with Host(store) as host:
        await host.take_up()
        (session,) = host.our_sessions()
        (state / "end").touch()
        outcomes = [await (await session.turn(turn.id)).outcome() for turn in turns]
        assert [(each.kind, each.text) for each in outcomes] == [(Kind.DONE, "three"), (Kind.DONE, "after")]
        await session.close()
        events = [event async for event in session.events(0, waits=False)]
    checks.log(events)
    checks.turns(events)
    assert sum(b"banksman.spilled" in event.data for event in events) == 1
    assert len(bodies(events, kinds.SESSION_HANDED_OVER)) == len(bodies(events, kinds.PROCESS_STARTED)) == 1
    assert agents.alive() == []


async def test_session_leaves_when_a_frame_that_is_too_large_does_not_end_in_time(state: Path, marker: str) -> None:
    agents, store = Agents(state, marker), f"sqlite:{state / 'store.db'}"
    async with Host(store) as host:
        turns = await in_a_large_frame(host, agents)
        await host.drain(hand_over=True, hold_seconds=HOLD_SECONDS, timeout=0.2)
    async with Host(store) as host:
        await host.take_up()
        (session,) = host.our_sessions()
        outcomes = [await (await session.turn(turn.id)).outcome() for turn in turns]
        assert [each.kind for each in outcomes] == [Kind.INTERRUPTED, Kind.DONE]
        await session.close()
        events = [event async for event in session.events(0, waits=False)]
    checks.log(events)
    checks.turns(events)
    assert bodies(events, kinds.SESSION_HANDED_OVER) == []
    assert agents.alive() == []


async def test_one_of_two_hosts_gets_a_session_that_was_handed_over(state: Path, marker: str) -> None:
    async with opened(state / "it", marker) as it:
        turn = await it.ask(STREAM)
        await it.reached()
        await it.leave()
        await it.start_host()
        one = it.host
        await it.start_host()
        other = it.host
        taken = await asyncio.gather(one.call("take_up"), other.call("take_up"))
        assert sorted(map(len, taken)) == [0, 1]
        it.host, loser = (one, other) if taken[0] else (other, one)
        await loser.leave()
        it.go()
        assert await it.results([turn]) == [["done", "three"]]
        assert len(bodies(await it.end(), kinds.PROCESS_ADOPTED)) == 1


async def test_old_host_that_wakes_up_after_the_take_over_writes_nothing(state: Path, marker: str) -> None:
    async with opened(state / "it", marker) as it:
        turn = await it.ask(STREAM)
        await it.reached()
        await it.host.call("hand_over", hold_seconds=HOLD_SECONDS)
        old = it.host
        os.kill(old.pid, signal.SIGSTOP)
        try:
            await it.come()
            it.go()
            assert await it.results([turn]) == [["done", "three"]]
        finally:
            os.kill(old.pid, signal.SIGCONT)
        # It has a driver of an old epoch, and callers that want something.
        for asked in (old.ask(it.session, "@@say late"), old.call("stop", session=it.session, turn=turn)):
            with pytest.raises(Refusal):
                await asked
        await old.leave()
        assert await it.results([await it.ask("@@say after")]) == [["done", "after"]]
        events = await it.end()
        (first,) = (event.epoch for event in events if event.kind == kinds.SESSION_HANDED_OVER)
        (second,) = (event.epoch for event in events if event.kind == kinds.PROCESS_ADOPTED)
        epochs = [event.epoch for event in events]
        assert first < second
        assert epochs == sorted(epochs)
        assert b"late" not in b"".join(event.data for event in events)


async def test_host_that_is_frozen_in_the_hand_over_keeps_its_session(state: Path, marker: str) -> None:
    """The keeper has the process, and the log does not know it. No host takes the session of a living one."""
    async with opened(state / "it", marker) as it:
        turn = await it.ask(STREAM)
        await it.reached()
        old = it.host
        leaving = old.call("hand_over_and_freeze", hold_seconds=HOLD_SECONDS)
        await asyncio.to_thread(os.waitid, os.P_PID, old.pid, os.WSTOPPED | os.WNOWAIT)
        try:
            await it.start_host()
            assert await it.host.call("take_up_held") == []
        finally:
            os.kill(old.pid, signal.SIGCONT)
        await leaving
        await old.leave()
        assert await it.host.call("take_up") == [it.session]
        it.go()
        assert await it.results([turn]) == [["done", "three"]]
        assert len(bodies(await it.end(), kinds.SESSION_HANDED_OVER)) == 1


async def test_turn_is_unknown_when_the_hold_ends_while_the_next_host_takes_over(
    state: Path, marker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next host has claimed the session and read the record. The keeper ends the tree before it is asked for it."""
    claim = adoption.claim

    async with opened(state / "it", marker) as it:

        async def claim_late(*words: Any, **how: Any) -> Any:
            await gone(it)
            return await claim(*words, **how)

        monkeypatch.setattr(adoption, "claim", claim_late)
        turns = await hanging(it)
        await it.leave(SHORT_SECONDS)
        async with Host(f"sqlite:{it.store}") as host:
            await host.take_up()
            (session,) = host.our_sessions()
            outcomes = [await (await session.turn(turn)).outcome() for turn in turns]
            await session.close()
        assert [outcome.kind for outcome in outcomes] == [Kind.UNKNOWN, Kind.DONE]
        events = await it.events()
        checks.log(events)
        checks.turns(events)
        assert bodies(events, kinds.PROCESS_ADOPTED) == []
        assert it.agents.alive() == []


async def test_full_disk_at_a_hand_over_loses_no_ask(state: Path, marker: str) -> None:
    """A limit on the size of files stands for the disk: the kernel refuses each write of the old host to a file.

    test_hand_over.py has a disk that is full for the record alone, and for the last event alone.
    """
    async with opened(state / "it", marker) as it:
        first = await it.ask("@@say one\n@@half two\n@@touch {at}/reached\n@@wait {at}/go\n@@say three")
        waiting = [await it.ask(f"@@say answer {number}") for number in range(3)]
        await it.reached()
        await it.host.ping()
        resource.prlimit(it.host.pid, resource.RLIMIT_FSIZE, (1, 1))
        leaving = it.host.call("hand_over", hold_seconds=HOLD_SECONDS)
        await it.host.ping()
        it.go()
        await leaving
        await it.host.leave()
        assert it.agents.alive() == []
        await it.come()
        (kind, _), *others = await it.results([first, *waiting])
        assert kind == "unknown"
        assert others == [["done", f"answer {number}"] for number in range(3)]
        await it.host.close(it.session)
        await it.host.leave()
        events = await it.events()
        checks.log(events)
        checks.turns(events)
        assert bodies(events, kinds.PROCESS_ADOPTED) == []


async def test_survival_that_is_asked_for_late_begins_with_the_next_process(state: Path, marker: str) -> None:
    """The process that runs was started without spools, so it ends with its host. The next one survives it."""
    async with opened(state / "it", marker) as it:
        again: dict[str, Any] = {"name": "the session", "command": it.agents.command(), "options": QUICK}
        first = await it.ask("@@say one\n@@touch {at}/reached\n@@hang")
        await it.reached()
        assert await it.host.open(**again, survive="crash") == it.session
        await it.host.ping()
        it.host.kill()
        await gone(it)
        await it.start_host()
        assert await it.host.open(**again, survive="crash") == it.session
        assert await it.results([first]) == [["unknown", "one"]]
        second = await it.ask("@@say two\n@@touch {at}/up\n@@wait {at}/go\n@@say three")
        await exists(it.path("up"))
        await it.host.ping()
        it.host.kill()
        await it.come()
        it.go()
        assert await it.results([second]) == [["done", "three"]]
        await it.host.close(it.session)
        await it.host.leave()
        events = await it.events()
        checks.log(events)
        checks.turns(events)
        assert len(bodies(events, kinds.PROCESS_ADOPTED)) == 1
        assert it.agents.alive() == []
