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
from typing import NamedTuple

import msgspec

from banksman.server.api.route import HttpAnswer
from banksman.server.problems import MEDIA_TYPE, Problem

KEYS_MAX = 10_000
BYTES_MAX = 16 << 20
# What an entry takes besides the bytes of its answer.
ENTRY_BYTES = 600


class _Entry(NamedTuple):
    """What came with a key, and the answer to it: of a request that is being done, the future of one."""

    body: bytes
    answer: HttpAnswer | asyncio.Future[HttpAnswer]

    @property
    def weight(self) -> int:
        return ENTRY_BYTES + (len(self.answer.value or b"") if isinstance(self.answer, HttpAnswer) else 0)


async def _always(_: HttpAnswer) -> bool:
    return True


class RequestReplay:
    """By key, and what it was sent to. There are thousands of entries, so each is small: digests, and the bytes of the
    answer. Together they are bounded too, since an answer may show the long arguments of a command."""

    def __init__(self) -> None:
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        self._weight = 0

    async def do(
        self,
        place: str,
        key: str | None,
        body: msgspec.Struct,
        do: Callable[[], Awaitable[HttpAnswer]],
        *,
        is_still_so: Callable[[HttpAnswer], Awaitable[bool]] = _always,
    ) -> HttpAnswer:
        """`do`, or what it has answered to the same before. What failed is not remembered: it may be tried again. Nor
        is what is no longer so: what was made has been deleted since, or what was asked was never sent."""
        if key is None:
            return await do()
        name, wanted = _digest(msgspec.json.encode((place, key))), _digest(msgspec.json.encode(body))
        while (entry := self._entries.get(name)) is not None:
            if entry.body != wanted:
                hint = "another request needs another key"
                raise Problem(422, "KeyUsed", "this Idempotency-Key came with another body before", hint=hint)
            if isinstance(entry.answer, asyncio.Future):
                # Whoever does it may fail, or be cancelled: then it is our turn, or of who comes before us.
                await asyncio.wait((entry.answer,))
            elif await is_still_so(entry.answer):
                return entry.answer
            elif self._entries.get(name) is entry:
                self._forget(name)
        return await self._do(name, wanted, do)

    async def _do(self, name: bytes, body: bytes, do: Callable[[], Awaitable[HttpAnswer]]) -> HttpAnswer:
        done: asyncio.Future[HttpAnswer] = asyncio.get_running_loop().create_future()
        self._remember(name, _Entry(body, done))
        answer: HttpAnswer | None = None
        try:
            first = await do()
            answer = _encoded(first)
            return msgspec.structs.replace(answer, on_unsent=first.on_unsent)
        finally:
            self._forget(name)
            if answer is not None:
                self._remember(name, _Entry(body, answer))
            done.cancel()  # Wakes who waits for it. It finds the answer, or tries it itself.

    def _remember(self, name: bytes, entry: _Entry) -> None:
        self._entries[name] = entry
        self._weight += entry.weight
        self._forget_oldest()

    def _forget(self, name: bytes) -> None:
        self._weight -= self._entries.pop(name).weight

    def _forget_oldest(self) -> None:
        """Not those that are being done: each is a request that is open, and they are bounded by the connections. Such
        a one goes to the end, so that it is not looked at again by every request behind it. Nor the newest, however
        large it is: its client may not have it yet."""
        for _ in range(len(self._entries) - 1):
            if len(self._entries) <= KEYS_MAX and self._weight <= BYTES_MAX:
                return
            name = next(iter(self._entries))
            if isinstance(self._entries[name].answer, asyncio.Future):
                self._entries.move_to_end(name)
            else:
                self._forget(name)


def _encoded(answer: HttpAnswer) -> HttpAnswer:
    """An answer in bytes. What cannot be told was done all the same, and is not to be done again: that is the answer to
    every request with this key."""
    try:
        return answer.encoded()
    except UnicodeEncodeError:
        hint = "it was done; look at it by another way, and rename what has a name that is not UTF-8"
        problem = Problem(500, "NotText", "the answer has a name that is not UTF-8", hint=hint)
        return HttpAnswer(problem.body(), problem.status, answer.headers, MEDIA_TYPE)


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def session_id(key: str) -> str:
    """The same for the same key, after a restart too."""
    return f"s-{hashlib.blake2b(key.encode(), digest_size=8, person=b'banksman').hexdigest()}"
