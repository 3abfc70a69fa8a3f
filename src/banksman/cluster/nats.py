"""NATS client adapter: publish with compare-and-set, paged reads, notifications, requests, blobs.

This is the only file that imports `nats`: that client library is about to be replaced.

**Storing.** Every write goes through `publish` or `publish_all`. Each write states the sequence of
the last message that it expects under its subject (`expected`; 0: no message). The servers refuse
it (`WrongLastSequence`) if another message is last. A write without an answer in time is unknown
(`Unanswered`): it may be stored now, or later when the majority is back. Only a read of the subject
tells which, and nothing here guesses.

**Reading.** Notifications and reads are separate. `ring` delivers notifications immediately,
without any guarantee: they may be missed during a change of leaders or of connections. `read`
returns the stored messages after a sequence, possibly from a replica that lags. A reader that needs
every message reads from its last position, after each notification and at intervals. No reader has
a consumer on the server, so nothing has to be recovered when a server dies.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import ssl
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import unquote, urlsplit

import nats
import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js.object_store import ObjectStore

from banksman.cluster.jetstream import (
    SEQUENCE,
    BatchMessage,
    PendingPages,
    PendingReplies,
    StreamMessage,
    Unheard,
    decoded,
    publish_headers,
    refusal,
    seq_of,
    stored,
)
from banksman.cluster.store_address import StoreAddress
from banksman.errors import NoOwner, StoreError, Unanswered, Unreachable, UsageError

log = logging.getLogger("banksman")

# JetStream answers within a millisecond or two, and within seconds during a leader election.
# Callers retry without an answer, so this is how soon they notice.
ANSWER_SECONDS_MAX = 1.0
# The connect timeout per server: at the start, when nothing is at stake, and later, when a lease is
# running out.
FIRST_CONNECT_SECONDS_MAX = 4.0
CONNECT_SECONDS_MAX = 2.0
# The timeout of one of the several requests of a blob.
BLOB_SECONDS_MAX = 10.0
# The retry interval for a replica that lags behind its leader.
LAG_SECONDS = 0.05
RECONNECT_SECONDS = 0.25
# The size limit of one page, apart from its last message.
READ_BYTES_MAX = 4 << 20
# A connection without any traffic for this long, not even the answer to a ping, is dead. A stopped
# server does not close its connections.
PING_SECONDS = 2
_ERRNO = re.compile(r"\[Errno (\d+)\]")


class NatsSubscription:
    """A subscription, active until `stop`."""

    def __init__(self, subscription: Subscription) -> None:
        self._subscription = subscription

    async def stop(self) -> None:
        with suppress(nats.errors.Error):
            await self._subscription.unsubscribe()


class Nats:
    """One connection, which reconnects automatically.

    `on_up`: called after each reconnect; notifications during the gap were missed.
    """

    def __init__(
        self, address: StoreAddress, *, name: str, on_up: Callable[[], None] | None = None
    ) -> None:
        self._address = address
        self._name = name
        self._on_up = on_up
        self._client = Client()
        # The last error that the client reported by callback while it connected. A refusal takes
        # precedence.
        self._told: Exception | None = None
        self._pages: PendingPages | None = None
        self._replies: PendingReplies | None = None

    @property
    def is_up(self) -> bool:
        return self._client.is_connected

    async def connect(self) -> None:
        """Connect. Raises `Unreachable` if no server answers, `UsageError` if one refuses."""
        address = self._address
        options: dict[str, Any] = {}
        if address.tls:
            options["tls"] = _tls(address)
        if address.creds is not None:
            options["user_credentials"] = address.creds
        if address.nkey is not None:
            options["nkeys_seed"] = address.nkey
        if address.token is not None:
            options["token"] = address.token
        # The client does not decode user and password, and a URL can hold a slash only as %2F.
        parts = urlsplit(address.servers[0])
        if parts.username and parts.password is not None:
            options |= {"user": unquote(parts.username), "password": unquote(parts.password)}
        try:
            # The client's own timeouts do not hold if TLS fails: it then waits for the end of a
            # stream that never ends.
            async with asyncio.timeout(FIRST_CONNECT_SECONDS_MAX * (1 + len(address.servers))):
                await self._client.connect(
                    list(address.servers),
                    name=self._name,
                    error_cb=self._on_error,
                    reconnected_cb=self._on_reconnected,
                    max_reconnect_attempts=1,
                    reconnect_time_wait=RECONNECT_SECONDS,  # pyright: ignore[reportArgumentType]
                    connect_timeout=FIRST_CONNECT_SECONDS_MAX,  # pyright: ignore[reportArgumentType]
                    ping_interval=PING_SECONDS,
                    max_outstanding_pings=2,
                    allow_reconnect=True,
                    **options,
                )
            # The first connection tries each server twice, so that a server that is down or refuses
            # is reported. Once connected, the client reconnects without a limit.
            self._client.options |= {
                "max_reconnect_attempts": -1,
                "connect_timeout": CONNECT_SECONDS_MAX,
            }
        except (TimeoutError, nats.errors.Error, OSError) as exc:
            # The client only raises that no server is left. The reason of each server came by
            # callback.
            told = self._told or exc
            if _is_refusal(told):
                hint = "pass user, password, token or creds="
                raise UsageError(f"cannot log in to {address}: {told}", hint=hint) from exc
            raise _unreachable(address, told) from exc
        except ModuleNotFoundError as exc:
            words = f"{address}: creds= and nkey= need the package {exc.name}"
            raise UsageError(words, hint="run `pip install 'nats-py[nkeys]'`") from exc
        except Exception as exc:
            # The client raises arbitrary errors for a key file that is missing or invalid.
            hint = "see docs/cluster.md"
            raise UsageError(f"cannot use {address}: {exc!r:.200}", hint=hint) from exc

    def renew(self) -> None:
        """Prepare another attempt after a failed `connect`."""
        self._client = Client()
        self._pages = self._replies = None
        self._told = None

    async def close(self) -> None:
        """Close the connection."""
        # A client that never connected has nothing to close, and its `close` fails.
        if getattr(self._client, "_flush_queue", None) is None:
            return
        with suppress(nats.errors.Error, OSError, asyncio.TimeoutError):
            await self._client.close()

    def abandon(self) -> None:
        """Abort the socket after the event loop was closed: nothing else can be cleaned up."""
        transport = getattr(self._client, "_transport", None)
        writer = getattr(transport, "_io_writer", None)
        if writer is not None:
            with suppress(Exception):
                writer.transport.abort()

    # -- writes -----------------------------------------------------------------------------------
    async def publish(
        self,
        subject: str,
        data: bytes,
        *,
        expected: int | None = None,
        id: str | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> int:
        """Store a message and return its sequence.

        Raises `WrongLastSequence` or `Unanswered`. `id`: the servers deduplicate repeated publishes
        of an id for some minutes, so that the message is stored once.
        """
        return await self._publish(subject, data, publish_headers(expected, headers, id), timeout)

    async def publish_all(
        self, writes: Sequence[BatchMessage], *, timeout: float | None = None
    ) -> int:
        """Store all messages, one behind the other, or none. Returns the sequence of the last."""
        if len(writes) == 1:
            (one,) = writes
            return await self.publish(
                one.subject, one.data, expected=one.expected, headers=one.headers, timeout=timeout
            )
        batch = uuid.uuid4().hex
        for number, write in enumerate(writes, 1):
            headers = publish_headers(write.expected, write.headers)
            headers |= {"Nats-Batch-Id": batch, "Nats-Batch-Sequence": str(number)}
            if number == len(writes):
                # The servers answer only the commit. It fails if they refused any message of the
                # batch.
                headers["Nats-Batch-Commit"] = "1"
                return await self._publish(write.subject, write.data, headers, timeout)
            await self._send(write.subject, write.data, headers)
        raise AssertionError("nothing to store")

    async def _publish(
        self, subject: str, data: bytes, headers: dict[str, str], timeout: float | None
    ) -> int:
        return seq_of(decoded(await self._request(subject, data, timeout, headers)))

    # -- reads ------------------------------------------------------------------------------------
    async def last(self, stream: str, subject: str) -> StreamMessage | None:
        """Return the last message of a subject from the stream's leader; None without one."""
        body = json.dumps({"last_by_subj": subject}).encode()
        answer = decoded(await self._request(f"$JS.API.STREAM.MSG.GET.{stream}", body))
        error = answer.get("error")
        if error is not None:
            if error.get("code") == 404:
                return None
            raise refusal(error)
        return stored(answer["message"])

    async def read(
        self, stream: str, first: int, subject: str, count: int, *, bytes_max: int = READ_BYTES_MAX
    ) -> tuple[list[StreamMessage], int]:
        """Read up to `count` messages of a subject or wildcard, and the number behind them.

        `first`: the sequence to start at. Any replica may answer, and it may lag. Large messages
        make a page shorter (`bytes_max`).
        """
        body = json.dumps(
            {"seq": max(1, first), "batch": count, "max_bytes": bytes_max, "next_by_subj": subject}
        )
        if self._pages is None:
            self._pages = pages = PendingPages(self._client.new_inbox())

            async def heard(message: Msg) -> None:
                pages.heard(message.subject, message.data, message.headers or {})

            await self._subscribe(f"{pages.inbox}.*", heard)
        with self._pages.asked() as (reply, page):
            await self._send(f"$JS.API.DIRECT.GET.{stream}", body.encode(), {}, reply=reply)
            try:
                async with asyncio.timeout(ANSWER_SECONDS_MAX * 2):
                    return await page
            except TimeoutError as exc:
                raise Unanswered(f"cannot read {stream}: the servers do not answer") from exc

    async def ring(
        self, subject: str, on_message: Callable[[StreamMessage], None]
    ) -> NatsSubscription:
        """Subscribe to a subject or wildcard. Delivery is not guaranteed."""

        async def heard(message: Msg) -> None:
            headers: dict[str, str] = message.headers or {}
            on_message(
                StreamMessage(
                    message.subject,
                    message.data,
                    headers,
                    int(headers.get(SEQUENCE, 0)),
                    message.reply,
                )
            )

        return NatsSubscription(await self._subscribe(subject, heard))

    # -- requests ---------------------------------------------------------------------------------
    async def ask(self, subject: str, data: bytes, *, timeout: float) -> bytes:
        """Send a request and return the answer.

        Raises `NoOwner` if the subject has no subscriber, which the server reports immediately.
        Raises `Unanswered` if it is unknown whether the request was received.
        """
        try:
            return await self._request(subject, data, timeout)
        except Unheard as exc:
            raise NoOwner("no host answers") from exc

    async def tell(self, subject: str, data: bytes, *, reply: str = "") -> None:
        """Publish a message to the current subscribers."""
        await self._send(subject, data, {}, reply)

    def inbox(self) -> str:
        """Return a new unique subject."""
        return self._client.new_inbox()

    # -- JetStream API ----------------------------------------------------------------------------
    async def api(
        self, verb: str, body: Mapping[str, Any], *, timeout: float = 5.0
    ) -> dict[str, Any]:
        """Call the JetStream API and return its answer, which may be an error."""
        return decoded(await self._request(f"$JS.API.{verb}", json.dumps(body).encode(), timeout))

    # -- blobs ------------------------------------------------------------------------------------
    async def _bucket(self, name: str) -> ObjectStore:
        context = self._client.jetstream(timeout=BLOB_SECONDS_MAX)  # pyright: ignore[reportUnknownMemberType]
        return await context.object_store(name)

    async def put_blob(self, bucket: str, name: str, data: bytes) -> None:
        try:
            store = await self._bucket(bucket)
            await store.put(name, data)
        except nats.js.errors.APIError as exc:
            # The servers answered with a refusal, so waiting would not help.
            raise refusal(
                {"code": exc.code, "err_code": exc.err_code, "description": exc.description}
            ) from exc
        except (nats.errors.Error, OSError) as exc:
            raise self._unanswered(exc) from exc

    async def get_blob(self, bucket: str, name: str) -> bytes | None:
        """Return a blob; None if it is missing or incomplete.

        The parts are read in pages, like all other messages. The client's own method waits forever
        for a missing part, waits long after the death of a server, and copies all data again for
        each part.
        """
        try:
            store = await self._bucket(bucket)
            info = await store.get_info(name)
        except nats.js.errors.NotFoundError:
            return None
        except (nats.errors.Error, OSError) as exc:
            raise self._unanswered(exc) from exc
        data = b"".join(
            await self._parts(f"OBJ_{bucket}", f"$O.{bucket}.C.{info.nuid}", info.chunks or 0)
        )
        return data if len(data) == info.size else None

    async def _parts(self, stream: str, subject: str, count: int) -> list[bytes]:
        """Read up to `count` parts, or those that exist. Retries a replica that lags."""
        parts: list[bytes] = []
        begin, deadline = 1, time.monotonic() + BLOB_SECONDS_MAX
        while len(parts) < count:
            found, _ = await self.read(stream, begin, subject, count - len(parts))
            if found:
                parts += (each.data for each in found)
                begin, deadline = found[-1].seq + 1, time.monotonic() + BLOB_SECONDS_MAX
                continue
            last = await self.last(stream, subject)
            if last is None or last.seq < begin:
                break
            if time.monotonic() >= deadline:
                raise Unanswered(f"cannot read {stream}: its replicas lag")
            await asyncio.sleep(LAG_SECONDS)
        return parts

    async def delete_blob(self, bucket: str, name: str) -> None:
        try:
            store = await self._bucket(bucket)
            await store.delete(name)
        except nats.js.errors.NotFoundError:
            pass
        except (nats.errors.Error, OSError) as exc:
            raise self._unanswered(exc) from exc

    # -- server -----------------------------------------------------------------------------------
    @property
    def server_version(self) -> str:
        version = self._client.connected_server_version
        return f"{version.major}.{version.minor}.{version.patch}"

    # -- connection -------------------------------------------------------------------------------
    async def _subscribe(
        self, subject: str, heard: Callable[[Msg], Awaitable[None]] | None = None
    ) -> Subscription:
        try:
            return await self._client.subscribe(subject, cb=heard)  # pyright: ignore[reportUnknownMemberType]
        except (nats.errors.Error, OSError) as exc:
            raise self._unanswered(exc) from exc

    async def _send(
        self, subject: str, data: bytes, headers: dict[str, str], reply: str = ""
    ) -> None:
        try:
            await self._client.publish(subject, data, reply=reply, headers=headers or None)
        except (nats.errors.Error, OSError) as exc:
            raise self._unanswered(exc) from exc

    async def _request(
        self,
        subject: str,
        data: bytes,
        timeout: float | None = None,
        headers: dict[str, str] | None = None,
    ) -> bytes:
        # The client's own requests cost twice as much CPU. On Python 3.11 they also swallow a
        # cancellation that comes with the answer.
        if self._replies is None:
            # The client sends commands in their order, so a concurrent request may follow now.
            self._replies = replies = PendingReplies(self._client.new_inbox())

            async def heard(message: Msg) -> None:
                replies.heard(message.subject, message.data, message.headers)

            await self._subscribe(f"{replies.inbox}.*", heard)
        with self._replies.asked(ANSWER_SECONDS_MAX if timeout is None else timeout) as (to, reply):
            await self._send(subject, data, headers or {}, reply=to)
            try:
                return await reply
            except Unheard as exc:
                raise Unheard(f"no server at {self._address} handles the request") from exc
            except Unanswered as exc:
                raise Unanswered(f"{self._address} did not answer: {exc}") from exc

    def _unanswered(self, exc: Exception) -> StoreError:
        """Translate an error of the client."""
        if isinstance(exc, nats.errors.ConnectionClosedError | nats.errors.ConnectionDrainingError):
            return StoreError("the log is closed")
        if isinstance(exc, nats.errors.MaxPayloadError):
            hint = "raise max_payload of nats-server"
            return StoreError("a message is larger than the server accepts", hint=hint)
        return Unanswered(f"{self._address} did not answer: {str(exc) or type(exc).__name__:.200}")

    async def _on_error(self, exc: Exception) -> None:
        if self._told is None or not _is_refusal(self._told):
            self._told = exc
        # A slow consumer missed notifications, as after a lost connection. Other errors reach the
        # caller that they belong to.
        if isinstance(exc, nats.errors.SlowConsumerError):
            log.warning("%s: slow consumer, messages were dropped: %s", self._address, exc)
            await self._on_reconnected()
        elif _is_refusal(exc) and self._client.is_reconnecting:
            # The server accepted this client before. Without a log line nothing would explain the
            # silence.
            log.warning("%s: login refused on reconnect: %s", self._address, exc)
        else:
            log.debug("nats: %r", exc)

    async def _on_reconnected(self) -> None:
        if self._on_up is not None:
            self._on_up()


def _is_refusal(exc: BaseException) -> bool:
    """Return whether an error refuses this client's credentials.

    While it connects, the client has no type for that, only the server's text.
    """
    words = str(exc)
    return (
        isinstance(exc, nats.errors.AuthorizationError)
        or "Authorization" in words
        or "Authentication" in words
    )


def _unreachable(address: StoreAddress, exc: BaseException) -> Unreachable:
    hint = "start nats-server, or run `banksman doctor --store …`"
    return Unreachable(f"cannot reach {address}: {_reason(exc):.200}", hint=hint)


def _reason(exc: BaseException) -> str:
    """Return the reason of a failed connection in words, without Python's names."""
    words = str(exc)
    # asyncio puts the address into the text of the error. For a name with several addresses it
    # joins the texts of all attempts, and the error has no number.
    numbers = set(_ERRNO.findall(words))
    if len(numbers) == 1:
        return os.strerror(int(numbers.pop())).lower()
    if isinstance(exc, TimeoutError):
        return "no answer in time"
    return (isinstance(exc, OSError) and exc.strerror) or words or type(exc).__name__


def _tls(address: StoreAddress) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=address.ca)
        if address.cert is not None:
            context.load_cert_chain(address.cert, address.key)
    except OSError as exc:
        raise UsageError(
            f"cannot load the certificates for {address}: {exc}",
            hint="check the files ca=, cert= and key=",
        ) from exc
    return context
