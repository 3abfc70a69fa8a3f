"""A fake agent as a process: its event loop, its start, and the files that it leaves."""

from __future__ import annotations

import json
import os
import select
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Sequence
    from typing import TypeAlias

    Act: TypeAlias = Generator["Wait", None, None]


# The loop of a fake agent: tasks that are generators, one `select`, and pipes written in pieces.
#
# A task yields a `Wait` and is resumed when the wait is over. Nothing else suspends, so the code between two waits runs
# undisturbed. Reads and writes never block: a pipe that `select` calls writable has room for PIPE_BUF bytes, so the
# loop writes no more than that at once, and needs no flag on a pipe that other processes share.

PIECE_BYTES_MAX = 4096
# How often a condition is looked at that no fd tells of: a file that is to appear, a reader of a fifo.
POLL_SECONDS = 0.002
IDLE_SECONDS_MAX = 0.5
# Tasks wake each other; one that always had a reason to run again would be a script that never lets us read.
ROUNDS_MAX = 100_000
# A verb that makes much output waits for the reader from here on.
AHEAD_BYTES_MAX = 256 * 1024

# A conversation and a record are as long as a test; beyond this something writes without end.
MEMORY_BYTES_MAX = 64 * 1024 * 1024
ENV_NAMES_MAX = 10_000


class Wait:
    """What resumes a task: a time, a condition, an fd with something to read, or a point that is passed."""

    __slots__ = ("at", "fd", "is_polled", "point", "when")

    def __init__(
        self,
        *,
        at: float | None = None,
        when: Callable[[], bool] | None = None,
        is_polled: bool = False,
        fd: int | None = None,
        point: str = "",
    ) -> None:
        self.at = at
        self.when = when
        self.is_polled = is_polled
        self.fd = fd
        self.point = point

    def is_over(self, now: float, readable: Iterable[int]) -> bool:
        if self.at is not None and now >= self.at:
            return True
        if self.fd is not None and self.fd in readable:
            return True
        return self.when is not None and self.when()


NEVER = Wait()


def pause(seconds: float) -> Wait:
    return Wait(at=time.monotonic() + seconds)


class CutShort(Exception):
    """Raised inside a turn where it waits: its content ends here. `how` tells the turn how it is to end."""

    def __init__(self, how: str = "aborted") -> None:
        super().__init__(how)
        self.how = how


class AgentTask:
    """A generator, and what it waits for: None while it runs and when it is over."""

    __slots__ = ("act", "wait")

    def __init__(self, act: Act) -> None:
        self.act = act
        self.wait: Wait | None = None


class Sink:
    """One of our output pipes and what is not yet written to it. When nobody reads it any more, all is dropped."""

    __slots__ = ("buffer", "fd", "is_gone", "next_at", "pause_seconds", "piece_bytes")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.buffer = bytearray()
        self.piece_bytes = PIECE_BYTES_MAX
        self.pause_seconds = 0.0
        self.next_at = 0.0
        self.is_gone = False

    def put(self, data: bytes) -> None:
        if not self.is_gone:
            self.buffer += data

    def is_due(self, now: float) -> bool:
        return bool(self.buffer) and now >= self.next_at

    def write(self, now: float) -> None:
        """Write one piece. A reader that went away is no reason to end: Claude does not mind either."""
        try:
            count = os.write(self.fd, bytes(self.buffer[: self.piece_bytes]))
        except OSError:
            self.is_gone = True
            self.buffer.clear()
            return
        del self.buffer[:count]
        self.next_at = now + self.pause_seconds

    def close(self) -> None:
        self.is_gone = True
        self.buffer.clear()
        os.close(self.fd)


class AgentLoop:
    """Tasks and output pipes. An agent adds what it reads from stdin."""

    def __init__(self) -> None:
        self.tasks: list[AgentTask] = []
        self.current: AgentTask | None = None
        self.out = Sink(1)
        self.err = Sink(2)

    def spawn(self, act: Act) -> AgentTask:
        """Begin a task: it runs at once, until its first wait."""
        task = AgentTask(act)
        self.tasks.append(task)
        self.advance(task)
        return task

    def advance(self, task: AgentTask, error: Exception | None = None) -> None:
        """Let a task run to its next wait, or raise an error inside it where it waits."""
        before, self.current = self.current, task
        task.wait = None
        try:
            task.wait = next(task.act) if error is None else task.act.throw(error)
        except StopIteration:
            self.tasks.remove(task)
        finally:
            self.current = before

    def signal(self, point: str) -> None:
        """A point was passed: whoever waits for it runs now, before anything else happens."""
        for task in [*self.tasks]:
            if task.wait is not None and task.wait.point == point:
                self.advance(task)

    def settle(self, readable: Iterable[int] = ()) -> None:
        """Run every task that has a reason to, until none has."""
        for _ in range(ROUNDS_MAX):
            now, has_run = time.monotonic(), False
            for task in [*self.tasks]:
                if task.wait is not None and task.wait.is_over(now, readable):
                    self.advance(task)
                    has_run = True
            if not has_run:
                return
            readable = ()
        raise AssertionError("the script never comes to rest")

    def select(self, sources: list[int], *, not_before: float = 0.0) -> list[int]:
        """Wait for something to happen, write what can be written, and say which fds can be read."""
        now = time.monotonic()
        waits = [task.wait for task in self.tasks if task.wait is not None]
        times = [wait.at for wait in waits if wait.at is not None]
        times += [sink.next_at for sink in (self.out, self.err) if sink.buffer and not sink.is_due(now)]
        timeout = min([IDLE_SECONDS_MAX, *(at - now for at in (*times, not_before) if at > now)])
        if any(at <= now for at in times):
            timeout = 0.0
        if any(wait.is_polled for wait in waits):
            timeout = min(timeout, POLL_SECONDS)
        fds = [wait.fd for wait in waits if wait.fd is not None]
        sinks = [sink for sink in (self.out, self.err) if sink.is_due(now)]
        readable, writable, _ = select.select([*sources, *fds], [sink.fd for sink in sinks], [], timeout)
        for sink in sinks:
            if sink.fd in writable:
                sink.write(time.monotonic())
        return readable

    def drained(self) -> Wait:
        """Wait until all output is written."""
        return Wait(when=lambda: not self.out.buffer and not self.err.buffer)

    def room(self) -> Act:
        """Wait while the reader is far behind."""
        sinks = (self.out, self.err)
        if any(len(sink.buffer) > AHEAD_BYTES_MAX for sink in sinks):
            yield Wait(when=lambda: all(len(sink.buffer) <= AHEAD_BYTES_MAX for sink in sinks))

    def leave(self, code: int) -> Act:
        """End the process when all output is written."""
        yield self.drained()
        os._exit(code)


# A fake agent as a process: the words that start it, and the files that it leaves.
#
# It leaves evidence for the test, which `fake_agent.Evidence` reads, and conversations for the next process.


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
