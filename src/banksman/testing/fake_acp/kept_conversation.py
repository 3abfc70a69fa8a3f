"""One conversation of the fake ACP agent, and what is kept of it for the next process."""

from __future__ import annotations

import json
import os
import threading
import uuid

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from banksman.testing.fake_acp.acp_agent import FakeAcpAgent

# A conversation is as long as a test; beyond this something writes without end.
MEMORY_BYTES_MAX = 64 * 1024 * 1024


class FakeConversation:
    def __init__(self, id: str | None) -> None:
        self.id = id or f"fake-{uuid.uuid4()}"
        self.mode, self.model = "ask", "small"
        self._turns: list[threading.Event] = []
        self._replay: list[tuple[str, str]] = []

    def began(self) -> threading.Event:
        """What is set when the turn is cancelled."""
        cancelled = threading.Event()
        self._turns = [cancelled]
        return cancelled

    def cancel(self) -> None:
        for turn in self._turns:
            turn.set()

    def replay(self, agent: FakeAcpAgent, lines: Sequence[tuple[str, str]], *, is_late: bool) -> None:
        """Say again what was said; all, or the first line now and the others after the answer."""
        now = 1 if is_late else len(lines)
        self._replay = [*lines]
        self._say(agent, now)

    def finish_replay(self, agent: FakeAcpAgent) -> None:
        self._say(agent, len(self._replay))

    def _say(self, agent: FakeAcpAgent, count: int) -> None:
        said, self._replay = self._replay[:count], self._replay[count:]
        for role, text in said:
            kind = "user_message_chunk" if role == "user" else "agent_message_chunk"
            agent.update(self.id, kind, content={"type": "text", "text": text})


def found(memory: str | None, id: str) -> list[tuple[str, str]] | None:
    """What was said in a conversation; None: there is none of that name."""
    try:
        with open(_path(memory or "", id), encoding="utf-8") as file:
            return [(role, text) for role, text in map(json.loads, file.read(MEMORY_BYTES_MAX).splitlines())]
    except FileNotFoundError:
        return None


def kept(memory: str | None, id: str, role: str, text: str) -> None:
    """At once: the next process must know it however this one ends."""
    if memory is not None:
        os.makedirs(memory, exist_ok=True)
        fd = os.open(_path(memory, id), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        os.write(fd, f"{json.dumps([role, text])}\n".encode())
        os.close(fd)


def _path(memory: str, id: str) -> str:
    return os.path.join(memory, f"{os.path.basename(id)}.jsonl")
