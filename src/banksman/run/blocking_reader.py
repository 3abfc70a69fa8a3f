"""The blocking face of a pull reader: lines and bytes of a command's output, for any thread.

What the loop's thread fetches is put where every thread finds it (`OutputReader.fetched` of the async one), and taken
from there. So a caller that goes away, by Ctrl-C or at the end of its timeout, loses nothing, and all faces of one
stream read on from the same place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Coroutine
from typing import Any, Self

from banksman.run.bridge import Manner
from banksman.run.commands.reader import OutputReader as AsyncOutputReader
from banksman.run.commands.reader import check_size
from banksman.run.faces import Face


class OutputReader(Face[AsyncOutputReader]):
    """One output stream of a command: `for line in command.stdout`, `command.stdout.read(n)`. See
    `banksman.OutputReader`.

    Several threads may read it: each line goes to one of them. Neither Ctrl-C nor a timeout loses anything: what was
    fetched for a caller that has gone is there for the next one.
    """

    @property
    def missed(self) -> int:
        return self._inner.missed

    def at_eof(self) -> bool:
        return self._bridge.look(self._inner.at_eof)

    def read(self, size: int = -1, *, timeout: float | None = None) -> bytes:
        """Up to `size` bytes, as soon as there are any; b"" at the end of the stream. -1: all up to the end. Past
        `timeout` seconds in all: TimeoutError."""
        check_size(size)
        if size == -1:
            return self._read_all(timeout)
        fetched = self._inner.fetched

        async def fetch() -> bool:
            if not fetched and (data := await self._inner.read(size)):
                fetched.append(data)
            return bool(fetched)

        data = self._next(fetch, timeout)
        if len(data) > size:
            fetched.appendleft(data[size:])
        return data[:size]

    def _read_all(self, timeout: float | None) -> bytes:
        """One call for all of it, so that there is one deadline. A caller that goes away leaves all of it to the next
        one: the async read puts back what it has when it is cancelled, and `undo` does once it has answered."""
        fetched = self._inner.fetched

        async def fetch() -> bytes:
            rest = await self._inner.read(-1)
            parts: list[bytes] = []
            # Other threads may take from it at the same time, so each piece is taken by itself.
            with contextlib.suppress(IndexError):
                while True:
                    parts.append(fetched.popleft())
            return b"".join((*parts, rest))

        return self._bridge.call(fetch, Manner.READS, timeout=timeout, undo=self._inner.put_back)

    def readline(self, *, timeout: float | None = None) -> bytes:
        """One line with its newline; the last one may have none; b"" at the end. Past `timeout` seconds: TimeoutError.
        A line of more than 32 MiB is returned in parts of that size."""
        fetched = self._inner.fetched

        async def fetch() -> bool:
            # Many at once: each way through the loop costs more than a line.
            if not fetched:
                fetched.extend(await self._inner.read_lines())
            return bool(fetched)

        return self._next(fetch, timeout)

    def _next(self, fetch: Callable[[], Coroutine[Any, Any, bool]], timeout: float | None) -> bytes:
        while True:
            try:
                return self._inner.fetched.popleft()
            except IndexError:
                if not self._bridge.call(fetch, Manner.READS, timeout=timeout):
                    return b""

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> bytes:
        line = self.readline()
        if not line:
            raise StopIteration
        return line
