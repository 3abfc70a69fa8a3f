"""Login links of the page that a named administrator makes: whose they are, and when they end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.server.access import tokens
from tests.server.kit import Answer, Served, shared

from banksman.server.access.roles import Role
from banksman.server.access.trusted_proxy import HEADER

# 9999-01-01, as `expires` of `LoggedIn` says in /openapi.json.
NO_END = 253370764800


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with shared(tmp_path_factory.mktemp("server"), trusted_proxies=["sso@127.0.0.1"]) as served:
        yield served


def login(served: Served, code: str) -> Answer:
    return served.request("POST", "/v1/login", {"code": code}, token=False)


def made_by(served: Served, token: str) -> str:
    answer = tokens.request(served, token, "POST", "/v1/login/code")
    assert answer.status == 201, answer
    return answer.json["code"]


def caller(served: Served, token: str) -> dict[str, Any]:
    answer = tokens.request(served, token, "GET", "/v1/caller")
    assert answer.status == 200, answer
    return answer.json


def test_login_link_of_a_named_administrator_has_its_name_and_limits(served: Served) -> None:
    token = tokens.create(served, "amy", Role.ADMIN, sessions=["amy-*"], seconds=3600)
    foreign = served.open(name="of-the-user")
    answer = login(served, made_by(served, token))
    page = answer.json["token"]
    assert caller(served, page) == caller(served, token)
    assert answer.json["expires"] <= served.request("GET", "/v1/server").json["started"] + 2 * 3600
    assert tokens.request(served, page, "GET", f"/v1/sessions/{foreign}").status == 404


def test_login_link_of_a_named_administrator_ends_with_its_token(served: Served) -> None:
    token = tokens.create(served, "bea", Role.ADMIN)
    used, unused = (made_by(served, token) for _ in range(2))
    page = login(served, used).json["token"]
    with served.stream("/v1/events", token=page) as stream:
        stream.until_live()
        tokens.revoke(served, "bea")
        # The server sends no heartbeat for seconds, so the end is its own.
        assert [message for message in stream.messages() if message.id] == []
    assert tokens.request(served, page, "GET", "/v1/caller").status == 401
    assert login(served, unused).status == 401


def test_login_of_a_named_token_without_an_end_never_expires(served: Served) -> None:
    token = tokens.create(served, "eve", Role.ADMIN)
    for given in ({"token": token}, {"code": made_by(served, token)}):
        assert served.request("POST", "/v1/login", given, token=False).json["expires"] == NO_END


def test_logout_leaves_a_named_token_valid(served: Served) -> None:
    token = tokens.create(served, "kit", Role.ADMIN)
    page = login(served, made_by(served, token)).json["token"]
    assert tokens.request(served, page, "POST", "/v1/logout").status == 204
    assert caller(served, token)["name"] == "kit"


def test_user_of_a_proxy_gets_no_login_link(served: Served) -> None:
    """A link would hand the token of the proxy to a browser, and with it every name."""
    sso = tokens.create(served, "sso", Role.ADMIN)
    answer = tokens.request(served, sso, "POST", "/v1/login/code", headers={HEADER: "ann"})
    assert (answer.status, answer.json["title"]) == (409, "NoPage")
    # The name of the token is no user either.
    answer = tokens.request(served, sso, "POST", "/v1/login/code", headers={HEADER: "sso"})
    assert (answer.status, answer.json["title"]) == (401, "NotLetIn")


def test_login_link_of_the_user_of_the_server_has_all_rights(served: Served) -> None:
    page = login(served, served.post("/v1/login/code")["code"]).json["token"]
    assert (caller(served, page)["name"], caller(served, page)["role"]) == (None, "admin")
