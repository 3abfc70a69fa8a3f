"""A list of sessions that many hosts have: each host says what its own are doing, and the store says the rest.

The store knows which sessions there are and who has them, and that is the list. What a session is doing at this moment
(it runs, it asks something) only its owner knows without reading its log. So the owners of what is listed are asked,
all at once and not for long; of one that is silent it is said that it is unreachable, and nothing else is guessed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

import msgspec

from banksman.cluster.http.forwarded_request import ForwardedRequest, ForwardedResponse
from banksman.cluster.http.owner_proxy import Front
from banksman.server.api.messages.session_messages import Session, Sessions
from banksman.server.problems import Problem

LOOK_SECONDS_MAX = 1.0
# Owners that are asked at a time.
HOSTS_AT_ONCE_MAX = 64


async def filled(front: Front, listed: Sequence[Session]) -> list[Session]:
    """The same sessions in the same order, with what their owners say of them."""
    owners = {_host(session) for session in listed if session.phase == "elsewhere"}
    places = asyncio.Semaphore(HOSTS_AT_ONCE_MAX)

    async def ask(host: str) -> tuple[str, dict[str, Session] | None]:
        async with places:
            return host, await _told(front, host)

    told = dict(await asyncio.gather(*map(ask, sorted(owners))))
    return [_filled(session, told.get(_host(session))) for session in listed]


def _filled(session: Session, told: dict[str, Session] | None) -> Session:
    if session.phase != "elsewhere":
        return session
    if told is None:
        session.state = "unreachable"
        return session
    # It may have come there, or have left, since the store was looked at.
    found = told.get(session.id)
    if found is None:
        return session
    found.host, found.owner = session.host, session.owner
    return found


async def _told(front: Front, host: str) -> dict[str, Session] | None:
    """By id, what a host says of those that it has; None: it says nothing, or nothing that we understand."""
    with suppress(Problem, msgspec.DecodeError):
        answer = await front.ask(f"host:{host}", ForwardedRequest("GET", "/v1/sessions"), LOOK_SECONDS_MAX)
        if isinstance(answer, ForwardedResponse) and answer.status == 200:
            return {each.id: each for each in msgspec.json.decode(answer.body, type=Sessions).sessions}
    return None


def _host(session: Session) -> str:
    return "" if session.owner is None else session.owner.address.partition("@")[0]
