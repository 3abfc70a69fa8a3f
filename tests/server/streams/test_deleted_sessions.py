"""A deleted session and a later one with the same id: no reader takes one for the other."""

from __future__ import annotations

from tests.server.kit import Served
from tests.thorough import thorough

from banksman.testing import fake_agent

pytestmark = thorough


def made(served: Served, key: str) -> str:
    """Create a session and return its id, which is the same each time for this key."""
    return served.post("/v1/sessions", {"command": fake_agent.command()}, headers={"Idempotency-Key": key})["id"]


def test_stream_of_new_session_never_shows_events_of_the_deleted_one(served: Served) -> None:
    """Within the time for which the server caches pages."""
    session = made(served, "forgotten")
    served.outcome(session, served.ask(session, "a secret of the first"))
    path = f"/v1/sessions/{session}/events"
    for one in (path, "/v1/events"):
        with served.stream(one) as stream:
            before = stream.until_live()
            assert any("a secret" in str(message.data) for message in before)
    assert served.request("DELETE", f"/v1/sessions/{session}?forget=1").status == 204
    assert made(served, "forgotten") == session
    page = [event["cursor"] for event in served.get(path)["events"]]
    for one in (path, "/v1/events"):
        with served.stream(one) as stream:
            shown = [message.data for message in stream.until_live()]
        assert [event["cursor"] for event in shown if event["session"] == session] == page, one


def test_stream_cursor_of_deleted_session_raises_history_lost(served: Served) -> None:
    session = made(served, "old")
    served.outcome(session, served.ask(session, "first"))
    with served.stream(f"/v1/sessions/{session}/events") as stream:
        last = stream.until_live()[-1].id
        served.request("DELETE", f"/v1/sessions/{session}?forget=1")
        assert made(served, "old") == session
        served.outcome(session, served.ask(session, "of the new one"))
        served.outcome(session, served.ask(session, "of the new one, too"))
        messages = list(stream.messages())
    assert messages[-1].event == "stream.closing"
    assert "of the new one" not in str(messages)
    gone = served.request("GET", f"/v1/sessions/{session}/events?after={last}", headers={"Accept": "text/event-stream"})
    assert (gone.status, gone.json["title"]) == (410, "HistoryLost")
