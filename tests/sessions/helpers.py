"""Common parts of the session tests: a session with a fake agent, quick timings, and checks of the result."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from banksman import Event, Host, Outcome, Session, Turn
from banksman.core.session import event as kinds
from banksman.testing import checks, fake_agent
from banksman.testing.fake_agent import Evidence, Process

Script = Mapping[str, Sequence[str]] | Sequence[str]

# The rungs of the ladder follow each other immediately. The time limits of a turn are unchanged, so that a slow machine
# does not look like a slow agent.
QUICK = {"eof_grace": 0.1, "grace": 2.0, "linger": 0.05}
# For tests in which the drain of an interrupted turn expires.
SHORT_DRAIN = {"drain_seconds": 0.3}


class Case:
    """Session with a fake agent, in a separate folder."""

    def __init__(self, host: Host, session: Session, folder: Path) -> None:
        self.host = host
        self.session = session
        self.folder = folder
        self.evidence = Evidence(folder / "evidence")
        self.outcomes: dict[str, Outcome] = {}

    @property
    def processes(self) -> list[Process]:
        return self.evidence.processes

    def path(self, name: str) -> Path:
        return self.folder / name

    async def ask(self, prompt: str, **how: Any) -> Turn:
        return await self.session.ask(prompt, **how)

    async def outcome(self, turn: Turn) -> Outcome:
        outcome = await turn.outcome()
        self.outcomes[turn.id] = outcome
        return outcome

    async def answer(self, prompt: str, **how: Any) -> Outcome:
        """Ask, and wait for the outcome."""
        return await self.outcome(await self.ask(prompt, **how))

    async def running(self, prompt: str, **how: Any) -> Turn:
        """Start a turn that says its text and then waits for an interrupt."""
        return await self.reaches(f"{prompt}\n@@say {prompt}\n@@hang", **how)

    async def reaches(self, prompt: str, **how: Any) -> Turn:
        """Ask, and return when the agent has reached the last step of the prompt."""
        *before, last = prompt.split("\n")
        mark = self.path(f"reached-{len(list(self.folder.glob('reached-*')))}")
        turn = await self.ask("\n".join([*before, f"@@touch {mark}", last]), **how)
        await self.reached(mark)
        return turn

    async def reached(self, mark: Path) -> None:
        """Wait until the agent has created this file, and read everything that it said before."""
        await exists(mark)
        process = self.session._driver.process.driven  # pyright: ignore[reportPrivateUsage]
        if process is not None:
            process.agent.look_now()

    async def wait_event(self, is_wanted: Callable[[Event], bool], after: int = 0) -> Event:
        """Wait for the first event for which `is_wanted` is true."""
        async for event in self.session.events(after, waits=True):
            if is_wanted(event):
                return event
        raise AssertionError("the session was closed before that")

    async def wait_kind(self, kind: str, turn: Turn | None = None) -> Event:
        return await self.wait_event(lambda e: e.kind == kind and (turn is None or e.turn == turn.id))

    async def wait_said(self, text: str) -> Event:
        return await self.wait_event(lambda e: e.kind == kinds.UPDATE and text.encode() in e.data)

    async def events(self) -> list[Event]:
        """Return the present events of the log."""
        return [event async for event in self.session.events(0, waits=False)]

    async def kinds(self) -> list[str]:
        return [event.kind for event in await self.events()]

    def state(self) -> Any:
        return self.session._driver.state  # pyright: ignore[reportPrivateUsage]


async def exists(path: Path) -> None:
    """Wait for a file. No event reports its creation, so the function polls."""
    while not path.exists():  # noqa: ASYNC110
        await asyncio.sleep(0.002)


def let_pass(seconds: float) -> None:
    """Move the clock of the running loop ahead.

    All decisions of the driver by time see these seconds immediately, and a busy machine adds nothing to them.
    """
    loop = asyncio.get_running_loop()
    now = loop.time
    loop.time = lambda: now() + seconds


def touch(path: Path) -> None:
    path.touch()


@asynccontextmanager
async def opened(
    folder: Path,
    script: Script = (),
    *,
    memory: bool = False,
    options: Mapping[str, Any] | None = None,
    is_checked: bool = True,
    host: Host | None = None,
    **how: Any,
) -> AsyncGenerator[Case]:
    """Open a session with a fake agent and this script. At the end close it, and check everything that it left."""
    folder.mkdir(exist_ok=True)
    command = fake_agent.command(script, evidence=folder / "evidence", memory=folder / "memory" if memory else None)
    async with host or Host() as owner:
        session = await owner.open("claude", command=command, options={**QUICK, **(options or {})}, **how)
        case = Case(owner, session, folder)
        yield case
        await session.close()
        if is_checked:
            check(case, await case.events())


def check(case: Case, events: Sequence[Event]) -> None:
    """Check every guarantee that is visible from outside, for a closed session."""
    checks.log(events)
    checks.turns(events)
    checks.outcomes(events, case.outcomes)
    checks.attribution(events)
    checks.stdin(events, [process.stdin for process in case.processes])


def sent(case: Case) -> list[dict[str, Any]]:
    """Return every frame to the agent's processes, in order."""
    return [frame for process in case.processes for frame in checks.frames(process.stdin, may_be_cut=True)]


def prompts(case: Case) -> list[str]:
    """Return the first line of each prompt to the agent, in order."""
    return [
        str(content).partition("\n")[0]
        for process in case.processes
        for content in checks.prompts(process.stdin, may_be_cut=True)
    ]


def requests(case: Case, subtype: str) -> list[dict[str, Any]]:
    """Return the requests of this kind to the agent's processes, in order."""
    asked = [frame["request"] for frame in sent(case) if frame.get("type") == "control_request"]
    return [request for request in asked if request["subtype"] == subtype]


def answers(case: Case) -> list[dict[str, Any]]:
    """Return the answers to the requests of the agent's processes, in order."""
    return [frame["response"] for frame in sent(case) if frame.get("type") == "control_response"]


def requesting(subtype: str, **body: Any) -> str:
    """Return the line of a prompt by which the agent makes a request, and waits for the answer."""
    return f"@@request {json.dumps({'subtype': subtype, **body})}"


def interrupts(case: Case) -> int:
    return len(requests(case, "interrupt"))


def ended(events: Sequence[Event], turn: Turn) -> dict[str, Any]:
    """Return the event body with which a turn ended."""
    return next(event.body for event in events if event.kind == kinds.TURN_ENDED and event.turn == turn.id)


def bodies(events: Sequence[Event], kind: str) -> list[dict[str, Any]]:
    return [json.loads(event.data) for event in events if event.kind == kind]
