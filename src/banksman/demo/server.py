"""The server with somebody in it: a scripted agent at work in a session, so that there is something to see and to do.

It is the server itself, at its usual address and with its usual store, and nothing about the session is special: a
chore in the background, an urgent question that it gives way to, and a permission that waits for whoever answers it.
"""

from __future__ import annotations

import os
import sys

from banksman import BACKGROUND, INTERACTIVE, Host
from banksman.demo.session import AGENT
from banksman.serve import main, settings

NAME = "demo"


def serve(port: str) -> int:
    """`port` empty: the usual one."""
    flags = {"port": int(port) if port else None}
    return main.run(settings.load(None, flags), then=_play)


async def _play(host: Host, _url: str) -> None:
    session = await host.open("claude", name=NAME, command=AGENT)
    banksman = os.path.join(os.path.dirname(sys.executable), "banksman")
    print(
        f"A scripted agent is at work in the session {NAME!r}. Open the address in a browser, or in another terminal:\n"
        f"  {banksman} ps\n"
        f"  {banksman} log {NAME} --follow\n"
        f"  {banksman} why {NAME}\n"
        f"  {banksman} answer {NAME} allow     (it asks for a permission, and waits)\n"
        f"  {banksman} ask {NAME} 'Hello?'\n"
        "Ctrl-C ends it: what runs may finish; a second one does not wait. What was said is kept.",
        flush=True,
    )
    # It works on this until it is interrupted, and has time to say something before the next one comes.
    chore = await session.ask("Tidy up.", priority=BACKGROUND, on_preempt="requeue")
    async for event in session.follow(await session.head()):
        if event.kind == "update" and b"tick9 " in event.data:
            break
    await session.ask("What time is it?", priority=INTERACTIVE)
    await chore.outcome()
    await session.ask("Run the tests.")
