"""Steps of the matrix on the rival: plain `subprocess` and `killpg`, for any agent.

Where the step on Banksman asserts, this one only observes. Its result is the other half of the row, and shows the agent
without Banksman. The runner of a step kills the groups and counts the remaining processes.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial

from tests.agents.ground import WAIT_SECONDS_MAX
from tests.agents.matrix.abilities import of_claude
from tests.agents.matrix.came import Came
from tests.agents.matrix.place import Place
from tests.agents.matrix.rpc import AcpRival, CodexRival, Judge, always
from tests.agents.matrix.steps import STATUS
from tests.agents.plain import PlainAgent, PlainCase
from tests.agents.plain_steps import word
from tests.agents.step_table import step_of


class ClaudeRival:
    """Claude Code by its own protocol, with the interface of the other rivals."""

    def __init__(self, place: Place, judge: Judge = always, resume: str | None = None) -> None:
        self._agent = PlainAgent(
            place, resume=resume, judge=lambda command: "allow" if judge(command) else "deny", command=place.command()
        )
        self.process = self._agent.process
        self.ask = self._agent.ask
        self.heard = self._agent.heard
        self.interrupt = self._agent.interrupt
        self.kill = self._agent.kill
        self.close = self._agent.close

    @property
    def conversation(self) -> str:
        return self._agent.conversation

    def abilities(self) -> dict[str, str]:
        return of_claude(self._agent.wait(lambda frame: frame.get("subtype") == "init", "its init"))

    def result(self, ref: str) -> str:
        return word(self._agent.result(ref))


MatrixRival = ClaudeRival | CodexRival | AcpRival
RIVALS: dict[str, type[MatrixRival]] = {"claude": ClaudeRival, "codex": CodexRival}


class RivalCase(PlainCase[Place, MatrixRival]):
    """One step with any agent, by its own protocol."""

    def open(self, *, resume: str | None = None, judge: Judge = always) -> MatrixRival:
        return self.keep(RIVALS.get(self.ground.agent.name, AcpRival)(self.ground, judge, resume))

    def begin(self, *, judge: Judge = always) -> MatrixRival:
        """Start an agent and run its first turn, which starts the tool. The tool runs from then on."""
        rival = self.open(judge=judge)
        rival.result(rival.ask(f"{self.ground.tool()}\n@@text the tool runs"))
        self.wait_tool()
        return rival


PlainStep = Callable[[RivalCase], Came]
PLAIN_STEPS: dict[str, PlainStep] = {}


step = partial(step_of, PLAIN_STEPS)


def asked(rival: MatrixRival, prompt: str) -> str:
    return rival.result(rival.ask(prompt))


# -- turns -----------------------------------------------------------------------------------------------------------
@step("start")
def start(case: RivalCase) -> Came:
    rival = case.open()
    outcome = asked(rival, f"{case.ground.tool()}\n@@text the tool runs")
    case.wait_tool()
    return Came(outcome, seen={"abilities": rival.abilities()})


@step("turn")
def one_turn(case: RivalCase) -> Came:
    return Came(asked(case.begin(), "@@text hello"))


@step("tool")
def tool(case: RivalCase) -> Came:
    return Came(asked(case.begin(), f"{case.ground.touch('made')}\n@@text after it"))


@step("permission")
def permission(case: RivalCase) -> Came:
    rival = case.begin(judge=lambda command: "forbidden" not in command)
    allowed = asked(rival, f"{case.ground.touch('made')}\n@@text made")
    denied = asked(rival, f"{case.ground.touch('forbidden')}\n@@text then not")
    return Came(f"{allowed}; denied: {denied}", seen={"denied": denied})


# -- interrupts ------------------------------------------------------------------------------------------------------
@step("interrupt in a stream")
def interrupt_in_stream(case: RivalCase) -> Came:
    rival = case.begin()
    ref = rival.ask("@@slow 400 0.05")
    rival.heard("tick5 ")
    rival.interrupt()
    said = rival.result(ref)
    return Came(said, seen={"said": said, "model": case.ground.plays()[-1].wait_outcome(WAIT_SECONDS_MAX)})


@step("interrupt in a tool")
def interrupt_in_tool(case: RivalCase) -> Came:
    rival = case.begin()
    ref = case.in_tool(rival, "foreground")
    rival.interrupt()
    said = rival.result(ref)
    left = case.ground.start_tool_count("foreground").result()
    return Came(said, tool_left=len(left), seen={"said": said})


# -- failures --------------------------------------------------------------------------------------------------------
@step("model error")
def model_error(case: RivalCase) -> Came:
    return Came(asked(case.begin(), f"@@error {STATUS}"))


@step("SIGKILL, then resumed")
def killed(case: RivalCase) -> Came:
    rival = case.begin()
    conversation = rival.conversation
    case.in_tool(rival, "foreground")
    os.kill(rival.process.pid, signal.SIGKILL)
    rival.process.wait(WAIT_SECONDS_MAX)
    case.ground.let_time_pass()
    return Came(f"gone, {asked(case.open(resume=conversation), '@@text back')}")


@step("close")
def close(case: RivalCase) -> Came:
    case.in_tool(case.begin(), "foreground")
    return Came("killed")
