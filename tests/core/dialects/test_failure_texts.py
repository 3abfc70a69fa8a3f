"""Tables that classify a failure by its text: the HTTP status and the wait that a text mentions."""

from __future__ import annotations

import pytest

from banksman.core.dialects import failure_texts


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("API Error: 429 no", 429),
        ("Request rejected (429)", 429),
        ("exceeded retry limit, last status: 429", 429),
        ("429 Too Many Requests", 429),
        ("401 Incorrect API key provided", 401),
        ('400 {"type":"error"}', 400),
        ("429 status code (no body)", 429),
        ("503: no", 503),
        ("503", 503),
        ("401 bottles of beer", None),
        ("4010 Bottles", None),
        ("read 412 files", None),
        ("status 200", None),
    ],
)
def test_status_is_found_only_where_text_reports_one(text: str, status: int | None) -> None:
    assert failure_texts.status_in(text) == status


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("Please try again in 1.5s.", 1.5),
        ("Please try again in 20ms", 0.02),
        ("try again in 6m0s", 360.0),
        ("retry after 20 seconds", 20.0),
        ("retry-after: 30", 30.0),
        ("Retry after 5 Minutes", 300.0),
        ("try again in 2 hours", 7200.0),
        ("try again in 3 days", 259_200.0),
        # No number, unit or wait that a provider means.
        ("retry after 99999999999999999999999 seconds", None),
        (f"retry after {'9' * 3000}", None),
        ("try again in 1e308s", None),
        ("try again in 1,000 seconds", None),
        ("try again in 2 months", None),
        ("try again later", None),
    ],
)
def test_wait_is_read_whole_or_not_at_all(text: str, seconds: float | None) -> None:
    assert failure_texts.wait_in(text) == seconds
