"""The simulated world keeps the promises of the real one: its process beside a real process, its log beside the others;
and each of its faults is what it says."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from banksman.core.ladder import Timings
from banksman.core.session_facts import StartProcess
from banksman.errors import NotOwner, StoreError
from banksman.run.child.launch import prepare
from banksman.run.sessions.agent import AgentProcess, OnEvent, Output, RealAgent
from banksman.store.log import Log
from banksman.testing import fake_agent, sim
from banksman.testing.world import Fault, Manner, World, WorldLog

pytest.register_assert_rewrite("tests.sim.process_conformance", "tests.store.conformance")

from tests.sim.process_conformance import Heard, ProcessConformance  # noqa: E402
from tests.store.conformance import LogConformance, Writer, data, everything  # noqa: E402

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
        # In every order of one departure: a promise holds in all of them.
        assert sim.explore(scenario, departures_max=1).is_complete

    def spawn(self, kind: str, on_event: OnEvent) -> AgentProcess:
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

    def spawn(self, kind: str, on_event: OnEvent) -> AgentProcess:
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
        await heard.wait(Output)


class TestWorldLog(LogConformance):
    async def open_log(self, *, retained_bytes: int | None = None) -> Log:
        return WorldLog() if retained_bytes is None else WorldLog(bytes_max=retained_bytes)


class TestWorldLogThatRefusesAtClaim(LogConformance):
    async def open_log(self, *, retained_bytes: int | None = None) -> Log:
        if retained_bytes is None:
            return WorldLog(refuses_at_claim=True, reads_late=True)
        return WorldLog(bytes_max=retained_bytes, refuses_at_claim=True, reads_late=True)


async def test_the_nth_append_fails_and_those_behind_it_and_then_it_goes_on() -> None:
    log = WorldLog(faults={2: Fault.FAILS})
    writer = Writer(log)
    for line in (b"a", b"b", b"c"):
        writer.append(line)
    assert await writer.answers.all() == [None, StoreError, NotOwner]
    writer.append(b"d", seq=1)
    assert await writer.answers.all() == [None, StoreError, NotOwner, None]
    assert data(await everything(log)) == [b"a", b"d"]
    await log.close()


async def test_a_log_that_is_broken_fails_until_it_is_not() -> None:
    log = WorldLog()
    writer = Writer(log)
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


async def test_another_writer_by_plan() -> None:
    log = WorldLog(faults={1: Fault.NOT_OWNER})
    writer = Writer(log)
    writer.append(b"a")
    assert await writer.answers.all() == [NotOwner]
    await log.close()


def test_a_slow_commit_takes_its_time() -> None:
    async def scenario() -> None:
        log = WorldLog(commit_seconds=2.0)
        await Writer(log).commit(b"a")
        assert sim.current().time() == 2.0
        log.commit_seconds = 0.0
        await log.close()

    sim.replay(scenario, "")
