"""A stream of which only the last message of each subject counts, as a dictionary that follows it.

The bell brings what is new along. Where it does not follow what was read last, something was missed, and is read; and
now and then it is looked without a bell. So one that was missed costs time, never the truth. What we wrote ourselves is
put in at once. Each subject only ever goes forward: what is older than what is known changes nothing.

What is read is not what was heard: every host hears every heartbeat, and would the nodes be asked for each, they would
be asked as often as there are pairs of hosts.
"""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress

from banksman.cluster.jetstream import StreamMessage
from banksman.cluster.log import message_codec
from banksman.cluster.log.message_codec import MessagePlace
from banksman.cluster.log.streams import StreamNames
from banksman.cluster.nats import Nats, NatsSubscription
from banksman.errors import StoreDamaged, StoreError, Unanswered

log = logging.getLogger("banksman")

PAGE_MESSAGES_MAX = 500
# Between two looks that no bell has asked for: a leader may die between storing and ringing.
LOOK_SECONDS = 2.0
# Between two looks at a replica that lags behind the bell.
LAG_SECONDS = 0.01
LAG_LOOKS_MAX = 50
ENDED_MAX = 10_000

# Under which it is stored, of a message that was republished.
SUBJECT = "Nats-Subject"

# Tells what a subject holds now; None: nothing any more.
OnChange = Callable[[str, StreamMessage | None], None]

# Of those that nobody waits for, so many are still heard of.
KEPT_MAX = 2048
# At so many of them, each time: that it happens is rare, and a look is a question to the leader.
LOOKS_MAX = 200


class StreamMirror:
    def __init__(self, nats: Nats, stream: str, subjects: str, wakeup: str, on_change: OnChange) -> None:
        self._nats = nats
        self._stream = stream
        self._subjects = subjects
        self._bell_subject = wakeup
        self._on_change = on_change
        self._seqs: dict[str, int] = {}
        # Those that hold nothing any more, in the order of their ends.
        self._ended: dict[str, None] = {}
        self._read_to = 0
        self._rung_for = 0
        self._rung = asyncio.Event()
        self._wakeup: NatsSubscription | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_stale = False

    async def start(self) -> None:
        """All that is stored by now is known when it returns."""
        if self._wakeup is None:
            self._wakeup = await self._nats.ring(self._bell_subject, self._on_wakeup)
        await self._load()
        self._task = asyncio.get_running_loop().create_task(self._follow())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))
        if self._wakeup is not None:
            await self._wakeup.stop()
            self._wakeup = None  # It may be started again, on another connection.

    def put(self, message: StreamMessage) -> None:
        """What was just written, or read from the leader."""
        if self._seqs.get(message.subject, 0) < message.seq:
            self._seqs[message.subject] = message.seq
            self._note_end(message)
            self._on_change(message.subject, message if message.data else None)

    def _note_end(self, message: StreamMessage) -> None:
        """Of what has ended it is remembered when, so that nothing older revives it: of the last of them."""
        self._ended.pop(message.subject, None)
        if not message.data:
            self._ended[message.subject] = None
            if len(self._ended) > ENDED_MAX:
                del self._seqs[next(iter(self._ended))]
                del self._ended[next(iter(self._ended))]

    def reload_soon(self) -> None:
        """The connection was away, for longer than what tells of an end may have been kept."""
        self._is_stale = True
        self._rung.set()

    def _on_wakeup(self, message: StreamMessage) -> None:
        subject = message.headers.get(SUBJECT)
        if subject is not None and message.seq == self._read_to + 1:
            self._read_to = message.seq
            self.put(message._replace(subject=subject))
            return
        self._rung_for = max(self._rung_for, message.seq)
        self._rung.set()

    async def _follow(self) -> None:
        while True:
            try:
                async with asyncio.timeout(LOOK_SECONDS):
                    await self._rung.wait()
            except TimeoutError:
                pass
            self._rung.clear()
            is_stale, self._is_stale = self._is_stale, False
            try:
                if is_stale:
                    await self._load()
                else:
                    await self._read_on(self._rung_for)
            except StoreError as exc:
                log.debug("%s cannot be read now: %s", self._stream, exc)
                self._is_stale |= is_stale
                self._rung.set()
                await asyncio.sleep(LOOK_SECONDS / 4)

    async def _load(self) -> None:
        """From the beginning: what is not there any more is gone."""
        last = await self._nats.last(self._stream, self._subjects)
        before = dict(self._seqs)
        if last is not None and last.seq < self._read_to:
            # Somebody has deleted the stream, and it was made anew: it counts from the beginning.
            self._seqs.clear()
            self._ended.clear()
        self._read_to = 0
        seen = await self._read_on(0 if last is None else last.seq)
        for subject, seq in before.items():
            # Not what was put in meanwhile, by whoever wrote it.
            if subject not in seen and self._seqs.get(subject, seq) == seq:
                self._seqs.pop(subject, None)
                self._ended.pop(subject, None)
                self._on_change(subject, None)

    async def _read_on(self, target: int) -> set[str]:
        """All that is there, up to this sequence at least. `Unanswered`: a replica lags for too long."""
        seen: set[str] = set()
        looks = 0
        while True:
            messages, left = await self._nats.read(self._stream, self._read_to + 1, self._subjects, PAGE_MESSAGES_MAX)
            for message in messages:
                self._read_to = max(self._read_to, message.seq)
                seen.add(message.subject)
                self.put(message)
            if left and messages:
                continue
            looks += 1
            if self._read_to >= target:
                return seen
            if looks > LAG_LOOKS_MAX:
                # The target may have been one that is gone again, which only the leader knows. To pass it on the word
                # of a replica that lags would be to never read it.
                last = await self._nats.last(self._stream, self._subjects)
                if last is not None and last.seq > self._read_to:
                    raise Unanswered(f"{self._stream} is read from a replica that lags")
                self._read_to = target
                return seen
            await asyncio.sleep(LAG_SECONDS)


# Where each session is that somebody looks at: its last message, heard of at once, and looked up where a bell may have
# been missed.
#
# Of a session that is ours we know it, being its only writer. Of another's, the first look asks the servers and hangs
# up a bell; it is taken down when nobody has looked for a while. Who follows all sessions has one bell for all.


# Told with the session and its place when it has changed.
OnMoved = Callable[[str, MessagePlace], None]


class StreamHeads:
    def __init__(self, nats: Nats, names: StreamNames, id_of: Callable[[str], str | None], on_moved: OnMoved) -> None:
        self._nats = nats
        self._names = names
        self._id_of = id_of
        self._on_moved = on_moved
        self._places: dict[str, MessagePlace] = {}
        self._wakeups: OrderedDict[str, NatsSubscription | None] = OrderedDict()
        self._begun: dict[str, asyncio.Task[None]] = {}
        self._all: NatsSubscription | None = None
        self._ours: set[str] = set()
        self._wanted: Callable[[], set[str]] = set
        self._task: asyncio.Task[None] | None = None
        self._stop: list[asyncio.Task[None]] = []
        self._rung = asyncio.Event()
        self._looked_at = ""
        # The last message of the whole stream that was heard of, with events in it.
        self.newest = 0

    def start(self, wanted: Callable[[], set[str]]) -> None:
        """`wanted`: the sessions that somebody waits for."""
        self._wanted = wanted
        self._task = asyncio.get_running_loop().create_task(self._look_again())

    async def stop(self) -> None:
        tasks = [task for task in (self._task, *self._begun.values(), *self._stop) if task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    # -- what is known -----------------------------------------------------------------------------------------------
    def place(self, session: str) -> MessagePlace | None:
        """As far as it is known; and from now on it is heard of."""
        if session not in self._ours and session not in self._wakeups and session not in self._begun:
            self._begin(session)
        return self._places.get(session)

    def known(self, session: str) -> MessagePlace | None:
        return self._places.get(session)

    async def look(self, session: str) -> MessagePlace | None:
        """As the servers have it now, for a session that was not heard of until now; else as it is known."""
        if session in self._ours or session in self._wakeups:
            if session in self._wakeups:
                self._wakeups.move_to_end(session)
            return self._places.get(session)
        await asyncio.shield(self._begun.get(session) or self._begin(session))
        return self._places.get(session)

    async def look_closer(self, session: str) -> MessagePlace | None:
        """As the leader has it. `StoreDamaged`: what is last there is none of ours."""
        message = await self._nats.last(self._names.events, self._names.event(session))
        if message is not None:
            self.put(session, message_codec.place_of(message))
        return self._places.get(session)

    def put(self, session: str, place: MessagePlace) -> None:
        before = self._places.get(session)
        if before is None or before.seq < place.seq:
            self._places[session] = place
            if place.held:
                self.newest = max(self.newest, place.seq)
            self._on_moved(session, place)

    def take(self, session: str) -> None:
        """It is ours: nobody else moves it."""
        self._ours.add(session)

    def give(self, session: str) -> None:
        """It is ours no more."""
        self._ours.discard(session)

    def forget(self, session: str) -> None:
        """It was deleted."""
        self._ours.discard(session)
        self._places.pop(session, None)

    def look_soon(self) -> None:
        """The connection was away: whoever waits may have missed something."""
        self._rung.set()

    # -- bells -------------------------------------------------------------------------------------------------------
    async def hear_all(self) -> None:
        if self._all is None:
            self._all = await self._nats.ring(f"{self._names.prefix}.live.ev.*", self._on_wakeup)

    def _begin(self, session: str) -> asyncio.Task[None]:
        task = self._begun[session] = asyncio.get_running_loop().create_task(self._hear(session))
        task.add_done_callback(lambda _: self._begun.pop(session, None))
        return task

    async def _hear(self, session: str) -> None:
        try:
            # The bell first, then the look: nothing falls between.
            wakeup = await self._nats.ring(
                self._names.event_wakeup(session), lambda message: self._on_ring(session, message)
            )
            self._wakeups[session] = wakeup
            await self.look_closer(session)
        except StoreError as exc:
            log.debug("session %s cannot be heard of now: %s", session, exc)
        while len(self._wakeups) > KEPT_MAX and self._drop_oldest():
            pass

    def _drop_oldest(self) -> bool:
        wanted = self._wanted()
        for session, wakeup in self._wakeups.items():
            if session not in wanted:
                del self._wakeups[session]
                if session not in self._ours:  # Of those nobody else tells us where they are.
                    self._places.pop(session, None)
                if wakeup is not None:
                    task = asyncio.get_running_loop().create_task(wakeup.stop())
                    self._stop.append(task)
                    task.add_done_callback(self._stop.remove)
                return True
        return False

    def _on_ring(self, session: str, message: StreamMessage) -> None:
        if message.seq:
            # Whoever reads the session is told that what rang is none of ours.
            with suppress(StoreDamaged):
                self.put(session, message_codec.place_of(message))

    def _on_wakeup(self, message: StreamMessage) -> None:
        session = self._id_of(message.subject.rpartition(".")[2])
        if session is not None:
            self._on_ring(session, message)
        elif message.seq:
            self.newest = max(self.newest, message.seq)

    async def _look_again(self) -> None:
        while True:
            try:
                async with asyncio.timeout(LOOK_SECONDS):
                    await self._rung.wait()
            except TimeoutError:
                pass
            wanted = self._wanted() - self._ours
            if not self._rung.is_set():
                wanted = self._next_of(wanted)
            self._rung.clear()
            for session in wanted:
                try:
                    await self.look_closer(session)
                except StoreDamaged as exc:
                    log.debug("session %s cannot be looked at: %s", session, exc)
                except StoreError as exc:
                    log.debug("session %s cannot be looked at now: %s", session, exc)
                    break

    def _next_of(self, wanted: set[str]) -> list[str]:
        """Some of them, and the next time those that come after."""
        ordered = sorted(wanted)
        begin = bisect_right(ordered, self._looked_at)
        some = (ordered[begin:] + ordered[:begin])[:LOOKS_MAX]
        if some:
            self._looked_at = some[-1]
        return some
