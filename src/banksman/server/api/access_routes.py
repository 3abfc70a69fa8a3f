"""Access over HTTP: who the caller is, and whom a session is shared with."""

from __future__ import annotations

from banksman.server.access.roles import Action, may
from banksman.server.api.messages import access_messages as messages
from banksman.server.api.route import HttpAnswer, OwnerFallback, Route, RouteCall
from banksman.sessions.session import Session


async def me(call: RouteCall) -> HttpAnswer:
    """Show the caller of this request, and what its role allows."""
    caller = call.caller
    allowed = [action.name.lower() for action in Action if may(caller, action)]
    return HttpAnswer(
        messages.Caller(
            caller.name, str(caller.role), list(caller.sessions), list(caller.agents), allowed
        )
    )


async def look(call: RouteCall) -> HttpAnswer:
    """Show who has opened a session, and whom it is shared with."""
    return await _shown(call, call.context.session(call.path["id"]))


async def share(call: RouteCall) -> HttpAnswer:
    """Share a session with exactly these callers. Streams of the others end."""
    body: messages.Share = call.body
    session = call.context.session(call.path["id"])
    await session.share(body.shared, caller=call.caller.name)
    return await _shown(call, session)


async def _shown(call: RouteCall, session: Session) -> HttpAnswer:
    assert session.known is not None
    access = await call.context.access.of(session.known)
    return HttpAnswer(messages.Shared(access.owner, sorted(access.shared)))


ID = "/v1/sessions/{id}"
ROUTES = (
    Route(
        method="GET",
        path="/v1/caller",
        action=Action.LIST,
        handle=me,
        summary="Show the caller of this request, and what its role allows.",
        answer=messages.Caller,
    ),
    Route(
        method="GET",
        path=f"{ID}/shared",
        action=Action.READ,
        handle=look,
        summary="Show which caller has opened a session, and whom it is shared with.",
        answer=messages.Shared,
    ),
    Route(
        method="PUT",
        path=f"{ID}/shared",
        action=Action.STEER,
        handle=share,
        to_owner=OwnerFallback.NAMED,
        summary="Share a session with these callers, and with no others.",
        body=messages.Share,
        answer=messages.Shared,
        problems=(409, 422),
    ),
)
