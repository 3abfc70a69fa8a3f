"""A planned restart, or a crash, while the agent runs as another user than its hosts.

The next host needs the process, and the right to end it with its tool, which has a session of its own and ignores TERM.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.process import other_user
from tests.process.helpers import NOBODY, alive, wait_until
from tests.sessions.helpers import bodies
from tests.sessions.test_hand_over import HOLD_SECONDS, Scene, opened, state
from tests.thorough import thorough

from banksman import sockets
from banksman.core.session import event as kinds
from banksman.folders import held_folder
from banksman.testing import fake_agent

__all__ = ["state"]
pytestmark = [thorough, pytest.mark.skipif(other_user.why_not() != "", reason=other_user.why_not())]

TOOL = """setsid sh -c 'trap "" TERM HUP; sleep 1000; sleep 1000' "$0" & exec "$@" """
SURVIVAL = {"restart": (), "crash": ("crash", HOLD_SECONDS)}
SHORT_SECONDS = 0.5


@pytest.fixture
def place(state: Path) -> Generator[Path]:
    """A folder in which the other user may write."""
    assert state
    with other_user.folder() as folder:
        yield folder


@asynccontextmanager
async def of_nobody(place: Path, marker: str, *survival: object) -> AsyncGenerator[Scene]:
    folder = place / "it"
    folder.mkdir()
    os.chown(folder, NOBODY, NOBODY)
    fake = fake_agent.command(evidence=folder / "evidence", memory=folder / "memory")
    command = ["sh", "-c", TOOL, marker, *other_user.reachable(fake, place), marker]
    how = {"command": command, "cwd": str(folder), "user": "nobody", "survival": survival}
    async with opened(folder, marker, **how) as it:
        yield it


def users(marker: str) -> set[int]:
    return {os.stat(f"/proc/{pid}").st_uid for pid in agents(marker)}


def agents(marker: str) -> list[int]:
    """The agent and its tool, without the hosts, which have the word in their environment only."""
    found = alive(marker)
    assert len(found) >= 2
    return found


async def end_host(it: Scene, how: str) -> None:
    if how == "crash":
        # The agent may have reached its pause before the host has noted that its prompt is written.
        await it.host.ping()
        it.host.kill()
    else:
        await it.leave()


@pytest.mark.parametrize("end", ["close", "interrupt"])
@pytest.mark.parametrize("how", SURVIVAL)
async def test_turn_of_another_user_goes_on_and_its_tree_ends_with_it(
    place: Path, marker: str, how: str, end: str
) -> None:
    async with of_nobody(place, marker, *SURVIVAL[how]) as it:
        turns = [await it.ask("@@say one\n@@touch {at}/reached\n@@wait {at}/go\n@@say two"), await it.ask("@@hang")]
        await it.reached()
        before = sorted(agents(marker))
        for _ in range(2):
            await end_host(it, how)
            await it.come()
        assert sorted(agents(marker)) == before
        assert users(marker) == {NOBODY}
        it.go()
        assert await it.results(turns[:1]) == [["done", "two"]]
        if end == "interrupt":
            assert await it.host.call("stop", session=it.session, turn=turns[1])
            assert await it.results(turns[1:]) == [["interrupted", None]]
        events = await it.end()
        assert alive(marker) == []
        assert len(bodies(events, kinds.PROCESS_ADOPTED)) == 2


async def test_tree_of_another_user_ends_when_the_next_host_dies(place: Path, marker: str) -> None:
    async with of_nobody(place, marker) as it:
        await it.ask("@@touch {at}/reached\n@@hang")
        await it.reached()
        await it.restart()
        assert users(marker) == {NOBODY}
        it.host.kill()
        wait_until(lambda: not alive(marker), "the end of the agent's tree")


@pytest.mark.parametrize("how", SURVIVAL)
async def test_tree_of_another_user_ends_when_no_host_comes(place: Path, marker: str, how: str) -> None:
    survival = ("crash", SHORT_SECONDS) if how == "crash" else ()
    async with of_nobody(place, marker, *survival) as it:
        await it.ask("@@touch {at}/reached\n@@hang")
        await it.reached()
        agents(marker)
        if how == "crash":
            it.host.kill()
        else:
            await it.leave(SHORT_SECONDS)
        wait_until(lambda: not alive(marker), "the end of the agent's tree")
        wait_until(lambda: not list(held_folder().glob(f"*{sockets.SUFFIX}")), "the end of the hold")
