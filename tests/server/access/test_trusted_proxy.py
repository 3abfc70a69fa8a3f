"""Users whom a trusted proxy names, and clients that only claim to be one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from starlette.datastructures import Headers
from tests.server.access import tokens
from tests.server.kit import Answer, Served, shared

from banksman.errors import UsageError
from banksman.server.access.roles import Caller, Role
from banksman.server.access.trusted_proxy import HEADER, TrustedProxies
from banksman.server.problems import Problem

PROXIES = ["sso@127.0.0.1", "ends@127.0.0.1", "far@192.0.2.7"]
SSO = Caller("sso", Role.ASKER, sessions=("team-*",))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with shared(tmp_path_factory.mktemp("server"), trusted_proxies=PROXIES) as served:
        yield served


@pytest.fixture(scope="module")
def sso(served: Served) -> str:
    return tokens.create(served, "sso", Role.ASKER)


def as_user(served: Served, token: str, user: str, method: str, url: str, body: Any = None) -> Answer:
    return tokens.request(served, token, method, url, body, {HEADER: user})


def test_users_of_a_proxy_are_separate_callers_with_the_role_of_its_token(served: Served, sso: str) -> None:
    alice = as_user(served, sso, "alice@example.org", "GET", "/v1/caller").json
    assert (alice["name"], alice["role"]) == ("alice@example.org", "asker")
    session = tokens.opened_by(served, "alice@example.org", "alice-1")
    path = f"/v1/sessions/{session}"
    assert as_user(served, sso, "alice@example.org", "GET", path).status == 200
    assert as_user(served, sso, "bob@example.org", "GET", path).status == 404
    asked = as_user(served, sso, "alice@example.org", "POST", f"{path}/turns", {"prompt": "hi"}).json["turn"]
    served.outcome(session, asked)
    events = served.get(f"{path}/events?frames=false")["events"]
    (queued,) = (event["body"]["caller"] for event in events if event["kind"] == "turn.queued")
    assert queued == "alice@example.org"
    # The role is that of the token, whatever the user has elsewhere.
    tokens.create(served, "boss", Role.OPERATOR)
    assert as_user(served, sso, "boss", "GET", "/v1/usage").status == 403


def test_request_of_a_proxy_without_its_user_is_refused(served: Served, sso: str) -> None:
    refused = tokens.request(served, sso, "GET", "/v1/caller")
    assert (refused.status, refused.json["detail"]) == (401, "the proxy does not name its user")
    for odd in ("", "a b", "x" * 65, "-", "{http.request.header.X-Auth-Request-Email}", "${user}", "(null)"):
        assert as_user(served, sso, odd, "GET", "/v1/caller").status == 401, odd


def test_header_of_any_other_client_is_ignored(served: Served) -> None:
    eve = tokens.create(served, "eve", Role.ASKER)
    assert as_user(served, eve, "alice", "GET", "/v1/caller").json["name"] == "eve"
    # The right token at the wrong address.
    far = tokens.create(served, "far", Role.ASKER)
    assert as_user(served, far, "alice", "GET", "/v1/caller").json["name"] == "far"
    assert served.request("GET", "/v1/caller", headers={HEADER: "alice"}).json["role"] == "admin"
    assert served.request("GET", "/v1/caller", headers={HEADER: "alice"}).json["name"] is None
    assert served.request("GET", "/v1/caller", token=False, headers={HEADER: "alice"}).status == 401


def test_stream_of_a_user_lasts_until_the_token_of_the_proxy_is_revoked(served: Served) -> None:
    token = tokens.create(served, "ends", Role.ASKER)
    session = tokens.opened_by(served, "zoe", "zoe-1")
    with served.stream(f"/v1/sessions/{session}/events", token=token, user="zoe") as stream:
        stream.until_live()
        served.outcome(session, served.ask(session, "hello"))
        kinds = (message.data["kind"] for message in stream.messages() if message.id)
        assert "turn.ended" in kinds
        tokens.revoke(served, "ends")
        assert [message for message in stream.messages() if message.id] == []


def test_proxy_is_its_token_at_its_address() -> None:
    proxies = TrustedProxies(["sso@10.0.0.1", "a@b@::1"])

    def name(caller: Caller, address: str, *users: str) -> str | None:
        raw = [(HEADER.lower().encode(), user.encode()) for user in users]
        return proxies.caller(caller, address, Headers(raw=raw)).name

    assert name(SSO, "10.0.0.1", "ann") == "ann"
    assert name(SSO, "::ffff:10.0.0.1", "ann") == "ann"
    assert name(Caller("a@b", Role.VIEWER), "::1", "ann") == "ann"
    assert proxies.caller(SSO, "10.0.0.1", Headers({HEADER: "ann"})).sessions == ("team-*",)
    for other in ("10.0.0.2", "", "unix", "10.0.0.11"):
        assert name(SSO, other, "ann") == "sso"
    assert name(Caller(None, Role.ADMIN), "10.0.0.1", "ann") is None
    with pytest.raises(Problem, match="does not name its user"):
        name(SSO, "10.0.0.1", "ann", "bob")
    with pytest.raises(Problem, match="names its own token"):
        name(SSO, "10.0.0.1", "sso")


@pytest.mark.parametrize(
    "entry", ["", "sso", "sso@", "@127.0.0.1", "sso@localhost", "a b@127.0.0.1", "sso@127.0.0.1:80"]
)
def test_odd_entry_is_a_usage_error(entry: str) -> None:
    with pytest.raises(UsageError, match="in trusted_proxies"):
        TrustedProxies([entry])
