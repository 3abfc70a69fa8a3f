"""Several sessions of one host, each with a fake agent in a folder, and one common memory of conversations.

While the sessions live, each event of any of them triggers a count of the agents' processes in `/proc`.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.sessions.helpers import QUICK, Case, Script

from banksman import Event, Host, Kind, Session
from banksman.core.session import event as kinds
from banksman.core.session.state import ProcessPhase
from banksman.testing import checks, fake_agent
from banksman.testing.fake_agent import Process


class Member(Case):
    """One session of the crowd.

    A fork starts with the same command as its original, and leaves its evidence in the same folder. The logs then tell
    which process belongs to which session.
    """

    def __init__(self, host: Host, session: Session, folder: Path) -> None:
        super().__init__(host, session, folder)
        self.pids: list[int] = []
        self.shares_folder = False

    @property
    def processes(self) -> list[Process]:
        found = super().processes
        return [process for process in found if process.pid in self.pids] if self.shares_folder else found


class Crowd:
    def __init__(self, host: Host, folder: Path) -> None:
        self.host = host
        self.folder = folder
        self.cases: list[Member] = []
        # At any event: the number of processes, and the number of processes that were not ready.
        self.most_alive = 0
        self.most_starting = 0
        self.watchers: list[asyncio.Task[None]] = []

    def command(self, folder: str, script: Script = ()) -> list[str]:
        return fake_agent.command(script, evidence=self.folder / folder / "evidence", memory=self.folder / "memory")

    async def open(
        self,
        folder: str,
        /,
        script: Script = (),
        *,
        options: Mapping[str, Any] | None = None,
        command: list[str] | None = None,
        **how: Any,
    ) -> Member:
        """Open a session with an agent in this folder."""
        command = command or self.command(folder, script)
        session = await self.host.open("claude", command=command, options={**QUICK, **(options or {})}, **how)
        known = next((case for case in self.cases if case.session is session), None)
        return known or self._add(session, self.folder / folder)

    async def fork(self, original: Member, **how: Any) -> Member:
        forked = self._add(await self.host.fork(original.session, **how), original.folder)
        original.shares_folder = forked.shares_folder = True
        return forked

    def _add(self, session: Session, folder: Path) -> Member:
        folder.mkdir(exist_ok=True)
        case = Member(self.host, session, folder)
        self.cases.append(case)
        self.watchers.append(asyncio.create_task(self._watch(case)))
        return case

    async def _watch(self, case: Member) -> None:
        async for event in case.session.follow():
            if event.kind == kinds.PROCESS_STARTED:
                case.pids.append(event.body["pid"])
            self.most_alive = max(self.most_alive, len(self.alive()))
            self.most_starting = max(self.most_starting, sum(_is_starting(other) for other in self.cases))

    def alive(self) -> list[int]:
        """Return the pids of all agents of the crowd, from the kernel."""
        mark = f"--fake-memory={self.folder / 'memory'}".encode()
        found: list[int] = []
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                try:
                    with open(f"/proc/{entry}/cmdline", "rb") as file:
                        words = file.read().split(b"\0")
                except OSError:
                    continue  # The process has just ended.
                if mark in words:
                    found.append(int(entry))
        return found

    async def close(self) -> None:
        """Close all sessions, and check everything that they left."""
        for case in self.cases:
            case.session.close_nowait()
        for case in self.cases:
            await case.session.wait_closed()
        await asyncio.gather(*self.watchers)
        for case in self.cases:
            _check(case, await case.events())
        assert self.alive() == []


def _check(case: Member, events: Sequence[Event]) -> None:
    """Check like `helpers.check`, also where some processes are not fake agents and left no evidence."""
    checks.log(events)
    checks.turns(events)
    checks.outcomes(events, case.outcomes)
    checks.attribution(events)
    given = {process.pid: process.stdin for process in case.processes}
    checks.stdin(events, [given.get(pid, b"") for pid in case.pids])


def _is_starting(case: Case) -> bool:
    """Return whether the process exists and has not answered the handshake."""
    return bool(case.session.status().pids) and case.state().process.phase is ProcessPhase.STARTING


@asynccontextmanager
async def crowd(folder: Path, **limits: Any) -> AsyncGenerator[Crowd]:
    """Start a host with these limits. At the end close and check all sessions."""
    async with Host(**limits) as host:
        them = Crowd(host, folder)
        yield them
        await them.close()


async def recalled(case: Case) -> list[str]:
    """Return every prompt that the agent remembers, without the prompt that asks for them."""
    outcome = await case.answer("@@recall")
    assert outcome.kind is Kind.DONE, outcome
    *known, _ = json.loads(outcome.text or "")
    return known


async def retired(case: Case) -> str:
    """Wait until a process is retired and has exited, and return the reason."""
    event = await case.wait_kind(kinds.PROCESS_RETIRED)
    await case.wait_event(lambda e: e.kind == kinds.PROCESS_EXITED, event.seq)
    return event.body["reason"]


def argv(case: Case, number: int) -> list[str]:
    """Return the argv of the process with this number, from 1, without the words of the fake agent."""
    return [word for word in case.processes[number - 1].argv if not word.startswith("--fake-")]


def tasks(*names: str) -> str:
    """Return the frame by which an agent reports its background tasks."""
    frame = {"type": "system", "subtype": "background_tasks_changed", "tasks": [{"task_id": name} for name in names]}
    return json.dumps(frame, separators=(",", ":"))
