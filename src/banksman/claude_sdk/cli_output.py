"""Output of the CLI: split its stdout into messages, keep the end of its stderr, and copy it.

**Long messages.** The SDK ends the session at a line of more than 1 MiB. Here a line may have 32
MiB. A longer line is written to a file, and a placeholder takes its place:

    {"type": "system", "subtype": "banksman_oversize", "bytes": …, "file": …, "head": …}

The SDK must act on some messages (results, control messages, transcripts). A placeholder would let
it wait forever, so a line of that kind that is too long raises, and the error names the file.

**Stderr.** The SDK lets the CLI inherit stderr if the caller has no callback. The drop-in reads
stderr in any case, so `StderrCopy` writes the same bytes to the program's stderr. A thread does
that: a write to a full pipe blocks, and the event loop must not.
"""

# The SDK has no public names for these parts. installation.py checks that they are the known ones.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import threading
from collections.abc import Iterator
from typing import Any

import anyio.to_thread
from claude_agent_sdk._errors import CLIJSONDecodeError
from claude_agent_sdk._internal.transport import subprocess_cli

from banksman.core.wire.framing import FRAME_BYTES_MAX, Framing, MixedChunk, OversizePart
from banksman.sessions.diagnostics import Counters
from banksman.sessions.frame_reader import OversizeFrames

# The type of a message is its first key in every version of the CLI.
_TYPE = re.compile(r'\s*\{\s*"type"\s*:\s*"(\w+)"')
_INFORMING = frozenset(("assistant", "user", "system", "stream_event"))
TAIL_BYTES_MAX = 64 << 10
# Bytes that may wait for the reader of the program's stderr. More are dropped.
WAITING_BYTES_MAX = 1 << 20
# A reader that reads has the rest within this time. It only bounds the wait for one that does not.
FLUSH_SECONDS_MAX = 1.0


class MessageReader:
    """Reader of one CLI's stdout.

    `length_max`: the caller's limit, in characters as in the SDK. A longer line raises, as the SDK
    promises for `max_buffer_size`. None: see the module.

    The files of long lines are deleted with this object.
    """

    def __init__(self, length_max: int | None) -> None:
        assert length_max is None or length_max >= 0
        self._length_max = length_max
        # UTF-8 has at most four bytes per character. So a line that is oversize for the framer is
        # too long in characters too, and `_checked` counts the characters of all other lines.
        self._framing = Framing(
            frame_bytes_max=FRAME_BYTES_MAX if length_max is None else max(1, 4 * length_max)
        )
        self._oversize = OversizeFrames()
        self._counters = Counters()

    def feed(self, data: bytes) -> Iterator[dict[str, Any]]:
        """Yield the messages that these bytes complete. Raises `CLIJSONDecodeError`.

        The messages before a line that is too long are yielded before the error.
        """
        for item in self._checked(self._framing.feed(data)):
            message = self._message(item)
            if message is not None:
                yield message

    def end(self) -> Iterator[dict[str, Any]]:
        """Yield the last message if its newline is missing. Half a message is dropped."""
        for item in self._checked(self._framing.end()):
            try:
                message = self._message(item)
            except CLIJSONDecodeError as exc:
                subprocess_cli.logger.debug("dropping half a message at the end of stdout: %s", exc)
                continue
            if message is not None:
                yield message

    def _checked(self, chunk: list[bytes] | MixedChunk) -> Iterator[str | OversizePart]:
        """Yield the decoded lines and the oversize parts. Raises at a line over the limit."""
        limit = self._length_max
        for framed in chunk.items if isinstance(chunk, MixedChunk) else chunk:
            item = framed.decode("utf-8", "replace") if isinstance(framed, bytes) else framed
            if limit is not None and (not isinstance(item, str) or len(item) > limit):
                message = f"JSON message exceeded maximum buffer size of {limit} bytes"
                raise CLIJSONDecodeError(message, ValueError(f"the line exceeds limit {limit}"))
            yield item

    def _message(self, item: str | OversizePart) -> dict[str, Any] | None:
        if isinstance(item, str):
            return subprocess_cli._parse_stdout_line(item)
        return self._spill(item)

    def _spill(self, item: OversizePart) -> dict[str, Any] | None:
        notes = self._oversize.spill(item, self._counters)
        if not notes:
            return None
        placeholder: dict[str, Any] = json.loads(notes[0])
        kind = _TYPE.match(placeholder["head"])
        if kind is None or kind[1] not in _INFORMING:
            message = f"message of {placeholder['bytes']} bytes is in {placeholder['file']}"
            raise CLIJSONDecodeError(message, ValueError("the message is too long to be parsed"))
        return {**placeholder, "type": "system", "subtype": "banksman_oversize"}


class StderrTail:
    """The last bytes of a stream."""

    def __init__(self) -> None:
        self._data = bytearray()

    def add(self, data: bytes) -> None:
        self._data += data
        del self._data[:-TAIL_BYTES_MAX]

    @property
    def text(self) -> str:
        """The end of the stream, without its last newline. At most TAIL_BYTES_MAX bytes."""
        return self._data.decode("utf-8", "ignore").rstrip("\n")


class StderrCopy:
    """Write bytes to an fd from a daemon thread. The thread ends when nothing waits."""

    def __init__(self, fd: int = 2) -> None:
        assert fd >= 0
        self._fd = fd
        self._lock = threading.Lock()
        self._waiting = bytearray()
        self._idle = threading.Event()
        self._idle.set()

    def put(self, data: bytes) -> None:
        """Queue bytes, and return immediately. Drops them if too many wait."""
        with self._lock:
            if len(self._waiting) + len(data) > WAITING_BYTES_MAX:
                return
            self._waiting += data
            if not self._idle.is_set():
                return
            self._idle.clear()
        # A daemon: a reader that never reads must not keep the program from its exit.
        threading.Thread(target=self._write, name="banksman-stderr", daemon=True).start()

    async def flush(self) -> None:
        """Wait until everything is written, or until the reader seems not to read."""
        if not self._idle.is_set():
            await anyio.to_thread.run_sync(self._idle.wait, FLUSH_SECONDS_MAX)

    def _write(self) -> None:
        while data := self._take():
            # The reader is gone, or the program has closed its stderr. The CLI would lose it too.
            with contextlib.suppress(OSError):
                _write_all(self._fd, data)

    def _take(self) -> bytes:
        with self._lock:
            data = bytes(self._waiting)
            self._waiting.clear()
            if not data:
                self._idle.set()
            return data


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:
            # Another program has made the shared terminal or pipe non-blocking.
            select.select([], [fd], [])
