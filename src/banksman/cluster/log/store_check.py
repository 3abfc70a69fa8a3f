"""Check what a store on NATS holds, changing nothing: unreadable records, damaged sessions, remains of deleted ones.

The order of the three looks keeps a busy cluster from looking damaged. A session's record is written before its first
event, and a blob before the event that names it. So events are read first, blobs second and records last: what an
event needs was there when the event was. A finding that a change between the looks could explain is looked at again.

Reads the whole stream of events, for at most `CHECK_SECONDS_MAX`.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from banksman.cluster.jetstream import StreamMessage
from banksman.cluster.log import message_codec
from banksman.cluster.log.message_codec import MessagePlace
from banksman.cluster.log.session_record import LeaseRecord, SessionRecord
from banksman.cluster.log.streams import StreamNames, token
from banksman.cluster.nats import Nats
from banksman.cluster.store_address import StoreAddress
from banksman.errors import StoreDamaged

CHECK_SECONDS_MAX = 10.0
# What is wrong is told by its first faults.
FAULTS_MAX = 5
PAGE_MESSAGES = 256


class StoreContents(msgspec.Struct, frozen=True):
    """`faults`: what is damaged, each with its hint. `remains`: subjects with events that belong to no session.
    `blobs`: names of blobs that belong to none. `is_checked`: it was read to the end."""

    sessions: int
    faults: tuple[tuple[str, str], ...]
    remains: tuple[str, ...]
    blobs: tuple[str, ...]
    is_checked: bool


@dataclass(slots=True)
class _Events:
    """The messages under one subject, as they were read. `holes`: events between two messages that no message has."""

    first: MessagePlace
    last: MessagePlace
    holes: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    blobs: dict[str, MessagePlace] = field(default_factory=dict[str, MessagePlace])


async def look(address: StoreAddress) -> StoreContents:
    """Raises `Unreachable`, `UsageError`. The streams of events and records must be there."""
    nats = Nats(address, name="banksman doctor")
    await nats.connect()
    try:
        return await _StoreLook(nats, StreamNames(address.prefix)).look()
    finally:
        await nats.close()


class _StoreLook:
    def __init__(self, nats: Nats, names: StreamNames) -> None:
        self._nats = nats
        self._names = names
        self._faults: list[tuple[str, str]] = []
        # By the part of the subject that stands for the session.
        self._events: dict[str, _Events] = {}
        self._records: dict[str, SessionRecord] = {}
        self._unreadable: set[str] = set()

    async def look(self) -> StoreContents:
        is_checked = await self._read_events()
        blobs = await self._read_blobs()
        await self._read_records()
        for part, events in self._events.items():
            if is_checked and (record := self._records.get(part)) is not None and not record.is_hidden:
                await self._compare(record, events, blobs)
        known = self._records.keys() | self._unreadable
        remains = [part for part in self._events if part not in known]
        return StoreContents(
            sessions=len(self._records),
            faults=tuple(self._faults[:FAULTS_MAX]),
            remains=tuple([part for part in remains if await self._last(part) is not None]),
            blobs=tuple(
                sorted(name for name in blobs if (part := _session_of(name)) is not None and part not in known)
            ),
            is_checked=is_checked,
        )

    async def _read_events(self) -> bool:
        """Whether it came to the end in time."""
        until = time.monotonic() + CHECK_SECONDS_MAX
        async for message in self._messages(self._names.events, f"{self._names.prefix}.ev.*"):
            try:
                self._take(message.subject.rpartition(".")[2], message)
            except StoreDamaged as exc:
                self._tell(exc)
            if time.monotonic() > until:
                return False
        return True

    def _take(self, part: str, message: StreamMessage) -> None:
        place = message_codec.place_of(message)
        body = message_codec.body_of(message, message.data)
        name = place.blob_name
        if name is None and sum(len(each.entries) for each in body.parts) != place.held:
            raise message_codec.event(message.subject, message.seq)
        events = self._events.get(part)
        if events is None:
            events = self._events[part] = _Events(place, place)
        elif place.first > events.last.last + 1:
            events.holes.append((events.last.last + 1, place.first - 1))
        events.last = place
        if name is not None:
            events.blobs[name] = place

    async def _read_blobs(self) -> set[str]:
        bucket = self._names.blobs
        if "error" in await self._nats.api(f"STREAM.INFO.OBJ_{bucket}", {}):
            return set()  # Nothing was ever too large for a message.
        found: set[str] = set()
        async for message in self._messages(f"OBJ_{bucket}", f"$O.{bucket}.M.>"):
            said: dict[str, Any] = json.loads(message.data or b"{}")
            if not said.get("deleted") and said.get("name"):
                found.add(str(said["name"]))
        return found

    async def _read_records(self) -> None:
        async for message in self._messages(self._names.records, f"{self._names.prefix}.rec.>"):
            kind, _, part = message.subject.removeprefix(f"{self._names.prefix}.rec.").partition(".")
            if not message.data:
                continue  # It was deleted.
            try:
                match kind:
                    case "session":
                        self._records[part] = msgspec.json.decode(message.data, type=SessionRecord)
                    case "lease":
                        msgspec.json.decode(message.data, type=LeaseRecord)
                    case "meta":
                        int(message.data)
                    case _:
                        message.data.decode()
            except ValueError:  # msgspec's errors and those of text are such.
                self._unreadable.add(part)
                self._tell(message_codec.record(message.subject, message.seq))

    async def _compare(self, record: SessionRecord, events: _Events, blobs: set[str]) -> None:
        """What the record counts, and no message has. Retention may take messages while they are read: what lies before
        the first event that is kept by now is no loss."""
        missing = [(first, last) for first, last in events.holes if last >= record.first]
        if events.first.first > record.first:
            missing.insert(0, (record.first, events.first.first - 1))
        if record.seq > events.last.last:
            newest = await self._last(token(record.id))
            last = message_codec.place_of(newest).last if newest is not None else 0
            if record.seq > last:
                missing.append((max(last + 1, record.first), record.seq))
        missing += [
            (place.first, place.last)
            for name, place in events.blobs.items()
            if name not in blobs and place.last >= record.first and place.epoch >= record.born
        ]
        for first, last in missing:
            hint = f"restore {self._names.events} and OBJ_{self._names.blobs} from a backup; or delete the session"
            self._faults.append((f"events {first} to {last} of session {record.id} are missing", hint))

    async def _last(self, part: str) -> StreamMessage | None:
        return await self._nats.last(self._names.events, f"{self._names.prefix}.ev.{part}")

    async def _messages(self, stream: str, subject: str) -> AsyncGenerator[StreamMessage]:
        begin, left = 1, 1
        while left:
            found, left = await self._nats.read(stream, begin, subject, PAGE_MESSAGES)
            for message in found:
                yield message
            if not found:
                return
            begin = found[-1].seq + 1
            await asyncio.sleep(0)

    def _tell(self, exc: StoreDamaged) -> None:
        self._faults.append((exc.args[0], exc.hint))


def _session_of(blob: str) -> str | None:
    """The part of a subject that stands for its session; None: it is of none, but on its way between hosts."""
    first, _, rest = blob.partition(".")
    if not rest:
        return None
    return rest if first == "transcript" else first
