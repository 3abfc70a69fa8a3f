"""Messages about events: queries, pages, stream marks, and a type for each kind of event."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from banksman.server.api.messages import event_body_messages as bodies
from banksman.server.api.messages import lifecycle_body_messages as lifecycle
from banksman.server.api.messages.command_messages import Command
from banksman.server.api.messages.common_messages import Query

# Number of events of a page; a higher `limit` is reduced.
EVENTS_DEFAULT, EVENTS_MAX = 100, 1000


class ReadEvents(Query):
    """Selection and format of a session's events.

    Attributes:
        after: Cursor. Returns the events after it; without it, all from the first one.
        before: Cursor. Returns the last events before it. For a page only.
        limit: Maximum number of events of a page, at most 1000.
        raw: Whether to add the unchanged line of the agent (`frame`).
        frames: Whether to include frames from and to the agent (`update`, `recited`, `sent`).
        partial: Whether to include text that the agent has not completed yet.
    """

    after: str | None = None
    before: str | None = None
    limit: Annotated[int, Meta(ge=1)] = EVENTS_DEFAULT
    raw: bool = False
    frames: bool = True
    partial: bool = False


class FollowMany(Query):
    """Selection of sessions, and format of their events.

    Attributes:
        after: Position. Streams the events after it. `now`: only future events. Without it, all
            from the first one.
        sessions: Ids or names of sessions, separated by commas. Without it, all sessions.
        frames_of: Sessions whose frames (`update`, `recited`, `sent`) are included, separated by
            commas. Without it, all sessions.
        raw: Whether to add the unchanged line of the agent (`frame`).
        partial: Whether to include text that the agent has not completed yet.
    """

    after: str | None = None
    sessions: str | None = None
    frames_of: str | None = None
    raw: bool = False
    partial: bool = False


class FollowCommands(Query):
    """Place to begin at.

    Attributes:
        after: Cursor of an end. Streams the ends after it. `now`: only future ends. Without it, all
            that are kept.
    """

    after: str | None = None


class CommandEnded(Struct):
    """The end of a command. Its stream does not take the report of `POST /v1/commands/ended`.

    Attributes:
        cursor: Place of the end in the stream (`after`, `Last-Event-ID`).
        command: The command, with its result.
        kind: The kind of the event.
    """

    cursor: str
    command: Command
    kind: Literal["command.ended"] = "command.ended"


class Event(Struct, kw_only=True, omit_defaults=True):
    """An event of a session's log.

    Attributes:
        cursor: Place of the event in the log of its session (`after`, `Last-Event-ID`).
        session: Id of its session.
        epoch: Generation of the session's writer.
        seq: Number of the event in its session, counted from 1.
        at: When it happened, in seconds since 1970.
        turn: Turn that it belongs to.
        kind: What happened. Ignore unknown kinds: new ones will be added.
        body: Details, by kind.
        frame: With `raw`: the unchanged line of the agent.
        frame_base64: The same line in base64, if it is not UTF-8.
        position: Place in the commit order of the store (`after`), in NDJSON of `/v1/events` only.
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
    """Range of events that retention has removed.

    Attributes:
        first: Number of the first removed event.
        last: Number of the last removed event.
    """

    first: int
    last: int


class Events(Struct, omit_defaults=True):
    """A page of events.

    Attributes:
        events: The events, oldest first. An empty list marks the end.
        next: Value of `after` for the next page.
        head: Cursor of the last event of the session.
        gap: Removed events between `after` and the first event of this page.
        first: With `before`: cursor of the oldest event in the store.
    """

    events: list[Event]
    next: str | None
    head: str | None
    gap: Gap | None = None
    first: str | None = None


# A type for each kind of event, and for the marks that a stream sends besides events.
#
# They serve the OpenAPI description, so that generated clients know the members of an event. The
# server decodes nothing with them.

BODIES: dict[str, type[Struct]] = {
    "update": bodies.UpdateBody,
    "recited": bodies.RecitedBody,
    "sent": bodies.SentBody,
    "turn.queued": bodies.TurnQueuedBody,
    "turn.started": bodies.TurnStartedBody,
    "turn.interrupted": bodies.TurnInterruptedBody,
    "turn.requeued": bodies.TurnRequeuedBody,
    "turn.ended": bodies.TurnEndedBody,
    "turn.edited": bodies.TurnEditedBody,
    "queue.changed": bodies.QueueChangedBody,
    "hold.granted": bodies.HoldGrantedBody,
    "hold.ended": bodies.HoldEndedBody,
    "process.started": lifecycle.ProcessStartedBody,
    "process.adopted": lifecycle.ProcessAdoptedBody,
    "process.exited": lifecycle.ProcessExitedBody,
    "process.stopped": lifecycle.ProcessStoppedBody,
    "process.swept": lifecycle.ProcessSweptBody,
    "process.left": lifecycle.ProcessLeftBody,
    "process.retired": lifecycle.ProcessRetiredBody,
    "process.backed_off": lifecycle.ProcessBackedOffBody,
    "question.asked": bodies.QuestionAskedBody,
    "question.answered": bodies.QuestionAnsweredBody,
    "question.kept": bodies.QuestionKeptBody,
    "session.opened": lifecycle.SessionOpenedBody,
    "session.shared": lifecycle.SessionSharedBody,
    "session.imported": lifecycle.SessionImportedBody,
    "session.recovered": lifecycle.SessionRecoveredBody,
    "session.conversation": lifecycle.SessionConversationBody,
    "session.setting": lifecycle.SessionSettingBody,
    "session.context_lost": lifecycle.SessionContextLostBody,
    "session.context_restored": lifecycle.SessionContextRestoredBody,
    "session.store_returned": lifecycle.SessionStoreReturnedBody,
    "session.closed": lifecycle.SessionClosedBody,
    "session.left": lifecycle.SessionLeftBody,
    "session.handed_over": lifecycle.SessionHandedOverBody,
    "clock.warning": bodies.ClockWarningBody,
    "tasks.changed": bodies.TasksChangedBody,
    "usage.reported": bodies.UsageReportedBody,
    "provider.retrying": bodies.ProviderRetryingBody,
    "limits.changed": bodies.LimitsChangedBody,
    "session.fell_back": lifecycle.SessionFellBackBody,
    "budget.warning": bodies.BudgetWarningBody,
    "budget.exceeded": bodies.BudgetExceededBody,
    "budget.raised": bodies.BudgetRaisedBody,
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


# -- stream marks --------------------------------------------------------------------------------
class StreamLive(Struct):
    """All existing events have been sent. Sent once for each connection.

    Attributes:
        kind: Always `stream.live`.
        head: Cursor or position of the last event that was read.
    """

    kind: Literal["stream.live"]
    head: str | None


class StreamHeartbeat(Struct):
    """Sign of life of a quiet stream.

    Attributes:
        kind: Always `stream.heartbeat`.
        head: Cursor or position of the last event that was read.
    """

    kind: Literal["stream.heartbeat"]
    head: str | None


class StreamGap(Struct):
    """Retention has removed events that the client asked for.

    Attributes:
        kind: Always `stream.gap`.
        session: Id of the session.
        first: Number of the first removed event.
        last: Number of the last removed event.
    """

    kind: Literal["stream.gap"]
    session: str
    first: int
    last: int


class StreamClosing(Struct):
    """The server ends the stream. Reconnect with the last id.

    Attributes:
        kind: Always `stream.closing`.
        reason: Why the stream ends.
        retry_seconds: Seconds to wait before the client reconnects.
    """

    kind: Literal["stream.closing"]
    reason: str
    retry_seconds: float


MARKS: tuple[type[Struct], ...] = (StreamLive, StreamHeartbeat, StreamGap, StreamClosing)
