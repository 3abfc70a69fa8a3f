"""Hand a running child over to another host: the part of the old host.

A planned restart keeps the child. The old host stops reading, and gives the keeper all fds that a
host has of a child: its ends of the streams and of the control socket, and a channel to the zygote.
The keeper acknowledges that it holds the tree, and the old host may exit. A successor presents the
secret, and gets the fds and a description of the tree (`adoption.py`). If no successor claims it in
time, the keeper ends the tree.

Nothing is copied and nothing is lost: bytes that the old host has not read stay in the pipes, and
messages that it has not read stay in the control socket. So the old host reads neither of them from
the request on, and the answer has a socket of its own.

The name and the secret of the hold are in a record (`hold_record.py`), which is written before the
request: from the moment in which the keeper holds the tree, a successor can claim it, even if the
old host is killed before it gets the answer. `docs/decisions/0016` has the reasons.

A tree can also survive a host that is killed. Its keeper gets the same fds soon after the start,
and holds the tree if the host dies (`HandOverRequest` with `is_lasting`). `docs/decisions/0017` has
that.
"""

from __future__ import annotations

import _socket
import asyncio
import contextlib
import errno
import math
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from banksman import sockets
from banksman.errors import BanksmanError, MachineError, Refused, UsageError, no_room
from banksman.folders import held_folder
from banksman.process import hold_record, syscalls
from banksman.process.keeper import messages
from banksman.process.zygote_client import ZygoteHandle, socketpair, spawner

# A keeper that does not answer within this time is stopped, dead, or on a stalled machine.
ANSWER_SECONDS_MAX = 5.0
# A longer hold would be a tree without a host, not a restart.
HOLD_SECONDS_MAX = 3600.0
SECRET_BYTES = range(16, 1025)
_RETRY_SECONDS = 0.005
_REASONS = {
    "stop": "it is being stopped",
    "fds": "its keeper has no room for the fds",
}


class HandOverRequest:
    """One hand-over, from the request to the answer of the keeper.

    `ends`: returns the host's ends of the streams, by name; -1 if the stream has ended.
    `on_answer`: called once, with the name that a successor needs, or with an error. `is_lasting`:
    this host stays, and the tree survives its death. The keeper watches the socket of its answer
    from then on: the end of that socket is the death of this host. `on_named`: called with the name
    before the keeper gets the request, to write the record.
    """

    def __init__(  # noqa: PLR0917
        self,
        loop: asyncio.AbstractEventLoop,
        control: _socket.socket,
        zygote: ZygoteHandle,
        keeper_pid: int,
        ends: Callable[[], list[tuple[str, int]]],
        on_answer: Callable[[str | Exception], None],
        *,
        is_lasting: bool = False,
        on_named: Callable[[str], None] | None = None,
    ) -> None:
        self._loop = loop
        self._control = control
        self._zygote = zygote
        self._keeper_pid = keeper_pid
        self._ends = ends
        self._on_answer = on_answer
        self._is_lasting = is_lasting
        self._on_named = on_named
        self._word = messages.SURVIVE if is_lasting else messages.HAND_OVER
        self._secret = b""
        self._path: Path | None = None
        self._sockets: list[_socket.socket] = []
        self._answer: _socket.socket | None = None
        self._is_zygote_told = False
        self._is_answered = False
        self._timers: list[asyncio.TimerHandle] = []

    def begin(self, hold_seconds: float, secret: bytes) -> None:
        """Send the request. A failure reaches `on_answer` too."""
        try:
            self._secret = secret
            with spawner.fork_lock:
                self._open()
            if self._on_named is not None:
                assert self._path is not None
                self._on_named(self._path.name)
            late = MachineError(
                "cannot hand over the process: its keeper does not answer in time",
                number=errno.ETIMEDOUT,
                hint="check whether the machine is overloaded",
            )
            self._timers.append(self._loop.call_later(ANSWER_SECONDS_MAX, self.fail, late))
            self._send(hold_seconds)
        except BanksmanError as exc:
            self.fail(exc)
        except OSError as exc:
            self.fail(no_room("fds", exc))

    def _open(self) -> None:
        listener, self._path = sockets.listen_in(held_folder(), socket.SOCK_SEQPACKET)
        self._sockets.append(listener)
        self._answer, answer = socketpair()
        self._sockets.append(answer)
        self._sockets.extend(socketpair())

    def _send(self, hold_seconds: float) -> None:
        """Tell the zygote, then the keeper. If one of them is busy, try again soon."""
        assert self._answer is not None
        assert self._path is not None
        listener, answer, channel, zygotes_channel = self._sockets
        # A zygote that is dead guards nothing. Its end of the channel is closed then, and stands in
        # for its pidfd: both are readable for ever.
        pidfd = self._zygote.pidfd if self._zygote.pidfd >= 0 else channel.fileno()
        fds = [answer, listener, self._control, channel]
        # Looked up for each attempt: a host that stays may have closed a stream since the last one.
        ends = self._ends()
        opened = [fd for _name, fd in ends if fd >= 0]
        streams = tuple((name, fd >= 0) for name, fd in ends)
        path = os.fsencode(self._path)
        message = messages.encode(self._word, hold_seconds, self._secret, path, streams)
        try:
            # The zygote first. It must not take the exit of this host for the end of the tree's
            # host.
            self._tell_zygote(hold_seconds, zygotes_channel.fileno())
            numbers = [*(sock.fileno() for sock in fds), pidfd, *opened]
            syscalls.send_fds(self._control, message, numbers)
        except OSError as exc:
            if not isinstance(exc, BlockingIOError) and exc.errno != errno.ETOOMANYREFS:
                raise
            self._timers.append(
                self._loop.call_later(_RETRY_SECONDS, self._send_again, hold_seconds)
            )
            return
        with spawner.fork_lock:
            self._close_sockets()
        self._loop.add_reader(self._answer.fileno(), self._hear)

    def _tell_zygote(self, hold_seconds: float, channel: int) -> None:
        if self._is_zygote_told:
            return
        order = messages.encode(self._word, self._keeper_pid, hold_seconds)
        with contextlib.suppress(ConnectionError):
            self._zygote.request(order, [channel])
        self._is_zygote_told = True

    def _send_again(self, hold_seconds: float) -> None:
        try:
            self._send(hold_seconds)
        except OSError as exc:
            self.fail(no_room("fds", exc))

    def _hear(self) -> None:
        assert self._answer is not None
        assert self._path is not None
        try:
            data = syscalls.recv(self._answer)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        match messages.decode(data) if data else None:
            case (messages.HELD,):
                if self._is_lasting:
                    self._cancel_timers()
                    self._loop.remove_reader(self._answer.fileno())
                else:
                    self._close()
                self._finish(self._path.name)
            case (messages.REFUSED, why):
                reason = _REASONS[why]
                self.fail(Refused(f"cannot hand over the process: {reason}"))
            case _:
                self.fail(MachineError("cannot hand over the process: its keeper is dead"))

    def fail(self, error: BanksmanError) -> None:
        """Cancel the hand-over and answer with an error. This host stays the host.

        Harmless if the keeper or the zygote has not heard of the hand-over.
        """
        # In order after the request, so that a keeper that answers late returns to this host.
        with contextlib.suppress(OSError):
            word = messages.FORGO if self._is_lasting else messages.KEEP
            syscalls.send(self._control, messages.encode(word))
        if self._path is not None:
            hold_record.remove(self._path.name)
            sockets.remove(self._path)
        self._close()
        self._keep_by_zygote()
        self._finish(error)

    def _finish(self, answer: str | Exception) -> None:
        self._is_answered = True
        self._on_answer(answer)

    def _keep_by_zygote(self) -> None:
        """Cancel at the zygote. If it is busy, try again: it would kill a keeper that stays."""
        try:
            self._zygote.request(messages.encode(messages.KEEP, self._keeper_pid))
        except BlockingIOError:
            self._timers.append(self._loop.call_later(_RETRY_SECONDS, self._keep_by_zygote))
        except OSError:
            pass  # A dead zygote guards nothing.

    def supersede(self) -> None:
        """Send no KEEP any more: it would cancel the next hand-over, which replaces this one."""
        self._cancel_timers()

    def retire(self, reason: str) -> None:
        """Close a lasting request, and answer it with this reason if its keeper has not."""
        self._close()
        if not self._is_answered:
            self._finish(Refused(f"cannot hand over the process: {reason}"))

    def _close(self) -> None:
        self._cancel_timers()
        with spawner.fork_lock:
            if self._answer is not None:
                self._loop.remove_reader(self._answer.fileno())
            self.forget()

    def _cancel_timers(self) -> None:
        while self._timers:
            self._timers.pop().cancel()

    def forget(self) -> None:
        """Close every fd without touching the loop."""
        self._close_sockets()
        if self._answer is not None:
            self._answer.close()
            self._answer = None

    def _close_sockets(self) -> None:
        while self._sockets:
            self._sockets.pop().close()


@dataclass(frozen=True, slots=True)
class Survival:
    """How a tree survives the death of its host: for how long it waits for which successor.

    `on_named`: called with the name of the hold before the keeper can hold the tree. So a host that
    records the name there leaves no tree that its successor cannot find. If it raises, the tree
    ends with its host. `on_answered`: called when the keeper holds the tree, or will not hold it.
    """

    hold_seconds: float
    secret: bytes
    on_named: Callable[[str], None] | None = None
    on_answered: Callable[[], None] | None = None


def check_hold(hold_seconds: float, secret: bytes) -> None:
    """Raise `UsageError` for arguments of a hand-over that are out of range."""
    if not (math.isfinite(hold_seconds) and 0 < hold_seconds <= HOLD_SECONDS_MAX):
        hint = f"pass more than 0 and at most {HOLD_SECONDS_MAX:.0f} seconds"
        raise UsageError(f"hold_seconds cannot be {hold_seconds!r}", hint=hint)
    if len(secret) not in SECRET_BYTES:
        hint = f"pass {SECRET_BYTES.start} to {SECRET_BYTES.stop - 1} bytes, such as os.urandom(32)"
        raise UsageError(f"secret cannot have {len(secret)} bytes", hint=hint)
