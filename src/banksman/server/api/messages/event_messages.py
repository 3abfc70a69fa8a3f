"""Events: pages of them, and streams."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

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
