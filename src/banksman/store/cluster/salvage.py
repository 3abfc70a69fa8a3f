"""What was in a journal and not in the cluster, when its host died or was fenced: put in its place, if it still is one.

A message is published under the sequence that it was to follow. If nobody has claimed the session since, that is the
last one, and the message is what its owner said; else it is refused, and kept as a report. So nothing is ever put
behind what a new owner has said.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from pathlib import Path

from banksman.errors import StoreError, Unreachable
from banksman.store.cluster import packing
from banksman.store.cluster.hosts import Leases
from banksman.store.cluster.journal import Journal, Left, Row, left_behind, store_of
from banksman.store.cluster.streams import Streams
from banksman.store.jetstream import ID, WrongLast
from banksman.store.nats import Nats

log = logging.getLogger("banksman")

RETRY_SECONDS = 0.5


class Salvage:
    def __init__(self, nats: Nats, streams: Streams, folder: Path) -> None:
        self._nats = nats
        self._streams = streams
        self._names = streams.names
        self._folder = folder

    async def run(self, journal: Journal) -> None:
        """What dead hosts have left on this machine. Of this very store, by its name and the birth of its stream: what
        is of another waits for a host of that one."""
        store = await self._store()
        await journal.be_of(store)
        found = await asyncio.to_thread(left_behind, self._folder)
        try:
            for left in found:
                try:
                    if await asyncio.to_thread(store_of, left) in (store, None):
                        await self._settle(left)
                except (ValueError, sqlite3.Error, OSError) as exc:
                    log.warning("! %s was left by a dead host, and cannot be understood: %s", left.path, exc)
        finally:
            for left in found:
                await asyncio.to_thread(left.close)

    async def _store(self) -> str:
        while True:
            try:
                info = await self._nats.api(f"STREAM.INFO.{self._names.events}", {})
                return f"{self._names.events} {info['created']}"
            except (Unreachable, KeyError):
                await asyncio.sleep(RETRY_SECONDS)

    async def later(self, journal: Journal, leases: Leases) -> None:
        """What this host had on its way when it was fenced; as soon as somebody answers again."""
        rows = await journal.rows()
        while rows and not leases.is_held:  # noqa: ASYNC110  Nobody is told when a lease is held again.
            await asyncio.sleep(RETRY_SECONDS)
        for row in rows:
            if await self._put(row):
                journal.drop(row.id)
            else:
                journal.report(row)
                _tell(row)

    async def _settle(self, left: Left) -> None:
        for row in await asyncio.to_thread(lambda: left.rows):
            if not row.subject.startswith(f"{self._names.prefix}.ev."):
                continue
            if await self._put(row):
                await asyncio.to_thread(left.drop, row.id)
            else:
                await asyncio.to_thread(left.report, row)
                _tell(row)

    async def _put(self, row: Row) -> bool:
        """Whether it is in its place."""
        body, headers = row.body, {packing.HEADER: row.header}
        while True:
            try:
                if packing.place(0, row.header).blob_name is not None:
                    await self._streams.ensure(self._names.blobs)
                    await self._nats.put_blob(self._names.blobs, row.id, row.body)
                    body = b""
                await self._nats.publish(row.subject, body, expected=row.expected, id=row.id, headers=headers)
                return True
            except WrongLast:
                try:
                    last = await self._nats.last(self._names.events, row.subject)
                except Unreachable:
                    await asyncio.sleep(RETRY_SECONDS)
                    continue
                if last is not None and last.seq == row.expected:
                    await asyncio.sleep(RETRY_SECONDS)  # A leader that has just been chosen.
                    continue
                return last is not None and last.headers.get(ID) == row.id
            except Unreachable:
                await asyncio.sleep(RETRY_SECONDS)
            except StoreError:
                return False


def _tell(row: Row) -> None:
    log.warning("! %s: what its owner said last was not taken any more, and is kept as a report", row.id)
