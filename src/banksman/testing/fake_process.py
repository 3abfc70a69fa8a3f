"""Process of a fake agent: its event loop, its command line, and the files that it leaves."""

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


# The event loop of a fake agent: tasks that are generators, one `select`, and pipes written in
# pieces.
#
# A task yields a `Wait`, and the loop resumes the task when the wait is over. A task suspends
# nowhere else, so no other task runs between two of its waits. Reads and writes never block: a pipe
# that `select` reports as writable has room for PIPE_BUF bytes. The loop therefore writes at most
# that much in one call. It does not set O_NONBLOCK, which would affect other processes that share
# the pipe.

PIECE_BYTES_MAX = 4096
# Poll interval for conditions that no fd reports: a file that will appear, a reader of a fifo.
POLL_SECONDS = 0.002
IDLE_SECONDS_MAX = 0.5
# Tasks wake each other. A task that always had a reason to run again would keep the loop from
# reading. This bound makes that an error of the script.
ROUNDS_MAX = 100_000
# A verb that produces more unread output than this waits for the reader.
AHEAD_BYTES_MAX = 256 * 1024

# A conversation and a record are as long as a test. A longer file means that a process writes
# without end.
MEMORY_BYTES_MAX = 64 * 1024 * 1024
ENV_NAMES_MAX = 10_000


class Wait:
    """Condition that resumes a task: a time, a predicate, a readable fd, or a point of the turn."""

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
    """Raised inside the wait of a turn to end its content. `how` tells the turn how to end."""

    def __init__(self, how: str = "aborted") -> None:
        super().__init__(how)
        self.how = how


class AgentTask:
    """A generator and its current wait; the wait is None while the task runs and after it ends."""

    __slots__ = ("act", "wait")

    def __init__(self, act: Act) -> None:
        self.act = act
        self.wait: Wait | None = None


class Sink:
    """An output pipe with its unwritten bytes. Drops all output once the pipe has no reader."""

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
        """Write one piece.

        A broken pipe does not end the process: Claude also continues when its reader is gone.
        """
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
    """Event loop of tasks and output pipes. Subclasses add the reading of stdin."""

    def __init__(self) -> None:
        self.tasks: list[AgentTask] = []
        self.current: AgentTask | None = None
        self.out = Sink(1)
        self.err = Sink(2)

    def spawn(self, act: Act) -> AgentTask:
        """Start a task and run it until its first wait."""
        task = AgentTask(act)
        self.tasks.append(task)
        self.advance(task)
        return task

    def advance(self, task: AgentTask, error: Exception | None = None) -> None:
        """Run a task to its next wait, or raise `error` inside its current wait."""
        before, self.current = self.current, task
        task.wait = None
        try:
            task.wait = next(task.act) if error is None else task.act.throw(error)
        except StopIteration:
            self.tasks.remove(task)
        finally:
            self.current = before

    def signal(self, point: str) -> None:
        """Pass a point: run the tasks that wait for it immediately, before any other task."""
        for task in [*self.tasks]:
            if task.wait is not None and task.wait.point == point:
                self.advance(task)

    def settle(self, readable: Iterable[int] = ()) -> None:
        """Run every task whose wait is over, until no such task is left."""
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
        """Wait for an event, write to the pipes that have room, and return the readable fds."""
        now = time.monotonic()
        waits = [task.wait for task in self.tasks if task.wait is not None]
        times = [wait.at for wait in waits if wait.at is not None]
        times += [
            sink.next_at for sink in (self.out, self.err) if sink.buffer and not sink.is_due(now)
        ]
        timeout = min([IDLE_SECONDS_MAX, *(at - now for at in (*times, not_before) if at > now)])
        if any(at <= now for at in times):
            timeout = 0.0
        if any(wait.is_polled for wait in waits):
            timeout = min(timeout, POLL_SECONDS)
        fds = [wait.fd for wait in waits if wait.fd is not None]
        sinks = [sink for sink in (self.out, self.err) if sink.is_due(now)]
        readable, writable, _ = select.select(
            [*sources, *fds], [sink.fd for sink in sinks], [], timeout
        )
        for sink in sinks:
            if sink.fd in writable:
                sink.write(time.monotonic())
        return readable

    def drained(self) -> Wait:
        """Return a wait for the end of all output."""
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


# The command line of a fake agent, and the files that it leaves.
#
# The process leaves evidence for the test, which `fake_agent.Evidence` reads, and conversations for
# the next process.


def start_words(
    package: str,
    *words: str,
    evidence: str | os.PathLike[str] | None = None,
    memory: str | os.PathLike[str] | None = None,
) -> list[str]:
    """Return the command line of a fake agent.

    `package`: the `__file__` of its package.

    `python -I -S __main__.py` starts in half the time of `python -m`: see `fake_agent/__main__.py`.
    """
    started = [
        sys.executable,
        "-I",
        "-S",
        os.path.join(os.path.dirname(os.path.abspath(package)), "__main__.py"),
    ]
    started += words
    if evidence is not None:
        started.append(f"--fake-evidence={os.path.abspath(evidence)}")
    if memory is not None:
        started.append(f"--fake-memory={os.path.abspath(memory)}")
    return started


def new_id() -> str:
    """Return a random UUID version 4 without importing `uuid`, which is slow to load."""
    text = os.urandom(16).hex()
    return f"{text[:8]}-{text[8:12]}-4{text[13:16]}-8{text[17:20]}-{text[20:]}"


# ── Evidence ──


class FakeRecord:
    """Evidence files of one process, in a folder that many processes share.

    All files have the same stem. The stems of several processes sort by their start times.

    - `.stdin`: every byte that the process read.
    - `.argv`, `.env`: the arguments and the names of the environment variables.
    - `.steps`: the place in the script of each step that was reached.
    - `.holder`: pids of children that hold stdout open.
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
        # The argv file comes last: a test that finds a process by this file also finds the other
        # files.
        self._put("argv", json.dumps([*argv]))

    def _open(self, kind: str) -> int:
        fd = os.open(
            f"{self._stem}.{kind}", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600
        )
        # If stdin or stdout was closed before the start, open() would return its number.
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
    """Return the stored lines of a conversation as (kind or role, text) pairs.

    None: the conversation does not exist.
    """
    try:
        with open(_path(memory or "", id), encoding="utf-8") as file:
            return [
                (kind, text)
                for kind, text in map(json.loads, file.read(MEMORY_BYTES_MAX).splitlines())
            ]
    except FileNotFoundError:
        return None


def append_conversation(memory: str | None, id: str, kind: str, text: str) -> None:
    """Append to a conversation immediately.

    The next process must see the line however this process ends, so nothing is buffered.
    """
    if memory is not None:
        os.makedirs(memory, exist_ok=True)
        fd = os.open(
            _path(memory, id), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600
        )
        os.write(fd, f"{json.dumps([kind, text])}\n".encode())
        os.close(fd)


def _path(memory: str, id: str) -> str:
    return os.path.join(memory, f"{os.path.basename(id)}.jsonl")


class Memory:
    """A fake Claude conversation: its processes, its reads, and the prompts that began a turn."""

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
        """Return a copy of this conversation; later prompts of either are not in the other."""
        other = Memory(self._folder, "")
        for text in self.prompts:
            other.append("read", text)
            other.append("prompt", text)
        return other

    def append(self, kind: str, text: str) -> None:
        self._take(kind, text)
        append_conversation(self._folder, self.id, kind, text)
