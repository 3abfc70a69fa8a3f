"""What sessions need of their host, as queues: one for each need that was used lately.

A need is a set of labels. It is a record that everybody hears of, a part of a subject, and one consumer on the server,
from which every host pulls that has these labels. There are as many as there are kinds of sessions, which is few; and
who could make ever more of them is stopped at `NEEDS_MAX`.

**One that nobody uses is forgotten**, by nobody's hand: its record has an end, which whoever uses it puts off before it
offers anything. So a record outlives each job of its queue that somebody still offers, and nobody needs to agree with
anybody that it may go. Hosts pull from it until they have not heard of it for as long; then the servers forget its
consumer too. Whoever has the record makes the consumer, so one that is missing is made anew by the next who pulls, and
finds in its queue whatever was put there meanwhile.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Awaitable, Callable, Sequence

from banksman.cluster.jetstream import StreamMessage
from banksman.cluster.log.streams import NOT_FOUND
from banksman.cluster.nats import Nats, NatsSubscription
from banksman.errors import Refused, StoreError, Unanswered

log = logging.getLogger("banksman")

NEEDS_MAX = 1000
# How long one is kept that nobody uses, and how often who uses it says so: at every offer, the record stands for six
# days more at least.
KEPT_SECONDS = 7 * 86400
USED_SECONDS = 86400
# After this time without a sign of life of whoever has a job, it is offered again. Signs are sent more often than that.
ACK_SECONDS = 10.0
# Hosts that ask at the same time, and jobs that are being worked on.
WAITING_MAX = 4096
PENDING_MAX = 10_000
# "consumer already exists", for one that another release has made in its own way.
ALREADY_EXISTS = (10148, 10105)


class PlacementQueues:
    """`on_new` is called when there is another. `ensure_stream` makes the stream of the queues, if it is not there."""

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
        # When each was last heard of, and when we said ourselves that it is used.
        self._heard: dict[str, float] = {}
        self._used: dict[str, float] = {}
        self._seq = 0
        # There was one more than there can be: some that we have heard of are forgotten by now.
        self._is_full = False
        # Those whose consumer is known to be there.
        self._made: set[str] = set()
        self._wakeup: NatsSubscription | None = None

    def satisfied(self, labels: frozenset[str]) -> list[str]:
        """The keys of those that a host with these labels can serve."""
        self._forget_old()
        return [key for key, need in self._all.items() if need <= labels]

    async def add(self, need: Sequence[str]) -> str:
        """Its key, and everybody knows of it, for longer than whatever is offered under it now."""
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
            hint = f"use fewer labels: each set of them is a queue, for {KEPT_SECONDS // 86400} days after its use"
            raise Refused(f"there are {NEEDS_MAX} different needs already", hint=hint)
        # Whoever does the same in this moment means the same.
        sent = time.monotonic()
        await self._nats.publish(
            f"{self._prefix}.rec.need.{key}", json.dumps(wanted).encode(), headers={"Nats-TTL": f"{KEPT_SECONDS}s"}
        )
        self._used[key] = sent
        self._hear(key, frozenset(wanted))

    async def ensure(self, key: str) -> None:
        """Its consumer is there, and so is the stream."""
        if key in self._made:
            return
        error = await self._make(key)
        if error.get("err_code") == NOT_FOUND and self._ensure_stream is not None:
            # The first of all; or somebody has deleted it, with all that waited. What is still lost is offered again.
            await self._ensure_stream(self._stream)
            error = await self._make(key)
        if error and error.get("err_code") not in ALREADY_EXISTS:
            words = f"a queue cannot be made: {error.get('description')} ({error.get('err_code')})"
            raise Unanswered(words) if error.get("code") == 503 else StoreError(words, hint="see docs/cluster.md")
        self._made.add(key)

    async def _make(self, key: str) -> dict[str, object]:
        """What the servers have against it."""
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
            # Since somebody pulled last. What is in the queue stays there.
            "inactive_threshold": int(KEPT_SECONDS * 1e9),
        }
        body = {"stream_name": self._stream, "config": config, "action": ""}
        answer = await self._nats.api(f"CONSUMER.CREATE.{self._stream}.{key}.{subject}", body)
        return answer.get("error") or {}

    async def ensure_anew(self, key: str) -> None:
        """The same, where nobody hears what is put into it."""
        if self._ensure_stream is not None:
            # First: it says at once that it has no leader, where a consumer would keep us waiting.
            await self._ensure_stream(self._stream)
        self.forget_made(key)
        await self.ensure(key)

    def forget_made(self, key: str) -> None:
        """Somebody could not be answered by it: it may be gone."""
        self._made.discard(key)

    def on_up(self) -> None:
        """The connection was away, and our clock may have stood still meanwhile, with the machine."""
        self._used.clear()

    # -- what others use ---------------------------------------------------------------------------------------------
    async def read(self) -> None:
        """All that are stored. A bell may have been missed, so this is called now and then."""
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
            found, left = await self._nats.read(f"{self._prefix}-records", self._seq + 1, self._pattern, NEEDS_MAX)
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
            log.warning("! a need %s cannot be understood", key)
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
