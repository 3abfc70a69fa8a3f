"""Start the command in the keeper, and process setup that the zygote and the keeper share.

The shared setup is at the end: signal handlers, a pipe that SIGCHLD wakes, fds, poll() timeouts. In
the host, `process/launch.py` has checked the command before.

A command starts in one of two ways. `posix_spawn` costs a third of a fork of this interpreter and
suffices for most commands. These commands need a fork, in which the child prepares itself before
exec():
- A command with limits. posix_spawn cannot set them, and the keeper must not set them for itself:
  RLIMIT_CPU or a low RLIMIT_NOFILE would end the keeper before its tree.
- A command with a controlling terminal. Only the leader of a session can acquire one.
- A command of another user. The keeper must not become that user.
- A command in a control group. It enters the group itself, so that all of its tree is in it.
- A command that starts with ignored signals. posix_spawn can only reset them.
"""

from __future__ import annotations

import os
import resource
import time

from banksman.process import syscalls
from banksman.process.syscalls import signals

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from banksman.process.keeper.cgroup import Cgroup

    Order = dict[str, Any]

# Python ignores SIGPIPE and SIGXFSZ, and an ignored signal stays ignored across exec(). So every
# signal whose action can be changed is reset to its default in the child. 9 and 19 (KILL, STOP)
# cannot be changed; 32 and 33 belong to the C library.
DEFAULT_SIGNALS = [n for n in range(1, 65) if n not in (9, 19, 32, 33)]

# Signals that must not end the zygote or a keeper. `pkill python`, or a service manager that
# signals a whole group, may ask them to exit; they exit only when their tree is gone. They use
# handlers and not SIG_IGN, because an ignored signal would stay ignored in the child.
_UNHEARD = (1, 2, 3, 15, 10, 12, 14)


class SpawnFailed(Exception):
    """The command was not started. `step`: the step that failed. `errno`: its error number."""

    def __init__(self, step: str, number: int) -> None:
        super().__init__(step, number)
        self.step = step
        self.errno = number


def spawn(order: Order, cwd: int, fds: list[int], cgroup: Cgroup | None = None) -> int:
    """Start the command of `order` and return its pid.

    The command leads a new session, or joins the process group `order["group"]`. `cwd`: an fd of
    the working directory. `fds`: they become `order["targets"]` in the child. `cgroup`: the child
    enters it before exec().
    """
    targets: list[int] = order["targets"]
    assert len(fds) == len(targets)
    fds = _clear_of(fds, set(targets))
    # The keeper changes its own umask and folder, and the child inherits both. posix_spawn cannot
    # set them. The folder is an fd because the path may have changed its meaning since the call.
    try:
        syscalls.umask(order["umask"])
        syscalls.fchdir(cwd)
    except OSError as exc:
        raise SpawnFailed("cwd", exc.errno or 0) from exc
    is_plain = order["terminal"] is None and not order["user"] and not order["ignored"]
    if not is_plain or order["limits"] or cgroup is not None:
        return _fork_exec(order, fds, targets, cgroup)
    actions = [(os.POSIX_SPAWN_DUP2, fd, target) for fd, target in zip(fds, targets, strict=True)]
    path, argv, env = order["path"], order["argv"], order["env"]
    # The zygote and the keepers run with the highest limit of open files that they may have, and
    # the host may have raised its limit. The child must see neither: a program that uses select()
    # breaks on fds over 1023.
    set_soft_nofile(order["nofile"])
    # setsid makes the child the leader of a new session and a new group. So the keeper can signal
    # the group by the child's pid. A command that shares the terminal of its caller joins the
    # caller's group instead.
    placed: dict[str, Any] = {"setsid": True}
    if order["group"] is not None:
        placed = {"setpgroup": order["group"]}
    try:
        return syscalls.posix_spawn(
            path,
            argv,
            env,
            file_actions=actions,
            setsigmask=order["mask"],
            setsigdef=DEFAULT_SIGNALS,
            **placed,
        )
    except OSError as exc:
        raise SpawnFailed("exec", exc.errno or 0) from exc
    finally:
        # Restored also after a failure: the sweep of this keeper needs the fds.
        set_soft_nofile(None)


def set_soft_nofile(soft: int | None) -> None:
    """Set the soft limit of open files of this process.

    `soft`: None sets the highest allowed value, because a sweep needs one fd per process.
    """
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    wanted = hard if soft is None else soft
    resource.setrlimit(
        resource.RLIMIT_NOFILE,
        (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard),
    )


def _clear_of(fds: list[int], targets: set[int]) -> list[int]:
    """Return the same files under numbers that are not targets.

    Otherwise moving one file to its target could overwrite another one.
    """
    clear: list[int] = []
    for fd in fds:
        # The original fd stays open until all files are placed. If it were closed here, the next
        # dup() would return the same number again.
        while fd in targets:
            fd = syscalls.dup(fd)  # noqa: PLW2901
        clear.append(fd)
    # Now the order of the moves does not matter: no move overwrites a file that is still to be
    # moved. The command does not run yet, so a failure here leaves no tree.
    assert targets.isdisjoint(clear)
    return clear


def _fork_exec(order: Order, fds: list[int], targets: list[int], cgroup: Cgroup | None) -> int:
    """Fork, prepare the child, exec.

    The child reports a failure through a pipe that exec() closes.
    """
    try:
        said, tell = syscalls.pipe()
    except OSError as exc:
        raise SpawnFailed("fork", exc.errno or 0) from exc
    try:
        pid = syscalls.fork()
    except OSError as exc:
        syscalls.close(said)
        syscalls.close(tell)
        raise SpawnFailed("fork", exc.errno or 0) from exc
    if pid == 0:
        _become(order, fds, targets, tell, cgroup)
    # The child has the only write end now. The read below ends when exec() closes it or the child
    # dies.
    syscalls.close(tell)
    try:
        failure = syscalls.read(said, 64)
    finally:
        syscalls.close(said)
    # The child exits after its message. Reap it here: it was never the leader, and nothing reports
    # its exit. The pid cannot be another process: it is an unreaped child until this call.
    if failure:
        syscalls.waitpid(pid, 0)
        step, number = failure.decode().split(":")
        raise SpawnFailed(step, int(number))
    return pid


def _become(
    order: Order, fds: list[int], targets: list[int], tell: int, cgroup: Cgroup | None
) -> None:
    """Prepare this child process and exec the command. Never returns."""
    step = "fork"
    try:
        # The targets are about to be overwritten, and the pipe must survive. os.dup sets
        # close-on-exec on the copy, as os.pipe did on the original.
        while tell in targets:
            tell = os.dup(tell)
        # Otherwise the failure of a later step would be written into a file of the command, and the
        # keeper would take the silent pipe for success.
        assert tell not in targets
        # A session leader without a terminal: the precondition for `_take_terminal`, and the leader
        # of the group that the keeper signals.
        if order["group"] is None:
            syscalls.setsid()
        else:
            syscalls.setpgid(0, order["group"])
        if cgroup is not None:
            # Before the targets are placed, because one may have the number of the group's fd. Also
            # before the user changes: the group belongs to the user of the keeper.
            step = "cgroup"
            cgroup.enter()
            step = "fork"
        for fd, target in zip(fds, targets, strict=True):
            os.dup2(fd, target, inheritable=True)
        if order["terminal"] is not None:
            # Before the user changes, because chown needs the privileges of the current user.
            step = "terminal"
            # The terminal replaces the pipes, so it is the only stream and stands at fd 0
            # (`ChildStreams`).
            assert 0 in targets
            _take_terminal(order["terminal"], order["user"])
        # Also before the user changes: raising a limit or the priority may need privileges that the
        # other user does not have.
        step = "limits"
        set_soft_nofile(order["nofile"])
        if order["limits"]:
            _set_limits(order["limits"])
        if order["user"]:
            step = "user"
            uid, gid, groups, folder = order["user"]
            syscalls.become_user(uid, gid, groups)
            # The child is in that folder already, but it entered with the keeper's rights. The
            # other user must be able to enter it too.
            step = "cwd"
            os.chdir(folder)
        step = "exec"
        # As late as possible: until here the handlers of the keeper protect the child against stray
        # signals.
        _reset_signals(order)
        syscalls.execve(order["path"], order["argv"], order["env"])
    except OSError as exc:
        os.write(tell, f"{step}:{exc.errno}".encode())
    except BaseException:
        # setrlimit raises ValueError for some pairs. Every failure must be reported, because an
        # empty pipe means success. 22 is EINVAL.
        os.write(tell, f"{step}:22".encode())
    finally:
        # Never return into the code of the keeper: two processes would then believe that they are
        # the keeper.
        os._exit(127)


def _take_terminal(request: int, user: Any) -> None:
    """Make the terminal at fd 0 the controlling terminal, and use it for all three streams.

    Ctrl-C and the hangup come from the controlling terminal.
    """
    for target in (1, 2):
        os.dup2(0, target, inheritable=True)
    syscalls.ioctl(0, request, 0)
    if user:
        # Otherwise the other user could not open the terminal by its name, as gpg and screen do.
        syscalls.chown(0, user[0], -1)


def _set_limits(limits: Order) -> None:
    if limits["nice"] is not None:
        os.setpriority(os.PRIO_PROCESS, 0, limits["nice"])
    if limits["oom_score_adj"] is not None:
        # The zygote and its forks are not dumpable until exec(). The files of this process in /proc
        # belong to root as long as that flag is set.
        syscalls.prctl(syscalls.PR_SET_DUMPABLE, 1)
        fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
        os.write(fd, str(limits["oom_score_adj"]).encode())
        os.close(fd)
    # Last, because a low limit of open files would make the lines above fail.
    for number, pair in limits["rlimits"]:
        resource.setrlimit(number, pair)


def _reset_signals(order: Order) -> None:
    # exec() resets handlers but keeps ignored signals ignored.
    for number in DEFAULT_SIGNALS:
        is_ignored = number in order["ignored"]
        signals.signal(number, signals.SIG_IGN if is_ignored else signals.SIG_DFL)
    # The signal mask survives exec() too. A command that starts with a blocked TERM could not be
    # stopped politely. Only `guard` passes the mask of its caller on.
    signals.pthread_sigmask(signals.SIG_SETMASK, order["mask"])


# Plain numbers: the `signal` module costs memory in each keeper (see `syscalls.py`).
SIGCHLD, SIGPIPE, SIGCONT = 17, 13, 18


def stay_deaf() -> None:
    """Install handlers, so that no ordinary signal ends this process."""
    for number in _UNHEARD:
        signals.signal(number, _nothing)
    # Writing to a host that is gone must raise an error that can be caught. The default action
    # would kill the process that cleans up.
    signals.signal(SIGPIPE, signals.SIG_IGN)


def wake_on_child() -> tuple[int, int]:
    """Return a pipe `(read, write)` that becomes readable when a child dies."""
    woken, wake = syscalls.pipe()
    # The standard streams are /dev/null from the start of the zygote, so the kernel cannot assign
    # their numbers here. Otherwise a helper (`sudo kill`) would inherit the pipe as its stdio. No
    # caller has a command yet.
    assert woken > 2
    assert wake > 2
    # Both ends do not block. Signals must never block in a full pipe, and a full pipe is readable
    # anyway.
    syscalls.set_blocking(woken, False)
    syscalls.set_blocking(wake, False)
    signals.set_wakeup_fd(wake, warn_on_full_buffer=False)
    # SIGCHLD is ignored by default, and Python writes to the wakeup fd only for signals with a
    # handler.
    signals.signal(SIGCHLD, _nothing)
    return woken, wake


def wake_parent() -> None:
    """Continue the zygote if something has stopped it. CONT has no effect on a running process."""
    # The parent may die between the two calls, and its pid may be reused. Then CONT reaches another
    # process of this user, and at most continues it. That harm is too small for a pidfd.
    try:
        syscalls.kill(os.getppid(), SIGCONT)
    except OSError:
        pass  # The zygote is dead. The new parent is a process that this one may not signal.


def _nothing(_number: int, _frame: object) -> None:
    pass


def close_all_but(*kept: int) -> None:
    """Close all fds of this process except these and the fd of /proc."""
    # os.closerange is no option. Where the kernel or its sandbox has no close_range(), it calls
    # close() for every possible number, and there may be two thousand million.
    for name in syscalls.list_proc("self/fd"):
        if int(name) not in (*kept, syscalls.proc_fd):
            try:
                syscalls.close_fd(int(name))
            except OSError:
                pass  # The fd that listed the folder. It is closed already.


def milliseconds_until(due: float) -> float:
    """Return a timeout for poll(): not negative, rounded up, and at most a minute.

    Rounding up avoids a busy loop just before the deadline. The bound is needed because poll()
    takes an int. The callers check the clock after each wake-up, so a wake-up per minute without a
    reason is harmless.
    """
    return min(max(0.0, due - time.monotonic()) * 1000 + 1, 60_000)


def read_file(fd: int) -> bytes:
    """Read a whole file from its beginning."""
    size = os.fstat(fd).st_size
    # The writer has left the offset at the end, and both processes share it.
    os.lseek(fd, 0, os.SEEK_SET)
    pieces: list[bytes] = []
    while size > 0:
        piece = syscalls.read(fd, size)
        assert piece
        pieces.append(piece)
        size -= len(piece)
    return b"".join(pieces)
