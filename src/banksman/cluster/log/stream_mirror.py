"""Follow NATS streams: report each subject's last message, keep the heads of watched sessions.

`StreamMirror` is for records and heartbeats: it passes each new last message to a callback and
keeps only its number. `StreamHeads` keeps the last place of each session that a caller looks at.

A notification carries the new message. If it does not follow the last one that was read, some
messages were missed, and the mirror reads them. It also reads at intervals without a notification.
So a missed notification costs time, but never correctness. Messages that this process wrote enter
the mirror immediately. Each subject only moves forward: an older message than the known one changes
nothing.

The mirror uses the content of notifications instead of reading each message. Every host gets every
heartbeat. A read per heartbeat would load the servers with the square of the number of hosts.
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
# The interval of reads without a notification: a leader may die between a store and its republish.
LOOK_SECONDS = 2.0
# The interval of reads from a replica that lags behind a notification.
LAG_SECONDS = 0.01
LAG_LOOKS_MAX = 50
ENDED_MAX = 10_000

# The header of a republished message that names its original subject.
SUBJECT = "Nats-Subject"

# Gets a subject and its new message; None if the subject is empty.
OnChange = Callable[[str, StreamMessage | None], None]

# How many sessions without a waiter keep their subscription.
KEPT_MAX = 2048
# Sessions per round that are read from the leader. Missed notifications are rare.
LOOKS_MAX = 200


async def _rung_or_due(rung: asyncio.Event) -> None:
    """Wait for a notification, but not longer than to the next read that needs none."""
    with suppress(TimeoutError):
        async with asyncio.timeout(LOOK_SECONDS):
            await rung.wait()


class StreamMirror:
    """Passes the last message of each subject of a stream to `on_change`, without a gap."""

    def __init__(
        self, nats: Nats, stream: str, subjects: str, wakeup: str, on_change: OnChange
    ) -> None:
        self._nats = nats
        self._stream = stream
        self._subjects = subjects
        self._bell_subject = wakeup
        self._on_change = on_change
        self._seqs: dict[str, int] = {}
        # Empty subjects, in the order in which they became empty.
        self._ended: dict[str, None] = {}
        self._read_to = 0
        self._rung_for = 0
        self._rung = asyncio.Event()
        self._wakeup: NatsSubscription | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_stale = False

    async def start(self) -> None:
        """Subscribe and load. On return every stored message is known."""
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
            self._wakeup = None  # It may start again, on another connection.

    def put(self, message: StreamMessage) -> None:
        """Take over a message that was just written, or read from the leader."""
        if self._seqs.get(message.subject, 0) < message.seq:
            self._seqs[message.subject] = message.seq
            self._note_end(message)
            self._on_change(message.subject, message if message.data else None)

    def _note_end(self, message: StreamMessage) -> None:
        """Remember when a subject became empty, so that no older message revives it.

        Only the latest `ENDED_MAX` ends are remembered.
        """
        self._ended.pop(message.subject, None)
        if not message.data:
            self._ended[message.subject] = None
            if len(self._ended) > ENDED_MAX:
                del self._seqs[next(iter(self._ended))]
                del self._ended[next(iter(self._ended))]

    def reload_soon(self) -> None:
        """Reload everything soon.

        The connection may have been down for longer than the tombstones of ended subjects are kept.
        """
        self._is_stale = True
        self._rung.set()

    def _on_wakeup(self, message: StreamMessage) -> None:
        subject = message.headers.get(SUBJECT)
        # Only the direct successor proves that nothing was missed in between.
        if subject is not None and message.seq == self._read_to + 1:
            self._read_to = message.seq
            self.put(message._replace(subject=subject))
            return
        self._rung_for = max(self._rung_for, message.seq)
        self._rung.set()

    async def _follow(self) -> None:
        """Read on after each notification, and at intervals, until cancelled."""
        while True:
            await _rung_or_due(self._rung)
            self._rung.clear()
            is_stale, self._is_stale = self._is_stale, False
            try:
                if is_stale:
                    await self._load()
                else:
                    await self._read_on(self._rung_for)
            except StoreError as exc:
                log.debug("cannot read %s: %s, retrying", self._stream, exc)
                self._is_stale |= is_stale
                self._rung.set()
                await asyncio.sleep(LOOK_SECONDS / 4)

    async def _load(self) -> None:
        """Read the stream from its start. Subjects that it does not hold are reported as empty."""
        last = await self._nats.last(self._stream, self._subjects)
        before = dict(self._seqs)
        if last is not None and last.seq < self._read_to:
            # An operator deleted the stream, and a host created it again: its sequences start over.
            self._seqs.clear()
            self._ended.clear()
        self._read_to = 0
        seen = await self._read_on(0 if last is None else last.seq)
        for subject, seq in before.items():
            # Skip a subject that this process wrote during the load.
            if subject not in seen and self._seqs.get(subject, seq) == seq:
                self._seqs.pop(subject, None)
                self._ended.pop(subject, None)
                self._on_change(subject, None)

    async def _read_on(self, target: int) -> set[str]:
        """Read everything new, at least up to `target`. Returns the subjects that were read.

        Raises `Unanswered` if a replica lags for too long.
        """
        seen: set[str] = set()
        looks = 0
        while True:
            messages, left = await self._nats.read(
                self._stream, self._read_to + 1, self._subjects, PAGE_MESSAGES_MAX
            )
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
                # The target may have been deleted since, which only the leader knows. Skipping it
                # on the word of a lagging replica would mean never to read it.
                last = await self._nats.last(self._stream, self._subjects)
                if last is not None and last.seq > self._read_to:
                    raise Unanswered(f"cannot read {self._stream}: the replica lags")
                self._read_to = target
                return seen
            await asyncio.sleep(LAG_SECONDS)


# The last message of each session that a caller looks at. Notifications update it, and reads fill
# in where one may have been missed.
#
# For a session that this host owns, the place is known, because this host is its only writer. For
# another session the first look subscribes and asks the servers. The subscription ends when no
# caller has looked for a while. A reader of all sessions uses one subscription for all.


# Gets a session and its new place.
OnMoved = Callable[[str, MessagePlace], None]


class StreamHeads:
    """The last place of each session that a caller looks at."""

    def __init__(
        self, nats: Nats, names: StreamNames, id_of: Callable[[str], str | None], on_moved: OnMoved
    ) -> None:
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
        # The sequence of the latest known message with events, in any session.
        self.newest = 0

    def start(self, wanted: Callable[[], set[str]]) -> None:
        """Start the reads at intervals. `wanted`: returns the sessions with waiters."""
        self._wanted = wanted
        self._task = asyncio.get_running_loop().create_task(self._look_again())

    async def stop(self) -> None:
        tasks = [
            task for task in (self._task, *self._begun.values(), *self._stop) if task is not None
        ]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    # -- known places -----------------------------------------------------------------------------
    def place(self, session: str) -> MessagePlace | None:
        """Return the known place of a session, and subscribe to its changes."""
        if (
            session not in self._ours
            and session not in self._wakeups
            and session not in self._begun
        ):
            self._begin(session)
        return self._places.get(session)

    def known(self, session: str) -> MessagePlace | None:
        """Return the known place of a session."""
        return self._places.get(session)

    async def look(self, session: str) -> MessagePlace | None:
        """Return the place of a session. The first look asks the servers."""
        if session in self._ours or session in self._wakeups:
            if session in self._wakeups:
                self._wakeups.move_to_end(session)
            return self._places.get(session)
        await asyncio.shield(self._begun.get(session) or self._begin(session))
        return self._places.get(session)

    async def look_closer(self, session: str) -> MessagePlace | None:
        """Read the place from the leader. Raises `StoreDamaged` if the last message is foreign."""
        message = await self._nats.last(self._names.events, self._names.event(session))
        if message is not None:
            self.put(session, message_codec.place_of(message))
        return self._places.get(session)

    def put(self, session: str, place: MessagePlace) -> None:
        """Set the place of a session, unless a later one is known."""
        before = self._places.get(session)
        if before is None or before.seq < place.seq:
            self._places[session] = place
            if place.held:
                self.newest = max(self.newest, place.seq)
            self._on_moved(session, place)

    def take(self, session: str) -> None:
        """Mark a session as owned: only this host changes its place."""
        self._ours.add(session)

    def give(self, session: str) -> None:
        """Mark a session as not owned."""
        self._ours.discard(session)

    def forget(self, session: str) -> None:
        """Forget a deleted session."""
        self._ours.discard(session)
        self._places.pop(session, None)

    def look_soon(self) -> None:
        """Read again soon: the connection was down, and waiters may have missed an event."""
        self._rung.set()

    # -- subscriptions ----------------------------------------------------------------------------
    async def hear_all(self) -> None:
        """Subscribe to the events of all sessions."""
        if self._all is None:
            self._all = await self._nats.ring(f"{self._names.prefix}.live.ev.*", self._on_wakeup)

    def _begin(self, session: str) -> asyncio.Task[None]:
        task = self._begun[session] = asyncio.get_running_loop().create_task(self._hear(session))
        task.add_done_callback(lambda _: self._begun.pop(session, None))
        return task

    async def _hear(self, session: str) -> None:
        try:
            # Subscribe first, then read, so that nothing falls in between.
            wakeup = await self._nats.ring(
                self._names.event_wakeup(session), lambda message: self._on_ring(session, message)
            )
            self._wakeups[session] = wakeup
            await self.look_closer(session)
        except StoreError as exc:
            log.debug("session %s: cannot subscribe to its events now: %s", session, exc)
        while len(self._wakeups) > KEPT_MAX and self._drop_oldest():
            pass

    def _drop_oldest(self) -> bool:
        wanted = self._wanted()
        for session, wakeup in self._wakeups.items():
            if session not in wanted:
                del self._wakeups[session]
                # No notification replaces the places that this owner knows.
                if session not in self._ours:
                    self._places.pop(session, None)
                if wakeup is not None:
                    task = asyncio.get_running_loop().create_task(wakeup.stop())
                    self._stop.append(task)
                    task.add_done_callback(self._stop.remove)
                return True
        return False

    def _on_ring(self, session: str, message: StreamMessage) -> None:
        if message.seq:
            # A reader of the session gets the error of a foreign message.
            with suppress(StoreDamaged):
                self.put(session, message_codec.place_of(message))

    def _on_wakeup(self, message: StreamMessage) -> None:
        session = self._id_of(message.subject.rpartition(".")[2])
        if session is not None:
            self._on_ring(session, message)
        elif message.seq:
            self.newest = max(self.newest, message.seq)

    async def _look_again(self) -> None:
        """Read the places of awaited sessions at intervals: a notification may be missed."""
        while True:
            await _rung_or_due(self._rung)
            wanted = self._wanted() - self._ours
            if not self._rung.is_set():
                wanted = self._next_of(wanted)
            self._rung.clear()
            for session in wanted:
                try:
                    await self.look_closer(session)
                except StoreDamaged as exc:
                    log.debug("session %s: cannot read its last event: %s", session, exc)
                except StoreError as exc:
                    log.debug("session %s: cannot read its last event now: %s", session, exc)
                    break

    def _next_of(self, wanted: set[str]) -> list[str]:
        """Return the next `LOOKS_MAX` sessions, in turns."""
        ordered = sorted(wanted)
        begin = bisect_right(ordered, self._looked_at)
        some = (ordered[begin:] + ordered[:begin])[:LOOKS_MAX]
        if some:
            self._looked_at = some[-1]
        return some
