"""Write a session with a long history to a store, as its owner would, before the server starts."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

from banksman.core.dialects.claude import CLAUDE
from banksman.core.session import history as pasts
from banksman.core.session.event import SESSION_OPENED, TURN_ENDED, TURN_QUEUED, TURN_STARTED, UPDATE, Entry, entry
from banksman.core.session.session_config import Config
from banksman.store.sqlite import SqliteLog

CHUNK = 1000
# A turn has a queued event, a start, this many frames, and an end.
FRAMES = 97
# The rest of the spec: the defaults of an open.
PLAIN: dict[str, Any] = {
    **{"args": [], "env": [], "inherit_env": True, "model": None, "permission_mode": None, "system_prompt": None},
    **{"options": {}, "rules": {}, "mcp_servers": [], "hooks": [], "tools": [], "resume": None, "fork": False},
}


def write(path: Path, session: str, *, name: str, events: int, command: list[str]) -> None:
    """Write the session. The text of a frame names it: `line 41.3` is the fourth frame of turn 41."""
    asyncio.run(_write(path, session, name, events, command))


async def _write(path: Path, session: str, name: str, events: int, command: list[str]) -> None:
    log = SqliteLog(str(path))
    epoch = await log.claim(session, name=name, agent="claude")
    opened = entry(None, SESSION_OPENED, agent="claude", cwd=str(path.parent), command=command, **PLAIN)
    entries: list[Entry] = [opened]
    turn = 0
    while len(entries) < events:
        entries += _turn(turn)
        turn += 1
    past = pasts.beginning(Config(dialect=CLAUDE))
    began = time.time() - events / 100
    for seq in range(0, len(entries), CHUNK):
        piece = entries[seq : seq + CHUNK]
        past = pasts.fold(past, piece)
        answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def done(error: Exception | None, answered: asyncio.Future[None] = answered) -> None:
            assert error is None, error
            answered.set_result(None)

        log.append(session, epoch, seq, began + seq / 100, piece, done, pasts.encode(past))
        await answered
    log.release(session, epoch)
    await log.close()


def _turn(number: int) -> list[Entry]:
    id = f"t-{number:016x}"
    asked = {"ref": id, "prompt": f"Prompt {number}", "priority": 10, "on_busy": "enqueue", "on_preempt": "end"}
    more: dict[str, Any] = {"key": None, "rules": [], "schema": None, "is_last": False, "into": None}
    over: dict[str, Any] = {"outcome": "done", "by": "boundary", "stop_reason": "end_turn", "text": f"Answer {number}"}
    rest = {"structured": None, "usage": None, "cost": 0.0, "spent": 0.0, "cost_in_all": 0.0, "error": None}
    return [
        entry(id, TURN_QUEUED, **asked, **more),
        entry(id, TURN_STARTED, attempt=1, joined=[]),
        *((id, UPDATE, _frame(f"line {number}.{count}")) for count in range(FRAMES)),
        entry(id, TURN_ENDED, **over, **rest, clock=None),
    ]


def _frame(text: str) -> bytes:
    message = {"id": f"msg {text}", "type": "message", "role": "assistant", "model": "m"}
    content = [{"type": "text", "text": f"{text}: some words that an agent says, and **some** `code` in them.\n"}]
    frame = {"type": "assistant", "message": {**message, "content": content}, "parent_tool_use_id": None}
    return json.dumps(frame).encode()
