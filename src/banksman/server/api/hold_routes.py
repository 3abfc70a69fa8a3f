"""Holds over HTTP: begin, show, wait for the grant, release.

A hold of the library belongs to a task and ends with it. A hold of a client has only its id, so it
ends by itself if the client sends no ask for `hold_idle_seconds`.
"""

from __future__ import annotations

import asyncio

from banksman.errors import QueueFull
from banksman.server.access import authorization
from banksman.server.access.roles import Action
from banksman.server.api import turn_routes
from banksman.server.api.messages import turn_messages as messages
from banksman.server.api.messages.common_messages import WAIT_SECONDS_MAX
from banksman.server.api.route import HttpAnswer, OwnerFallback, Route, RouteCall
from banksman.sessions.queue_calls import no_hold
from banksman.sessions.session import Session
from banksman.sessions.turn_status import HoldStatus

# Holds that a named caller has in one session. Each keeps the session for `hold_idle_seconds`, also
# if its holder never asks in it, so an unlimited number would keep it for hours.
HOLDS_OF_CALLER_MAX = 16


async def begin(call: RouteCall) -> HttpAnswer:
    """Begin a hold. Responds at once: the hold is granted, or waits in the queue."""
    body: messages.BeginHold = call.body
    session: Session = call.context.session(call.path["id"])

    async def do() -> HttpAnswer:
        caller = call.caller.name or body.caller
        if call.caller.name is not None:
            _check_room(session, call.caller.name)
        hold = await session.begin_hold(body.priority, caller=caller)
        headers = {"Location": f"/v1/sessions/{session.id}/holds/{hold}"}
        return HttpAnswer(turn_routes.hold(_find(session, hold)), 201, headers)

    async def is_still_so(answer: HttpAnswer) -> bool:
        return any(each.hold == answer.made for each in session.status().holds)

    place = f"holds {session.id} {call.caller.name or ''}"
    return await call.context.once.do(place, call.key, body, do, is_still_so=is_still_so)


async def look(call: RouteCall) -> HttpAnswer:
    """Show a hold; with `wait`, wait until it is granted."""
    query: messages.WaitForHold = call.query
    session: Session = call.context.session(call.path["id"])
    hold = _find(session, call.path["hold"])
    if query.wait and hold.at is None:
        try:
            async with asyncio.timeout(min(query.wait, WAIT_SECONDS_MAX)):
                await session.wait_hold(hold.hold)
        except TimeoutError:
            pass
        hold = _find(session, hold.hold)
    return HttpAnswer(turn_routes.hold(hold))


async def end(call: RouteCall) -> HttpAnswer:
    """Release a hold, or withdraw one that waits."""
    session: Session = call.context.session(call.path["id"])
    hold = _find(session, call.path["hold"])
    authorization.check_hold(call.caller, session.status(), hold.hold, owner=session.opened_by)
    await session.end_hold(hold.hold, caller=call.caller.name)
    return HttpAnswer(status=204)


def _check_room(session: Session, caller: str) -> None:
    count = sum(each.caller == caller for each in session.status().holds)
    if count >= HOLDS_OF_CALLER_MAX:
        message = f"{caller} has {count} holds of this session already"
        raise QueueFull(message, hint="release one of them, or wait until they end")


def _find(session: Session, hold: str) -> HoldStatus:
    """Return a hold of a session, or raise `NotFound`: another process owns it, or it is over."""
    found = next((each for each in session.status().holds if each.hold == hold), None)
    if found is None:
        raise no_hold(hold)
    return found


ID = "/v1/sessions/{id}"
ROUTES = (
    Route(
        method="POST",
        path=f"{ID}/holds",
        action=Action.HOLD,
        handle=begin,
        to_owner=OwnerFallback.KEYED,
        summary="Reserve the session for several asks in a row. Responds before the grant.",
        body=messages.BeginHold,
        answer=messages.QueueHold,
        status=201,
        has_key=True,
        problems=(409, 422, 429),
    ),
    Route(
        method="GET",
        path=f"{ID}/holds/{{hold}}",
        action=Action.READ,
        handle=look,
        to_owner=OwnerFallback.READS,
        summary="Show a hold; with `wait`, wait until it is granted.",
        query=messages.WaitForHold,
        answer=messages.QueueHold,
        waits=True,
    ),
    Route(
        method="DELETE",
        path=f"{ID}/holds/{{hold}}",
        action=Action.HOLD,
        handle=end,
        to_owner=OwnerFallback.NAMED,
        summary="Release a hold. Only its holder, the owner of the session, and operators.",
        status=204,
        problems=(409, 422),
    ),
)
