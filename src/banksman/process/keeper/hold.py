"""A tree between two hosts: its fds, the socket where a successor claims it, and the claims.

The old host has left on purpose (`process/tree_hand_over.py`) or was killed, and the keeper waits
for the next one (`process/adoption.py`). The keeper promises meanwhile:
- The successor gets the fds once, and with them everything that is still unread.
- Only a process of this user (or root) that presents the secret gets them.
- No other client delays it, and none extends the hold. Nothing here blocks.

`messages.py` describes the claim and its answers.
"""

from __future__ import annotations

import _socket
import os
import select
import time

# The function of `hmac.compare_digest`. The module `hmac` would cost each keeper memory.
from _operator import _compare_digest as is_same  # pyright: ignore[reportPrivateUsage]

from banksman.process import syscalls
from banksman.process.keeper import messages

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

# A successor sends its claim right after it has connected. A client that says nothing for longer is
# dropped.
SILENT_SECONDS_MAX = 1.0
# Beyond this number the oldest silent client is dropped for a new one.
CLIENTS_MAX = 16
# How many clients in the queue of the listener get an answer at the end of the hold.
ANSWERED_MAX = 1024


class HeldTree:
    """The hold of one tree, from the acknowledgement to a claim, a cancellation or its end.

    `listener`: a listening socket, bound to `path`. None: the socket is for later holds too.
    `tree`: its description and the fds for the successor. The hold owns all of the fds. `until`:
    when it ends without a claim.
    """

    def __init__(  # noqa: PLR0917
        self,
        poller: select.poll,
        listener: int,
        path: bytes | None,
        secret: bytes,
        tree: tuple[tuple[Any, ...], list[int]],
        until: float,
    ) -> None:
        self.until = until
        # The tree survives its successor as well, by the same socket and secret.
        self.is_lasting = path is None
        self._poller = poller
        self._listener = _socket.socket(fileno=listener)
        self._path = path
        self._claim = messages.WIRE + b" claim " + secret
        state, self._fds = tree
        self._answer = messages.WIRE + b" yours " + messages.encode(*state)
        # Silent clients by their fds, the oldest first, and when each is dropped.
        self._clients: dict[int, tuple[_socket.socket, float]] = {}
        poller.register(listener, select.POLLIN)

    def due(self) -> float:
        """Return when the hold needs attention at the latest."""
        return min([self.until, *(until for _client, until in self._clients.values())])

    def claims(self, ready: dict[int, int]) -> list[tuple[_socket.socket, list[int]]]:
        """Return the valid claims of this moment: each client, with the fds that it has sent.

        The caller answers each of them by `give` or `refuse`, and closes the fds.
        """
        if self._listener.fileno() in ready:
            # No more at once than have room: so none is dropped for another one before it is heard.
            self._accept(CLIENTS_MAX)
        now = time.monotonic()
        valid: list[tuple[_socket.socket, list[int]]] = []
        for client, until in list(self._clients.values()):
            # Each client is read, not only the ready ones: one that was just accepted may have sent
            # its claim before.
            fds = self._hear(client)
            if fds is not None:
                valid.append((client, fds))
            elif now >= until and client.fileno() in self._clients:
                self.refuse(client, b"silent")
        return valid

    def give(self, client: _socket.socket) -> bool:
        """Send the fds. False if the client is gone, or the kernel has no room for them."""
        self._forget(client)
        try:
            syscalls.send_fds(client, self._answer, self._fds)
        except OSError:
            return False
        finally:
            client.close()
        return True

    def refuse(self, client: _socket.socket, why: bytes) -> None:
        """Tell a client that it does not get the tree, and drop it."""
        self._forget(client)
        _refuse(client, why)

    def close(self, why: bytes) -> None:
        """End the hold: remove the socket, refuse the clients that wait, and close the fds.

        `why`: the reason for those clients.
        """
        try:
            if self._path is not None:
                syscalls.unlink(self._path)
        except OSError:
            pass  # It is gone already, or the next hand-over of this user removes it.
        # Clients that are still in the queue of the listener get an answer too.
        self._accept(ANSWERED_MAX)
        for client, _until in list(self._clients.values()):
            self.refuse(client, why)
        self._poller.unregister(self._listener.fileno())
        self._listener.close()
        close_all(self._fds)

    def _accept(self, most: int) -> None:
        for _ in range(most):
            try:
                client = syscalls.accept(self._listener)
            except OSError:
                return  # No client is left, or one has left again.
            if syscalls.peer_uid(client) not in (os.geteuid(), 0):
                _refuse(client, b"user")
                continue
            if len(self._clients) >= CLIENTS_MAX:
                self.refuse(next(iter(self._clients.values()))[0], b"busy")
            self._clients[client.fileno()] = client, time.monotonic() + SILENT_SECONDS_MAX
            self._poller.register(client.fileno(), select.POLLIN)

    def _hear(self, client: _socket.socket) -> list[int] | None:
        """Read the message of a client. None: it is silent, gone, or was refused."""
        try:
            data, fds = syscalls.recv_fds(client)
        except BlockingIOError:
            return None
        except OSError:
            data, fds = b"", []
        why = self._objection(data, fds)
        if why is None:
            return fds
        close_all(fds)
        self.refuse(client, why)
        return None

    def _objection(self, data: bytes, fds: Sequence[int]) -> bytes | None:
        word, _, rest = data.partition(b" ")
        if word != messages.WIRE:
            return b"version"
        if not rest.startswith(b"claim ") or len(fds) not in (1, 2):
            return b"message"
        return None if is_same(data, self._claim) else b"secret"

    def _forget(self, client: _socket.socket) -> None:
        if self._clients.pop(client.fileno(), None) is not None:
            self._poller.unregister(client.fileno())


def _refuse(client: _socket.socket, why: bytes) -> None:
    try:
        syscalls.send(client, messages.WIRE + b" no " + why)
    except OSError:
        pass  # The client is gone.
    client.close()


def close_all(fds: list[int]) -> None:
    """Close the fds, and empty the list."""
    while fds:
        syscalls.close(fds.pop())
