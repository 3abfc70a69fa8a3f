"""Take over a running child from another host: the part of the successor.

The old host has handed the child over (`hand_over.py`), and its keeper holds it. `claim` presents
the secret, and gets the fds and the description of the tree. `AdoptedProcess` drives the child from
then on, like a child that this host has started: its death ends the tree, the keeper obeys its
orders, and each byte and each report that the old host has not read arrives here.

Old and new host may be different versions of Banksman. Both name the version of the messages first
(`messages.WIRE`), and refuse each other if they differ. The hold continues then.
"""

from __future__ import annotations

import _socket
import asyncio
import contextlib
import errno
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from banksman.core.process_facts import ProcessFact, Started, Stream, StreamEnded
from banksman.errors import BanksmanError, MachineError, NotFound, Refused, no_room
from banksman.folders import held_folder
from banksman.process import syscalls
from banksman.process.caller import is_gone
from banksman.process.input_mark import InputMark, InputState
from banksman.process.keeper import messages
from banksman.process.kept_process import KeptProcess
from banksman.process.lease_page import LeasePage
from banksman.process.stdio import MARK, STDIN, ChildStreams
from banksman.process.sweep_requests import StartedSince
from banksman.process.zygote_client import AdoptedZygote, spawner

# A keeper answers within moments. It may be busy with a sweep.
CLAIM_SECONDS_MAX = 5.0
_RETRY_SECONDS = 0.01
# Stdin, stdout and stderr, and what a child that survives its host has for each of them.
STREAMS_MAX = 6
# Why a keeper refuses a claim, and what to do.
_REFUSALS = {
    "secret": ("the secret is wrong", "pass the secret of this hand-over"),
    "taken": ("another host was first", "use the host that has it"),
    "cancelled": ("its host has kept it", "use that host"),
    "over": ("no host claimed it in time", "start the process again"),
    "user": ("its keeper belongs to another user", "run as that user"),
    "lease": ("its keeper cannot map the lease", "check the memory of the machine"),
}
# The keeper drops clients that are too many or too slow. The right one tries again.
_DROPPED = ("busy", "silent", "")


@dataclass(slots=True, eq=False, weakref_slot=True)
class Claimed:
    """A child that this host has claimed, and does not drive yet. Pass it to `AdoptedProcess`.

    `started_at`: CLOCK_MONOTONIC. `fds`: the host's ends of its streams. `ended`: the outputs that
    the old host has read to their ends. `argv`: the words of its command, for people. `is_lasting`:
    the old host was killed, and the tree survives the death of this one too, by the same name and
    secret. `offsets`: where this host begins to read each output, if it knows that.
    """

    pid: int
    keeper_pid: int
    started_at: float
    grace: float
    linger: float
    has_terminal: bool
    fds: dict[str, int]
    ended: tuple[Stream, ...]
    control: _socket.socket
    zygote: AdoptedZygote
    argv: tuple[bytes, ...]
    is_lasting: bool = False
    offsets: Mapping[Stream, int] = field(default_factory=dict[Stream, int])

    def input_state(self) -> InputState | None:
        """Return what is known of the writes to stdin: None if it is closed, or was not marked."""
        if MARK not in self.fds or STDIN not in self.fds:
            return None
        return InputMark.look(self.fds[MARK])

    def close(self) -> None:
        """Give the child up. Its keeper ends the tree, as after the death of a host."""
        # The keeper of a tree that survives its host has a copy of this socket: closing says
        # nothing.
        self.let_go()
        self.forget()
        spawner.release(self, self.zygote)

    def let_go(self) -> None:
        """Tell the keeper that no order follows."""
        with contextlib.suppress(OSError):
            self.control.shutdown(_socket.SHUT_WR)

    def forget(self) -> None:
        """Close the fds."""
        self.control.close()
        while self.fds:
            syscalls.close(self.fds.popitem()[1])


async def claim(
    name: str, secret: bytes, *, argv: tuple[bytes, ...], lease: LeasePage | None = None
) -> Claimed:
    """Become the host of a child that another host has handed over.

    `name`, `secret`: of the hand-over. `argv`: the words of its command. `lease`: the page with the
    times by which the tree must end, unless this host renews them. Without it the page of the old
    host stays in force, if there was one.

    Raises `NotFound` if no child waits there, `Refused` with the reason of its keeper, and
    `MachineError` if this takes too long. After an error the hold continues, except where the error
    says otherwise. Cancelling this call may lose the child: its keeper ends the tree then.
    """
    assert "/" not in name
    assert argv
    path = held_folder() / name
    deadline = time.monotonic() + CLAIM_SECONDS_MAX
    while time.monotonic() < deadline:
        try:
            claimed = await _claim_once(path, secret, argv, lease, deadline)
        except OSError as exc:
            raise no_room("fds", exc) from exc
        if claimed is not None:
            return claimed
        await asyncio.sleep(_RETRY_SECONDS)
    message = f"cannot take over process {name}: its keeper does not answer in time"
    hint = "check whether its host is still alive, or the machine is overloaded"
    raise MachineError(message, number=errno.ETIMEDOUT, hint=hint)


async def _claim_once(
    path: Path,
    secret: bytes,
    argv: tuple[bytes, ...],
    lease: LeasePage | None,
    deadline: float,
) -> Claimed | None:
    """Send one claim and return its result. None: try again."""
    peer = _connect(path)
    if peer is None:
        return None
    try:
        pidfd = syscalls.pidfd_open(os.getpid())
        try:
            _send_claim(peer, secret, pidfd, lease)
            if not await _wait_readable(peer, deadline):
                return None
            # No fork of the program between the arrival of the fds and their registration.
            with spawner.fork_lock:
                data, fds = syscalls.recv_fds(peer)
                try:
                    claimed = _answered(path.name, data, fds, argv)
                finally:
                    for fd in fds:
                        syscalls.close(fd)
            if claimed is not None:
                if not claimed.is_lasting:
                    # The keeper does this too, a moment later.
                    with contextlib.suppress(OSError):
                        syscalls.unlink(path)
                adopt = messages.encode(messages.ADOPT, claimed.keeper_pid)
                # A dead zygote guards nothing. The keeper does it alone.
                with contextlib.suppress(OSError):
                    claimed.zygote.request(adopt, [pidfd])
            return claimed
        finally:
            syscalls.close(pidfd)
    except ConnectionError:
        return None  # The keeper has dropped this client, or is dead.
    finally:
        peer.close()


def _connect(path: Path) -> _socket.socket | None:
    """Connect to the keeper. None: it has too many clients at the moment."""
    # The import takes milliseconds, and most hosts never adopt a child.
    import socket  # noqa: PLC0415

    from banksman import sockets  # noqa: PLC0415

    try:
        return sockets.connect(path, 0.0, socket.SOCK_SEQPACKET)
    except TimeoutError:
        return None
    except (FileNotFoundError, ConnectionRefusedError) as exc:
        message = f"cannot take over process {path.name}: no process waits there"
        hint = "another host has it, or none claimed it in time and it was ended"
        raise NotFound(message, hint=hint) from exc
    except PermissionError as exc:
        message = f"cannot take over process {path.name}: it belongs to another user"
        raise Refused(message, hint="run as that user") from exc


def _send_claim(peer: _socket.socket, secret: bytes, pidfd: int, lease: LeasePage | None) -> None:
    # The keeper gives the child away with its answer. Without room for its fds here the child would
    # be lost, so there must be room before the claim.
    taken: list[int] = []
    try:
        fds = [pidfd]
        if lease is not None:
            taken.append(lease.copy_fd())
            fds.append(taken[0])
        rooms = len(messages.HOST_FDS) + STREAMS_MAX
        taken.extend(syscalls.dup(pidfd) for _ in range(rooms))
        syscalls.send_fds(peer, messages.WIRE + b" claim " + secret, fds)
    finally:
        for fd in taken:
            syscalls.close(fd)


async def _wait_readable(peer: _socket.socket, deadline: float) -> bool:
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(peer.fileno(), readable.set)
    try:
        async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
            await readable.wait()
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(peer.fileno())
    return True


def _answered(name: str, data: bytes, fds: list[int], argv: tuple[bytes, ...]) -> Claimed | None:
    """Read the answer of a keeper, and take over `fds`. None: it has dropped this client."""
    word, _, rest = data.partition(b" ")
    verb, _, rest = rest.partition(b" ")
    if word == messages.WIRE and verb == b"yours":
        state = messages.decode(rest)
        opened = sum(is_open for _stream, is_open in state[-1])
        if len(fds) == len(messages.HOST_FDS) + opened:
            return _register(state, fds, argv)
    if fds or verb == b"yours":
        # The keeper has given the tree away, so no other host can claim it.
        message = f"cannot take over process {name}: not all of its fds have arrived; it ends now"
        raise MachineError(message, hint="raise the limit of open files (ulimit -n)")
    why = rest.decode("ascii", "replace")
    if not data or why in _DROPPED:
        return None
    if word != messages.WIRE or why == "version":
        theirs, ours = word.decode("ascii", "replace"), messages.WIRE.decode()
        message = f"cannot take over process {name}: its keeper speaks {theirs}, this host {ours}"
        raise Refused(message, hint="use the version of Banksman that has started it")
    reason, hint = _REFUSALS.get(why, (why, ""))
    raise Refused(f"cannot take over process {name}: {reason}", hint=hint)


def _register(state: tuple[Any, ...], fds: list[int], argv: tuple[bytes, ...]) -> Claimed:
    pid, keeper_pid, zygote_pid, started_at, grace, linger, *rest = state
    has_terminal, is_lasting, streams = rest
    control, channel, pidfd, *ends = fds
    # The parent of the keeper is the zygote, if the zygote is alive.
    if is_gone(pidfd):
        zygote_pid = 0
    # From here on the objects own the fds.
    fds.clear()
    zygote = AdoptedZygote(_socket.socket(fileno=channel), zygote_pid, pidfd)
    opened = [name for name, is_open in streams if is_open]
    claimed = Claimed(
        pid=pid,
        keeper_pid=keeper_pid,
        started_at=started_at,
        grace=grace,
        linger=linger,
        has_terminal=has_terminal,
        fds=dict(zip(opened, ends, strict=True)),
        ended=tuple(Stream(name) for name, is_open in streams if not is_open),
        control=_socket.socket(fileno=control),
        zygote=zygote,
        argv=argv,
        is_lasting=is_lasting,
    )
    spawner.adopt(claimed, zygote)
    return claimed


class AdoptedProcess(KeptProcess):
    """A child that this host has taken over. The fact `Started` comes first, as after a start.

    The constructor takes the fds of `claimed`. If it raises, the child is given up.

    `offsets`: in place of those of `claimed`, if the child survives its hosts: the offset that the
    log of the former host ends with. Without it an output begins with the first byte that no host
    has taken. `MachineError` says that the bytes from there on are gone.
    """

    def __init__(
        self,
        claimed: Claimed,
        *,
        on_fact: Callable[[ProcessFact], None],
        offsets: Mapping[Stream, int] | None = None,
    ) -> None:
        super().__init__(grace=claimed.grace, on_fact=on_fact)
        self._started_since = StartedSince(has_forgotten=True)
        self._is_lasting = claimed.is_lasting
        self.pid, self.keeper_pid = claimed.pid, claimed.keeper_pid
        with spawner.fork_lock:
            spawner.know(self)
            spawner.release(claimed, None)
            self._zygote = claimed.zygote
            self._control = claimed.control
            try:
                self._streams = ChildStreams.adopted(
                    on_fact, claimed.fds, has_terminal=claimed.has_terminal
                )
                self._streams.on_closed = partial(self._insist, messages.DROP)
                self._streams.start_at(claimed.offsets if offsets is None else offsets)
            except OSError as exc:
                self.close()
                claimed.forget()
                raise no_room("fds", exc) from exc
            except BanksmanError:
                self.close()
                raise
            self.stdin = self._streams.stdin
        self._loop.call_soon(self._report_start, claimed)
        self._begin_to_read()

    def _report_start(self, claimed: Claimed) -> None:
        self._on_fact(Started(claimed.pid, claimed.started_at))
        for stream in claimed.ended:
            self._on_fact(StreamEnded(stream, time.monotonic()))
