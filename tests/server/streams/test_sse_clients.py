"""Server-sent events as read by an independent client library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
from httpx_sse import connect_sse
from tests.server.kit import AUTHORIZATION, SECONDS_MAX, Served
from tests.thorough import thorough

from banksman.server.streams.event_format import RETRY_MILLISECONDS

pytestmark = thorough


def test_httpx_sse_decodes_every_event_of_a_stream(tmp_path: Path) -> None:
    """httpx-sse also delivers a block that has `retry:` and no `data:`, with empty data."""
    with (
        Served(tmp_path / "served") as served,
        httpx.Client(base_url=served.url, headers=AUTHORIZATION, timeout=SECONDS_MAX) as client,
    ):

        def kinds_until_live(path: str) -> list[str]:
            kinds: list[str] = []
            with connect_sse(client, "GET", path) as source:
                for event in source.iter_sse():
                    # The first event carries the delay before a reconnect.
                    assert event.retry == (None if kinds else RETRY_MILLISECONDS)
                    shown: dict[str, Any] = event.json()
                    kinds.append(shown["kind"])
                    if event.event == "stream.live":
                        return kinds
            raise AssertionError(f"the stream ended: {kinds}")

        session = served.open()
        served.outcome(session, served.ask(session, "hello"))
        assert kinds_until_live("/v1/events?after=now") == ["stream.live"]
        for path in (f"/v1/sessions/{session}/events", "/v1/events"):
            assert kinds_until_live(path)[-2:] == ["turn.ended", "stream.live"]
