"""Helpers of the steps on Banksman: actions on a host, and checks of their results."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from tests.agents.ground import WAIT_SECONDS_MAX, Ground

from banksman import Event, Host, Outcome, Session, Turn
from banksman.core.session.outcome import Kind
from banksman.sessions.questions import Question


class Case:
    """One step on Banksman, with its host and its ground."""

    def __init__(self, host: Host, ground: Ground) -> None:
        self.host = host
        self.ground = ground

    async def open(self, **how: Any) -> Session:
        """Open a session with the real agent, which gets this environment and nothing else."""
        settings: dict[str, Any] = {"command": [self.ground.claude], "on_question": allow, **how}
        return await self.host.open(
            "claude", cwd=self.ground.work, env=self.ground.env(), inherit_env=False, **settings
        )

    async def begin(self, **how: Any) -> Session:
        """Open a session and run its first turn, which starts the tool. The tool runs from then on."""
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
        """Start a turn that runs another tool in the foreground. That tool has the three children too."""
        turn = await session.ask(f"{self.ground.tool(name, is_background=False)}\n@@text {after or 'after it'}", **how)
        await self.wait_tool(name)
        return turn

    async def called(self, number: int) -> None:
        """Wait until the model has received `number` calls."""
        await asyncio.to_thread(self.ground.wait_play, number)


def allow(question: Question) -> str:
    assert question.tool == "Bash"
    return "allow"


async def answer(session: Session, prompt: str, **how: Any) -> Outcome:
    turn = await session.ask(prompt, **how)
    return await turn.outcome()


def done(outcome: Outcome, text: str) -> None:
    """Check that the outcome is done, with exactly this answer."""
    assert outcome.kind is Outcome.DONE, outcome.error
    assert outcome.text == text


async def interrupted(turn: Turn, kind: Kind = Outcome.INTERRUPTED) -> Outcome:
    """Interrupt the turn and check the receipt and the outcome."""
    receipt = await turn.interrupt()
    assert receipt.stopped
    outcome = await turn.outcome()
    assert outcome.kind is kind
    return outcome


async def goes_on(session: Session) -> None:
    """Check that the session answers its next ask with exactly the scripted text."""
    done(await answer(session, "@@text and on it goes"), "and on it goes")


async def exists(path: Path) -> None:
    """Wait until a file exists. Its writer sends no event, so this polls."""
    async with asyncio.timeout(WAIT_SECONDS_MAX):
        while not path.exists():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def events(session: Session, turn: Turn) -> list[Event]:
    """Return the events of a turn."""
    return [event async for event in session.events() if event.turn == turn.id]


async def logged(session: Session, turn: Turn, kind: str, text: str = "") -> None:
    """Wait until the log has an event of this kind in a turn, with this text in it."""
    async with asyncio.timeout(WAIT_SECONDS_MAX):
        async for event in session.follow():
            if (event.turn, event.kind) == (turn.id, kind) and text.encode() in event.data:
                return
    raise AssertionError("the session was closed before that")
