"""The loop of a fake agent: tasks that are generators, one `select`, and pipes written in pieces.

A task yields a `Wait` and is resumed when the wait is over. Nothing else suspends, so the code between two waits runs
undisturbed. Reads and writes never block: a pipe that `select` calls writable has room for PIPE_BUF bytes, so the loop
writes no more than that at once, and needs no flag on a pipe that other processes share.
"""

from __future__ import annotations

import os
import select
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable
    from typing import TypeAlias

    Act: TypeAlias = Generator["Wait", None, None]

PIECE_BYTES_MAX = 4096
# How often a condition is looked at that no fd tells of: a file that is to appear, a reader of a fifo.
POLL_SECONDS = 0.002
IDLE_SECONDS_MAX = 0.5
# Tasks wake each other; one that always had a reason to run again would be a script that never lets us read.
ROUNDS_MAX = 100_000
# A verb that makes much output waits for the reader from here on.
AHEAD_BYTES_MAX = 256 * 1024


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
