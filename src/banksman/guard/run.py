"""Run a command under guard: `run` returns when its tree is gone, and `say` prints a message.

The order of the steps matters. The signals come first, so that none is lost. The fork of the keeper
comes before this process closes the fds that the command inherits.
"""

from __future__ import annotations

import os
import select

from banksman.guard.event_loop import Guard, children
from banksman.guard.signals import CallersSignals
from banksman.guard.start import start_keeper
from banksman.process import syscalls
from banksman.process.keeper.spawn import close_all_but

TYPE_CHECKING = False
if TYPE_CHECKING:
    from banksman.guard.outcome import GuardOutcome
    from banksman.guard.start import GuardSettings

# A pipe that poll() reports as writable takes this many bytes without blocking (PIPE_BUF).
SAY_BYTES_MAX = 4096


def run(settings: GuardSettings, caller: int, kept: list[int]) -> GuardOutcome:
    """Run the command until its tree is gone. Raises if it cannot be started.

    `caller`: see `open_caller`. `kept`: more fds that this process needs.
    """
    found = CallersSignals()
    strangers = children()
    foreground = _foreground_group()
    shares = foreground is not None
    keeper = start_keeper(settings, found, caller, shares=shares)
    # The command must be the last writer of its stdout, and of every other fd that it inherits.
    null = syscalls.open_fd("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    os.dup2(null, 1)
    if settings.grace_after_eof is None:
        os.dup2(null, 0)
    fds = (keeper.ours.fileno(), keeper.theirs, keeper.caller, found.fd)
    close_all_but(0, 1, 2, *fds, *kept)
    try:
        return Guard(settings, keeper, found.fd, shares=shares, strangers=strangers).stay()
    finally:
        keeper.ours.close()
        if foreground == os.getpgrp():
            _take_terminal_back()


def _foreground_group() -> int | None:
    """Return the foreground group of the controlling terminal; None without a terminal."""
    try:
        terminal = syscalls.open_fd("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return os.tcgetpgrp(terminal)
    except OSError:
        return None
    finally:
        syscalls.close(terminal)


def _take_terminal_back() -> None:
    """Make this group the foreground group again, if the one that was is gone.

    A shell that the command has started, and that was killed, does not give the terminal back.
    """
    group = _foreground_group()
    if group is None:
        return
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        pass
    except OSError:
        return  # The group exists, but belongs to another user.
    else:
        return
    try:
        terminal = syscalls.open_fd("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
        # SIGTTOU is blocked (`signals.py`), so a background process may do this.
        os.tcsetpgrp(terminal, os.getpgrp())
        syscalls.close(terminal)
    except OSError:
        pass  # The terminal is gone.


def say(text: str) -> None:
    """Print a line to stderr, or drop it if that would block: nobody may read there."""
    data = f"banksman: {text}\n".encode(errors="replace")[:SAY_BYTES_MAX]
    poller = select.poll()
    poller.register(2, select.POLLOUT)
    try:
        if dict(syscalls.poll(poller, 0)).get(2, 0) & select.POLLOUT:
            syscalls.write(2, data)
    except OSError:
        pass  # The reader is gone.
