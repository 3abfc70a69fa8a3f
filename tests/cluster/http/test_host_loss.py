"""Callers that lose their host or the cluster get answers that agree with the later log."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.cluster.fleet import Fleet, fleet, until
from tests.cluster.shared import shared, some_prefix

from banksman.testing import fake_agent
from banksman.testing.nats_servers import Servers

pytestmark = pytest.mark.thorough

LONG = {"prompt long": ["stream 2000 0.05"]}


@pytest.fixture(scope="session")
def nats_one() -> Iterator[Servers]:
    yield from shared(1)


@pytest.fixture
def many(tmp_path: Path, nats_one: Servers) -> Iterator[Fleet]:
    with fleet(tmp_path, nats_one, some_prefix()) as found:
        yield found


def test_waiter_at_host_that_loses_its_lease_gets_the_logged_outcome(tmp_path: Path) -> None:
    with (
        Servers(1) as servers,
        fleet(tmp_path, servers, some_prefix(), lease=5) as many,
        ThreadPoolExecutor() as threads,
    ):
        both, other = many.front("both", room=4), many.front("other")
        session = both.open(LONG)
        running, waiting = both.ask(session, "long"), both.ask(session, "waits")
        until(lambda: both.get(f"/v1/sessions/{session}/turns/{running}")["state"] == "running", "it runs")
        told = [threads.submit(both.outcome, session, turn) for turn in (running, waiting)]
        servers.stop(0)
        try:
            until(lambda: ": lease lost: " in both.log.read_text(encoding="utf-8"), "it is fenced")
        finally:
            servers.cont(0)
        outcomes = [each.result(60) for each in told]
        assert [outcome["kind"] for outcome in outcomes] == ["unknown", "done"]
        assert all(outcome["durable"] for outcome in outcomes)
        assert outcomes == [other.outcome(session, turn) for turn in (running, waiting)]


def test_ask_not_started_before_host_loss_runs_elsewhere(tmp_path: Path) -> None:
    """The log has no start of the ask, so its prompt was not sent."""
    script = {"prompt short": ["stream 10 0.05"]}
    with Servers(1) as servers, fleet(tmp_path, servers, some_prefix(), lease=5) as many:
        both = many.front("both", room=4)
        session = both.open(script)
        # The first turn takes the lease of the conversation. While that lease is unanswered, the journal notes nothing
        # behind it.
        both.outcome(session, both.ask(session, "first"))
        running, waiting = both.ask(session, "short"), both.ask(session, "waits")
        until(lambda: both.get(f"/v1/sessions/{session}/turns/{running}")["state"] == "running", "it runs")
        servers.stop(0)
        try:
            until(lambda: ": lease lost: " in both.log.read_text(encoding="utf-8"), "it is fenced")
        finally:
            servers.cont(0)
        # The end of the turn waited in the journal for the servers. The journal was replayed before the session was
        # claimed again.
        assert both.outcome(session, running)["kind"] == "done"
        assert both.outcome(session, waiting)["text"] == "waits"


def test_session_without_a_matching_host_reports_it_and_waits_for_one(many: Fleet) -> None:
    many.host("plain")
    strong = many.host("strong", "gpu")
    front = many.front()
    session = front.post("/v1/sessions", {"command": fake_agent.command({}), "labels": ["gpu"]})["id"]
    many.lose(strong, front)
    until(lambda: front.get(f"/v1/sessions/{session}")["state"] == "not movable", "it is said without being asked")
    refused = front.request("POST", f"/v1/sessions/{session}/turns", {"prompt": "hi"})
    assert (refused.status, refused.json["title"]) == (503, "NotMovable"), refused
    assert "plain has no gpu" in refused.json["detail"]
    many.host("stronger", "gpu")
    until(lambda: front.get(f"/v1/sessions/{session}")["host"] == "stronger", "it goes on")
    assert front.outcome(session, front.ask(session, "hi"))["text"] == "hi"


def test_session_closed_after_its_host_died_is_closed(many: Fleet) -> None:
    host = many.host("a")
    front = many.front()
    session = front.open()
    many.lose(host, front)
    until(lambda: not any(each["room"] for each in front.get("/v1/hosts")["hosts"]), "its host is dead")
    with ThreadPoolExecutor() as threads:
        closing = threads.submit(front.request, "DELETE", f"/v1/sessions/{session}")
        many.host("b")
        closed = closing.result()
    assert (closed.status, closed.json["phase"]) == (200, "closed"), closed
    kinds = [event["kind"] for event in front.get(f"/v1/sessions/{session}/events?limit=1000")["events"]]
    assert kinds[-1] == "session.closed"
    until(lambda: front.get(f"/v1/sessions/{session}")["host"] is None, "nobody has it")


def test_cut_off_front_end_answers_unreachable_with_a_key_to_retry(tmp_path: Path) -> None:
    with Servers(1) as servers, fleet(tmp_path, servers, some_prefix(), lease=5) as many:
        many.host("a")
        front = many.front()
        session = front.open()
        servers.stop(0)
        try:
            for path in ("/v1/sessions/never-heard-of", f"/v1/sessions/{session}/events"):
                answer = front.request("GET", path)
                assert (answer.status, answer.json["title"]) == (503, "Unreachable"), answer
            refused = front.request("POST", f"/v1/sessions/{session}/turns", {"prompt": "hi"})
            assert (refused.status, refused.json["title"]) == (503, "Unreachable"), refused
        finally:
            servers.cont(0)
        # Every forward of the request carried this key, so the ask is one turn.
        headers = {"Idempotency-Key": refused.json["ids"]["key"]}
        again = until(
            lambda: (
                (found := front.request("POST", f"/v1/sessions/{session}/turns", {"prompt": "hi"}, headers=headers))
                and found.status == 202
                and found
            ),
            "it is accepted",
        )
        assert front.outcome(session, again.json["turn"])["text"] == "hi"
        events = front.get(f"/v1/sessions/{session}/events?limit=1000")["events"]
        assert [event["kind"] for event in events].count("turn.queued") == 1


@pytest.mark.parametrize("room", [0, 4])
def test_open_refuses_conversation_driven_by_another_session(many: Fleet, room: int) -> None:
    if not room:
        many.host("a")
    front = many.front(room=room)
    session = front.open()
    front.outcome(session, front.ask(session, "hi"))
    conversation = front.get(f"/v1/sessions/{session}")["conversation"]
    refused = front.request("POST", "/v1/sessions", {"command": fake_agent.command({}), "resume": conversation})
    assert (refused.status, refused.json["title"]) == (409, "NotOwner"), refused
    assert refused.json["ids"]["session"] == session
