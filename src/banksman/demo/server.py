"""Demo server: scripted agents at work in three sessions, so that there is something to see.

This is the normal server at its usual address, and nothing about the sessions is special:

- `fix-ci`: an urgent question preempts a chore. Then a permission waits for an answer.
- `translate`: an agent works in the background while further asks wait.
- `stubborn`: an agent ignores an interrupt, so the host kills it.

The agents are real processes. They choose their answer by the text of the prompt, so a repeated
prompt gets the same answer: a requeued chore, or a prompt that the user sends again. The sessions
live in a separate store, so the demo leaves nothing among the user's sessions.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Mapping, Sequence

from banksman import BACKGROUND, INTERACTIVE, Host, Session
from banksman.demo import fake_agent
from banksman.folders import state_folder
from banksman.server import main, server_settings

NAME = "fix-ci"
# Seconds per word: about the speed of reading.
PACE = 0.06

_OLD = "import os, sys, json\n\n\ndef load(path):\n    return json.load(open(path))\n"
_NEW = (
    "import json\nfrom pathlib import Path\n\n\n"
    "def load(path: Path) -> object:\n    return json.loads(path.read_text())\n"
)
_PLAN = ("Find the unused imports", "Remove them, file by file", "Run the tests")

_FOUND = (
    "src/app/load.py:1: import os, sys, json\n"
    "src/app/main.py:3: import re\n"
    "tests/test_load.py:2: import time"
)
_EDIT = {"file_path": "src/app/load.py", "old_string": _OLD, "new_string": _NEW}
TRANSLATE: Mapping[str, Sequence[str]] = {
    "prompt": ["stream 2000 0.2 page "],
}
# This agent ignores interrupts and TERM, so the host has to climb the ladder to KILL.
STUBBORN: Mapping[str, Sequence[str]] = {
    "process": ["ignore term"],
    "prompt Count to a million.": ["on_interrupt ignored", "stream 2000 0.1"],
}


def _todo(done: int) -> str:
    states = ["completed"] * done + ["in_progress"] + ["pending"] * len(_PLAN)
    todos = [{"content": text, "status": state} for text, state in zip(_PLAN, states, strict=False)]
    return f"tool_use TodoWrite {json.dumps({'todos': todos})}"


FIX_CI: Mapping[str, Sequence[str]] = {
    "prompt Tidy up the imports.": [
        (
            "think Which imports are unused? "
            "A search tells; then one file after the other, and the tests at the end."
        ),
        _todo(0),
        "tool_result",
        f"tool_use Grep {json.dumps({'pattern': '^import', 'path': 'src'})}",
        f"tool_result {_FOUND}",
        _todo(1),
        "tool_result",
        f"speak {PACE} Three files import what they do not use. "
        "I begin with `src/app/load.py`: `os` and `sys` are used nowhere, "
        "and the file that `open` returns is never closed, so I take `Path.read_text` instead.",
        f"tool_use Edit {json.dumps(_EDIT)}",
        "tool_result The file src/app/load.py has been updated.",
        f"speak {PACE} The other two are one line each:\n\n"
        "| file | unused |\n|---|---|\n| `src/app/main.py` | `re` |\n"
        "| `tests/test_load.py` | `time` |\n\nBoth are removed. **Nothing else was touched.**",
        _todo(3),
        "tool_result",
    ],
    "prompt Is main green?": [
        f"speak {PACE} Not quite: `test_load` fails since this morning, "
        "because the file is still open when the folder is removed. "
        "The chore that I gave way for repairs exactly that.",
    ],
    "prompt Run the tests.": [
        f"speak {PACE} For that I need your permission:",
        'ask Bash {"command": "make test", "description": "Run every test"}',
        f"speak {PACE} All green: 214 passed in 9.8 s.",
    ],
}


def serve(port: str) -> int:
    """Run the demo server. `port`: empty for the usual one."""
    flags = {"port": int(port) if port else None, "store": f"sqlite:{state_folder() / 'demo.db'}"}
    return main.run(server_settings.load(None, flags), then=_play)


async def _play(host: Host, _url: str) -> None:
    banksman = os.path.join(os.path.dirname(sys.executable), "banksman")
    print(
        "Scripted agents work in three sessions. "
        "Open the address in a browser, or run in another terminal:\n"
        f"  {banksman} top\n"
        f"  {banksman} attach {NAME}\n"
        f"  {banksman} why {NAME}\n"
        f"  {banksman} answer {NAME} allow     (the agent waits for a permission)\n"
        f"  {banksman} interrupt translate\n"
        "Ctrl-C stops the server after running turns finish; "
        "a second Ctrl-C stops it at once. The sessions are kept.",
        flush=True,
    )
    async with asyncio.TaskGroup() as together:
        together.create_task(_give_way(host))
        together.create_task(_work(host))
        together.create_task(_be_stubborn(host))


async def _give_way(host: Host) -> None:
    session = await host.open("claude", name=NAME, command=_agent(FIX_CI))
    chore = await session.ask("Tidy up the imports.", priority=BACKGROUND, on_preempt="requeue")
    await _heard(session, b"import what they")
    await session.ask("Is main green?", priority=INTERACTIVE)
    await chore.outcome()
    await session.ask("Run the tests.")


async def _work(host: Host) -> None:
    session = await host.open("claude", name="translate", command=_agent(TRANSLATE))
    for chapter in (1, 2, 3):
        await session.ask(f"Translate chapter {chapter} of the manual.", priority=BACKGROUND)


async def _be_stubborn(host: Host) -> None:
    patience = {"drain_seconds": 1.5, "grace": 1.0}
    session = await host.open("claude", name="stubborn", command=_agent(STUBBORN), options=patience)
    turn = await session.ask("Count to a million.")
    await _heard(session, b"tick9 ")
    await turn.interrupt()
    await session.ask("Are you still there?")


def _agent(script: Mapping[str, Sequence[str]]) -> list[str]:
    # The agents keep their conversations here, so a killed agent can resume its conversation.
    memory = state_folder() / "demo-agents"
    memory.mkdir(parents=True, exist_ok=True)
    return fake_agent(script, memory)


async def _heard(session: Session, words: bytes) -> None:
    """Wait until the agent says `words`. Ignores earlier events."""
    async for event in session.follow(await session.head()):
        if event.kind == "update" and words in event.data:
            return
