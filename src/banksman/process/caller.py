"""Pidfd of the caller: the process that started this one, whose death ends the command.

`guard` and `exec` watch it.
"""

from __future__ import annotations

import os

from banksman.errors import MachineError
from banksman.process import syscalls


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
