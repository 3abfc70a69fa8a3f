"""Wait for, and if necessary end, the processes that a dead host has left behind.

`trace` records the identity of a process at its start. Later the host that resumes the session
calls `wait` or `end`. A keeper notices the death of its host and ends its tree by the ladder. If
the keeper was killed too, its zygote ends the tree. So the only task here is to wait for that: a
host that resumes a conversation must not do so while the old process still has it. Only if keeper
and zygote were both killed (a limit of G6, docs/guarantees.md) will nothing end the tree. Then this
module ends it, by the recorded identity of the started process, together with its descendants.

A process is identified by its pid, its start time, and the boot that both belong to. A pid alone
may belong to another process, and this module never signals a process whose identity is uncertain.
"""

from __future__ import annotations

import asyncio
import errno
import os
import time

from banksman.core.process_facts import Born
from banksman.errors import Refused
from banksman.process import syscalls
from banksman.process.keeper import messages
from banksman.process.keeper.proc_tree import census, is_alive, name_of, open_member, read_stat
from banksman.process.keeper.sweep import SIGCONT, SIGKILL, Sweep

# A keeper that lost its host sends TERM, waits for the grace of its command, and kills. A host that
# wants to resume the session does not wait for longer graces than this.
KEEPER_SECONDS_MAX = 30.0
# A killed process is gone within moments, except in uninterruptible sleep.
KILLED_SECONDS_MAX = 5.0
# Pause between two looks at the children of a zygote that sweeps.
LOOK_SECONDS_BETWEEN = 0.02

Member = tuple[int, int]  # pid and start


def boot_id() -> str:
    """Return the id of the current boot; empty where the kernel does not provide it."""
    try:
        return syscalls.read_proc("sys/kernel/random/boot_id", 64).decode().strip()
    except OSError:
        return ""


def trace(pid: int) -> Born | None:
    """Record the identity of a child, its keeper (its parent), this host and the keeper's zygote.

    Returns None if the child is hidden. If /proc hides the keeper or the zygote (`hidepid`; they
    are not dumpable), its start is recorded as 0, and it is never found later.
    """
    me = os.getpid()
    try:
        stat, mine = read_stat(pid), read_stat(me)
    except OSError:
        return None
    if stat is None or mine is None:
        return None
    keeper_start, zygote = _start_and_parent(stat[0])
    zygote_start, _ = _start_and_parent(zygote) if keeper_start else (0, 0)
    return boot_id(), pid, stat[2], stat[0], keeper_start, me, mine[2], zygote, zygote_start


def _start_and_parent(pid: int) -> tuple[int, int]:
    """Return the start time and the parent of a process; (0, 0) if it is hidden or gone."""
    try:
        stat = read_stat(pid)
    except OSError:
        stat = None
    return (0, 0) if stat is None else (stat[2], stat[0])


async def wait(born: Born, seconds: float) -> None:
    """Wait until the keeper of a dead host has ended its tree. Signals no process.

    Raises `Refused` immediately if the recorded host is another process and alive: then this store
    is a copy of the store that the host writes. Raises `Refused` after `seconds` if the keeper has
    not finished. Cancelling only stops the waiting.
    """
    boot, pid, started, *others = born
    keeper, host = (others[0], others[1]), (others[2], others[3])
    # Another boot: no process of it can exist, and its pids mean nothing here.
    if boot != boot_id() or not (_is_there(keeper) or _is_there((pid, started))):
        return
    if host[0] != os.getpid() and _is_there(host):
        hint = "use the session on that host; this store may be a copy of its store"
        reason = f"its host, process {host[0]}, is alive"
        message = f"cannot resume the session of process {pid}: {reason}"
        raise Refused(message, hint=hint, pid=host[0])
    # A living keeper is never killed. It is about to end its tree, and only the keeper can prove
    # that the tree is gone.
    if not await _wait_gone(keeper, seconds):
        hint = "wait for its end, then try again: two processes must not use one conversation"
        reason = f"its keeper, process {keeper[0]}, is still ending it"
        raise Refused(f"cannot resume the session of process {pid}: {reason}", hint=hint, pid=pid)


async def end(born: Born, seconds: float) -> list[str]:
    """Wait until nothing of the process is left, and end it if its keeper is gone.

    Returns the names of the processes that were ended here, for people. Only the owner of the
    session may call this. Raises like `wait`. Cancelling leaves the processes as they are.
    """
    await wait(born, seconds)
    boot, pid, started, *others = born
    if boot != boot_id():
        return []
    await _wait_for_zygote((others[4], others[5]))
    return await _sweep((pid, started))


def _is_there(member: Member) -> bool:
    fd = _open(member)
    if fd is not None:
        syscalls.close(fd)
    return fd is not None


async def _wait_for_zygote(zygote: Member) -> None:
    """Wait until a zygote that has survived its host has no orphan of a killed keeper left.

    The leader of a tree may be dead while the zygote still kills the rest. The orphans of several
    trees cannot be distinguished, so this waits for all of them, but not for ever: the zygote
    itself gives up on an orphan that it cannot kill.
    """
    pidfd = _open(zygote)
    if pidfd is None:
        return
    try:
        # Its parent was the host. So nothing continues a zygote that was stopped.
        syscalls.pidfd_send_signal(pidfd, SIGCONT)
    except ProcessLookupError:
        return  # It exited a moment ago, after its last orphan.
    finally:
        syscalls.close(pidfd)
    until = time.monotonic() + KILLED_SECONDS_MAX
    while _is_there(zygote) and await asyncio.to_thread(_has_orphans, zygote[0]):
        if time.monotonic() >= until:
            return
        await asyncio.sleep(LOOK_SECONDS_BETWEEN)


def _has_orphans(zygote: int) -> bool:
    """Return whether a zygote has a living child that is not a keeper. Runs in a thread."""
    children = [row[0] for row in census(zygote, near=False) if row[1] == zygote and is_alive(row)]
    return any(_comm(pid) not in messages.GUARDS for pid in children)


def _comm(pid: int) -> bytes:
    """Return the name that the kernel has for a process; empty if it is gone."""
    try:
        return syscalls.read_proc(f"{pid}/comm", 64).strip()
    except OSError:
        return b""


async def _sweep(root: Member) -> list[str]:
    """End a process and its descendants.

    The root comes last, because the descendants are found through it.
    """
    pidfd = _open(root)
    if pidfd is None:
        return []
    name = name_of(root[0])
    sweep = Sweep(root[0], reap=lambda: None)
    try:
        until = time.monotonic() + KILLED_SECONDS_MAX
        # In a thread, because each round scans /proc several times.
        while time.monotonic() < until and await asyncio.to_thread(sweep.kill):
            pass
        syscalls.pidfd_send_signal(pidfd, SIGKILL)
    except ProcessLookupError:
        pass  # The process exited a moment ago.
    finally:
        syscalls.close(pidfd)
    if not await _wait_gone(root, KILLED_SECONDS_MAX):
        message = f"cannot end the session's process {root[0]} ({name}): it still runs after KILL"
        hint = "find out why the process does not end"
        raise Refused(message, hint=hint, pid=root[0])
    return [*sweep.names.values(), name]


def _open(member: Member) -> int | None:
    """Open a pidfd of a living process. A zombie counts as gone, whichever its parent is."""
    # A start of 0 means that the process was hidden when it was recorded: see `trace`.
    if not all(member):
        return None
    try:
        fd = open_member(member)
    except OSError as exc:
        # A kernel without pidfds: no keeper can have run here.
        if exc.errno == errno.ENOSYS:
            return None
        raise
    stat = None if fd is None else read_stat(member[0])
    if fd is not None and (stat is None or stat[1] in "ZX"):
        syscalls.close(fd)
        return None
    return fd


async def _wait_gone(member: Member, seconds: float) -> bool:
    """Wait for the end of a process. False if it lasts longer than `seconds`.

    A pidfd becomes readable when its process dies.
    """
    pidfd = _open(member)
    if pidfd is None:
        return True
    loop = asyncio.get_running_loop()
    gone: asyncio.Future[None] = loop.create_future()

    def on_readable() -> None:
        if not gone.done():
            gone.set_result(None)

    loop.add_reader(pidfd, on_readable)
    try:
        async with asyncio.timeout(seconds):
            await gone
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(pidfd)
        syscalls.close(pidfd)
    return True
