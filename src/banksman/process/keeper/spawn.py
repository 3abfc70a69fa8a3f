"""Start the command: the last step before the program takes over, done in the keeper.

Two ways. `posix_spawn` is a third of the cost of a fork of this interpreter and does all that most commands need.
Limits it cannot set, and the keeper must not set them on itself (an RLIMIT_CPU or a low RLIMIT_NOFILE would end the
keeper before its tree): a command with limits is forked, and the child sets them. So is one that takes a terminal as
its own, which only the leader of a session can, and one of another user, which the keeper must not become.
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

    Order = dict[str, Any]

# Python ignores SIGPIPE and SIGXFSZ, and an ignored signal stays ignored across exec: every signal whose action can be
# changed goes back to its default. 32 and 33 belong to the C library.
DEFAULT_SIGNALS = [n for n in range(1, 65) if n not in (9, 19, 32, 33)]

# Asked to stop by name (`pkill python`, a service manager that signals a whole group), a guard stays at its post: it
# leaves when its tree is gone. Handlers, and not SIG_IGN, because an ignored signal would stay ignored in the child.
_UNHEARD = (1, 2, 3, 15, 10, 12, 14)


class SpawnFailed(Exception):
    def __init__(self, step: str, number: int) -> None:
        super().__init__(step, number)
        self.step = step
        self.errno = number


def spawn(order: Order, cwd: int, fds: list[int]) -> int:
    """Start what `order` says in its own session and return its pid. `fds` become the child's `order["targets"]`."""
    targets: list[int] = order["targets"]
    assert len(fds) == len(targets)
    fds = _clear_of(fds, set(targets))
    try:
        syscalls.umask(order["umask"])
        syscalls.fchdir(cwd)
    except OSError as exc:
        raise SpawnFailed("cwd", exc.errno or 0) from exc
    if order["limits"] or order["terminal"] is not None or order["user"]:
        return _fork_exec(order, fds, targets)
    actions = [(os.POSIX_SPAWN_DUP2, fd, target) for fd, target in zip(fds, targets, strict=True)]
    path, argv, env = order["path"], order["argv"], order["env"]
    # Zygote and keepers run with as many fds as they may have, and the host may have raised its own limit; the child
    # must see neither, since a program that still uses select() breaks on fds over 1023.
    set_soft_nofile(order["nofile"])
    try:
        return syscalls.posix_spawn(
            path, argv, env, file_actions=actions, setsid=True, setsigmask=(), setsigdef=DEFAULT_SIGNALS
        )
    except OSError as exc:
        raise SpawnFailed("exec", exc.errno or 0) from exc
    finally:
        set_soft_nofile(None)


def set_soft_nofile(soft: int | None) -> None:
    """This process's own soft limit: `soft`, or with None as high as it may be (a sweep needs an fd per process)."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    wanted = hard if soft is None else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))


def _clear_of(fds: list[int], targets: set[int]) -> list[int]:
    """The same files under numbers that are no target, so that putting one in place never overwrites another."""
    clear: list[int] = []
    for fd in fds:
        # The ones in the way stay open until all are placed; otherwise dup() would hand the same number out again.
        while fd in targets:
            fd = syscalls.dup(fd)  # noqa: PLW2901
        clear.append(fd)
    return clear


def _fork_exec(order: Order, fds: list[int], targets: list[int]) -> int:
    """Fork, do in the child what only it can, exec. The child says what went wrong through a pipe that exec closes."""
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
        _become(order, fds, targets, tell)
    syscalls.close(tell)
    try:
        failure = syscalls.read(said, 64)
    finally:
        syscalls.close(said)
    if failure:
        syscalls.waitpid(pid, 0)
        step, number = failure.decode().split(":")
        raise SpawnFailed(step, int(number))
    return pid


def _become(order: Order, fds: list[int], targets: list[int], tell: int) -> None:
    """In the child: never returns."""
    step = "fork"
    try:
        while tell in targets:
            tell = os.dup(tell)
        syscalls.setsid()
        for fd, target in zip(fds, targets, strict=True):
            os.dup2(fd, target, inheritable=True)
        if order["terminal"] is not None:
            step = "terminal"
            _take_terminal(order["terminal"], order["user"])
        step = "limits"
        set_soft_nofile(order["nofile"])
        if order["limits"]:
            _set_limits(order["limits"])
        if order["user"]:
            step = "user"
            uid, gid, groups, folder = order["user"]
            syscalls.become_user(uid, gid, groups)
            # We are in that folder already, but as who we were: the user must be able to come here.
            step = "cwd"
            os.chdir(folder)
        step = "exec"
        _reset_signals()
        syscalls.execve(order["path"], order["argv"], order["env"])
    except OSError as exc:
        os.write(tell, f"{step}:{exc.errno}".encode())
    except BaseException:
        # setrlimit refuses some pairs with a ValueError. Whatever it was: not a word on the pipe would mean success.
        os.write(tell, f"{step}:22".encode())
    finally:
        os._exit(127)


def _take_terminal(request: int, user: Any) -> None:
    """Make the terminal under 0 ours: for all three streams, and the one that Ctrl-C and the hang-up come from."""
    for target in (1, 2):
        os.dup2(0, target, inheritable=True)
    syscalls.ioctl(0, request, 0)
    if user:
        # Else its own user could not open it by its name (as gpg and screen do).
        syscalls.chown(0, user[0], -1)


def _set_limits(limits: Order) -> None:
    if limits["nice"] is not None:
        os.setpriority(os.PRIO_PROCESS, 0, limits["nice"])
    if limits["oom_score_adj"] is not None:
        # The zygote is not dumpable and neither is its fork, until exec(): our files in /proc belong to root.
        syscalls.prctl(syscalls.PR_SET_DUMPABLE, 1)
        fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
        os.write(fd, str(limits["oom_score_adj"]).encode())
        os.close(fd)
    # Last: a low limit of open files would be in the way of the lines above.
    for number, pair in limits["rlimits"]:
        resource.setrlimit(number, pair)


def _reset_signals() -> None:
    for number in DEFAULT_SIGNALS:
        signals.signal(number, signals.SIG_DFL)
    signals.pthread_sigmask(signals.SIG_SETMASK, ())


SIGCHLD, SIGPIPE, SIGCONT = 17, 13, 18


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
