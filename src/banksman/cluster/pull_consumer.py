"""Pull consumer of JetStream work queues: pull requests, delivered jobs and their acks.

A work queue delivers one job per pull request to one host. The job stays in the queue until that
host acks it. If the host returns it, or reports no progress for the queue's ack timeout, the server
delivers the job again, to any host. The ack goes to the reply subject of the delivery, and that
subject also names the consumer and counts the deliveries.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from typing import Self

from banksman.cluster.jetstream import StreamMessage
from banksman.cluster.nats import Nats, NatsSubscription
from banksman.errors import StoreError

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
