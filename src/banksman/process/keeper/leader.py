"""Leader of a tree: its exit, and signals to it and to its group by number.

The keeper is the parent process of the leader. The leader's pid and group id stay its own until the
keeper reaps it: a zombie keeps both. Therefore this class signals by number until then, and never
afterwards.
"""

from __future__ import annotations

import errno
import os
import select

from banksman.process import syscalls
from banksman.process.keeper.proc_tree import descendants, open_member

TYPE_CHECKING = False
if TYPE_CHECKING:
    from banksman.process.keeper.sweep import Helper


class Leader:
    """The first process of a tree.

    `fd`: its pidfd, -1 after its exit was seen. `has_exited`: the exit was seen. `is_reaped`: from
    that moment on its pid and group id may belong to other processes; the keeper sets this.
    """

    __slots__ = ("_helper", "_shares_group", "fd", "has_exited", "is_held", "is_reaped", "pid")

    def __init__(self, pid: int, helper: Helper | None, *, shares_group: bool) -> None:
        # killpg(0) would signal the group of the keeper, and killpg(1) all processes of the user:
        # the kernel gets 0 and -1. Neither number can be a child, so no tree exists then.
        assert pid > 1
        self.pid = pid
        # Opened by number, which is safe: the leader is a child that this process has not reaped.
        self.fd = syscalls.pidfd_open(pid)
        self.has_exited = False
        # The leader is dead but a tracer holds its zombie: see `look`.
        self.is_held = False
        self.is_reaped = False
        self._helper = helper
        self._shares_group = shares_group

    def look(self, poller: select.poll) -> tuple[int | None, int | None] | None:
        """Return the exit code and the signal of the leader; None if a tracer holds its zombie.

        One of the two is None. `poller`: the pidfd leaves it.
        """
        # WNOWAIT keeps the zombie. The keeper reports the exit first and reaps second, so that the
        # pid cannot be in use again when the host learns of the exit.
        result = syscalls.waitid(os.P_PIDFD, self.fd, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        if not self.is_held:
            poller.unregister(self.fd)
        # The leader is dead, but waitid finds no zombie: a tracer outside the tree (gdb, strace -p)
        # holds it until it detaches. The pidfd stays readable meanwhile and would make poll() spin.
        # So the keeper has unregistered it and looks for the zombie every RETRY_SECONDS.
        self.is_held = result is None
        if result is None:
            return None
        # From here on the pid is known to be a zombie or reaped. The keeper needs no pidfd for it,
        # and `signal` stops signalling it alone.
        syscalls.close(self.fd)
        self.fd = -1
        self.has_exited = True
        has_code = result.si_code == os.CLD_EXITED
        return (result.si_status, None) if has_code else (None, result.si_status)

    def was_stopped(self) -> bool:
        """Whether a signal has stopped the leader since the last call."""
        # Without WEXITED this takes no exit status away from `look`.
        return syscalls.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOHANG) is not None

    def signal(self, number: int, to_group: bool) -> None:
        """Signal the leader, or its group, by number."""
        # By number is safe as long as the leader is unreaped: a zombie keeps its pid and its group
        # id. Once it is reaped both may be reused. A zombie alone needs no signal, but its group
        # may have living members. Only this process reaps the leader, and it has one thread. So the
        # leader cannot be reaped between this check and the signal.
        if self.is_reaped or (self.has_exited and not to_group):
            return
        if to_group and self._shares_group:
            _signal_shared_group(self.pid, number)
            return
        try:
            (syscalls.killpg if to_group else syscalls.kill)(self.pid, number)
        except OSError as exc:
            # ESRCH: the group is gone, which is the goal. EPERM: the keeper may signal no member of
            # the group. Without a helper, the sweep reports them as survivors.
            if exc.errno == errno.EPERM and self._helper is not None:
                self._helper.kill(number, [-self.pid if to_group else self.pid])


def _signal_shared_group(leader: int, number: int) -> None:
    """Signal the leader, and each descendant of this process in the leader's group.

    A command that shares the terminal of its caller is in the caller's process group, so that the
    kernel's job control works. `killpg` would then reach the caller too. So the keeper signals each
    member of its tree that is in the group of the leader, through a pidfd.

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
