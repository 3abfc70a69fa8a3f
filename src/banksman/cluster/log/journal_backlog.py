"""What waits behind a message that nobody answers for: it goes to the journal too, so that it outlives this host.

As long as the cluster answers, what gathers behind a message is on its way a moment later, and the journal need not
know of it. When it does not, an agent goes on talking until the lease is nearly over, and all of that would be in
memory alone. So once a message is overdue, every append that waits is noted as it comes, by its place in the session;
and passed by when a message with it has been stored.

Nothing is noted from the first ask on, nor from the start of a turn: whoever asks is told that it was not accepted, and
a prompt is sent only when its start is stored. Neither may be made true later by somebody who finds it in a journal.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from banksman.cluster.log import message_codec
from banksman.cluster.log.journal import Journal, Noted
from banksman.cluster.log.message_codec import MessageBody, MessagePart
from banksman.cluster.log.queue_items import Call, QueuedAppend
from banksman.core.session.event import TURN_QUEUED, TURN_STARTED, Entry

# A healthy cluster answers in milliseconds, and one that has lost a leader in seconds.
OVERDUE_SECONDS = 0.25
BEGINNINGS = (TURN_QUEUED, TURN_STARTED)


def before_a_beginning(entries: Sequence[Entry]) -> Sequence[Entry]:
    """What comes before the first ask, or the first start of a turn."""
    return list(itertools.takewhile(lambda entry: entry[1] not in BEGINNINGS, entries))


class Behind:
    """Of one session, whose events are under `subject`."""

    def __init__(self, journal: Journal, subject: str) -> None:
        self._journal = journal
        self._subject = subject
        self._epoch = 0
        # What comes next, while a message is overdue.
        self._next: int | None = None
        # The last that was noted under this epoch, and is not passed by.
        self._noted = 0

    def begin(self, epoch: int, first: int, calls: Iterable[Call]) -> None:
        """What was to be stored under this epoch, before the event `first`, is overdue; these wait."""
        if epoch != self._epoch:
            self._epoch, self._noted = epoch, 0
        self._next = first
        for call in calls:
            self.note(call)

    def note(self, call: Call) -> None:
        first = self._next
        if first is None:
            return
        if not isinstance(call, QueuedAppend) or not self._follows(call, first):
            self._next = None  # What comes behind it rests on what nobody knows yet.
            return
        entries = before_a_beginning(call.part.entries)
        is_whole = len(entries) == len(call.part.entries)
        if entries:
            self._noted = first + len(entries) - 1
            snapshot = call.snapshot if is_whole else None
            body = message_codec.encode(MessageBody([MessagePart(call.part.at, entries)], snapshot, self._noted))
            self._journal.note(Noted(self._subject, self._epoch, first, len(entries), body))
        self._next = self._noted + 1 if is_whole else None

    def _follows(self, call: QueuedAppend, first: int) -> bool:
        is_next = call.epoch == self._epoch and call.expected_seq == first - 1
        return is_next and call.error is None and bool(call.part.entries)

    def pass_by(self, last: int) -> None:
        """All up to this event is stored, and somebody answers again."""
        self._next = None
        if self._noted:
            self._journal.pass_by(self._subject, self._epoch, last)
            self._noted = self._noted if self._noted > last else 0

    def forget(self) -> None:
        """Whoever called was told that none of it is stored, and may say something else in its place."""
        self.pass_by(self._noted)

    def report(self) -> None:
        """None of it will be stored: it is another's session."""
        self._next = None
        if self._noted:
            self._journal.report_noted(self._subject, self._epoch)
            self._noted = 0

    def stop(self) -> None:
        """It is ours no more. What is noted may still find its place: see `journal_recovery.py`."""
        self._next, self._noted = None, 0
