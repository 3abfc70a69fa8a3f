"""Failures in the replies of an ACP agent, as values, and the ends of turns. Pure functions.

ACP has no field for the cause of a failure. An agent reports it as a JSON-RPC error whose text or
data repeats the provider's words, or as a stop reason. The code -32000 means that a login is
required. Some agents put the HTTP status into the data. Everything else is decided by the text.

Some agents give the stop reason `end_turn` for every kind of end. `judged` applies the quirks of
their profile. The frame in the log stays unchanged; only its meaning is corrected.
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from banksman.core.dialects import failure_texts
from banksman.core.dialects.acp.protocol_v1 import (
    AUTH_REQUIRED,
    STOP_ERRORS,
    failure_text,
    is_overflow,
)
from banksman.core.dialects.acp.updates import SaidInTurn
from banksman.core.dialects.dialect import Quirks
from banksman.core.dialects.meaning import ProviderFailure, TurnOver
from banksman.core.wire.jsonrpc import REQUEST_CANCELLED, Failure
from banksman.core.wire.partial_json import mapping, text
from banksman.errors import ErrorKind

_BY_REASON = {"max_turn_requests": ErrorKind.MAX_TURNS}
# Members of the data by which agents report the HTTP status, and the wait.
_STATUS = ("status", "statusCode", "httpStatus", "http_status", "code")
_WAIT = ("retry_after", "retryAfter", "retryAfterSeconds")


def failed(over: TurnOver, error: Failure, *, is_cancelled: bool) -> TurnOver:
    """Return the boundary of a turn whose prompt was answered with an error."""
    told = failure_text(error)
    return replace(
        over,
        is_error=True,
        is_aborted=is_cancelled and error.code == REQUEST_CANCELLED,
        is_overflow=is_overflow(error),
        error=told,
        failure=failure(error, told),
    )


def judged(over: TurnOver, said: SaidInTurn, *, is_cancelled: bool, quirks: Quirks) -> TurnOver:
    """Return the boundary of a turn with the meaning of its stop reason."""
    reason = over.stop_reason
    if is_cancelled and (reason == "cancelled" or reason in quirks.cancel_may_say):
        return replace(over, is_aborted=True)
    if reason == "cancelled":
        # Some agents treat certain answers to their requests as a cancel, or give up with this
        # reason.
        error = "the agent cancelled the turn without a request"
        return replace(over, is_aborted=True, error=error)
    error = STOP_ERRORS.get(reason or "")
    if error is None and quirks.has_failed(said.text):
        error = said.text
    if error is None and quirks.silence_is_error and said.is_nothing:
        error = "the agent gave no output and reported no error"
    if error is None:
        return over
    return replace(over, is_error=True, error=error, failure=stopped(reason, error))


def failure(error: Failure, told: str) -> ProviderFailure:
    """Classify the error of a reply. `told`: the whole text of the failure."""
    data = mapping(error.data)
    status = _first(data, _STATUS, failure_texts.as_status) or failure_texts.as_status(error.code)
    named = ErrorKind.AUTH if error.code == AUTH_REQUIRED else failure_texts.kind_of_status(status)
    # The text of the error itself may begin with "Internal error", which hides a status behind it.
    details = text(data.get("details")) or ""
    status = status or _status_in(details) or failure_texts.status_in(told)
    if named is not None:
        kind = failure_texts.refined(named, told)
    else:
        by_text = failure_texts.kind_of_text(told)
        kind = by_text or failure_texts.kind_of_status(status) or ErrorKind.OTHER
    return ProviderFailure(
        kind,
        status=status,
        retry_after=_first(data, _WAIT, failure_texts.as_seconds) or failure_texts.wait_in(told),
        raw=failure_texts.shortened({"code": error.code, **data}),
    )


def _status_in(details: str) -> int | None:
    """Return the status in the details of an error, which often begin with it: "400 no"."""
    first, _, _ = details[: failure_texts.TEXT_CHARACTERS_MAX].partition(" ")
    number = int(first) if first.isascii() and first.isdecimal() and len(first) == 3 else None
    return failure_texts.as_status(number) or failure_texts.status_in(details)


def stopped(reason: str | None, told: str) -> ProviderFailure:
    """Classify a turn that ended by a stop reason, or by an error sent as its text."""
    kind = _BY_REASON.get(reason or "")
    raw = failure_texts.shortened({"stopReason": reason})
    return ProviderFailure(kind, raw=raw) if kind is not None else failure_texts.by_text(told, raw)


def _first(data: dict[str, Any], names: tuple[str, ...], read: Any) -> Any:
    return next((value for name in names if (value := read(data.get(name))) is not None), None)
