"""ACP dialect: the cause of a failed turn, from the error of a reply or a stop reason."""

from __future__ import annotations

from typing import Any

import pytest

from banksman.core.dialects.acp import protocol_v1, provider_errors
from banksman.core.wire.jsonrpc import Failure
from banksman.errors import ErrorKind

INTERNAL = -32603


@pytest.mark.parametrize(
    ("error", "kind", "status"),
    [
        (Failure(-32000, "Authentication required"), ErrorKind.AUTH, None),
        # Recorded from Qwen Code.
        (Failure(INTERNAL, "Internal error", {"details": "400 fake 400"}), ErrorKind.INVALID_REQUEST, 400),
        (Failure(INTERNAL, "Internal error", {"details": "API Error: 529 overloaded"}), ErrorKind.OVERLOADED, 529),
        (Failure(INTERNAL, "no", {"status": 402}), ErrorKind.BILLING, 402),
        (Failure(429, "Rate limit exceeded. Try again later."), ErrorKind.RATE_LIMITED, 429),
        (Failure(401, "no: prompt is too long"), ErrorKind.AUTH, 401),
        (Failure(INTERNAL, "no: usage limit", {"status": 429}), ErrorKind.USAGE_LIMIT, 429),
        (Failure(INTERNAL, "no: usage limit", {"status": 503}), ErrorKind.OVERLOADED, 503),
        (Failure(INTERNAL, "fetch failed"), ErrorKind.NETWORK, None),
        (Failure(INTERNAL, "You've hit your usage limit"), ErrorKind.USAGE_LIMIT, None),
        (Failure(INTERNAL, "no", {"error": "context_length_exceeded"}), ErrorKind.CONTEXT_OVERFLOW, None),
        (Failure(INTERNAL, "the model is gone"), ErrorKind.OTHER, None),
        (Failure(INTERNAL, "read 412 files"), ErrorKind.OTHER, None),
    ],
)
def test_error_reply_has_kind_of_its_code_data_or_text(error: Failure, kind: ErrorKind, status: int | None) -> None:
    found = provider_errors.failure(error, protocol_v1.failure_text(error))
    assert (found.kind, found.status) == (kind, status)


def test_wait_is_read_from_data_or_text() -> None:
    error = Failure(429, "no", {"retryAfter": 20})
    assert provider_errors.failure(error, "no").retry_after == 20.0
    assert provider_errors.failure(Failure(429, "no"), "retry after 2 minutes").retry_after == 120.0


@pytest.mark.parametrize(
    ("reason", "told", "kind"),
    [
        ("max_turn_requests", "the agent reached its limit", ErrorKind.MAX_TURNS),
        ("end_turn", "API Error: 429 rate limit", ErrorKind.RATE_LIMITED),
        ("refusal", "the agent refused to continue", ErrorKind.OTHER),
        (None, "odd", ErrorKind.OTHER),
    ],
)
def test_stop_reason_has_kind(reason: str | None, told: str, kind: ErrorKind) -> None:
    assert provider_errors.stopped(reason, told).kind is kind


def test_fields_of_a_failure_are_bounded() -> None:
    data: dict[str, Any] = {f"field-{number}": "x" * 5000 for number in range(100)}
    raw = provider_errors.failure(Failure(1, "no", {**data, "deep": [[]]}), "no").raw
    assert raw is not None
    assert len(raw) == 16
    assert max(len(str(value)) for value in raw.values()) == 1000
