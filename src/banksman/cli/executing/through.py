"""Output passed through to our own stdout and stderr by a thread, so that whoever reads us slowly blocks nothing else.

Our stdout is shared with the shell that started us, so it cannot be made non-blocking; a blocking write in the loop
would stop every timer. The thread blocks instead. When it falls behind, the command's output is no longer read, and the
pipe pushes back on the command.
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from collections.abc import Callable

# What may wait to be written before the command is made to wait.
BEHIND_BYTES_MAX = 1 << 20
_FDS = {"stdout": 1, "stderr": 2}


class Through:
    """`put` and the callbacks belong to the loop; `on_behind(True)` asks to stop reading, False to go on."""

    def __init__(self, on_behind: Callable[[bool], None], on_broken: Callable[[OSError], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_behind = on_behind
        self._on_broken = on_broken
        self._queue: queue.SimpleQueue[tuple[str, bytes] | None] = queue.SimpleQueue()
        self._behind_bytes = 0
        self._is_behind = False
        self._is_broken = False
        self._flushed = self._loop.create_future()
        # A daemon: if nobody ever reads us, a second Ctrl-C must still be able to end the program.
        threading.Thread(target=self._write, name="banksman-through", daemon=True).start()

    def put(self, stream: str, data: bytes) -> None:
        # Behind, and still given more: the command is being stopped, and its pipe is emptied so that it can move. What
        # does not fit is dropped, as it would be had it been killed a moment earlier.
        if self._is_broken or self._behind_bytes > 2 * BEHIND_BYTES_MAX:
            return
        self._behind_bytes += len(data)
        self._queue.put((stream, data))
        if not self._is_behind and self._behind_bytes > BEHIND_BYTES_MAX:
            self._is_behind = True
            self._on_behind(True)

    async def flush(self, seconds: float | None) -> None:
        """Until everything is written, nobody is left to write to, or the time is up."""
        self._queue.put(None)
        await asyncio.wait([self._flushed], timeout=seconds)

    def give_up(self) -> None:
        """Nobody reads us, and the user does not want to wait for that to change."""
        self._is_broken = True
        self._on_flushed()

    def _write(self) -> None:
        while (item := self._queue.get()) is not None:
            stream, data = item
            try:
                _write_all(_FDS[stream], data)
            except OSError as exc:
                self._call(self._on_write_failed, exc)
            self._call(self._on_written, len(data))
        self._call(self._on_flushed)

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            pass  # The loop is closed: the program is ending, and nobody wants to know.

    def _on_written(self, size: int) -> None:
        self._behind_bytes -= size
        if self._is_behind and self._behind_bytes <= BEHIND_BYTES_MAX // 2:
            self._is_behind = False
            self._on_behind(False)

    def _on_write_failed(self, error: OSError) -> None:
        if not self._is_broken:
            self._is_broken = True
            self._on_broken(error)

    def _on_flushed(self) -> None:
        if not self._flushed.done():
            self._flushed.set_result(None)


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
