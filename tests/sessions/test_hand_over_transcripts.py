"""A restart or crash in the middle of a turn, while 20 asks wait, in each dialect: the transcript of one whole run.

tests/agents/test_restart.py has the same for the real agents.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.sessions.helpers import bodies, exists
from tests.sessions.test_hand_over import HOLD_SECONDS, STREAM, TOOL, WAITING, Scene, opened, spoken, state

from banksman import Event
from banksman.core.session import event as kinds
from banksman.testing import fake_acp, fake_codex

__all__ = ["state"]

# Events of a new host, and those of asks that come while the process starts.
AT_ANY_PLACE = (
    *(kinds.SESSION_HANDED_OVER, kinds.PROCESS_ADOPTED, kinds.SESSION_OPENED),
    *(kinds.TURN_QUEUED, kinds.PROCESS_STARTED),
)
Restart = Callable[[], Awaitable[None]]


class Dialect(NamedTuple):
    """The scripts of a fake agent. `say`: the verb for a text. `package`: has its `command`, if it is not Claude's."""

    agent: str
    say: str
    stream: str
    tool: str
    question: str
    package: Any = None


RPC_STREAM = "@@slow 3 0\n@@touch {at}/reached\n@@wait {at}/go\n@@text end"
RPC_TOOL = "@@run touch {at}/reached; while [ ! -e {at}/go ]; do sleep 0.01; done\n@@text built"
RPC_QUESTION = "@@permission make\n@@text asked"
DIALECTS = [
    Dialect("claude", "say", STREAM, TOOL, "@@ask Bash\n@@say asked"),
    Dialect("codex", "text", RPC_STREAM, RPC_TOOL, RPC_QUESTION, fake_codex),
    Dialect("custom", "text", RPC_STREAM, RPC_TOOL, RPC_QUESTION, fake_acp),
]
CLAUDE = DIALECTS[0]


async def begin(it: Scene, dialect: Dialect, prompt: str) -> list[str]:
    return [await it.ask(prompt), *[await it.ask(f"@@{dialect.say} answer {number}") for number in range(WAITING)]]


async def logged(it: Scene, kind: str) -> None:
    while not bodies(await it.events(), kind):  # noqa: ASYNC110  Another process writes the log.
        await asyncio.sleep(0.01)


async def in_a_stream(it: Scene, dialect: Dialect, restart: Restart) -> list[str]:
    turns = await begin(it, dialect, dialect.stream)
    await it.reached()
    await restart()
    it.go()
    return turns


async def in_a_tool(it: Scene, dialect: Dialect, restart: Restart) -> list[str]:
    turns = await begin(it, dialect, dialect.tool)
    await it.reached()
    await restart()
    it.go()
    return turns


async def in_a_question(it: Scene, dialect: Dialect, restart: Restart) -> list[str]:
    turns = await begin(it, dialect, dialect.question)
    # A host that is killed before that leaves a question that gets another id.
    await logged(it, kinds.QUESTION_ASKED)
    asked = await it.host.call("questions", session=it.session)
    assert asked
    await restart()
    assert await it.host.call("questions", session=it.session) == asked
    assert await it.host.call("answer", session=it.session, question=asked[0])
    return turns


async def in_an_interrupt(it: Scene, dialect: Dialect, restart: Restart) -> list[str]:
    """The agent reads the interrupt after the restart."""
    turns = await begin(it, dialect, f"@@{dialect.say} before\n@@touch {{at}}/reached\n@@hang")
    await it.reached()
    (process,) = it.agents.evidence.processes
    os.kill(process.pid, signal.SIGSTOP)
    try:
        it.host.interrupt(turns[0])
        await logged(it, kinds.TURN_INTERRUPTED)
        await restart()
    finally:
        os.kill(process.pid, signal.SIGCONT)
    return turns


async def in_an_interrupt_that_was_read(it: Scene, dialect: Dialect, restart: Restart) -> list[str]:
    prompt = "@@at interrupt touch {at}/reached\n@@at interrupt wait {at}/go\n@@touch {at}/up\n@@hang"
    turns = await begin(it, dialect, prompt)
    await exists(it.path("up"))
    it.host.interrupt(turns[0])
    await it.reached()
    await restart()
    it.go()
    return turns


Moment = Callable[[Scene, Dialect, Restart], Awaitable[list[str]]]
MOMENTS: list[Moment] = [in_a_stream, in_a_tool, in_a_question, in_an_interrupt]
INTERRUPTED: list[Moment] = [in_an_interrupt, in_an_interrupt_that_was_read]


async def run(
    folder: Path, marker: str, moment: Moment, dialect: Dialect, restarts: int, *, crashes: bool = False
) -> list[Event]:
    how: dict[str, Any] = {"agent": dialect.agent, "options": {"drain_seconds": 60.0}}
    if crashes:
        how["survival"] = ("crash", HOLD_SECONDS)
    if dialect.package is not None:
        how["command"] = [*dialect.package.command(evidence=folder / "evidence"), marker]
        how["cwd"] = str(folder.parent)
    async with opened(folder, marker, **how) as it:

        async def restart() -> None:
            for _ in range(restarts):
                if crashes:
                    # The agent may have reached its pause before the host has noted that its prompt is written.
                    await it.host.ping()
                    it.host.kill()
                    await it.come()
                else:
                    await it.restart()

        first, *others = await it.results(await moment(it, dialect, restart))
        assert first[0] == ("interrupted" if moment in INTERRUPTED else "done")
        assert others == [["done", f"answer {number}"] for number in range(WAITING)]
        return await it.end()


async def compare(state: Path, marker: str, moment: Moment, dialect: Dialect, *, crashes: bool = False) -> list[Event]:
    """Run a turn with two restarts and one without. The agents must have said and read the same.

    Returns the log of the first one.
    """
    restarted = await run(state / "restarted", marker, moment, dialect, restarts=2, crashes=crashes)
    whole = await run(state / "whole", marker, moment, dialect, restarts=0)
    assert spoken(restarted) == spoken(whole)
    assert story(restarted) == story(whole)
    assert len(bodies(restarted, kinds.TURN_ENDED)) == WAITING + 1
    assert len(bodies(restarted, kinds.PROCESS_ADOPTED)) == 2
    assert kinds.SESSION_RECOVERED not in {event.kind for event in restarted}
    return restarted


def story(events: Sequence[Event]) -> list[tuple[str, int]]:
    """Return the kinds of the events in order, each with the number of its turn."""
    turns: dict[str | None, int] = {}
    told = [event for event in events if event.kind not in AT_ANY_PLACE]
    return [(event.kind, turns.setdefault(event.turn, len(turns))) for event in told]


def check_hand_overs(events: list[Event]) -> None:
    handed, adopted = (bodies(events, kind) for kind in (kinds.SESSION_HANDED_OVER, kinds.PROCESS_ADOPTED))
    assert [(body["hold"], body["process"]) for body in handed] == [(body["hold"], body["process"]) for body in adopted]
    assert [(len(body["open"]), len(body["queued"])) for body in handed] == [(1, WAITING), (1, WAITING)]


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize(
    "dialect",
    [pytest.param(each, id=each.agent, marks=() if each is CLAUDE else pytest.mark.thorough) for each in DIALECTS],
)
async def test_transcript_of_a_restarted_turn_is_that_of_a_whole_one(
    state: Path, marker: str, moment: Moment, dialect: Dialect
) -> None:
    check_hand_overs(await compare(state, marker, moment, dialect))


# Without the interrupt: its frame may be in flight when the host is killed, and then the turn is UNKNOWN.
@pytest.mark.thorough
@pytest.mark.parametrize("moment", [in_a_stream, in_a_tool, in_a_question])
@pytest.mark.parametrize("dialect", DIALECTS[1:], ids=lambda dialect: dialect.agent)
async def test_transcript_of_a_turn_after_crashes_is_that_of_a_whole_one(
    state: Path, marker: str, moment: Moment, dialect: Dialect
) -> None:
    events = await compare(state, marker, moment, dialect, crashes=True)
    assert bodies(events, kinds.SESSION_HANDED_OVER) == []


async def test_transcript_of_an_interrupt_that_the_agent_has_read_is_that_of_a_whole_one(
    state: Path, marker: str
) -> None:
    check_hand_overs(await compare(state, marker, in_an_interrupt_that_was_read, CLAUDE))
