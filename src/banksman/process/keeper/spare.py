"""How a keeper process begins: forked ahead as a spare, or for one command; then it starts the command and stays.

Most of what a start costs is this process: its fork, and the first touch of every page it shares with the zygote. A
spare that waits for its command has all of that behind it.
"""

from __future__ import annotations

import _socket
import marshal
import os
import select
import time

from banksman.process import syscalls
from banksman.process.keeper import messages
from banksman.process.keeper.keeper import RUNNING, Keeper, LeaseTimer
from banksman.process.keeper.spawn import SpawnFailed, close_all_but, read_file, spawn, wake_on_child, wake_parent

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def be_spare(orders: _socket.socket, host: int) -> None:
    """Run in a freshly forked process: get ready, wait for a command to keep, keep it. `host` is a pidfd."""
    woken = get_ready(orders.fileno(), host)
    syscalls.prctl(syscalls.PR_SET_NAME, b"banksman-spare")
    poller = select.poll()
    for fd in (orders.fileno(), host):
        poller.register(fd, select.POLLIN)
    while orders.fileno() not in dict(syscalls.poll(poller, None)):
        # The host is dead, and the zygote has to end what it left. If a command has stopped the zygote, nothing else
        # continues it.
        wake_parent()
        poller.unregister(host)
    data, fds = syscalls.recv_fds(orders)
    if data:
        keep(data, fds, host, woken)
    # At once: taking everything apart first would touch every page once more.
    os._exit(messages.DUTY_DONE)


def be_keeper(data: bytes, fds: list[int], host: int) -> None:
    """The same for a process that was forked with the command's fds already open."""
    keep(data, fds, host, get_ready(*fds, host))
    os._exit(messages.DUTY_DONE)


def get_ready(*kept: int) -> tuple[int, int]:
    syscalls.setsid()
    syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1)
    close_all_but(0, 1, 2, *kept)
    return wake_on_child()


def keep(data: bytes, fds: list[int], host: int, woken: tuple[int, int]) -> None:
    """Start the command and stay until its tree is gone."""
    syscalls.prctl(syscalls.PR_SET_NAME, messages.KEEPER)
    _word, _count, _grace, order_bytes = messages.decode(data)
    if order_bytes is None:
        order_bytes = read_file(fds.pop())
    order: dict[str, Any] = marshal.loads(order_bytes)
    if order["is_agents"]:
        syscalls.prctl(syscalls.PR_SET_NAME, messages.AGENTS_KEEPER)
    control_fd, cwd, *fds = fds
    page = fds.pop(0) if order["has_lease"] else None
    control = _socket.socket(fileno=control_fd)
    if is_spoken_to(control):
        # The host has hung up or wants it stopped, before it was even begun. Whoever was told that it is over must not
        # see it start after all.
        syscalls.send(control, messages.encode(messages.FAILED, "stopped", 0))
        return
    try:
        lease = LeaseTimer(page)
        if lease.is_due(RUNNING, time.monotonic()):
            raise SpawnFailed("lease", 0)  # The order has waited for us, or for a host that was stopped, too long.
        leader = spawn(order, cwd, fds)
    except SpawnFailed as exc:
        syscalls.send(control, messages.encode(messages.FAILED, exc.step, exc.errno))
        return
    except OSError as exc:
        syscalls.send(control, messages.encode(messages.FAILED, "memory", exc.errno or 0))
        return
    # The folder must not be held by us (it may be on a mount that somebody wants to unmount), nor must any of the
    # child's files (a pipe's reader waits for the last writer, and that must be the child).
    os.chdir("/")
    close_all_but(0, 1, 2, control_fd, host, *woken)
    Keeper(control, host, woken[0], leader, order, lease).stay()


def rehearse(host: int) -> None:
    """Keep a command that does nothing, in the zygote itself, before there are keepers.

    Python adapts its code while it runs and fills caches as it goes, and all of that is written into memory that a fork
    shares. What the zygote has done once its keepers find done: a tenth less memory for each. Nothing depends on it.
    """
    null = syscalls.open_fd("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    woken = wake_on_child()
    ours, theirs = syscalls.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    order: dict[str, Any] = {
        **{"path": b"/bin/true", "argv": (b"true",), "env": {}, "umask": 0o077, "limits": None, "nofile": 1024},
        **{"targets": [1, 2], "grace": 5.0, "linger": 0.3, "deadline": None, "has_lease": False},
        **{"terminal": None, "user": None, "ender": None, "is_agents": False},
    }
    order = marshal.loads(messages.decode(messages.encode(messages.SPAWN, 0, 5.0, marshal.dumps(order)))[3])
    folder = syscalls.open_fd("/", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        is_spoken_to(theirs)
        Keeper(theirs, host, woken[0], spawn(order, folder, [null, null]), order, LeaseTimer(None)).stay()
    finally:
        for fd in (null, folder, *woken):
            syscalls.close(fd)
        ours.close()
        theirs.close()


def is_spoken_to(control: _socket.socket) -> bool:
    try:
        syscalls.recv(control)
    except BlockingIOError:
        return False
    return True
