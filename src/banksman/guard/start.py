"""Start of a guard: its settings, and the fork of its keeper with the streams of the caller.

The command gets fds 0, 1 and 2 and every other inheritable fd, as from a shell. Neither the keeper
nor the guard holds on to them: the reader of a pipe waits for its last writer, and that must be the
command. Only stdin (to see it hang up) and stderr (for messages) stay open in the guard.

With a controlling terminal, the command stays in the session and in the process group of the
guard. So Ctrl-C, Ctrl-Z, `fg` and `bg` work by themselves. The keeper has a group of its own there,
which no key reaches. Without a terminal both have new sessions.
"""

from __future__ import annotations

import _socket
import os
import resource

from banksman.errors import UsageError
from banksman.process import syscalls
from banksman.process.caller import check_caller
from banksman.process.keeper import messages
from banksman.process.keeper.spare import supervise
from banksman.process.keeper.spawn import set_soft_nofile, stay_deaf, wake_on_child, wake_parent
from banksman.process.syscalls import signals

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from banksman.guard.signals import CallersSignals


class GuardSettings:
    """A checked call of `banksman guard`. All strings are in the form that the kernel takes.

    A plain class, because `dataclasses` would double the start time of a guard.
    """

    def __init__(
        self,
        *,
        path: bytes,
        argv: tuple[bytes, ...],
        env: dict[bytes, bytes],
        cwd: bytes,
        grace: float,
        linger: float,
        timeout: float | None = None,
        grace_after_eof: float | None = None,
        memory_bytes_max: int | None = None,
        processes_max: int | None = None,
    ) -> None:
        """`grace_after_eof`: None does not watch stdin."""
        assert argv
        assert grace >= 0
        assert linger >= 0
        assert timeout is None or timeout >= 0
        assert grace_after_eof is None or grace_after_eof >= 0
        self.path = path
        self.argv = argv
        self.env = env
        self.cwd = cwd
        self.grace = grace
        self.linger = linger
        self.timeout = timeout
        self.grace_after_eof = grace_after_eof
        self.memory_bytes_max = memory_bytes_max
        self.processes_max = processes_max

    def order(
        self, *, umask: int, nofile: int, group: int | None, mask: list[int], ignored: list[int]
    ) -> dict[str, Any]:
        """Return the order for the keeper: see `process/keeper/messages.py`."""
        return {
            **{"path": self.path, "argv": self.argv, "env": self.env},
            **{"umask": umask, "limits": None, "nofile": nofile},
            **{"grace": self.grace, "linger": self.linger, "deadline": self.timeout},
            **{"terminal": None, "user": None, "ender": None, "cgroup": None},
            **{"group": group, "mask": mask, "ignored": ignored},
        }


class KeeperProcess:
    """A started keeper: its pid, both ends of its control socket, and the pidfd of the caller.

    `theirs`: the keeper's end. While the guard holds a copy, the report about a lost keeper arrives
    on the same socket, after its messages (`process/keeper/lost_trees.py`). `caller`: -1 if the
    caller cannot be watched.
    """

    def __init__(self, pid: int, ours: _socket.socket, theirs: int, caller: int) -> None:
        assert pid > 1
        self.pid = pid
        self.ours = ours
        self.theirs = theirs
        self.caller = caller


def start_keeper(
    settings: GuardSettings, found: CallersSignals, caller: int, *, shares: bool
) -> KeeperProcess:
    """Fork the keeper, which starts the command. Its first message says whether that succeeded.

    `caller`: see `open_caller`. `shares`: the command shares the terminal, the session and the
    group of this process.
    """
    # The keeper inherits this fd: see `syscalls.proc_fd`.
    syscalls.open_proc()
    # Before the command exists, so that no orphan of a lost keeper escapes.
    syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1)
    syscalls.prctl(syscalls.PR_SET_NAME, b"banksman-guard")
    # The command must not trace the guard or the keeper: see `zygote.main`.
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)
    # Opened by number, which is safe: it is this process.
    host = syscalls.pidfd_open(os.getpid())
    umask = os.umask(0o077)
    os.umask(umask)
    order = settings.order(
        umask=umask,
        nofile=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        group=os.getpgrp() if shares else None,
        mask=found.mask,
        ignored=found.ignored,
    )
    try:
        cwd = syscalls.open_fd(settings.cwd, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as exc:
        folder = os.fsdecode(settings.cwd)
        hint = "pass a folder that you may enter as --cwd"
        raise UsageError(f"cannot start in {folder}: {exc.strerror}", hint=hint) from exc
    ours, theirs = syscalls.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    # Nothing starts for a caller that has died since. From here on the keeper watches it.
    check_caller(caller)
    pid = syscalls.fork()
    if pid == 0:
        # Every failure ends in the exit of this process, which the guard sees. 1 is not DUTY_DONE.
        try:
            _be_keeper(order, theirs, cwd, host, caller)
        finally:
            os._exit(1)
    for fd in (cwd, host):
        syscalls.close(fd)
    return KeeperProcess(pid, ours, theirs.detach(), caller)


def _be_keeper(
    order: dict[str, Any], control: _socket.socket, cwd: int, host: int, caller: int
) -> None:
    """Run as the keeper in the forked process. Never returns."""
    syscalls.prctl(syscalls.PR_SET_NAME, messages.KEEPER)
    stay_deaf()
    signals.pthread_sigmask(signals.SIG_SETMASK, ())
    # No key of a shared terminal reaches the keeper. It must stay in the session, because only a
    # member of the session can put the command into the group of the guard.
    if order["group"] is None:
        syscalls.setsid()
    else:
        syscalls.setpgid(0, 0)
    # Not inherited by a fork. Before the command starts, so that no orphan escapes.
    syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1)
    set_soft_nofile(None)
    # A standard fd that the caller had closed is not inheritable here (`cli/__init__.py`). The
    # command finds it closed too.
    targets = [target for target in (0, 1, 2) if os.get_inheritable(target)]
    fds = [syscalls.dup(target) for target in targets]
    null = syscalls.open_fd("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    for target in (0, 1, 2):
        os.dup2(null, target, inheritable=False)
    order["targets"] = targets
    supervise(order, control, cwd, fds, host, wake_on_child(), caller=caller)
    # A guard that was stopped with the command (Ctrl-Z) must read the last messages.
    wake_parent()
    # Reached only if nothing was started or the tree is proven gone.
    os._exit(messages.DUTY_DONE)
