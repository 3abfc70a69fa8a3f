"""The store moves to another file system while a process waits for its next host, so it is another store.

A move and a copy look the same. The next host leaves the process to its keeper, which ends it when the hold is over.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest
from tests.sessions.helpers import bodies
from tests.sessions.test_hand_over import SHORT_SECONDS, Scene, hanging, opened, served_after_loss, spoken, state
from tests.thorough import thorough

from banksman import Host
from banksman.core.session import event as kinds
from banksman.process import orphans

pytestmark = thorough

__all__ = ["state"]
SURVIVAL = {"restart": (), "crash": ("crash", SHORT_SECONDS)}


def move(it: Scene) -> None:
    """Move the store and its other files, as to another file system: each is copied and removed."""
    folder = it.path("moved")
    folder.mkdir()
    for file in list(it.folder.glob(f"{it.store.name}*")):
        shutil.copy(file, folder)
        file.unlink()
    it.store = folder / it.store.name


async def end_host(it: Scene, how: str) -> None:
    if how == "crash":
        # The agent may have reached its pause before its words are in the log.
        while not any(b'"one"' in data for _kind, data in spoken(await it.events())):
            await it.host.ping()
        it.host.kill()
    else:
        await it.leave(SHORT_SECONDS)


@pytest.mark.parametrize("how", SURVIVAL)
async def test_process_is_dead_and_turn_unknown_when_the_store_was_moved(state: Path, marker: str, how: str) -> None:
    async with opened(state / "it", marker, survival=SURVIVAL[how]) as it:
        turns = await hanging(it)
        began = time.monotonic()
        await end_host(it, how)
        move(it)
        await served_after_loss(it, turns)
        # It was not killed by the next host: the store may be a copy, and the process that of the original.
        assert time.monotonic() - began >= SHORT_SECONDS


@pytest.mark.parametrize("how", SURVIVAL)
async def test_host_of_a_moved_store_waits_for_holds_that_are_longer_than_any_grace(
    state: Path, marker: str, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(orphans, "KEEPER_SECONDS_MAX", 0.5)
    async with opened(state / "it", marker, survival=SURVIVAL[how]) as it:
        turns = await hanging(it)
        await end_host(it, how)
        move(it)
        async with Host(f"sqlite:{it.store}") as host:
            await host.take_up()
            outcomes = [await (await host.session(it.session).turn(turn)).outcome() for turn in turns]
            assert [outcome.kind.value for outcome in outcomes] == ["unknown", "done"]
            await host.session(it.session).close()
        assert bodies(await it.events(), kinds.PROCESS_ADOPTED) == []
        assert it.agents.alive() == []
