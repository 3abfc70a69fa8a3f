"""Events over HTTP: of one session, of many sessions, and the ends of commands.

The pages are made here. A stream is only opened here: `streams/` reads, encodes and sends it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import msgspec

from banksman import Command, Event
from banksman.errors import NotFound
from banksman.server.access import authorization
from banksman.server.access.roles import Action
from banksman.server.api import command_routes
from banksman.server.api.messages import event_messages as messages
from banksman.server.api.messages.event_messages import EVENTS_MAX
from banksman.server.api.route import Asgi, HttpAnswer, Route, RouteCall
from banksman.server.context import Context
from banksman.server.http.auth import bearer
from banksman.server.problems import Problem
from banksman.server.streams.event_format import StreamForm, encode
from banksman.server.streams.follower import Follower
from banksman.server.streams.sources import CommandEnds, ManySessions, OneSession, Viewer
from banksman.sessions.session import Session
from banksman.store.log_values import READ_EVENTS_MAX

# Pages of a session's log: the events after a cursor or right before one, with or without frames.
#
# Each event is encoded as in a stream: there is one encoding only. A page without frames may have
# to scan very many events to find a few. So it is read in slices, and the event loop runs between
# them. Unwanted events are skipped by their kind, before they are decoded.

# Size limit of a page, whatever `limit` says. The next page begins at the event that exceeds it.
PAGE_BYTES_MAX = 4 << 20
SLICE_EVENTS_MAX = 250
STREAMS = (StreamForm.SSE.value, StreamForm.NDJSON.value)
# Names that fit in a URL.
SESSIONS_MAX = 500
# No store uses this word as a position.
NOW = "now"


class PageRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Selection and format of a page's events."""

    limit: int
    raw: bool = False
    partial: bool = False
    frames: bool = True

    def shown(self, event: Event) -> msgspec.Raw | None:
        """Encode an event; None if it is left out."""
        if event.is_frame and not self.frames:
            return None
        return msgspec.Raw(encode(event, raw=self.raw, partial=self.partial))


async def page_after(session: Session, cursor: str | None, wanted: PageRequest) -> dict[str, Any]:
    """Return the page after a cursor.

    `next` is after all events that were scanned, so that the next request does not scan them again.
    """
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
    """Return the last events before a cursor, oldest first.

    If they do not fit, the oldest ones are left out. `next` leads forward, as always. To page
    further back, use the cursor of the first event as `before`.
    """
    events: deque[msgspec.Raw] = deque()
    size = 0
    place: str | int = cursor
    last: str | None = None
    is_full = False
    while not is_full:
        # Read at most one slice at a time: if the events are long, most of a larger read would be
        # for nothing.
        left = (
            min(wanted.limit - len(events), SLICE_EVENTS_MAX) if wanted.frames else READ_EVENTS_MAX
        )
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


async def of_session(call: RouteCall) -> HttpAnswer | Asgi:
    """Return a page of a session's events, or stream them."""
    context: Context = call.context
    query: messages.ReadEvents = call.query
    session = context.session(call.path["id"])
    form = _form(call)
    wanted = PageRequest(
        limit=min(query.limit, EVENTS_MAX),
        raw=query.raw,
        partial=query.partial,
        frames=query.frames,
    )
    if query.before is not None:
        if query.after is not None:
            hint = "pass one of them"
            raise Problem(
                422, "BadRequest", "a page cannot have both after= and before=", hint=hint
            )
        if form is not None:
            hint = "leave before= out, or ask for JSON"
            raise Problem(422, "BadRequest", "a stream cannot have before=", hint=hint)
        return HttpAnswer(await page_before(session, query.before, wanted))
    after = query.after if query.after is not None else call.header("last-event-id")
    if form is not None:
        source = OneSession(session, raw=query.raw, partial=query.partial, frames=query.frames)
        return Follower(
            context.streams,
            source,
            await source.begin(after or None),
            form,
            kind="session",
            is_allowed=guard(call, session),
        )
    return HttpAnswer(await page_after(session, after or None, wanted))


async def of_many(call: RouteCall) -> Asgi:
    """Stream the events of many sessions."""
    context: Context = call.context
    query: messages.FollowMany = call.query
    wanted: frozenset[str] | None = None
    if query.sessions is not None:
        names = _names(query.sessions, "sessions")
        if not names:
            raise Problem(
                400,
                "BadRequest",
                f"sessions= must name 1 to {SESSIONS_MAX} sessions",
                hint="pass sessions=a,b",
            )
        found = [await authorization.visible(context, call.caller, name) for name in names]
        wanted = frozenset(session.id for session in found)
    frames_of = (
        None if query.frames_of is None else _known(context, _names(query.frames_of, "frames_of"))
    )
    after = query.after if query.after is not None else call.header("last-event-id")
    if after == NOW and (came_back := call.header("last-event-id")):
        # A browser that lost its connection repeats the same URL. It must not miss the events of
        # the meantime, so its last event id wins over `now`.
        after = came_back
    source = ManySessions(
        context.host,
        wanted,
        raw=query.raw,
        partial=query.partial,
        frames_of=frames_of,
        viewer=_viewer(call),
    )
    place = await (source.end() if after == NOW else source.begin(after or None))
    form = _form(call) or StreamForm.SSE
    return Follower(context.streams, source, place, form, kind="many", is_allowed=guard(call, None))


def guard(call: RouteCall, session: Session | None) -> Callable[[], Awaitable[bool]] | None:
    """Return the check that an open stream of a named caller repeats.

    The token may be revoked or expire, and the session may be shared with others only.
    """
    context: Context = call.context
    authentication = context.authentication
    if call.caller.name is None or authentication is None:
        return None
    token = bearer(call.request.headers)

    async def is_allowed() -> bool:
        holder = authentication.caller_of(token)
        # The holder may be a proxy, which sent the request for one of its users.
        is_valid = holder is not None and replace(holder, name=call.caller.name) == call.caller
        return is_valid and (
            session is None or await authorization.is_visible(context, call.caller, session)
        )

    return is_allowed


def _viewer(call: RouteCall) -> Viewer | None:
    """Return the filter of a stream of many sessions; None if the caller may see all."""
    context: Context = call.context
    if not call.caller.is_limited:
        return None

    async def sees(id: str) -> bool:
        try:
            return await authorization.is_visible(context, call.caller, context.session(id))
        except NotFound:
            return False  # Deleted.

    return Viewer(call.caller, sees)


async def of_commands(call: RouteCall) -> Asgi:
    """Stream the ends of commands."""
    query: messages.FollowCommands = call.query
    source = CommandEnds(call.context.host.command_registry, _ended)
    after = call.header("last-event-id") or query.after
    place = source.end() if after == NOW else source.begin(after or None)
    form, wanted = _form(call), call.header("accept") or "*/*"
    if form is None and "*" not in wanted:
        detail = f"a stream of commands cannot be {wanted}"
        hint = f"accept {' or '.join(each.value for each in StreamForm)}"
        raise Problem(406, "NotAcceptable", detail, hint=hint)
    return Follower(
        call.context.streams,
        source,
        place,
        form or StreamForm.SSE,
        kind="commands",
        is_allowed=guard(call, None),
    )


def _ended(command: Command, cursor: str) -> bytes:
    return msgspec.json.encode(messages.CommandEnded(cursor, command_routes.shown(command)))


def _names(listed: str, parameter: str) -> list[str]:
    names = [name for name in listed.split(",") if name]
    if len(names) > SESSIONS_MAX:
        hint = f"pass fewer names, as in {parameter}=a,b"
        raise Problem(
            400, "BadRequest", f"{parameter}= can name at most {SESSIONS_MAX} sessions", hint=hint
        )
    return names


def _known(context: Context, names: list[str]) -> frozenset[str]:
    """Return the ids of these sessions, without those that do not exist.

    A client that resumes a stream of all sessions must not be refused because a session that it
    watched was deleted meanwhile.
    """
    found: set[str] = set()
    for name in names:
        with suppress(NotFound):
            found.add(context.session(name).id)
    return frozenset(found)


def _form(call: RouteCall) -> StreamForm | None:
    """Return the stream format that `Accept` names; None for a page."""
    accepted = [
        part.partition(";")[0].strip().lower() for part in (call.header("accept") or "").split(",")
    ]
    return next((form for word in accepted for form in StreamForm if form.value == word), None)


ROUTES = (
    Route(
        method="GET",
        path="/v1/sessions/{id}/events",
        action=Action.READ,
        handle=of_session,
        summary="Read the events of a session: a page, or a stream if `Accept` asks for one.",
        query=messages.ReadEvents,
        answer=messages.Events,
        streams=STREAMS,
        problems=(410, 422, 429),
        # A page without frames may have to scan very many events.
        waits=True,
    ),
    Route(
        method="GET",
        path="/v1/events",
        action=Action.LIST,
        handle=of_many,
        summary=(
            "Follow the events of many sessions over one stream, in the order of their commits."
        ),
        query=messages.FollowMany,
        answer=None,
        streams=STREAMS,
        problems=(404, 410, 422, 429),
    ),
    Route(
        method="GET",
        path="/v1/commands/events",
        action=Action.OPERATE,
        handle=of_commands,
        summary="Follow the ends of commands over one stream, each once and in order.",
        query=messages.FollowCommands,
        answer=None,
        streams=(StreamForm.SSE.value,),
        problems=(406, 410, 422, 429),
    ),
)
