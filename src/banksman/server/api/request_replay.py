"""Idempotency keys: repeat the stored response of a request that a client sends again.

A client resends a request with the same `Idempotency-Key` if the response was lost. This module
remembers the body and the response of each key while the server lives. Beyond that the log makes
requests idempotent: it stores the key of an ask, and the id of a session is derived from its key.
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
# Size of an entry besides its response.
ENTRY_BYTES = 600


class _Entry(NamedTuple):
    """The body's digest and the response of a key; a future while the request runs."""

    body: bytes
    answer: HttpAnswer | asyncio.Future[HttpAnswer]

    @property
    def weight(self) -> int:
        return ENTRY_BYTES + (
            len(self.answer.value or b"") if isinstance(self.answer, HttpAnswer) else 0
        )


async def _always(_: HttpAnswer) -> bool:
    return True


class RequestReplay:
    """Responses by key and target.

    There are thousands of entries, so each is small: digests, and the bytes of the response. Their
    total size is bounded, too, because a response may show the long arguments of a command.
    """

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
        """Call `do`, or return its stored response to the same request.

        A failed request is not remembered, so that the client can retry it. A stored response is
        dropped if `is_still_so` says that it is outdated: the created object was deleted, or the
        ask was never sent.
        """
        if key is None:
            return await do()
        name, wanted = (
            _digest(msgspec.json.encode((place, key))),
            _digest(msgspec.json.encode(body)),
        )
        while (entry := self._entries.get(name)) is not None:
            if entry.body != wanted:
                hint = "use a new key for another request"
                raise Problem(
                    422,
                    "KeyUsed",
                    "this Idempotency-Key was already used with another body",
                    hint=hint,
                )
            if isinstance(entry.answer, asyncio.Future):
                # That request may fail or be cancelled. Then this one, or another waiter before it,
                # calls `do`.
                await asyncio.wait((entry.answer,))
            elif await is_still_so(entry.answer):
                return entry.answer
            elif self._entries.get(name) is entry:
                self._forget(name)
        return await self._do(name, wanted, do)

    async def _do(
        self, name: bytes, body: bytes, do: Callable[[], Awaitable[HttpAnswer]]
    ) -> HttpAnswer:
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
            done.cancel()  # Wake the waiters. They find the response, or call `do` themselves.

    def _remember(self, name: bytes, entry: _Entry) -> None:
        self._entries[name] = entry
        self._weight += entry.weight
        self._forget_oldest()

    def _forget(self, name: bytes) -> None:
        self._weight -= self._entries.pop(name).weight

    def _forget_oldest(self) -> None:
        """Drop the oldest entries beyond the limits.

        Entries of running requests stay: each belongs to an open connection, and connections are
        limited. Such an entry moves to the end, so that later requests do not look at it again. The
        newest entry stays whatever its size: its client may not have the response yet.
        """
        for _ in range(len(self._entries) - 1):
            if len(self._entries) <= KEYS_MAX and self._weight <= BYTES_MAX:
                return
            name = next(iter(self._entries))
            if isinstance(self._entries[name].answer, asyncio.Future):
                self._entries.move_to_end(name)
            else:
                self._forget(name)


def _encoded(answer: HttpAnswer) -> HttpAnswer:
    """Encode a response.

    If it cannot be encoded, the request was done all the same and must not be done again. So the
    error becomes the response to every request with this key.
    """
    try:
        return answer.encoded()
    except UnicodeEncodeError:
        hint = (
            "the request was done: do not repeat it, "
            "and rename the file or folder whose name is not UTF-8"
        )
        problem = Problem(
            500, "NotText", "cannot encode the response: a name in it is not UTF-8", hint=hint
        )
        return HttpAnswer(problem.body(), problem.status, answer.headers, MEDIA_TYPE)


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()
