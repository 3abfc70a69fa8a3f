"""Who takes what is new: sessions wait in queues, and a host with room pulls. Nobody decides for another.

A job is in the queue of its need (placement_queues.py) until it is done. Whoever takes it says now and then that it is
at it; who dies over it has it offered to another. So a job may be begun twice, and what it is about says whether it was
done: a session is made once under its id, and claimed by one.

**New ones.** Whoever places one waits for the answer of who takes it, on a subject of its own. Before a host begins, it
asks there whether it is still wanted: in the loop of who places it there is one moment in which it is either given away
or given up. Given up, nobody begins it any more; given away, the answer is waited for. A host that finds nobody to ask
lets it be.

**Those that lost their owner.** Every host that sees it says so. A job is stored only if there is none for the session.

**Pulling.** One question for each need that is satisfied lies with the server. It may be answered when nobody wants
it any more; then the job is given back in the same moment. A question must not outlive the lease of who asked: one that
is frozen would get a job, and nobody would know for `ACK_SECONDS`. So it is asked anew well before that.
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
from banksman.cluster.log.placement_queues import ACK_SECONDS, PlacementQueues
from banksman.cluster.log.streams import token
from banksman.cluster.nats import Nats, PullConsumer
from banksman.cluster.nats import QueuedMessage as Pulled
from banksman.errors import NoOwner, StoreError, Unanswered, Unreachable
from banksman.tasks import OwnedTasks

log = logging.getLogger("banksman")

OPEN, RESUME = "open", "resume"
# Of the lease: see above.
PULL = 0.6
# A pull that was not answered by then is lost: the server has died, or the connection.
PULL_SECONDS_MORE = 1.0
# Where nobody can be asked, the next try is after this time.
AGAIN_SECONDS = 1.0
# The same, for what nobody could have stored.
LEADERLESS_SECONDS = 0.2
# Given away, an answer is waited for: long enough for a host to die over it, and for another to do it.
TAKEN_SECONDS_MAX = 2 * ACK_SECONDS + 10.0
# How long a host waits for the word of who placed it, and for the hearing of its answer.
WORD_SECONDS_MAX = 1.0
ANSWER_TRIES_MAX = 3
WANTED, UNWANTED = b"+", b"-"


class PlacementOrder(msgspec.Struct, omit_defaults=True):
    """A job, as it is stored. `request` is a parcel, `reply` where the answer goes."""

    session: str
    kind: str
    need: list[str]
    epoch: int = 0
    request: bytes = b""
    reply: str = ""


class PlacedJob:
    """One that was taken. Until it is done or given back, `working` is to be said more often than `ACK_SECONDS`."""

    def __init__(self, order: PlacementOrder, pulled: Pulled, nats: Nats, large_payloads: LargePayloads) -> None:
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
        if not self._reply:
            return True
        is_wanted = False
        with suppress(NoOwner):
            try:
                is_wanted = await self._ask_if_wanted()
            except Unanswered:
                # A question that comes in the moment in which nobody hears any more is lost; the next one is not.
                is_wanted = await self._ask_if_wanted()
        if not is_wanted:
            self._reply = ""  # Nobody is there to hear an answer either.
        return is_wanted

    async def _ask_if_wanted(self) -> bool:
        return await self._nats.ask(f"{self._reply}.take", b"", timeout=WORD_SECONDS_MAX) == WANTED

    async def done(self, answer: bytes = b"") -> None:
        if self._reply:
            await self._tell(answer)
        await self._pulled.done()

    async def _tell(self, answer: bytes) -> None:
        """Until it was heard, or nobody is there to hear it."""
        parcel = await self._large_payloads.pack(answer)
        for _ in range(ANSWER_TRIES_MAX):
            try:
                await self._nats.ask(f"{self._reply}.answer", parcel, timeout=WORD_SECONDS_MAX)
            except Unreachable:
                continue
            except NoOwner:
                break
            return
        log.warning("! session %s: whoever wanted it was not told that it is placed", self.session)
        await self._large_payloads.drop(parcel)

    async def again(self, seconds: float) -> None:
        await self._pulled.again(seconds)

    async def working(self) -> None:
        await self._pulled.working()


class Offer:
    """What somebody waits for here: given up, given away, or answered."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.taken_at: float | None = None
        self.is_given_up = False


T = TypeVar("T")


async def _until_answered(attempt: Callable[[], Awaitable[T]]) -> T:
    """Again and again: of servers that have just begun, some have no leader for a moment. Whoever waits sets an end."""
    while True:
        try:
            return await attempt()
        except Unreachable:
            await asyncio.sleep(LEADERLESS_SECONDS)


class ClusterPlacement:
    """`ensure` makes the streams that it needs, each if it is not there yet; `ensure_anew` also if it was."""

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
        # The needs that we have asked for, each until when an answer is believed in.
        self._asked: dict[str, float] = {}
        self._came: deque[tuple[str, Pulled]] = deque()
        self._woken = asyncio.Event()
        self._is_taking = False
        self._is_closed = False

    # -- placing -----------------------------------------------------------------------------------------------------
    async def place(self, session: str, need: Sequence[str], request: bytes, *, timeout: float) -> bytes:
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout
        offer, seq = Offer(), 0
        inbox = self._nats.inbox()
        parcel = b""
        wakeup = await self._nats.ring(f"{inbox}.*", lambda message: self._on_word(offer, message))
        try:
            async with asyncio.timeout_at(until):
                key = await _until_answered(lambda: self._needs.add(need))
                parcel = await _until_answered(lambda: self._large_payloads.pack(request))
                order = PlacementOrder(session, OPEN, sorted(set(need)), request=parcel, reply=inbox)
                seq = await self._store(key, order, until)
        except (TimeoutError, Unreachable) as exc:
            if offer.taken_at is None:
                offer.is_given_up = True
                self._discard(seq, parcel, wakeup.stop())
                words = f"session {session} could not be offered to any host: the cluster does not answer"
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
        """Its seq. Until it is acknowledged, or the time is over: one that was stored unseen is asked for, and found to
        be given up, or goes by itself."""
        loop = asyncio.get_running_loop()
        subject = f"{self._prefix}.place.{key}.o.{token(order.session)}"
        ttl = max(1, int(until - loop.time() + TAKEN_SECONDS_MAX))
        data, id, headers = msgspec.json.encode(order), f"open.{uuid.uuid4().hex}", {"Nats-TTL": f"{ttl}s"}
        while True:
            try:
                return await self._put(key, lambda: self._nats.publish(subject, data, id=id, headers=headers))
            except Unanswered:
                await asyncio.sleep(min(AGAIN_SECONDS, max(0.0, until - loop.time())))

    async def _put(self, key: str, publish: Callable[[], Awaitable[int]]) -> int:
        """Into a queue. Where nobody hears it, a leader is being chosen, or somebody has deleted the stream."""
        try:
            return await publish()
        except Unheard:
            with suppress(Unreachable, TimeoutError):
                async with asyncio.timeout(WORD_SECONDS_MAX):
                    await self._needs.ensure_anew(key)
            return await publish()

    async def _wait_answer(self, session: str, offer: Offer, until: float) -> bytes:
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
                    raise NoOwner(f"no host took session {session} in time", session=session) from exc
                if loop.time() >= offer.taken_at + TAKEN_SECONDS_MAX:
                    words = f"the host that took session {session} did not answer"
                    raise Unanswered(words, session=session) from exc
                until = offer.taken_at + TAKEN_SECONDS_MAX

    def _on_word(self, offer: Offer, message: StreamMessage) -> None:
        if message.subject.endswith(".take"):
            if not offer.is_given_up:
                offer.taken_at = asyncio.get_running_loop().time()
            self._say(message.reply, UNWANTED if offer.is_given_up else WANTED)
        else:
            if not offer.answer.done():
                offer.answer.set_result(message.data)
            self._say(message.reply, b"")

    def _say(self, subject: str, data: bytes) -> None:
        async def say() -> None:
            with suppress(StoreError):
                await self._nats.tell(subject, data)

        self._chores.start(say())

    def _discard(self, seq: int, parcel: bytes, stopping: Awaitable[None]) -> None:
        """What nobody wants any more. It would be asked for in vain; and where nobody asks, it would lie there."""

        async def discard() -> None:
            # Heard a moment longer, for a host that is just about to ask: to be told no is quicker than no answer.
            if seq:
                with suppress(StoreError):
                    await self._nats.api(f"STREAM.MSG.DELETE.{self._stream}", {"seq": seq, "no_erase": True})
            await self._large_payloads.drop(parcel)
            await stopping

        self._chores.start(discard())

    async def resume(self, session: str, need: Sequence[str], epoch: int) -> None:
        key = await self._needs.add(need)
        order = PlacementOrder(session, RESUME, sorted(set(need)), epoch)
        with suppress(WrongLastSequence):  # There is one.
            subject = f"{self._prefix}.place.{key}.r.{token(session)}"
            data = msgspec.json.encode(order)
            await self._put(key, lambda: self._nats.publish(subject, data, expected=0))

    # -- taking ------------------------------------------------------------------------------------------------------
    async def next(self, labels: Sequence[str]) -> PlacedJob:
        """Cancelled, what has come is given back, and so is what still comes."""
        assert not self._is_taking, "only one can wait for the next"
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
                    log.debug("! nothing can be taken now: %s", exc)
                    until = asyncio.get_running_loop().time() + AGAIN_SECONDS
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(until):
                        await self._woken.wait()
        finally:
            self._is_taking = False
            while self._came:
                self._give_back(self._came.popleft()[1])

    async def _opened(self, key: str, pulled: Pulled) -> PlacedJob | None:
        """None: it is nothing that could be done, here or anywhere, or not now."""
        try:
            order = msgspec.json.decode(pulled.data, type=PlacementOrder)
        except msgspec.DecodeError as exc:
            log.error("! a job cannot be understood, and is dropped: %s", exc)
            await pulled.done()
            return None
        job = PlacedJob(order, pulled, self._nats, self._large_payloads)
        if job.request:
            try:
                job.request = await self._large_payloads.unpack(job.request)
            except (Unreachable, NoOwner):
                # Whoever placed it is gone, and has taken it along; or the cluster has a bad moment.
                self._give_back(pulled, AGAIN_SECONDS)
                return None
            except BaseException:
                self._give_back(pulled)
                raise
        return job

    async def _ask(self, labels: frozenset[str]) -> float:
        """A question lies with the server for each need: until when that holds."""
        loop = asyncio.get_running_loop()
        if self._pulls is None:
            self._pulls = await self._nats.pulls(self._on_answer)
        if loop.time() >= self._needs_read_at + self._lease_seconds:
            await self._needs.read()
            self._needs_read_at = loop.time()
        keys = self._needs.satisfied(labels)
        for key in keys:
            if self._asked.get(key, 0.0) <= loop.time():
                await self._needs.ensure(key)
                self._asked[key] = loop.time() + self._pull_seconds + PULL_SECONDS_MORE
                await self._pulls.ask(self._stream, key, seconds=self._pull_seconds)
        return min((loop.time() + self._lease_seconds, *(self._asked.get(key, loop.time()) for key in keys)))

    def _on_answer(self, key: str, pulled: Pulled | None) -> None:
        now = asyncio.get_running_loop().time()
        asked_until = self._asked.pop(key, 0.0)
        if pulled is not None:
            if self._is_taking:
                self._came.append((key, pulled))
            else:
                self._give_back(pulled)
        elif asked_until - now > self._pull_seconds / 2 + PULL_SECONDS_MORE:
            # Long before its time: there is no such queue, or nobody to ask. At once it would be the same.
            self._needs.forget_made(key)
            self._asked[key] = now + AGAIN_SECONDS
        self._wake()

    def _give_back(self, pulled: Pulled, seconds: float = 0.0) -> None:
        self._chores.start(pulled.again(seconds))

    def _wake(self) -> None:
        self._woken.set()

    def on_up(self) -> None:
        """The connection is back. What was asked over the one before will not be answered, and bells were missed."""
        self._asked.clear()
        self._needs.on_up()
        self._needs_read_at = float("-inf")
        self._wake()

    async def close(self) -> None:
        """Nothing is taken any more; what has come and was not given to anybody is given back."""
        self._is_closed = True
        self._wake()
        if self._pulls is not None:
            await self._pulls.stop()
        await self._needs.stop()
        await self._chores.wait()
