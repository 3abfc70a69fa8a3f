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
from collections.abc import Callable

from banksman.cluster.jetstream import StreamMessage
from banksman.cluster.nats import Bell, Nats
from banksman.errors import StoreError, Unanswered

log = logging.getLogger("banksman")

PAGE_MESSAGES_MAX = 500
# Between two looks that no bell has asked for.
LOOK_SECONDS = 2.0
# Between two looks at a replica that lags behind the bell.
LAG_SECONDS = 0.01
LAG_LOOKS_MAX = 50
ENDED_MAX = 10_000

# Under which it is stored, of a message that was republished.
SUBJECT = "Nats-Subject"

# Tells what a subject holds now; None: nothing any more.
OnChange = Callable[[str, StreamMessage | None], None]


class Mirror:
    def __init__(self, nats: Nats, stream: str, subjects: str, bell: str, on_change: OnChange) -> None:
        self._nats = nats
        self._stream = stream
        self._subjects = subjects
        self._bell_subject = bell
        self._on_change = on_change
        self._seqs: dict[str, int] = {}
        # Those that hold nothing any more, in the order of their ends.
        self._ended: dict[str, None] = {}
        self._read_to = 0
        self._rung_for = 0
        self._rung = asyncio.Event()
        self._bell: Bell | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_stale = False

    async def start(self) -> None:
        """All that is stored by now is known when it returns."""
        if self._bell is None:
            self._bell = await self._nats.ring(self._bell_subject, self._on_bell)
        await self._load()
        self._task = asyncio.get_running_loop().create_task(self._follow())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))
        if self._bell is not None:
            await self._bell.stop()
            self._bell = None  # It may be started again, on another connection.

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

    def _on_bell(self, message: StreamMessage) -> None:
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
