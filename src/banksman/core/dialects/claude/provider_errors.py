"""Failures, retries and usage windows in the frames of Claude Code, as values.

Pure functions from the members of a frame. The tables are made from recordings of version 2.1.325:

- `result` of a failed model call: `terminal_reason` is "api_error", `api_error_status` has the HTTP
  status, `api_error_type` the name by which the API calls the error. `api_error` is
  "usage_limit_reached" or "connection_failed" where no status tells.
- `system` with `api_retry`: the agent waits and calls the model again.
- `rate_limit_event`: the usage windows of an account with a subscription. A short throttle gives
  such a frame too, but without a window.
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
from banksman.core.wire.partial_json import count, mapping, number, text
from banksman.errors import ErrorKind

# By `subtype` or `terminal_reason` of a result.
_BY_END = {
    "error_max_turns": ErrorKind.MAX_TURNS,
    "max_turns": ErrorKind.MAX_TURNS,
    "error_max_budget_usd": ErrorKind.BUDGET,
    "budget_exhausted": ErrorKind.BUDGET,
    "prompt_too_long": ErrorKind.CONTEXT_OVERFLOW,
}
# By `api_error` of a result.
_BY_CAUSE = {
    "usage_limit_reached": ErrorKind.USAGE_LIMIT,
    "connection_failed": ErrorKind.NETWORK,
}
# By `api_error_type` of a result: the names of the API.
_BY_TYPE = {
    "authentication_error": ErrorKind.AUTH,
    "permission_error": ErrorKind.AUTH,
    "billing_error": ErrorKind.BILLING,
    "rate_limit_error": ErrorKind.RATE_LIMITED,
    "overloaded_error": ErrorKind.OVERLOADED,
    "api_error": ErrorKind.OVERLOADED,
    "timeout_error": ErrorKind.NETWORK,
    "invalid_request_error": ErrorKind.INVALID_REQUEST,
    "not_found_error": ErrorKind.INVALID_REQUEST,
    "request_too_large": ErrorKind.INVALID_REQUEST,
}
# By `error` of an `api_retry`: the names of the agent.
_BY_RETRY = {
    "authentication_failed": ErrorKind.AUTH,
    "oauth_org_not_allowed": ErrorKind.AUTH,
    "verification_required": ErrorKind.AUTH,
    "cloud_credential_error": ErrorKind.AUTH,
    "account_on_hold": ErrorKind.BILLING,
    "billing_error": ErrorKind.BILLING,
    "rate_limit": ErrorKind.RATE_LIMITED,
    "overloaded": ErrorKind.OVERLOADED,
    "server_error": ErrorKind.OVERLOADED,
    "invalid_request": ErrorKind.INVALID_REQUEST,
    "model_not_found": ErrorKind.INVALID_REQUEST,
}
# Older versions: "Claude AI usage limit reached|1760000000".
_RESET = re.compile(r"limit reached\|(\d{9,10})\b")


def failure(
    error: str,
    *,
    subtype: Any,
    terminal_reason: Any,
    api_error: Any,
    api_error_type: Any,
    api_error_status: Any,
) -> ProviderFailure:
    """Classify a failed result. `error`: its text."""
    status = failure_texts.as_status(api_error_status) or failure_texts.status_in(error)
    named = (
        _BY_END.get(text(subtype) or "")
        or _BY_END.get(text(terminal_reason) or "")
        or _BY_CAUSE.get(text(api_error) or "")
        or _BY_TYPE.get(text(api_error_type) or "")
        or failure_texts.kind_of_status(status)
    )
    reset = None
    if named in (None, ErrorKind.RATE_LIMITED, ErrorKind.USAGE_LIMIT):
        reset = _RESET.search(error[: failure_texts.TEXT_CHARACTERS_MAX])
    if reset is not None:
        kind = ErrorKind.USAGE_LIMIT
    elif named is not None:
        kind = failure_texts.refined(named, error)
    else:
        kind = failure_texts.kind_of_text(error) or ErrorKind.OTHER
    raw = {
        "subtype": subtype,
        "terminal_reason": terminal_reason,
        "api_error": api_error,
        "api_error_type": api_error_type,
        "api_error_status": api_error_status,
    }
    return ProviderFailure(
        kind,
        status=status,
        retry_after=failure_texts.wait_in(error),
        limited_until=None if reset is None else float(reset[1]),
        raw=failure_texts.shortened(raw),
    )


def retrying(frame: Mapping[str, Any]) -> Retrying:
    """Return the retry that an `api_retry` announces."""
    cause = text(frame.get("error")) or "unknown"
    status = failure_texts.as_status(frame.get("error_status"))
    kind = _BY_RETRY.get(cause) or failure_texts.kind_of_status(status)
    delay = number(frame.get("retry_delay_ms"))
    return Retrying(
        attempt=count(frame.get("attempt")) or 1,
        attempts_max=count(frame.get("max_retries")) or None,
        delay=failure_texts.as_seconds(None if delay is None else delay / 1000),
        cause=cut(cause, failure_texts.RAW_CHARACTERS_MAX),
        # Without a status there was no answer at all.
        kind=kind or (ErrorKind.NETWORK if status is None else ErrorKind.OTHER),
        status=status,
    )


def limits(info: Mapping[str, Any]) -> LimitsReported | None:
    """Return the windows of a `rate_limit_event`; None if it names no window."""
    windows = {
        name: _window(name, mapping(window), info)
        for name, window in mapping(info.get("unifiedWindows")).items()
    }
    name = text(info.get("rateLimitType"))
    if name is not None and name not in windows:
        windows[name] = _window(name, info, info)
    named = tuple(
        window for window in windows.values() if len(window.name) <= WINDOW_NAME_CHARACTERS_MAX
    )
    return LimitsReported(named) if named else None


def _window(name: str, window: Mapping[str, Any], info: Mapping[str, Any]) -> LimitWindow:
    return LimitWindow(
        name,
        used=failure_texts.as_seconds(window.get("utilization")),
        resets_at=failure_texts.as_time(window.get("resetsAt")),
        # A used up window is no obstacle while the account pays for the overage.
        is_exhausted=window.get("status") == "rejected" and info.get("isUsingOverage") is not True,
    )
