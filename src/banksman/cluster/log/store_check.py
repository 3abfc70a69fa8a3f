"""Check the content of a store on NATS: unreadable records, missing events, leftover data.

The check changes nothing. The order of its three reads keeps a busy cluster from looking damaged. A
session's record is written before its first event, and a blob before the event that names it. So
the check reads events first, blobs second and records last: whatever an event needs existed when
the event did. A finding that a change between the reads could explain is checked again.

It reads the whole event stream, for at most `CHECK_SECONDS_MAX`.
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
# Only the first faults are reported.
FAULTS_MAX = 5
PAGE_MESSAGES = 256


class StoreContents(msgspec.Struct, frozen=True):
    """The result of a check.

    `faults`: each damage with its hint. `remains`: subjects with events of no session. `blobs`:
    names of blobs of no session. `is_checked`: the check read everything.
    """

    sessions: int
    faults: tuple[tuple[str, str], ...]
    remains: tuple[str, ...]
    blobs: tuple[str, ...]
    is_checked: bool


@dataclass(slots=True)
class _Events:
    """The messages of one session as they were read.

    `holes`: ranges of events between two messages that no message has.
    """

    first: MessagePlace
    last: MessagePlace
    holes: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    blobs: dict[str, MessagePlace] = field(default_factory=dict[str, MessagePlace])


async def look(address: StoreAddress) -> StoreContents:
    """Check a store. The event stream and the record stream must exist.

    Raises `Unreachable` or `UsageError`.
    """
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
        # By subject token of the session.
        self._events: dict[str, _Events] = {}
        self._records: dict[str, SessionRecord] = {}
        self._unreadable: set[str] = set()

    async def look(self) -> StoreContents:
        is_checked = await self._read_events()
        blobs = await self._read_blobs()
        await self._read_records()
        for part, events in self._events.items():
            if (
                is_checked
                and (record := self._records.get(part)) is not None
                and not record.is_hidden
            ):
                await self._compare(record, events, blobs)
        known = self._records.keys() | self._unreadable
        remains = [part for part in self._events if part not in known]
        return StoreContents(
            sessions=len(self._records),
            faults=tuple(self._faults[:FAULTS_MAX]),
            remains=tuple([part for part in remains if await self._last(part) is not None]),
            blobs=tuple(
                sorted(
                    name
                    for name in blobs
                    if (part := _session_of(name)) is not None and part not in known
                )
            ),
            is_checked=is_checked,
        )

    async def _read_events(self) -> bool:
        """Read all events. Returns whether it finished in time."""
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
            return set()  # No blob was ever needed.
        found: set[str] = set()
        async for message in self._messages(f"OBJ_{bucket}", f"$O.{bucket}.M.>"):
            said: dict[str, Any] = json.loads(message.data or b"{}")
            if not said.get("deleted") and said.get("name"):
                found.add(str(said["name"]))
        return found

    async def _read_records(self) -> None:
        async for message in self._messages(self._names.records, f"{self._names.prefix}.rec.>"):
            kind, _, part = message.subject.removeprefix(f"{self._names.prefix}.rec.").partition(
                "."
            )
            if not message.data:
                continue  # A tombstone.
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
            except ValueError:  # Errors of msgspec and of decoding are both ValueErrors.
                self._unreadable.add(part)
                self._tell(message_codec.record(message.subject, message.seq))

    async def _compare(self, record: SessionRecord, events: _Events, blobs: set[str]) -> None:
        """Report events that the record counts and no message has.

        Retention may drop messages during the check. Events before the record's first kept event
        are not a loss.
        """
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
            streams = f"{self._names.events} and OBJ_{self._names.blobs}"
            hint = f"restore {streams} from a backup; or delete the session"
            self._faults.append(
                (f"events {first} to {last} of session {record.id} are missing", hint)
            )

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
    """Return the session token of a blob name; None if the blob is in transit between hosts."""
    first, _, rest = blob.partition(".")
    if not rest:
        return None
    return rest if first == "transcript" else first
