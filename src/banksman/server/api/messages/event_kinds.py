"""A type for each kind of event, and for the marks that a stream sends besides events.

They are for the OpenAPI description, so that generated clients know what is in an event. Nothing is decoded by them.
"""

from __future__ import annotations

import re
from typing import Literal

import msgspec
from msgspec import Struct

from banksman.server.api.messages import event_body_messages as bodies
from banksman.server.api.messages.event_messages import Event

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
