"""The caller: the process that started this one, whose death ends the command.

`guard` and `exec` watch its pidfd.
"""

from __future__ import annotations

import os
import select

from banksman.errors import MachineError
from banksman.process import syscalls

# A signal that follows another one sooner means the same request, not an impatient user. `timeout`
# sends TERM to its child, and again to the group of that child.
SECOND_SIGNAL_SECONDS = 0.5
_GONE = "cannot start the command: the process that asked for it has exited"


def open_caller() -> int:
    """Return a pidfd of the process that started this one; -1 if it cannot be watched.

    The parent is invisible if it is in another pid namespace (`docker exec`).
    """
    parent = os.getppid()
    if parent == 0:
        return -1
    try:
        caller = syscalls.pidfd_open(parent)
    except OSError:
        return -1
    # First open, then check: see `zygote.main`. The parent was the caller until now.
    if os.getppid() != parent:
        syscalls.close(caller)
        raise MachineError(_GONE)
    return caller


def check_caller(caller: int) -> None:
    """Raise if the caller has died since `open_caller`."""
    if caller >= 0 and is_gone(caller):
        raise MachineError(_GONE)


def is_gone(pidfd: int) -> bool:
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(syscalls.poll(poller, 0))
