"""Codex dialect: the cause of a failed turn, retries and usage windows.

The messages are those of Codex 0.166.0 against the fake model (tests/agents/test_provider_errors.py).
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.core.dialects.recordings.corpus import line

from banksman.core.dialects.codex import CODEX, provider_errors
from banksman.core.dialects.meaning import LimitsReported, LimitWindow, Noise, Retrying
from banksman.core.wire.elided_text import CUT
from banksman.errors import ErrorKind

RESET = 1794994143
BAD = {"error": {"message": "no", "type": "invalid_request_error", "param": None, "code": "invalid_request_error"}}
OVERFLOW = {"error": {**BAD["error"], "code": "context_length_exceeded"}}


def connection(status: int | None, word: str = "httpConnectionFailed") -> dict[str, Any]:
    return {word: {"httpStatusCode": status}}


@pytest.mark.parametrize(
    ("info", "message", "kind", "status"),
    [
        ("other", json.dumps(BAD), ErrorKind.INVALID_REQUEST, None),
        ("other", json.dumps(OVERFLOW), ErrorKind.CONTEXT_OVERFLOW, None),
        ("contextWindowExceeded", "too long", ErrorKind.CONTEXT_OVERFLOW, None),
        (connection(401), "unexpected status 401 Unauthorized: no", ErrorKind.AUTH, 401),
        (connection(402), "unexpected status 402 Payment Required: no", ErrorKind.BILLING, 402),
        (connection(403), "unexpected status 403 Forbidden: no", ErrorKind.AUTH, 403),
        (connection(404), "unexpected status 404 Not Found: no", ErrorKind.INVALID_REQUEST, 404),
        (connection(429, "responseTooManyFailedAttempts"), "exceeded retry limit", ErrorKind.RATE_LIMITED, 429),
        (connection(529), "status 529: prompt is too long", ErrorKind.OVERLOADED, 529),
        (connection(429), "You’ve hit your usage limit.", ErrorKind.USAGE_LIMIT, 429),
        ("badRequest", "maximum context length", ErrorKind.CONTEXT_OVERFLOW, None),
        (connection(529), "unexpected status 529", ErrorKind.OVERLOADED, 529),
        (connection(None), "it did not work", ErrorKind.NETWORK, None),
        ("usageLimitExceeded", "You’ve hit your usage limit.", ErrorKind.USAGE_LIMIT, None),
        ("internalServerError", "We’re currently experiencing high demand", ErrorKind.OVERLOADED, None),
        ("serverOverloaded", "Selected model is at capacity.", ErrorKind.OVERLOADED, None),
        ("other", "stream disconnected before completion: Transport error", ErrorKind.NETWORK, None),
        ("unauthorized", "no", ErrorKind.AUTH, None),
        ("sessionBudgetExceeded", "no", ErrorKind.BUDGET, None),
        ("other", "odd", ErrorKind.OTHER, None),
        (None, "{", ErrorKind.OTHER, None),
        ([1], "[]", ErrorKind.OTHER, None),
        ({"odd": 3}, "{}", ErrorKind.OTHER, None),
    ],
)
def test_failed_turn_has_kind_of_its_error(info: Any, message: str, kind: ErrorKind, status: int | None) -> None:
    found = provider_errors.failure({"codexErrorInfo": info, "message": message}, message)
    assert (found.kind, found.status) == (kind, status)


def test_wait_of_throttled_turn_is_read_from_text() -> None:
    message = "Rate limit reached. Please try again in 1.5s."
    found = provider_errors.failure({"codexErrorInfo": "rateLimitExceeded", "message": message}, message)
    assert (found.kind, found.retry_after) == (ErrorKind.RATE_LIMITED, 1.5)


def test_retried_error_reports_attempt_and_cause() -> None:
    details = "unexpected status 529 <unknown status code>: no"
    error = {
        "message": "Reconnecting... 2/5",
        "codexErrorInfo": connection(529, "responseStreamDisconnected"),
        "additionalDetails": details,
    }
    notice = {"method": "error", "params": {"error": error, "willRetry": True, "threadId": "t", "turnId": "u"}}
    assert CODEX.read(line(notice)) == Retrying(2, details, ErrorKind.OVERLOADED, attempts_max=5, status=529)


def limits(**told: Any) -> object:
    return CODEX.read(line({"method": "account/rateLimits/updated", "params": {"rateLimits": told}}))


def test_rate_limits_report_windows() -> None:
    primary = {"usedPercent": 42, "windowDurationMins": 300, "resetsAt": RESET}
    secondary = {"usedPercent": 100, "windowDurationMins": 10080, "resetsAt": None}
    assert limits(limitId="codex", primary=primary, secondary=secondary) == LimitsReported(
        (LimitWindow("primary", 0.42, float(RESET)), LimitWindow("secondary", 1.0, None, is_exhausted=True))
    )
    assert limits(limitId="other", primary=primary) == LimitsReported(
        (LimitWindow("other primary", 0.42, float(RESET)),)
    )


@pytest.mark.parametrize("told", [{}, {"primary": None, "secondary": None}, {"primary": {"usedPercent": "9"}}])
def test_rate_limits_without_window_are_noise(told: dict[str, Any]) -> None:
    """An account that pays by use has no windows."""
    assert limits(**told) == Noise()


def test_numbers_out_of_bounds_are_missing() -> None:
    window = {"usedPercent": 10, "resetsAt": 10**400}
    told = provider_errors.limits({"primary": window, "secondary": {"usedPercent": 10**400}})
    assert told == LimitsReported((LimitWindow("primary", used=0.1),))
    found = provider_errors.failure({"codexErrorInfo": connection(10**400)}, "no")
    assert found.status is None


def test_long_name_of_limit_is_cut_with_mark() -> None:
    """Only a marked cut lets the redactor recognise a divided secret."""
    told = provider_errors.limits({"limitId": "l" * 100, "primary": {"usedPercent": 1}})
    assert told == LimitsReported((LimitWindow(f"{'l' * 25}{CUT} primary", used=0.01),))
