"""Network between the page and the server that a test can break in two ways.

The relay listens at another address and forwards bytes. `cut` closes every connection and refuses new ones, as when the
cable of this machine is pulled. `freeze` forwards nothing and closes nothing, as when a cable elsewhere is pulled:
neither end notices. `mend` ends either.
"""

from __future__ import annotations

import contextlib
import enum
import selectors
import socket
import threading

CONNECTIONS_MAX = 256
PIECE_BYTES = 1 << 16


class Way(enum.Enum):
    OPEN, FROZEN, CUT = range(3)


class Relay:
    """One thread, which is joined at the end.

    `url`: the address for the page.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._wake, self._woken = socket.socketpair()
        self._way = Way.OPEN
        self._is_over = False
        # Only the thread changes this.
        self._pairs: dict[socket.socket, socket.socket] = {}
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Relay:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        self._wake.send(b"!")
        self._thread.join()
        for each in (self._socket, self._wake, self._woken):
            each.close()

    def cut(self) -> None:
        self._go(Way.CUT)

    def freeze(self) -> None:
        self._go(Way.FROZEN)

    def mend(self) -> None:
        self._go(Way.OPEN)

    def _go(self, way: Way) -> None:
        self._way = way
        self._wake.send(b"!")

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            self._selector = selector
            selector.register(self._socket, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            while not self._is_over:
                for key, _ in selector.select():
                    if key.fileobj is self._woken:
                        self._woken.recv(PIECE_BYTES)
                        self._apply()
                    elif key.fileobj is self._socket:
                        self._accept()
                    elif isinstance(key.fileobj, socket.socket):
                        self._pass(key.fileobj)
            self._way = Way.CUT
            self._apply()

    def _apply(self) -> None:
        """Apply the state to all connections.

        Frozen bytes are not lost: the kernel holds them until the relay forwards again.
        """
        if self._way is Way.CUT:
            for each in list(self._pairs):
                self._drop(each)
        wanted = self._way is Way.OPEN
        for each in self._pairs:
            registered = each in self._selector.get_map()
            if wanted and not registered:
                self._selector.register(each, selectors.EVENT_READ)
            elif not wanted and registered:
                self._selector.unregister(each)

    def _accept(self) -> None:
        near, _ = self._socket.accept()
        if self._way is Way.CUT or len(self._pairs) > CONNECTIONS_MAX:
            near.close()
            return
        try:
            far = socket.create_connection(("127.0.0.1", self._port), 5)
        except OSError:
            near.close()
            return
        self._pairs.update({near: far, far: near})
        self._apply()

    def _pass(self, each: socket.socket) -> None:
        if each not in self._pairs or self._way is not Way.OPEN:
            return
        try:
            data = each.recv(PIECE_BYTES)
            if data:
                self._pairs[each].sendall(data)
                return
        except OSError:
            pass
        self._drop(each)

    def _drop(self, each: socket.socket) -> None:
        other = self._pairs.pop(each, None)
        if other is None:
            return
        del self._pairs[other]
        for side in (each, other):
            with contextlib.suppress(KeyError):
                self._selector.unregister(side)
            side.close()
