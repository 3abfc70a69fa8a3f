"""`Idempotency-Key`: a request that is sent again, since its answer was lost, is answered again, and done once.

What is remembered here is which body came with a key, and what it is being answered, as long as this server lives. What
must be done once beyond that is done so by the log: an ask has its key there, and a session that is made with a key has
an id that is made of it.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec

from banksman.serve.api.routes import Answer
from banksman.serve.problems import Problem

KEYS_MAX = 10_000


@dataclass(slots=True)
class _Entry:
    fingerprint: bytes
    answer: asyncio.Future[Answer]


class Once:
    """By key, and what it was sent to."""

    def __init__(self) -> None:
        self._entries: OrderedDict[tuple[str, str], _Entry] = OrderedDict()

    async def do(
        self,
        place: str,
        key: str | None,
        body: msgspec.Struct,
        do: Callable[[], Awaitable[Answer]],
        *,
        is_still_so: Callable[[Answer], bool] = lambda _: True,
    ) -> Answer:
        """`do`, or what it has answered to the same before. What failed is not remembered: it may be tried again. Nor
        is what is no longer so: what was made has been deleted since."""
        if key is None:
            return await do()
        fingerprint = hashlib.sha256(msgspec.json.encode(body)).digest()
        while (entry := self._entries.get((place, key))) is not None:
            if entry.fingerprint != fingerprint:
                hint = "another request needs another key"
                raise Problem(422, "KeyUsed", "this Idempotency-Key came with another body before", hint=hint)
            # Whoever did it may have failed, or have been cancelled: then it is our turn, or of who comes before us.
            await asyncio.wait((entry.answer,))
            if not entry.answer.cancelled():
                if is_still_so(entry.answer.result()):
                    return entry.answer.result()
                if self._entries.get((place, key)) is entry:
                    del self._entries[place, key]
        return await self._do(place, key, fingerprint, do)

    async def _do(self, place: str, key: str, fingerprint: bytes, do: Callable[[], Awaitable[Answer]]) -> Answer:
        assert (place, key) not in self._entries, "it would be done twice"
        entry = _Entry(fingerprint, asyncio.get_running_loop().create_future())
        self._entries[place, key] = entry
        self._forget_oldest()
        try:
            entry.answer.set_result(await do())
            return entry.answer.result()
        finally:
            if not entry.answer.done():
                entry.answer.cancel()  # Who waits for it tries it itself.
                del self._entries[place, key]

    def _forget_oldest(self) -> None:
        """Not those that are being done: each is a request that is open, and they are bounded by the connections."""
        for place, entry in list(self._entries.items())[: max(0, len(self._entries) - KEYS_MAX)]:
            if entry.answer.done():
                del self._entries[place]


def session_id(key: str) -> str:
    """The same for the same key, after a restart too."""
    return f"s-{hashlib.blake2b(key.encode(), digest_size=8, person=b'banksman').hexdigest()}"
