"""W3C trace contexts: which texts are one, and what an agent gets."""

from __future__ import annotations

import pytest

from banksman.core.session.trace_context import TraceContext, of_agent, parse, span_of

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TEXT = f"00-{TRACE}-{PARENT}-01"


def test_traceparent_is_parsed_with_its_flags() -> None:
    assert parse(f" {TEXT} ") == TraceContext(TRACE, PARENT, "01")
    assert parse(TEXT[:-2] + "00") == TraceContext(TRACE, PARENT, "00")
    assert [TraceContext(TRACE, PARENT, flags).is_sampled for flags in ("00", "01", "02", "03")] == [0, 1, 0, 1]
    # A later version may have more members.
    assert parse(f"cc-{TRACE}-{PARENT}-01-more") == TraceContext(TRACE, PARENT, "01")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "00",
        TEXT.upper(),
        f"{TEXT}-more",
        f"ff-{TRACE}-{PARENT}-01",
        f"00-{'0' * 32}-{PARENT}-01",
        f"00-{TRACE[1:]}-{PARENT}-01",
        f"00-{TRACE}-{PARENT}-1",
        f"00-{TRACE}-{PARENT}-01\n00",
    ],
)
def test_invalid_traceparent_is_none(text: str) -> None:
    assert parse(text) is None


def test_agent_gets_the_span_of_its_turn() -> None:
    assert of_agent(TEXT, "t-0123456789abcdef") == f"00-{TRACE}-0123456789abcdef-01"
    assert of_agent(None, "t-0123456789abcdef") is None
    # Neither a damaged log nor a turn of another form makes an invalid variable.
    assert of_agent("nonsense", "t-0123456789abcdef") is None
    for turn in ("t-1", "t-0000000000000000", "t-0123456789ABCDEF"):
        assert span_of(turn) is None
        assert of_agent(TEXT, turn) is None
