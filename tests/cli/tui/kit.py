"""Real terminal: a pty of a given size, a program in its foreground, and a screen that shows what a user would see.

Keys go in as bytes, so the terminal's driver handles Ctrl-C. The screen is that of pyte, extended by the alternate
buffer of full-screen programs, which pyte lacks.
"""

from __future__ import annotations

import copy
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pyte

BANKSMAN = [sys.executable, "-m", "banksman"]
SECONDS_MAX = 60.0
CTRL_C, CTRL_D, CTRL_Z, ENTER, ESCAPE = "\x03", "\x04", "\x1a", "\r", "\x1b"
UP, LEFT, BACKSPACE, CTRL_U, CTRL_W, CTRL_A = "\x1b[A", "\x1b[D", "\x7f", "\x15", "\x17", "\x01"
_ALTERNATE = 1049
_SEQUENCE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07]*\x07|[@-Z\\-_78=>])")


class _Screen(pyte.Screen):
    """A screen with the alternate buffer."""

    _kept: Any = None

    def set_mode(self, *modes: int, **options: Any) -> None:
        if options.get("private") and _ALTERNATE in modes:
            self._kept = copy.deepcopy(dict(self.buffer)), copy.copy(self.cursor)
            self.erase_in_display(2)
            self.cursor_position()
        super().set_mode(*modes, **options)

    def reset_mode(self, *modes: int, **options: Any) -> None:
        super().reset_mode(*modes, **options)
        if options.get("private") and _ALTERNATE in modes and self._kept is not None:
            buffer, self.cursor = self._kept
            self._kept = None
            self.erase_in_display(2)
            for number, row in buffer.items():
                self.buffer[number] = row
            self.dirty.update(range(self.lines))

    @property
    def is_alternate(self) -> bool:
        return self._kept is not None


class Terminal:
    """A program on a terminal.

    `said`: every byte that the program wrote. All waits are for a state of the screen, with a deadline.
    """

    def __init__(
        self,
        *words: str,
        columns: int = 80,
        rows: int = 24,
        env: Mapping[str, str],
        stdin: int | None = None,
        stdout: int | None = None,
        cwd: Path | None = None,
        command: list[str] | None = None,
    ) -> None:
        self.screen = _Screen(columns, rows)
        self.said = bytearray()
        self._stream = pyte.ByteStream(self.screen)
        self._fd, self.slave = pty.openpty()
        self._size(columns, rows)
        self.modes = termios.tcgetattr(self.slave)
        self.process = subprocess.Popen(
            command or [*BANKSMAN, *words],
            stdin=self.slave if stdin is None else stdin,
            stdout=self.slave if stdout is None else stdout,
            stderr=self.slave,
            cwd=cwd,
            env={"TERM": "xterm-256color", "LANG": "C.UTF-8", **env},
            start_new_session=True,
            # The terminal becomes that of the session, with the program in the foreground, as when a shell starts a
            # program.
            preexec_fn=self._take_terminal,  # noqa: PLW1509  # It calls one ioctl, and starts no thread.
        )

    def _take_terminal(self) -> None:
        fcntl.ioctl(2, termios.TIOCSCTTY, 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if exc is not None:
            print(f"the screen, when it went wrong:\n{self.text}\n--")
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        # Drain first: a process that still writes to the terminal must not delay its end.
        self._drain()
        self.process.wait(SECONDS_MAX)
        os.close(self.slave)
        os.close(self._fd)

    # -- observation -------------------------------------------------------------------------------------------------
    @property
    def lines(self) -> list[str]:
        self.look()
        return [line.rstrip() for line in self.screen.display]

    @property
    def text(self) -> str:
        return "\n".join(self.lines).rstrip()

    @property
    def words(self) -> str:
        """Return all output so far, without control sequences."""
        self.look()
        return _SEQUENCE.sub("", self.said.decode(errors="replace")).replace("\r\n", "\n")

    @property
    def cursor_line(self) -> str:
        return self.lines[self.screen.cursor.y]  # pyright: ignore[reportUnknownVariableType]

    @property
    def cursor_column(self) -> int:
        return int(self.screen.cursor.x)

    def look(self, seconds: float = 0.0) -> bool:
        """Read the available output, or wait up to `seconds` for some. Return whether there was any."""
        is_any = False
        while select.select([self._fd], [], [], 0.0 if is_any else seconds)[0]:
            try:
                data = os.read(self._fd, 65536)
            except OSError:
                break
            if not data:
                break
            self.said += data
            self._stream.feed(data)
            is_any = True
        return is_any

    def wait(self, is_so: Callable[[], object], what: str = "it") -> None:
        deadline = time.monotonic() + SECONDS_MAX
        while not is_so():
            left = deadline - time.monotonic()
            assert left > 0, f"{what} never came; the screen:\n{self.text}\n-- and all that was said:\n{self.words}"
            if not self.look(min(left, 0.1)) and self.process.poll() is not None and not self.look(0.1):
                assert is_so(), f"{what} never came, and it is over ({self.process.returncode}):\n{self.words}"

    def wait_text(self, text: str) -> None:
        """Wait for a text on the current screen."""
        self.wait(lambda: text in self.text, repr(text))

    def wait_no_text(self, text: str) -> None:
        self.wait(lambda: text not in self.text, f"a screen without {text!r}")

    def wait_said(self, text: str) -> None:
        """Wait for a text in all output, also if it has left the screen."""
        self.wait(lambda: text in self.words, repr(text))

    # -- actions -----------------------------------------------------------------------------------------------------
    def type(self, keys: str) -> None:
        data = keys.encode()
        while data:
            self.look()
            data = data[os.write(self._fd, data[:1024]) :]

    def resize(self, columns: int, rows: int) -> None:
        """Resize as a window does: the kernel signals the foreground group."""
        self.look()
        self.screen.resize(rows, columns)
        self._size(columns, rows)

    def end(self) -> int:
        """Wait for the exit and return its code. The program must have restored the terminal."""
        deadline = time.monotonic() + SECONDS_MAX
        while self.process.poll() is None:
            assert time.monotonic() < deadline, f"it does not end; the screen:\n{self.text}"
            self.look(0.05)
        self._drain()
        assert termios.tcgetattr(self.slave) == self.modes, "the terminal's mode was left changed"
        assert not self.screen.is_alternate, "the other buffer was left on"
        assert self.said.count(b"\x1b[?2004h") == self.said.count(b"\x1b[?2004l"), "bracketed paste was left on"
        assert self.said.rfind(b"\x1b[?25l") <= self.said.rfind(b"\x1b[?25h"), "the cursor was left hidden"
        return self.process.returncode

    def _size(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def _drain(self) -> None:
        while self.look(0.05):
            pass


def processes_in(folder: Path) -> list[int]:
    """Return the processes whose working folder is this one: agents and their children, whatever their names."""
    found: list[int] = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                if os.readlink(f"/proc/{entry}/cwd") == str(folder):
                    found.append(int(entry))
            except OSError:
                continue
    return found
