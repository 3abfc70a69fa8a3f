"""The host's end of the zygote: started at the first spawn, replaced when dead or outdated, ended at exit.

One zygote serves the whole process: every loop, every thread, every host object. It is a frozen copy of what this
process was when it started; when what a child would inherit has changed since (`attributes.py`), a new zygote is
started and the old one stays only as long as it has commands to guard.

The zygote is our own child, unreaped, and held by a pidfd: the only process the host ever signals itself.
"""

from __future__ import annotations

import _socket
import atexit
import contextlib
import errno
import os
import select
import signal
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from banksman.errors import MachineError, Refused, UsageError, no_room
from banksman.process import attributes, syscalls
from banksman.process.keeper import messages

# What `shutdown` waits for beyond the longest grace of a running command: the keepers' sweep has its own bound of 5 s.
SHUTDOWN_SECONDS_MAX = 7.0
_REQUEST_FD = 3


class Child(Protocol):
    """What the spawner knows of a running process: how to let go of it."""

    grace: float

    def let_go(self) -> None: ...
    def forget(self) -> None: ...


class ZygoteHandle:
    """One zygote process: its socket, its pidfd, and how many commands it still guards."""

    def __init__(self, requests: _socket.socket, pid: int, pidfd: int, fingerprint: object) -> None:
        self.pid = pid
        self.fingerprint = fingerprint
        self.is_retired = False
        self._requests: _socket.socket | None = requests
        self._pidfd = pidfd
        self._users = 0

    def request(self, message: bytes, fds: Sequence[int] = ()) -> None:
        """Send without waiting. BlockingIOError: the zygote is busy. BrokenPipeError: it is dead."""
        if self._requests is None:
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
        if fds:
            syscalls.send_fds(self._requests, message, fds)
        else:
            syscalls.send(self._requests, message)

    def fileno(self) -> int:
        """The socket's fd, to wait until it is writable."""
        return -1 if self._requests is None else self._requests.fileno()

    def use(self) -> None:
        self._users += 1

    def release(self) -> None:
        self._users -= 1
        assert self._users >= 0
        if self.is_retired and self._users == 0:
            self.hang_up()

    def retire(self) -> None:
        self.is_retired = True
        if self._users == 0:
            self.hang_up()

    def hang_up(self) -> None:
        """Close our end: it takes no more requests and leaves after its last keeper."""
        if self._requests is not None:
            self._requests.close()
            self._requests = None

    def kill(self) -> None:
        """For one that does not answer. Its keepers are guarded by themselves alone from now on."""
        with contextlib.suppress(OSError):
            syscalls.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def wake(self) -> None:
        """If somebody has stopped it, it goes on: a stopped guard guards nobody."""
        with contextlib.suppress(OSError):
            syscalls.pidfd_send_signal(self._pidfd, signal.SIGCONT)

    def wait_gone(self, seconds: float) -> bool:
        """Block until the process has ended and reap it; False if it has not within `seconds`."""
        if self._pidfd < 0:
            return True
        poller = select.poll()
        poller.register(self._pidfd, select.POLLIN)
        if not poller.poll(max(0.0, seconds) * 1000):
            return False
        # A program that waits for any child (waitpid(-1)) may have reaped it before us.
        with contextlib.suppress(ChildProcessError):
            syscalls.waitpid(self.pid, 0)
        self.forget()
        return True

    def forget(self) -> None:
        """Give up the fds, without a word to anybody."""
        self.hang_up()
        # Taken out first: two threads may wait for the same zygote's end, and only one may close this.
        fd, self._pidfd = self._pidfd, -1
        if fd >= 0:
            syscalls.close(fd)


class Spawner:
    """Which zygote is current. Safe from any thread; nothing here waits, but `shutdown`."""

    def __init__(self) -> None:
        # Protects `_zygote`, `_retired` and `_children`. Held for the start of a zygote (a posix_spawn, about 1 ms) and
        # for one non-blocking send; nothing that is called while it is held takes another lock. Both locks may be taken
        # again by the thread that has them: `shutdown` is what people call in signal handlers, and signals come twice.
        self._lock = threading.RLock()
        # Serialises `shutdown`, and is held while it waits: whoever comes second must not be told that all is gone
        # while the first is still seeing to it. Taken before `_lock`, never inside it.
        self._shutdown_lock = threading.RLock()
        # Held while fds are made or closed, and by a fork of the program, which thus finds all of them known and open.
        # Taken before any other.
        self.fork_lock = threading.RLock()
        self._zygote: ZygoteHandle | None = None
        self._retired: list[ZygoteHandle] = []
        # Zygotes of processes that were collected without being closed. A collection can come at any moment, also while
        # this very thread holds the lock, so it only leaves a note here (appending is atomic).
        self._dropped: deque[ZygoteHandle] = deque()
        self._children: weakref.WeakSet[Child] = weakref.WeakSet()
        self._is_over = False
        self.plan_text = ""

    def spawn(self, order: bytes | None, fds: list[int], grace: float, fingerprint: object) -> ZygoteHandle:
        """Hand an order to a zygote that is alive and up to date. BlockingIOError: try again when it is writable."""
        with self.fork_lock, self._lock:
            self._reap_retired()
            message = messages.encode(messages.SPAWN, len(fds), grace, order)
            zygote = self._current(fingerprint)
            try:
                zygote.request(message, fds)
            except ConnectionError:
                # It was killed. What was not taken by a process that no longer is was certainly not started.
                self._retire(zygote)
                zygote = self._current(fingerprint)
                zygote.request(message, fds)
            zygote.use()
            return zygote

    def know(self, child: Child) -> None:
        """Before it has its first fd: from then on a fork of the program must find it."""
        with self._lock:
            self._children.add(child)

    def current(self, fingerprint: object) -> ZygoteHandle:
        with self.fork_lock, self._lock:
            return self._current(fingerprint)

    def pids(self) -> frozenset[int]:
        """The zygotes: children of this program, also those that are on their way out."""
        with self._lock:
            return frozenset(zygote.pid for zygote in (*self._retired, *([self._zygote] if self._zygote else [])))

    def release(self, child: Child, zygote: ZygoteHandle | None) -> None:
        with self._lock:
            self._children.discard(child)
            if zygote is not None:
                zygote.release()

    def drop(self, zygote: ZygoteHandle) -> None:
        """For a finaliser: like `release`, later."""
        self._dropped.append(zygote)

    def end(self) -> None:
        """At interpreter exit: like `shutdown`, and nothing more is started, by whatever thread is still running."""
        self._is_over = True
        self.shutdown()

    def replace(self, zygote: ZygoteHandle) -> None:
        """This one does not answer: end it, and let the next spawn start another."""
        with self._lock:
            zygote.kill()
            if self._zygote is zygote:
                self._retire(zygote)

    def shutdown(self) -> bool:
        """End every command of this process and the zygotes, and wait for them; True if all are gone.

        Commands get TERM at once and KILL after their grace. May be called more than once, and from any thread; a
        spawn after it starts a new zygote.
        """
        with self._shutdown_lock:
            return self._shutdown()

    def _shutdown(self) -> bool:
        with self._lock:
            children = list(self._children)
            if self._zygote is not None:
                self._retire(self._zygote)
            zygotes = list(self._retired)
        longest = max((child.grace for child in children), default=0.0)
        for child in children:
            child.let_go()
        for zygote in zygotes:
            zygote.wake()
            zygote.hang_up()
        deadline = time.monotonic() + longest + SHUTDOWN_SECONDS_MAX
        left = [zygote for zygote in zygotes if not zygote.wait_gone(deadline - time.monotonic())]
        with self._lock:
            self._retired = [zygote for zygote in self._retired if zygote not in zygotes or zygote in left]
        return not left

    def before_fork(self) -> None:
        self.fork_lock.acquire()

    def after_fork(self) -> None:
        self.fork_lock.release()

    def forget_in_fork(self) -> None:
        """In a forked child of the program: the commands are our parent's, and holding their ends would keep pipes open
        that the parent closes. Threads do not survive a fork, so a lock held by one would stay held for ever."""
        self._lock, self._shutdown_lock, self.fork_lock = threading.RLock(), threading.RLock(), threading.RLock()
        for child in list(self._children):
            child.forget()
        self._children = weakref.WeakSet()
        for zygote in (*self._retired, *([self._zygote] if self._zygote else [])):
            zygote.forget()
        self._zygote, self._retired = None, []

    # Those below are called with the lock held.
    def _current(self, fingerprint: object) -> ZygoteHandle:
        if self._is_over:
            raise Refused("the program is ending; it starts nothing more")
        if self._zygote is not None and self._zygote.fingerprint != fingerprint:
            self._retire(self._zygote)
        if self._zygote is None:
            self._zygote = _start(fingerprint, self.plan_text)
        return self._zygote

    def _retire(self, zygote: ZygoteHandle) -> None:
        zygote.retire()
        self._zygote = None
        self._retired.append(zygote)

    def _reap_retired(self) -> None:
        while self._dropped:
            self._dropped.popleft().release()
        self._retired = [zygote for zygote in self._retired if not zygote.wait_gone(0)]


def _start(fingerprint: object, plan_text: str) -> ZygoteHandle:
    entry = os.path.join(os.path.dirname(__file__), "keeper", "__main__.py")
    if not sys.executable or getattr(sys, "frozen", False) or not os.path.isfile(entry):
        # In a program that is frozen into one file this would start that program again.
        raise UsageError(
            "Banksman cannot start a Python for its keepers",
            hint="it needs a sys.executable that is a Python, and to be installed as files: not frozen, not in a zip",
        )
    # Where /proc is another namespace's, its pids are not ours, and looking for a tree there would find strangers.
    if os.readlink("/proc/self") != str(os.getpid()):
        hint = "mount one: mount -t proc proc /proc, or unshare --mount-proc"
        raise MachineError("/proc belongs to another pid namespace than this program", hint=hint)
    # An interpreter that finds its libraries by this variable needs it; nothing else of the environment matters. With
    # its symbols bound at once no keeper writes to the pages where they are.
    env = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ} | {"LD_BIND_NOW": "1"}
    try:
        ours, theirs = socketpair()
    except OSError as exc:
        raise no_room("socketpair", exc) from exc
    pid = 0
    argv = [sys.executable, "-I", "-S", entry, str(_REQUEST_FD), str(os.getpid()), plan_text]
    # The standard streams are not kept: whoever reads the host's stdout waits for its last holder, and the zygote
    # outlives the host by as long as there is something to end.
    actions = [
        (os.POSIX_SPAWN_DUP2, theirs.fileno(), _REQUEST_FD),
        *((os.POSIX_SPAWN_OPEN, n, "/dev/null", os.O_RDWR, 0) for n in (0, 1, 2)),
    ]
    try:
        pid = syscalls.posix_spawn(
            sys.executable, argv, env, file_actions=actions, setsid=True, setsigmask=(), setsigdef=[signal.SIGPIPE]
        )
        pidfd = syscalls.above_stdio(syscalls.pidfd_open(pid))
    except OSError as exc:
        ours.close()
        if pid:
            # It sees its socket closed and leaves by itself.
            syscalls.waitpid(pid, 0)
        raise no_room("zygote", exc) from exc
    finally:
        theirs.close()
    return ZygoteHandle(ours, pid, pidfd, fingerprint)


def socketpair() -> tuple[_socket.socket, _socket.socket]:
    """Two ends of a message socket, neither of them under the number of a standard stream."""
    pair = syscalls.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    if min(end.fileno() for end in pair) > 2:
        return pair
    a, b = (_socket.socket(fileno=syscalls.above_stdio(end.detach())) for end in pair)
    return a, b


def warm_up() -> None:
    """Start the zygote before it is needed: it gets ready on another core meanwhile."""
    if sys.platform == "linux":
        spawner.current(attributes.take_inherited().fingerprint)


spawner = Spawner()
os.register_at_fork(
    before=spawner.before_fork, after_in_parent=spawner.after_fork, after_in_child=spawner.forget_in_fork
)
atexit.register(spawner.end)
