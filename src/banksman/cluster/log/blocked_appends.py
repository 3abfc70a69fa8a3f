"""Appends that wait behind an overdue publish go to the journal, so that they survive this host.

While the cluster answers, a waiting append is published a moment later and the journal need not
know it. While the cluster is silent, an agent continues to produce output until the lease is
nearly over, and all of that would exist in memory only. So once a message is overdue, every
waiting append is noted in the journal by its place in the session. The note is deleted when a
message with that append is stored.

Nothing is noted from the first ask on, nor from the start of a turn. The caller of that ask
learns that it was not accepted. A prompt is sent only after its start is stored. Recovery of a
journal must not make either of them true later.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from banksman.cluster.log import message_codec
from banksman.cluster.log.journal import Journal
from banksman.cluster.log.journal_file import JournalEntry
from banksman.cluster.log.message_codec import MessageBody, MessagePart
from banksman.cluster.log.publisher import Call, QueuedAppend
from banksman.core.session.event import TURN_QUEUED, TURN_STARTED, Entry

# A healthy cluster answers in milliseconds. One that lost a leader needs seconds.
OVERDUE_SECONDS = 0.25
BEGINNINGS = (TURN_QUEUED, TURN_STARTED)


def before_a_beginning(entries: Sequence[Entry]) -> Sequence[Entry]:
    """Return the entries before the first ask and before the first start of a turn."""
    return list(itertools.takewhile(lambda entry: entry[1] not in BEGINNINGS, entries))


class BlockedAppends:
    """Notes of the appends that wait behind an overdue message of one session.

    `subject`: the subject of the session's events.
    """

    def __init__(self, journal: Journal, subject: str) -> None:
        self._journal = journal
        self._subject = subject
        self._epoch = 0
        # The seq of the next append to note; None if no message is overdue, or notes have to stop.
        self._next: int | None = None
        # The last noted seq of this epoch that is not deleted; 0 without notes.
        self._noted = 0

    def begin(self, epoch: int, first: int, calls: Iterable[Call]) -> None:
        """Start to note: a message of this epoch with the events before `first` is overdue.

        `calls`: the calls that already wait behind it.
        """
        # One message is in flight, and its end has stopped the notes (`pass_by`, `report`, `stop`).
        # Notes that continued over the border of two messages could have a gap.
        assert self._next is None
        # Notes of an earlier epoch stay in the journal, for recovery. This object only tracks the
        # notes that it may still have to delete.
        if epoch != self._epoch:
            self._epoch, self._noted = epoch, 0
        self._next = first
        for call in calls:
            self.note(call)

    def note(self, call: Call) -> None:
        """Note an append that directly follows the noted ones, if a message is overdue."""
        first = self._next
        if first is None:
            return
        if not isinstance(call, QueuedAppend) or not self._follows(call, first):
            # Later calls build on a result that is still unknown, so they are not noted either.
            self._next = None
            return
        entries = before_a_beginning(call.part.entries)
        is_whole = len(entries) == len(call.part.entries)
        if entries:
            self._noted = first + len(entries) - 1
            # A snapshot covers the whole append, so it does not fit to a part of it.
            snapshot = call.snapshot if is_whole else None
            body = message_codec.encode(
                MessageBody([MessagePart(call.part.at, entries)], snapshot, self._noted)
            )
            self._journal.note(JournalEntry(self._subject, self._epoch, first, len(entries), body))
        self._next = self._noted + 1 if is_whole else None
        # The notes have no gap: each one begins where the append before it ends.
        assert self._next is None or self._next == first + len(call.part.entries)

    def _follows(self, call: QueuedAppend, first: int) -> bool:
        # The same rules by which the queue accepts an append when its turn comes. An append that
        # the queue will refuse must not be noted: its caller learns that it failed.
        is_next = call.epoch == self._epoch and call.expected_seq == first - 1
        return is_next and call.error is None and bool(call.part.entries)

    def pass_by(self, last: int) -> None:
        """Stop taking notes, and delete those up to `last`: these events are stored."""
        self._next = None
        if self._noted:
            self._journal.pass_by(self._subject, self._epoch, last)
            self._noted = self._noted if self._noted > last else 0

    def forget(self) -> None:
        """Delete all notes: the writer learned that none of them is stored.

        The writer may append something else in their place, so recovery must not find them.
        """
        self.pass_by(self._noted)

    def report(self) -> None:
        """Report all notes: another host owns the session, so none of them can be stored."""
        self._next = None
        if self._noted:
            self._journal.report_noted(self._subject, self._epoch)
            self._noted = 0

    def stop(self) -> None:
        """Stop taking notes, and keep those in the journal.

        This host lost the session, but recovery may still store the notes.
        """
        self._next, self._noted = None, 0
