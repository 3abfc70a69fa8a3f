"""The attacks of tests/server/http as callers with few rights, the ends of their streams, and a search for secrets."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.server import kit
from tests.server.access import tokens
from tests.server.http import test_auth as auth
from tests.server.http import test_connection_limits as limits
from tests.server.kit import Served, shared

from banksman.server.access.roles import Action, Role
from banksman.server.app import ROUTES
from banksman.server.streams import follower

FEW_RIGHTS = (Role.VIEWER, Role.ASKER)
# Each attacks with whatever token a client sends, and needs no right beyond the lists of sessions.
ATTACKS: tuple[Callable[[Served], None], ...] = (
    limits.test_body_is_limited_to_32_mib,
    limits.test_body_larger_than_the_head_limit_is_accepted,
    limits.test_head_is_limited_in_size,
    limits.test_url_is_limited_in_length,
    limits.test_ambiguous_request_is_refused,
    limits.test_malformed_request_is_refused,
    limits.test_pipelined_requests_are_answered_in_order_and_bounded,
    limits.test_security_headers_are_on_every_answer,
    limits.test_trailer_is_not_read_as_a_header,
    auth.test_auth_grants_no_cors_preflight,
)
STREAMS = [route for route in ROUTES if route.streams]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with shared(tmp_path_factory.mktemp("server"), log_level="debug") as served:
        yield served


@pytest.fixture
def served(server: Served) -> Iterator[Served]:
    before = server.log.stat().st_size
    yield server
    assert server.request("GET", "/healthz").status == 200
    assert b"Traceback" not in server.log.read_bytes()[before:]


@pytest.mark.thorough
@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__.removeprefix("test_"))
@pytest.mark.parametrize("role", FEW_RIGHTS)
def test_attack_fails_with_the_token_of_a_caller_with_few_rights(
    served: Served, monkeypatch: pytest.MonkeyPatch, role: Role, attack: Callable[[Served], None]
) -> None:
    token = tokens.create(served, f"{role}-{ATTACKS.index(attack)}", role)
    for module in (kit, limits):
        monkeypatch.setattr(module, "TOKEN", token)
        monkeypatch.setattr(module, "AUTHORIZATION", {"Authorization": f"Bearer {token}"})
    attack(served)


@pytest.mark.parametrize("role", FEW_RIGHTS)
def test_no_spelling_of_a_path_or_header_leads_to_a_foreign_session(served: Served, role: Role) -> None:
    own = tokens.opened_by(served, f"sly-{role}", f"mine-{role}")
    name = f"foreign-{role}"
    foreign = served.open(name=name)
    token = tokens.create(served, f"sly-{role}", role)
    paths = {
        f"/v1/sessions/{word}" for word in (foreign, name, foreign.upper(), f"%{ord(foreign[0]):02x}{foreign[1:]}")
    }
    paths |= {
        f"{path}{end}" for path in paths for end in ("/", "/events", "/export", "/why", "%2fevents", "%00", "?x=1")
    }
    paths |= {f"/v1/sessions/{own}{way}{foreign}" for way in ("/../", "/%2e%2e/", "%2f..%2f", "/..%2f", ";", "/turns/")}
    paths |= {f"/v1/events?sessions={own},{foreign}", f"/v1/events?sessions={own}&sessions={foreign}"}
    paths |= {f"/v1/sessions?after={foreign}", f"//v1/sessions/{foreign}", f"/v1/sessions/{own}/turns/{foreign}"}
    for path in sorted(paths):
        answer = tokens.request(served, token, "GET", path)
        assert 400 <= answer.status < 500, (path, answer)
    # Headers that other servers and proxies know.
    for header in ("X-Original-URL", "X-Rewrite-URL", "X-Forwarded-Prefix", "X-Forwarded-Path"):
        told = tokens.request(served, token, "GET", f"/v1/sessions/{own}", headers={header: f"/v1/sessions/{foreign}"})
        assert told.json["id"] == own, header
    for header in ("X-HTTP-Method-Override", "X-HTTP-Method", "X-Method-Override"):
        told = tokens.request(served, token, "GET", f"/v1/sessions/{own}?_method=DELETE", headers={header: "DELETE"})
        assert told.status in (200, 400), header
    for header in ("X-Forwarded-User", "X-Remote-User", "Remote-User", "X-Banksman-Caller", "Caller", "Role"):
        told = tokens.request(served, token, "GET", "/v1/caller", headers={header: "admin"})
        assert (told.json["name"], told.json["role"]) == (f"sly-{role}", role), header
    assert served.get(f"/v1/sessions/{own}")["phase"] == served.get(f"/v1/sessions/{foreign}")["phase"]


@pytest.mark.parametrize("role", FEW_RIGHTS)
def test_malformed_body_or_query_is_a_client_error_on_every_route(served: Served, role: Role) -> None:
    session = tokens.opened_by(served, f"odd-{role}", f"odd-{role}")
    token = tokens.create(served, f"odd-{role}", role)
    bodies = limits.ODD_BODIES[:: 1 if role is Role.ASKER else 4]
    for route in ROUTES:
        if route.action is Action.OPEN_TO_ALL or (route.method == "DELETE" and route.body is None):
            continue
        path = re.sub(r"\{\w+\}", "none", route.path.replace("{id}", session))
        queries = ("after=%ff", "limit=x", "wait=nan", "frames=maybe") if route.query is not None else ("",)
        for query in queries:
            for body in (b"",) if route.body is None else bodies:
                headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
                url = f"{path}?{query}" if query else path
                if route.streams and not query:
                    continue
                sent = body or None
                answer = served.request(route.method, url, sent, token=False, headers=headers)
                assert answer.status < 500, (route.method, url, body[:80], answer)
                if sent is not None or query:
                    kind = answer.headers["content-type"]
                    assert kind == "application/problem+json", (route.method, url, body[:80], answer)
    assert served.get(f"/v1/sessions/{session}")["queue"] == []


@pytest.mark.parametrize(
    ("route", "accept"),
    [pytest.param(route, accept, id=f"{route.path}-{accept}") for route in STREAMS for accept in route.streams],
)
def test_open_stream_of_every_kind_ends_when_its_token_is_revoked(served: Served, route: Any, accept: str) -> None:
    name = f"leaver-{STREAMS.index(route)}-{accept[-4:]}"
    session = tokens.opened_by(served, name, name)
    token = tokens.create(served, name, Role.OPERATOR)
    with served.stream(route.path.replace("{id}", session), token=token, accept=accept) as stream:
        # The server has begun the stream: this is its first chunk.
        assert stream.status == 200
        assert stream.chunk()
        tokens.revoke(served, name)
        # The stream ends by itself: the peer sends nothing, and no heartbeat comes for fifteen seconds.
        rest = b"".join(iter(stream.chunk, b""))
    assert b"heartbeat" not in rest
    assert tokens.request(served, token, "GET", "/v1/caller").status == 401
    # Every stream looks this often whether its caller may still read it.
    assert follower.CHECK_SECONDS < 1


def test_no_file_of_the_server_has_a_token(served: Served) -> None:
    """Search every file of the state folder, the store and the log, also for tokens in failed requests."""
    secrets = [tokens.create(served, f"secret-{role}", role) for role in Role]
    for token in secrets:
        session = tokens.request(served, token, "POST", "/v1/sessions", {"name": "x", "agent": "none"})
        assert session.status in (403, 404, 422), session
        for url in (f"/v1/sessions/{token}", f"/v1/events?sessions={token}", f"/?token={token}"):
            tokens.request(served, token, "GET", url, headers={"Last-Event-ID": "1.1"})
        assert served.request("POST", "/v1/login", {"token": token}, token=False).status == 200
        assert served.request("GET", "/v1/caller", token=False, headers={"Authorization": token}).status == 401
    tokens.revoke(served, "secret-viewer")
    assert tokens.request(served, secrets[0], "GET", "/v1/caller").status == 401
    files = [file for file in Path(served.folder).rglob("*") if file.is_file()]
    assert tokens.path(served) in files
    assert served.log in files
    for file in files:
        data = file.read_bytes()
        for token in secrets:
            assert token.removeprefix("bmt_").encode() not in data, file
