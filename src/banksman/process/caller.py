"""The caller: the process that started this one, whose death ends the command.

`guard` and `exec` watch its pidfd.
"""

from __future__ import annotations

import os

from banksman.errors import MachineError
from banksman.process import syscalls

# A signal that follows another one sooner means the same request, not an impatient user. `timeout`
# sends TERM to its child, and again to the group of that child.
SECOND_SIGNAL_SECONDS = 0.5


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
        raise MachineError("cannot start the command: the process that asked for it has exited")
    return caller
