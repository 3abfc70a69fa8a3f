"""Pipes to an editor: the split into lines, and the queue for a slow reader."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Generator

from banksman.cli.acp import editor
from banksman.cli.acp.editor import ANSWERS_BYTES_MAX, UPDATES_BYTES_MAX, Outbox, lines

SECONDS_MAX = 30.0


class Pipe:
    """A pipe whose ends are each closed once. A second close could hit a reused number."""

    def __init__(self) -> None:
        self.read, self.write = os.pipe()
        self._open = {self.read, self.write}

    def close(self, fd: int) -> None:
        if fd in self._open:
            self._open.remove(fd)
            os.close(fd)


@contextlib.contextmanager
def pipe() -> Generator[Pipe]:
    made = Pipe()
    try:
        yield made
    finally:
        made.close(made.read)
        made.close(made.write)


def read_lines(data: bytes, line_bytes_max: int = editor.LINE_BYTES_MAX) -> list[bytes | None]:
    with pipe() as ends:

        def write() -> None:
            editor._write_all(ends.write, data)  # pyright: ignore[reportPrivateUsage]
            ends.close(ends.write)

        writer = threading.Thread(target=write)
        writer.start()
        found = list(lines(ends.read, line_bytes_max=line_bytes_max))
        writer.join()
    return found


def test_read_lines_yields_whole_lines_only() -> None:
    assert read_lines(b'{"a":1}\n\n{"b":2}\r\nhalf') == [b'{"a":1}', b"", b'{"b":2}\r']
    assert read_lines(b"") == []


def test_read_lines_drops_only_an_oversize_line() -> None:
    assert read_lines(b"x" * 11 + b"\n" + b"y" * 10 + b"\nz\n", 10) == [None, b"y" * 10, b"z"]


def test_read_lines_accepts_a_line_longer_than_one_read() -> None:
    long = b"x" * (3 * editor.READ_BYTES_MAX + 5)
    assert read_lines(long + b"\ny\n") == [long, b"y"]


def test_outbox_blocks_updates_but_not_answers_for_a_slow_reader() -> None:
    gone = threading.Event()
    with pipe() as ends:
        outbox = Outbox(ends.write, on_gone=gone.set)
        # More than the pipe holds, and as much as may wait.
        assert outbox.put(b"a" * (UPDATES_BYTES_MAX + (1 << 20)) + b"\n")
        told = threading.Event()
        teller = threading.Thread(target=lambda: (outbox.put(b"told\n"), told.set()))
        teller.start()
        assert outbox.put(b"answer\n", is_answer=True)
        assert not told.is_set()
        with os.fdopen(os.dup(ends.read), "rb") as file:
            assert len(file.readline()) == UPDATES_BYTES_MAX + (1 << 20) + 1
            assert sorted((file.readline(), file.readline())) == [b"answer\n", b"told\n"]
        assert told.wait(SECONDS_MAX)
        teller.join()
        # At the end, each waiting writer learns that the reader is gone.
        ends.close(ends.read)
        outbox.put(b"nobody\n")
        assert gone.wait(SECONDS_MAX)
        assert not outbox.put(b"nobody\n")
        outbox.flush(SECONDS_MAX)


def test_outbox_blocks_answers_beyond_their_limit() -> None:
    with pipe() as ends:
        gone = threading.Event()
        outbox = Outbox(ends.write, on_gone=gone.set)
        # The second answer is put while the first is being written, so this much certainly waits.
        assert outbox.put(b"a" * ANSWERS_BYTES_MAX + b"\n", is_answer=True)
        waiting = threading.Thread(target=lambda: outbox.put(b"b\n", is_answer=True))
        waiting.start()
        assert waiting.is_alive()
        ends.close(ends.read)
        assert gone.wait(SECONDS_MAX)
        waiting.join(SECONDS_MAX)
        assert not waiting.is_alive()
