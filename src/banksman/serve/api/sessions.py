"""Sessions over HTTP: open, list, look, change, close."""

from __future__ import annotations

from contextlib import suppress

import msgspec

from banksman.errors import NotFound
from banksman.run.sessions import profiles
from banksman.run.sessions import session as sessions
from banksman.run.sessions.status import Status
from banksman.serve.api import messages, tree
from banksman.serve.api.messages import SESSIONS_MAX
from banksman.serve.api.once import session_id
from banksman.serve.api.routes import Answer, Call, Route
from banksman.serve.context import Context


async def open_session(call: Call) -> Answer:
    context: Context = call.context
    body: messages.OpenSession = call.body

    async def do() -> Answer:
        session = await _open(context, body, None if call.key is None else session_id(call.key))
        headers = {"Location": f"/v1/sessions/{session.id}"}
        return Answer(shown(await session.look(), session), 201, headers)

    def is_still_there(answer: Answer) -> bool:
        return context.has_session(answer.value.id)

    return await context.once.do("sessions", call.key, body, do, is_still_so=is_still_there)


async def _open(context: Context, body: messages.OpenSession, id: str | None) -> sessions.Session:
    if id is not None:
        with suppress(NotFound):
            return context.host.session(id)  # Made with this key before this server was started.
    policy = context.policy
    profile = profiles.load(body.agent)
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
        id=id,
    )


async def list_sessions(call: Call) -> Answer:
    """Oldest first. The next page begins after the last one of this."""
    query: messages.ListSessions = call.query
    limit = min(query.limit, SESSIONS_MAX)
    after = None if query.after is None else call.context.session(query.after).id
    # One more than is shown tells whether there is a next page.
    found = call.context.host.sessions(after, limit=limit + 1)
    following = found[limit - 1].id if len(found) > limit else None
    return Answer(messages.Sessions([shown(session.status(), session) for session in found[:limit]], following))


async def look(call: Call) -> Answer:
    session = call.context.session(call.path["id"])
    return Answer(shown(await session.look(), session))


async def why(call: Call) -> Answer:
    session = call.context.session(call.path["id"])
    status = await session.look()
    base = shown(status, session)
    return Answer(
        messages.Why(
            **msgspec.structs.asdict(base),
            clocks=[messages.Clock(c.name, c.seconds, c.left, c.is_running) for c in status.clocks],
            timers=dict(status.timers),
            pids=list(status.pids),
            tree=[messages.ProcessShown(*process) for process in tree.of(status.pids)],
            counters=dict(status.counters),
            seconds_since_in=status.seconds_since_in,
            seconds_since_out=status.seconds_since_out,
            waits_for_place=status.waits_for_place,
        )
    )


async def change(call: Call) -> Answer:
    session = call.context.session(call.path["id"])
    body: messages.ChangeSession = call.body
    if body.name is not msgspec.UNSET:
        await session.rename(body.name)
    if body.model is not msgspec.UNSET:
        await session.set_model(body.model)
    if body.permission_mode is not msgspec.UNSET:
        await session.set_permission_mode(body.permission_mode)
    return Answer(shown(await session.look(), session))


async def close(call: Call) -> Answer:
    """What runs in it is stopped. It stays in the store, unless it is to be forgotten."""
    session = call.context.session(call.path["id"])
    query: messages.DeleteSession = call.query
    if query.forget:
        await call.context.host.delete(session)
        call.context.streams.pages.clear()
        return Answer(status=204)
    await session.close()
    return Answer(shown(await session.look(), session))


def shown(status: Status, session: sessions.Session) -> messages.Session:
    owner = status.owner
    return messages.Session(
        id=status.id,
        name=session.name,
        agent=status.agent,
        phase=status.phase,
        holder=status.holder,
        hold=status.hold,
        queue=[messages.Waiting(w.turn, w.priority, w.seconds, w.attempt) for w in status.queue],
        questions=list(status.questions),
        conversation=status.conversation,
        seq=status.seq,
        cost=status.cost,
        owner=None if owner is None else messages.Owner(owner.pid, owner.address),
    )


ID = "/v1/sessions/{id}"
ROUTES = (
    Route(
        method="POST",
        path="/v1/sessions",
        handle=open_session,
        summary="Open a session with an agent. Under the name of a known one it is that one.",
        body=messages.OpenSession,
        answer=messages.Session,
        status=201,
        has_key=True,
        problems=(409, 422),
    ),
    Route(
        method="GET",
        path="/v1/sessions",
        handle=list_sessions,
        summary="Every session of the store, whoever has it, oldest first.",
        query=messages.ListSessions,
        answer=messages.Sessions,
        problems=(404,),
    ),
    Route(method="GET", path=ID, handle=look, summary="What a session is doing.", answer=messages.Session),
    Route(
        method="PATCH",
        path=ID,
        handle=change,
        summary="Another name, model or permission mode.",
        body=messages.ChangeSession,
        answer=messages.Session,
        problems=(409, 422, 502),
    ),
    Route(
        method="DELETE",
        path=ID,
        handle=close,
        summary="Close a session; with forget=1, forget it for good.",
        query=messages.DeleteSession,
        answer=messages.Session,
        problems=(409,),
    ),
    Route(
        method="GET",
        path=f"{ID}/why",
        handle=why,
        summary="Who holds it, who waits, every clock, the last frames, the tree of processes.",
        answer=messages.Why,
    ),
)
