"""Failures, retries and usage windows in the messages of the Codex app-server, as values.

Pure functions from the members of a message. The tables are made from recordings of 0.166.0:

- `codexErrorInfo` names the error: a word, or an object with the word and the HTTP status. "other"
  proves nothing. The message is then often the body of the API's answer, and its `code` tells.
- `error` with `willRetry`: the agent calls the model again ("Reconnecting... 2/5"). The delay is
  not reported.
- `account/rateLimits/updated`: the usage windows of the account. The error of a used up window does
  not repeat the time of its reset.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from banksman.core.dialects import failure_texts
from banksman.core.dialects.meaning import (
    WINDOW_NAME_CHARACTERS_MAX,
    LimitsReported,
    LimitWindow,
    ProviderFailure,
    Retrying,
)
from banksman.core.wire.elided_text import cut
from banksman.core.wire.partial_json import decoded, mapping, text
from banksman.errors import ErrorKind

_BY_INFO = {
    "contextWindowExceeded": ErrorKind.CONTEXT_OVERFLOW,
    "sessionBudgetExceeded": ErrorKind.BUDGET,
    "usageLimitExceeded": ErrorKind.USAGE_LIMIT,
    "rateLimitExceeded": ErrorKind.RATE_LIMITED,
    "serverOverloaded": ErrorKind.OVERLOADED,
    "flexUnavailable": ErrorKind.OVERLOADED,
    "policyCapacityUnavailable": ErrorKind.OVERLOADED,
    "internalServerError": ErrorKind.OVERLOADED,
    "unauthorized": ErrorKind.AUTH,
    "modelNotFound": ErrorKind.INVALID_REQUEST,
    "badRequest": ErrorKind.INVALID_REQUEST,
    "cyberPolicy": ErrorKind.INVALID_REQUEST,
    "misalignmentPolicyViolation": ErrorKind.INVALID_REQUEST,
}
# The connection failed, unless a status shows that the API answered.
_CONNECTION = frozenset(
    (
        *("httpConnectionFailed", "responseStreamConnectionFailed"),
        *("responseStreamDisconnected", "responseTooManyFailedAttempts"),
    )
)
# By `code` or `type` in the body of the API's answer.
_BY_CODE = {
    "context_length_exceeded": ErrorKind.CONTEXT_OVERFLOW,
    "insufficient_quota": ErrorKind.BILLING,
    "usage_limit_reached": ErrorKind.USAGE_LIMIT,
    "rate_limit_exceeded": ErrorKind.RATE_LIMITED,
    "invalid_api_key": ErrorKind.AUTH,
    "server_is_overloaded": ErrorKind.OVERLOADED,
    "invalid_request_error": ErrorKind.INVALID_REQUEST,
}
_ATTEMPT = re.compile(r"(\d{1,4})/(\d{1,4})\s*$")
# The window of the ordinary account limit has no prefix.
_PLAIN_LIMIT = "codex"


def failure(error: Mapping[str, Any], told: str) -> ProviderFailure:
    """Classify the `error` of a message. `told`: the whole text of the failure."""
    info, status = _info(error)
    status = status or failure_texts.status_in(told)
    named = (
        _BY_INFO.get(info)
        or _by_body(text(error.get("message")) or "")
        or failure_texts.kind_of_status(status)
    )
    if named is not None:
        kind = failure_texts.refined(named, told)
    else:
        default = ErrorKind.NETWORK if info in _CONNECTION else ErrorKind.OTHER
        kind = failure_texts.kind_of_text(told) or default
    return ProviderFailure(
        kind,
        status=status,
        retry_after=failure_texts.wait_in(told),
        raw=failure_texts.shortened({"codexErrorInfo": info, "httpStatusCode": status}),
    )


def retrying(error: Mapping[str, Any]) -> Retrying:
    """Return the retry that an `error` with `willRetry` announces."""
    message = text(error.get("message")) or ""
    cause = text(error.get("additionalDetails")) or message or "unknown"
    failed = failure({**error, "message": cause}, cause)
    counts = _ATTEMPT.search(message)
    return Retrying(
        attempt=1 if counts is None else int(counts[1]),
        attempts_max=None if counts is None else int(counts[2]),
        cause=cut(cause, failure_texts.RAW_CHARACTERS_MAX),
        kind=failed.kind,
        status=failed.status,
    )


def limits(told: Mapping[str, Any]) -> LimitsReported | None:
    """Return the windows of `account/rateLimits/updated`; None if it names no window."""
    limit = text(told.get("limitId")) or _PLAIN_LIMIT
    prefix = "" if limit == _PLAIN_LIMIT else f"{cut(limit, WINDOW_NAME_CHARACTERS_MAX // 2)} "
    windows: list[LimitWindow] = []
    for name in ("primary", "secondary"):
        window = mapping(told.get(name))
        percent = failure_texts.as_seconds(window.get("usedPercent"))
        if percent is not None:
            windows.append(
                LimitWindow(
                    f"{prefix}{name}",
                    used=percent / 100,
                    resets_at=failure_texts.as_time(window.get("resetsAt")),
                    is_exhausted=percent >= 100,
                )
            )
    return LimitsReported(tuple(windows)) if windows else None


def _info(error: Mapping[str, Any]) -> tuple[str, int | None]:
    info = error.get("codexErrorInfo")
    if isinstance(info, str):
        return info, None
    for name, details in mapping(info).items():
        return name, failure_texts.as_status(mapping(details).get("httpStatusCode"))
    return "", None


def _by_body(message: str) -> ErrorKind | None:
    """Return the kind by the body of the API's answer, if the message is one."""
    if not message.startswith("{") or len(message) > failure_texts.TEXT_CHARACTERS_MAX:
        return None
    answered = mapping(mapping(decoded(message.encode(errors="replace"))).get("error"))
    by_code = _BY_CODE.get(text(answered.get("code")) or "")
    return by_code or _BY_CODE.get(text(answered.get("type")) or "")
