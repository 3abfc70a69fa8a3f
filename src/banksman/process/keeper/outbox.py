"""Send queue of a keeper: messages to the host, sent in order and without blocking.

While the tree lives, the keeper waits for no reader: a full socket must not delay a kill. So a
message that does not fit stays in the queue, and poll() reports when there is room. Only after the
end of the tree does the keeper wait, because its last message is the proof that the host needs.
"""

from __future__ import annotations

import _socket
import select

from banksman.process import syscalls
from banksman.process.keeper import messages

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# How long the last report may wait for a host that has closed its sending side. That host may still
# read.
FLUSH_MS_MAX = 1000
# Reports of what happened to the tree. A host that takes it over from a dead one needs them all.
REPEATED = (
    *(messages.OUT_OF_MEMORY, messages.EXITED, messages.ACTED, messages.SWEPT),
    messages.GONE,
)


class KeeperOutbox:
    """Queue of encoded messages in front of the control socket.

    `poller`: the poller of the keeper, in which `control` is registered for POLLIN.
    """

    def __init__(self, control: _socket.socket, poller: select.poll) -> None:
        self._control = control
        self._poller: select.poll | None = poller
        self._queue: list[bytes] = []
        self._told: list[bytes] = []
        # Whether the poller also waits for POLLOUT.
        self._is_behind = False

    def say(self, *message: Any) -> None:
        """Queue a message and send as much of the queue as the socket takes."""
        data = messages.encode(*message)
        self._queue.append(data)
        if message[0] in REPEATED:
            self._told.append(data)
        self.flush()

    def repeat(self) -> None:
        """Queue the reports again, in place of the queue, for a host that knows none of them."""
        self._queue = self._told[:]
        self.flush()

    def flush(self) -> None:
        """Send queued messages without blocking."""
        while self._queue:
            try:
                syscalls.send(self._control, self._queue[0])
            except BlockingIOError:
                break
            except ConnectionError:
                self._queue.clear()  # The host has closed its end.
                break
            # Removed only after the send: a message is whole in the socket or whole in the queue.
            del self._queue[0]
        # Poll for POLLOUT only while messages wait. A socket is nearly always writable, and poll()
        # would spin.
        if self._poller is not None and bool(self._queue) != self._is_behind:
            self._is_behind = bool(self._queue)
            events = select.POLLIN | select.POLLOUT if self._is_behind else select.POLLIN
            self._poller.modify(self._control.fileno(), events)

    def stop_polling(self) -> None:
        """Leave the poller alone from now on: the keeper has unregistered the socket.

        `modify` raises for an unknown fd, and the keeper would die of it with its tree alive.
        """
        self._poller = None

    def flush_to_the_end(self, host: int) -> None:
        """Send the last messages, waiting for a slow reader as long as the host lives.

        Without the final report the host would have to assume that the tree may still exist.

        `host`: a pidfd of the host; -1 if it is gone or has closed its sending side.
        """
        while self._queue:
            waiting = select.poll()
            waiting.register(self._control.fileno(), select.POLLOUT)
            if host != -1:
                waiting.register(host, select.POLLIN)
            # With a living host there is no bound: a host that is stopped reads after it resumes. A
            # host that has closed its sending side gets FLUSH_MS_MAX.
            ready = dict(syscalls.poll(waiting, None if host != -1 else FLUSH_MS_MAX))
            if not ready or host in ready:
                return
            self.flush()
