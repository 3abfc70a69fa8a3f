"""The log over HTTP: a page of it or a stream, of one session or of many."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from typing import Any

import msgspec

from banksman import Event
from banksman.errors import NotFound
from banksman.server.api.messages import event_messages as messages
from banksman.server.api.messages.event_messages import EVENTS_MAX
from banksman.server.api.route import Asgi, HttpAnswer, Route, RouteCall
from banksman.server.context import Context
from banksman.server.problems import Problem
from banksman.server.streams.follower import Follower
from banksman.server.streams.sources import ManySessions, OneSession, StreamForm, encode
from banksman.sessions.session import Session
from banksman.store.log import READ_EVENTS_MAX

# Pages of a session's log: what follows a cursor, or what is right before one; with the agent's frames, or without.
#
# Each event is shown as a stream would show it: one way of showing, and no second. A page without frames may have to
# look through very many to find a few, so it is read in slices, between which the loop is everybody's, and what is not
# wanted is passed over by its kind alone, before anything of it is decoded.

# A page ends before the event that exceeds it, whatever `limit` says: the next one begins there.
PAGE_BYTES_MAX = 4 << 20
SLICE_EVENTS_MAX = 250


class PageRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a reader of a page asks for."""

    limit: int
    raw: bool = False
    partial: bool = False
    frames: bool = True

    def shown(self, event: Event) -> msgspec.Raw | None:
        """None: it is passed over."""
        if event.is_frame and not self.frames:
            return None
        return msgspec.Raw(encode(event, raw=self.raw, partial=self.partial))


async def page_after(session: Session, cursor: str | None, wanted: PageRequest) -> dict[str, Any]:
    """`next` is behind all that was looked at: who comes back does not look through it again."""
    events: list[msgspec.Raw] = []
    size = 0
    gap: tuple[int, int] | None = None
    place = cursor
    is_full = False
    while not is_full:
        page = await session.page(place, limit=wanted.limit if wanted.frames else READ_EVENTS_MAX)
        gap = gap or page.gap
        for event in page.events:
            if (shown := wanted.shown(event)) is not None:
                size += len(memoryview(shown))
                if events and size > PAGE_BYTES_MAX:
                    is_full = True
                    break
                events.append(shown)
            place = event.cursor
            if len(events) == wanted.limit:
                is_full = True
                break
        is_full = is_full or wanted.frames or not page.events
    return {
        "events": events,
        "next": place,
        "head": await session.head(),
        **({} if gap is None else {"gap": {"first": gap[0], "last": gap[1]}}),
    }


async def page_before(session: Session, cursor: str, wanted: PageRequest) -> dict[str, Any]:
    """The last ones before a cursor, oldest first. What does not fit is left out at the old end. `next` leads forward,
    as ever; backward it goes on before the first that is shown."""
    events: deque[msgspec.Raw] = deque()
    size = 0
    place: str | int = cursor
    last: str | None = None
    is_full = False
    while not is_full:
        # What is shown is read no further back than this: if it is long, most of it would be read for nothing.
        left = min(wanted.limit - len(events), SLICE_EVENTS_MAX) if wanted.frames else READ_EVENTS_MAX
        found = await session.page_before(place, limit=left)
        for event in reversed(found):
            place = event.seq
            if (shown := wanted.shown(event)) is not None:
                size += len(memoryview(shown))
                if events and size > PAGE_BYTES_MAX:
                    is_full = True
                    break
                events.appendleft(shown)
                last = last or event.cursor
            if len(events) == wanted.limit:
                is_full = True
                break
        is_full = is_full or not found
    kept = await session.page(None, limit=1)
    return {
        "events": list(events),
        "next": last,
        "head": await session.head(),
        "first": kept.events[0].cursor if kept.events else None,
    }


STREAMS = (StreamForm.SSE.value, StreamForm.NDJSON.value)
# As many as a URL has room for.
SESSIONS_MAX = 500
# No position of any store is called so.
NOW = "now"


async def of_session(call: RouteCall) -> HttpAnswer | Asgi:
    context: Context = call.context
    query: messages.ReadEvents = call.query
    session = context.session(call.path["id"])
    form = _form(call)
    wanted = PageRequest(limit=min(query.limit, EVENTS_MAX), raw=query.raw, partial=query.partial, frames=query.frames)
    if query.before is not None:
        if query.after is not None:
            raise Problem(422, "BadRequest", "a page is after a cursor or before one", hint="after=, or before=")
        if form is not None:
            raise Problem(422, "BadRequest", "a stream leads forward", hint="before= is for a page: ask for JSON")
        return HttpAnswer(await page_before(session, query.before, wanted))
    after = query.after if query.after is not None else call.header("last-event-id")
    if form is not None:
        source = OneSession(session, raw=query.raw, partial=query.partial, frames=query.frames)
        return Follower(context.streams, source, await source.begin(after or None), form, kind="session")
    return HttpAnswer(await page_after(session, after or None, wanted))


async def of_many(call: RouteCall) -> Asgi:
    context: Context = call.context
    query: messages.FollowMany = call.query
    wanted: frozenset[str] | None = None
    if query.sessions is not None:
        names = _names(query.sessions, "sessions")
        if not names:
            raise Problem(400, "BadRequest", f"sessions names 1 to {SESSIONS_MAX} sessions", hint="sessions=a,b")
        wanted = frozenset(context.session(name).id for name in names)
    frames_of = None if query.frames_of is None else _known(context, _names(query.frames_of, "frames_of"))
    after = query.after if query.after is not None else call.header("last-event-id")
    if after == NOW and (came_back := call.header("last-event-id")):
        # A browser that lost its connection asks for the same URL again: it is to miss nothing of what came meanwhile.
        after = came_back
    source = ManySessions(context.host, wanted, raw=query.raw, partial=query.partial, frames_of=frames_of)
    place = await (source.end() if after == NOW else source.begin(after or None))
    return Follower(context.streams, source, place, _form(call) or StreamForm.SSE, kind="many")


def _names(listed: str, parameter: str) -> list[str]:
    names = [name for name in listed.split(",") if name]
    if len(names) > SESSIONS_MAX:
        hint = f"{parameter}=a,b"
        raise Problem(400, "BadRequest", f"{parameter} names at most {SESSIONS_MAX} sessions", hint=hint)
    return names


def _known(context: Context, names: list[str]) -> frozenset[str]:
    """Their ids. Of one that is not there nothing can come: whoever comes back to a stream of everything is not turned
    away because one of those that it watched was deleted meanwhile."""
    found: set[str] = set()
    for name in names:
        with suppress(NotFound):
            found.add(context.session(name).id)
    return frozenset(found)


def _form(call: RouteCall) -> StreamForm | None:
    """What `Accept` asks for; None: a page."""
    accepted = [part.partition(";")[0].strip().lower() for part in (call.header("accept") or "").split(",")]
    return next((form for word in accepted for form in StreamForm if form.value == word), None)


ROUTES = (
    Route(
        method="GET",
        path="/v1/sessions/{id}/events",
        handle=of_session,
        summary="Read the events of a session: a page, or a stream with `Accept`.",
        query=messages.ReadEvents,
        answer=messages.Events,
        streams=STREAMS,
        problems=(410, 422, 429),
        # A page without frames may have to look through very many.
        waits=True,
    ),
    Route(
        method="GET",
        path="/v1/events",
        handle=of_many,
        summary="Follow the events of many sessions over one stream, in the order of their commits.",
        query=messages.FollowMany,
        answer=None,
        streams=STREAMS,
        problems=(404, 410, 422, 429),
    ),
)
