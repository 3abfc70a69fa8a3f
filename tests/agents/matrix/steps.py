"""Steps of the matrix on Banksman, by its public API: the same code for every agent.

Each step takes an agent to one situation, checks the promised result, and returns a word for the table. In every step a
tool runs in the background from the first turn on. It has a plain child, a child in a new session, and a child that
ignores TERM. The runner of a step closes the host and counts the remaining processes.

Where agents differ in their abilities, the step asserts what holds for that agent and names it in its word.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from tests.agents.case import Case, answer, done, events, goes_on, interrupted, logged
from tests.agents.ground import WAIT_SECONDS_MAX
from tests.agents.matrix.came import Came
from tests.agents.matrix.place import Place, said
from tests.agents.step_table import step_of

from banksman import Host, Outcome, Session, Turn
from banksman.core.session import event as kinds
from banksman.sessions.questions import Question

# An error of the caller, so that no agent retries.
STATUS = 400
# These agents report that a command has ended, but not its output.
SILENT_TOOLS = ("gemini",)
# For these agents a denial of a command ends the turn.
DENIAL_ENDS_TURN = ("codex-acp",)
# So it does for these, and they report a successful turn.
DENIAL_ENDS_TURN_WELL = ("opencode",)

Step = Callable[["MatrixCase"], Awaitable[Came]]
STEPS: dict[str, Step] = {}


step = partial(step_of, STEPS)


class MatrixCase(Case):
    """One step on Banksman, with any agent."""

    ground: Place

    def __init__(self, host: Host, place: Place) -> None:
        super().__init__(host, place)

    async def open(self, **how: Any) -> Session:
        agent = self.ground.agent
        settings: dict[str, Any] = {"on_question": allow, "permission_mode": agent.permission_mode, **how}
        return await self.host.open(
            agent.name,
            command=self.ground.command(),
            cwd=self.ground.work,
            env=self.ground.env(),
            inherit_env=False,
            **settings,
        )


def allow(_: Question) -> str:
    return "allow"


async def updates(session: Session, turn: Turn) -> list[dict[str, Any]]:
    """Return the ACP updates of a turn."""
    return [update for event in await events(session, turn) for update in event.body.get("updates", ())]


# -- turns -----------------------------------------------------------------------------------------------------------
@step("start")
async def start(case: MatrixCase) -> Came:
    """From the start of the process to the end of the first turn, which starts the tool."""
    session = await case.begin()
    assert session.status().conversation
    return Came("done")


@step("turn")
async def one_turn(case: MatrixCase) -> Came:
    session = await case.begin()
    done(await answer(session, "@@text hello"), "hello")
    assert case.ground.plays()[-1].api == case.ground.agent.api
    return Came("done")


@step("tool")
async def tool(case: MatrixCase) -> Came:
    session = await case.begin()
    turn = await session.ask(f"{case.ground.touch('made')}\n@@text after it")
    done(await turn.outcome(), "after it")
    assert case.ground.is_made("made")
    # The model has received the output of the command, and so has the log.
    assert "MADE" in said(case.ground.plays()[-1])
    told = [update for update in await updates(session, turn) if update["sessionUpdate"].startswith("tool_call")]
    assert [update["status"] for update in told if update.get("status") in ("completed", "failed")] == ["completed"]
    is_told = any("MADE" in json.dumps(update) for update in told)
    assert is_told is (case.ground.agent.name not in SILENT_TOOLS)
    return Came("done" if is_told else "done, output not reported", seen={"is_told": is_told})


@step("permission")
async def permission(case: MatrixCase) -> Came:
    """The agent asks twice. The first request is allowed and the second denied."""
    asked: list[str] = []

    def on_question(question: Question) -> str:
        command = json.dumps([question.input, question.details])
        asked.append(command)
        return "deny" if "forbidden" in command else "allow"

    session = await case.begin(on_question=on_question)
    before = len(asked)
    done(await answer(session, f"{case.ground.touch('made')}\n@@text made"), "made")
    assert case.ground.is_made("made")
    outcome = await answer(session, f"{case.ground.touch('forbidden')}\n@@text then not")
    assert not case.ground.is_made("forbidden")
    assert ["forbidden" in command for command in asked[before:]] == [False, True]
    expected = Outcome.FAILED if case.ground.agent.name in DENIAL_ENDS_TURN else Outcome.DONE
    assert outcome.kind is expected
    await goes_on(session)
    went_on = outcome.text == "then not"
    assert went_on is (case.ground.agent.name not in (*DENIAL_ENDS_TURN, *DENIAL_ENDS_TURN_WELL))
    return Came(f"done; denied: {outcome.kind.value}")


# -- interrupts ------------------------------------------------------------------------------------------------------
@step("interrupt in a stream")
async def interrupt_in_stream(case: MatrixCase) -> Came:
    session = await case.begin()
    turn = await session.ask("@@slow 400 0.05")
    await logged(session, turn, kinds.UPDATE, "tick5 ")
    outcome = await interrupted(turn)
    # The text up to the interrupt is not lost.
    assert (outcome.text or "").startswith("tick1 tick2 tick3 tick4 tick5 ")
    # The model call is cancelled, so it costs nothing further.
    call = case.ground.plays()[-1]
    assert await asyncio.to_thread(call.wait_outcome, WAIT_SECONDS_MAX) == "client_gone"
    await goes_on(session)
    case.ground.check_tool()
    return Came("interrupted", seen={"said": outcome.stop_reason})


@step("interrupt in a tool")
async def interrupt_in_tool(case: MatrixCase) -> Came:
    """No process of the interrupted tool is left.

    The tool of an earlier turn does not belong to this turn and lives.
    """
    session = await case.begin()
    turn = await case.in_tool(session, "foreground")
    outcome = await interrupted(turn)
    left = await asyncio.to_thread(case.ground.start_tool_count("foreground").result)
    case.ground.check_tool()
    await goes_on(session)
    swept = [event.body async for event in session.events() if event.kind == kinds.PROCESS_SWEPT]
    named = sum(len(body["swept"]) for body in swept if body.get("after") == turn.id)
    return Came("interrupted", tool_left=len(left), seen={"swept": named, "said": outcome.stop_reason})


# -- failures --------------------------------------------------------------------------------------------------------
@step("model error")
async def model_error(case: MatrixCase) -> Came:
    session = await case.begin()
    outcome = await answer(session, f"@@error {STATUS}")
    assert outcome.kind is Outcome.FAILED
    # The error contains the model's own message.
    assert f"scripted: @@error {STATUS}" in str(outcome.error)
    await goes_on(session)
    return Came("failed, then done")


@step("SIGKILL, then resumed")
async def killed(case: MatrixCase) -> Came:
    session = await case.begin()
    conversation = session.status().conversation
    turn = await case.in_tool(session, "foreground")
    (pid,) = session.status().pids
    os.kill(pid, signal.SIGKILL)
    assert (await turn.outcome()).kind is Outcome.FAILED
    case.ground.let_time_pass()
    await goes_on(session)
    assert session.status().pids != (pid,)
    assert session.status().conversation == conversation
    # Another process serves the session, and the model receives the conversation of the first.
    assert "the tool runs" in said(case.ground.plays()[-1])
    return Came("failed, then done")


@step("close")
async def close(case: MatrixCase) -> Came:
    """Close in the middle of a turn that is in a tool: then the most processes have to end."""
    session = await case.begin()
    turn = await case.in_tool(session, "foreground")
    await session.close()
    outcome = await turn.outcome()
    return Came(f"turn {outcome.kind.value}")
