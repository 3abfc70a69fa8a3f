"""Pattern watches on the output of a command (`Command.watch`), without polling.

A plain pattern (no repeats, alternatives or groups) is searched in this process, in linear time.
Any other pattern is searched by a helper process (`pattern_search.py`), because its time is
unpredictable. The helper belongs to the host. Its start takes some 40 ms, so a command keeps one
helper for its next watch, until the command ends. Two concurrent watches have one helper each. A
slow pattern therefore delays no other search, and killing its process ends it.
"""

from __future__ import annotations

import asyncio
import marshal
import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from banksman.commands import pattern_search
from banksman.commands.options import Options
from banksman.commands.output import Piece
from banksman.commands.output_streams import OutputReader
from banksman.commands.pattern_search import Found, PatternSearch, is_plain
from banksman.commands.result import Ended, Finished
from banksman.core.process_facts import Stream
from banksman.errors import BanksmanError, Closed, MachineError, UsageError
from banksman.process.launch import Launch, prepare

# A pattern that takes longer for one piece is too slow for any use. A machine that takes longer to
# start a helper and search one piece is too slow as well.
SEARCH_SECONDS_MAX = 10.0
# After the deadline, output that was already there is still searched for this long.
OVERTIME_SECONDS_MAX = 1.0
# Bytes searched in one step. The event loop is free between two pieces.
PIECE_BYTES = 65536
PATTERN_CHARS_MAX = 4096
# Maximum number of idle helpers of a host. Each is a Python process of some 8 MB.
IDLE_MATCHERS_MAX = 16


@dataclass(frozen=True, slots=True)
class Match:
    """A match in the output.

    It reaches from byte `begin` up to `next`, where the next watch continues. `groups`: the groups
    of the pattern, as text. `missed`: bytes from `after` on that were not searched, because they
    were not kept; see `Output`.
    """

    begin: int
    next: int
    data: bytes
    groups: tuple[str | None, ...]
    missed: int

    @property
    def text(self) -> str:
        """The matched bytes as text. Invalid UTF-8 is replaced."""
        return self.data.decode("utf-8", "replace")


class MatcherCommand(Protocol):
    """The command that runs a helper: the part of `Command` that this module needs."""

    @property
    def stdout(self) -> OutputReader: ...
    @property
    def is_over(self) -> bool: ...
    def hold_output(self) -> None: ...
    def put_nowait(self, data: bytes) -> object: ...
    def stop_nowait(self, *, at_once: bool) -> None: ...
    async def wait(self) -> Finished: ...


StartAside = Callable[[Launch, Options], MatcherCommand]


class Searches(Protocol):
    """Incremental search of output, in this process or in a helper."""

    async def feed(self, data: bytes, begin: int, is_end: bool) -> Found | None: ...


class WatchSource(Protocol):
    """The watched command: the part of `Command` that this module needs."""

    async def read(self, *, after: int, stream: str, bytes_max: int) -> Piece: ...
    def has_output(self, stream: Stream, after: int) -> bool: ...
    def written(self, stream: Stream) -> int: ...
    @property
    def id(self) -> str: ...
    @property
    def is_over(self) -> bool: ...


def check_pattern(pattern: Any) -> None:
    """Raise `UsageError` for an invalid or too long pattern."""
    hint = "pass text or bytes: a regular expression of Python's re module"
    if not isinstance(pattern, str | bytes):
        raise UsageError(f"cannot watch for {pattern!r:.60}", hint=hint)
    if len(pattern) > PATTERN_CHARS_MAX:
        hint = f"pass at most {PATTERN_CHARS_MAX} characters"
        raise UsageError("cannot watch for the pattern: it is too long", hint=hint)
    try:
        PatternSearch(pattern)
    except (re.error, ValueError, OverflowError, RecursionError, Warning) as exc:
        raise UsageError(f"cannot watch for {pattern!r:.60}: {exc}", hint=hint) from exc


async def watch(
    source: WatchSource,
    pattern: str | bytes,
    *,
    after: int,
    stream: Stream,
    timeout: float | None,
    matchers: MatcherPool | None,
) -> Match | None:
    """Search the output of a command until a match, the end of the stream or the timeout."""
    deadline = None if timeout is None else time.monotonic() + timeout
    if is_plain(pattern):
        return await _watch(source, InlineSearch(pattern), after, stream, deadline)
    assert matchers is not None
    matcher = matchers.take(source.id)
    try:
        return await _watch(
            source, HelperSearch(matcher, pattern, deadline), after, stream, deadline
        )
    except _TooLate:
        return None
    finally:
        matchers.put_back(source.id, matcher, is_needed=not source.is_over)


async def _watch(
    source: WatchSource, search: Searches, after: int, stream: Stream, deadline: float | None
) -> Match | None:
    missed, place = 0, after
    # After the deadline, output written until then is still searched.
    last: int | None = None
    while True:
        if last is None and deadline is not None and time.monotonic() >= deadline:
            last = source.written(stream)
        if last is not None and place >= last:
            return None
        try:
            piece = await _read(source, place, stream, deadline)
        except TimeoutError:
            continue
        missed += piece.missed
        if piece.next < place:
            return None  # The stream ended before byte `after`.
        found = await search.feed(piece.data, piece.next - len(piece.data), piece.is_end)
        if found is not None:
            begin, data, groups = found
            return Match(begin, begin + len(data), data, groups, missed)
        if piece.is_end:
            return None
        place = piece.next
        await asyncio.sleep(0)


async def _read(source: WatchSource, place: int, stream: Stream, deadline: float | None) -> Piece:
    """Read the next piece. Raises TimeoutError if none arrives before the deadline."""
    reading = source.read(after=place, stream=stream.value, bytes_max=PIECE_BYTES)
    if deadline is None or source.has_output(stream, place):
        return await reading  # Data is already there, or the wait has no limit.
    async with asyncio.timeout(deadline - time.monotonic()):
        return await reading


class _TooLate(Exception):
    """The watch's deadline and the overtime have passed."""


class InlineSearch:
    """Search in this process. It never waits and never delays other work."""

    def __init__(self, pattern: str | bytes) -> None:
        self._search = PatternSearch(pattern)

    async def feed(self, data: bytes, begin: int, is_end: bool) -> Found | None:
        return self._search.feed(data, begin, is_end)


class HelperSearch:
    """Search by a helper process."""

    def __init__(
        self, matcher: MatcherProcess, pattern: str | bytes, deadline: float | None
    ) -> None:
        self._deadline = deadline
        self._matcher = matcher
        matcher.begin(pattern)

    async def feed(self, data: bytes, begin: int, is_end: bool) -> Found | None:
        seconds = SEARCH_SECONDS_MAX
        if self._deadline is not None:
            seconds = min(
                seconds, max(0.0, self._deadline - time.monotonic()) + OVERTIME_SECONDS_MAX
            )
        try:
            async with asyncio.timeout(seconds):
                return await self._matcher.search((data, begin, is_end))
        except TimeoutError:
            if seconds < SEARCH_SECONDS_MAX:
                raise _TooLate from None
            took = f"takes longer than {seconds:.0f} s for {len(data)} bytes"
            hint = "use a more exact pattern; a repeat inside a repeat may never finish"
            raise UsageError(f"cannot watch for the pattern: it {took}", hint=hint) from None


class MatcherProcess:
    """Handle of a helper process."""

    def __init__(self, start: StartAside) -> None:
        env = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
        argv = [sys.executable, "-I", "-S", pattern_search.__file__]
        launch = prepare(argv, cwd="/", env=env, inherit_env=False)
        self._command = start(
            launch, Options(stdin="pipe", grace=0.0, linger=0.0, keep_output=False)
        )
        self._command.hold_output()
        self._is_asked = False

    @property
    def is_free(self) -> bool:
        """Whether the helper is alive and owes no answer to an abandoned search."""
        return not self._is_asked and not self._command.is_over

    def begin(self, pattern: str | bytes) -> None:
        """Start a new search."""
        self._command.put_nowait(pattern_search.pack(pattern))

    async def search(self, piece: tuple[bytes, int, bool]) -> Found | None:
        """Search one piece and return the match."""
        self._is_asked = True
        self._command.put_nowait(pattern_search.pack(piece))
        length = int.from_bytes(await self._take(pattern_search.LENGTH_BYTES), "big")
        answer = marshal.loads(await self._take(length))
        self._is_asked = False
        return answer

    async def _take(self, size: int) -> bytes:
        taken = b""
        while len(taken) < size:
            data = await self._command.stdout.read(size - len(taken))
            if not data:
                raise await self._why_it_ended()
            taken += data
        return taken

    async def _why_it_ended(self) -> BanksmanError:
        done = await self._command.wait()
        if done.ended is Ended.HOST_CLOSED:
            return Closed("cannot watch the output: the host is closing", hint="open another Host")
        message = "cannot watch for the pattern: its search process was killed"
        return MachineError(message, hint="watch again")

    def stop(self) -> None:
        """Kill the helper immediately without waiting. The host completes its end."""
        self._command.stop_nowait(at_once=True)


class MatcherPool:
    """Idle helpers of a host: at most one for each command, ended with the command."""

    def __init__(self, start: StartAside) -> None:
        self._start = start
        self._idle: dict[str, MatcherProcess] = {}

    def __len__(self) -> int:
        return len(self._idle)

    def take(self, command: str) -> MatcherProcess:
        """Take the idle helper of a command, or start a new one."""
        idle = self._idle.pop(command, None)
        return idle if idle is not None and idle.is_free else MatcherProcess(self._start)

    def put_back(self, command: str, matcher: MatcherProcess, *, is_needed: bool) -> None:
        """Keep a helper for the next watch of the command, or stop it."""
        if not is_needed or not matcher.is_free or command in self._idle:
            matcher.stop()
            return
        self._idle[command] = matcher
        if len(self._idle) > IDLE_MATCHERS_MAX:
            self.end(next(iter(self._idle)))

    def end(self, command: str) -> None:
        """Stop the idle helper of a command that has ended."""
        idle = self._idle.pop(command, None)
        if idle is not None:
            idle.stop()
