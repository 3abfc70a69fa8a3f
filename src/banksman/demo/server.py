"""The server with somebody in it: scripted agents at work in three sessions, so that there is something to see and do.

It is the server itself, at its usual address, and nothing about the sessions is special. One shows a chore that gives
way to an urgent question and then a permission that waits for whoever answers it; one works in the background, with
asks that wait; one has an agent that does not stop when it is told to, and is stopped.

What is said here is kept in a store of its own, so that a demonstration leaves nothing among one's own sessions.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence

from banksman import BACKGROUND, INTERACTIVE, Host, Session
from banksman.demo import cast
from banksman.folders import state_folder
from banksman.server import main, server_settings

NAME = "fix-ci"


def serve(port: str) -> int:
    """`port` empty: the usual one."""
    flags = {"port": int(port) if port else None, "store": f"sqlite:{state_folder() / 'demo.db'}"}
    return main.run(server_settings.load(None, flags), then=_play)


async def _play(host: Host, _url: str) -> None:
    banksman = os.path.join(os.path.dirname(sys.executable), "banksman")
    print(
        f"Scripted agents are at work in three sessions. Open the address in a browser, or in another terminal:\n"
        f"  {banksman} top\n"
        f"  {banksman} attach {NAME}\n"
        f"  {banksman} why {NAME}\n"
        f"  {banksman} answer {NAME} allow     (it asks for a permission, and waits)\n"
        f"  {banksman} interrupt translate\n"
        "Ctrl-C ends it: what runs may finish; a second one does not wait. What was said is kept.",
        flush=True,
    )
    async with asyncio.TaskGroup() as together:
        together.create_task(_give_way(host))
        together.create_task(_work(host))
        together.create_task(_be_stubborn(host))


async def _give_way(host: Host) -> None:
    session = await host.open("claude", name=NAME, command=_agent(cast.FIX_CI))
    chore = await session.ask("Tidy up the imports.", priority=BACKGROUND, on_preempt="requeue")
    await _heard(session, b"import what they")
    await session.ask("Is main green?", priority=INTERACTIVE)
    await chore.outcome()
    await session.ask("Run the tests.")


async def _work(host: Host) -> None:
    session = await host.open("claude", name="translate", command=_agent(cast.TRANSLATE))
    for chapter in (1, 2, 3):
        await session.ask(f"Translate chapter {chapter} of the manual.", priority=BACKGROUND)


async def _be_stubborn(host: Host) -> None:
    patience = {"drain_seconds": 1.5, "grace": 1.0}
    session = await host.open("claude", name="stubborn", command=_agent(cast.STUBBORN), options=patience)
    turn = await session.ask("Count to a million.")
    await _heard(session, b"tick9 ")
    await turn.interrupt()
    await session.ask("Are you still there?")


def _agent(script: Mapping[str, Sequence[str]]) -> list[str]:
    return cast.command(script, state_folder() / "demo-agents")


async def _heard(session: Session, words: bytes) -> None:
    """Until the agent has said this, from now on."""
    async for event in session.follow(await session.head()):
        if event.kind == "update" and words in event.data:
            return
