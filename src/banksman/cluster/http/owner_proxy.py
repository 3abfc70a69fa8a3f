"""Forward requests about a session to its owner, with retries, deadlines and fallbacks.

`forwarded_request.py` has the encoding, and `cluster/log/owner_requests.py` the transport.
`OwnerProxy.answer` is also the receiving end of forwarded requests.

Three answers are never given:

- That a session or ask is gone because its owner is silent. The log has what was accepted, and
  another host resumes it.
- That an action was performed, or was not, if that is unknown.
- No answer at all. Every wait ends after the *patience*: the time for a lease to expire plus the
  time of a take-over.

The rest depends on the kind of request (`OwnerFallback`). A read goes to the owner, which knows
best, and otherwise to the log. An ask always has an idempotency key, and is sent again with it
until a host has accepted it. It is in the log before it is answered, and the log knows the key. A
request that names its target is sent again while no host has received it. If one may have received
it, the caller learns that the result is unknown.

If a caller asks in a session that has no owner or a dead one, the session is offered to all hosts
(`resume`). If this host has room, it takes the session instead.
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
from banksman.store.log_values import KnownSession

# The time of a take-over beyond the lease: a claim, a read of the log, the end of old processes.
TAKE_OVER_SECONDS = 10.0
# Reads wait only briefly for the owner, because the log can answer too.
READ_SECONDS_MAX = 2.0
# Stopping a process takes as long as the ladder.
WRITE_SECONDS_MAX = 60.0
# A wait for an outcome is forwarded in slices of this length, because an owner that dies in between
# sends nothing. An outcome within a slice returns immediately.
WAIT_SLICE_SECONDS = 5.0
# The pause between two lookups of the owner, if nothing happens in the session.
PAUSE_SECONDS = 0.05
PAUSE_SECONDS_MAX = 0.5
# How many offered sessions are remembered. A forgotten one is offered again.
OFFERED_MAX = 10_000
# Errors that mean that the session left this host.
LEFT = (NotOwner, Closed, Moving, Moved)


class RetryPause:
    """Pauses between attempts: short at first, because a take-over may be over in a moment."""

    def __init__(self, patience: float) -> None:
        self._until = time.monotonic() + patience
        self._next = PAUSE_SECONDS
        self.began = time.monotonic()

    @property
    def left(self) -> float:
        """The time that is left."""
        return max(0.0, self._until - time.monotonic())

    def take(self) -> float:
        """Return the next pause, twice as long as the one before."""
        seconds, self._next = min(self._next, self.left), min(2 * self._next, PAUSE_SECONDS_MAX)
        return seconds


class OwnerSilent(msgspec.Struct, frozen=True):
    """The reason why no owner answered."""

    why: str


class OwnerProxy:
    """Requests of this server to the owners of sessions. Belongs to the event loop of `host`."""

    def __init__(self, host: Host, cluster: Cluster, hosts_view: HostView) -> None:
        self._host = host
        self.cluster = cluster
        self.hosts_view = hosts_view
        # By session: the epoch and time of the last offer. One offer per lease is enough.
        self._offered: dict[str, tuple[int, float]] = {}

    @property
    def patience(self) -> float:
        """The time until a request without an answer fails."""
        return self.cluster.hosts.lease_seconds + TAKE_OVER_SECONDS

    async def know(self, id_or_name: str) -> None:
        """Fetch a session's record if it is unknown here.

        Another front end may have shown the session to this caller a moment ago. Raises
        `Unreachable` if the store cannot be asked: then "not found" would be a guess.
        """
        try:
            session_of(self._host, id_or_name)
        except NotFound:
            if len(id_or_name) <= NAME_LENGTH_MAX:
                await self.cluster.records.look_for(id_or_name)

    async def answer(self, call: RouteCall, route: Route) -> Result:
        """Answer a request here, or forward it to the owner."""
        try:
            session = session_of(self._host, call.path["id"])
        except NotFound:
            if isinstance(call.query, DeleteSession) and call.query.forget:
                await self._host.delete(call.path["id"])  # Finish an interrupted deletion.
            raise
        if call.is_forwarded:
            return await self._as_owner(call, route, session)
        if route.to_owner is OwnerFallback.READS:
            return await self._read(call, route, session)
        return await self._write(call, route, session)

    async def _as_owner(self, call: RouteCall, route: Route, session: Session) -> Result:
        """Answer a forwarded request, or refuse it with 421 if this host lost the session."""
        if not is_here(session):
            raise _not_here(session)
        try:
            result = await route.handle(call)
        except LEFT as exc:
            if not _is_about(exc, session):
                raise
            # The session was lost just now, or moves to another host. The sender finds out which.
            raise _not_here(session) from exc
        if _is_lost(result):
            raise _not_here(session)
        return result

    # -- reads ------------------------------------------------------------------------------------
    async def _read(self, call: RouteCall, route: Route, session: Session) -> Result:
        if isinstance(call.query, WaitFor):
            return await self._wait_turn(call, route, session)
        if is_here(session):
            return await route.handle(call)
        # The wait for a hold ends with its owner: the next one does not have the hold.
        seconds = READ_SECONDS_MAX + min(getattr(call.query, "wait", 0.0), WAIT_SECONDS_MAX)
        # A keyed request may stay unknown: the retry sends the same key, and the log knows whether
        # it was accepted.
        answer = (
            await self.ask(session.id, _request(call, session), seconds)
            if has_owner(session)
            else None
        )
        if isinstance(answer, ForwardedResponse):
            return answered(answer)
        told = await route.handle(call)
        if (
            answer is not None
            and isinstance(told, HttpAnswer)
            and isinstance(told.value, messages.Session)
        ):
            told.value.state = "unreachable"
        return told

    async def _wait_turn(self, call: RouteCall, route: Route, session: Session) -> Result:
        """Wait for the outcome of a turn.

        The owner is asked, and the log whenever the owner is silent: another host may write the
        outcome. An outcome of a session that this host just lost does not count, because the log
        will have the real one.
        """
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
                is_over = (
                    answer.status != 200 or msgspec.json.decode(answer.body)["outcome"] is not None
                )
            else:
                try:
                    result = await route.handle(sliced)
                    if _is_lost(result):
                        raise Unreachable("this host has just lost ownership of it")
                except Unreachable as exc:
                    if not pause.left:
                        raise away(f"cannot reach session {session.id}", exc) from exc
                    await asyncio.sleep(pause.take())
                    continue
                is_over = not isinstance(result, HttpAnswer) or result.value.outcome is not None
            if is_over or not pause.left:
                return result

    # -- writes -----------------------------------------------------------------------------------
    async def _write(self, call: RouteCall, route: Route, session: Session) -> Result:
        """Perform a request that changes something, and retry while that is safe."""
        kind = route.to_owner
        assert kind is not None
        if kind is OwnerFallback.KEYED and call.key is None:
            # Errors repeat this key, so that the caller may retry with it.
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
        """Try once: at the owner, by a take-over, or on this host."""
        kind = route.to_owner
        if not is_here(session) and has_owner(session):
            # An owner that works on the request signals that. A silent owner ends the wait early.
            seconds = max(0.1, pause.left) if kind is OwnerFallback.KEYED else WRITE_SECONDS_MAX
            answer = await self.ask(
                session.id,
                _request(call, session),
                seconds,
                is_known=kind is not OwnerFallback.KEYED,
            )
            return answered(answer) if isinstance(answer, ForwardedResponse) else answer
        if not is_here(session) and kind is OwnerFallback.NOW:
            raise Refused(
                f"no host owns session {session.id}: nothing runs in it", session=session.id
            )
        if (
            not is_here(session)
            and await self._needs_owner(session, kind)
            and not await self._may_take(session)
        ):
            try:
                await self.offer(session)
            except Unreachable as exc:
                # Nothing was done: the session was only offered.
                return OwnerSilent(str(exc.args[0]))
            if (why := self._stuck(session.id)) is not None:
                hint = (
                    "start a host that can, or open the session by its name with what is missing; "
                    "nothing is lost"
                )
                raise Problem(
                    503, "NotMovable", f"no host can resume session {session.id}: {why}", hint=hint
                )
            return OwnerSilent("no host has taken it over yet")
        try:
            return await route.handle(call)
        except LEFT as exc:
            if not _is_about(exc, session) or is_here(session_of(self._host, session.id)):
                raise
            return OwnerSilent(str(exc.args[0]))

    async def _needs_owner(self, session: Session, kind: OwnerFallback | None) -> bool:
        """Return whether a request needs an owner.

        Even a close does if the host died with the session open, or if an ask waits in it. Only an
        owner can refuse that ask.
        """
        known = session.known
        if kind is not OwnerFallback.ENDS or known is None:
            return kind is not OwnerFallback.ENDS
        return known.owner is not None or await self._host.has_waiting_asks(known)

    async def ask(
        self, session: str, request: ForwardedRequest, seconds: float, *, is_known: bool = False
    ) -> ForwardedResponse | OwnerSilent:
        """Send a request to the owner. Returns its answer, or the reason of its silence.

        `is_known`: the result must not stay unknown; raises `Unanswered` if it does.
        """
        try:
            data = await self.cluster.bus.ask_owner(session, request.encoded(), timeout=seconds)
        except NoOwner:
            return OwnerSilent("no host answers for it")
        except Unanswered as exc:
            if not is_known:
                return OwnerSilent("its owner does not answer")
            hint = "check the session, and send the request again if it was not done"
            message = (
                f"the owner of session {session} did not answer in time: "
                "whether the request was done is unknown"
            )
            raise Unanswered(message, hint=hint, session=session) from exc
        except Unreachable as exc:
            return OwnerSilent(str(exc.args[0]))
        response = response_of(data)
        if response.status == NOT_HERE:
            return OwnerSilent("its former owner no longer owns it")
        return response

    async def offer(self, session: Session) -> None:
        """Offer a session to every host that could resume it. Any number of offers are one job."""
        known = session.known
        now = time.monotonic()
        epoch, at = (0, 0.0) if known is None else self._offered.get(known.id, (0, 0.0))
        if known is None or (epoch == known.epoch and now < at + self.cluster.hosts.lease_seconds):
            return
        # Import it only when needed: a store on one machine does not pay for the cluster code.
        from banksman.cluster.host.session_offers import offer_one  # noqa: PLC0415

        await offer_one(self._host.log, self.cluster, known)
        while len(self._offered) >= OFFERED_MAX:
            del self._offered[next(iter(self._offered))]
        self._offered[known.id] = known.epoch, now

    async def _may_take(self, session: Session) -> bool:
        """Return whether this host has room for the session and satisfies its need."""
        return self.may_take() and self.hosts_view.can_take(await self._host.need_of(session.id))

    def may_take(self) -> bool:
        """Return whether this host has room."""
        return self.hosts_view.has_room()

    def state_of(self, status: Status, known: KnownSession | None) -> str:
        """Return the state of a session for display.

        A session with a dead owner is not shown as gone: it is being taken over.
        """
        if (
            status.phase in ("lost", "asleep")
            and known is not None
            and self._stuck(known.id) is not None
        ):
            return "not movable"
        return "unreachable" if status.phase == "lost" else status.state

    def _stuck(self, session: str) -> str | None:
        return self.cluster.records.stuck_of(session)

    async def wait_news(self, session: str, seconds: float) -> None:
        """Wait for `seconds`, or until an event in the session: a take-over writes one first."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                try:
                    found = self._host.session(session)
                    await found.wait_past(found.committed)
                    # The event precedes the new owner's subscription by a few milliseconds.
                    await asyncio.sleep(min(seconds, PAUSE_SECONDS / 5))
                except BanksmanError:
                    await asyncio.sleep(seconds)

    def unreachable(
        self, session: str, why: str, pause: RetryPause, key: str | None = None
    ) -> Problem:
        """Build the error for a request that ran out of patience.

        `key`: the idempotency key of the request.
        """
        waited = time.monotonic() - pause.began
        known: dict[str, Any] = {"session": session, **({} if key is None else {"key": key})}
        told = why
        with contextlib.suppress(BanksmanError):
            found = self._host.session(session)
            host = self.hosts_view.host_of(found.known)
            owner = None if found.known is None else found.known.owner
            if host is not None:
                known |= {"host": host.id, "pid": host.pid}
                seconds = time.monotonic() - host.seen
                told += f"; its owner is {host.name}, last heartbeat {seconds:.1f} s ago"
            elif owner is not None:
                known |= {"host": owner.address, "pid": owner.pid}
                told += f"; its last owner {owner.address} no longer sends heartbeats"
        return Problem(
            *(503, "Unreachable", f"cannot reach session {session}: {told}"),
            hint=(
                "try again with the same Idempotency-Key; accepted requests are kept "
                f"(tried for {waited:.0f} s)"
            ),
            ids=known,
        )


def answered(response: ForwardedResponse) -> SlicedResponse:
    """Return the owner's response to the client."""
    return SlicedResponse(response.body, response.status, dict(response.headers))


def _request(call: RouteCall, session: Session, *, query: str | None = None) -> ForwardedRequest:
    """Build the forwarded request.

    It names the session by id: a name may belong to another session when the request arrives.
    """
    # Keep the rest of the raw path: it may contain an escaped slash.
    raw = call.request.scope["raw_path"].decode("ascii")
    rest = raw.removeprefix("/v1/sessions/").partition("/")[2]
    path = f"/v1/sessions/{quote(session.id, safe='')}{'/' * bool(rest)}{rest}"
    query = call.request.url.query if query is None else query
    headers = {name: value for name in HEADERS_THERE if (value := call.header(name)) is not None}
    if call.key is not None:
        headers["idempotency-key"] = call.key
    method = "GET" if call.request.method == "HEAD" else call.request.method
    url = f"{path}{'?' * bool(query)}{query}"
    caller = call.caller
    return ForwardedRequest(method, url, headers, call.data, caller.name, caller.role)


def is_here(session: Session) -> bool:
    """Return whether this host owns the session and answers for it.

    False if the session moves to another host, or was taken by one.
    """
    return session.is_open or (
        session.is_ours and not session.is_closed and session.status().phase == "closing"
    )


def has_owner(session: Session) -> bool:
    """Return whether the session has an owner with a valid lease, according to the mirror."""
    known = session.known
    return known is not None and known.owner is not None and known.owner.is_alive


def _is_lost(result: Result) -> bool:
    """Return whether a turn's outcome is that of a session this host just lost.

    That outcome is not durable. Another host will write how the turn ended.
    """
    if not isinstance(result, HttpAnswer) or not isinstance(result.value, Turn):
        return False
    outcome = result.value.outcome
    return outcome is not None and outcome.kind == Kind.UNKNOWN and not outcome.durable


def _is_about(error: BanksmanError, session: Session) -> bool:
    """Return whether an error is about this session.

    It may be about another session that drives the same conversation.
    """
    return error.ids.get("session") in (None, session.id)


def _not_here(session: Session) -> Problem:
    return Problem(
        NOT_HERE, "NotHere", "this host does not own the session", ids={"session": session.id}
    )
