"""What a session's log holds: entries as they are written, events as they are read.

An entry is one durable line: the turn it belongs to, its kind, and its data. For the agent's own frames the data is the
line itself, byte for byte; for our own kinds it is a JSON object. Entries are plain tuples and are written in chunks
that share session, epoch and time, because this is the one path that every token of every agent takes. An event is an
entry with its place; it is made when somebody reads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import msgspec

# turn id or None, kind, data
Entry = tuple[str | None, str, bytes]

UPDATE = "update"  # a frame from the agent
RECITED = "recited"  # a frame from the agent that repeats what was said before, in another process
SENT = "sent"  # a frame to the agent
TURN_QUEUED = "turn.queued"
TURN_STARTED = "turn.started"
TURN_INTERRUPTED = "turn.interrupted"
TURN_REQUEUED = "turn.requeued"
TURN_ENDED = "turn.ended"
QUEUE_CHANGED = "queue.changed"
PROCESS_STARTED = "process.started"
PROCESS_EXITED = "process.exited"
PROCESS_STOPPED = "process.stopped"  # by the ladder: which rungs were taken, and when
PROCESS_SWEPT = "process.swept"
PROCESS_LEFT = "process.left"  # what an interrupted turn's tools left running, and by policy goes on
PROCESS_RETIRED = "process.retired"  # it is stopped for a reason of ours, with nothing open
PROCESS_BACKED_OFF = "process.backed_off"
QUESTION_ASKED = "question.asked"  # `question`: our name for it, for ever; `request`: the agent's, in one process
QUESTION_ANSWERED = "question.answered"  # the one answer: allow, deny, cancelled or withdrawn; and `by` whom
QUESTION_KEPT = "question.kept"  # the process that asked is gone; the answer is for who asks the same again
SESSION_OPENED = "session.opened"  # how, so that whoever finds it can go on with it
SESSION_IMPORTED = "session.imported"  # what is before it was said elsewhere
SESSION_RECOVERED = "session.recovered"  # its host had died; what was open is settled
SESSION_CONVERSATION = "session.conversation"
SESSION_SETTING = "session.setting"
SESSION_CONTEXT_LOST = "session.context_lost"
SESSION_CONTEXT_RESTORED = "session.context_restored"  # as of `turn`; `missing`: turns that the agent does not know of
SESSION_STORE_RETURNED = "session.store_returned"
SESSION_CLOSED = "session.closed"
SESSION_LEFT = "session.left"  # its host has let go of it; who waits (`queued`) is served by whoever has it next
CLOCK_WARNING = "clock.warning"
# Made for one reader, never stored: it says which events are no longer there.
STREAM_GAP = "stream.gap"

# Their data is the line itself.
FRAMES = frozenset((UPDATE, RECITED, SENT))

Updates = list[dict[str, Any]]


def _nothing(_: bytes) -> Updates:
    return []


class Project(msgspec.Struct, frozen=True, gc=False):
    """How a dialect shows a frame by itself, as ACP has it. `whole`: what is complete in it, which tells everything
    once. `partial`: what the model has said, so far, of something that a later frame will say whole."""

    whole: Callable[[bytes], Updates]
    partial: Callable[[bytes], Updates] = _nothing


_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder()


class Event(msgspec.Struct, frozen=True, gc=False):
    """One event of one session. `seq` counts from 1, dense, across epochs; a `stream.gap` has none (0)."""

    session: str
    epoch: int
    seq: int
    at: float
    turn: str | None
    kind: str
    data: bytes
    # How the session's dialect shows a frame to a reader; given by whoever reads for one.
    project: Project | None = None

    @property
    def cursor(self) -> str:
        return f"{self.epoch}.{self.seq}"

    @property
    def body(self) -> dict[str, Any]:
        """Our own kinds, decoded. Of a frame from the agent its `updates`, as ACP has them, none or several; of one to
        it nothing. The frame as it was is `frame`."""
        if self.kind == UPDATE:
            return {"updates": [] if self.project is None else self.project.whole(self.data)}
        return {} if self.is_frame else cast("dict[str, Any]", _decoder.decode(self.data))

    @property
    def partial(self) -> Updates:
        """Of a frame from the agent that says a part of something: that part. Its whole comes later, and says it again,
        so that this is for who shows a text as it grows, and throws it away then."""
        return [] if self.kind != UPDATE or self.project is None else self.project.partial(self.data)

    @property
    def frame(self) -> bytes | None:
        """The line that the agent said, or was told; None for our own kinds."""
        return self.data if self.is_frame else None

    @property
    def is_frame(self) -> bool:
        return self.kind in FRAMES


def storable(value: Any) -> Any:
    """A copy, as the log will give it back. Raises TypeError, ValueError or RecursionError if it could not hold it."""
    return _decoder.decode(_encoder.encode(value))


def entry(turn: str | None, kind: str, /, **body: object) -> Entry:
    """An entry of one of our own kinds."""
    return turn, kind, _encoder.encode(body)


def gap(session: str, first: int, last: int) -> Event:
    """What a reader is told instead of the events that retention took."""
    return Event(session, 0, 0, 0.0, None, STREAM_GAP, _encoder.encode({"first": first, "last": last}))
