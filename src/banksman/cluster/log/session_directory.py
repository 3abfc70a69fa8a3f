"""The sessions of the store, as they were last heard of: for who looks and does not wait.

Of what is ours we are the first to know; of the rest the record says who has it, and a bell where it is.
"""

from __future__ import annotations

from collections.abc import Callable

from banksman.cluster.log.message_codec import MessagePlace
from banksman.cluster.log.session_ownership import Owning, Tenancy
from banksman.cluster.log.session_record import SessionRecord, SessionRecords
from banksman.cluster.log.stream_mirror import Heads
from banksman.store.log import Head, Known, Owner


class Directory:
    """`tenancy_of`: how we have a session, if we do."""

    def __init__(
        self, records: SessionRecords, heads: Heads, owning: Owning, tenancy_of: Callable[[str], Tenancy | None]
    ) -> None:
        self._records = records
        self._heads = heads
        self._owning = owning
        self._tenancy_of = tenancy_of
        self._sorted: list[SessionRecord] | None = None

    def on_change(self) -> None:
        """What is listed is not as it was."""
        self._sorted = None

    def record(self, session: str) -> SessionRecord | None:
        record = self._records.all.get(session)
        return None if record is None or record.is_hidden else record

    def head(self, session: str) -> Head:
        record = self.record(session)
        return Head(0, 0, 1) if record is None else self._head(record, self._heads.place(session))

    def _head(self, record: SessionRecord, place: MessagePlace | None) -> Head:
        if place is not None and place.epoch < record.born:
            place = None  # Of another session, which had this id.
        seq = 0 if place is None else place.last
        tenancy = self._tenancy_of(record.id)
        if tenancy is not None:
            # A bell may be quicker than the answer to who has rung it.
            return Head(tenancy.epoch, max(tenancy.seq, seq), record.first)
        return Head(max(record.epoch, 0 if place is None else place.epoch), max(record.seq, seq), record.first)

    def find(self, id_or_name: str) -> Known | None:
        record = self.record(id_or_name) or self.record(self._records.named.get(id_or_name, ""))
        return None if record is None else self._known(record)

    def sessions(self, after: str | None, limit: int | None) -> list[Known]:
        if self._sorted is None:
            shown = (record for record in self._records.all.values() if not record.is_hidden)
            self._sorted = sorted(shown, key=lambda record: (record.created, record.id))
        begin = 0
        if after is not None:
            begin = next((index for index, one in enumerate(self._sorted, 1) if one.id == after), len(self._sorted))
        end = None if limit is None else begin + limit
        return [self._known(record) for record in self._sorted[begin:end]]

    def owned(self) -> list[tuple[Owner | None, int]]:
        counts: dict[Owner | None, int] = {}
        for record in self._records.all.values():
            if not record.is_hidden:
                owner = self._owning.owner(record)
                counts[owner] = counts.get(owner, 0) + 1
        return list(counts.items())

    def _known(self, record: SessionRecord) -> Known:
        place = self._heads.known(record.id)
        head = self._head(record, place)
        return Known(
            id=record.id,
            name=record.name,
            agent=record.agent,
            epoch=head.epoch,
            seq=head.seq,
            first=head.first,
            owner=self._owning.owner(record),
            created=record.created,
            changed=record.changed if place is None or not place.last else place.at,
        )
