"""Conformance tests of `AgentProcess`, for the real implementation and the simulated one.

A subclass defines how its processes are started, and in which loop they live. The agents inside speak just enough of
the Claude dialect to answer a handshake.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import ClassVar

from banksman.core.dialects.claude import CLAUDE
from banksman.core.dialects.meaning import Replied
from banksman.core.process_facts import (
    BytesRead,
    Exited,
    FrameWritten,
    ProcessGone,
    Started,
    StartFailed,
    StreamEnded,
    SweepEnded,
    WriteFailed,
)
from banksman.sessions.agent_process import AgentProcess, AgentReport, OnReport

# Every kind of process that a subclass must be able to start:
#     plain: answers handshakes, exits at the end of its stdin       exits: exits with code 3 at the first frame
#     stubborn: ignores the end of its input and TERM                missing: cannot be started
#     full: does not read its stdin                                  closed: has closed its stdin
KINDS = ("plain", "exits", "stubborn", "missing", "full", "closed")


class Heard:
    """Reports of a process in order. It checks the order of each report."""

    def __init__(self) -> None:
        self.events: list[AgentReport] = []
        self._more = asyncio.Event()

    def on_event(self, event: AgentReport) -> None:
        if self.events:
            assert not isinstance(event, Started | StartFailed), f"{event} is not the first"
            assert not isinstance(self.events[-1], ProcessGone | StartFailed), f"{event} after the end"
        if self.has(StreamEnded):
            assert not isinstance(event, BytesRead | StreamEnded)
        self.events.append(event)
        self._more.set()

    def has(self, kind: type[object]) -> bool:
        return self.count(kind) > 0

    def count(self, kind: type[object]) -> int:
        return sum(isinstance(event, kind) for event in self.events)

    @property
    def replies(self) -> list[str]:
        said = b"".join(event.data for event in self.events if isinstance(event, BytesRead))
        meanings = [CLAUDE.read(line) for line in said.split(b"\n") if line]
        return [meaning.request for meaning in meanings if isinstance(meaning, Replied)]

    async def wait_until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            self._more.clear()
            await self._more.wait()

    async def wait(self, kind: type[object], count: int = 1) -> None:
        await self.wait_until(lambda: self.count(kind) >= count)

    def check_end(self) -> None:
        """Check that the process ended in the right order."""
        assert self.count(ProcessGone) == 1
        assert isinstance(self.events[-1], ProcessGone)
        if self.has(Started):
            assert isinstance(self.events[0], Started)
            assert self.count(Exited) == 1
            assert self.count(StreamEnded) == 1


class ProcessConformance:
    """Subclass it as `Test…`."""

    # Maximum from `stop` to `ProcessGone` for a process that ignores the stop: all rungs of the subclass's ladder.
    stop_seconds_max: ClassVar[float]

    def run(self, scenario: Callable[[], Awaitable[None]]) -> None:
        """Run the scenario in the loop of these processes."""
        raise NotImplementedError

    def spawn(self, kind: str, on_event: OnReport) -> AgentProcess:
        raise NotImplementedError

    def start(self, kind: str) -> tuple[AgentProcess, Heard]:
        heard = Heard()
        return self.spawn(kind, heard.on_event), heard

    def test_process_starts_answers_and_ends(self) -> None:
        async def scenario() -> None:
            process, heard = self.start("plain")
            await heard.wait(Started)
            assert heard.events[0] == heard.events[-1]
            process.write(CLAUDE.handshake("one"))
            await heard.wait(FrameWritten)
            await heard.wait_until(lambda: heard.replies == ["one"])
            process.stop()
            await heard.wait(ProcessGone)
            heard.check_end()

        self.run(scenario)

    def test_process_answers_each_write_once_and_in_order(self) -> None:
        async def scenario() -> None:
            process, heard = self.start("plain")
            await heard.wait(Started)
            for number in range(1, 6):
                process.write(CLAUDE.handshake(f"r-{number}"))
                await heard.wait(FrameWritten, number)
            await heard.wait_until(lambda: len(heard.replies) == 5)
            assert heard.replies == [f"r-{number}" for number in range(1, 6)]
            assert heard.count(FrameWritten) == 5
            assert not heard.has(WriteFailed)
            process.stop()
            await heard.wait(ProcessGone)
            heard.check_end()

        self.run(scenario)

    def test_process_start_reports_nothing_synchronously(self) -> None:
        async def scenario() -> None:
            for kind in KINDS:
                process, heard = self.start(kind)
                assert heard.events == []
                process.stop()
                await heard.wait_until(lambda heard=heard: heard.has(ProcessGone) or heard.has(StartFailed))

        self.run(scenario)

    def test_process_that_exits_by_itself_reports_exit_then_end(self) -> None:
        async def scenario() -> None:
            process, heard = self.start("exits")
            await heard.wait(Started)
            process.write(CLAUDE.handshake("one"))
            await heard.wait(ProcessGone)
            heard.check_end()
            exited = next(event for event in heard.events if isinstance(event, Exited))
            assert (exited.code, exited.signal) == (3, None)
            process.stop()
            process.look_now()
            await asyncio.sleep(0)
            heard.check_end()

        self.run(scenario)

    def test_process_stop_is_idempotent(self) -> None:
        async def scenario() -> None:
            process, heard = self.start("plain")
            await heard.wait(Started)
            process.stop()
            process.stop()
            await heard.wait(Exited)
            process.stop()
            await heard.wait(ProcessGone)
            process.stop()
            await asyncio.sleep(0)
            heard.check_end()

        self.run(scenario)

    def test_process_stopped_before_it_began_still_ends(self) -> None:
        async def scenario() -> None:
            process, heard = self.start("plain")
            process.stop()
            await heard.wait(ProcessGone)
            heard.check_end()

        self.run(scenario)

    def test_process_that_ignores_the_stop_ends_within_the_ladder(self) -> None:
        async def scenario() -> None:
            process, heard = self.start("stubborn")
            await heard.wait(Started)
            process.write(CLAUDE.handshake("one"))
            await heard.wait_until(lambda: heard.replies == ["one"])
            loop = asyncio.get_running_loop()
            at = loop.time()
            process.stop()
            await heard.wait(ProcessGone)
            assert loop.time() - at < self.stop_seconds_max
            heard.check_end()

        self.run(scenario)

    def test_process_that_fails_to_start_reports_only_that(self) -> None:
        async def scenario() -> None:
            process, heard = self.start("missing")
            await heard.wait(StartFailed)
            process.stop()
            process.look_now()
            await asyncio.sleep(0)
            assert len(heard.events) == 1

        self.run(scenario)

    def test_process_with_a_full_pipe_answers_nothing_until_the_stop(self) -> None:
        async def scenario() -> None:
            process, heard = self.start("full")
            await heard.wait(Started)
            process.write(CLAUDE.prompt("0" * 36, "x" * (4 << 20)))
            process.look_now()
            await asyncio.sleep(0)
            assert not heard.has(FrameWritten)
            assert not heard.has(WriteFailed)
            process.stop()
            await heard.wait(ProcessGone)
            assert not heard.has(FrameWritten)
            heard.check_end()

        self.run(scenario)

    def test_process_reports_a_broken_pipe_and_lives_on(self) -> None:
        async def scenario() -> None:
            process, heard = self.start("closed")
            await heard.wait(Started)
            await self.wait_closed(heard)
            process.write(CLAUDE.handshake("one"))
            await heard.wait(WriteFailed)
            assert not heard.has(ProcessGone)
            process.stop()
            await heard.wait(ProcessGone)
            assert heard.count(WriteFailed) == 1
            assert not heard.has(FrameWritten)
            heard.check_end()

        self.run(scenario)

    async def wait_closed(self, heard: Heard) -> None:
        """Wait until a "closed" process has closed its stdin."""

    def test_paused_process_is_silent_until_resumed(self) -> None:
        async def scenario() -> None:
            process, heard = self.start("plain")
            await heard.wait(Started)
            process.pause()
            for number in range(1, 4):
                process.write(CLAUDE.handshake(f"r-{number}"))
                await heard.wait(FrameWritten, number)
            assert heard.replies == []
            process.resume()
            await heard.wait_until(lambda: len(heard.replies) == 3)
            process.pause()
            process.stop()  # This ends the pause: a process that is blocked on its output could not react.
            await heard.wait(ProcessGone)
            heard.check_end()

        self.run(scenario)

    def test_process_sweep_of_tools_is_answered_once(self) -> None:
        async def scenario() -> None:
            process, heard = self.start("plain")
            await heard.wait(Started)
            loop = asyncio.get_running_loop()
            for number in range(1, 4):
                process.sweep_tools(loop.time(), number != 2)
                assert heard.count(SweepEnded) == number - 1
                await heard.wait(SweepEnded, number)
            process.write(CLAUDE.handshake("one"))
            await heard.wait_until(lambda: heard.replies == ["one"])
            assert [event for event in heard.events if isinstance(event, SweepEnded)] == [SweepEnded()] * 3
            process.stop()
            await heard.wait(ProcessGone)
            heard.check_end()

        self.run(scenario)

    def test_process_end_during_a_sweep_is_reported(self) -> None:
        async def scenario() -> None:
            for kind in ("plain", "exits"):
                process, heard = self.start(kind)
                await heard.wait(Started)
                process.sweep_tools(asyncio.get_running_loop().time(), True)
                if kind == "plain":
                    process.stop()
                else:
                    process.write(CLAUDE.handshake("one"))
                await heard.wait(ProcessGone)
                heard.check_end()
                assert heard.count(SweepEnded) <= 1
                count = heard.count(SweepEnded)
                process.sweep_tools(asyncio.get_running_loop().time(), True)
                process.look_now()
                await asyncio.sleep(0)
                assert heard.count(SweepEnded) == count

        self.run(scenario)

    def test_process_look_now_changes_only_the_time(self) -> None:
        async def scenario() -> None:
            process, heard = self.start("plain")
            process.look_now()
            await heard.wait(Started)
            process.write(CLAUDE.handshake("one"))
            while not heard.replies:
                process.look_now()
                await asyncio.sleep(0)
            process.stop()
            while not heard.has(ProcessGone):
                process.look_now()
                await asyncio.sleep(0)
            heard.check_end()
            assert heard.count(FrameWritten) == 1
            assert heard.replies == ["one"]

        self.run(scenario)

    def test_abandoned_process_reports_nothing_more(self) -> None:
        async def scenario() -> None:
            process, heard = self.start("plain")
            await heard.wait(Started)
            process.write(CLAUDE.handshake("one"))
            await heard.wait(FrameWritten)
            process.abandon()
            count = len(heard.events)
            for _ in range(10):
                await asyncio.sleep(0)
            assert len(heard.events) == count

        self.run(scenario)
