"""Host side of the zygote: start it, send requests, replace it when dead or outdated, end it.

The zygote is the process that forks the parent of each command (`keeper/zygote.py`). `Spawner` also
knows all running children: `shutdown` ends them, and a fork of the program forgets them.

One zygote serves the whole process: every loop, every thread, every host object. It is a frozen
copy of the attributes that this process had when it started. If the attributes that a child would
inherit have changed since (`attributes.py`), a new zygote is started. The old one stays as long as
it has commands to guard.

A process that this program has adopted from another host (`adoption.py`) is guarded by the zygote
of the host that started it: see `AdoptedZygote`.

The zygote is an unreaped child of this process, held by a pidfd. Apart from the processes of dead
hosts (`orphans.py`), it is the only process that the host signals directly.
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

# How long `shutdown` waits in addition to the longest grace of a running command. The sweep of the
# keepers has a bound of 5 s.
SHUTDOWN_SECONDS_MAX = 7.0
_REQUEST_FD = 3


class Child(Protocol):
    """A running process, as far as the spawner has to know it.

    `let_go` announces that no further order follows. `forget` closes the fds without touching the
    loop.
    """

    grace: float

    def let_go(self) -> None: ...
    def forget(self) -> None: ...


class ZygoteHandle:
    """One zygote process: its socket, its pidfd, and the number of commands that it guards."""

    def __init__(self, requests: _socket.socket, pid: int, pidfd: int, fingerprint: object) -> None:
        self.pid = pid
        self.fingerprint = fingerprint
        self.is_retired = False
        self._requests: _socket.socket | None = requests
        self._is_hung_up = False
        # It has said that only trees are left which this host has handed over.
        self._is_done = False
        self._pidfd = pidfd
        self._users = 0

    def request(self, message: bytes, fds: Sequence[int] = ()) -> None:
        """Send a request without blocking.

        BlockingIOError: the zygote is busy. BrokenPipeError: it is dead.
        """
        if self._requests is None:
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
        if fds:
            syscalls.send_fds(self._requests, message, fds)
        else:
            syscalls.send(self._requests, message)

    def fileno(self) -> int:
        """Return the fd of the socket, to wait until it is writable."""
        return -1 if self._requests is None else self._requests.fileno()

    def use(self) -> None:
        """Count one more command."""
        self._users += 1

    def release(self) -> None:
        """Count one command less. The last command of a retired zygote ends it."""
        self._users -= 1
        assert self._users >= 0
        if self.is_retired and self._users == 0:
            self.hang_up()

    def retire(self) -> None:
        """Mark the zygote as outdated: it ends after its last command."""
        self.is_retired = True
        if self._users == 0:
            self.hang_up()

    def hang_up(self) -> None:
        """End the requests. The zygote then exits after its last keeper."""
        if self._requests is not None and not self._is_hung_up:
            self._is_hung_up = True
            with contextlib.suppress(OSError):
                # Only the sending side: see `wait_done`.
                self._requests.shutdown(_socket.SHUT_WR)

    def kill(self) -> None:
        """Kill a zygote that does not answer. Its keepers have no guard from now on."""
        with contextlib.suppress(OSError):
            syscalls.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def wake(self) -> None:
        """Continue the zygote if it was stopped: a stopped zygote guards nothing."""
        with contextlib.suppress(OSError):
            syscalls.pidfd_send_signal(self._pidfd, signal.SIGCONT)

    def wait_gone(self, seconds: float) -> bool:
        """Block until the process has exited and reap it; False if it has not within `seconds`."""
        if self._pidfd < 0:
            return True
        poller = select.poll()
        poller.register(self._pidfd, select.POLLIN)
        if not poller.poll(max(0.0, seconds) * 1000):
            return False
        # A program that waits for any child (waitpid(-1)) may have reaped the zygote already.
        with contextlib.suppress(ChildProcessError):
            syscalls.waitpid(self.pid, 0)
        self.forget()
        return True

    def wait_done(self, seconds: float) -> bool:
        """Block until the process has exited, or has only trees left that were handed over.

        Call this after `hang_up`. False if neither happens within `seconds`.
        """
        deadline = time.monotonic() + seconds
        # The zygote sends one message to this end, DONE. At its exit this end is readable too.
        if self._requests is not None and self._wait_readable(seconds):
            self._is_done = self._is_done or _has_message(self._requests)
        return self._is_done or self.wait_gone(deadline - time.monotonic())

    def _wait_readable(self, seconds: float) -> bool:
        """Block until the zygote has spoken, closed its end, or exited."""
        poller = select.poll()
        for fd in (self.fileno(), self._pidfd):
            if fd >= 0:
                poller.register(fd, select.POLLIN)
        return bool(poller.poll(max(0.0, seconds) * 1000))

    @property
    def is_dead(self) -> bool:
        """Whether the process has exited, reaped or not."""
        poller = select.poll()
        poller.register(self._pidfd, select.POLLIN)
        return bool(poller.poll(0))

    @property
    def is_gone(self) -> bool:
        """Whether `wait_gone` has seen the exit."""
        return self._pidfd < 0

    @property
    def pidfd(self) -> int:
        """The pidfd, or -1 if the process has exited."""
        return self._pidfd

    def forget(self) -> None:
        """Close the fds without any message."""
        requests, self._requests = self._requests, None
        if requests is not None:
            requests.close()
        # Take the number first: two threads may wait for the end of the same zygote, and only one
        # of them may close the fd.
        fd, self._pidfd = self._pidfd, -1
        if fd >= 0:
            syscalls.close(fd)


def _has_message(sock: _socket.socket) -> bool:
    try:
        return syscalls.recv(sock) != b""
    except OSError:
        return False


class AdoptedZygote(ZygoteHandle):
    """The zygote of another host, as far as it guards one process that was adopted from there.

    Its socket is the channel that came with the process (`keeper/successors.py`). The zygote closes
    its end when nothing of that tree is left. It may then live on for other trees.
    """

    def __init__(self, channel: _socket.socket, pid: int, pidfd: int) -> None:
        super().__init__(channel, pid, pidfd, None)
        # No command is started by it.
        self.is_retired = True

    def wait_gone(self, seconds: float) -> bool:
        """Block until nothing of the tree is left, or the zygote is dead."""
        is_gone = self.is_gone or self._wait_readable(seconds)
        if is_gone:
            self.forget()
        return is_gone

    def wait_done(self, seconds: float) -> bool:
        return self.wait_gone(seconds)


class Spawner:
    """Registry of zygotes and of the processes that use them.

    Safe from any thread. Only `shutdown` blocks.
    """

    def __init__(self) -> None:
        # Protects `_zygote`, `_retired` and `_children`. Held for the start of a zygote (a
        # posix_spawn, about 1 ms) and for one non-blocking send. No code that runs while it is held
        # takes another lock. Both locks are reentrant: programs call `shutdown` in signal handlers,
        # and signals may arrive twice.
        self._lock = threading.RLock()
        # Serialises `shutdown`, and is held while it waits. A second caller must not learn that
        # everything is gone while the first one still waits. Taken before `_lock`, never inside it.
        self._shutdown_lock = threading.RLock()
        # Held while fds are created or closed, and during a fork of the program. So the fork finds
        # all fds registered and open. Taken before any other lock.
        self.fork_lock = threading.RLock()
        self._zygote: ZygoteHandle | None = None
        self._retired: list[ZygoteHandle] = []
        # Zygotes of processes that were garbage-collected without being closed. A collection can
        # run at any moment, even while this thread holds the lock. So the finaliser only appends
        # here (appending is atomic).
        self._dropped: deque[ZygoteHandle] = deque()
        self._children: weakref.WeakSet[Child] = weakref.WeakSet()
        self._is_over = False
        self.plan_text = ""

    def spawn(
        self, order: bytes | None, fds: list[int], grace: float, fingerprint: object
    ) -> ZygoteHandle:
        """Send an order to a current zygote that is alive.

        BlockingIOError: retry when it is writable.
        """
        with self.fork_lock, self._lock:
            self._reap_retired()
            message = messages.encode(messages.SPAWN, len(fds), grace, order)
            zygote = self._current(fingerprint)
            try:
                zygote.request(message, fds)
            except ConnectionError:
                # The zygote was killed. An order that a dead process has not read was certainly not
                # carried out, so sending it again cannot start the command twice.
                self._retire(zygote)
                zygote = self._current(fingerprint)
                zygote.request(message, fds)
            zygote.use()
            return zygote

    def know(self, child: Child) -> None:
        """Register a process before it has its first fd, so that a fork of the program finds it."""
        with self._lock:
            self._children.add(child)

    def adopt(self, child: Child, zygote: AdoptedZygote) -> None:
        """Register a process that was adopted from another host, and its use of that zygote."""
        with self._lock:
            self._reap_retired()
            zygote.use()
            self._retired.append(zygote)
            self._children.add(child)

    def current(self, fingerprint: object) -> ZygoteHandle:
        """Return the current zygote; start one if necessary."""
        with self.fork_lock, self._lock:
            return self._current(fingerprint)

    def pids(self) -> frozenset[int]:
        """Return the pids of the zygotes, including retired and adopted ones.

        The adopted ones are not children of this program, unless it reaps orphans.
        """
        with self._lock:
            zygotes = (*self._retired, *([self._zygote] if self._zygote else []))
            # 0: an adopted zygote that was dead already.
            return frozenset(zygote.pid for zygote in zygotes if zygote.pid)

    def release(self, child: Child, zygote: ZygoteHandle | None) -> None:
        """Remove a process and its use of a zygote."""
        with self._lock:
            self._children.discard(child)
            if zygote is not None:
                zygote.release()

    def drop(self, zygote: ZygoteHandle) -> None:
        """Release a zygote later: for finalisers, which must not take the lock."""
        self._dropped.append(zygote)

    def end(self) -> None:
        """Shut down at interpreter exit. No thread can start a command afterwards."""
        self._is_over = True
        self.shutdown()

    def replace(self, zygote: ZygoteHandle) -> None:
        """Kill a zygote that does not answer. The next spawn starts another one."""
        with self._lock:
            zygote.kill()
            if self._zygote is zygote:
                self._retire(zygote)

    def shutdown(self) -> bool:
        """End every command of this process and the zygotes, and wait; True if all are gone.

        Commands get TERM immediately and KILL after their grace. Commands that were handed over to
        another host are not touched, and not waited for. Callable more than once, from any
        thread. A spawn after it starts a new zygote.
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
            # Wake the zygotes first, since a stopped zygote cannot notice its closed socket.
            zygote.wake()
            zygote.hang_up()
        deadline = time.monotonic() + longest + SHUTDOWN_SECONDS_MAX
        left = [zygote for zygote in zygotes if not zygote.wait_done(deadline - time.monotonic())]
        with self._lock:
            # A zygote that lives on for trees that were handed over is still to be reaped.
            self._retired = [zygote for zygote in self._retired if not zygote.is_gone]
        return not left

    def before_fork(self) -> None:
        self.fork_lock.acquire()

    def after_fork(self) -> None:
        self.fork_lock.release()

    def forget_in_fork(self) -> None:
        """Forget everything in a forked child of the program.

        The commands belong to the parent. Copies of their fds would keep pipes open that the parent
        closes. Threads do not survive a fork, so a lock that another thread held would stay locked
        forever: hence new locks.
        """
        self._lock, self._shutdown_lock, self.fork_lock = (
            threading.RLock(),
            threading.RLock(),
            threading.RLock(),
        )
        for child in list(self._children):
            child.forget()
        self._children = weakref.WeakSet()
        for zygote in (*self._retired, *([self._zygote] if self._zygote else [])):
            zygote.forget()
        self._zygote, self._retired = None, []

    # The methods below are called with the lock held.
    def _current(self, fingerprint: object) -> ZygoteHandle:
        if self._is_over:
            raise Refused("cannot start a command: the program is ending")
        # A dead zygote is not always told by its socket: a spare that it has just forked may still
        # hold a copy, and the socket then takes an order that is lost.
        zygote = self._zygote
        if zygote is not None and (zygote.fingerprint != fingerprint or zygote.is_dead):
            self._retire(zygote)
        if self._zygote is None:
            self._zygote = _start(fingerprint, self.plan_text)
        return self._zygote

    def _retire(self, zygote: ZygoteHandle) -> None:
        zygote.retire()
        self._zygote = None
        self._retired.append(zygote)

    def _reap_retired(self) -> None:
        """Apply deferred releases, and reap retired zygotes that have exited."""
        while self._dropped:
            self._dropped.popleft().release()
        self._retired = [zygote for zygote in self._retired if not zygote.wait_gone(0)]


def _start(fingerprint: object, plan_text: str) -> ZygoteHandle:
    entry = os.path.join(os.path.dirname(__file__), "keeper", "__main__.py")
    if not sys.executable or getattr(sys, "frozen", False) or not os.path.isfile(entry):
        # In a program that is frozen into one file, sys.executable is that program, and this would
        # start it again.
        hint = "use a Python as sys.executable, and Banksman installed as files: not frozen, no zip"
        raise UsageError("cannot start a Python interpreter for the keepers", hint=hint)
    # If /proc belongs to another pid namespace, its pids do not apply to this process. A search for
    # a tree there would find unrelated processes.
    if os.readlink("/proc/self") != str(os.getpid()):
        hint = "mount the right one: mount -t proc proc /proc, or unshare --mount-proc"
        message = "cannot start a command: /proc belongs to another pid namespace than this program"
        raise MachineError(message, hint=hint)
    # Some interpreters find their libraries by this variable. No other variable matters.
    # LD_BIND_NOW binds all symbols at the start, so that no keeper writes to the pages that hold
    # them.
    env = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ} | {
        "LD_BIND_NOW": "1"
    }
    try:
        ours, theirs = socketpair()
    except OSError as exc:
        raise no_room("socketpair", exc) from exc
    pid = 0
    argv = [sys.executable, "-I", "-S", entry, str(_REQUEST_FD), str(os.getpid()), plan_text]
    # The zygote gets no standard streams of the host. The reader of the host's stdout waits for its
    # last holder, and the zygote outlives the host as long as there is a tree to end.
    actions = [
        (os.POSIX_SPAWN_DUP2, theirs.fileno(), _REQUEST_FD),
        *((os.POSIX_SPAWN_OPEN, n, "/dev/null", os.O_RDWR, 0) for n in (0, 1, 2)),
    ]
    try:
        pid = syscalls.posix_spawn(
            sys.executable,
            argv,
            env,
            file_actions=actions,
            setsid=True,
            setsigmask=(),
            setsigdef=[signal.SIGPIPE],
        )
        pidfd = syscalls.above_stdio(syscalls.pidfd_open(pid))
    except OSError as exc:
        ours.close()
        if pid:
            # The zygote sees its socket closed and exits.
            syscalls.waitpid(pid, 0)
        raise no_room("zygote", exc) from exc
    finally:
        theirs.close()
    return ZygoteHandle(ours, pid, pidfd, fingerprint)


def socketpair() -> tuple[_socket.socket, _socket.socket]:
    """Return both ends of a message socket, above the standard streams."""
    pair = syscalls.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    if min(end.fileno() for end in pair) > 2:
        return pair
    a, b = (_socket.socket(fileno=syscalls.above_stdio(end.detach())) for end in pair)
    return a, b


def warm_up() -> None:
    """Start the zygote before it is needed, so that it gets ready on another core."""
    if sys.platform == "linux":
        spawner.current(attributes.take_inherited().fingerprint)


spawner = Spawner()
os.register_at_fork(
    before=spawner.before_fork,
    after_in_parent=spawner.after_fork,
    after_in_child=spawner.forget_in_fork,
)
atexit.register(spawner.end)
