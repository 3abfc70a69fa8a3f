"""Sessions over HTTP: open, list, show, change, close and explain.

To explain a session, this module also reads its process tree from /proc. On a shared store,
`cluster/http/session_placement.py` chooses the host of a new session.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any, NamedTuple, cast

import msgspec

from banksman import Event
from banksman.cluster.http import session_placement
from banksman.cluster.http.owner_proxy import OwnerProxy
from banksman.errors import NotFound, NotOwner
from banksman.server.access import authorization
from banksman.server.access.roles import OPERATORS, Action, Caller
from banksman.server.api import turn_routes, usage_routes
from banksman.server.api.messages import session_messages as messages
from banksman.server.api.messages.session_messages import SESSIONS_MAX, session_id
from banksman.server.api.route import HttpAnswer, OwnerFallback, Result, Route, RouteCall
from banksman.server.context import Context
from banksman.server.http.start_policy import StartPolicy
from banksman.sessions import known_agents
from banksman.sessions import session as sessions
from banksman.sessions.containment import PARTS, ContainmentStatus
from banksman.sessions.status import Status

log = logging.getLogger("banksman.serve")

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# Limit of processes that are shown.
SHOWN_MAX = 256
# Length of a shown frame: enough to recognise it.
FRAME_CHARACTERS_MAX = 500


class SeenProcess(NamedTuple):
    """A process, as /proc shows it."""

    pid: int
    parent: int
    command: str
    state: str
    rss_bytes: int


def processes_below(pids: Iterable[int]) -> list[SeenProcess]:
    """Return all processes that would end together with these leaders.

    These are the leaders, their descendants, and the processes that their keepers have adopted.
    """
    everything = {seen.pid: seen for seen in _all_processes()} if (wanted := list(pids)) else {}
    children: dict[int, list[SeenProcess]] = {}
    for seen in everything.values():
        children.setdefault(seen.parent, []).append(seen)
    found: list[SeenProcess] = []
    for pid in wanted:
        leader = everything.get(pid)
        # The leader's parent is its keeper, which keeps nothing else.
        waiting = [] if leader is None else list(children.get(leader.parent, ()))
        while waiting and len(found) < SHOWN_MAX:
            seen = waiting.pop(0)
            found.append(seen)
            waiting += children.get(seen.pid, ())
    return found


def _all_processes() -> Iterable[SeenProcess]:
    try:
        names = os.listdir("/proc")
    except OSError:
        return
    for name in names:
        if not name.isdecimal():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                stat = file.read()
        except OSError:
            continue  # The process has ended meanwhile.
        # The name is in parentheses, and may contain some itself.
        command = stat[stat.index(b"(") + 1 : stat.rindex(b")")].decode(errors="replace")
        state, parent, *rest = stat[stat.rindex(b")") + 2 :].split()
        yield SeenProcess(
            int(name), int(parent), command, state.decode(), int(rest[19]) * PAGE_BYTES
        )


async def open_session(call: RouteCall) -> Result:
    """Open a session with an agent, or reopen the session of this name."""
    context: Context = call.context
    if context.proxy is not None and not call.is_forwarded:
        return await session_placement.open_session(context.proxy, call, _open_here)
    return await _open_here(call)


async def _open_here(call: RouteCall) -> HttpAnswer:
    context: Context = call.context
    body: messages.OpenSession = call.body

    async def do() -> HttpAnswer:
        id = None if call.key is None else session_id(call.key)
        session = await _open(context, body, id, call.caller)
        headers = {"Location": f"/v1/sessions/{session.id}"}
        return HttpAnswer(shown(await session.look(), session, call.context.proxy), 201, headers)

    async def is_still_there(answer: HttpAnswer) -> bool:
        return context.has_session(answer.made)

    place = f"sessions {call.caller.name or ''}"
    return await context.once.do(place, call.key, body, do, is_still_so=is_still_there)


async def _open(
    context: Context, body: messages.OpenSession, id: str | None, caller: Caller
) -> sessions.Session:
    if id is not None:
        with suppress(NotFound):
            found = context.host.session(id)  # Created with this key before this server started.
            # A session without events was never confirmed to its client, and its spec is unknown.
            if found.is_open or found.known is None or found.known.seq:
                await authorization.check_own(context, caller, found)
                return found
    policy = context.policy
    profile = known_agents.load(body.agent)
    usual = profile.own_command() if body.command is None else profile.command
    return await context.host.open(
        body.agent,
        cwd=policy.folder(body.cwd),
        name=body.name,
        command=policy.agent(body.command, usual),
        args=body.args,
        env=policy.env(body.env),
        inherit_env=body.inherit_env,
        model=body.model,
        permission_mode=body.permission_mode,
        system_prompt=body.system_prompt,
        mcp_servers=policy.servers(body.mcp_servers),
        options=body.options,
        resume=body.resume,
        fork=body.fork,
        rules=body.rules,
        labels=body.labels,
        id=id,
        on_limit=body.on_limit,
        fallback=[_checked_fallback(policy, name) for name in body.fallback],
        budget=body.budget,
        on_budget=cast(Any, body.on_budget),
        survive=policy.survive(body.survive),
        caller=caller.name,
        only_own=caller.role not in OPERATORS,
        **policy.containment(profile.containment, **{part: getattr(body, part) for part in PARTS}),
    )


def _checked_fallback(policy: StartPolicy, name: str) -> str:
    """Return the name of a fall-back, if the settings allow the command of its profile."""
    policy.agent(None, known_agents.load(name).own_command())
    return name


async def list_sessions(call: RouteCall) -> HttpAnswer:
    """List sessions, oldest first. The next page begins after the last session of this one."""
    query: messages.ListSessions = call.query
    if call.is_forwarded:
        # Another host has the list, and wants the present state of this host's sessions.
        ours = [session for session in call.context.host.our_sessions() if not session.is_closed]
        return HttpAnswer(
            messages.Sessions(
                [shown(each.status(), each, call.context.proxy) for each in ours], None
            )
        )
    limit = min(query.limit, SESSIONS_MAX)
    after: str | None = None
    if query.after is not None:
        after = (await authorization.visible(call.context, call.caller, query.after)).id
    # One session more than shown tells whether there is a next page.
    found = await _visible_after(call, after, limit + 1)
    following = found[limit - 1].id if len(found) > limit else None
    proxy: OwnerProxy | None = call.context.proxy
    statuses = await call.context.unowned_sessions.glance(found[:limit])
    listed = [
        shown(status, session, proxy)
        for status, session in zip(statuses, found[:limit], strict=True)
    ]
    return HttpAnswer(
        messages.Sessions(
            listed if proxy is None else await session_placement.filled(proxy, listed), following
        )
    )


async def _visible_after(call: RouteCall, after: str | None, limit: int) -> list[sessions.Session]:
    """Return the next sessions that the caller may see."""
    context: Context = call.context
    found: list[sessions.Session] = []
    while True:
        page = context.host.sessions(after, limit=limit)
        if not call.caller.is_limited:
            return page
        found += [
            session
            for session in page
            if await authorization.is_visible(context, call.caller, session)
        ]
        if len(found) >= limit or len(page) < limit:
            return found[:limit]
        after = page[-1].id


async def look(call: RouteCall) -> HttpAnswer:
    """Show a session."""
    session = call.context.session(call.path["id"])
    return HttpAnswer(shown(await session.look(), session, call.context.proxy))


async def why(call: RouteCall) -> HttpAnswer:
    """Explain what a session waits for."""
    session = call.context.session(call.path["id"])
    status = await session.look()
    base = shown(status, session, call.context.proxy)
    heard, told = await session.last_frames()
    return HttpAnswer(
        messages.Why(
            **{name: getattr(base, name) for name in messages.Session.__struct_fields__},
            holder_prompt=status.holder_prompt,
            last_in=_frame(heard),
            last_out=_frame(told),
            requests=[
                messages.Request(each.id, each.kind, each.seconds) for each in status.requests
            ],
            asked=[turn_routes.question(each) for each in await session.open_questions()],
            clocks=[messages.Clock(c.name, c.seconds, c.left, c.is_running) for c in status.clocks],
            timers=dict(status.timers),
            pids=list(status.pids),
            tree=[messages.ProcessShown(*process) for process in processes_below(status.pids)],
            counters=dict(status.counters),
            seconds_since_in=status.seconds_since_in,
            seconds_since_out=status.seconds_since_out,
            waits_for_place=status.waits_for_place,
            retry=None if status.retry is None else messages.Retry(**asdict(status.retry)),
            containment=_containment(session.containment, status.containment),
        )
    )


async def stderr(call: RouteCall) -> HttpAnswer:
    """Show what the agent's process has written to stderr."""
    session = call.context.session(call.path["id"])
    return HttpAnswer(messages.SessionStderr(session.stderr()))


def _frame(event: Event | None) -> messages.Frame | None:
    """Convert a frame as the log has it, which is without secrets."""
    if event is None:
        return None
    data = (event.frame or b"")[: 4 * FRAME_CHARACTERS_MAX]
    return messages.Frame(
        event.at, data.decode(errors="replace").rstrip("\n")[:FRAME_CHARACTERS_MAX]
    )


async def change(call: RouteCall) -> HttpAnswer:
    """Change the name, model or permission mode of a session."""
    session = call.context.session(call.path["id"])
    body: messages.ChangeSession = call.body
    if body.name is not msgspec.UNSET:
        await session.rename(body.name)
        # The log of the session has no event of it.
        named = "no name" if body.name is None else f"the name {body.name!r}"
        log.info("session %s has %s: changed by %s", session.id, named, call.caller.name or "-")
    if body.model is not msgspec.UNSET:
        await session.set_model(body.model, caller=call.caller.name)
    if body.permission_mode is not msgspec.UNSET:
        await session.set_permission_mode(body.permission_mode, caller=call.caller.name)
    return HttpAnswer(shown(await session.look(), session, call.context.proxy))


async def close(call: RouteCall) -> HttpAnswer:
    """Close a session and stop its process; with `forget`, also delete its log."""
    session = call.context.session(call.path["id"])
    query: messages.DeleteSession = call.query
    if query.forget:
        await call.context.host.delete(session)
        # Its log is gone, which would have named the caller.
        log.info("session %s deleted by %s", session.id, call.caller.name or "-")
        call.context.streams.pages.clear()
        return HttpAnswer(status=204)
    _check_not_elsewhere(session)
    await session.close(caller=call.caller.name)
    return HttpAnswer(shown(await session.look(), session, call.context.proxy))


def _check_not_elsewhere(session: sessions.Session) -> None:
    """Raise `NotOwner` if another live host owns the session.

    Closing it here would do nothing, and must not look like a success.
    """
    status = session.status()
    if status.phase == "elsewhere" and status.owner is not None:
        pid, address = status.owner.pid, status.owner.address
        raise NotOwner(
            f"cannot close session {session.id}: "
            f"a live host owns it, process {pid}{' at ' * bool(address)}{address}",
            hint="close the session there, or end that process",
            session=session.id,
            pid=pid,
            address=address,
        )


def _containment(stated: Mapping[str, Any], seen: ContainmentStatus | None) -> messages.Containment:
    if seen is None:
        return messages.Containment(**stated)
    usage = None if seen.cgroup is None else messages.ControlGroup(**asdict(seen.cgroup))
    return messages.Containment(**stated, cgroup=usage, why_not=seen.why_not)


def shown(status: Status, session: sessions.Session, proxy: OwnerProxy | None) -> messages.Session:
    """Convert a session's status to its message."""
    owner, known = status.owner, session.known
    return messages.Session(
        id=status.id,
        name=session.name,
        agent=status.agent,
        phase=status.phase,
        state=status.state if proxy is None else proxy.state_of(status, known),
        created=0.0 if known is None else known.created,
        at=known.changed if known is not None and known.seq else None,
        cwd=session.cwd,
        holder=status.holder,
        holder_caller=status.holder_caller,
        holder_since=status.holder_since,
        hold=status.hold,
        holds=[turn_routes.hold(each) for each in status.holds],
        queue=[turn_routes.waiting(each) for each in status.queue],
        questions=list(status.questions),
        conversation=status.conversation,
        seq=status.seq,
        cost=status.cost,
        owner=None if owner is None else messages.Owner(owner.pid, owner.address),
        host=None if proxy is None else proxy.hosts_view.name_of(known),
        limits=[
            messages.LimitWindow(each.name, each.used, each.resets_at, each.is_exhausted)
            for each in status.limits
        ],
        limited_until=status.limited_until,
        waits_for_limit=status.waits_for_limit,
        fallback=[
            messages.SessionAgent(each.name, each.limited_until, each.is_missing)
            for each in status.fallback
        ],
        budget=[usage_routes.shown_cap(use) for use in status.budget],
    )


ID = "/v1/sessions/{id}"
ROUTES = (
    Route(
        method="POST",
        path="/v1/sessions",
        action=Action.OPEN,
        handle=open_session,
        summary="Open a session with an agent, or reopen the session of this name.",
        body=messages.OpenSession,
        answer=messages.Session,
        status=201,
        has_key=True,
        problems=(409, 422),
    ),
    Route(
        method="GET",
        path="/v1/sessions",
        action=Action.LIST,
        handle=list_sessions,
        summary="List the sessions of the store, oldest first.",
        query=messages.ListSessions,
        answer=messages.Sessions,
        problems=(404,),
    ),
    Route(
        method="GET",
        path=ID,
        action=Action.READ,
        handle=look,
        to_owner=OwnerFallback.READS,
        summary="Show a session.",
        answer=messages.Session,
    ),
    Route(
        method="PATCH",
        path=ID,
        action=Action.STEER,
        handle=change,
        to_owner=OwnerFallback.NAMED,
        summary="Change the name, model or permission mode of a session.",
        body=messages.ChangeSession,
        answer=messages.Session,
        problems=(409, 422, 502),
    ),
    Route(
        method="DELETE",
        path=ID,
        action=Action.STEER,
        handle=close,
        to_owner=OwnerFallback.ENDS,
        summary="Close a session; with `forget`, also delete its log.",
        query=messages.DeleteSession,
        answer=messages.Session,
        problems=(409,),
    ),
    Route(
        method="GET",
        path=f"{ID}/why",
        action=Action.READ,
        handle=why,
        to_owner=OwnerFallback.READS,
        summary="Explain what a session waits for: queue, clocks, last frames, processes.",
        answer=messages.Why,
    ),
    Route(
        method="GET",
        path=f"{ID}/stderr",
        action=Action.READ,
        handle=stderr,
        to_owner=OwnerFallback.NAMED,
        summary="Show what the agent's process has written to stderr.",
        answer=messages.SessionStderr,
        problems=(409,),
    ),
)
