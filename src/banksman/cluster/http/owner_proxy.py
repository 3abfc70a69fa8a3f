"""A request about a session that another host has: who is asked, and what is said if nobody answers.

Three answers are never given. That something is gone, because its owner is silent: the log has what was accepted, and
another host goes on with it. That something was done, or was not, where nobody knows. And none: every wait has an end,
the *patience*, which is as long as a lease may take to run out, and what a take-over takes.

So it goes by what a request means (`OwnerFallback`). What only reads is asked of the owner, for it knows best, and else
of the log. An ask has a key, always, and is sent again with it until somebody has taken it: it is in the log before it
is answered, and the log knows the key. What names its subject is sent again as long as nobody got it; and if somebody
may have, the caller is told that this is not known.

A session without an owner, or whose owner is dead, is offered to all hosts (`resume`) when somebody asks in it; or it
is taken by this very host, if it has room.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from typing import Any
from urllib.parse import quote

import msgspec
from msgspec.structs import replace

from banksman import Host, Kind
from banksman.cluster.http.forwarded_request import (
    HEADERS_THERE,
    NOT_HERE,
    ForwardedRequest,
    ForwardedResponse,
    response_of,
)
from banksman.cluster.http.host_view import HostView
from banksman.cluster.interfaces import Cluster
from banksman.errors import (
    BanksmanError,
    Closed,
    Moved,
    Moving,
    NoOwner,
    NotFound,
    NotOwner,
    Refused,
    Unanswered,
    Unreachable,
)
from banksman.server.api.messages import session_messages as messages
from banksman.server.api.messages.common_messages import WAIT_SECONDS_MAX, WaitFor
from banksman.server.api.messages.session_messages import DeleteSession
from banksman.server.api.messages.turn_messages import Turn
from banksman.server.api.route import HttpAnswer, OwnerFallback, Result, Route, RouteCall
from banksman.server.http.connection import SlicedResponse
from banksman.server.problems import Problem, away, session_of
from banksman.server.server_settings import NAME_LENGTH_MAX
from banksman.sessions.session import Session
from banksman.sessions.status import Status
from banksman.store.log import KnownSession

# What a take-over takes, beyond the lease: a claim, a look at the log, the end of what is left.
TAKE_OVER_SECONDS = 10.0
# The log can answer, too: so nobody waits long for an owner that only knows better.
READ_SECONDS_MAX = 2.0
# To stop something takes as long as the ladder takes.
WRITE_SECONDS_MAX = 60.0
# Who waits for an outcome is answered at once when it is there. This long at a time, because an owner that dies in
# between says nothing.
WAIT_SLICE_SECONDS = 5.0
# Between two looks who has the session now, if nothing happens in it.
PAUSE_SECONDS = 0.05
PAUSE_SECONDS_MAX = 0.5
# So many sessions that were offered are remembered; of one that is forgotten it is said again.
OFFERED_MAX = 10_000
# The session was here, or seemed to be, and is not any more.
LEFT = (NotOwner, Closed, Moving, Moved)


class RetryPause:
    """Between attempts: short at first, for a take-over may be over in a moment."""

    def __init__(self, patience: float) -> None:
        self._until = time.monotonic() + patience
        self._next = PAUSE_SECONDS
        self.began = time.monotonic()

    @property
    def left(self) -> float:
        return max(0.0, self._until - time.monotonic())

    def take(self) -> float:
        seconds, self._next = min(self._next, self.left), min(2 * self._next, PAUSE_SECONDS_MAX)
        return seconds


class OwnerSilent(msgspec.Struct, frozen=True):
    """Why there is no answer."""

    why: str


class OwnerProxy:
    """How the other hosts of a store are asked. All of it belongs to the loop of `host`, which is ours."""

    def __init__(self, host: Host, cluster: Cluster, hosts_view: HostView) -> None:
        self._host = host
        self.cluster = cluster
        self.hosts_view = hosts_view
        # What was offered, under which epoch and when: to say so once a lease is enough.
        self._offered: dict[str, tuple[int, float]] = {}

    @property
    def patience(self) -> float:
        return self.cluster.hosts.lease_seconds + TAKE_OVER_SECONDS

    async def know(self, id_or_name: str) -> None:
        """Another front end may have told somebody of it a moment ago, who asks here now. `Unreachable`: nobody can be
        asked, and so it is not said that there is none."""
        try:
            session_of(self._host, id_or_name)
        except NotFound:
            if len(id_or_name) <= NAME_LENGTH_MAX:
                await self.cluster.records.look_for(id_or_name)

    async def answer(self, call: RouteCall, route: Route) -> Result:
        try:
            session = session_of(self._host, call.path["id"])
        except NotFound:
            if isinstance(call.query, DeleteSession) and call.query.forget:
                await self._host.delete(call.path["id"])  # An earlier deletion may have been cut short.
            raise
        if call.is_forwarded:
            return await self._as_owner(call, route, session)
        if route.to_owner is OwnerFallback.READS:
            return await self._read(call, route, session)
        return await self._write(call, route, session)

    async def _as_owner(self, call: RouteCall, route: Route, session: Session) -> Result:
        if not is_here(session):
            raise _not_here(session)
        try:
            result = await route.handle(call)
        except LEFT as exc:
            if not _is_about(exc, session):
                raise
            # Lost in this moment, or on its way to another host: whoever sent it finds out which.
            raise _not_here(session) from exc
        if _is_lost(result):
            raise _not_here(session)
        return result

    # -- what only reads ---------------------------------------------------------------------------------------------
    async def _read(self, call: RouteCall, route: Route, session: Session) -> Result:
        if isinstance(call.query, WaitFor):
            return await self._wait_turn(call, route, session)
        if is_here(session):
            return await route.handle(call)
        answer = await self.ask(session.id, _request(call, session), READ_SECONDS_MAX) if has_owner(session) else None
        if isinstance(answer, ForwardedResponse):
            return answered(answer)
        told = await route.handle(call)
        if answer is not None and isinstance(told, HttpAnswer) and isinstance(told.value, messages.Session):
            told.value.state = "unreachable"
        return told

    async def _wait_turn(self, call: RouteCall, route: Route, session: Session) -> Result:
        """Of its owner, and of the log whenever that does not answer: an outcome that another host writes is one. What
        is said here of a session that was just lost is none: the log will say how it ended."""
        query: WaitFor = call.query
        pause = RetryPause(min(query.wait, WAIT_SECONDS_MAX))
        while True:
            seconds = min(pause.left, WAIT_SLICE_SECONDS)
            sliced = replace(call, query=WaitFor(wait=seconds))
            session = session_of(self._host, session.id)
            answer: ForwardedResponse | OwnerSilent | None = None
            if not is_here(session) and has_owner(session):
                request = _request(sliced, session, query=f"wait={seconds:.3f}")
                answer = await self.ask(session.id, request, seconds + READ_SECONDS_MAX)
            if isinstance(answer, ForwardedResponse):
                result: Result = answered(answer)
                is_over = answer.status != 200 or msgspec.json.decode(answer.body)["outcome"] is not None
            else:
                try:
                    result = await route.handle(sliced)
                    if _is_lost(result):
                        raise Unreachable("this host has just lost the session")
                except Unreachable as exc:
                    if not pause.left:
                        raise away("the session cannot be reached", exc) from exc
                    await asyncio.sleep(pause.take())
                    continue
                is_over = not isinstance(result, HttpAnswer) or result.value.outcome is not None
            if is_over or not pause.left:
                return result

    # -- what changes something --------------------------------------------------------------------------------------
    async def _write(self, call: RouteCall, route: Route, session: Session) -> Result:
        kind = route.to_owner
        assert kind is not None
        if kind is OwnerFallback.KEYED and call.key is None:
            # Whoever is told that nobody answers is told it, too, and may come again with it.
            call = replace(call, key=uuid.uuid4().hex)
        pause = RetryPause(self.patience)
        while True:
            found = await self._attempt(call, route, session, pause)
            if not isinstance(found, OwnerSilent):
                return found
            if kind is OwnerFallback.NOW or not pause.left:
                raise self.unreachable(session.id, found.why, pause, call.key)
            await self.wait_news(session.id, pause.take())
            session = session_of(self._host, session.id)

    async def _attempt(
        self, call: RouteCall, route: Route, session: Session, pause: RetryPause
    ) -> Result | OwnerSilent:
        kind = route.to_owner
        if not is_here(session) and has_owner(session):
            # An owner that is at it says so, and one that says nothing for a while is not waited for.
            seconds = max(0.1, pause.left) if kind is OwnerFallback.KEYED else WRITE_SECONDS_MAX
            answer = await self.ask(
                session.id, _request(call, session), seconds, is_known=kind is not OwnerFallback.KEYED
            )
            return answered(answer) if isinstance(answer, ForwardedResponse) else answer
        if not is_here(session) and kind is OwnerFallback.NOW:
            raise Refused("nobody has the session: nothing runs in it", session=session.id)
        if not is_here(session) and await self._needs_owner(session, kind) and not await self._may_take(session):
            try:
                await self.offer(session)
            except Unreachable as exc:
                return OwnerSilent(str(exc.args[0]))  # Nothing was done yet but to look for somebody who could.
            if (why := self._stuck(session.id)) is not None:
                hint = "it waits for a host that can, or to be opened by its name with what it lacks; nothing is lost"
                raise Problem(503, "NotMovable", f"no host can go on with the session: {why}", hint=hint)
            return OwnerSilent("no host has taken the session up yet")
        try:
            return await route.handle(call)
        except LEFT as exc:
            if not _is_about(exc, session) or is_here(session_of(self._host, session.id)):
                raise
            return OwnerSilent(str(exc.args[0]))

    async def _needs_owner(self, session: Session, kind: OwnerFallback | None) -> bool:
        """Also to end it, if its host died with it open, or if somebody still waits there: who is to be refused is the
        owner's to say."""
        known = session.known
        if kind is not OwnerFallback.ENDS or known is None:
            return kind is not OwnerFallback.ENDS
        return known.owner is not None or await self._host.has_waiting_asks(known)

    async def ask(
        self, session: str, request: ForwardedRequest, seconds: float, *, is_known: bool = False
    ) -> ForwardedResponse | OwnerSilent:
        """What its owner says; or why nobody says anything. `is_known`: whether it was done must be known, else it is
        an error (`Unanswered`)."""
        try:
            data = await self.cluster.bus.ask_owner(session, request.encoded(), timeout=seconds)
        except NoOwner:
            return OwnerSilent("nobody answers for the session")
        except Unanswered as exc:
            if not is_known:
                return OwnerSilent("the host that has the session does not answer")
            hint = "look at it, and send it again if it was not done"
            message = "the host that has the session has not answered in time: whether it was done is not known"
            raise Unanswered(message, hint=hint, session=session) from exc
        except Unreachable as exc:
            return OwnerSilent(str(exc.args[0]))
        response = response_of(data)
        if response.status == NOT_HERE:
            return OwnerSilent("the host that had the session does not have it any more")
        return response

    async def offer(self, session: Session) -> None:
        """To every host that could go on with it. However many offer it, it is one job."""
        known = session.known
        now = time.monotonic()
        epoch, at = (0, 0.0) if known is None else self._offered.get(known.id, (0, 0.0))
        if known is None or (epoch == known.epoch and now < at + self.cluster.hosts.lease_seconds):
            return
        # Not before it is needed: whoever has a store of its own machine pays for none of it.
        from banksman.cluster.host.takeover import offer_one  # noqa: PLC0415

        await offer_one(self._host.log, self.cluster, known)
        while len(self._offered) >= OFFERED_MAX:
            del self._offered[next(iter(self._offered))]
        self._offered[known.id] = known.epoch, now

    async def _may_take(self, session: Session) -> bool:
        return self.may_take() and self.hosts_view.can_take(await self._host.need_of(session.id))

    def may_take(self) -> bool:
        """Whether there is room on this very host."""
        return self.hosts_view.has_room()

    def state_of(self, status: Status, known: KnownSession | None) -> str:
        """As people are told it. Of one whose owner has died it is not said that it is gone: it is being taken over."""
        if status.phase in ("lost", "asleep") and known is not None and self._stuck(known.id) is not None:
            return "not movable"
        return "unreachable" if status.phase == "lost" else status.state

    def _stuck(self, session: str) -> str | None:
        return self.cluster.records.stuck_of(session)

    async def wait_news(self, session: str, seconds: float) -> None:
        """For so long, or until something happens in it: a host that takes it over says so there first."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                try:
                    found = self._host.session(session)
                    await found.wait_past(found.committed)
                    # It says so before it can be asked: by a few milliseconds.
                    await asyncio.sleep(min(seconds, PAUSE_SECONDS / 5))
                except BanksmanError:
                    await asyncio.sleep(seconds)

    def unreachable(self, session: str, why: str, pause: RetryPause, key: str | None = None) -> Problem:
        """The end of our patience, and what is known. `key`: under which it was asked for."""
        waited = time.monotonic() - pause.began
        known: dict[str, Any] = {"session": session, **({} if key is None else {"key": key})}
        told = why
        with contextlib.suppress(BanksmanError):
            found = self._host.session(session)
            host = self.hosts_view.host_of(found.known)
            owner = None if found.known is None else found.known.owner
            if host is not None:
                known |= {"host": host.id, "pid": host.pid}
                told += f"; it is in the hands of {host.name}, heard of {time.monotonic() - host.seen:.1f} s ago"
            elif owner is not None:
                known |= {"host": owner.address, "pid": owner.pid}
                told += f"; it was in the hands of {owner.address}, which is not heard of any more"
        return Problem(
            *(503, "Unreachable", f"the session cannot be reached: {told}"),
            hint=f"tried for {waited:.0f} s. What was accepted is kept; try again, with the same Idempotency-Key",
            ids=known,
        )


def answered(response: ForwardedResponse) -> SlicedResponse:
    return SlicedResponse(response.body, response.status, dict(response.headers))


def _request(call: RouteCall, session: Session, *, query: str | None = None) -> ForwardedRequest:
    """By its id: a name may be another's by the time it is there."""
    # As it was sent, but for that: what follows the id may hold a slash that is none.
    raw = call.request.scope["raw_path"].decode("ascii")
    rest = raw.removeprefix("/v1/sessions/").partition("/")[2]
    path = f"/v1/sessions/{quote(session.id, safe='')}{'/' * bool(rest)}{rest}"
    query = call.request.url.query if query is None else query
    headers = {name: value for name in HEADERS_THERE if (value := call.header(name)) is not None}
    if call.key is not None:
        headers["idempotency-key"] = call.key
    method = "GET" if call.request.method == "HEAD" else call.request.method
    return ForwardedRequest(method, f"{path}{'?' * bool(query)}{query}", headers, call.data)


def is_here(session: Session) -> bool:
    """In our hands, and to be asked: not on its way to another host, nor taken by one."""
    return session.is_open or (session.is_ours and not session.is_closed and session.status().phase == "closing")


def has_owner(session: Session) -> bool:
    """Somebody whose lease stands, as far as is known here."""
    known = session.known
    return known is not None and known.owner is not None and known.owner.is_alive


def _is_lost(result: Result) -> bool:
    """A turn's outcome that is none: of a session that was ours, and of which another says how it ended."""
    if not isinstance(result, HttpAnswer) or not isinstance(result.value, Turn):
        return False
    outcome = result.value.outcome
    return outcome is not None and outcome.kind == Kind.UNKNOWN and not outcome.durable


def _is_about(error: BanksmanError, session: Session) -> bool:
    """And not about another session, which drives the same conversation."""
    return error.ids.get("session") in (None, session.id)


def _not_here(session: Session) -> Problem:
    return Problem(NOT_HERE, "NotHere", "this host does not have the session", ids={"session": session.id})
