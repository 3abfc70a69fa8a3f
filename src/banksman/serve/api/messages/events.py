"""Events: pages of them, and streams."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

from banksman.serve.api.messages.parts import Query

# A page of events, over HTTP: more is cut.
EVENTS_DEFAULT, EVENTS_MAX = 100, 1000


class ReadEvents(Query):
    """`before`: the last ones before it, instead of those after; for a page only. `frames` false: without what the
    agent said and was told. `partial`: also what it has said of a text that is not complete."""

    after: str | None = None
    before: str | None = None
    limit: Annotated[int, Meta(ge=1)] = EVENTS_DEFAULT
    raw: bool = False
    frames: bool = True
    partial: bool = False


class FollowMany(Query):
    # A position, or "now": what is there is not shown.
    after: str | None = None
    # Separated by commas; ids or names.
    sessions: str | None = None
    # The same; whose frames are shown, besides our own kinds of every session. Not given: everybody's.
    frames_of: str | None = None
    raw: bool = False
    partial: bool = False


class Event(Struct, kw_only=True, omit_defaults=True):
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


class Gap(Struct):
    first: int
    last: int


class Events(Struct, omit_defaults=True):
    """`next`: where to go on; `head`: the last one there is. `gap`: retention took these before the first. `first`, if
    asked for what is before a cursor: the oldest one that is kept."""

    events: list[Event]
    next: str | None
    head: str | None
    gap: Gap | None = None
    first: str | None = None
