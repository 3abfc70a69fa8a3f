"""What a dead host may have left behind: whether it is still there, and its end.

A keeper notices the death of its host and ends its tree by the ladder, so there is nothing to do but to wait for that:
whoever goes on with a conversation must not do so beside the process that still has it. Only where the keeper was
killed as well (a limit of G6) is something found that nobody will end, and it is ended here, by what is known of it:
the process that was started, and what descends from it.

A process is known by its pid, the time of its start and the boot that both belong to. A pid alone may be another's by
now, and nothing that might be another's is ever signalled.
"""

from __future__ import annotations

import asyncio
import errno
import os
import time

from banksman.errors import Refused
from banksman.process import syscalls
from banksman.process.keeper.proc_tree import name_of, open_member, read_stat
from banksman.process.keeper.sweep import SIGKILL, Sweep

# A keeper that lost its host goes through TERM and the grace of its command, and then kills. Longer graces than this
# are cut short by whoever wants to go on.
KEEPER_SECONDS_MAX = 30.0
# What was killed is gone within moments, but for a process in uninterruptible sleep.
KILLED_SECONDS_MAX = 5.0

Member = tuple[int, int]  # pid and start
Born = tuple[str, int, int, int, int, int, int]  # the boot; pid and start of the process, its keeper and its host


def boot_id() -> str:
    """Which boot of the machine this is; empty where nobody says."""
    try:
        return syscalls.read_proc("sys/kernel/random/boot_id", 64).decode().strip()
    except OSError:
        return ""


def trace(pid: int) -> Born | None:
    """By what a process of ours and its keeper, which is its parent, can be known later; None: it cannot be seen.

    Where /proc hides the keeper (`hidepid`; it is not dumpable), its start is 0, and it is never found later.
    """
    me = os.getpid()
    try:
        stat, mine = read_stat(pid), read_stat(me)
    except OSError:
        return None
    if stat is None or mine is None:
        return None
    try:
        keeper = read_stat(stat[0])
    except OSError:
        keeper = None
    return boot_id(), pid, stat[2], stat[0], 0 if keeper is None else keeper[2], me, mine[2]


async def wait(born: Born) -> None:
    """Until its keeper has ended it, if it is still at it. Signals nobody.

    Raises `Refused` at once if another process is its host, and lives: what is read here is a copy of what that one
    writes. And after a while, if the keeper does not come to an end. Cancelled, it only stops waiting.
    """
    boot, pid, started, *others = born
    keeper, host = (others[0], others[1]), (others[2], others[3])
    if boot != boot_id() or not (_is_there(keeper) or _is_there((pid, started))):
        return
    if host[0] != os.getpid() and _is_there(host):
        hint = "is this a copy of its store? The session goes on there"
        raise Refused(f"the session's process {pid} has a host that lives, process {host[0]}", hint=hint, pid=host[0])
    # A keeper that lives is never killed: it is about to end its tree, and is the only one that can prove that it has.
    if not await _wait_gone(keeper, KEEPER_SECONDS_MAX):
        hint = "wait for it: two processes must not go on with one conversation"
        raise Refused(f"the session's process {pid} is still being ended, by process {keeper[0]}", hint=hint, pid=pid)


async def end(born: Born) -> list[str]:
    """Until nothing is left of it. What had to be ended here, for people to read: only where its keeper is gone, and it
    is not. For whoever owns what it belonged to. Raises as `wait`; cancelled, it leaves things as they are."""
    await wait(born)
    boot, pid, started, *_ = born
    return [] if boot != boot_id() else await _sweep((pid, started))


def _is_there(member: Member) -> bool:
    fd = _open(member)
    if fd is not None:
        syscalls.close(fd)
    return fd is not None


async def _sweep(root: Member) -> list[str]:
    """End a process and its descendants. The root last, so that they can be found by it."""
    pidfd = _open(root)
    if pidfd is None:
        return []
    name = name_of(root[0])
    sweep = Sweep(root[0], reap=lambda: None)
    try:
        until = time.monotonic() + KILLED_SECONDS_MAX
        # In a thread: it looks through /proc, again and again.
        while time.monotonic() < until and await asyncio.to_thread(sweep.kill):
            pass
        syscalls.pidfd_send_signal(pidfd, SIGKILL)
    except ProcessLookupError:
        pass  # It went by itself, a moment ago.
    finally:
        syscalls.close(pidfd)
    if not await _wait_gone(root, KILLED_SECONDS_MAX):
        raise Refused(f"the session's process {root[0]} ({name}) does not end", hint="see why", pid=root[0])
    return [*sweep.names.values(), name]


def _open(member: Member) -> int | None:
    """A pidfd of a process that is there and alive; a zombie is over, whoever has to reap it."""
    if not all(member):
        return None
    try:
        fd = open_member(member)
    except OSError as exc:
        if exc.errno == errno.ENOSYS:
            return None
        raise
    stat = None if fd is None else read_stat(member[0])
    if fd is not None and (stat is None or stat[1] in "ZX"):
        syscalls.close(fd)
        return None
    return fd


async def _wait_gone(member: Member, seconds: float) -> bool:
    """Whether it ended within this time. A pidfd is readable from the moment of the death on."""
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
