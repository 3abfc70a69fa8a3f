"""Errors as HTTP problem documents (RFC 9457), with a status that says which side must act.

- 4xx: the caller.
- 502: the agent.
- 503: the operator of the machine or the store. The client may retry.
- 504: unknown whether the request was done.
- 500: a bug.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from banksman import Host, errors
from banksman.errors import BanksmanError, NotFound
from banksman.server.server_settings import NAME_LENGTH_MAX
from banksman.sessions.session import Session

if TYPE_CHECKING:
    from starlette.responses import Response

MEDIA_TYPE = "application/problem+json"
# `Retry-After`, in seconds. The right value cannot be known. One second is long enough to avoid a
# retry storm, and short enough that a user does not notice.
RETRY_SECONDS = 1
DETAIL_CHARACTERS_MAX = 2000
CLOSING_HINT = (
    "the server is shutting down: send the request again when it is back, or to another server"
)

# The first matching entry counts: subclasses come before their base classes.
_STATUSES: tuple[tuple[type[BanksmanError], int], ...] = (
    (errors.NotFound, 404),
    (errors.UsageError, 422),
    (errors.QueueFull, 429),
    (errors.Busy, 409),
    (errors.NoOwner, 503),
    # The next owner of the session is ready in a moment.
    (errors.Moving, 503),
    (errors.Moved, 503),
    (errors.Refused, 409),
    (errors.CommandError, 409),
    (errors.HistoryLost, 410),
    (errors.StoreDamaged, 500),
    (errors.StoreTooNew, 500),
    (errors.Unanswered, 504),
    (errors.StoreError, 503),
    (errors.MachineError, 503),
    (errors.AgentError, 502),
    (errors.BugError, 500),
)
_WORD = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


class Problem(Exception):
    """An HTTP error response, raised where the error is found."""

    def __init__(
        self,
        status: int,
        title: str,
        detail: str,
        *,
        hint: str = "",
        ids: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.title = title
        # The invalid value may have a megabyte, and its sender knows it.
        self.detail = detail[:DETAIL_CHARACTERS_MAX]
        self.hint = hint[:DETAIL_CHARACTERS_MAX]
        self.ids = dict(ids or {})
        self.headers = dict(headers or {})
        if status in (429, 503):
            self.headers.setdefault("Retry-After", str(RETRY_SECONDS))

    def response(self) -> Response:
        # The policies of a host raise problems too, before anything of HTTP is imported.
        from starlette.responses import Response  # noqa: PLC0415

        return Response(self.body(), self.status, self.headers, MEDIA_TYPE)

    def body(self) -> bytes:
        return msgspec.json.encode(
            {
                "type": f"urn:banksman:{_WORD.sub('-', self.title).lower()}",
                "title": self.title,
                "status": self.status,
                "detail": self.detail,
                "hint": self.hint,
                "ids": self.ids,
            },
            enc_hook=str,
        )


def away(what: str, error: errors.Unreachable) -> Problem:
    """Return the problem for a read that could not reach its target.

    A read changes nothing, so the status is 503 and not 504, which says that the effect is unknown.
    """
    hint = "try again, or ask another server; nothing is lost"
    return Problem(503, "Unreachable", f"{what}: {error.args[0]}", hint=hint)


def problem_of(error: BanksmanError, *, is_closing: bool = False) -> Problem:
    """Return the HTTP problem for an error.

    `is_closing`: the host refuses because it shuts down. The client may retry elsewhere, or later.
    """
    status = next((status for kind, status in _STATUSES if isinstance(error, kind)), 500)
    hint = error.hint
    if isinstance(error, errors.Closed) and is_closing:
        # The host's own hint addresses a program that embeds the host.
        status, hint = 503, CLOSING_HINT
    headers = {"Retry-After": str(RETRY_SECONDS)} if isinstance(error, errors.Busy) else None
    detail = error.args[0] if error.args else ""
    return Problem(
        status, type(error).__name__, str(detail), hint=hint, ids=error.ids, headers=headers
    )


def session_of(host: Host, id_or_name: str) -> Session:
    """Find a session. Raises `NotFound` also for text that cannot be an id or a name."""
    if len(id_or_name) > NAME_LENGTH_MAX or "\0" in id_or_name:
        raise NotFound("there is no such session", hint="see /v1/sessions")
    return host.session(id_or_name)
