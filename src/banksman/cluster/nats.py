"""NATS JetStream in our own words. The only file that imports `nats`: its client is about to be replaced by another.

Everything that is stored goes through `publish` or `publish_all`, which say what they believe to be there (`expected`,
the sequence of the last message of that subject, 0: none) and are refused (`WrongLastSequence`) if something else is.
What is not answered in time is unknown (`Unanswered`): it may be stored now, or later, when the majority is back. Only
a look at the subject says which; nothing here guesses.

To hear that something was stored, and to read it, are two things. `ring` hears of it, at once and without any promise:
a bell may be missed, in a change of leaders or of connections. `read` asks for what is stored after a sequence, and may
be answered by a replica that lags. Who needs all of it reads from where it was, when the bell rings and now and then
besides. There is no consumer on the server for any reader, and so nothing to be recovered when a server dies.
"""

from __future__ import annotations

import asyncio
import json
import logging
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
    ID,
    SEQUENCE,
    BatchMessage,
    PendingPages,
    StreamMessage,
    Unheard,
    decoded,
    refusal,
    seq_of,
    stored,
)
from banksman.cluster.store_address import StoreAddress
from banksman.errors import NoOwner, StoreError, Unanswered, Unreachable, UsageError

log = logging.getLogger("banksman")

# An answer of JetStream's takes a millisecond or two, and seconds while its servers choose a leader. Whoever is not
# answered asks again, so this is how soon that is noticed.
ANSWER_SECONDS_MAX = 1.0
# How long one server may take to let us in: at the start, when nothing is at stake, and later, when a lease runs out.
FIRST_CONNECT_SECONDS_MAX = 4.0
CONNECT_SECONDS_MAX = 2.0
# For one answer of several that a blob takes.
BLOB_SECONDS_MAX = 10.0
# How soon a replica that lags behind its leader is asked again.
LAG_SECONDS = 0.05
RECONNECT_SECONDS = 0.25
# What one page of a read weighs, at most, but for its last message.
READ_BYTES_MAX = 4 << 20
# A connection over which nothing came for this long, not even the answer to a ping, is dead: a server that is stopped
# does not close it.
PING_SECONDS = 2


class NatsSubscription:
    """Until it is taken down."""

    def __init__(self, subscription: Subscription) -> None:
        self._subscription = subscription

    async def stop(self) -> None:
        with suppress(nats.errors.Error):
            await self._subscription.unsubscribe()


class QueuedMessage:
    """What was pulled from a queue: done, or to be offered again, to whomever."""

    def __init__(self, message: Msg) -> None:
        self._message = message
        self.data = message.data

    @property
    def deliveries(self) -> int:
        return self._message.metadata.num_delivered

    async def done(self) -> None:
        with suppress(nats.errors.Error):
            await self._message.ack()

    async def again(self, seconds: float) -> None:
        with suppress(nats.errors.Error):
            await self._message.nak(delay=seconds)

    async def working(self) -> None:
        with suppress(nats.errors.Error):
            await self._message.in_progress()


class PullConsumer:
    """Questions for the next of a queue, until it is stopped."""

    def __init__(self, nats: Nats, inbox: str, subscription: Subscription) -> None:
        self._nats = nats
        self._inbox = inbox
        self._subscription = subscription

    async def ask(self, stream: str, consumer: str, *, seconds: float) -> None:
        """The answer comes under the consumer's name: the next job of the queue, or None: there was none in that time,
        or nobody could be asked. It may also never come."""
        body = json.dumps({"batch": 1, "expires": int(seconds * 1e9)}).encode()
        await self._nats.tell(f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}", body, reply=f"{self._inbox}.{consumer}")

    async def stop(self) -> None:
        with suppress(nats.errors.Error):
            await self._subscription.unsubscribe()


class Nats:
    """One connection, which comes back by itself. `on_up` is called when it has; what rang meanwhile was missed."""

    def __init__(self, address: StoreAddress, *, name: str, on_up: Callable[[], None] | None = None) -> None:
        self._address = address
        self._name = name
        self._on_up = on_up
        self._client = Client()
        # What the client has told aside while it connected: the last of it, but for a refusal, which counts for more.
        self._told: Exception | None = None
        self._pages: PendingPages | None = None

    @property
    def is_up(self) -> bool:
        return self._client.is_connected

    async def connect(self) -> None:
        """`Unreachable` if no server answers, `UsageError` if it does not let us in."""
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
        # The client sends them as they are written, and a URL can have a slash only as %2F.
        parts = urlsplit(address.servers[0])
        if parts.username and parts.password is not None:
            options |= {"user": unquote(parts.username), "password": unquote(parts.password)}
        try:
            # Its own bounds do not hold where TLS fails: it then waits for the end of a stream that has none.
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
            # For the first connection each server is tried twice: what is down, or does not let us in, is told then.
            # One that was up before is waited for without end.
            self._client.options |= {"max_reconnect_attempts": -1, "connect_timeout": CONNECT_SECONDS_MAX}
        except (TimeoutError, nats.errors.Error, OSError) as exc:
            # The client says only that no server was left; what each had against us, it has told aside.
            told = self._told or exc
            if _is_refusal(told):
                hint = "user, password, token or creds="
                raise UsageError(f"{address} does not let us in: {told}", hint=hint) from exc
            raise _unreachable(address, told) from exc
        except ModuleNotFoundError as exc:
            words = f"{address}: creds= and nkey= need the package {exc.name}"
            raise UsageError(words, hint="pip install 'nats-py[nkeys]'") from exc
        except Exception as exc:
            # The client raises whatever its parts do for a file of keys that is not there, or not one.
            raise UsageError(f"{address} cannot be used: {exc!r:.200}", hint="see docs/cluster.md") from exc

    def renew(self) -> None:
        """After a connection that failed: another may be tried."""
        self._client = Client()
        self._pages = None
        self._told = None

    async def close(self) -> None:
        # One that has not got as far as to connect has nothing to close, and cannot stand to be told to.
        if getattr(self._client, "_flush_queue", None) is None:
            return
        with suppress(nats.errors.Error, OSError, asyncio.TimeoutError):
            await self._client.close()

    def abandon(self) -> None:
        """Where the loop was closed before: the socket goes, and nothing else can."""
        transport = getattr(self._client, "_transport", None)
        writer = getattr(transport, "_io_writer", None)
        if writer is not None:
            with suppress(Exception):
                writer.transport.abort()

    # -- storing -----------------------------------------------------------------------------------------------------
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
        """Store it: its sequence. `WrongLastSequence`, or `Unanswered`. With an `id` it is stored once, however often
        it is
        published within some minutes."""
        return await self._publish(subject, data, _headers(expected, headers, id), timeout)

    async def publish_all(self, writes: Sequence[BatchMessage], *, timeout: float | None = None) -> int:
        """Store all of them, one behind the other, or none: the sequence of the last."""
        if len(writes) == 1:
            (one,) = writes
            return await self.publish(
                one.subject, one.data, expected=one.expected, headers=one.headers, timeout=timeout
            )
        batch = uuid.uuid4().hex
        for number, write in enumerate(writes, 1):
            headers = _headers(write.expected, write.headers)
            headers |= {"Nats-Batch-Id": batch, "Nats-Batch-Sequence": str(number)}
            if number == len(writes):
                headers["Nats-Batch-Commit"] = "1"
                return await self._publish(write.subject, write.data, headers, timeout)
            await self._send(write.subject, write.data, headers)
        raise AssertionError("nothing to store")

    async def _publish(self, subject: str, data: bytes, headers: dict[str, str], timeout: float | None) -> int:
        return seq_of(decoded(await self._request(subject, data, timeout, headers)))

    # -- reading -----------------------------------------------------------------------------------------------------
    async def last(self, stream: str, subject: str) -> StreamMessage | None:
        """The last message of a subject, as the stream's leader has it. `None`: there is none."""
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
        """So many messages of a subject (or of a wildcard) from a sequence on, at most, and how many are left behind
        them. From any replica, which may lag. Fewer than are there, if they are large."""
        body = json.dumps({"seq": max(1, first), "batch": count, "max_bytes": bytes_max, "next_by_subj": subject})
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
                raise Unanswered(f"{stream} cannot be read now: nobody answers") from exc

    async def ring(self, subject: str, on_message: Callable[[StreamMessage], None]) -> NatsSubscription:
        """Tell of every message on a subject (or a wildcard), as far as it is heard."""

        async def heard(message: Msg) -> None:
            headers: dict[str, str] = message.headers or {}
            on_message(
                StreamMessage(message.subject, message.data, headers, int(headers.get(SEQUENCE, 0)), message.reply)
            )

        return NatsSubscription(await self._subscribe(subject, heard))

    # -- asking and answering ----------------------------------------------------------------------------------------
    async def ask(self, subject: str, data: bytes, *, timeout: float) -> bytes:
        """`NoOwner`: nobody hears this subject, which is known at once. `Unanswered`: unknown whether it was heard."""
        try:
            message = await _uncut(self._client.request(subject, data, timeout=timeout))
        except nats.errors.NoRespondersError as exc:
            raise NoOwner("nobody answers for it") from exc
        except (nats.errors.Error, OSError) as exc:
            raise self._unanswered(exc) from exc
        return message.data

    async def tell(self, subject: str, data: bytes, *, reply: str = "") -> None:
        """Say it to whoever hears it."""
        await self._send(subject, data, {}, reply)

    def inbox(self) -> str:
        """A subject that nobody else has."""
        return self._client.new_inbox()

    # -- the streams themselves --------------------------------------------------------------------------------------
    async def api(self, verb: str, body: Mapping[str, Any], *, timeout: float = 5.0) -> dict[str, Any]:
        """An answer of JetStream's own, its error included."""
        return decoded(await self._request(f"$JS.API.{verb}", json.dumps(body).encode(), timeout))

    async def pulls(self, on_answer: Callable[[str, QueuedMessage | None], None]) -> PullConsumer:
        """For whoever pulls from queues. One subscription for all, which stays: a pull that is not wanted any more may
        have been answered already, and a job that nobody hears of would lie there until its time is over."""
        inbox = self._client.new_inbox()

        async def heard(message: Msg) -> None:
            if "Status" in (message.headers or {}):
                on_answer(message.subject.rpartition(".")[2], None)
            else:
                # It comes under its own subject, as it was stored.
                on_answer(message.metadata.consumer, QueuedMessage(message))

        return PullConsumer(self, inbox, await self._subscribe(f"{inbox}.*", heard))

    # -- what is too large for a message -----------------------------------------------------------------------------
    async def _bucket(self, name: str) -> ObjectStore:
        context = self._client.jetstream(timeout=BLOB_SECONDS_MAX)  # pyright: ignore[reportUnknownMemberType]
        return await context.object_store(name)

    async def put_blob(self, bucket: str, name: str, data: bytes) -> None:
        try:
            store = await self._bucket(bucket)
            await store.put(name, data)
        except nats.js.errors.APIError as exc:
            # It was answered, and not taken: whoever waits for better times would wait for ever.
            raise refusal({"code": exc.code, "err_code": exc.err_code, "description": exc.description}) from exc
        except (nats.errors.Error, OSError) as exc:
            raise self._unanswered(exc) from exc

    async def get_blob(self, bucket: str, name: str) -> bytes | None:
        """`None`: it is not there, or not whole. Its parts are read in pages, as all else is: the client's own way
        waits for ever for a part that is gone, for long where a node has died, and copies all it has with each part."""
        try:
            store = await self._bucket(bucket)
            info = await store.get_info(name)
        except nats.js.errors.NotFoundError:
            return None
        except (nats.errors.Error, OSError) as exc:
            raise self._unanswered(exc) from exc
        data = b"".join(await self._parts(f"OBJ_{bucket}", f"$O.{bucket}.C.{info.nuid}", info.chunks or 0))
        return data if len(data) == info.size else None

    async def _parts(self, stream: str, subject: str, count: int) -> list[bytes]:
        """So many, or those that are there at all. A replica that lags is asked again."""
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
                raise Unanswered(f"{stream} cannot be read now: its replicas lag behind")
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

    # -- the server --------------------------------------------------------------------------------------------------
    @property
    def server_version(self) -> str:
        version = self._client.connected_server_version
        return f"{version.major}.{version.minor}.{version.patch}"

    # -- the connection ----------------------------------------------------------------------------------------------
    async def _subscribe(self, subject: str, heard: Callable[[Msg], Awaitable[None]] | None = None) -> Subscription:
        try:
            return await self._client.subscribe(subject, cb=heard)  # pyright: ignore[reportUnknownMemberType]
        except (nats.errors.Error, OSError) as exc:
            raise self._unanswered(exc) from exc

    async def _send(self, subject: str, data: bytes, headers: dict[str, str], reply: str = "") -> None:
        try:
            await self._client.publish(subject, data, reply=reply, headers=headers or None)
        except (nats.errors.Error, OSError) as exc:
            raise self._unanswered(exc) from exc

    async def _request(
        self, subject: str, data: bytes, timeout: float | None = None, headers: dict[str, str] | None = None
    ) -> bytes:
        timeout = ANSWER_SECONDS_MAX if timeout is None else timeout
        try:
            message = await _uncut(self._client.request(subject, data, timeout=timeout, headers=headers))
        except (nats.errors.Error, OSError) as exc:
            raise self._unanswered(exc) from exc
        return message.data

    def _unanswered(self, exc: Exception) -> StoreError:
        if isinstance(exc, nats.errors.ConnectionClosedError | nats.errors.ConnectionDrainingError):
            return StoreError("the log is closed")
        if isinstance(exc, nats.errors.NoRespondersError):
            return Unheard(f"nobody at {self._address} hears it")
        if isinstance(exc, nats.errors.MaxPayloadError):
            return StoreError("a message is larger than the server takes", hint="raise max_payload of nats-server")
        return Unanswered(f"{self._address} did not answer: {exc!r:.200}")

    async def _on_error(self, exc: Exception) -> None:
        if self._told is None or not _is_refusal(self._told):
            self._told = exc
        # A slow consumer has missed bells, as in a lost connection; all else is told where it was asked for.
        if isinstance(exc, nats.errors.SlowConsumerError):
            log.warning("! %s: messages came faster than they were taken: %s", self._address, exc)
            await self._on_reconnected()
        elif _is_refusal(exc) and self._client.is_reconnecting:
            # We were let in before: nobody would ever know why all is silent.
            log.warning("! %s does not let us in any more: %s", self._address, exc)
        else:
            log.debug("nats: %r", exc)

    async def _on_reconnected(self) -> None:
        if self._on_up is not None:
            self._on_up()


async def _uncut(request: Awaitable[Msg]) -> Msg:
    """The client waits by `asyncio.wait_for`, which on Python 3.11 forgets that it was cancelled if the answer comes in
    the same moment. Whoever cancels a task that goes on would wait for it for ever."""
    task = asyncio.current_task()
    assert task is not None
    cancels = task.cancelling()
    message = await request
    if task.cancelling() > cancels:
        raise asyncio.CancelledError
    return message


def _headers(expected: int | None, more: Mapping[str, str] | None, id: str | None = None) -> dict[str, str]:
    headers = dict(more or {})
    if expected is not None:
        headers["Nats-Expected-Last-Subject-Sequence"] = str(expected)
    if id is not None:
        headers[ID] = id
    return headers


def _is_refusal(exc: BaseException) -> bool:
    """Of us, and not of the moment. While it connects the client has no type for it, only what the server said."""
    words = str(exc)
    return isinstance(exc, nats.errors.AuthorizationError) or "Authorization" in words or "Authentication" in words


def _unreachable(address: StoreAddress, exc: BaseException) -> Unreachable:
    hint = "is nats-server running there? `banksman doctor --store …` looks closer"
    return Unreachable(f"{address} cannot be reached: {exc!r:.200}", hint=hint)


def _tls(address: StoreAddress) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=address.ca)
        if address.cert is not None:
            context.load_cert_chain(address.cert, address.key)
    except OSError as exc:
        raise UsageError(f"{address}: {exc}", hint="ca=, cert= and key= are files") from exc
    return context
