"""Signal the group of a command that shares its process group with processes outside of the tree.

A command that shares the terminal of its caller is in the caller's process group, so that the
kernel's job control works. `killpg` would then reach the caller too. So the keeper signals each
member of its tree that is in the group of the leader, through a pidfd.
"""

from __future__ import annotations

import os

from banksman.process import syscalls
from banksman.process.keeper.proc_tree import descendants, open_member


def signal_shared_group(leader: int, number: int) -> None:
    """Signal the leader, and each descendant of this process in the leader's group.

    `leader`: an unreaped child of this process.
    """
    try:
        # By number, which is safe for an unreaped child. It comes first because it needs no /proc.
        syscalls.kill(leader, number)
        group = syscalls.getpgid(leader)
        members = descendants(os.getpid(), near=False)
    except OSError:
        return  # No memory or fds for a scan. The sweep reaches the others later.
    for member in members:
        if member[0] != leader:
            try:
                _signal_member(member, group, number)
            except OSError:
                pass  # The process has exited, or belongs to another user. The sweep reports it.


def _signal_member(member: tuple[int, int], group: int, number: int) -> None:
    fd = open_member(member)
    if fd is None:
        return
    try:
        # After the pidfd was opened. If the process has exited meanwhile, the signal fails.
        if syscalls.getpgid(member[0]) == group:
            syscalls.pidfd_send_signal(fd, number)
    finally:
        syscalls.close(fd)
