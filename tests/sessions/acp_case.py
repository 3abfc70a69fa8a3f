"""Session with a fake ACP agent, for the ACP tests."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.sessions.helpers import QUICK, Case, check

from banksman import Event, Host
from banksman.core.session import event as kinds
from banksman.testing import fake_acp


@asynccontextmanager
async def opened(
    folder: Path,
    *,
    agent: str = "custom",
    options: Mapping[str, Any] | None = None,
    host: Host | None = None,
    character: Mapping[str, Any] | None = None,
    **how: Any,
) -> AsyncGenerator[Case]:
    """Open a session with an agent of this character. At the end close it, and check everything that it left."""
    folder.mkdir(exist_ok=True)
    command = fake_acp.command(evidence=folder / "evidence", memory=folder / "memory", **(character or {}))
    async with host or Host() as owner:
        session = await owner.open(agent, command=command, cwd=str(folder), options={**QUICK, **(options or {})}, **how)
        case = Case(owner, session, folder)
        yield case
        await session.close()
        check(case, await case.events())


async def killed(case: Case) -> None:
    """Kill the agent's process, and wait until the session knows it."""
    os.kill(case.processes[-1].pid, signal.SIGKILL)
    await case.wait_kind(kinds.PROCESS_EXITED)


def known(monkeypatch: pytest.MonkeyPatch, folder: Path, quirks: str) -> str:
    """Write a user profile with these quirks, and return the name of its agent."""
    agents = folder / "config" / "banksman" / "agents"
    agents.mkdir(parents=True)
    (agents / "toy.toml").write_text(f'title = "Toy"\nextends = "custom"\n[quirks]\n{quirks}\n')
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder / "config"))
    return "toy"


def sent(case: Case) -> list[dict[str, Any]]:
    """Return every message to the agent's processes, in order."""
    return [frame for process in case.processes for frame in process.frames]


def methods(case: Case, *, but: tuple[str, ...] = ("initialize", "session/prompt")) -> list[str]:
    """Return the methods of the requests to the agent, in order."""
    return [frame["method"] for frame in sent(case) if "method" in frame and frame["method"] not in but]


def replies(case: Case) -> list[Any]:
    """Return the replies to the agent's requests, in order."""
    return [frame.get("result", frame.get("error")) for frame in sent(case) if "method" not in frame]


def bodies(events: list[Event], kind: str) -> list[Any]:
    return [event.body for event in events if event.kind == kind]


def texts(events: list[Event], kind: str = kinds.UPDATE) -> str:
    """Return the frames of this kind as one text."""
    return " ".join(event.data.decode() for event in events if event.kind == kind)
