"""Simulated agent processes for sessions in virtual time, with the faults that a test chooses.

`World` starts the processes. `Play` defines how the agent answers one prompt, and `Manner` how one
process behaves for every prompt. The agent inside a process is in `world_agent.py`. The log that
fails, `WorldLog`, is in `world_store.py`.

    async def scenario():
        plays = {"hi": Play(says=("hm",)), "": Play(hangs=True)}
        world = World(plays, manners=[Manner(broken_at=2)])
        session = Session("s", state, store=WorldLog(faults={3: Fault.FAILS}), spawn=world.spawn, …)
        …

    sim.explore(scenario, departures_max=2)

All reports of a process come through lanes of the loop, in any order that causality allows.
`World.violations` collects errors that are wrong in every order: two open prompts, an incomplete
frame, a write to a stopped process.

A process reports through these lanes. Each lane is FIFO, and the explorer may reorder the lanes:

- `stdin`: the process has taken a frame. With `Manner.is_told_late`, the lane `taken` reports it.
- `stdout`: output, and the end of output.
- `tree`: started, exited, gone.
- `tools`: the tools were swept.

The process schedules a report only after the reports that cause it. A process that has not started
writes nothing. `ProcessGone` follows both the exit and the end of output.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from banksman.core.process_facts import (
    BytesRead,
    Exited,
    FrameWritten,
    ProcessGone,
    Started,
    StartFailed,
    Stderr,
    Stream,
    StreamEnded,
    Survivor,
    SweepEnded,
    Swept,
    WriteFailed,
)
from banksman.core.session.effects import StartProcess
from banksman.errors import AgentError, BanksmanError, CommandError, Refused
from banksman.sessions.agent_process import AgentReport, OnReport
from banksman.testing.sim_loop import SimLoop, current
from banksman.testing.world_agent import Ack, Exit, Pause, Play, WorldAgent, answer_to
from banksman.testing.world_agent import WorldStage as Stage
from banksman.testing.world_store import Fault, WorldLog

__all__ = [
    "Ack",
    "Fault",
    "Manner",
    "Phase",
    "Play",
    "Stage",
    "World",
    "WorldLog",
    "WorldProcess",
    "answer_to",
]

SIGKILL, SIGTERM = 9, 15


@dataclass(frozen=True, slots=True, kw_only=True)
class Manner:
    """How a process behaves, whatever its prompts are.

    Seconds are virtual; counts start at 1.

    - `fails`: the start of the process fails. `raises`: the attempt to start it raises.
    - `stuck_at`: the pipe is full from this write on. `broken_at`: this write fails.
    - `exits_at`: the process exits instead of its n-th action.
    - `stop_seconds`: how long the process ignores a stop.
    - `last_words`: number of output actions that are still delivered after the exit.
    - `gone_seconds`: how long another process holds the pipe open after the exit.
    - `is_told_late`: a separate lane reports that a frame was taken, so the answer to the frame may
      arrive before that report. `is_told_at_once`: the report comes inside `write`, as with a pipe
      that has room.
    - `names`, `is_terse`: see `WorldAgent`.
    - `conversation`: conversation id that the process reports; None: `conversation-N`.
    - `tools`: processes that an interrupted turn left running; a sweep finds them once.
      `sweep_seconds`: how long a sweep takes.
    """

    start_seconds: float = 0.0
    fails: bool = False
    raises: bool = False
    handshake_seconds: float | None = 0.0
    stuck_at: int | None = None
    broken_at: int | None = None
    exits_at: int | None = None
    code: int = 1
    stop_seconds: float = 0.0
    last_words: int = 0
    gone_seconds: float = 0.0
    is_told_late: bool = False
    is_told_at_once: bool = False
    owns: Mapping[int, Play] = field(default_factory=dict[int, Play])
    names: bool = True
    is_terse: bool = False
    conversation: str | None = None
    tools: tuple[Swept, ...] = ()
    sweep_seconds: float = 0.0
    swept: tuple[Swept, ...] = ()
    survivors: tuple[Survivor, ...] = ()
    stderr: str = ""


class Phase(enum.Enum):
    """Life cycle of a simulated process."""

    STARTING = enum.auto()
    RUNNING = enum.auto()
    EXITED = enum.auto()
    GONE = enum.auto()


class WorldProcess:
    """Simulated process. Records each misuse in `violations` and never raises for one."""

    def __init__(
        self,
        number: int,
        manner: Manner,
        plays: Mapping[str, Play],
        conversation: str | None,
        on_report: OnReport,
    ) -> None:
        self.number = number
        self.manner = manner
        self.phase = Phase.STARTING
        self.resumed = conversation
        self.told: list[AgentReport] = []
        self.written: list[bytes] = []
        # Each order to sweep: the start time of the processes in question, and whether to end them.
        # `tools` holds the tools that still run.
        self.sweeps: list[tuple[float, bool]] = []
        self.tools = manner.tools
        self.agent = WorldAgent(
            plays,
            conversation=manner.conversation or conversation or f"conversation-{number}",
            handshake_seconds=manner.handshake_seconds,
            owns=manner.owns,
            names=manner.names,
            is_terse=manner.is_terse,
        )
        self.violations = self.agent.violations
        # A calm process reports in the order of the loop, so the explorer has nothing to reorder.
        self.is_calm = False
        self.is_stopped = False
        self.is_paused = False
        self._loop: SimLoop = current()
        self._on_report = on_report
        self._is_writing = False
        self._is_acting = False
        self._is_output_over = False
        self._is_exit_told = False
        self._acts = 0
        self._last_words = 0
        # Reports that have happened and are not delivered yet, oldest first. `look_now` delivers
        # them immediately.
        self._due: list[Callable[[], None]] = []

    def begin(self) -> None:
        manner = self.manner
        if manner.fails:
            self._soon("tree", self._fail)
        elif manner.start_seconds:
            self._loop.call_later(manner.start_seconds, self._start)
        else:
            self._soon("tree", self._start)

    def __repr__(self) -> str:
        return (
            f"<WorldProcess {self.number} {self.phase.name} "
            f"written={len(self.written)} told={len(self.told)}>"
        )

    # ── Interface of the driver ──
    def write(self, data: bytes) -> None:
        self.written.append(data)
        if self.is_stopped:
            self.violations.append(f"written after the stop: {data!r}")
        if self._is_writing:
            self.violations.append(f"G3: written before the last frame was taken: {data!r}")
        if not data.endswith(b"\n") or data.count(b"\n") != 1:
            self.violations.append(f"G3: not one whole line: {data!r}")
        if self.phase is Phase.STARTING:
            self.violations.append(f"written before it had started: {data!r}")
        count = len(self.written)
        self._is_writing = True
        if self.phase is not Phase.RUNNING or count == self.manner.broken_at:
            self._soon("stdin", self._break)
        elif self.manner.stuck_at is None or count < self.manner.stuck_at:
            if self.manner.is_told_at_once:
                self._take(data)
            else:
                self._soon("stdin", lambda: self._take(data))

    def stop(self, kill_by: float | None = None) -> None:
        if kill_by is not None:
            self._loop.call_at(max(kill_by, self._loop.time()), self._exit, None, SIGKILL)
        if self.is_stopped or self.phase is Phase.GONE:
            return
        self.is_stopped = True
        self.resume()
        if self.phase is Phase.STARTING:
            # The process is stopped before it starts: it has neither an exit nor a tree.
            self._soon("tree", self._vanish)
            return
        if self._is_writing:
            self._soon("stdin", self._break)
        if self.manner.stop_seconds:
            self._loop.call_later(self.manner.stop_seconds, self._exit, None, SIGTERM)
        else:
            self._soon("tree", lambda: self._exit(None, SIGTERM))

    def sweep_tools(self, since: float, ends: bool) -> None:
        self.sweeps.append((since, ends))
        if self.phase is Phase.STARTING:
            self.violations.append("its tools were to be swept before it had started")
        if self.manner.sweep_seconds:
            self._loop.call_later(self.manner.sweep_seconds, self._sweep, ends)
        else:
            self._soon("tools", lambda: self._sweep(ends))

    def hand_over(self, hold_seconds: float, secret: bytes, record: bytes) -> asyncio.Future[str]:
        raise Refused("cannot hand over a process of the world: it has no keeper")

    def stderr(self) -> Stderr:
        return Stderr(self.manner.stderr)

    def settle(self, offset: int | None = None) -> None:
        raise AssertionError("a process of the world ends with its host")

    def forgo_survival(self) -> None:
        raise AssertionError("a process of the world ends with its host")

    def release(self) -> None:
        raise AssertionError("a process of the world ends with its host")

    def pause(self) -> None:
        self.is_paused = True

    def resume(self) -> None:
        self.is_paused = False
        self._go_on()

    def look_now(self) -> None:
        for tell in tuple(self._due):
            if tell in self._due:
                self._due.remove(tell)
                tell()

    def abandon(self) -> None:
        self.phase = Phase.GONE
        self._due.clear()

    # ── Behaviour ──
    def exit_now(self, code: int | None = 0, signal: int | None = None) -> None:
        """End the process now, for a test that chooses the time of the exit."""
        self._exit(code, signal)

    def _soon(self, lane: str, act: Callable[[], None]) -> None:
        self._due.append(act)

        def come() -> None:
            if act in self._due:
                self._due.remove(act)
                act()

        # A schedule shows this name, so it names the action.
        come.__qualname__ = getattr(act, "__qualname__", "come").removesuffix(".<lambda>")
        if self.is_calm:
            self._loop.call_soon(come)
        else:
            self._loop.outside(come, lane=f"{lane}-{self.number}")

    def _tell(self, event: AgentReport) -> None:
        if self.phase is Phase.GONE and not isinstance(event, ProcessGone | StartFailed):
            return
        self.told.append(event)
        self._on_report(event)

    def _start(self) -> None:
        if self.phase is Phase.STARTING and not self.is_stopped:
            self.phase = Phase.RUNNING
            self._tell(Started(1000 + self.number, self._loop.time()))
            self._go_on()

    def _fail(self) -> None:
        if self.phase is Phase.STARTING:
            self.phase = Phase.GONE
            self._tell(StartFailed(AgentError("the world does not start it", process=self.number)))

    def _take(self, data: bytes) -> None:
        """Take the frame from the pipe and pass it to the agent."""
        if not self._is_writing:
            return
        if self.phase is not Phase.RUNNING:
            self._break()
            return
        self.agent.hear(data)
        if self.manner.is_told_late:
            self._go_on()
            self._soon("taken", self._tell_taken)
        else:
            self._tell_taken()
            self._go_on()

    def _tell_taken(self) -> None:
        if self._is_writing:
            self._is_writing = False
            self._tell(FrameWritten())

    def _break(self) -> None:
        if self._is_writing:
            self._is_writing = False
            error: BanksmanError = CommandError(
                "the world took only a part of it", process=self.number
            )
            self._tell(WriteFailed(error))

    def _sweep(self, ends: bool) -> None:
        tools = self.tools
        if ends:
            self.tools = ()
            self._tell(SweepEnded(tools))
        else:
            left = tuple(Survivor(tool.pid, tool.command, "left as it is") for tool in tools)
            self._tell(SweepEnded(survivors=left))

    def _go_on(self) -> None:
        """Schedule the agent's next action, unless one is scheduled or the process is paused."""
        if self.phase is Phase.RUNNING and not self._is_acting and not self.is_paused:
            self._is_acting = True
            self._soon("stdout", self._act)

    def _act(self) -> None:
        self._is_acting = False
        if self.phase is not Phase.RUNNING or self.is_paused:
            return
        act = self.agent.act()
        if act is None:
            return
        self._acts += 1
        if self._acts == self.manner.exits_at:
            act = Exit(self.manner.code)
        match act:
            case bytes():
                self._tell(BytesRead(Stream.STDOUT, act, self._loop.time()))
                self._go_on()
            case Pause(seconds=seconds):
                self._is_acting = True
                self._loop.call_later(seconds, self._act)
            case Exit(code=code):
                self._exit(code, None)

    def _exit(self, code: int | None, signal: int | None) -> None:
        if self.phase is not Phase.RUNNING:
            return
        self.phase = Phase.EXITED
        self._last_words = self.manner.last_words
        self._soon("tree", lambda: self._tell_exit(code, signal))
        self._soon("stdout", self._speak_last)

    def _tell_exit(self, code: int | None, signal: int | None) -> None:
        self._tell(Exited(code, signal, self._loop.time()))
        self._is_exit_told = True
        self._end()

    def _speak_last(self) -> None:
        """Deliver the output that was in the pipe when the process died."""
        act = self.agent.act() if self._last_words else None
        if isinstance(act, bytes):
            self._last_words -= 1
            self._tell(BytesRead(Stream.STDOUT, act, self._loop.time()))
            self._soon("stdout", self._speak_last)
            return
        self._tell(StreamEnded(Stream.STDOUT, self._loop.time()))
        self._is_output_over = True
        self._end()

    def _end(self) -> None:
        if not self._is_output_over or not self._is_exit_told:
            return
        if self.manner.gone_seconds:
            self._loop.call_later(self.manner.gone_seconds, self._vanish)
        else:
            self._soon("tree", self._vanish)

    def _vanish(self) -> None:
        if self.phase is Phase.GONE:
            return
        # A write that is still pending gets no answer. A real process gives none either.
        self.phase = Phase.GONE
        self._due.clear()
        manner = self.manner
        self._tell(ProcessGone(manner.swept, manner.survivors, True, Stderr(manner.stderr)))


class World:
    """Starts simulated processes.

    `plays`: by the text of the prompt; `""` matches any other prompt. `manners`: of the first
    process, the second, and so on; later processes have a default `Manner`.
    """

    def __init__(
        self,
        plays: Mapping[str, Play] | None = None,
        *,
        manners: Sequence[Manner] = (),
        allows_steering: bool = False,
    ) -> None:
        self.plays: dict[str, Play] = dict(plays or {})
        self.manners = list(manners)
        self.allows_steering = allows_steering
        self.processes: list[WorldProcess] = []
        self.spawned = 0
        self._is_calm = False

    def __repr__(self) -> str:
        return f"<World {self.processes}>"

    def spawn(self, effect: StartProcess, on_report: OnReport) -> WorldProcess:
        """Start a process; a session takes this method as its `Spawn`."""
        self.spawned += 1
        manner = self.manners[self.spawned - 1] if self.spawned <= len(self.manners) else Manner()
        if manner.raises:
            raise AgentError("the world does not even try to start it", process=self.spawned)
        process = WorldProcess(self.spawned, manner, self.plays, effect.conversation, on_report)
        process.agent.allows_steering = self.allows_steering
        if any(other.phase is not Phase.GONE for other in self.processes):
            process.violations.append(f"process {self.spawned} was started while another was there")
        self.processes.append(process)
        process.is_calm = self._is_calm
        process.begin()
        return process

    @property
    def is_calm(self) -> bool:
        """Whether all reports come in the order of the loop.

        A scenario that starts calm begins its exploration where the interesting part begins.
        """
        return self._is_calm

    @is_calm.setter
    def is_calm(self, value: bool) -> None:
        self._is_calm = value
        for process in self.processes:
            process.is_calm = value

    @property
    def violations(self) -> list[str]:
        return [
            f"process {process.number}: {what}"
            for process in self.processes
            for what in process.violations
        ]

    @property
    def is_over(self) -> bool:
        """Whether every process is gone."""
        return all(process.phase is Phase.GONE for process in self.processes)
