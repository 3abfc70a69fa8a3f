"""The log over HTTP: a page of it, or a stream; of one session, or of many."""

from __future__ import annotations

import msgspec

from banksman.serve.api import messages
from banksman.serve.api.messages import EVENTS_MAX
from banksman.serve.api.routes import Answer, Asgi, Call, Route
from banksman.serve.context import Context
from banksman.serve.problems import Problem
from banksman.serve.streams.encoding import Form, encode
from banksman.serve.streams.follower import Follower
from banksman.serve.streams.sources import ManySessions, OneSession

STREAMS = (Form.SSE.value, Form.NDJSON.value)
# A page ends before the event that exceeds it, whatever `limit` says: the next one begins there.
PAGE_BYTES_MAX = 4 << 20
# As many as a URL has room for.
SESSIONS_MAX = 500


async def of_session(call: Call) -> Answer | Asgi:
    context: Context = call.context
    query: messages.ReadEvents = call.query
    session = context.session(call.path["id"])
    after = query.after if query.after is not None else call.header("last-event-id")
    form = _form(call)
    if form is not None:
        source = OneSession(session, raw=query.raw)
        return Follower(context.streams, source, await source.begin(after or None), form, kind="session")
    page = await session.page(after or None, limit=min(query.limit, EVENTS_MAX))
    # Each as a stream would show it; one way of showing, and no second.
    events: list[msgspec.Raw] = []
    size = 0
    for event in page.events:
        data = encode(event, raw=query.raw)
        size += len(data)
        if events and size > PAGE_BYTES_MAX:
            break
        events.append(msgspec.Raw(data))
    shown = {
        "events": events,
        "next": page.events[len(events) - 1].cursor if events else after or None,
        "head": await session.head(),
        **({} if page.gap is None else {"gap": {"first": page.gap[0], "last": page.gap[1]}}),
    }
    return Answer(shown)


async def of_many(call: Call) -> Asgi:
    context: Context = call.context
    query: messages.FollowMany = call.query
    wanted: frozenset[str] | None = None
    if query.sessions is not None:
        names = [name for name in query.sessions.split(",") if name]
        if not 1 <= len(names) <= SESSIONS_MAX:
            raise Problem(400, "BadRequest", f"sessions names 1 to {SESSIONS_MAX} sessions", hint="sessions=a,b")
        wanted = frozenset(context.session(name).id for name in names)
    after = query.after if query.after is not None else call.header("last-event-id")
    source = ManySessions(context.host, wanted, raw=query.raw)
    place = await source.begin(after or None)
    return Follower(context.streams, source, place, _form(call) or Form.SSE, kind="many")


def _form(call: Call) -> Form | None:
    """What `Accept` asks for; None: a page."""
    accepted = [part.partition(";")[0].strip().lower() for part in (call.header("accept") or "").split(",")]
    return next((form for word in accepted for form in Form if form.value == word), None)


ROUTES = (
    Route(
        method="GET",
        path="/v1/sessions/{id}/events",
        handle=of_session,
        summary="The events of a session after a cursor: a page, or a stream by Accept.",
        query=messages.ReadEvents,
        answer=messages.Events,
        streams=STREAMS,
        problems=(410, 422, 429),
    ),
    Route(
        method="GET",
        path="/v1/events",
        handle=of_many,
        summary="The events of many sessions over one stream, in the order of their commits.",
        query=messages.FollowMany,
        answer=None,
        streams=STREAMS,
        problems=(404, 410, 422, 429),
    ),
)
