"""JetStream protocol: message types, error codes, and responses that arrive in several messages.

It parses the servers' wire format, builds the headers of a publish, and translates errors. Nothing
here sends a message or depends on the client library: see `nats.py`.
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

# "wrong last sequence", for a single message and inside an atomic batch.
WRONG_LAST = (10071, 10164)
# An earlier publish under this id is still being processed, so its result is unknown.
IN_PROCESS = 10158
# No room: the server's share of its disk, the account's limit, or the stream's limit.
FULL = (10023, 10002, 10047, 10077)
# The status of the server's reply to a request that has no subscriber.
NO_RESPONDERS = "503"
SEQUENCE = "Nats-Sequence"
ID = "Nats-Msg-Id"


class WrongLastSequence(Exception):
    """The subject's last message is not the expected one: a compare-and-set failed."""


class Unheard(Unanswered):
    """No stream received the message, so nothing was stored.

    The stream does not exist, or it has no leader at the moment.
    """


class StreamMessage(NamedTuple):
    """A message of a stream. `seq`: its sequence in the stream; 0 if it belongs to none."""

    subject: str
    data: bytes
    headers: Mapping[str, str]
    seq: int
    reply: str = ""


class BatchMessage(NamedTuple):
    """One message of an atomic batch: all messages of the batch are stored, or none."""

    subject: str
    data: bytes
    expected: int | None = None
    headers: Mapping[str, str] = {}


class PendingReplies:
    """Collect the replies to requests at one inbox, one message for each request."""

    def __init__(self, inbox: str) -> None:
        self.inbox = inbox
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count()
        self._asked: dict[str, asyncio.Future[bytes]] = {}

    @contextmanager
    def asked(self, timeout: float) -> Generator[tuple[str, asyncio.Future[bytes]]]:
        """Yield the reply subject of a new request, and the future of its reply.

        The future raises `Unanswered` after `timeout`, and `Unheard` if no subscriber got the
        request.
        """
        number = str(next(self._numbers))
        reply: asyncio.Future[bytes] = self._loop.create_future()
        self._asked[number] = reply
        # A plain timer: `asyncio.timeout` and `wait_for` cost more than the request.
        timer = self._loop.call_later(timeout, _expire, reply)
        try:
            yield f"{self.inbox}.{number}", reply
        finally:
            timer.cancel()
            del self._asked[number]

    def heard(self, subject: str, data: bytes, headers: Mapping[str, str] | None) -> None:
        """Answer the request that this message replies to."""
        reply = self._asked.get(subject.rpartition(".")[2])
        if reply is None or reply.done():
            return  # The caller was cancelled, or its time is over.
        if headers is not None and headers.get("Status") == NO_RESPONDERS:
            reply.set_exception(Unheard("no server handles the request"))
        else:
            reply.set_result(data)


def _expire(reply: asyncio.Future[bytes]) -> None:
    if not reply.done():
        reply.set_exception(Unanswered("no answer in time"))


class PendingPages:
    """Collect the responses to reads at one inbox.

    A response consists of several messages, and the last one marks the end.
    """

    def __init__(self, inbox: str) -> None:
        self.inbox = inbox
        self._numbers = itertools.count()
        self._asked: dict[
            str, tuple[list[StreamMessage], asyncio.Future[tuple[list[StreamMessage], int]]]
        ] = {}

    @contextmanager
    def asked(self) -> Generator[tuple[str, asyncio.Future[tuple[list[StreamMessage], int]]]]:
        """Yield the reply subject of a new read, and the future of its page."""
        number = str(next(self._numbers))
        page: asyncio.Future[tuple[list[StreamMessage], int]] = (
            asyncio.get_running_loop().create_future()
        )
        self._asked[number] = [], page
        try:
            yield f"{self.inbox}.{number}", page
        finally:
            del self._asked[number]

    def heard(self, subject: str, data: bytes, headers: Mapping[str, str]) -> None:
        """Add one message of a response to the page that it belongs to."""
        asked = self._asked.get(subject.rpartition(".")[2])
        if asked is None or asked[1].done():
            return  # The read was cancelled or has timed out.
        found, page = asked
        match headers.get("Status"):
            case None:
                found.append(
                    StreamMessage(headers["Nats-Subject"], data, headers, int(headers[SEQUENCE]))
                )
            case "204":
                page.set_result((found, int(headers.get("Nats-Num-Pending", 0))))
            case "404":
                page.set_result((found, 0))
            case status:
                page.set_exception(Unanswered(f"cannot read the stream: status {status}"))


def publish_headers(
    expected: int | None, more: Mapping[str, str] | None, id: str | None = None
) -> dict[str, str]:
    """Return the headers of a publish.

    `expected`: the sequence of the last message under the subject, as the publisher knows it; the
    servers compare it. None: they compare nothing.
    """
    headers = dict(more or {})
    if expected is not None:
        headers["Nats-Expected-Last-Subject-Sequence"] = str(expected)
    if id is not None:
        headers[ID] = id
    return headers


def stored(message: dict[str, Any]) -> StreamMessage:
    """Decode a message as MSG.GET returns it: in base64, with its headers as they were sent."""
    headers: dict[str, str] = {}
    for line in base64.b64decode(message.get("hdrs", "")).decode().split("\r\n")[1:]:
        name, colon, value = line.partition(":")
        if colon:
            headers[name] = value.strip()
    return StreamMessage(
        message["subject"], base64.b64decode(message.get("data", "")), headers, int(message["seq"])
    )


def decoded(data: bytes) -> dict[str, Any]:
    """Decode a JSON answer. Raises `Unanswered` if it is not JSON."""
    try:
        return json.loads(data)
    except ValueError as exc:
        raise Unanswered(f"cannot decode the answer of JetStream: {data!r:.100}") from exc


def seq_of(answer: Mapping[str, Any]) -> int:
    """Return the sequence of a published message from its ack, or raise why it was refused."""
    error = answer.get("error")
    if error is None:
        return int(answer["seq"])
    if error.get("err_code") in WRONG_LAST:
        raise WrongLastSequence(error.get("description", ""))
    raise refusal(error)


def refusal(error: Mapping[str, Any]) -> StoreError:
    """Translate a JetStream error.

    A leader election passes, so it is `Unanswered` and a retry helps. A full store stays full until
    an operator acts, so it is `StoreFull`.
    """
    words = f"JetStream refused the request: {error.get('description')} ({error.get('err_code')})"
    if error.get("err_code") in FULL:
        return StoreFull(
            words,
            hint="raise max_file_store of nats-server, or delete sessions",
            code=error["err_code"],
        )
    if error.get("code") == 503 or error.get("err_code") == IN_PROCESS:
        return Unanswered(words)
    return StoreError(words, hint="see docs/cluster.md", code=error.get("err_code"))
