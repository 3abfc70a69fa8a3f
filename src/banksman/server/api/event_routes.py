"""The log over HTTP: a page of it, or a stream; of one session, or of many."""

from __future__ import annotations

from contextlib import suppress

from banksman.errors import NotFound
from banksman.server.api import event_pages
from banksman.server.api.messages import event_messages as messages
from banksman.server.api.messages.event_messages import EVENTS_MAX
from banksman.server.api.route import Asgi, HttpAnswer, Route, RouteCall
from banksman.server.context import Context
from banksman.server.problems import Problem
from banksman.server.streams.event_encoding import StreamForm
from banksman.server.streams.follower import Follower
from banksman.server.streams.sources import ManySessions, OneSession

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
    wanted = event_pages.Wanted(
        limit=min(query.limit, EVENTS_MAX), raw=query.raw, partial=query.partial, frames=query.frames
    )
    if query.before is not None:
        if query.after is not None:
            raise Problem(422, "BadRequest", "a page is after a cursor or before one", hint="after=, or before=")
        if form is not None:
            raise Problem(422, "BadRequest", "a stream leads forward", hint="before= is for a page: ask for JSON")
        return HttpAnswer(await event_pages.before(session, query.before, wanted))
    after = query.after if query.after is not None else call.header("last-event-id")
    if form is not None:
        source = OneSession(session, raw=query.raw, partial=query.partial, frames=query.frames)
        return Follower(context.streams, source, await source.begin(after or None), form, kind="session")
    return HttpAnswer(await event_pages.after(session, after or None, wanted))


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
