"""Placement by work queues: sessions that need a host wait, and hosts with room pull them.

Both ends are here, offers and pulls. `cluster/host/takeover.py` runs the pulled jobs.

A job stays in the queue of its need (`placement_queues.py`) until it is done. The host that took it
reports progress now and then. If that host dies, the job is delivered to another one. So a job may
start twice, and the session itself says whether it was done: a session is created once under its
id, and claimed by one host.

**New sessions.** The caller that places a session waits for the taker's answer on a private inbox.
Before a host starts, it asks there whether the job is still wanted. The caller's event loop decides
in one step: the job is either handed over or given up. A job that was given up is never started. A
job that was handed over has a caller that waits for its answer. A host that finds no caller drops
the job.

**Sessions that lost their owner.** Every host that notices offers the session. A job is stored only
if the queue has none for that session.

**Pulls.** One pull request per satisfied need waits at the server. Its answer may arrive when this
host does not want a job. Then the job goes back immediately. A pull request must not outlive the
lease of its host: a frozen host would get a job, and the queue would notice only after
`ACK_SECONDS`. So each request expires well before the lease, and is then repeated.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TypeVar

import msgspec

from banksman.cluster.jetstream import StreamMessage, Unheard, WrongLastSequence
from banksman.cluster.log.message_codec import LargePayloads
from banksman.cluster.log.placement_queues import ACK_SECONDS, PlacementQueues, PullConsumer
from banksman.cluster.log.placement_queues import QueuedMessage as Pulled
from banksman.cluster.log.streams import token
from banksman.cluster.nats import Nats
from banksman.errors import NoOwner, StoreError, Unanswered, Unreachable
from banksman.tasks import OwnedTasks

log = logging.getLogger("banksman")

OPEN, RESUME = "open", "resume"
# The part of a lease for which a pull request is valid: see above.
PULL = 0.6
# A pull without an answer after this extra time is lost: the server or the connection died.
PULL_SECONDS_MORE = 1.0
# The retry interval while the cluster does not answer.
AGAIN_SECONDS = 1.0
# The same while a stream has no leader, so that nothing can have been stored.
LEADERLESS_SECONDS = 0.2
# How long a caller waits for the answer after a host took the job. It is enough for that host to
# die and for another to do the job.
TAKEN_SECONDS_MAX = 2 * ACK_SECONDS + 10.0
# How long a host waits for the caller's decision, and for the ack of its answer.
WORD_SECONDS_MAX = 1.0
ANSWER_TRIES_MAX = 3
WANTED, UNWANTED = b"+", b"-"
T = TypeVar("T")


class PlacementOrder(msgspec.Struct, omit_defaults=True):
    """A job as it is stored.

    `request`: the packed request (`LargePayloads`). `reply`: the inbox of the caller.
    """

    session: str
    kind: str
    need: list[str]
    epoch: int = 0
    request: bytes = b""
    reply: str = ""


class PlacedJob:
    """A job that this host pulled.

    Until it is done or given back, `working` must be called more often than `ACK_SECONDS`.
    """

    def __init__(
        self, order: PlacementOrder, pulled: Pulled, nats: Nats, large_payloads: LargePayloads
    ) -> None:
        self.session = order.session
        self.kind = order.kind
        self.need = tuple(order.need)
        self.epoch = order.epoch
        self.request = order.request
        self.deliveries = pulled.deliveries
        self._reply = order.reply
        self._pulled = pulled
        self._nats = nats
        self._large_payloads = large_payloads

    def __repr__(self) -> str:
        return f"<Job {self.kind} {self.session} {self.deliveries}>"

    async def is_wanted(self) -> bool:
        """Ask the caller whether it still waits.

        True hands the job over: from then on the caller waits for the answer.
        """
        if not self._reply:
            return True
        is_wanted = False
        with suppress(NoOwner):
            try:
                is_wanted = await self._ask_if_wanted()
            except Unanswered:
                # The question was lost if it arrived just as the caller unsubscribed. A second one
                # then gets `NoOwner`.
                is_wanted = await self._ask_if_wanted()
        if not is_wanted:
            self._reply = ""  # No caller reads an answer either.
        return is_wanted

    async def _ask_if_wanted(self) -> bool:
        return await self._nats.ask(f"{self._reply}.take", b"", timeout=WORD_SECONDS_MAX) == WANTED

    async def done(self, answer: bytes = b"") -> None:
        """Answer the caller, then ack the job.

        In this order a crash in between delivers the job again, instead of losing the answer.
        """
        if self._reply:
            await self._tell(answer)
        await self._pulled.done()

    async def _tell(self, answer: bytes) -> None:
        """Send the answer until the caller acks it, or no caller is left."""
        parcel = await self._large_payloads.pack(answer)
        for _ in range(ANSWER_TRIES_MAX):
            try:
                await self._nats.ask(f"{self._reply}.answer", parcel, timeout=WORD_SECONDS_MAX)
            except Unreachable:
                continue
            except NoOwner:
                break
            return
        log.warning(
            "session %s: placed, but its caller did not acknowledge the answer",
            self.session,
        )
        await self._large_payloads.drop(parcel)

    async def again(self, seconds: float) -> None:
        await self._pulled.again(seconds)

    async def working(self) -> None:
        await self._pulled.working()


class PendingOffer:
    """A caller's wait for one job: given up, handed over, or answered."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.taken_at: float | None = None
        self.is_given_up = False


async def _until_answered(attempt: Callable[[], Awaitable[T]]) -> T:
    """Retry until the servers answer. The caller sets the deadline.

    On servers that have just started, a stream may have no leader for a moment.
    """
    while True:
        try:
            return await attempt()
        except Unreachable:
            await asyncio.sleep(LEADERLESS_SECONDS)


class ClusterPlacement:
    """Placement queues on NATS.

    `ensure`: creates a stream if it is missing. `ensure_anew`: the same for a stream that may have
    been deleted since.
    """

    def __init__(
        self,
        nats: Nats,
        prefix: str,
        lease_seconds: float,
        ensure: Callable[[str], Awaitable[None]] | None = None,
        ensure_anew: Callable[[str], Awaitable[None]] | None = None,
    ) -> None:
        self._nats = nats
        self._prefix = prefix
        self._stream = f"{prefix}-work"
        self._lease_seconds = lease_seconds
        self._pull_seconds = PULL * lease_seconds
        self._large_payloads = LargePayloads(nats, prefix, ensure)
        self._needs = PlacementQueues(nats, prefix, self._wake, ensure_anew)
        self._needs_read_at = float("-inf")
        self._chores = OwnedTasks()
        self._pulls: PullConsumer | None = None
        # By need: until when the pull request in flight may still be answered.
        self._asked: dict[str, float] = {}
        self._came: deque[tuple[str, Pulled]] = deque()
        self._woken = asyncio.Event()
        self._is_taking = False
        self._is_closed = False

    # -- offers -----------------------------------------------------------------------------------
    async def place(
        self, session: str, need: Sequence[str], request: bytes, *, timeout: float
    ) -> bytes:
        """Offer a new session: see `Placement`."""
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout
        offer, seq = PendingOffer(), 0
        inbox = self._nats.inbox()
        parcel = b""
        wakeup = await self._nats.ring(f"{inbox}.*", lambda message: self._on_word(offer, message))
        try:
            async with asyncio.timeout_at(until):
                key = await _until_answered(lambda: self._needs.add(need))
                parcel = await _until_answered(lambda: self._large_payloads.pack(request))
                order = PlacementOrder(
                    session, OPEN, sorted(set(need)), request=parcel, reply=inbox
                )
                seq = await self._store(key, order, until)
        except (TimeoutError, Unreachable) as exc:
            # Only give up if no host took the job. A job may be taken although its store was not
            # acknowledged; then the caller waits for the answer below.
            if offer.taken_at is None:
                offer.is_given_up = True
                self._discard(seq, parcel, wakeup.stop())
                words = f"cannot offer session {session} to any host: the cluster does not answer"
                raise Unreachable(words, hint="try again", session=session) from exc
        except BaseException:
            offer.is_given_up = True
            self._discard(seq, parcel, wakeup.stop())
            raise
        try:
            return await self._wait_answer(session, offer, until)
        finally:
            offer.is_given_up = True
            self._discard(seq if offer.taken_at is None else 0, parcel, wakeup.stop())

    async def _store(self, key: str, order: PlacementOrder, until: float) -> int:
        """Store the job and return its sequence. Retries until the ack, or the caller's deadline.

        A job that was stored without an ack does no harm: a host that pulls it asks and learns that
        it was given up, or the job expires.
        """
        loop = asyncio.get_running_loop()
        subject = f"{self._prefix}.place.{key}.o.{token(order.session)}"
        ttl = max(1, int(until - loop.time() + TAKEN_SECONDS_MAX))
        data, id, headers = (
            msgspec.json.encode(order),
            f"open.{uuid.uuid4().hex}",
            {"Nats-TTL": f"{ttl}s"},
        )
        while True:
            try:
                return await self._put(
                    key, lambda: self._nats.publish(subject, data, id=id, headers=headers)
                )
            except Unanswered:
                await asyncio.sleep(min(AGAIN_SECONDS, max(0.0, until - loop.time())))

    async def _put(self, key: str, publish: Callable[[], Awaitable[int]]) -> int:
        """Publish into a queue, and create the queue again if no stream received the message.

        Either a leader is being elected, or an operator has deleted the stream.
        """
        try:
            return await publish()
        except Unheard:
            with suppress(Unreachable, TimeoutError):
                async with asyncio.timeout(WORD_SECONDS_MAX):
                    await self._needs.ensure_anew(key)
            return await publish()

    async def _wait_answer(self, session: str, offer: PendingOffer, until: float) -> bytes:
        """Wait for the answer of the taker.

        Until a host takes the job, the caller's timeout counts. From then on the host may have
        opened the session, so `NoOwner` would be a lie. The caller waits for `TAKEN_SECONDS_MAX`
        more.
        """
        loop = asyncio.get_running_loop()
        while True:
            try:
                async with asyncio.timeout_at(until):
                    answer = await asyncio.shield(offer.answer)
                    try:
                        return await self._large_payloads.unpack(answer)
                    finally:
                        self._chores.start(self._large_payloads.drop(answer))
            except TimeoutError as exc:
                if offer.taken_at is None:
                    raise NoOwner(
                        f"no host took session {session} in time", session=session
                    ) from exc
                if loop.time() >= offer.taken_at + TAKEN_SECONDS_MAX:
                    words = f"the host that took session {session} did not answer"
                    raise Unanswered(words, session=session) from exc
                until = offer.taken_at + TAKEN_SECONDS_MAX

    def _on_word(self, offer: PendingOffer, message: StreamMessage) -> None:
        """Answer a host that asks for the job, or take its answer.

        The check and the handover are one step of the event loop, so no await lies between them.
        That makes "given up" and "taken" exclusive.
        """
        if message.subject.endswith(".take"):
            if not offer.is_given_up:
                offer.taken_at = asyncio.get_running_loop().time()
            self._say(message.reply, UNWANTED if offer.is_given_up else WANTED)
        else:
            if not offer.answer.done():
                offer.answer.set_result(message.data)
            self._say(message.reply, b"")

    def _say(self, subject: str, data: bytes) -> None:
        """Send a message in the background."""

        async def say() -> None:
            with suppress(StoreError):
                await self._nats.tell(subject, data)

        self._chores.start(say())

    def _discard(self, seq: int, parcel: bytes, stopping: Awaitable[None]) -> None:
        """Delete a job that the caller gave up, so that it does not wait in its queue."""

        async def discard() -> None:
            # Unsubscribe last: a host that is about to ask gets a "no", which is quicker than no
            # answer.
            if seq:
                with suppress(StoreError):
                    await self._nats.api(
                        f"STREAM.MSG.DELETE.{self._stream}", {"seq": seq, "no_erase": True}
                    )
            await self._large_payloads.drop(parcel)
            await stopping

        self._chores.start(discard())

    async def resume(self, session: str, need: Sequence[str], epoch: int) -> None:
        """Offer a session that lost its owner.

        The queue keeps at most one job per session: the publish expects an empty subject.
        """
        key = await self._needs.add(need)
        order = PlacementOrder(session, RESUME, sorted(set(need)), epoch)
        with suppress(WrongLastSequence):  # The queue already has a job for it.
            subject = f"{self._prefix}.place.{key}.r.{token(session)}"
            data = msgspec.json.encode(order)
            await self._put(key, lambda: self._nats.publish(subject, data, expected=0))

    # -- pulls ------------------------------------------------------------------------------------
    async def next(self, labels: Sequence[str]) -> PlacedJob:
        """Wait for a job that these labels satisfy.

        A cancelled call gives back the jobs that have arrived, and those that still arrive.
        """
        assert not self._is_taking, "only one caller may wait for the next job"
        wanted = frozenset(labels)
        self._is_taking = True
        try:
            while True:
                while self._came:
                    if (job := await self._opened(*self._came.popleft())) is not None:
                        return job
                if self._is_closed:
                    raise StoreError("the log is closed")
                self._woken.clear()
                try:
                    until = await self._ask(wanted)
                except (Unreachable, TimeoutError) as exc:
                    log.debug("cannot pull jobs: %s, retrying in %g s", exc, AGAIN_SECONDS)
                    until = asyncio.get_running_loop().time() + AGAIN_SECONDS
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(until):
                        await self._woken.wait()
        finally:
            self._is_taking = False
            while self._came:
                self._give_back(self._came.popleft()[1])

    async def _opened(self, key: str, pulled: Pulled) -> PlacedJob | None:
        """Decode a job; None if no host can do it, or this one cannot at the moment."""
        try:
            order = msgspec.json.decode(pulled.data, type=PlacementOrder)
        except msgspec.DecodeError as exc:
            log.error("job dropped: cannot decode it: %s", exc)
            await pulled.done()
            return None
        job = PlacedJob(order, pulled, self._nats, self._large_payloads)
        if job.request:
            try:
                job.request = await self._large_payloads.unpack(job.request)
            except (Unreachable, NoOwner):
                # The caller is gone and deleted the blob, or the cluster does not answer at the
                # moment.
                self._give_back(pulled, AGAIN_SECONDS)
                return None
            except BaseException:
                self._give_back(pulled)
                raise
        return job

    async def _ask(self, labels: frozenset[str]) -> float:
        """Keep one pull request per satisfied need at the server. Returns until when that holds."""
        loop = asyncio.get_running_loop()
        if self._pulls is None:
            self._pulls = await PullConsumer.open(self._nats, self._on_answer)
        if loop.time() >= self._needs_read_at + self._lease_seconds:
            await self._needs.read()
            self._needs_read_at = loop.time()
        keys = self._needs.satisfied(labels)
        for key in keys:
            if self._asked.get(key, 0.0) <= loop.time():
                await self._needs.ensure(key)
                self._asked[key] = loop.time() + self._pull_seconds + PULL_SECONDS_MORE
                await self._pulls.ask(self._stream, key, seconds=self._pull_seconds)
        return min(
            (
                loop.time() + self._lease_seconds,
                *(self._asked.get(key, loop.time()) for key in keys),
            )
        )

    def _on_answer(self, key: str, pulled: Pulled | None) -> None:
        """Take the answer to a pull request: a job, or None."""
        now = asyncio.get_running_loop().time()
        asked_until = self._asked.pop(key, 0.0)
        if pulled is not None:
            if self._is_taking:
                self._came.append((key, pulled))
            else:
                self._give_back(pulled)
        elif asked_until - now > self._pull_seconds / 2 + PULL_SECONDS_MORE:
            # An empty answer long before the request expires: the queue is missing, or has no
            # leader. An immediate retry would get the same answer.
            self._needs.forget_made(key)
            self._asked[key] = now + AGAIN_SECONDS
        self._wake()

    def _give_back(self, pulled: Pulled, seconds: float = 0.0) -> None:
        self._chores.start(pulled.again(seconds))

    def _wake(self) -> None:
        self._woken.set()

    def on_up(self) -> None:
        """Pull again after a reconnect.

        Requests of the previous connection get no answer, and notifications were missed.
        """
        self._asked.clear()
        self._needs.on_up()
        self._needs_read_at = float("-inf")
        self._wake()

    async def close(self) -> None:
        """Stop pulling, and give back jobs that no caller of `next` got."""
        self._is_closed = True
        self._wake()
        if self._pulls is not None:
            await self._pulls.stop()
        await self._needs.stop()
        await self._chores.wait()
