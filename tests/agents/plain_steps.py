"""Steps with Claude Code on the rival: plain `subprocess` and `killpg`.

Each step returns a word for the table and leaves the agent running. The runner kills the groups and counts the
remaining processes. Where the step on Banksman asserts, this one only observes. Its result is the other half of the
row.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from functools import partial

from tests.agents import steps
from tests.agents.ground import Ground, bash, wait
from tests.agents.plain import Frame, Judge, PlainAgent, PlainCase, always, begin_by_its_own_cli
from tests.agents.step_table import step_of


class ClaudeCase(PlainCase[Ground, PlainAgent]):
    """One step on Claude Code by its own protocol."""

    def open(self, *, command: Sequence[str] = (), resume: str | None = None, judge: Judge = always) -> PlainAgent:
        return self.keep(PlainAgent(self.ground, command=command, resume=resume, judge=judge))

    def begin(self, *, resume: str | None = None, judge: Judge = always) -> PlainAgent:
        """Start an agent and run its first turn, which starts the tool. The tool runs from then on."""
        agent = self.open(resume=resume, judge=judge)
        agent.answer(f"{self.ground.tool()}\n@@text the tool runs")
        self.wait_tool()
        return agent

    def begin_with_stand_in(self) -> PlainAgent:
        agent = self.open(command=self.ground.fake_agent())
        agent.answer("@@say up")
        self.wait_tool()
        return agent

    def touch(self) -> str:
        """Return the line of a prompt that makes the agent ask for permission to create a file."""
        return bash(f"touch {self.ground.path('made')}")


def word(result: Frame) -> str:
    """Return the end of the turn in the words of a result."""
    if not result["is_error"]:
        return "success"
    return str(result.get("terminal_reason") or result["subtype"])


PlainStep = Callable[[ClaudeCase], str]
PLAIN_STEPS: dict[str, PlainStep] = {}


step = partial(step_of, PLAIN_STEPS)


# -- turns -----------------------------------------------------------------------------------------------------------
@step("start")
def start(case: ClaudeCase) -> str:
    return word(case.begin().results()[-1])


@step("turn")
def one_turn(case: ClaudeCase) -> str:
    return word(case.begin().answer("@@think so, so\n@@text hello"))


@step("second message into a turn")
def second_message(case: ClaudeCase) -> str:
    agent = case.begin()
    with case.ground.gate() as gate:
        refs = [agent.ask(f"{gate.line}\n@@text first")]
        wait(gate.reached.exists, "the gate")
        refs.append(agent.ask("@@text second"))
        before = len(agent.results())
        gate.open()
        for ref in refs:
            agent.result(ref)
    return f"{len(agent.results()) - before} result for 2"


@step("frame of 3 MB")
def big_frame(case: ClaudeCase) -> str:
    return word(case.begin().answer(f"@@big {steps.BIG_BYTES}"))


@step("result of 40 MiB (stand-in)")
def huge_result(case: ClaudeCase) -> str:
    return word(case.begin_with_stand_in().answer(f"@@huge_result {steps.HUGE_BYTES}"))


@step("tool result of 40 MiB (stand-in)")
def huge_tool_result(case: ClaudeCase) -> str:
    prompt = f"@@tool_use Read\n@@huge_tool_result {steps.HUGE_BYTES}\n@@say read it"
    return word(case.begin_with_stand_in().answer(prompt))


# -- interrupts ------------------------------------------------------------------------------------------------------
def interrupted_early(agent: PlainAgent) -> str:
    """Send a prompt and an interrupt together, then wait for the end of the turn or for more of its text."""
    after = len(agent.messages)
    ref = agent.ask("@@slow 400 0.05")
    agent.interrupt()
    frame = agent.wait(
        lambda frame: (frame["type"] == "result" and ref in str(frame)) or "tick5 " in str(frame),
        "the end of the turn, or its going on",
        after,
    )
    return word(frame) if frame["type"] == "result" else "acked, went on"


@step("interrupt before the start")
def interrupt_before_start(case: ClaudeCase) -> str:
    agent = case.open()
    outcome = interrupted_early(agent)
    if outcome == "acked, went on":
        agent.interrupt()
    agent.answer(f"{case.ground.tool()}\n@@text up")
    case.wait_tool()
    return outcome


@step("interrupt before init")
def interrupt_before_init(case: ClaudeCase) -> str:
    return interrupted_early(case.begin())


@step("interrupt in a stream")
def interrupt_in_stream(case: ClaudeCase) -> str:
    agent = case.begin()
    ref = agent.ask("@@slow 400 0.05")
    agent.heard("tick5 ")
    agent.interrupt()
    return word(agent.result(ref))


@step("interrupt in a tool")
def interrupt_in_tool(case: ClaudeCase) -> str:
    agent = case.begin()
    ref = case.in_tool(agent, "foreground")
    agent.interrupt()
    return word(agent.result(ref))


# -- questions -------------------------------------------------------------------------------------------------------
@step("permission allowed")
def permission_allowed(case: ClaudeCase) -> str:
    return word(case.begin().answer(f"{case.touch()}\n@@text made"))


@step("permission denied")
def permission_denied(case: ClaudeCase) -> str:
    agent = case.begin(judge=lambda command: "deny" if "touch" in command else "allow")
    return word(agent.answer(f"{case.touch()}\n@@text then not"))


@step("permission withdrawn")
def permission_withdrawn(case: ClaudeCase) -> str:
    agent = case.begin(judge=lambda command: None if "touch" in command else "allow")
    ref = agent.ask(f"{case.touch()}\n@@text made")
    agent.wait_question()
    agent.interrupt()
    return word(agent.result(ref))


# -- a model that fails ----------------------------------------------------------------------------------------------
@step("model: 529 twice")
def overloaded(case: ClaudeCase) -> str:
    return word(case.begin().answer("@@error 529 2\n@@text recovered"))


def called_and_interrupted(case: ClaudeCase, prompt: str, calls: int) -> str:
    agent = case.begin()
    before = len(case.ground.plays())
    ref = agent.ask(prompt)
    case.ground.wait_play(before + calls)
    agent.interrupt()
    return word(agent.result(ref))


@step("model: 500 for ever")
def broken(case: ClaudeCase) -> str:
    return called_and_interrupted(case, "@@error 500", 2)


@step("model: hangs, interrupted")
def hangs(case: ClaudeCase) -> str:
    return called_and_interrupted(case, "@@hang", 1)


@step("model: hangs, by the clock")
def hangs_too_long(case: ClaudeCase) -> str:
    """The rival has no timeout except the one that kills."""
    agent = case.begin()
    before = len(case.ground.plays())
    agent.ask("@@hang")
    case.ground.wait_play(before + 1)
    return "killed"


# -- conflicting callers ---------------------------------------------------------------------------------------------
@step("urgent ask while a tool runs")
def preemption(case: ClaudeCase) -> str:
    agent = case.begin()
    chore = case.in_tool(agent, "chore")
    agent.interrupt()
    return f"{word(agent.result(chore))}, {word(agent.answer('@@text at once'))}"


@step("two sessions, one conversation")
def fight(case: ClaudeCase) -> str:
    first = case.begin()
    second = case.open(resume=first.conversation)
    words = [word(agent.answer("@@text mine")) for agent in (first, second)]
    return f"both: {', '.join(words)}"


# -- processes that end and start ------------------------------------------------------------------------------------
@step("SIGKILL, then resumed")
def killed(case: ClaudeCase) -> str:
    agent = case.begin()
    case.in_tool(agent, "foreground")
    os.kill(agent.process.pid, signal.SIGKILL)
    agent.process.wait(10)
    return f"gone, {word(case.open(resume=agent.conversation).answer('@@text back'))}"


@step("adopted from its own CLI")
def adopted(case: ClaudeCase) -> str:
    return word(case.begin(resume=begin_by_its_own_cli(case.ground)).results()[-1])
