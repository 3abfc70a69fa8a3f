"""Entries and events of a session's log: all kinds, and the JSON body of one entry.

An entry is one durable line: the turn that it belongs to, its kind, and its data. For the agent's
frames, the data is the line itself, byte for byte. For Banksman's own kinds, it is a JSON object.
An event is an entry with its place in the log; it is created when a reader reads it. `Project`
translates its frame to ACP session updates.

Entries are plain tuples, because every token of every agent takes this path. The stores write them
in chunks that share session, epoch and time, and have the format of a chunk
(`store/sqlite/pages.py`, `cluster/log/message_codec.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, cast

import msgspec

# turn id or None, kind, data
Entry = tuple[str | None, str, bytes]

UPDATE = "update"  # a frame from the agent
RECITED = "recited"  # a frame from the agent that repeats the output of an earlier process
SENT = "sent"  # a frame to the agent
TURN_QUEUED = "turn.queued"
TURN_STARTED = "turn.started"
TURN_INTERRUPTED = "turn.interrupted"
TURN_REQUEUED = "turn.requeued"
TURN_ENDED = "turn.ended"
QUEUE_CHANGED = "queue.changed"
# the session is reserved for the asks of one holder, and is free again: `by` says why
HOLD_GRANTED = "hold.granted"
HOLD_ENDED = "hold.ended"
# a queued ask has another prompt or another class; null: as before
TURN_EDITED = "turn.edited"
PROCESS_STARTED = "process.started"
# the next owner of the session has taken the process over, in the middle of whatever it does
PROCESS_ADOPTED = "process.adopted"
PROCESS_EXITED = "process.exited"
PROCESS_STOPPED = "process.stopped"  # by the ladder: which rungs were taken, and when
PROCESS_SWEPT = "process.swept"
# processes that an interrupted turn's tools left running, and that the policy does not end
PROCESS_LEFT = "process.left"
PROCESS_RETIRED = "process.retired"  # stopped by the session's decision, with no turn open
PROCESS_BACKED_OFF = "process.backed_off"
# `question`: its name in this log, valid forever; `request`: the agent's id, valid in one process
QUESTION_ASKED = "question.asked"
# the one answer: allow, deny, cancelled or withdrawn; `by`: its source
QUESTION_ANSWERED = "question.answered"
# its process is gone; the answer is for a process that asks the same again
QUESTION_KEPT = "question.kept"
SESSION_OPENED = "session.opened"  # the spec, so that another host can open the session again
# the callers that may use the session beside the one that opened it first
SESSION_SHARED = "session.shared"
SESSION_IMPORTED = "session.imported"  # the events before it were written in another store
SESSION_RECOVERED = "session.recovered"  # its host had died; the open turns are settled
SESSION_CONVERSATION = "session.conversation"
SESSION_SETTING = "session.setting"
SESSION_CONTEXT_LOST = "session.context_lost"
# as of `turn`; `missing`: the number of later turns that the agent does not know of
SESSION_CONTEXT_RESTORED = "session.context_restored"
SESSION_STORE_RETURNED = "session.store_returned"
SESSION_CLOSED = "session.closed"
# its host has released it; the next owner serves the waiting asks (`queued`)
SESSION_LEFT = "session.left"
# its host has released it together with its process, which a keeper holds for the next owner
SESSION_HANDED_OVER = "session.handed_over"
CLOCK_WARNING = "clock.warning"
TASKS_CHANGED = "tasks.changed"  # the background tasks that the agent's process has now
# the usage of the open turn so far, and the part of it (`added`) that no earlier event has
USAGE_REPORTED = "usage.reported"
# the agent repeats a failed model call by itself
PROVIDER_RETRYING = "provider.retrying"
# usage windows of the agent's account, when a report changes them
LIMITS_CHANGED = "limits.changed"
# most of a cap is used, and all of it is used; `scope`: session, host or caller
BUDGET_WARNING = "budget.warning"
BUDGET_EXCEEDED = "budget.exceeded"
BUDGET_RAISED = "budget.raised"  # a person has raised the session's own budget
# another agent of the session serves the next turns: `from`, `to`, and why
SESSION_FELL_BACK = "session.fell_back"
# Created for one reader, never stored: the events that retention has removed.
STREAM_GAP = "stream.gap"

# Kinds whose data is the line itself.
FRAMES = frozenset((UPDATE, RECITED, SENT))
# Frames from the agent. No caller waits until one of them is stored.
OUTPUT = frozenset((UPDATE, RECITED))

Updates = list[dict[str, Any]]

_kind_of = itemgetter(1)


def is_output(entries: Sequence[Entry]) -> bool:
    """Whether all entries are frames from the agent, as nearly all are. Costs little per entry."""
    return OUTPUT.issuperset(map(_kind_of, entries))


def _nothing(_: bytes) -> Updates:
    return []


class Project(msgspec.Struct, frozen=True, gc=False):
    """Functions of a dialect that translate one frame to ACP session updates.

    `whole`: the complete updates in the frame; over all frames these cover everything once.
    `partial`: the part that the model has sent of a text that a later frame contains whole.
    """

    whole: Callable[[bytes], Updates]
    partial: Callable[[bytes], Updates] = _nothing


_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder()


class Event(msgspec.Struct, frozen=True, gc=False):
    """One event of one session.

    `seq` counts from 1 without gaps, across epochs. A `stream.gap` has the seq 0.
    """

    session: str
    epoch: int
    seq: int
    at: float
    turn: str | None
    kind: str
    data: bytes
    # Translates a frame for a reader; set by code that reads on behalf of one.
    project: Project | None = None

    @property
    def cursor(self) -> str:
        """The reader's place after this event: `epoch.seq`."""
        return f"{self.epoch}.{self.seq}"

    @property
    def body(self) -> dict[str, Any]:
        """The decoded data of an event.

        For a frame from the agent: its `updates` as ACP defines them, possibly empty. For a frame
        to the agent: empty. `frame` has the original frame.
        """
        if self.kind == UPDATE:
            return {"updates": [] if self.project is None else self.project.whole(self.data)}
        return {} if self.is_frame else cast("dict[str, Any]", _decoder.decode(self.data))

    @property
    def partial(self) -> Updates:
        """The updates in a frame that holds only a part of a text.

        A later frame repeats the whole text. So this is for a reader that shows a text as it grows,
        and then replaces it.
        """
        return (
            [] if self.kind != UPDATE or self.project is None else self.project.partial(self.data)
        )

    @property
    def frame(self) -> bytes | None:
        """The line that the agent wrote or received; None for Banksman's own kinds."""
        return self.data if self.is_frame else None

    @property
    def is_frame(self) -> bool:
        """Whether the data is a frame, to or from the agent."""
        return self.kind in FRAMES


def storable(value: Any) -> Any:
    """Return a copy of a value as the log would return it.

    Raises TypeError, ValueError or RecursionError if the log cannot store it.
    """
    return _decoder.decode(_encoder.encode(value))


def named(caller: str | None) -> dict[str, str]:
    """Return the member that names the caller of an action. A caller without a name has none."""
    return {} if caller is None else {"caller": caller}


def entry(turn: str | None, kind: str, /, **body: object) -> Entry:
    """Build an entry of one of Banksman's own kinds."""
    return turn, kind, _encoder.encode(body)


def gap(session: str, first: int, last: int) -> Event:
    """Build the event that a reader gets in place of the events that retention has removed."""
    return Event(
        session, 0, 0, 0.0, None, STREAM_GAP, _encoder.encode({"first": first, "last": last})
    )
