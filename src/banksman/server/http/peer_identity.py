"""Tell whether the client of a Unix socket belongs to an agent.

The user's socket needs no token: the kernel confirms that the client runs as the same user. An
agent and every tool that it runs are the same user, too. With the socket an agent could answer its
own permission questions, and the log would show a person's answer. So `auth.py` refuses a client
that descends from

- a zygote of this process: everything that this server has started, agents and commands alike; or
- the keeper of an agent of any other host of this machine. That keeper is known by its name
  (`messages.AGENTS_KEEPER`).

Processes that a person has started by `banksman exec`, or a program by `banksman.execute`, are
accepted: a test suite under `banksman exec` may use the server. A keeper above this server itself
does not count: an agent that starts a server for its own tests may use that server.

Zygotes and keepers are subreapers. So the chain of parents passes through them even after `setsid`,
a double fork, or a change of the environment. This keeps an agent from answering by accident or in
an easy way. It is no sandbox: a process of the same user can read the token file, or trace a
process that is accepted (docs/server.md).

A pid is not an identity. The client may exit after `connect`, and the kernel may reuse its pid. So
the chain is read when the connection is accepted, and the kernel's pidfd of the peer (Linux 6.5)
must still be alive afterwards. A client whose chain cannot be read to its end is refused.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import os
import select
import socket
import sys
from collections.abc import Generator

from banksman import sockets
from banksman.process.keeper import messages
from banksman.process.keeper.proc_tree import read_stat
from banksman.process.syscalls import read_proc
from banksman.process.zygote_client import spawner

# From `asm-generic/socket.h`; Python does not define it.
SO_PEERPIDFD = 77
# The chain changes when a process in it ends. Then it is read again.
_TRIES_MAX = 3
_NO_FDS = (errno.EMFILE, errno.ENFILE)


class PeerIdentity(enum.Enum):
    """Whether a client process belongs to an agent."""

    FREE = "it belongs to no agent"
    AGENTS = "it descends from an agent, or from a command of this server"
    UNCLEAR = "it is gone, or in another container"
    # The server lacks fds, so it cannot read /proc. The client is refused like an unclear one.
    NO_FDS = "the server has too many open files"


def standing_of(peer: socket.socket) -> PeerIdentity:
    """Classify the process that has connected this socket.

    Reads a few files of /proc. Other systems than Linux have no such files: there every client
    counts as free.
    """
    if sys.platform != "linux":
        return PeerIdentity.FREE
    pid = sockets.peer_pid(peer)
    try:
        with _pidfd(peer) as pidfd:
            chain = _chain(pid)
            if chain is None or (pidfd is not None and _has_ended(pidfd)):
                return PeerIdentity.UNCLEAR
        return PeerIdentity.AGENTS if _is_agents(chain) else PeerIdentity.FREE
    except OSError as exc:
        # A file of an ancestor cannot be read: it has ended, or this process has no fds left.
        return PeerIdentity.NO_FDS if exc.errno in _NO_FDS else PeerIdentity.UNCLEAR


def _is_agents(chain: list[int]) -> bool:
    ancestors = chain[1:]
    if not spawner.pids().isdisjoint(ancestors):
        return True
    keepers = {pid for pid in ancestors if _name(pid) == messages.AGENTS_KEEPER}
    # The server's own chain is read only for the few clients with a keeper above them.
    return bool(keepers and keepers.difference(_chain(os.getpid()) or ()))


def _chain(pid: int) -> list[int] | None:
    """Return a process and its ancestors; None if they cannot be read."""
    for _ in range(_TRIES_MAX):
        chain = _read_chain(pid)
        if chain is not None:
            return chain
    return None


def _read_chain(pid: int) -> list[int] | None:
    chain: list[int] = []
    born = None
    # 0 is the parent of process 1, and of a process whose parent is outside this container.
    while pid != 0:
        stat = _stat(pid)
        if stat is None:
            # The ancestor has ended, and its child has another parent now: the chain is invalid. Or
            # /proc hides the ancestor (`hidepid`) because it belongs to another user: then it is no
            # keeper of this user, and the chain ends here.
            if not chain or not _is_parent(pid, chain[-1]):
                return None
            return chain
        parent, _state, start = stat
        if born is not None and start > born:
            return None  # No parent is younger than its child: the kernel has reused this pid.
        chain.append(pid)
        born, pid = start, parent
    return chain or None


def _is_parent(pid: int, child: int) -> bool:
    stat = _stat(child)
    return stat is not None and stat[0] == pid


def _stat(pid: int) -> tuple[int, str, int] | None:
    try:
        return read_stat(pid)
    except OSError as exc:
        # Without fds, every process looks hidden, and the chain would end too early.
        if exc.errno in _NO_FDS:
            raise
        return None


def _name(pid: int) -> bytes:
    return read_proc(f"{pid}/comm", 64).rstrip(b"\n")


@contextlib.contextmanager
def _pidfd(peer: socket.socket) -> Generator[int | None]:
    """Yield the kernel's pidfd of the peer; None if the kernel is too old or the peer is gone.

    If the peer is gone, its chain cannot be read either.
    """
    try:
        fd = peer.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
    except OSError as exc:
        if exc.errno in _NO_FDS:
            raise
        yield None
        return
    try:
        yield fd
    finally:
        os.close(fd)


def _has_ended(pidfd: int) -> bool:
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(0))
