"""Webhooks: send events of the log to the URLs of the settings, at least once and in order.

Each target has a sender, which reads the log of the whole store from the target's stored position.
So a target that is down or slow delays no other target, and a restart loses no event.

A sender takes the events of one page and sends them:

- The events of one session go one after the other. The next one waits until the receiver has
  accepted the one before it.
- `LANES_MAX` sessions are served at the same time.
- A failed attempt is repeated until it succeeds, with a growing delay.
- The stored position is the place before the first event that was not accepted. After a crash the
  events after it are sent again. Their `Banksman-Delivery` is the same.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from banksman.errors import BanksmanError, HistoryLost, UsageError
from banksman.folders import state_folder
from banksman.runtime.base_host import Host
from banksman.server.http import token_file
from banksman.server.ops import webhook_delivery
from banksman.server.ops.webhook_cursor import CursorFile, address_of
from banksman.server.ops.webhook_delivery import KINDS, Delivery, DeliveryFailed, delivery_of
from banksman.server.ops.webhook_targets import WebhookTarget
from banksman.server.server_settings import ServerSettings
from banksman.store.log_values import MultiSessionPage, PositionedEvent
from banksman.tasks import OwnedTasks, for_each

# Requests to one target at the same time, each for another session.
LANES_MAX = 8
# Events that a sender reads at once. It holds the messages of one page in memory.
PAGE_EVENTS_MAX = 500
# Delay after the first failed attempt. It doubles up to the maximum, and a part of it is random.
RETRY_SECONDS = 0.5
RETRY_SECONDS_MAX = 300.0
# A page without a webhook's event is not stored on its own: reading it again costs little.
SKIPPED_EVENTS_MAX = 10_000
# How often the place is stored within a page.
STORE_SECONDS = 1.0
# Agents write many frames, and a sender needs none of them. This pause makes its pages larger.
GATHER_SECONDS = 0.1

log = logging.getLogger("banksman.webhooks")


@dataclass(slots=True)
class TargetCounts:
    """Counts of one target. `oldest`: when its oldest event that waits was written."""

    delivered: int = 0
    failed: int = 0
    gaps: int = 0
    oldest: float | None = None

    @property
    def lag_seconds(self) -> float:
        return 0.0 if self.oldest is None else max(0.0, time.time() - self.oldest)


def load_secret(settings: ServerSettings) -> str | None:
    """Return the key of the signatures; None without webhooks. The first call creates it."""
    if not settings.webhooks:
        return None
    given = settings.webhook_secret_file
    path = state_folder() / "webhook-secret" if given is None else Path(given)
    try:
        return token_file.load_or_make(path)
    except UsageError as exc:
        hint = "correct the file, remove it to get a new key, or set webhook_secret_file"
        raise UsageError(f"cannot load the key of webhooks: {exc.args[0]}", hint=hint) from exc


@asynccontextmanager
async def sending(
    host: Host, settings: ServerSettings, secret: str | None
) -> AsyncGenerator[dict[str, TargetCounts]]:
    """Send webhooks until the context exits. Yields the counts by the label of the target.

    On entry each target has its place in the log. So a new target gets every event that is written
    from then on.
    """
    senders: list[_Sender] = []
    if secret is not None:
        kinds = frozenset(kind for kind, name in KINDS.items() if name in settings.webhook_events)
        address = address_of(settings)
        senders = [_Sender(host, address, one, secret, kinds) for one in settings.webhook_targets()]
    tasks = OwnedTasks()
    try:
        for sender in senders:
            await sender.open()
            tasks.start(sender.run())
        yield {sender.target.label: sender.counts for sender in senders}
    finally:
        await tasks.end()
        for sender in senders:
            sender.close()


class _Sender:
    """Sends the events of one store to one target."""

    def __init__(
        self, host: Host, address: str, target: WebhookTarget, secret: str, kinds: frozenset[str]
    ) -> None:
        self.target = target
        self.counts = TargetCounts()
        self._host = host
        self._address = address
        self._secret = secret
        self._kinds = kinds
        self._cursor: CursorFile | None = None
        # The place before the first event that was not accepted. None: not known yet.
        self._position: str | None = None
        # The stored place is that of another file at the same address. It is logged once.
        self._is_other_store = False
        # Events without a message since the position was stored.
        self._skipped = 0
        self._stored_at = 0.0
        self._storing = asyncio.Lock()
        # Sessions whose last attempt failed: the first failure and the recovery are logged.
        self._failing: set[str] = set()

    async def open(self) -> None:
        """Find the place of the target in the log. After a failure `run` tries again."""
        try:
            await self._find_place()
        except (BanksmanError, OSError) as exc:
            self._warn(exc)

    def close(self) -> None:
        """Store the place and let another server send."""
        if self._cursor is not None:
            if self._cursor.is_locked and self._position is not None:
                self._cursor.save(self._position)
            self._cursor.close()

    async def run(self) -> None:
        """Send events until this is cancelled."""
        delays = _delays()
        while True:
            try:
                cursor = await self._find_place()
                if not cursor.is_locked:
                    await cursor.lock()
                    # Another server may have sent events while this one waited.
                    self._position = self._stored(cursor) or self._position
                while True:
                    await self._send_page()
                    delays = _delays()
            except (BanksmanError, OSError) as exc:
                self._warn(exc)
            await asyncio.sleep(next(delays))

    def _warn(self, exc: Exception) -> None:
        log.warning("webhook %s: cannot send events, trying again: %s", self.target.label, exc)

    def _warn_lost(self) -> None:
        log.warning(
            "webhook %s: its place in the log is lost, starting at the newest event",
            self.target.label,
        )

    async def _find_place(self) -> CursorFile:
        if self._cursor is None:
            store = self._host.log
            await store.ready()
            folder = state_folder() / "webhooks" if store.is_durable else None
            self._cursor = CursorFile(
                folder, self.target.url, address=self._address, identity=store.identity
            )
        if self._position is None:
            self._position = self._stored(self._cursor)
        if self._position is None:
            self._position = await self._newest()
            self._cursor.save(self._position)
        return self._cursor

    def _stored(self, cursor: CursorFile) -> str | None:
        """Return the stored position; None if there is none. Raises `OSError`."""
        try:
            place = cursor.load()
        except ValueError:
            self._warn_lost()
            return None
        if place is None:
            return None
        if place.store != self._host.log.identity and not self._is_other_store:
            self._is_other_store = True
            # If it is shorter than the log before it, `_read_page` starts at the newest event.
            log.warning(
                "webhook %s: the store is another file than before, events may be missing",
                self.target.label,
            )
        return place.position

    async def _newest(self) -> str:
        # An empty selection reads no events, and still returns the position of the end.
        return (await self._host.read_many(None, limit=1, sessions=())).position

    # -- sending ----------------------------------------------------------------------------------
    async def _send_page(self) -> None:
        """Wait for the next events, and return when the receiver has accepted all of them."""
        page = await self._read_page()
        if not page.events and not page.gaps:
            await self._host.wait_past(page.position)
            await asyncio.sleep(GATHER_SECONDS)
            return
        for session in page.gaps:
            self.counts.gaps += 1
            log.warning(
                "webhook %s: retention has removed events before they were sent (session=%s)",
                *(self.target.label, session),
            )
        wanted = [one for one in page.events if one.event.kind in self._kinds]
        if wanted:
            await self._send(wanted)
        self._position = page.position
        self._skipped += len(page.events)
        if wanted or page.gaps or self._skipped > SKIPPED_EVENTS_MAX:
            await self._store_place()

    async def _read_page(self) -> MultiSessionPage:
        """Read from the position. If the store does not have it, start at the newest event."""
        assert self._position is not None
        try:
            return await self._host.read_many(self._position, limit=PAGE_EVENTS_MAX)
        except (HistoryLost, UsageError):
            # A copy that is older than the position, or another store at the same address.
            newest = await self._newest()
        self._warn_lost()
        self._position = newest
        await self._store_place()
        return await self._host.read_many(newest, limit=PAGE_EVENTS_MAX)

    async def _send(self, wanted: Sequence[PositionedEvent]) -> None:
        """Send these events, in order for each session."""
        sessions: dict[str, list[int]] = {}
        for number, one in enumerate(wanted):
            sessions.setdefault(one.event.session, []).append(number)
        waiting = dict.fromkeys(range(len(wanted)))

        async def send_session(session: str) -> None:
            for number in sessions[session]:
                one = wanted[number]
                await self._send_one(session, delivery_of(one.event, one.position))
                del waiting[number]
                first = next(iter(waiting), None)
                self.counts.oldest = None if first is None else wanted[first].event.at
                if first is not None and first > number:
                    # Everything up to here was accepted.
                    self._position = wanted[first - 1].position
                    if time.monotonic() > self._stored_at + STORE_SECONDS:
                        await self._store_place()

        self.counts.oldest = wanted[0].event.at
        await for_each(sessions, send_session, at_once=LANES_MAX)

    async def _send_one(self, session: str, delivery: Delivery) -> None:
        """Send one message until the receiver accepts it."""
        delays = _delays()
        while True:
            try:
                await webhook_delivery.attempt(self.target, delivery, self._secret)
            except DeliveryFailed as exc:
                self.counts.failed += 1
                if not self._failing:
                    log.warning(
                        "webhook %s: delivery failed, trying again: %s (id=%s)",
                        *(self.target.label, exc, delivery.id),
                    )
                self._failing.add(session)
            else:
                self.counts.delivered += 1
                if self._failing:
                    self._failing.discard(session)
                    if not self._failing:
                        log.info("webhook %s: delivers again", self.target.label)
                return
            await asyncio.sleep(next(delays))

    async def _store_place(self) -> None:
        assert self._cursor is not None
        # One after the other, and each with the newest place: none overwrites a newer one.
        async with self._storing:
            assert self._position is not None
            self._skipped, self._stored_at = 0, time.monotonic()
            # It waits for the disk.
            await asyncio.to_thread(self._cursor.save, self._position)


def _delays() -> Iterator[float]:
    """Yield the delays after failures in a row."""
    seconds = RETRY_SECONDS
    while True:
        # The random part keeps the sessions of a target from coming back at the same moment.
        yield seconds * random.uniform(0.75, 1.0)
        seconds = min(seconds * 2, RETRY_SECONDS_MAX)
