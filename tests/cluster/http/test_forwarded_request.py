"""A front end forwards requests to the owner, places new sessions, and reports a host that does not answer."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tests import kept
from tests.cluster.fleet import Fleet, fleet, until
from tests.cluster.shared import shared, some_prefix
from tests.server.access import tokens
from tests.server.kit import Served, no_drain
from tests.thorough import thorough

from banksman import Host
from banksman.cluster.http import forwarded_request
from banksman.cluster.http.forwarded_request import ForwardedRequest, ForwardedResponse, response_of
from banksman.cluster.log.stream_mirror import StreamMirror
from banksman.errors import NotFound
from banksman.server import app, http_service
from banksman.server.access.roles import Role
from banksman.server.server_settings import ServerSettings
from banksman.testing import fake_agent
from banksman.testing.nats_servers import Servers

pytestmark = thorough


@pytest.fixture(scope="session")
def nats_one() -> Iterator[Servers]:
    yield from shared(1)


@pytest.fixture
def many(tmp_path: Path, nats_one: Servers) -> Iterator[Fleet]:
    with fleet(tmp_path, nats_one, some_prefix()) as found:
        yield found


@pytest.fixture
def soon_lost(tmp_path: Path, nats_one: Servers) -> Iterator[Fleet]:
    """A short lease: a front end waits one lease for a host that is silent or has no room."""
    with fleet(tmp_path, nats_one, some_prefix(), lease=15) as found:
        yield found


@pytest.fixture(scope="module")
def fronts(tmp_path_factory: pytest.TempPathFactory, nats_one: Servers) -> Iterator[tuple[Served, Served]]:
    """Two front ends and a host `a` behind them, for all tests that end none of the three."""
    folder = tmp_path_factory.mktemp("fleet")
    with fleet(folder, nats_one, some_prefix()) as found:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("XDG_CONFIG_HOME", str(folder / "config"))
            host = found.host("a", room=64)
            first, second = found.front("first"), found.front("second")
        with kept.shared(host.process.pid, first.pid, second.pid):
            yield first, second


# -- requests through the application of one process -------------------------------------------------------------------
async def put_through(*requests: ForwardedRequest) -> list[ForwardedResponse]:
    settings = ServerSettings(store="memory:")
    async with Host("memory:") as host:
        context = http_service.context_of(host, settings, no_drain)
        app.make(context, token="a-token-of-the-tests", port=0)
        assert context.application is not None
        return [response_of(await context.application(request.encoded())) for request in requests]


async def test_forwarded_request_is_answered_like_one_from_a_socket() -> None:
    body = msgspec.json.encode({"command": fake_agent.command({}), "name": "one"})
    opened, seen, missing = await put_through(
        ForwardedRequest("POST", "/v1/sessions", {"content-type": "application/json"}, body),
        ForwardedRequest("GET", "/v1/sessions?limit=1"),
        ForwardedRequest("GET", "/v1/sessions/none"),
    )
    assert opened.status == 201, opened
    assert opened.headers["location"] == f"/v1/sessions/{msgspec.json.decode(opened.body)['id']}"
    assert [each["name"] for each in msgspec.json.decode(seen.body)["sessions"]] == ["one"]
    assert (missing.status, missing.title) == (404, "NotFound")


async def test_forwarded_ask_keeps_its_trace() -> None:
    trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    headers = {"content-type": "application/json"}
    body = msgspec.json.encode({"command": fake_agent.command({}), "name": "one"})
    prompt = msgspec.json.encode({"prompt": "hello"})
    _, asked, page = await put_through(
        ForwardedRequest("POST", "/v1/sessions", headers, body),
        ForwardedRequest("POST", "/v1/sessions/one/turns", {**headers, "traceparent": trace}, prompt),
        ForwardedRequest("GET", "/v1/sessions/one/events?frames=false"),
    )
    assert asked.status == 202, asked
    events = msgspec.json.decode(page.body)["events"]
    assert [event["body"]["trace"] for event in events if event["kind"] == "turn.queued"] == [trace]


async def test_forwarded_open_of_another_callers_session_is_refused_by_its_owner() -> None:
    headers = {"content-type": "application/json"}
    body = msgspec.json.encode({"command": fake_agent.command({}), "name": "one"})
    opened, again, refused = await put_through(
        ForwardedRequest("POST", "/v1/sessions", headers, body, "alice", Role.ASKER),
        ForwardedRequest("POST", "/v1/sessions", headers, body, "alice", Role.ASKER),
        ForwardedRequest("POST", "/v1/sessions", headers, body, "bob", Role.ASKER),
    )
    assert (opened.status, again.status) == (201, 201)
    assert (refused.status, refused.title) == (409, "NameTaken")


async def test_forwarded_request_is_refused_outside_sessions() -> None:
    paths = ("/v1/commands", "/metrics", "/v1/stacks", "/v1/sessionsandmore", "/", "/v1/login")
    answers = await put_through(*(ForwardedRequest("GET", path) for path in paths))
    assert {answer.status for answer in answers} == {403}


async def test_forwarded_request_for_a_stream_gets_a_page() -> None:
    """Nothing could end a forwarded stream: the owner does not see the client disconnect."""
    body = msgspec.json.encode({"command": fake_agent.command({}), "name": "one"})
    _, page = await put_through(
        ForwardedRequest("POST", "/v1/sessions", {"content-type": "application/json"}, body),
        ForwardedRequest("GET", "/v1/sessions/one/events", {"accept": "text/event-stream"}),
    )
    assert page.headers["content-type"] == "application/json"


async def test_forwarded_request_refuses_malformed_bytes() -> None:
    for data in (b"", b"\xff\xfe", b"[]", b'{"method": 1}'):
        async with Host("memory:") as host:
            context = http_service.context_of(host, ServerSettings(store="memory:"), no_drain)
            app.make(context, token="a-token-of-the-tests", port=0)
            assert context.application is not None
            assert response_of(await context.application(data)).status == 400


async def test_forwarded_answer_beyond_the_size_limit_becomes_answer_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forwarded_request, "ANSWER_BYTES_MAX", 10)
    (answer,) = await put_through(ForwardedRequest("GET", "/v1/sessions"))
    assert (answer.status, answer.title) == (500, "AnswerTooLarge")


# -- processes ---------------------------------------------------------------------------------------------------------
def test_forwarded_request_names_the_caller_that_the_front_end_knows(fronts: tuple[Served, Served]) -> None:
    first, second = fronts
    session = tokens.opened_by(first, "alice", "alice-1")
    assert second.get(f"/v1/sessions/{session}/shared") == {"owner": "alice", "shared": []}
    alice = tokens.create(first, "alice", Role.ASKER)
    bob = tokens.create(second, "bob", Role.ASKER)
    ask = ("POST", f"/v1/sessions/{session}/turns", {"prompt": "x"})
    assert tokens.request(second, bob, *ask).status == 404
    body = {"shared": ["bob"]}
    assert tokens.request(first, alice, "PUT", f"/v1/sessions/{session}/shared", body).status == 200
    # No header of a client names another caller.
    for front, token in ((first, alice), (second, bob)):
        assert tokens.request(front, token, *ask, {"X-Forwarded-User": "boss", "caller": "boss"}).status == 202
    events = second.get(f"/v1/sessions/{session}/events?frames=false")["events"]
    named = [event["body"]["caller"] for event in events if event["kind"] in ("session.shared", "turn.queued")]
    assert named == ["alice", "alice", "bob"]


def test_session_on_a_host_is_reachable_through_any_front_end(fronts: tuple[Served, Served]) -> None:
    first, second = fronts
    before = [each["id"] for each in first.get("/v1/sessions")["sessions"]]
    session = first.open(name="shared")
    assert first.get(f"/v1/sessions/{session}")["host"] == "a"
    # By its name, and at another front end than the one that opened it.
    turn = second.ask("shared", "hello")
    assert second.outcome("shared", turn)["text"] == "hello"
    assert first.outcome(session, turn)["text"] == "hello"
    events = second.get(f"/v1/sessions/{session}/events?limit=1000")["events"]
    assert [event["kind"] for event in events].count("turn.ended") == 1
    (listed,) = (each for each in first.get("/v1/sessions")["sessions"] if each["id"] not in before)
    assert (listed["name"], listed["host"], listed["state"]) == ("shared", "a", "idle")
    assert first.get(f"/v1/sessions/{session}/why")["pids"]


def test_interrupt_and_close_through_front_end_reach_the_owner(fronts: tuple[Served, Served]) -> None:
    front, _ = fronts
    session = front.open({"prompt long": ["stream 2000 0.05"]})
    turn = front.ask(session, "long")
    until(lambda: front.get(f"/v1/sessions/{session}/turns/{turn}")["state"] == "running", "it runs")
    receipt = front.post(f"/v1/sessions/{session}/turns/{turn}/interrupt")
    assert receipt["stopped"]
    assert front.outcome(session, turn)["kind"] == "interrupted"
    closed = front.request("DELETE", f"/v1/sessions/{session}")
    assert (closed.status, closed.json["phase"]) == (200, "closed")


@pytest.mark.thorough
def test_hold_and_files_through_front_end_reach_the_owner(fronts: tuple[Served, Served]) -> None:
    front, other = fronts
    session = front.open(name="held-afar")
    path = f"/v1/sessions/{session}"
    first, second = front.post(f"{path}/holds", {"caller": "ann"}), other.post(f"{path}/holds")
    assert (first["caller"], first["at"] is None, second["at"]) == ("ann", False, None)
    assert [each["hold"] for each in other.get(path)["holds"]] == [first["hold"], second["hold"]]
    outsider = other.ask(session, "outsider")
    front.outcome(session, other.ask(session, "mine", hold=first["hold"]))
    assert [each["turn"] for each in front.get(path)["queue"]] == [outsider]
    # Longer than the time in which an owner must answer a read.
    assert front.get(f"{path}/holds/{second['hold']}?wait=3")["at"] is None
    for hold in (first, second):
        assert other.request("DELETE", f"{path}/holds/{hold['hold']}").status == 204
    assert front.request("GET", f"{path}/holds/{first['hold']}").status == 404
    front.outcome(session, outsider)
    export = front.request("GET", f"{path}/export")
    assert (export.status, b"outsider" in export.body) == (200, True), export.body
    bundle = other.request("GET", f"{path}/bundle")
    assert (bundle.status, bundle.body[:2]) == (200, b"PK")


def test_ask_waits_for_takeover_when_its_host_is_killed(many: Fleet) -> None:
    hosts = {name: many.host(name) for name in ("a", "b")}
    front = many.front()
    session = front.open()
    assert front.outcome(session, front.ask(session, "before"))["text"] == "before"
    owner = front.get(f"/v1/sessions/{session}")["host"]
    many.lose(hosts.pop(owner), front)
    turn = front.ask(session, "after")
    assert front.outcome(session, turn)["text"] == "after"
    assert front.get(f"/v1/sessions/{session}")["host"] == next(iter(hosts))
    # The turn is queued once, however often the request was sent.
    last = front.get(f"/v1/sessions/{session}")["seq"]
    path = f"/v1/sessions/{session}/events?limit=1000"
    # The owner's answer may arrive before the notification of its commit.
    events = until(lambda: found if (found := front.get(path)["events"])[-1]["seq"] >= last else None, "all of it")
    assert [event["kind"] for event in events].count("turn.queued") == 2


@pytest.mark.thorough
def test_session_of_silent_host_is_unreachable_and_not_gone(soon_lost: Fleet) -> None:
    host = soon_lost.host("a")
    front = soon_lost.front()
    session = front.open()
    turn = front.ask(session, "before")
    assert front.outcome(session, turn)["text"] == "before"
    host.signal(signal.SIGSTOP)
    try:
        seen = front.get(f"/v1/sessions/{session}")
        assert (seen["state"], seen["host"]) == ("unreachable", "a")
        assert front.get("/v1/sessions")["sessions"][0]["state"] == "unreachable"
        # The front end still serves what the log has.
        assert front.outcome(session, turn)["text"] == "before"
        refused = front.request("POST", f"/v1/sessions/{session}/turns", {"prompt": "now"})
        assert (refused.status, refused.json["title"]) in ((503, "Unreachable"), (503, "NoHost")), refused
        assert "retry-after" in refused.headers
    finally:
        host.signal(signal.SIGCONT)


@pytest.mark.thorough
def test_session_of_silent_host_with_valid_lease_is_unreachable_and_returns(tmp_path: Path, nats_one: Servers) -> None:
    with fleet(tmp_path, nats_one, some_prefix(), lease=15) as many:
        host = many.host("a")
        front = many.front()
        session = front.open()
        host.signal(signal.SIGSTOP)
        try:
            assert front.get(f"/v1/sessions/{session}")["state"] == "unreachable"
            assert front.get("/v1/sessions")["sessions"][0]["state"] == "unreachable"
        finally:
            host.signal(signal.SIGCONT)
        until(lambda: front.get(f"/v1/sessions/{session}")["state"] == "idle", "it is there again")
        assert front.get(f"/v1/sessions/{session}")["host"] == "a"


def test_ask_wakes_an_unowned_session_on_a_host_with_room(many: Fleet) -> None:
    many.host("a")
    front = many.front()
    session = front.open(name="asleep")
    assert front.request("DELETE", f"/v1/sessions/{session}").json["phase"] == "closed"
    until(lambda: front.get(f"/v1/sessions/{session}")["host"] is None, "nobody has it")
    # Closing it again, or interrupting it, needs no owner.
    assert front.request("DELETE", f"/v1/sessions/{session}").status == 200
    assert front.request("POST", f"/v1/sessions/{session}/interrupt", {}).status == 409
    assert front.outcome(session, front.ask("asleep", "hello"))["text"] == "hello"
    assert front.get(f"/v1/sessions/{session}")["host"] == "a"
    # The front end takes no session, whatever it forwards.
    assert {host["name"]: host["used"] for host in front.get("/v1/hosts")["hosts"]} == {"a": 1, "front": 0}


@thorough
def test_idempotency_key_is_one_turn_through_two_front_ends(fronts: tuple[Served, Served]) -> None:
    first, second = fronts
    key = {"Idempotency-Key": "one-and-only"}
    session = first.post("/v1/sessions", {"command": fake_agent.command({})}, headers=key)["id"]
    assert second.post("/v1/sessions", {"command": fake_agent.command({})}, headers=key)["id"] == session
    turns = {
        front.post(f"/v1/sessions/{session}/turns", {"prompt": "hi"}, headers=key)["turn"] for front in (first, second)
    }
    assert len(turns) == 1


@thorough
def test_labels_choose_the_host_and_unknown_labels_are_refused_at_once(many: Fleet) -> None:
    many.host("plain")
    many.host("strong", "gpu", "repo=x")
    front = many.front()
    session = front.post("/v1/sessions", {"command": fake_agent.command({}), "labels": ["gpu"]})
    assert session["host"] == "strong"
    refused = front.request("POST", "/v1/sessions", {"command": fake_agent.command({}), "labels": ["gpu", "tpu"]})
    assert (refused.status, refused.json["title"]) == (422, "NoSuchHost")
    assert "plain has no gpu, tpu" in refused.json["detail"]
    assert "strong has no tpu" in refused.json["detail"]


@pytest.mark.thorough
def test_open_is_refused_with_no_host_when_no_host_has_room(soon_lost: Fleet) -> None:
    front = soon_lost.front()
    refused = front.request("POST", "/v1/sessions", {"command": fake_agent.command({})})
    assert (refused.status, refused.json["title"]) == (503, "NoHost")
    soon_lost.host("small", room=1)
    until(lambda: any(host["room"] for host in front.get("/v1/hosts")["hosts"]), "it is announced")
    front.open(name="first")
    full = front.request("POST", "/v1/sessions", {"command": fake_agent.command({}), "name": "second"})
    assert (full.status, full.json["title"]) == (503, "NoRoom")
    assert "small has 1 of 1" in full.json["detail"]
    # The session was not opened, and will not be.
    assert [each["name"] for each in front.get("/v1/sessions")["sessions"]] == ["first"]


def test_front_end_with_room_is_a_host_too(many: Fleet) -> None:
    both = many.front("both", room=4)
    session = both.open()
    assert both.outcome(session, both.ask(session, "hi"))["text"] == "hi"
    (host,) = both.get("/v1/hosts")["hosts"]
    assert (host["name"], host["room"], host["used"], host["here"], host["draining"]) == ("both", 4, 1, True, False)


def test_drained_host_process_hands_over_its_sessions_and_exits(many: Fleet) -> None:
    hosts = {name: many.host(name) for name in ("a", "b")}
    front = many.front()
    session = front.open({"prompt long": ["stream 20 0.05"]})
    owner = front.get(f"/v1/sessions/{session}")["host"]
    running, waiting = front.ask(session, "long"), front.ask(session, "waits")
    told = front.post(f"/v1/hosts/{owner}/drain", {"timeout": 30}, status=202)
    assert told == {"draining": True, "sessions": 1, "hosts": [name for name in hosts if name != owner], "waiting": 0}
    assert front.outcome(session, running)["kind"] == "done"
    assert front.outcome(session, waiting)["text"] == "waits"
    assert hosts.pop(owner).process.wait(60) == 0
    assert front.get(f"/v1/sessions/{session}")["host"] == next(iter(hosts))
    assert front.request("POST", "/v1/hosts/nobody/drain", {}).status == 404


@pytest.mark.thorough
def test_session_opened_at_one_front_end_is_known_to_the_other(fronts: tuple[Served, Served]) -> None:
    first, second = fronts
    for number in range(10):
        assert second.get(f"/v1/sessions/{first.open()}/events")["events"]
        first.open(name=f"by name {number}")
        assert second.request("GET", f"/v1/sessions/by%20name%20{number}").status == 200


def _deaf(_: StreamMirror, message: object) -> None:
    pass


async def test_host_finds_an_unheard_session_by_asking_the_leader(
    nats_one: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = nats_one.store(some_prefix(), lease=60)
    async with Host(store) as one, Host(store) as other:
        await one.ready()
        # Drop every wake-up from here on, like a host that is far from the others for a moment.
        monkeypatch.setattr(StreamMirror, "_on_wakeup", _deaf)
        await other.ready()
        session = await one.open(command=fake_agent.command({}), name="new")
        assert other.cluster is not None
        for word in (session.id, "new"):
            with pytest.raises(NotFound):
                other.session(word)
        await other.cluster.records.look_for("new")
        assert other.session("new").id == other.session(session.id).id == session.id
        await other.cluster.records.look_for("nobody")


@pytest.mark.thorough
def test_interrupt_of_silent_host_is_answered_as_unanswered(soon_lost: Fleet) -> None:
    host = soon_lost.host("a")
    front = soon_lost.front()
    session = front.open({"prompt": ["stream 2000 0.05"]})
    turn = front.ask(session, "long")
    until(lambda: front.get(f"/v1/sessions/{session}/turns/{turn}")["state"] == "running", "it runs")
    host.signal(signal.SIGSTOP)
    try:
        answer = front.request("POST", f"/v1/sessions/{session}/turns/{turn}/interrupt", {})
        assert (answer.status, answer.json["title"]) == (504, "Unanswered"), answer
        assert "is unknown" in answer.json["detail"]
    finally:
        host.signal(signal.SIGCONT)


@pytest.mark.thorough
def test_session_with_missing_folder_waits_visibly_until_it_is_back(many: Fleet, tmp_path: Path) -> None:
    hosts = {name: many.host(name) for name in ("a", "b")}
    front = many.front()
    folder = tmp_path / "work"
    folder.mkdir()
    session = front.open(cwd=str(folder))
    turn = front.ask(session, "before")
    assert front.outcome(session, turn)["text"] == "before"
    folder.rename(tmp_path / "away")
    many.lose(hosts.pop(front.get(f"/v1/sessions/{session}")["host"]), front)
    until(lambda: front.get("/v1/sessions")["sessions"][0]["state"] == "not movable", "it is not movable")
    assert front.get(f"/v1/sessions/{session}")["state"] == "not movable"
    refused = front.request("POST", f"/v1/sessions/{session}/turns", {"prompt": "after"})
    assert (refused.status, refused.json["title"]) == (503, "NotMovable"), refused
    assert str(folder) in refused.json["detail"]
    (tmp_path / "away").rename(folder)
    until(lambda: front.get(f"/v1/sessions/{session}")["host"] == next(iter(hosts)), "it goes on")
    assert front.outcome(session, front.ask(session, "after"))["text"] == "after"
