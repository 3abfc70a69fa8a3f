"""Placement queues: one per set of required labels that was used recently.

`PullConsumer` pulls jobs from one of them. `placement.py` puts jobs in, and decides what is pulled.

A need is a set of labels. It consists of a record that every host reads, a subject token, and one
consumer on the server. Every host that has these labels pulls from that consumer. There are as many
needs as kinds of sessions, which is few. `NEEDS_MAX` stops a caller that creates ever more of them.

**An unused need expires.** Its record has a TTL, which each user renews before it offers a job. So
a record outlives every job that is still being offered, and no two hosts have to agree that it may
go. Hosts pull from a queue until they have not seen its record for as long. Then the servers delete
the consumer too. Every host that has the record creates the consumer if it is missing. So the next
host that pulls creates it again, and finds the jobs that were queued in between.

**Delivery.** A work queue delivers one job per pull request to one host. The job stays in the queue
until that host acks it. If the host returns it, or reports no progress for the queue's ack timeout,
the server delivers the job again, to any host. The ack goes to the reply subject of the delivery,
and that subject also names the consumer and counts the deliveries.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Self

from banksman.cluster.jetstream import StreamMessage
from banksman.cluster.log.streams import NOT_FOUND
from banksman.cluster.nats import Nats, NatsSubscription
from banksman.errors import Refused, StoreError, Unanswered

log = logging.getLogger("banksman")

NEEDS_MAX = 1000
# The TTL of a need, and how often a user renews it. So at every offer the record is valid for at
# least six more days.
KEPT_SECONDS = 7 * 86400
USED_SECONDS = 86400
# A job is delivered again after this time without a progress report. Hosts report more often.
ACK_SECONDS = 10.0
# Limits of concurrent pull requests, and of jobs in progress.
WAITING_MAX = 4096
PENDING_MAX = 10_000
# "consumer already exists", for a consumer that another release created with other settings.
ALREADY_EXISTS = (10148, 10105)


class PlacementQueues:
    """The known needs, and their consumers on the server.

    `on_new`: called when a need becomes known. `ensure_stream`: creates the stream of the queues if
    it is missing.
    """

    def __init__(
        self,
        nats: Nats,
        prefix: str,
        on_new: Callable[[], None],
        ensure_stream: Callable[[str], Awaitable[None]] | None = None,
    ) -> None:
        self._nats = nats
        self._prefix = prefix
        self._stream = f"{prefix}-work"
        self._on_new = on_new
        self._ensure_stream = ensure_stream
        self._all: dict[str, frozenset[str]] = {}
        # By key: when the record was last seen, and when this process last renewed it.
        self._heard: dict[str, float] = {}
        self._used: dict[str, float] = {}
        self._seq = 0
        # More needs were seen than fit. Some known ones may have expired, so the next read starts
        # over.
        self._is_full = False
        # The keys with a consumer that is known to exist.
        self._made: set[str] = set()
        self._wakeup: NatsSubscription | None = None

    def satisfied(self, labels: frozenset[str]) -> list[str]:
        """Return the keys of the needs that a host with these labels can serve."""
        self._forget_old()
        return [key for key, need in self._all.items() if need <= labels]

    async def add(self, need: Sequence[str]) -> str:
        """Register a need and return its key.

        On return its record outlives every job that is offered under it now.
        """
        wanted = sorted(set(need))
        key = _key(wanted)
        if time.monotonic() - self._used.get(key, float("-inf")) >= USED_SECONDS:
            await self._use(key, wanted)
        await self.ensure(key)
        return key

    async def _use(self, key: str, wanted: list[str]) -> None:
        if key not in self._all:
            await self.read()
        if key not in self._all and len(self._all) >= NEEDS_MAX:
            self._is_full = True
            await self.read()
        if key not in self._all and len(self._all) >= NEEDS_MAX:
            days = KEPT_SECONDS // 86400
            hint = f"use fewer label sets: each one keeps a queue for {days} days after its use"
            raise Refused(f"too many different label sets: at most {NEEDS_MAX}", hint=hint)
        # No compare-and-set: a concurrent writer of this key writes the same content.
        sent = time.monotonic()
        await self._nats.publish(
            f"{self._prefix}.rec.need.{key}",
            json.dumps(wanted).encode(),
            headers={"Nats-TTL": f"{KEPT_SECONDS}s"},
        )
        self._used[key] = sent
        self._hear(key, frozenset(wanted))

    async def ensure(self, key: str) -> None:
        """Create the consumer of a need, and the stream, if they are missing."""
        if key in self._made:
            return
        error = await self._make(key)
        if error.get("err_code") == NOT_FOUND and self._ensure_stream is not None:
            # This is the first queue, or an operator deleted the stream with all its jobs. Sessions
            # that are still without an owner are offered again.
            await self._ensure_stream(self._stream)
            error = await self._make(key)
        if error and error.get("err_code") not in ALREADY_EXISTS:
            words = f"cannot create a queue: {error.get('description')} ({error.get('err_code')})"
            raise (
                Unanswered(words)
                if error.get("code") == 503
                else StoreError(words, hint="see docs/cluster.md")
            )
        self._made.add(key)

    async def _make(self, key: str) -> dict[str, object]:
        """Create the consumer. Returns the servers' error, or an empty dict."""
        subject = f"{self._prefix}.place.{key}.>"
        config = {
            "durable_name": key,
            "name": key,
            "description": " ".join(sorted(self._all.get(key, ()))) or "nothing",
            "filter_subject": subject,
            "ack_policy": "explicit",
            "ack_wait": int(ACK_SECONDS * 1e9),
            "max_deliver": -1,
            "max_waiting": WAITING_MAX,
            "max_ack_pending": PENDING_MAX,
            # Counted from the last pull. The jobs in the queue stay.
            "inactive_threshold": int(KEPT_SECONDS * 1e9),
        }
        body = {"stream_name": self._stream, "config": config, "action": ""}
        answer = await self._nats.api(f"CONSUMER.CREATE.{self._stream}.{key}.{subject}", body)
        return answer.get("error") or {}

    async def ensure_anew(self, key: str) -> None:
        """Do the same for a queue whose stream did not receive a message."""
        if self._ensure_stream is not None:
            # Check the stream first: it reports a missing leader immediately, and a consumer would
            # time out.
            await self._ensure_stream(self._stream)
        self.forget_made(key)
        await self.ensure(key)

    def forget_made(self, key: str) -> None:
        """Check the consumer again before its next use: it may have been deleted."""
        self._made.discard(key)

    def on_up(self) -> None:
        """Renew all needs after a reconnect.

        The clock may have stood still with a suspended machine, so recorded times of use are too
        young.
        """
        self._used.clear()

    # -- needs of other hosts ---------------------------------------------------------------------
    async def read(self) -> None:
        """Read all stored needs. Called now and then, because a notification may be missed."""
        if self._wakeup is None:
            self._wakeup = await self._nats.ring(f"{self._prefix}.live.rec.need.*", self._on_record)
        if self._is_full:
            before, self._all, self._seq, self._is_full = self._all, {}, 0, False
            try:
                await self._read_on()
            except StoreError:
                self._all |= before
                self._is_full = True
                raise
        else:
            await self._read_on()

    async def _read_on(self) -> None:
        left = 1
        while left:
            found, left = await self._nats.read(
                f"{self._prefix}-records", self._seq + 1, self._pattern, NEEDS_MAX
            )
            for message in found:
                self._on_record(message)
                self._seq = max(self._seq, message.seq)
            if not found:
                break

    def _forget_old(self) -> None:
        now = time.monotonic()
        for key in [key for key, heard in self._heard.items() if now - heard >= KEPT_SECONDS]:
            self._heard.pop(key)
            self._all.pop(key, None)
            self._made.discard(key)

    @property
    def _pattern(self) -> str:
        return f"{self._prefix}.rec.need.*"

    def _on_record(self, message: StreamMessage) -> None:
        key = message.subject.rpartition(".")[2]
        try:
            words = json.loads(message.data)
            need = frozenset(str(word) for word in words)
        except (TypeError, ValueError):
            log.warning("cannot decode need %s", key)
            return
        self._hear(key, need)

    def _hear(self, key: str, need: frozenset[str]) -> None:
        is_new = key not in self._all
        if is_new and len(self._all) >= NEEDS_MAX:
            self._is_full = True
            return
        self._all[key] = need
        self._heard[key] = time.monotonic()
        if is_new:
            self._on_new()

    async def stop(self) -> None:
        wakeup, self._wakeup = self._wakeup, None
        if wakeup is not None:
            await wakeup.stop()


def _key(need: Sequence[str]) -> str:
    return hashlib.sha256(json.dumps(list(need)).encode()).hexdigest()[:24]


# The answers to a delivery.
ACK, NAK, PROGRESS = b"", b"-NAK", b"+WPI"
# The reply subject of a delivery. The long form names the domain and the account, and may have
# more tokens at its end:
#   $JS.ACK.<stream>.<consumer>.<deliveries>.<3 numbers>.<pending>
#   $JS.ACK.<domain>.<account>.<stream>.<consumer>.<deliveries>.<3 numbers>.<pending>[.…]
SHORT_TOKENS = 9
LONG_TOKENS_MIN = 11


def delivery(reply: str) -> tuple[str, int]:
    """Return the consumer and the number of deliveries. Raises `ValueError` for other subjects."""
    tokens = reply.split(".")
    is_ack = tokens[:2] == ["$JS", "ACK"]
    if not is_ack or (len(tokens) != SHORT_TOKENS and len(tokens) < LONG_TOKENS_MIN):
        raise ValueError(f"not the reply subject of a delivery: {reply!r:.200}")
    consumer = 3 if len(tokens) == SHORT_TOKENS else 5
    return tokens[consumer], int(tokens[consumer + 1])


class QueuedMessage:
    """A message pulled from a work queue: to be acked, or returned for delivery to any host."""

    def __init__(self, nats: Nats, message: StreamMessage, deliveries: int) -> None:
        self._nats = nats
        self._reply = message.reply
        self.data = message.data
        self.deliveries = deliveries
        self._is_settled = False

    async def done(self) -> None:
        """Ack the message: it leaves the queue."""
        await self._settle(ACK)

    async def again(self, seconds: float) -> None:
        """Return the message: the server delivers it again after `seconds`."""
        delay = int(seconds * 1e9)
        await self._settle(NAK + b" " + json.dumps({"delay": delay}).encode() if delay else NAK)

    async def working(self) -> None:
        """Extend the ack deadline."""
        # A lost answer is harmless: the server delivers the job again, and the next host finds out
        # what was done of it. So no error reaches the caller.
        with suppress(StoreError):
            await self._nats.tell(self._reply, PROGRESS)

    async def _settle(self, answer: bytes) -> None:
        """Ack or return the message, once: the server ignores a second answer."""
        if self._is_settled:
            return
        with suppress(StoreError):
            await self._nats.tell(self._reply, answer)
            self._is_settled = True


class PullConsumer:
    """Send pull requests to work queues, until it is stopped."""

    def __init__(self, nats: Nats, inbox: str, subscription: NatsSubscription) -> None:
        self._nats = nats
        self._inbox = inbox
        self._subscription = subscription

    @classmethod
    async def open(cls, nats: Nats, on_answer: Callable[[str, QueuedMessage | None], None]) -> Self:
        """Open a subscription for the answers to pull requests.

        One subscription serves all requests and stays open. A request that is not wanted may
        already be answered, and without a subscriber its job would wait for the ack timeout.
        """
        inbox = nats.inbox()

        def heard(message: StreamMessage) -> None:
            if "Status" in message.headers:
                on_answer(message.subject.rpartition(".")[2], None)
            else:
                # A job arrives under its stored subject. So only its reply subject names the
                # consumer.
                consumer, deliveries = delivery(message.reply)
                on_answer(consumer, QueuedMessage(nats, message, deliveries))

        return cls(nats, inbox, await nats.ring(f"{inbox}.*", heard))

    async def ask(self, stream: str, consumer: str, *, seconds: float) -> None:
        """Request the next job of a queue.

        The answer arrives under the consumer's name. It is a job, or None if there was no job in
        time or the queue could not be asked. It may also never arrive.
        """
        body = json.dumps({"batch": 1, "expires": int(seconds * 1e9)}).encode()
        await self._nats.tell(
            f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}",
            body,
            reply=f"{self._inbox}.{consumer}",
        )

    async def stop(self) -> None:
        await self._subscription.stop()
