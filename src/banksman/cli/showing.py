"""`banksman serve --demo`: a session with a scripted agent, to look at without a key and without a network.

The agent is the one of `banksman.testing`, run as the process it is. It works a little, wants a permission, and from
then on says back what it is told.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import banksman
from banksman import Host

NAME = "demo"
SCRIPT = {
    "prompt 1": ["think Where to begin?", "stream 20 0.1 word", 'ask Bash {"command": "make test"}', "say All green."],
}


def command() -> list[str]:
    # By its path: it is a program, and nothing here depends on what is in it.
    program = Path(banksman.__file__).parent / "testing" / "fake_agent" / "__main__.py"
    return [sys.executable, "-I", "-S", str(program), f"--fake-script={json.dumps(SCRIPT)}"]


async def show(host: Host, url: str) -> None:
    session = await host.open("claude", name=NAME, command=command())
    # With a key: a server that is started again on the same store finds the turn, and does not ask for another.
    await session.ask("Show what you can do.", key="demo")
    print(f"Its agent is a scripted one. Try: banksman ask {NAME} hello", flush=True)
