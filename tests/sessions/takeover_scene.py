"""Common parts of the take-over tests: a session on a host that is killed, and checks of its log."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

from tests.sessions.crash_host import Agents, Remote, keepers, marked, remote
from tests.sessions.helpers import QUICK, bodies, exists

from banksman import Event, Host, Kind, Session
from banksman.core.session import event as kinds
from banksman.testing import checks

NAME = "the one"
# A child that ignores TERM lives until the end of the grace.
SHORT = {**QUICK, "grace": 0.3}
PATIENCE_SECONDS = 60.0


class Scene:
    """Store, a host on it that is killed, and its session."""

    def __init__(self, folder: Path, agents: Agents, host: Remote, session: str) -> None:
        self.folder = folder
        self.agents = agents
        self.host = host
        self.session = session
        # The accepted asks, in order.
        self.accepted: list[str] = []

    @property
    def store(self) -> Path:
        return self.folder / "store.db"

    def path(self, name: str) -> Path:
        return self.folder / name

    async def ask(self, prompt: str, **how: Any) -> str:
        turn = await self.host.ask(self.session, prompt, **how)
        self.accepted.append(turn)
        return turn

    async def reaches(self, prompt: str, **how: Any) -> str:
        """Ask, and return when the agent has reached the last line of the prompt."""
        *before, last = prompt.split("\n")
        turn = await self.ask("\n".join([*before, f"@@touch {self.path('reached')}", last]), **how)
        await exists(self.path("reached"))
        return turn

    async def logged(self, kind: str, turn: str | None = None, data: bytes = b"") -> Event:
        """Wait until the log has such an event, as another host reads it."""
        async with Host(f"sqlite:{self.store}") as reader, aclosing(reader.session(self.session).follow()) as events:
            async for event in events:
                if event.kind == kind and turn in (None, event.turn) and data in event.data:
                    return event
        raise AssertionError(f"the session was closed without {kind}")

    def kill(self) -> None:
        self.host.kill()


@asynccontextmanager
async def scene(
    folder: Path, marker: str, script: Sequence[str] = (), *, tool: bool = False, **how: Any
) -> AsyncGenerator[Scene]:
    agents = Agents(folder, marker)
    async with remote(folder / "store.db", marker) as host:
        how = {"name": NAME, "options": SHORT, **how}
        session = await host.open(command=agents.command("-dead", script, tool=tool), **how)
        yield Scene(folder, agents, host, session)
        await gone(host.pid, marker)


async def gone(pid: int, marker: str) -> None:
    """Wait until nothing is left of a killed host. Its zygote ends last, and no event reports it."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while keepers(pid) or marked(marker):  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def reopen(host: Host, agents: Agents) -> Session:
    """Take the session over. None of the dead host's agents is left at that point."""
    session = await host.open("claude", name=NAME, command=agents.command("-next"), options=QUICK)
    assert agents.alive("-dead") == []
    return session


async def read(session: Session) -> list[Event]:
    return [event async for event in session.events(0)]


async def outcomes(session: Session, turns: Sequence[str]) -> list[Kind]:
    return [(await (await session.turn(turn)).outcome()).kind for turn in turns]


async def recalled(session: Session) -> list[str]:
    """Return the first line of each prompt that the agent remembers, without the prompt that asks for them."""
    outcome = await (await session.ask("@@recall")).outcome()
    *known, _ = json.loads(outcome.text or "")
    return [prompt.partition("\n")[0] for prompt in known]


def check(events: Sequence[Event], agents: Agents, accepted: Sequence[str]) -> None:
    """Check the rules that hold for a log after any number of killed hosts."""
    checks.log(events)
    checks.turns(events)
    checks.attribution(events)
    ends = [event.turn for event in events if event.kind == kinds.TURN_ENDED]
    assert len(ends) == len(set(ends))
    assert set(accepted) <= set(ends)
    _check_sent(events, agents)
    _check_unknown(events)


def _check_sent(events: Sequence[Event], agents: Agents) -> None:
    """Check that each prompt was sent after its start was in the log, and at most once."""
    started = {event.turn for event in events if event.kind == kinds.TURN_STARTED}
    # Another attempt has another ref, which differs only at its end.
    turns = {event.body["ref"][:-4]: event.turn for event in events if event.kind == kinds.TURN_QUEUED}
    given = [
        frame["uuid"]
        for process in agents.evidence.processes
        for frame in checks.frames(process.stdin, may_be_cut=True)
        if frame.get("type") == "user"
    ]
    assert len(given) == len(set(given)), "a prompt was sent again"
    assert {turns[ref[:-4]] for ref in given} <= started


def _check_unknown(events: Sequence[Event]) -> None:
    """Check that only begun turns are UNKNOWN, and that a recovery event names each of them."""
    started = {event.turn for event in events if event.kind == kinds.TURN_STARTED}
    joined = {id for body in bodies(events, kinds.TURN_STARTED) for id in body.get("joined") or ()}
    unknown = [event.turn for event in events if event.kind == kinds.TURN_ENDED and event.body["outcome"] == "unknown"]
    assert set(unknown) <= started | joined
    assert [id for body in bodies(events, kinds.SESSION_RECOVERED) for id in body["unknown"]] == unknown
