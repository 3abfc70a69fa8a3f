"""A fake agent as a process: the words that start it, and the files that it leaves.

It leaves evidence for the test, which `fake_agent.Evidence` reads, and conversations for the next process.
"""

from __future__ import annotations

import json
import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

# A conversation and a record are as long as a test; beyond this something writes without end.
MEMORY_BYTES_MAX = 64 * 1024 * 1024
ENV_NAMES_MAX = 10_000


def start_words(
    package: str,
    *words: str,
    evidence: str | os.PathLike[str] | None = None,
    memory: str | os.PathLike[str] | None = None,
) -> list[str]:
    """The command line of a fake agent. `package`: the `__file__` of its package.

    `python -I -S __main__.py` starts in half the time of `python -m`: see `fake_agent/__main__.py`.
    """
    started = [sys.executable, "-I", "-S", os.path.join(os.path.dirname(os.path.abspath(package)), "__main__.py")]
    started += words
    if evidence is not None:
        started.append(f"--fake-evidence={os.path.abspath(evidence)}")
    if memory is not None:
        started.append(f"--fake-memory={os.path.abspath(memory)}")
    return started


def new_id() -> str:
    """A random UUID of version 4, without importing the module that makes them."""
    text = os.urandom(16).hex()
    return f"{text[:8]}-{text[8:12]}-4{text[13:16]}-8{text[17:20]}-{text[20:]}"


# ── Evidence ──


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

    def step(self, where: str, verb: str, text: str) -> None:
        if self._steps >= 0:
            os.write(self._steps, f"{json.dumps([where, verb, text])}\n".encode())

    def holder(self, pid: int) -> None:
        if self._stem:
            self._put("holder", f"{pid}\n")


# ── Conversations ──


def read_conversation(memory: str | None, id: str) -> list[tuple[str, str]] | None:
    """What was kept of a conversation: pairs of a kind, or of a role, and a text. None: there is no such one."""
    try:
        with open(_path(memory or "", id), encoding="utf-8") as file:
            return [(kind, text) for kind, text in map(json.loads, file.read(MEMORY_BYTES_MAX).splitlines())]
    except FileNotFoundError:
        return None


def append_conversation(memory: str | None, id: str, kind: str, text: str) -> None:
    """Append to a conversation at once: the next process must know it however this one ends."""
    if memory is not None:
        os.makedirs(memory, exist_ok=True)
        fd = os.open(_path(memory, id), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        os.write(fd, f"{json.dumps([kind, text])}\n".encode())
        os.close(fd)


def _path(memory: str, id: str) -> str:
    return os.path.join(memory, f"{os.path.basename(id)}.jsonl")


class Memory:
    """One conversation of the fake Claude: its processes, what they read, and which prompts began a turn."""

    def __init__(self, folder: str | None, id: str) -> None:
        self.id = id or new_id()
        self._folder = folder or None
        self.prompts: list[str] = []
        self.reads = 0
        self.processes = 0
        lines = None
        if folder:
            os.makedirs(folder, exist_ok=True)
            lines = read_conversation(folder, self.id)
        self.is_known = lines is not None
        for kind, text in lines or ():
            self._take(kind, text)

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
        self._take(kind, text)
        append_conversation(self._folder, self.id, kind, text)
