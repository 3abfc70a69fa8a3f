"""The simulated world against the real one: process and log conformance, and each injected fault."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from banksman.core.process_facts import BytesRead
from banksman.core.session.effects import StartProcess
from banksman.core.stop_ladder import Timings
from banksman.errors import NotOwner, StoreError
from banksman.process.launch import prepare
from banksman.sessions.agent_process import AgentProcess, OnReport, RealAgent
from banksman.store.log import Log
from banksman.store.log_values import Head
from banksman.testing import fake_agent, sim
from banksman.testing.world import Fault, Manner, World, WorldLog

pytest.register_assert_rewrite("tests.testing.process_conformance", "tests.store.conformance")

from tests.store.conformance import LogConformance, Writer, data, everything  # noqa: E402
from tests.testing.process_conformance import Heard, ProcessConformance  # noqa: E402

MANNERS = {
    "plain": Manner(),
    "exits": Manner(exits_at=1, code=3),
    "stubborn": Manner(stop_seconds=1.0),
    "missing": Manner(fails=True),
    "full": Manner(stuck_at=1),
    "closed": Manner(broken_at=1),
}


class TestWorldProcess(ProcessConformance):
    stop_seconds_max = 1.5

    def run(self, scenario: Callable[[], Awaitable[None]]) -> None:
        # A promise must hold in every order with one departure.
        assert sim.explore(scenario, departures_max=1).is_complete

    def spawn(self, kind: str, on_event: OnReport) -> AgentProcess:
        return World(manners=[MANNERS[kind]]).spawn(StartProcess(1, None), on_event)


class TestRealProcess(ProcessConformance):
    stop_seconds_max = 10.0
    folder: Path

    @pytest.fixture(autouse=True)
    def _in_a_folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path

    def run(self, scenario: Callable[[], Awaitable[None]]) -> None:
        async def main() -> None:
            async with asyncio.timeout(60):
                await scenario()

        asyncio.run(main())

    def spawn(self, kind: str, on_event: OnReport) -> AgentProcess:
        timings = Timings(eof=0.3 if kind != "plain" else 5.0, grace=0.3 if kind != "plain" else 5.0, linger=0.1)
        return RealAgent(prepare(self._argv(kind), cwd=str(self.folder)), timings, on_event)

    def _argv(self, kind: str) -> list[str]:
        match kind:
            case "exits":
                return fake_agent.command(["at initialize exit 3"])
            case "stubborn":
                return fake_agent.command(["ignore term", "ignore eof"])
            case "missing":
                script = self.folder / "script"
                script.write_text("#!/does/not/exist\n")
                script.chmod(0o755)
                return [str(script)]
            case "full":
                return [sys.executable, "-I", "-S", "-c", "import time; time.sleep(100)"]
            case "closed":
                code = "import os, time; os.close(0); os.write(1, b'closed\\n'); time.sleep(100)"
                return [sys.executable, "-I", "-S", "-c", code]
            case _:
                return fake_agent.command()

    async def wait_closed(self, heard: Heard) -> None:
        await heard.wait(BytesRead)


class TestWorldLog(LogConformance):
    async def open_log(self, *, retained_bytes: int | None = None) -> Log:
        return WorldLog() if retained_bytes is None else WorldLog(bytes_max=retained_bytes)


class TestWorldLogThatRefusesAtClaim(LogConformance):
    async def open_log(self, *, retained_bytes: int | None = None) -> Log:
        if retained_bytes is None:
            return WorldLog(refuses_at_claim=True, reads_late=True)
        return WorldLog(bytes_max=retained_bytes, refuses_at_claim=True, reads_late=True)


async def test_world_log_fails_the_nth_append_and_its_followers_and_then_continues() -> None:
    log = WorldLog(faults={2: Fault.FAILS})
    writer = await Writer.claim(log)
    for line in (b"a", b"b", b"c"):
        writer.append(line)
    assert await writer.answers.all() == [None, StoreError, NotOwner]
    writer.append(b"d", seq=1)
    assert await writer.answers.all() == [None, StoreError, NotOwner, None]
    assert data(await everything(log)) == [b"a", b"d"]
    await log.close()


async def test_world_log_fails_while_broken() -> None:
    log = WorldLog()
    writer = await Writer.claim(log)
    log.is_broken = True
    writer.append(b"a")
    assert await writer.answers.all() == [StoreError]
    log.is_broken = False
    writer.append(b"b", seq=0)
    assert await writer.answers.all() == [StoreError, None]
    log.is_unreadable = True
    with pytest.raises(StoreError):
        await log.read("s", 0)
    with pytest.raises(StoreError):
        await log.wait_past("s", 0)
    await log.close()


async def test_world_log_refuses_as_not_owner_by_plan() -> None:
    log = WorldLog(faults={1: Fault.NOT_OWNER})
    writer = await Writer.claim(log)
    writer.append(b"a")
    assert await writer.answers.all() == [NotOwner]
    await log.close()


def test_world_log_slow_commit_takes_its_time() -> None:
    async def scenario() -> None:
        log = WorldLog(commit_seconds=2.0)
        await (await Writer.claim(log)).commit(b"a")
        assert sim.current().time() == 2.0
        log.commit_seconds = 0.0
        await log.close()

    sim.replay(scenario, "")


async def test_world_log_failing_claims_leave_nothing() -> None:
    log = WorldLog()
    log.claims_failing = 2
    for _ in range(2):
        with pytest.raises(StoreError):
            await log.claim("s")
    assert log.sessions() == []
    await (await Writer.claim(log)).commit(b"a")
    await log.close()


async def test_world_log_failing_advance_fails_its_followers() -> None:
    log = WorldLog()
    writer = await Writer.claim(log)
    writer.append(b"a")
    log.claims_failing = 1
    writer.advance()
    writer.append(b"b")
    writer.append(b"c", epoch=writer.epoch - 1, seq=1)
    assert await writer.answers.all() == [None, StoreError, NotOwner, NotOwner]
    # The writer got the error: its epoch is unchanged, and the next advance gets another one.
    writer.epoch -= 1
    writer.advance()
    writer.append(b"d", seq=1)
    assert (await writer.answers.all())[4:] == [None, None]
    assert log.head("s") == Head(epoch=2, seq=2, first=1)
    await log.close()


async def test_world_log_refuses_unanswered_appends_at_a_claim() -> None:
    log = WorldLog(refuses_at_claim=True)
    old = await Writer.claim(log)
    await old.commit(b"a", snapshot=b"at 1")
    old.append(b"b")
    old.advance()
    old.append(b"c", snapshot=b"at 3")
    old.append(snapshot=b"at 3, too")
    new = await Writer.claim(log)
    assert new.seq == 1
    assert new.epoch > old.epoch
    assert await old.answers.all() == [None, *[NotOwner] * 4]
    assert await log.snapshot("s") == (1, b"at 1")
    await new.commit(b"new")
    assert [one.event.data for one in (await log.read_many(None)).events] == [b"a", b"new"]
    await log.close()


async def test_world_log_unreadable_refuses_snapshot_and_read_many() -> None:
    log = WorldLog()
    await (await Writer.claim(log)).commit(b"a", snapshot=b"at 1")
    log.is_unreadable = True
    for wait in (log.snapshot("s"), log.read_many(None), log.wait_past_position("0.0")):
        with pytest.raises(StoreError):
            await wait
    await log.close()
