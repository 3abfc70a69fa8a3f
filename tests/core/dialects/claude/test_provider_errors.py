"""Claude dialect: the cause of a failed result, retries and usage windows.

The frames are those of Claude Code 2.1.325 against the fake model (tests/agents/test_provider_errors.py).
"""

from __future__ import annotations

from typing import Any

import pytest
from tests.core.dialects.recordings import corpus
from tests.core.dialects.recordings.corpus import line

from banksman.core.dialects.claude import CLAUDE
from banksman.core.dialects.meaning import LimitsReported, LimitWindow, Noise, ProviderFailure, Retrying, TurnOver
from banksman.errors import ErrorKind

RESET = 1794994220


def failure(**members: Any) -> ProviderFailure:
    frame = {"type": "result", "subtype": "success", "is_error": True, "terminal_reason": "api_error", **members}
    over = CLAUDE.read(line(frame))
    assert isinstance(over, TurnOver)
    assert over.failure is not None
    assert over.is_overflow == (over.failure.kind is ErrorKind.CONTEXT_OVERFLOW)
    return over.failure


@pytest.mark.parametrize(
    ("status", "name", "text", "kind"),
    [
        (400, "invalid_request_error", "API Error: 400 no", ErrorKind.INVALID_REQUEST),
        (401, "authentication_error", "Failed to authenticate. API Error: 401 no", ErrorKind.AUTH),
        (402, "billing_error", "API Error: 402 no", ErrorKind.BILLING),
        (403, "permission_error", "Failed to authenticate. API Error: 403 no", ErrorKind.AUTH),
        (404, "not_found_error", "There's an issue with the selected model", ErrorKind.INVALID_REQUEST),
        (429, "rate_limit_error", "API Error: Request rejected (429)", ErrorKind.RATE_LIMITED),
        (500, "api_error", "API Error: 500 no", ErrorKind.OVERLOADED),
        (529, "overloaded_error", "API Error: 529 no", ErrorKind.OVERLOADED),
        # An older version reports only the status, or only the text.
        (529, None, "API Error: 529 no", ErrorKind.OVERLOADED),
        (None, None, "API Error: 401 no", ErrorKind.AUTH),
        # The API calls these plain bad requests.
        (400, "invalid_request_error", "Your credit balance is too low to access the API", ErrorKind.BILLING),
        (400, "invalid_request_error", "API Error: 400 prompt is too long", ErrorKind.CONTEXT_OVERFLOW),
    ],
)
def test_failed_call_has_kind_of_its_status_and_type(
    status: int | None, name: str | None, text: str, kind: ErrorKind
) -> None:
    found = failure(api_error_status=status, api_error_type=name, result=text)
    assert found.kind is kind
    assert found.status == (status or 401)
    assert found.raw is not None
    assert found.raw["terminal_reason"] == "api_error"


@pytest.mark.parametrize(
    ("members", "kind"),
    [
        ({"subtype": "error_max_turns", "terminal_reason": "max_turns"}, ErrorKind.MAX_TURNS),
        ({"subtype": "error_max_budget_usd", "terminal_reason": "budget_exhausted"}, ErrorKind.BUDGET),
        ({"terminal_reason": "prompt_too_long", "api_error_status": 400}, ErrorKind.CONTEXT_OVERFLOW),
        ({"api_error": "usage_limit_reached", "api_error_status": 429}, ErrorKind.USAGE_LIMIT),
        ({"api_error": "connection_failed", "result": "API Error: Connection to the API was lost"}, ErrorKind.NETWORK),
        ({"subtype": "error_during_execution", "terminal_reason": None, "errors": ["odd"]}, ErrorKind.OTHER),
        ({"terminal_reason": ["odd"], "api_error": 3, "api_error_status": True, "subtype": {}}, ErrorKind.OTHER),
    ],
)
def test_failed_result_has_kind_of_its_end(members: dict[str, Any], kind: ErrorKind) -> None:
    assert failure(**members).kind is kind


def test_reset_time_of_older_version_is_read_from_text() -> None:
    found = failure(result=f"Claude AI usage limit reached|{RESET}")
    assert (found.kind, found.limited_until) == (ErrorKind.USAGE_LIMIT, float(RESET))


@pytest.mark.parametrize(
    ("status", "name", "text", "kind"),
    [
        (529, "overloaded_error", "Overloaded (prompt is too long for the fast lane)", ErrorKind.OVERLOADED),
        (401, "authentication_error", "bad key; prompt is too long", ErrorKind.AUTH),
        (401, None, "Credit balance is too low", ErrorKind.AUTH),
        (401, None, f"the last message: limit reached|{RESET}", ErrorKind.AUTH),
        (None, "overloaded_error", f"limit reached|{RESET}", ErrorKind.OVERLOADED),
        (None, None, "API Error: 529 prompt is too long", ErrorKind.OVERLOADED),
        # The text is compatible with the field, and more specific.
        (429, "rate_limit_error", "You've hit your usage limit", ErrorKind.USAGE_LIMIT),
        (429, "rate_limit_error", f"limit reached|{RESET}", ErrorKind.USAGE_LIMIT),
        (413, "request_too_large", "prompt is too long", ErrorKind.CONTEXT_OVERFLOW),
        # No field names a kind.
        (None, None, "prompt is too long", ErrorKind.CONTEXT_OVERFLOW),
        (200, None, "prompt is too long", ErrorKind.CONTEXT_OVERFLOW),
        (None, None, "401 bottles of beer", ErrorKind.OTHER),
    ],
)
def test_text_refines_fields_and_never_contradicts_them(
    status: int | None, name: str | None, text: str, kind: ErrorKind
) -> None:
    found = failure(api_error_status=status, api_error_type=name, result=text)
    assert found.kind is kind
    assert (found.limited_until is not None) == (kind is ErrorKind.USAGE_LIMIT and str(RESET) in text)


def test_text_about_limit_does_not_hide_the_agents_own_end() -> None:
    found = failure(subtype="error_max_turns", result=f"usage limit reached|{RESET}")
    assert (found.kind, found.limited_until) == (ErrorKind.MAX_TURNS, None)


def test_successful_result_has_no_failure() -> None:
    over = CLAUDE.read(line({"type": "result", "subtype": "success", "result": "API Error: 500"}))
    assert over == TurnOver(text="API Error: 500")


def test_recorded_retries_have_attempt_delay_and_cause() -> None:
    retries = [each for each in map(CLAUDE.read, corpus.lines("claude-H-errors")) if isinstance(each, Retrying)]
    assert retries[0] == Retrying(1, "overloaded", ErrorKind.OVERLOADED, attempts_max=10, delay=0.597, status=529)
    assert {each.kind for each in retries} >= {ErrorKind.OVERLOADED, ErrorKind.AUTH}


def test_retry_without_status_is_a_network_failure() -> None:
    frame = {"type": "system", "subtype": "api_retry", "attempt": 2, "error_status": None, "error": "unknown"}
    assert CLAUDE.read(line(frame)) == Retrying(2, "unknown", ErrorKind.NETWORK)
    odd = {"type": "system", "subtype": "api_retry", "attempt": -1, "retry_delay_ms": "1", "error": 3}
    assert CLAUDE.read(line(odd)) == Retrying(1, "unknown", ErrorKind.NETWORK)


@pytest.mark.parametrize("large", [10**16, 10**310, 10**400, 1e300])
def test_numbers_out_of_bounds_are_missing(large: float) -> None:
    frame = {"type": "system", "subtype": "api_retry", "attempt": large, "max_retries": large, "retry_delay_ms": large}
    assert CLAUDE.read(line(frame)) == Retrying(1, "unknown", ErrorKind.NETWORK)
    assert failure(api_error_status=large).raw == {"subtype": "success", "terminal_reason": "api_error"}
    told = limits(rateLimitType="five_hour", utilization=large, resetsAt=large)
    assert told == LimitsReported((LimitWindow("five_hour"),))


def limits(**info: Any) -> object:
    return CLAUDE.read(line({"type": "rate_limit_event", "rate_limit_info": info}))


def test_rate_limit_event_reports_windows() -> None:
    window = {"utilization": 0.42, "resetsAt": RESET, "status": "allowed"}
    told = limits(status="allowed", resetsAt=RESET, rateLimitType="five_hour", unifiedWindows={"five_hour": window})
    assert told == LimitsReported((LimitWindow("five_hour", 0.42, float(RESET)),))
    used_up = {"utilization": 1, "resetsAt": RESET, "status": "rejected"}
    told = limits(status="rejected", unifiedWindows={"five_hour": window, "seven_day": used_up})
    assert told == LimitsReported(
        (LimitWindow("five_hour", 0.42, float(RESET)), LimitWindow("seven_day", 1.0, float(RESET), is_exhausted=True))
    )
    # Without the windows, the event still names the window that counts.
    told = limits(status="rejected", resetsAt=RESET, rateLimitType="seven_day_opus")
    assert told == LimitsReported((LimitWindow("seven_day_opus", None, float(RESET), is_exhausted=True),))


def test_window_in_paid_overage_is_not_exhausted() -> None:
    told = limits(status="rejected", resetsAt=RESET, rateLimitType="five_hour", isUsingOverage=True)
    assert told == LimitsReported((LimitWindow("five_hour", None, float(RESET)),))


@pytest.mark.parametrize("info", [{}, {"status": "rejected", "isUsingOverage": False}, {"rateLimitType": 3}])
def test_rate_limit_event_without_window_is_noise(info: dict[str, Any]) -> None:
    """A short throttle gives such an event. It says nothing about the account."""
    assert limits(**info) == Noise()
    assert CLAUDE.read(b'{"type":"rate_limit_event","rate_limit_info":7}') == Noise()
