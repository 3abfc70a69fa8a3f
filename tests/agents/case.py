"""One step on Banksman: what the steps do with a host, and how they see what came of it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from tests.agents.ground import WAIT_SECONDS_MAX, Ground

from banksman import Event, Host, Outcome, Session, Turn
from banksman.core.session.outcome import Kind
from banksman.sessions.questions import Question


class Case:
    """One step on Banksman: a host, and what the steps do with it."""

    def __init__(self, host: Host, ground: Ground) -> None:
        self.host = host
        self.ground = ground

    async def open(self, **how: Any) -> Session:
        """A session with the real agent, which gets this environment and nothing else."""
        settings: dict[str, Any] = {"command": [self.ground.claude], "on_question": allow, **how}
        return await self.host.open(
            "claude", cwd=self.ground.work, env=self.ground.env(), inherit_env=False, **settings
        )

    async def begin(self, **how: Any) -> Session:
        """The same, after its first turn, in which the tool was started: from here on it runs."""
        session = await self.open(**how)
        done(await answer(session, f"{self.ground.tool()}\n@@text the tool runs"), "the tool runs")
        await self.wait_tool()
        return session

    async def begin_with_stand_in(self) -> Session:
        session = await self.open(command=self.ground.fake_agent())
        done(await answer(session, "@@say up"), "up")
        await self.wait_tool()
        return session

    async def wait_tool(self, name: str = "tool") -> None:
        await exists(self.ground.path(name))
        self.ground.check_tool(name)

    async def in_tool(self, session: Session, name: str, after: str = "", **how: Any) -> Turn:
        """A turn that is in a tool of its own, in the foreground, which has the three children too."""
        turn = await session.ask(f"{self.ground.tool(name, is_background=False)}\n@@text {after or 'after it'}", **how)
        await self.wait_tool(name)
        return turn

    async def called(self, number: int) -> None:
        """Until the model has been called so many times more than now."""
        await asyncio.to_thread(self.ground.wait_play, number)


def allow(question: Question) -> str:
    assert question.tool == "Bash"
    return "allow"


async def answer(session: Session, prompt: str, **how: Any) -> Outcome:
    """Ask, and wait for the outcome."""
    turn = await session.ask(prompt, **how)
    return await turn.outcome()


def done(outcome: Outcome, text: str) -> None:
    """It is done, with this answer and no other."""
    assert outcome.kind is Outcome.DONE, outcome.error
    assert outcome.text == text


async def interrupted(turn: Turn, kind: Kind = Outcome.INTERRUPTED) -> Outcome:
    """Interrupt, and be sure that it did that."""
    receipt = await turn.interrupt()
    assert receipt.stopped
    outcome = await turn.outcome()
    assert outcome.kind is kind
    return outcome


async def goes_on(session: Session) -> None:
    """Whatever was done to the session, it answers the next ask, with what was asked for and nothing else."""
    done(await answer(session, "@@text and on it goes"), "and on it goes")


async def exists(path: Path) -> None:
    """Until a file is there. Its maker tells nobody, so it is looked for again and again."""
    async with asyncio.timeout(WAIT_SECONDS_MAX):
        while not path.exists():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def events(session: Session, turn: Turn) -> list[Event]:
    """What the log has of a turn."""
    return [event async for event in session.events() if event.turn == turn.id]


async def logged(session: Session, turn: Turn, kind: str, text: str = "") -> None:
    """Until the log has an event of this kind in a turn, with this text in it."""
    async with asyncio.timeout(WAIT_SECONDS_MAX):
        async for event in session.follow():
            if (event.turn, event.kind) == (turn.id, kind) and text.encode() in event.data:
                return
    raise AssertionError("the session was closed before that")
