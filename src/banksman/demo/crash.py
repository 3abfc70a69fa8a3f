"""A host is killed in the middle of a turn, and another one goes on where it was.

The first host is a process of its own, with a store in a file. It is killed by SIGKILL while its agent speaks, with a
second ask waiting. What the log says then is read by this process, which opens the session by its name: the turn that
was open is UNKNOWN, the one that waited runs, and nothing is left of the first one's processes.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import banksman
from banksman import Host
from banksman.core.session import event as kinds

# Speaks for a long while when it is first asked, and repeats what it is told otherwise.
SCRIPT = {"prompt 1": ["stream 1000 0.02"]}
FAKE = Path(banksman.__file__).parent / "testing" / "fake_agent" / "__main__.py"


def command(folder: str) -> list[str]:
    return [
        *(sys.executable, "-I", "-S", str(FAKE)),
        f"--fake-script={json.dumps(SCRIPT)}",
        f"--fake-memory={folder}/memory",
    ]


async def host(folder: str) -> None:
    """The one that is killed: it says so when its agent has begun to speak."""
    async with Host(f"sqlite:{folder}/store.db") as owner:
        session = await owner.open("claude", name="tour", command=command(folder))
        turn = await session.ask("Tell me everything")
        await session.ask("And now the short version")
        async for _ in turn:
            print("speaking", flush=True)


async def take_over(folder: str) -> None:
    """The other one: it opens the session by its name, and waits for the ask that had waited."""
    async with Host(f"sqlite:{folder}/store.db") as owner:
        session = await owner.open("claude", name="tour", command=command(folder))
        status = session.status()
        [waiting] = [ask.turn for ask in status.queue] or [status.holder or ""]
        await (await session.turn(waiting)).outcome()
        async for event in session.events():
            if event.kind == kinds.TURN_ENDED:
                body = event.body
                print(f"   {event.cursor:6} {event.kind}  {body['outcome']:8} {body['text'] or body['error']}")


def tour() -> None:
    print("3. A host is killed by SIGKILL in the middle of a turn, and another goes on")
    with tempfile.TemporaryDirectory() as folder:
        argv = [sys.executable, "-m", "banksman.demo.crash", folder]
        with subprocess.Popen(argv, stdout=subprocess.PIPE) as first:
            assert first.stdout is not None
            first.stdout.readline()
            first.kill()
        print(f"   process {first.pid}, the first host, was killed while its agent spoke; a second ask waited")
        asyncio.run(take_over(folder))
    print("   what was open is UNKNOWN, for it may have been done; the ask that waited was kept, and has run")


if __name__ == "__main__":
    asyncio.run(host(sys.argv[1]))
