"""Events: pages of them, streams, and a type for each kind of event in the OpenAPI description."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from banksman.server.api.messages import event_body_messages as bodies
from banksman.server.api.messages.common_messages import Query

# A page of events, over HTTP: more is cut.
EVENTS_DEFAULT, EVENTS_MAX = 100, 1000


class ReadEvents(Query):
    """Which events, and how they are shown.

    Attributes:
        after: Cursor: the events after it. Without it, from the first event.
        before: Cursor: the last events before it. For a page only.
        limit: Number of events of a page, at most 1000.
        raw: Whether to add the agent's own line (`frame`).
        frames: Whether to show what the agent said and was told (`update`, `recited`, `sent`).
        partial: Whether to show text that the agent has not completed yet.
    """

    after: str | None = None
    before: str | None = None
    limit: Annotated[int, Meta(ge=1)] = EVENTS_DEFAULT
    raw: bool = False
    frames: bool = True
    partial: bool = False


class FollowMany(Query):
    """Which sessions, and how their events are shown.

    Attributes:
        after: Position: the events after it. `now`: only events that are still to come. Without it, from the first.
        sessions: Ids or names of sessions, separated by commas. Without it, all sessions.
        frames_of: Sessions whose frames (`update`, `recited`, `sent`) are shown, separated by commas. Without it, all.
        raw: Whether to add the agent's own line (`frame`).
        partial: Whether to show text that the agent has not completed yet.
    """

    after: str | None = None
    sessions: str | None = None
    frames_of: str | None = None
    raw: bool = False
    partial: bool = False


class Event(Struct, kw_only=True, omit_defaults=True):
    """An event of a session's log.

    Attributes:
        cursor: Its place in the log of its session (`after`, `Last-Event-ID`).
        session: Id of its session.
        epoch: Generation of the writer.
        seq: Its number in the session, counted from 1.
        at: When it happened, in seconds since 1970.
        turn: Turn that it belongs to.
        kind: What happened. There will be more kinds: ignore those that you do not know.
        body: The details, by kind.
        frame: The agent's own line, with `raw`.
        frame_base64: The same in base64, if the line is not UTF-8.
        position: Its place among the events of many sessions (`after`), in NDJSON of `/v1/events` only.
    """

    cursor: str
    session: str
    epoch: int
    seq: int
    at: float
    turn: str | None
    kind: str
    body: dict[str, Any]
    frame: str | None = None
    frame_base64: str | None = None
    position: str | None = None


class Gap(Struct):
    """Events that are not kept any more.

    Attributes:
        first: Number of the first one.
        last: Number of the last one.
    """

    first: int
    last: int


class Events(Struct, omit_defaults=True):
    """A page of events.

    Attributes:
        events: The events, oldest first. An empty list is the end.
        next: Where to go on (`after`).
        head: Cursor of the last event there is.
        gap: Events before the first one that are not kept any more.
        first: With `before`: cursor of the oldest event that is kept.
    """

    events: list[Event]
    next: str | None
    head: str | None
    gap: Gap | None = None
    first: str | None = None


# A type for each kind of event, and for the marks that a stream sends besides events.
#
# They are for the OpenAPI description, so that generated clients know what is in an event. Nothing is decoded by them.

BODIES: dict[str, type[Struct]] = {
    "update": bodies.UpdateBody,
    "recited": bodies.RecitedBody,
    "sent": bodies.SentBody,
    "turn.queued": bodies.TurnQueuedBody,
    "turn.started": bodies.TurnStartedBody,
    "turn.interrupted": bodies.TurnInterruptedBody,
    "turn.requeued": bodies.TurnRequeuedBody,
    "turn.ended": bodies.TurnEndedBody,
    "queue.changed": bodies.QueueChangedBody,
    "process.started": bodies.ProcessStartedBody,
    "process.exited": bodies.ProcessExitedBody,
    "process.stopped": bodies.ProcessStoppedBody,
    "process.swept": bodies.ProcessSweptBody,
    "process.left": bodies.ProcessLeftBody,
    "process.retired": bodies.ProcessRetiredBody,
    "process.backed_off": bodies.ProcessBackedOffBody,
    "question.asked": bodies.QuestionAskedBody,
    "question.answered": bodies.QuestionAnsweredBody,
    "question.kept": bodies.QuestionKeptBody,
    "session.opened": bodies.SessionOpenedBody,
    "session.imported": bodies.SessionImportedBody,
    "session.recovered": bodies.SessionRecoveredBody,
    "session.conversation": bodies.SessionConversationBody,
    "session.setting": bodies.SessionSettingBody,
    "session.context_lost": bodies.SessionContextLostBody,
    "session.context_restored": bodies.SessionContextRestoredBody,
    "session.store_returned": bodies.SessionStoreReturnedBody,
    "session.closed": bodies.SessionClosedBody,
    "session.left": bodies.SessionLeftBody,
    "clock.warning": bodies.ClockWarningBody,
}


def _event_type(kind: str, body: type[Struct]) -> type[Struct]:
    name = "".join(part.capitalize() for part in re.split(r"[._]", kind))
    return msgspec.defstruct(
        f"{name}Event",
        [("kind", Literal[kind]), ("body", body)],
        bases=(Event,),
        module=__name__,
        kw_only=True,
        namespace={"__doc__": (body.__doc__ or "").partition("\n")[0]},
    )


EVENTS: dict[str, type[Struct]] = {kind: _event_type(kind, body) for kind, body in BODIES.items()}


class OtherEvent(Event, kw_only=True, omit_defaults=True):
    """An event of a kind that this description does not know."""


# -- made for one reader ---------------------------------------------------------------------------------------------
class StreamLive(Struct):
    """All events that were there have been sent. Once for each connection.

    Attributes:
        kind: Always `stream.live`.
        head: Place up to which the log was read.
    """

    kind: Literal["stream.live"]
    head: str | None


class StreamHeartbeat(Struct):
    """Nothing else was sent for a while.

    Attributes:
        kind: Always `stream.heartbeat`.
        head: Place up to which the log was read.
    """

    kind: Literal["stream.heartbeat"]
    head: str | None


class StreamGap(Struct):
    """Events that are not kept any more.

    Attributes:
        kind: Always `stream.gap`.
        session: Id of their session.
        first: Number of the first one.
        last: Number of the last one.
    """

    kind: Literal["stream.gap"]
    session: str
    first: int
    last: int


class StreamClosing(Struct):
    """The server ends the stream. Connect again with the last id.

    Attributes:
        kind: Always `stream.closing`.
        reason: Why.
        retry_seconds: Seconds to wait before that.
    """

    kind: Literal["stream.closing"]
    reason: str
    retry_seconds: float


MARKS: tuple[type[Struct], ...] = (StreamLive, StreamHeartbeat, StreamGap, StreamClosing)
