"""Failures in the replies of an ACP agent, as values. Pure functions.

ACP has no field for the cause of a failure. An agent reports it as a JSON-RPC error whose text or
data repeats the provider's words, or as a stop reason. The code -32000 means that a login is
required. Some agents put the HTTP status into the data. Everything else is decided by the text.
"""

from __future__ import annotations

from typing import Any

from banksman.core.dialects import failure_texts
from banksman.core.dialects.acp.protocol_v1 import AUTH_REQUIRED
from banksman.core.dialects.meaning import ProviderFailure
from banksman.core.wire.jsonrpc import Failure
from banksman.core.wire.partial_json import mapping, text
from banksman.errors import ErrorKind

_BY_REASON = {"max_turn_requests": ErrorKind.MAX_TURNS}
# Members of the data by which agents report the HTTP status, and the wait.
_STATUS = ("status", "statusCode", "httpStatus", "http_status", "code")
_WAIT = ("retry_after", "retryAfter", "retryAfterSeconds")


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
