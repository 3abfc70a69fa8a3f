"""What JetStream says, in our own words: messages, refusals, and pages that come in pieces.

Nothing here knows the client (`nats.py`): it is the servers' own protocol, as it comes over the wire.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from banksman.errors import StoreError, StoreFull, Unanswered

# "wrong last sequence", and the same inside of an atomic batch.
WRONG_LAST = (10071, 10164)
# What was published before under this id, and not answered, is still on its way: whether it arrives is not known.
IN_PROCESS = 10158
# No room: on the server's disk as far as it may use it, of the account, in the stream.
FULL = (10023, 10002, 10047, 10077)
SEQUENCE = "Nats-Sequence"
ID = "Nats-Msg-Id"


class WrongLastSequence(Exception):
    """Something else is stored there than was expected."""


class Unheard(Unanswered):
    """Nobody heard it, and nothing was stored: there is no such stream, or it has no leader in this moment."""


class StreamMessage(NamedTuple):
    """`seq`: its number in the stream, 0: it is in none."""

    subject: str
    data: bytes
    headers: Mapping[str, str]
    seq: int
    reply: str = ""


class BatchMessage(NamedTuple):
    """One message of several that are stored together, or not at all."""

    subject: str
    data: bytes
    expected: int | None = None
    headers: Mapping[str, str] = {}


class PendingPages:
    """The answers to all that is read, at one inbox: each of them is several messages, and the last one says so."""

    def __init__(self, inbox: str) -> None:
        self.inbox = inbox
        self._numbers = itertools.count()
        self._asked: dict[str, tuple[list[StreamMessage], asyncio.Future[tuple[list[StreamMessage], int]]]] = {}

    @contextmanager
    def asked(self) -> Generator[tuple[str, asyncio.Future[tuple[list[StreamMessage], int]]]]:
        """Where to send the answer, and what it will be."""
        number = str(next(self._numbers))
        page: asyncio.Future[tuple[list[StreamMessage], int]] = asyncio.get_running_loop().create_future()
        self._asked[number] = [], page
        try:
            yield f"{self.inbox}.{number}", page
        finally:
            del self._asked[number]

    def heard(self, subject: str, data: bytes, headers: Mapping[str, str]) -> None:
        asked = self._asked.get(subject.rpartition(".")[2])
        if asked is None or asked[1].done():
            return  # Nobody waits for it any more.
        found, page = asked
        match headers.get("Status"):
            case None:
                found.append(StreamMessage(headers["Nats-Subject"], data, headers, int(headers[SEQUENCE])))
            case "204":
                page.set_result((found, int(headers.get("Nats-Num-Pending", 0))))
            case "404":
                page.set_result((found, 0))
            case status:
                page.set_exception(Unanswered(f"it cannot be read now: {status}"))


def stored(message: dict[str, Any]) -> StreamMessage:
    """As MSG.GET gives it: in base64, its headers as they were sent."""
    headers: dict[str, str] = {}
    for line in base64.b64decode(message.get("hdrs", "")).decode().split("\r\n")[1:]:
        name, colon, value = line.partition(":")
        if colon:
            headers[name] = value.strip()
    return StreamMessage(message["subject"], base64.b64decode(message.get("data", "")), headers, int(message["seq"]))


def decoded(data: bytes) -> dict[str, Any]:
    try:
        return json.loads(data)
    except ValueError as exc:
        raise Unanswered(f"JetStream has answered {data!r:.100}") from exc


def seq_of(answer: Mapping[str, Any]) -> int:
    """Of what was published: under which sequence it is stored, or why not."""
    error = answer.get("error")
    if error is None:
        return int(answer["seq"])
    if error.get("err_code") in WRONG_LAST:
        raise WrongLastSequence(error.get("description", ""))
    raise refusal(error)


def refusal(error: Mapping[str, Any]) -> StoreError:
    """What JetStream has against it. That a leader is being chosen does not last; that there is no room, until somebody
    acts."""
    words = f"JetStream refuses it: {error.get('description')} ({error.get('err_code')})"
    if error.get("err_code") in FULL:
        return StoreFull(words, hint="raise max_file_store of nats-server, or delete sessions", code=error["err_code"])
    if error.get("code") == 503 or error.get("err_code") == IN_PROCESS:
        return Unanswered(words)
    return StoreError(words, hint="see docs/cluster.md", code=error.get("err_code"))
