"""The one thread that reads histories, so that the loop does not wait for the disk, nor unpack what it finds there.

One is enough: a page takes a fraction of a millisecond, most of it in Python, of which only one thread runs at a time
anyway. It is a daemon for the same reason as the writer, and with less to lose.
"""

from __future__ import annotations

import queue
import sqlite3
import threading
from collections.abc import Callable
from typing import Any

from banksman.errors import BanksmanError
from banksman.store.sqlite.faults import translate


class Request:
    """A question. `settled` is called in the loop when there is an answer, or an error."""

    __slots__ = ("error", "function", "is_wanted", "settled", "value")

    def __init__(
        self,
        settled: Callable[[Request], None],
        function: Callable[[sqlite3.Connection], Any],
        is_wanted: Callable[[], bool],
    ) -> None:
        self.settled = settled
        self.function = function
        # Whether somebody still waits for it: a page nobody wants need not be read.
        self.is_wanted = is_wanted
        self.value: Any = None
        self.error: Exception | None = None


class Reader:
    """`hand_over` is called in the thread, with a request to be settled in the loop's; with None at the end."""

    def __init__(
        self, connection: sqlite3.Connection, *, path: str, hand_over: Callable[[Request | None], None]
    ) -> None:
        self._connection = connection
        self._path = path
        self._hand_over = hand_over
        self._queue: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self.put: Callable[[Request], None] = self._queue.put
        self.thread = threading.Thread(target=self._run, name="banksman-store-reader", daemon=True)

    def start(self) -> None:
        self.thread.start()

    def stop(self) -> None:
        """End, behind all that was asked. From any thread."""
        self._queue.put(None)

    def _run(self) -> None:
        while (request := self._queue.get()) is not None:
            if request.is_wanted():
                self._answer(request)
                self._hand_over(request)
        self._hand_over(None)

    def _answer(self, request: Request) -> None:
        try:
            request.value = request.function(self._connection)
        except BanksmanError as exc:
            request.error = exc
        except (sqlite3.Error, OSError) as exc:
            request.error = translate(exc, self._path, "read")
            request.error.__cause__ = exc
        except Exception as exc:
            # A bug, or a session's id that is no text. It is the asker's to see, and not the thread's to die of.
            request.error = exc
