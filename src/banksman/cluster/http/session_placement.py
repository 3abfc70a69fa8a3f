"""Open a session on a suitable host of the cluster, and ask owners for the state of a list.

A new session opens on this host if it has room and satisfies the session's need. Otherwise it is
offered (`cluster/log/placement.py`), and the first host with room takes it. `filled` completes a
list of sessions with the state that their owners report.

The id of a new session is derived from the idempotency key. So a repeated request, at any front
end, means the same session, and a host that gets the offer a second time finds it. A request with
the name of a session that a host owns means that session, and is forwarded to its owner.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from banksman.cluster.http.forwarded_request import (
    NOT_HERE,
    ForwardedRequest,
    ForwardedResponse,
    response_of,
)
from banksman.cluster.http.owner_proxy import (
    OwnerProxy,
    OwnerSilent,
    RetryPause,
    answered,
    has_owner,
    is_here,
)
from banksman.errors import NoOwner, NotFound, NotOwner, Unreachable
from banksman.server.api.messages import session_messages as messages
from banksman.server.api.messages.session_messages import session_id
from banksman.server.problems import Problem
from banksman.sessions import host_needs

if TYPE_CHECKING:
    from banksman.server.api.route import Result, RouteCall
    from banksman.sessions.session import Session

LOOK_SECONDS_MAX = 1.0
# Owners that are asked concurrently.
HOSTS_AT_ONCE_MAX = 64


async def open_session(proxy: OwnerProxy, call: RouteCall, here: Any) -> Result:
    """Open a session here or on another host. `here`: opens it on this host, given the call."""
    body: messages.OpenSession = call.body
    call = call if call.key is not None else replace(call, key=uuid.uuid4().hex)
    assert call.key is not None
    id = session_id(call.key)
    need = host_needs.need(
        host_needs.checked_labels(body.labels), body.agent if body.command is None else None
    )
    headers = {"content-type": "application/json", "idempotency-key": call.key}
    caller = call.caller
    request = ForwardedRequest("POST", "/v1/sessions", headers, call.data, caller.name, caller.role)
    pause = RetryPause(proxy.patience)
    why = ""
    while pause.left:
        if body.name is not None:
            try:
                await proxy.know(body.name)
            except Unreachable as exc:
                why = str(exc.args[0])
                await proxy.wait_news(id, pause.take())
                continue
        session = _known(call, id, body.name)
        if session is not None and is_here(session):
            return await here(call)
        if session is not None and has_owner(session):
            answer = await proxy.ask(session.id, request, pause.left)
            if not isinstance(answer, OwnerSilent):
                return answered(answer)
            why = answer.why
            await proxy.wait_news(session.id, pause.take())
            continue
        if proxy.may_take() and proxy.hosts_view.can_take(need):
            try:
                return await here(call)
            except NotOwner as exc:
                if not _is_meant(call, id, body.name, exc.ids.get("session")):
                    raise
                # Another host was faster. The next attempt asks it.
            await proxy.wait_news(id, pause.take())
            continue
        proxy.hosts_view.check_satisfiable(need)
        try:
            data = await proxy.cluster.placement.place(
                id, need, request.encoded(), timeout=pause.left
            )
        except Unreachable as exc:
            why = str(exc.args[0])
            await proxy.wait_news(id, pause.take())
            continue
        except NoOwner as exc:
            raise proxy.hosts_view.no_room(need) from exc
        # An empty answer: a host opened the session earlier, and could not report it. The next
        # attempt asks that host.
        if data:
            answer = response_of(data)
            if answer.title == "NotOwner":
                holder = msgspec.json.decode(answer.body).get("ids", {}).get("session")
                is_lost = _is_meant(call, id, body.name, holder)
            else:
                is_lost = answer.status == NOT_HERE
            if not is_lost:
                return answered(answer)
        await proxy.wait_news(id, pause.take())
        why = "the host that took it no longer owns it"
    raise proxy.unreachable(id, why or "no host has taken it", pause, call.key)


def _is_meant(call: RouteCall, id: str, name: str | None, holder: object) -> bool:
    """Return whether `holder`, which another host has, is this session.

    Otherwise it is another session that holds the conversation, and this one is not lost.
    """
    known = _known(call, id, name)
    return holder in (None, id) or (known is not None and known.id == holder)


def _known(call: RouteCall, id: str, name: str | None) -> Session | None:
    """Return the session that was created with this key or has this name; None without one."""
    for word in (id, name):
        if word is not None:
            with suppress(NotFound):
                return call.context.session(word)
    return None


# Lists of sessions on many hosts.
#
# The store knows the sessions and their owners, and that is the list. Only an owner knows the
# current activity of a session (a running turn, an open question) without reading its log. So all
# owners of listed sessions are asked concurrently, with a short timeout. A session of a silent
# owner is shown as unreachable, and nothing is guessed.


async def filled(proxy: OwnerProxy, listed: Sequence[messages.Session]) -> list[messages.Session]:
    """Return the same sessions in the same order, with the state that their owners report."""
    owners = {_host(session) for session in listed if session.phase == "elsewhere"}
    places = asyncio.Semaphore(HOSTS_AT_ONCE_MAX)

    async def ask(host: str) -> tuple[str, dict[str, messages.Session] | None]:
        async with places:
            return host, await _told(proxy, host)

    told = dict(await asyncio.gather(*map(ask, sorted(owners))))
    return [_filled(session, told.get(_host(session))) for session in listed]


def _filled(
    session: messages.Session, told: dict[str, messages.Session] | None
) -> messages.Session:
    if session.phase != "elsewhere":
        return session
    if told is None:
        session.state = "unreachable"
        return session
    # The session may have moved since the store was read.
    found = told.get(session.id)
    if found is None:
        return session
    found.host, found.owner = session.host, session.owner
    return found


async def _told(proxy: OwnerProxy, host: str) -> dict[str, messages.Session] | None:
    """Return the sessions that a host reports, by id; None without a valid answer."""
    with suppress(Problem, msgspec.DecodeError):
        answer = await proxy.ask(
            f"host:{host}", ForwardedRequest("GET", "/v1/sessions"), LOOK_SECONDS_MAX
        )
        if isinstance(answer, ForwardedResponse) and answer.status == 200:
            return {
                each.id: each
                for each in msgspec.json.decode(answer.body, type=messages.Sessions).sessions
            }
    return None


def _host(session: messages.Session) -> str:
    return "" if session.owner is None else session.owner.address.partition("@")[0]
