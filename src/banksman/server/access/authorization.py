"""Authorization of a request: the role of its caller, and the sessions that the caller may see.

`route.py` calls `check_route` before it reads the body, and `check_body` afterwards. Handlers that
list sessions use `is_visible`. A session that the caller may not see is answered like one that does
not exist (404). A visible session with a forbidden action is answered with 403.

A request that another host forwards was authorized there.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

import msgspec

from banksman.errors import NotFound, StoreDamaged, StoreTooNew, Unreachable
from banksman.server.access.roles import OPERATORS, Action, Caller, Relation, may
from banksman.server.api.messages.session_messages import session_id
from banksman.server.problems import Problem, away
from banksman.sessions.ask_arguments import priority_of
from banksman.sessions.session import Session
from banksman.sessions.status import Status

log = logging.getLogger("banksman.serve")

# Members of a body that only operators may set. Each could run another program, read another
# conversation, or decide the questions that an approver is there for.
OF_OPERATORS = frozenset(
    (
        *("command", "args", "env", "inherit_env", "mcp_servers", "options", "user", "limits"),
        *("scrub", "wrap", "on_open", "on_close", "survive", "resume", "fork", "rules"),
        "permission_mode",
        # Of an answer: another input runs another command, and an interrupt ends the turn.
        *("updated_input", "interrupt"),
    )
)


async def check_route(
    context: Any, caller: Caller, action: Action, id: str | None
) -> Session | None:
    """Raise 404 if the session is foreign to the caller, and 403 if the role forbids the action.

    `id`: the session that the path names, by id or name; None: it names none. Returns the session
    that was checked: its name may belong to another one a moment later. None: a caller without
    limits is not slowed down by a lookup.
    """
    relation = Relation.OWN
    session: Session | None = None
    if caller.is_limited and id is not None:
        session = await _find(context, id)
        relation = await _relation(context, caller, session)
        if relation is Relation.FOREIGN:
            raise _not_found(id)
    if not may(caller, action, relation):
        raise forbidden(caller, action.value)
    return session


async def check_body(
    context: Any, caller: Caller, action: Action, body: Any, *, id: str | None, key: str | None
) -> None:
    """Raise a Problem if the body asks for more than the caller may have."""
    if caller.name is None or body is None:
        return
    if caller.role not in OPERATORS:
        for field in msgspec.structs.fields(body):
            if field.name in OF_OPERATORS and getattr(body, field.name) != _default(field):
                raise forbidden(caller, f"set {field.name}")
        # The settings files of agents hold for all sessions and all callers.
        if getattr(body, "remember", False) not in (False, True, "session"):
            raise forbidden(caller, f"set remember={body.remember}")
        _check_priority(caller, getattr(body, "priority", None))
    if getattr(body, "caller", None) not in (None, caller.name):
        raise forbidden(caller, "ask in the name of another caller")
    if action is Action.OPEN:
        await _check_open(context, caller, body, key)
    elif id is not None and (name := getattr(body, "name", msgspec.UNSET)) is not msgspec.UNSET:
        _check_scope(caller, name, context.session(id).agent)


async def is_visible(context: Any, caller: Caller, session: Session) -> bool:
    """Whether a caller may know that this session exists."""
    return await _relation(context, caller, session) is not Relation.FOREIGN


async def visible(context: Any, caller: Caller, id_or_name: str) -> Session:
    """Return a session; raises 404 if it is foreign to the caller."""
    session: Session = context.session(id_or_name)
    if not await is_visible(context, caller, session):
        raise _not_found(id_or_name)
    return session


async def _check_open(context: Any, caller: Caller, body: Any, key: str | None) -> None:
    """Check the session that would be opened. Another caller's session cannot be opened again.

    A session that is being opened now has no owner in the log yet: see `only_own` of `Host.open`.
    """
    for agent in (body.agent, *body.fallback):
        _check_scope(caller, body.name, agent)
    words = [body.name, None if key is None else session_id(key)]
    for word in words if caller.is_limited else ():
        if word is None:
            continue
        try:
            session = await _find(context, word)
        except NotFound:
            continue
        # A session without events was never confirmed to any client.
        is_new = session.known is not None and not session.known.seq
        if not is_new:
            await check_own(context, caller, session)


async def check_own(context: Any, caller: Caller, session: Session) -> None:
    """Raise a Problem if a caller that opens this session again does not own it."""
    if await _relation(context, caller, session) is not Relation.OWN:
        hint = "choose another name, and another Idempotency-Key"
        raise Problem(409, "NameTaken", "another caller has this session", hint=hint)


async def check_edit(caller: Caller, session: Session, turn: str) -> None:
    """Raise 403 if the caller edits the ask of another caller."""
    if caller.role not in OPERATORS:
        _check_asks(caller, await session.callers_of(turn), "edit")


async def check_interrupt(caller: Caller, session: Session, turn: str | None) -> str | None:
    """Return the turn to interrupt, or raise 403 if another caller asked for a part of it.

    `turn`: None for the turn that runs now. Returns None if none runs. Only the owner of a session
    and operators interrupt a turn that the agent started without an ask.
    """
    if caller.role in OPERATORS:
        return turn
    if turn is None and (turn := await session.holder()) is None:
        return None
    callers = await session.callers_of(turn)
    if callers == frozenset() and session.opened_by != caller.name:
        hint = _only([session.opened_by])
        raise forbidden(caller, "interrupt a turn that the agent started", hint)
    _check_asks(caller, callers, "interrupt")
    return turn


async def check_interrupting_ask(caller: Caller, session: Session) -> None:
    """Raise 403 if an ask with `on_busy="interrupt"` could stop a turn that the caller may not.

    Such an ask stops the turn of an ask and a turn that the agent has started beside it.
    """
    if caller.role not in OPERATORS:
        for turn in await session.running_turns():
            await check_interrupt(caller, session, turn)


def check_hold(caller: Caller, status: Status, hold: str, owner: str | None = None) -> None:
    """Raise 403 if the hold belongs to another caller. `owner`: a further caller that may.

    A hold that is over belongs to no caller: the session answers that it is over.
    """
    if caller.role in OPERATORS or (owner is not None and caller.name == owner):
        return
    found = next((each for each in status.holds if each.hold == hold), None)
    if found is not None and found.caller != caller.name:
        raise forbidden(caller, "use the hold of another caller", _only([found.caller]))


def _check_asks(caller: Caller, callers: Collection[str | None] | None, action: str) -> None:
    """Check the callers of some asks; None: the asks are over, which concerns no caller."""
    if any(each != caller.name for each in callers or ()):
        assert callers is not None
        raise forbidden(caller, f"{action} the ask of another caller", _only(callers))


def _check_priority(caller: Caller, priority: int | str | None) -> None:
    """Check the class of an ask. An ask above "normal" would preempt the asks of other callers."""
    if priority is not None and priority_of(priority) > priority_of("normal"):
        hint = 'use priority="normal" or less, or ask an operator'
        raise forbidden(caller, f"ask with priority {priority}", hint)


def _check_scope(caller: Caller, name: str | None, agent: str) -> None:
    if not caller.has_in_scope(name, agent):
        limits = " ".join((*caller.sessions, *caller.agents))
        raise Problem(
            403,
            "Forbidden",
            f"the token of {caller.name} does not include this session",
            hint=f"use a name and an agent that it includes: {limits}",
        )


async def _find(context: Any, id_or_name: str) -> Session:
    if context.proxy is not None:
        try:
            await context.proxy.know(id_or_name)
        except Unreachable as exc:
            raise away(f"cannot look up session {id_or_name!r:.100}", exc) from exc
    return context.session(id_or_name)


async def _relation(context: Any, caller: Caller, session: Session) -> Relation:
    if not caller.is_limited:
        return Relation.OWN
    known = session.known
    if known is None or not caller.has_in_scope(known.name, known.agent):
        return Relation.FOREIGN
    if caller.role in OPERATORS:
        return Relation.OWN
    try:
        return caller.relation(await context.access.of(known))
    except (StoreDamaged, StoreTooNew) as exc:
        # Only this session is affected. Without its log, nobody knows whose it is.
        if known.id not in context.access.unreadable:
            context.access.unreadable.add(known.id)
            log.error("session %s is hidden from callers with a limit: %s", known.id, exc)
        return Relation.FOREIGN


def _default(field: msgspec.structs.FieldInfo) -> Any:
    made = field.default_factory
    return field.default if made is msgspec.NODEFAULT else made()


def _not_found(id_or_name: str) -> NotFound:
    # The words of the host for a session that does not exist.
    return NotFound(f"there is no session {id_or_name!r}", hint="list the sessions")


def forbidden(caller: Caller, what: str, hint: str | None = None) -> Problem:
    """Return the problem of an action that the role of the caller forbids."""
    message = f"the role {caller.role} of {caller.name} does not allow this: {what}"
    hint = hint or "ask an administrator of the server for another token"
    return Problem(403, "Forbidden", message, hint=hint)


def _only(callers: Collection[str | None]) -> str:
    """Return the hint that names the callers that may do it."""
    names = sorted(name for name in callers if name is not None)
    # Only an operator may stop what several callers have asked for.
    may = f"{names[0]} and operators" if len(callers) == 1 and names else "operators"
    return f"only {may} may do this"
