"""What zygote and keeper both need of a bare process: fds, wake-ups, deafness to signals."""

from __future__ import annotations

import os
import time

from banksman.process import syscalls
from banksman.process.syscalls import signals

SIGCHLD, SIGPIPE, SIGCONT = 17, 13, 18
# Asked to stop by name (`pkill python`, a service manager that signals a whole group), a guard stays at its post: it
# leaves when its tree is gone. Handlers, and not SIG_IGN, because an ignored signal would stay ignored in the child.
_UNHEARD = (1, 2, 3, 15, 10, 12, 14)


def stay_deaf() -> None:
    for number in _UNHEARD:
        signals.signal(number, _nothing)
    # A report to a host that is gone must be an error that is caught, not the death of the one who cleans up.
    signals.signal(SIGPIPE, signals.SIG_IGN)


def wake_on_child() -> tuple[int, int]:
    """A pipe that becomes readable when a child ends: `(read, write)`."""
    woken, wake = syscalls.pipe()
    syscalls.set_blocking(woken, False)
    syscalls.set_blocking(wake, False)
    signals.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signals.signal(SIGCHLD, _nothing)
    return woken, wake


def wake_parent() -> None:
    """Continue the zygote, if something has stopped it. CONT does nothing to a process that runs."""
    try:
        syscalls.kill(os.getppid(), SIGCONT)
    except OSError:
        pass  # The zygote is gone, and our parent is not ours to signal.


def _nothing(_number: int, _frame: object) -> None:
    pass


def close_all_but(*kept: int) -> None:
    # Not os.closerange: where the kernel or its sandbox has no close_range(), that calls close() for every number there
    # could be, two thousand million of them.
    for name in syscalls.list_proc("self/fd"):
        if int(name) not in (*kept, syscalls.proc_fd):
            try:
                syscalls.close_fd(int(name))
            except OSError:
                pass  # The one that listed the folder, gone already.


def milliseconds_until(due: float) -> float:
    """For poll(): never negative, rounded up so that it does not spin, and bounded, since poll() takes an int.

    Whoever polls looks at the clock again anyway; waking once a minute for nothing costs nothing.
    """
    return min(max(0.0, due - time.monotonic()) * 1000 + 1, 60_000)


def read_file(fd: int) -> bytes:
    size = os.fstat(fd).st_size
    os.lseek(fd, 0, os.SEEK_SET)
    pieces: list[bytes] = []
    while size > 0:
        piece = syscalls.read(fd, size)
        assert piece
        pieces.append(piece)
        size -= len(piece)
    return b"".join(pieces)
