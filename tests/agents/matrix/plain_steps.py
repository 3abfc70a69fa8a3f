"""The same steps, on the rival: plain `subprocess` and `killpg`, for whichever agent.

Where Banksman's step asserts, this one only looks: what comes out of it is the row's other half, and it is what the
agent does by itself. Who runs a step kills the groups, and counts what is left.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from tests.agents.ground import WAIT_SECONDS_MAX, wait
from tests.agents.matrix.abilities import of_claude
from tests.agents.matrix.came import Came
from tests.agents.matrix.place import Place
from tests.agents.matrix.rpc import AcpRival, CodexRival, Judge, always
from tests.agents.matrix.steps import STATUS
from tests.agents.plain import PlainAgent
from tests.agents.plain_steps import word


class ClaudeRival:
    """Claude Code by its own protocol, with the face of the others."""

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


Rival = ClaudeRival | CodexRival | AcpRival
RIVALS: dict[str, type[Rival]] = {"claude": ClaudeRival, "codex": CodexRival}


class PlainCase:
    """One step on the rival. It knows every agent it started, and ends their groups."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self._rivals: list[Rival] = []

    def open(self, *, resume: str | None = None, judge: Judge = always) -> Rival:
        rival = RIVALS.get(self.place.agent.name, AcpRival)(self.place, judge, resume)
        self._rivals.append(rival)
        return rival

    def begin(self, *, judge: Judge = always) -> Rival:
        """An agent after its first turn, in which the tool was started: from here on it runs."""
        rival = self.open(judge=judge)
        rival.result(rival.ask(f"{self.place.tool()}\n@@text the tool runs"))
        self.wait_tool()
        return rival

    def wait_tool(self, name: str = "tool") -> None:
        wait(lambda: self.place.is_tool_up(name), f"the tool {name!r}")
        self.place.check_tool(name)

    def in_tool(self, rival: Rival, name: str) -> str:
        """A prompt whose turn is in a tool of its own, in the foreground."""
        ref = rival.ask(f"{self.place.tool(name, is_background=False)}\n@@text after it")
        self.wait_tool(name)
        return ref

    def kill(self) -> None:
        for rival in self._rivals:
            rival.kill()

    def close(self) -> None:
        for rival in self._rivals:
            rival.close()


PlainStep = Callable[[PlainCase], Came]
PLAIN_STEPS: dict[str, PlainStep] = {}


def step(name: str) -> Callable[[PlainStep], PlainStep]:
    def add(function: PlainStep) -> PlainStep:
        assert name not in PLAIN_STEPS
        PLAIN_STEPS[name] = function
        return function

    return add


def asked(rival: Rival, prompt: str) -> str:
    return rival.result(rival.ask(prompt))


# -- turns -----------------------------------------------------------------------------------------------------------
@step("start")
def start(case: PlainCase) -> Came:
    rival = case.open()
    outcome = asked(rival, f"{case.place.tool()}\n@@text the tool runs")
    case.wait_tool()
    return Came(outcome, seen={"abilities": rival.abilities()})


@step("turn")
def one_turn(case: PlainCase) -> Came:
    return Came(asked(case.begin(), "@@text hello"))


@step("tool")
def tool(case: PlainCase) -> Came:
    return Came(asked(case.begin(), f"{case.place.touch('made')}\n@@text after it"))


@step("permission")
def permission(case: PlainCase) -> Came:
    rival = case.begin(judge=lambda command: "forbidden" not in command)
    allowed = asked(rival, f"{case.place.touch('made')}\n@@text made")
    denied = asked(rival, f"{case.place.touch('forbidden')}\n@@text then not")
    return Came(f"{allowed}; denied: {denied}", seen={"denied": denied})


# -- interrupts ------------------------------------------------------------------------------------------------------
@step("interrupt in a stream")
def interrupt_in_stream(case: PlainCase) -> Came:
    rival = case.begin()
    ref = rival.ask("@@slow 400 0.05")
    rival.heard("tick5 ")
    rival.interrupt()
    said = rival.result(ref)
    return Came(said, seen={"said": said, "model": case.place.plays()[-1].wait_outcome(WAIT_SECONDS_MAX)})


@step("interrupt in a tool")
def interrupt_in_tool(case: PlainCase) -> Came:
    rival = case.begin()
    ref = case.in_tool(rival, "foreground")
    rival.interrupt()
    said = rival.result(ref)
    left = case.place.start_tool_count("foreground").result()
    return Came(said, tool_left=len(left), seen={"said": said})


# -- what goes wrong -------------------------------------------------------------------------------------------------
@step("model error")
def model_error(case: PlainCase) -> Came:
    return Came(asked(case.begin(), f"@@error {STATUS}"))


@step("SIGKILL, then resumed")
def killed(case: PlainCase) -> Came:
    rival = case.begin()
    conversation = rival.conversation
    case.in_tool(rival, "foreground")
    os.kill(rival.process.pid, signal.SIGKILL)
    rival.process.wait(WAIT_SECONDS_MAX)
    case.place.let_time_pass()
    return Came(f"gone, {asked(case.open(resume=conversation), '@@text back')}")


@step("close")
def close(case: PlainCase) -> Came:
    case.in_tool(case.begin(), "foreground")
    return Came("killed")
