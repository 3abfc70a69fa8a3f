"""Steps with Claude Code on Banksman, each in one difficult situation.

Each step drives the real agent, or the stand-in where its name says so. It checks how Banksman handles the situation
and returns a word for the table. The runner closes the host and counts the remaining processes.

In every step a tool runs in the background from the first turn on; `tool.py` lists its children. So a step that leaves
no process has ended these too.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from functools import partial

import pytest
from tests.agents.case import Case, answer, done, events, exists, goes_on, interrupted, logged
from tests.agents.ground import WAIT_SECONDS_MAX, bash, messages
from tests.agents.plain import begin_by_its_own_cli
from tests.agents.step_table import step_of

from banksman import BACKGROUND, INTERACTIVE, NotOwner, Outcome
from banksman.core.session import event as kinds
from banksman.sessions.questions import Question

MIB = 1 << 20
# More than Banksman keeps of a frame (32 MiB), and within the limit of the stand-in.
HUGE_BYTES = 40 * MIB
BIG_BYTES = 3_000_000


Step = Callable[[Case], Awaitable[str]]
STEPS: dict[str, Step] = {}


step = partial(step_of, STEPS)


# -- turns -----------------------------------------------------------------------------------------------------------
@step("start")
async def start(case: Case) -> str:
    session = await case.begin()
    assert session.status().conversation
    return "done"


@step("turn")
async def one_turn(case: Case) -> str:
    session = await case.begin()
    turn = await session.ask("@@think so, so\n@@text hello")
    outcome = await turn.outcome()
    done(outcome, "hello")
    # The cost proves that the agent's own turn ended, and not a similar frame.
    assert outcome.usage
    assert outcome.cost is not None
    return "done"


@step("second message into a turn")
async def second_message(case: Case) -> str:
    """The agent merges a message that arrives while it is busy: two prompts get one result.

    Each ask has its outcome.
    """
    session = await case.begin()
    with case.ground.gate() as gate:
        first = await session.ask(f"{gate.line}\n@@text first")
        await exists(gate.reached)
        second = await session.ask("@@text second", on_busy="steer")
        gate.open()
        outcomes = [await first.outcome(), await second.outcome()]
    assert [outcome.kind for outcome in outcomes] == [Outcome.DONE, Outcome.DONE]
    assert outcomes[1].text is not None
    assert "second" in outcomes[1].text
    await goes_on(session)
    return "done, done"


@step("frame of 3 MB")
async def big_frame(case: Case) -> str:
    session = await case.begin()
    outcome = await answer(session, f"@@big {BIG_BYTES}")
    assert outcome.kind is Outcome.DONE
    assert len(outcome.text or "") == BIG_BYTES
    await goes_on(session)
    return "done"


@step("result of 40 MiB (stand-in)")
async def huge_result(case: Case) -> str:
    session = await case.begin_with_stand_in()
    outcome = await answer(session, f"@@huge_result {HUGE_BYTES}")
    # The boundary is recognised by its head, so the turn is over. Its content was not kept, so the turn has failed.
    assert outcome.kind is Outcome.FAILED
    assert session.status().counters["spilled"] == 1
    done(await answer(session, "@@say and on it goes"), "and on it goes")
    return "failed, then done"


@step("tool result of 40 MiB (stand-in)")
async def huge_tool_result(case: Case) -> str:
    session = await case.begin_with_stand_in()
    outcome = await answer(session, f"@@tool_use Read\n@@huge_tool_result {HUGE_BYTES}\n@@say read it")
    done(outcome, "read it")
    assert session.status().counters["spilled"] == 1
    done(await answer(session, "@@say and on it goes"), "and on it goes")
    return "done"


# -- interrupts ------------------------------------------------------------------------------------------------------
@step("interrupt before the start")
async def interrupt_before_start(case: Case) -> str:
    """The first ask, to a process that cannot read it yet. Not a byte of it is sent."""
    session = await case.open()
    turn = await session.ask("@@slow 400 0.05")
    await logged(session, turn, kinds.TURN_QUEUED)
    await interrupted(turn, Outcome.WITHDRAWN)
    done(await answer(session, f"{case.ground.tool()}\n@@text up"), "up")
    await case.wait_tool()
    assert "@@slow" not in messages(case.ground.plays()[-1])
    return "withdrawn"


@step("interrupt before init")
async def interrupt_before_init(case: Case) -> str:
    """The agent acknowledges an interrupt that comes before its init, and continues all the same."""
    session = await case.begin()
    turn = await session.ask("@@slow 400 0.05")
    await logged(session, turn, kinds.TURN_STARTED)
    await interrupted(turn)
    log = await events(session, turn)
    order = ["init" if b'"subtype":"init"' in event.data else event.kind for event in log]
    assert "init" not in order[: order.index(kinds.TURN_INTERRUPTED)], "it came too late to show anything"
    await goes_on(session)
    return "interrupted"


@step("interrupt in a stream")
async def interrupt_in_stream(case: Case) -> str:
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
    return "interrupted"


@step("interrupt in a tool")
async def interrupt_in_tool(case: Case) -> str:
    session = await case.begin()
    turn = await case.in_tool(session, "foreground")
    await interrupted(turn)
    await goes_on(session)
    return "interrupted"


# -- questions -------------------------------------------------------------------------------------------------------
@step("permission allowed")
async def permission_allowed(case: Case) -> str:
    asked: list[str] = []

    def on_question(question: Question) -> str:
        asked.append(str(question.input["command"]))
        return "allow"

    session = await case.begin(on_question=on_question)
    made = case.ground.path("made")
    outcome = await answer(session, f"{bash(f'touch {made}')}\n@@text made")
    done(outcome, "made")
    assert asked[-1] == f"touch {made}"
    assert made.exists()
    return "done"


@step("permission denied")
async def permission_denied(case: Case) -> str:
    def on_question(question: Question) -> str:
        return "deny" if "touch" in question.input["command"] else "allow"

    session = await case.begin(on_question=on_question)
    made = case.ground.path("made")
    outcome = await answer(session, f"{bash(f'touch {made}')}\n@@text then not")
    # The denial ends the tool call and not the turn: the model receives it and continues.
    done(outcome, "then not")
    assert "denied" in messages(case.ground.plays()[-1])
    assert not made.exists()
    return "done"


@step("permission withdrawn")
async def permission_withdrawn(case: Case) -> str:
    """The turn is interrupted while the callback still works on the answer."""
    asked, closed = asyncio.Event(), asyncio.Event()

    async def on_question(question: Question) -> str:
        if "touch" not in question.input["command"]:
            return "allow"
        asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            closed.set()
        raise AssertionError("nobody sets it")

    session = await case.begin(on_question=on_question)
    made = case.ground.path("made")
    turn = await session.ask(f"{bash(f'touch {made}')}\n@@text made")
    async with asyncio.timeout(WAIT_SECONDS_MAX):
        await asked.wait()
    assert len(session.questions()) == 1
    await interrupted(turn)
    async with asyncio.timeout(WAIT_SECONDS_MAX):
        await closed.wait()
    assert not session.questions()
    await goes_on(session)
    assert not made.exists()
    return "interrupted"


# -- a model that fails ----------------------------------------------------------------------------------------------
@step("model: 529 twice")
async def overloaded(case: Case) -> str:
    session = await case.begin()
    before = len(case.ground.plays())
    outcome = await answer(session, "@@error 529 2\n@@text recovered")
    done(outcome, "recovered")
    assert [play.outcome for play in case.ground.plays()[before:]] == ["http_529", "http_529", "done"]
    return "done"


@step("model: 500 for ever")
async def broken(case: Case) -> str:
    """The agent retries for minutes, and reports it only in frames that are no progress."""
    session = await case.begin()
    before = len(case.ground.plays())
    turn = await session.ask("@@error 500")
    await case.called(before + 2)
    await interrupted(turn)
    await goes_on(session)
    return "interrupted"


@step("model: hangs, interrupted")
async def hangs(case: Case) -> str:
    session = await case.begin()
    before = len(case.ground.plays())
    turn = await session.ask("@@hang")
    await case.called(before + 1)
    await interrupted(turn)
    await goes_on(session)
    return "interrupted"


@step("model: hangs, by the clock")
async def hangs_too_long(case: Case) -> str:
    """No caller interrupts the turn; the watchdog does."""
    session = await case.begin(options={"clocks": {"progress": 5}})
    outcome = await answer(session, "@@hang")
    assert (outcome.kind, outcome.clock) == (Outcome.INTERRUPTED, "progress")
    await goes_on(session)
    return "interrupted"


# -- conflicting callers ---------------------------------------------------------------------------------------------
@step("urgent ask while a tool runs")
async def preemption(case: Case) -> str:
    session = await case.begin()
    chore = await case.in_tool(session, "chore", priority=BACKGROUND)
    done(await answer(session, "@@text at once", priority=INTERACTIVE), "at once")
    assert (await chore.outcome()).kind is Outcome.PREEMPTED
    return "preempted, done"


@step("two sessions, one conversation")
async def fight(case: Case) -> str:
    """The agent has no lock: both processes would answer, and each would know half of the conversation."""
    session = await case.begin()
    with pytest.raises(NotOwner, match=session.id):
        await case.open(resume=session.status().conversation)
    await goes_on(session)
    return "refused, done"


# -- processes that end and start ------------------------------------------------------------------------------------
@step("SIGKILL, then resumed")
async def killed(case: Case) -> str:
    session = await case.begin()
    conversation = session.status().conversation
    turn = await case.in_tool(session, "foreground")
    (pid,) = session.status().pids
    assert os.readlink(f"/proc/{pid}/exe") == os.path.realpath(case.ground.claude)
    os.kill(pid, signal.SIGKILL)
    outcome = await turn.outcome()
    assert outcome.kind is Outcome.FAILED
    await goes_on(session)
    assert session.status().conversation == conversation
    # Another process, which knows the conversation. It may lack the text of the failed turn, because the agent writes
    # its history to a file a little later.
    assert session.status().pids != (pid,)
    assert "the tool runs" in messages(case.ground.plays()[-1])
    return "failed, then done"


@step("adopted from its own CLI")
async def adopted(case: Case) -> str:
    conversation = await asyncio.to_thread(begin_by_its_own_cli, case.ground)
    session = await case.begin(resume=conversation)
    assert session.status().conversation == conversation
    assert "begun by hand" in messages(case.ground.plays()[-1])
    return "done"
