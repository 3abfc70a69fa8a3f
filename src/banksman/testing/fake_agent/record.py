"""What the fake agent leaves behind: its evidence for the test, and its conversations for the next process."""

from __future__ import annotations

import json
import os
import time

from banksman.testing.fake_agent import frames

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from banksman.testing.fake_agent.script import ScriptStep

# A conversation and a record are as long as a test; beyond this something writes without end.
MEMORY_BYTES_MAX = 64 * 1024 * 1024
ENV_NAMES_MAX = 10_000


class FakeRecord:
    """Files of one process in a folder that many share, all by one stem, whose order is that of their starts.

    `.stdin`: every byte that was read, as it was read. `.argv`, `.env`: the words and the names of variables it was
    given. `.steps`: where each step stands that was reached. `.holder`: pids of children that hold stdout.
    """

    def __init__(self, folder: str | None, argv: Sequence[str]) -> None:
        self._stem = ""
        self._stdin = self._steps = -1
        if folder is None:
            return
        os.makedirs(folder, exist_ok=True)
        self._stem = os.path.join(folder, f"{time.monotonic_ns():020}-{os.getpid()}")
        self._put("env", json.dumps(sorted(os.environ)[:ENV_NAMES_MAX]))
        self._stdin = self._open("stdin")
        self._steps = self._open("steps")
        # Last: who finds a process by its argv finds the other files too.
        self._put("argv", json.dumps([*argv]))

    def _open(self, kind: str) -> int:
        fd = os.open(f"{self._stem}.{kind}", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        # Never one of the three first: stdin or stdout may have been closed before we came.
        assert fd > 2
        return fd

    def _put(self, kind: str, text: str) -> None:
        fd = self._open(kind)
        os.write(fd, text.encode(errors="surrogateescape"))
        os.close(fd)

    def stdin(self, data: bytes) -> None:
        if self._stdin >= 0:
            os.write(self._stdin, data)

    def step(self, step: ScriptStep) -> None:
        if self._steps >= 0:
            os.write(self._steps, f"{json.dumps([step.where, step.verb.name, step.text])}\n".encode())

    def holder(self, pid: int) -> None:
        if self._stem:
            self._put("holder", f"{pid}\n")


class Memory:
    """The conversation: which processes it had, what they read, and which prompts began a turn."""

    def __init__(self, folder: str | None, id: str) -> None:
        self.id = id or frames.new_id()
        self._folder = folder
        self.prompts: list[str] = []
        self.reads = 0
        self.processes = 0
        self.is_known = False
        self._path = os.path.join(folder, f"{os.path.basename(self.id)}.jsonl") if folder else ""
        if folder:
            os.makedirs(folder, exist_ok=True)
            self._load()

    def _load(self) -> None:
        try:
            with open(self._path, encoding="utf-8") as file:
                lines = file.read(MEMORY_BYTES_MAX).splitlines()
        except FileNotFoundError:
            return
        self.is_known = True
        for line in lines:
            kind, text = json.loads(line)
            self._take(str(kind), str(text))

    def _take(self, kind: str, text: str) -> None:
        match kind:
            case "prompt":
                self.prompts.append(text)
            case "read":
                self.reads += 1
            case _:
                self.processes += 1

    def forked(self) -> Memory:
        """Another conversation that begins with what this one knows: what is said in either is not in the other."""
        other = Memory(self._folder, "")
        for text in self.prompts:
            other.append("read", text)
            other.append("prompt", text)
        return other

    def append(self, kind: str, text: str) -> None:
        """Remember one thing, at once: the next process must know it however this one ends."""
        self._take(kind, text)
        if self._path:
            fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            os.write(fd, f"{json.dumps([kind, text])}\n".encode())
            os.close(fd)
