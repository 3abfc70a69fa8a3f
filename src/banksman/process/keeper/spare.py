"""Main functions of a keeper process: wait as a spare or begin directly, then run one command.

`zygote.py` forks the process, `spawn.py` starts the command, and `keeper.py` supervises it.
`rehearse` does the same once in the zygote, which makes the keepers smaller.

The largest cost of a start is this process: the fork, and the first write to every page that it
shares with the zygote. A spare that waits for its command has paid that cost in advance.
"""

from __future__ import annotations

import _socket
import marshal
import os
import select
import time

from banksman.process import syscalls
from banksman.process.keeper import messages
from banksman.process.keeper.cgroup import Cgroup, prune
from banksman.process.keeper.keeper import RUNNING, Keeper
from banksman.process.keeper.lease_timer import LeaseTimer
from banksman.process.keeper.spawn import (
    SpawnFailed,
    close_all_but,
    read_file,
    spawn,
    wake_on_child,
    wake_parent,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def be_spare(orders: _socket.socket, host: int) -> None:
    """Run as a spare in a freshly forked process: wait for a command, then supervise it.

    `orders`: the socket by which the zygote sends the command. `host`: a pidfd.
    """
    woken = get_ready(orders.fileno(), host)
    syscalls.prctl(syscalls.PR_SET_NAME, messages.SPARE)
    # Ordinary signals do not end a spare: it has the handlers of the zygote (`stay_deaf`). Its wait
    # ends with an order, or with the end of the socket when the zygote dies.
    poller = select.poll()
    for fd in (orders.fileno(), host):
        poller.register(fd, select.POLLIN)
    while orders.fileno() not in dict(syscalls.poll(poller, None)):
        # The host is dead, and the zygote has to clean up after it. If a command has stopped the
        # zygote, only its children can continue it.
        wake_parent()
        # A dead host stays readable. Without this the loop would spin until the zygote closes the
        # socket.
        poller.unregister(host)
    data, fds = syscalls.recv_fds(orders)
    if data:
        keep(data, fds, host, woken)
    # Exit without interpreter shutdown, which would touch every shared page once more. A spare
    # without a command had no tree, so its work is done too.
    os._exit(messages.DUTY_DONE)


def be_keeper(data: bytes, fds: list[int], host: int) -> None:
    """Run as a keeper in a process that was forked with the fds of its command already open."""
    keep(data, fds, host, get_ready(*fds, host))
    # `keep` returns only if nothing was started or ECHILD has proven the end. All other ways out
    # are exceptions, and the status says so: see `Zygote._fork`.
    os._exit(messages.DUTY_DONE)


def get_ready(*kept: int) -> tuple[int, int]:
    """Set up a keeper process and return its wake-up pipe."""
    # The keeper must see the /proc that the zygote opened before any command ran. A command can
    # mount another one over it, and a sweep would find no process of the tree there.
    assert syscalls.proc_fd >= 0
    # A separate session: signals to the process group or the terminal of the host do not reach the
    # keeper.
    syscalls.setsid()
    # Before the command starts, so that no orphan of its tree can escape to another reaper.
    syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1)
    close_all_but(0, 1, 2, *kept)
    return wake_on_child()


def keep(data: bytes, fds: list[int], host: int, woken: tuple[int, int]) -> None:
    """Start the command and supervise it until its tree is gone."""
    syscalls.prctl(syscalls.PR_SET_NAME, messages.KEEPER)
    word, _count, _grace, order_bytes = messages.decode(data)
    # The zygote passes on nothing else.
    assert word == messages.SPAWN
    # A long order comes as a file, the last of the fds.
    if order_bytes is None:
        order_bytes = read_file(fds.pop())
    order: dict[str, Any] = marshal.loads(order_bytes)
    # `launch.prepare` resolves the helper to an absolute path. Anything else would be looked up in
    # the folder of the command, and run with more privileges.
    assert not order["ender"] or order["ender"][0].startswith(b"/")
    # Servers of this user recognise an agent's tree by this name. So the keeper has it before the
    # command exists.
    if order["is_agents"]:
        syscalls.prctl(syscalls.PR_SET_NAME, messages.AGENTS_KEEPER)
    control_fd, cwd, *fds = fds
    page = fds.pop(0) if order["has_lease"] else None
    control = _socket.socket(fileno=control_fd)
    supervise(order, control, cwd, fds, host, woken, page=page)


def supervise(  # noqa: PLR0917
    order: dict[str, Any],
    control: _socket.socket,
    cwd: int,
    fds: list[int],
    host: int,
    woken: tuple[int, int],
    *,
    page: int | None = None,
    caller: int = -1,
) -> None:
    """Start the command of a decoded order and supervise it until its tree is gone.

    `page`: an fd of the lease page. `caller`: a pidfd of the process whose death ends the tree, in
    addition to the host; see `Keeper`.
    """
    if is_spoken_to(control):
        # The host has closed its end or ordered a stop before the start. The caller may have been
        # informed that the command is over, so it must not start now. A message that arrives after
        # this check waits in the socket, and the keeper obeys it.
        syscalls.send(control, messages.encode(messages.FAILED, "stopped", 0))
        return
    cgroup: Cgroup | None = None
    try:
        # Before the check of the lease, because it may take long.
        _prune(order)
        lease = LeaseTimer(page)
        if lease.is_due(RUNNING, time.monotonic()):
            # The order waited too long, for this keeper or for a host that was stopped. Another
            # host may own the session by now, so the command must not start. This check comes last
            # before the start; a lease that ends later is a deadline of the keeper.
            raise SpawnFailed("lease", 0)
        cgroup = _make_cgroup(order)
        leader = spawn(order, cwd, fds, cgroup)
    except SpawnFailed as exc:
        if cgroup is not None:
            cgroup.remove()
        syscalls.send(control, messages.encode(messages.FAILED, exc.step, exc.errno))
        return
    except OSError as exc:
        # No memory or no fd for the mapping or for the pipes of the start.
        if cgroup is not None:
            cgroup.remove()
        syscalls.send(control, messages.encode(messages.FAILED, "memory", exc.errno or 0))
        return
    # The keeper must not hold the command's folder, which may be on a mount that has to be
    # unmounted. It must not hold the child's files either: the reader of a pipe waits for the last
    # writer, and that must be the child.
    #
    # From the spawn to the loop of the keeper nothing watches the tree. An exception in between
    # ends this process, and the zygote ends the tree.
    os.chdir("/")
    kept = () if cgroup is None else (cgroup.fd,)
    close_all_but(0, 1, 2, control.fileno(), host, *woken, caller, *kept)
    Keeper(control, host, woken[0], leader, order, lease, caller, cgroup).stay()


def _prune(order: dict[str, Any]) -> None:
    """Remove the groups of dead keepers, if it is the turn of this keeper."""
    if order["cgroup"] is not None:
        base, _settings, is_turn = order["cgroup"]
        if is_turn:
            prune(base)


def _make_cgroup(order: dict[str, Any]) -> Cgroup | None:
    """Make the control group of the command; None if it has none."""
    if order["cgroup"] is None:
        return None
    base, settings, _is_turn = order["cgroup"]
    try:
        return Cgroup(base, settings)
    except OSError as exc:
        raise SpawnFailed("cgroup", exc.errno or 0) from exc


def rehearse(host: int) -> None:
    """Supervise a command that does nothing, in the zygote itself, before any keeper exists.

    Python specialises its code and fills caches while it runs, and writes both into memory that
    forks share. Work that the zygote has done once is already done in its keepers, which saves a
    tenth of the memory of each. Nothing depends on it.
    """
    null = syscalls.open_fd("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    woken = wake_on_child()
    ours, theirs = syscalls.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    order: dict[str, Any] = {
        **{
            "path": b"/bin/true",
            "argv": (b"true",),
            "env": {},
            "umask": 0o077,
            "limits": None,
            "nofile": 1024,
        },
        **{"targets": [1, 2], "grace": 5.0, "linger": 0.3, "deadline": None, "has_lease": False},
        **{"terminal": None, "user": None, "ender": None, "is_agents": False, "cgroup": None},
        **messages.OWN_SESSION,
    }
    # Encoding and decoding once warms up `marshal` too.
    order = marshal.loads(
        messages.decode(messages.encode(messages.SPAWN, 0, 5.0, marshal.dumps(order)))[3]
    )
    folder = syscalls.open_fd("/", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        is_spoken_to(theirs)
        Keeper(
            theirs, host, woken[0], spawn(order, folder, [null, null]), order, LeaseTimer(None)
        ).stay()
    finally:
        for fd in (null, folder, *woken):
            syscalls.close(fd)
        ours.close()
        theirs.close()


def is_spoken_to(control: _socket.socket) -> bool:
    """Whether the host has sent a message or closed its end."""
    try:
        syscalls.recv(control)
    except BlockingIOError:
        return False
    return True
