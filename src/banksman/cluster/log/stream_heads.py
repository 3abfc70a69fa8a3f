"""Where each session is that somebody looks at: its last message, heard of at once, and looked up where a bell may have
been missed.

Of a session that is ours we know it, being its only writer. Of another's, the first look asks the servers and hangs up
a bell; it is taken down when nobody has looked for a while. Who follows all sessions has one bell for all.
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
from banksman.cluster.log.streams import Names
from banksman.cluster.nats import Bell, Nats
from banksman.errors import StoreDamaged, StoreError

log = logging.getLogger("banksman")

# Of those that nobody waits for, so many are still heard of.
KEPT_MAX = 2048
# Between two looks, for who waits, that no bell has asked for: a leader may die between storing and ringing.
LOOK_SECONDS = 2.0
# At so many of them, each time: that it happens is rare, and a look is a question to the leader.
LOOKS_MAX = 200

# Told with the session and its place when it has changed.
OnMoved = Callable[[str, MessagePlace], None]


class Heads:
    def __init__(self, nats: Nats, names: Names, id_of: Callable[[str], str | None], on_moved: OnMoved) -> None:
        self._nats = nats
        self._names = names
        self._id_of = id_of
        self._on_moved = on_moved
        self._places: dict[str, MessagePlace] = {}
        self._bells: OrderedDict[str, Bell | None] = OrderedDict()
        self._begun: dict[str, asyncio.Task[None]] = {}
        self._all: Bell | None = None
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
        if session not in self._ours and session not in self._bells and session not in self._begun:
            self._begin(session)
        return self._places.get(session)

    def known(self, session: str) -> MessagePlace | None:
        return self._places.get(session)

    async def look(self, session: str) -> MessagePlace | None:
        """As the servers have it now, for a session that was not heard of until now; else as it is known."""
        if session in self._ours or session in self._bells:
            if session in self._bells:
                self._bells.move_to_end(session)
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
            self._all = await self._nats.ring(f"{self._names.prefix}.live.ev.*", self._on_bell)

    def _begin(self, session: str) -> asyncio.Task[None]:
        task = self._begun[session] = asyncio.get_running_loop().create_task(self._hear(session))
        task.add_done_callback(lambda _: self._begun.pop(session, None))
        return task

    async def _hear(self, session: str) -> None:
        try:
            # The bell first, then the look: nothing falls between.
            bell = await self._nats.ring(
                self._names.event_bell(session), lambda message: self._on_ring(session, message)
            )
            self._bells[session] = bell
            await self.look_closer(session)
        except StoreError as exc:
            log.debug("session %s cannot be heard of now: %s", session, exc)
        while len(self._bells) > KEPT_MAX and self._drop_oldest():
            pass

    def _drop_oldest(self) -> bool:
        wanted = self._wanted()
        for session, bell in self._bells.items():
            if session not in wanted:
                del self._bells[session]
                if session not in self._ours:  # Of those nobody else tells us where they are.
                    self._places.pop(session, None)
                if bell is not None:
                    task = asyncio.get_running_loop().create_task(bell.stop())
                    self._stop.append(task)
                    task.add_done_callback(self._stop.remove)
                return True
        return False

    def _on_ring(self, session: str, message: StreamMessage) -> None:
        if message.seq:
            # Whoever reads the session is told that what rang is none of ours.
            with suppress(StoreDamaged):
                self.put(session, message_codec.place_of(message))

    def _on_bell(self, message: StreamMessage) -> None:
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
