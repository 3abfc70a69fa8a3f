"""A pseudo-terminal, from our side: what is on its screen comes out of it, what is typed goes in.

The child has the other side as stdin, stdout and stderr and as its controlling terminal. So there is one stream of
output, with the echo of what was typed in it; Ctrl-C is a byte; and the end of the input is one, too: nothing can be
closed while the output is still wanted.

Stated limits, which are the kernel's: in a terminal that collects lines (the default) a line longer than 4,095 bytes is
cut, and when no process has the terminal open any more, its output has ended, even if one opens /dev/tty again.
"""

from __future__ import annotations

import asyncio
import struct
import termios

from banksman.run.child import system
from banksman.run.child.pipes import Writer, Writing

# The number by which a session takes a terminal as its own. Sent to the keeper, which does not load this module.
TAKE_TERMINAL = termios.TIOCSCTTY
# After one of these there is no line that was begun: ends of a line, and what throws a line away (Ctrl-C, -U, -Z, -\).
_LINE_STARTS = b"\n\r\x03\x04\x15\x1a\x1c"

Size = tuple[int, int]  # rows, columns


def open_terminal(size: Size) -> tuple[int, int]:
    """`(ours, the child's)`, neither under the number of a standard stream."""
    ours, theirs = system.open_pty()
    try:
        ours = system.above_stdio(ours)
    except OSError:
        system.close(theirs)
        raise
    try:
        theirs = system.above_stdio(theirs)
    except OSError:
        system.close(ours)
        raise
    try:
        resize(ours, size)
    except OSError:
        system.close(ours)
        system.close(theirs)
        raise
    return ours, theirs


def resize(fd: int, size: Size) -> None:
    """The kernel tells the foreground job by SIGWINCH, if the size is another one."""
    system.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))


class Keyboard(Writer):
    """What is typed, one whole write after another. It has no end but that of the terminal."""

    def __init__(self, loop: asyncio.AbstractEventLoop, fd: int) -> None:
        super().__init__(loop, fd)
        self._is_at_line_start = True

    def end(self) -> None:
        """Type the end of the input, after what is still to be written. More may be typed then: who reads decides what
        it means, and an end for the program that has the terminal now is none for the shell below it."""
        self._put(_End(b"", self._loop.create_future()))

    def _begin(self, writing: Writing) -> None:
        if isinstance(writing, _End):
            writing.rest = memoryview(self._end_of_input())

    def _end_of_input(self) -> bytes:
        """In a line that was begun, the first one only hands that over, and it takes another for the end."""
        try:
            mode = termios.tcgetattr(self._fd)
        except termios.error:
            return b"\x04"
        character: bytes = mode[6][termios.VEOF]
        if character == b"\0":
            return b""  # Somebody has switched it off, and there is nothing else to type.
        collects_lines = bool(mode[3] & termios.ICANON)
        return character if self._is_at_line_start or not collects_lines else character * 2

    def _write(self, data: memoryview) -> int:
        taken = super()._write(data)
        if taken:
            self._is_at_line_start = data[taken - 1] in _LINE_STARTS
        return taken


class _End(Writing):
    """An end of the input that is to be typed. Which bytes that is depends on what was typed before it."""
