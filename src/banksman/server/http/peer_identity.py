"""Tell whether the client of a Unix socket belongs to an agent.

The user's socket needs no token: the kernel says that the client is the same user. An agent is the same user, too,
and so is every tool that it runs. With the socket an agent could answer its own permission questions, and the log would
show a person's answer. So a client is refused if it descends from

- a zygote of this process: everything that this server has started, agents and commands alike; or
- the keeper of an agent of any other host of this machine, which is known by its name (`wire.AGENTS_KEEPER`).

What a person has started by `banksman exec`, or a program by `banksman.execute`, is let in: a test suite that runs
under `banksman exec` may use the server. A keeper above this server itself does not count: an agent that starts a
server for its own tests may use that one.

Zygotes and keepers are subreapers, so the chain of parents passes through them whatever a process does: `setsid`, a
double fork, another environment. This keeps an agent from answering by accident or by an easy way. It is no sandbox: a
process of the same user can read the token file, or trace one that is let in (docs/server.md).

A pid is not an identity. The client may exit after `connect`, and its number may then be another's. So the chain is
read when the connection is accepted, and the kernel's pidfd of the peer (Linux 6.5) must still be alive afterwards.
Where the chain cannot be read to its end, the client is refused.
"""

from __future__ import annotations

import contextlib
import enum
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

# `asm-generic/socket.h`; Python has no name for it.
SO_PEERPIDFD = 77
# The chain changes when a process in it ends: it is read again.
_TRIES_MAX = 3


class PeerIdentity(enum.Enum):
    """Whose process a client is."""

    FREE = "it belongs to no agent"
    AGENTS = "it descends from an agent, or from a command of this server"
    UNCLEAR = "it is gone, or in another container"


def standing_of(peer: socket.socket) -> PeerIdentity:
    """Of whoever has connected this socket. Reads a few files of /proc; elsewhere than on Linux there is no telling."""
    if sys.platform != "linux":
        return PeerIdentity.FREE
    pid = sockets.peer_pid(peer)
    with _pidfd(peer) as pidfd:
        chain = _chain(pid)
        if chain is None or (pidfd is not None and _has_ended(pidfd)):
            return PeerIdentity.UNCLEAR
    try:
        return PeerIdentity.AGENTS if _is_agents(chain) else PeerIdentity.FREE
    except OSError:
        return PeerIdentity.UNCLEAR  # The name of an ancestor cannot be read: it has ended, or we are out of fds.


def _is_agents(chain: list[int]) -> bool:
    ancestors = chain[1:]
    if not spawner.pids().isdisjoint(ancestors):
        return True
    keepers = {pid for pid in ancestors if _name(pid) == messages.AGENTS_KEEPER}
    # Read only for the few that have one above them.
    return bool(keepers and keepers.difference(_chain(os.getpid()) or ()))


def _chain(pid: int) -> list[int] | None:
    """A process and its ancestors; None: they could not be read."""
    for _ in range(_TRIES_MAX):
        chain = _read_chain(pid)
        if chain is not None:
            return chain
    return None


def _read_chain(pid: int) -> list[int] | None:
    chain: list[int] = []
    born = None
    while pid != 0:  # The parent of the first process, and of one whose parent is outside of our container.
        stat = _stat(pid)
        if stat is None:
            # It has ended, and its child has another parent by now. Or /proc hides it (`hidepid`), since it is another
            # user's, and so neither a keeper of ours nor to be looked through.
            if not chain or not _is_parent(pid, chain[-1]):
                return None
            return chain
        parent, _state, start = stat
        if born is not None and start > born:
            return None  # Nobody is younger than its child: the number is another's by now.
        chain.append(pid)
        born, pid = start, parent
    return chain or None


def _is_parent(pid: int, child: int) -> bool:
    stat = _stat(child)
    return stat is not None and stat[0] == pid


def _stat(pid: int) -> tuple[int, str, int] | None:
    try:
        return read_stat(pid)
    except OSError:
        return None


def _name(pid: int) -> bytes:
    return read_proc(f"{pid}/comm", 64).rstrip(b"\n")


@contextlib.contextmanager
def _pidfd(peer: socket.socket) -> Generator[int | None]:
    """The kernel's handle of the peer; None: this kernel has none, or the peer is gone (its chain then is, too)."""
    try:
        fd = peer.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
    except OSError:
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
