"""What sessions need of their host, as queues: one for each need that there ever was.

A need is a set of labels. It is a record that everybody hears of, a part of a subject, and one consumer on the server,
from which every host pulls that has these labels. There are as many as there are kinds of sessions, which is few; and
who could make ever more of them is stopped at `NEEDS_MAX`.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Awaitable, Callable, Sequence

from banksman.errors import Refused, StoreError, Unanswered
from banksman.store.nats import Bell, Message, Nats, WrongLast

log = logging.getLogger("banksman")

NEEDS_MAX = 1000
# After this time without a sign of life of whoever has a job, it is offered again. Signs are sent more often than that.
ACK_SECONDS = 10.0
# Hosts that ask at the same time, and jobs that are being worked on.
WAITING_MAX = 4096
PENDING_MAX = 10_000
# "consumer already exists", for one that another release has made in its own way.
ALREADY_EXISTS = (10148, 10105)


class Needs:
    """`on_new` is called when there is another. `ensure` makes the stream of the queues, if it is not there yet."""

    def __init__(
        self,
        nats: Nats,
        prefix: str,
        on_new: Callable[[], None],
        ensure: Callable[[str], Awaitable[None]] | None = None,
    ) -> None:
        self._nats = nats
        self._prefix = prefix
        self._stream = f"{prefix}-work"
        self._on_new = on_new
        self._ensure = ensure
        self._all: dict[str, frozenset[str]] = {}
        self._seq = 0
        # Those whose consumer is known to be there.
        self._made: set[str] = set()
        self._bell: Bell | None = None

    def satisfied(self, labels: frozenset[str]) -> list[str]:
        """The keys of those that a host with these labels can serve."""
        return [key for key, need in self._all.items() if need <= labels]

    async def add(self, need: Sequence[str]) -> str:
        """Its key, and everybody knows of it."""
        wanted = sorted(set(need))
        key = _key(wanted)
        if key not in self._all:
            await self.read()
        if key not in self._all:
            if len(self._all) >= NEEDS_MAX:
                hint = "use fewer labels: each set of them is a queue"
                raise Refused(f"there are {NEEDS_MAX} different needs already", hint=hint)
            try:
                await self._nats.publish(
                    f"{self._prefix}.rec.need.{key}", json.dumps(wanted).encode(), expected=0, id=f"need.{key}"
                )
            except WrongLast:
                pass  # Another was faster, and meant the same.
            self._all[key] = frozenset(wanted)
        await self.ensure(key)
        return key

    async def ensure(self, key: str) -> None:
        """Its consumer is there."""
        if key in self._made:
            return
        if self._ensure is not None:
            await self._ensure(self._stream)
        subject = f"{self._prefix}.place.{key}.>"
        config = {
            "durable_name": key,
            "name": key,
            "description": " ".join(sorted(self._all[key])) or "nothing",
            "filter_subject": subject,
            "ack_policy": "explicit",
            "ack_wait": int(ACK_SECONDS * 1e9),
            "max_deliver": -1,
            "max_waiting": WAITING_MAX,
            "max_ack_pending": PENDING_MAX,
        }
        body = {"stream_name": self._stream, "config": config, "action": ""}
        answer = await self._nats.api(f"CONSUMER.CREATE.{self._stream}.{key}.{subject}", body)
        error = answer.get("error")
        if error is not None and error.get("err_code") not in ALREADY_EXISTS:
            words = f"a queue cannot be made: {error.get('description')} ({error.get('err_code')})"
            raise Unanswered(words) if error.get("code") == 503 else StoreError(words, hint="see docs/cluster.md")
        self._made.add(key)

    def forget_made(self, key: str) -> None:
        """Somebody could not be answered by it: it may be gone."""
        self._made.discard(key)

    async def read(self) -> None:
        """All that are stored. A bell may have been missed, so this is called now and then."""
        if self._bell is None:
            self._bell = await self._nats.ring(f"{self._prefix}.live.rec.need.*", self._on_record)
        left = 1
        while left:
            found, left = await self._nats.read(f"{self._prefix}-records", self._seq + 1, self._pattern, NEEDS_MAX)
            for message in found:
                self._on_record(message)
                self._seq = max(self._seq, message.seq)
            if not found:
                break

    @property
    def _pattern(self) -> str:
        return f"{self._prefix}.rec.need.*"

    def _on_record(self, message: Message) -> None:
        key = message.subject.rpartition(".")[2]
        if key in self._all or len(self._all) >= NEEDS_MAX:
            return
        try:
            words = json.loads(message.data)
            need = frozenset(str(word) for word in words)
        except (TypeError, ValueError):
            log.warning("! a need %s cannot be understood", key)
            return
        self._all[key] = need
        self._on_new()

    async def stop(self) -> None:
        bell, self._bell = self._bell, None
        if bell is not None:
            await bell.stop()


def _key(need: Sequence[str]) -> str:
    return hashlib.sha256(json.dumps(list(need)).encode()).hexdigest()[:24]
