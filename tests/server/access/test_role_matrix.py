"""Every route as every role, on an own, a shared and a foreign session, as docs/security.md says.

The routes come from the table that the server routes by, and the expectations from the two tables in the docs. So
neither a new route, nor a route with another action, nor a new right can be forgotten.
"""

from __future__ import annotations

import http.client
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from tests.server.access import tokens
from tests.server.kit import SECONDS_MAX, Answer, Served, shared
from tools import role_table

from banksman.server import web
from banksman.server.access.roles import Action, Role
from banksman.server.api.route import Route
from banksman.server.app import ROUTES, SERVED

RELATIONS = ("own", "shared", "foreign")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with shared(tmp_path_factory.mktemp("server")) as served:
        yield served


def rows(name: str) -> list[list[str]]:
    """Return the cells of a table of the docs, with its head."""
    page = role_table.PAGE.read_text(encoding="utf-8").partition(f"<!-- {name}:")[2].partition("\n\n")[2]
    lines = page.partition("\n\n")[0].splitlines()
    head, _rule, *found = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [head, *found]


def documented() -> dict[str, dict[str, str]]:
    """Return the table of the docs: the word of each role, by the words of the action."""
    head, *found = rows("roles")
    return {row[0]: dict(zip(head[1:], row[1:], strict=True)) for row in found}


def documented_actions() -> dict[str, str]:
    """Return the action of each route, by its method and path, as the docs say."""
    shorter, longer = reversed(role_table.SESSION)
    _head, *found = rows("routes")
    named = {route.replace(shorter, longer): row[0] for row in found for route in re.findall("`([^`]+)`", row[1])}
    files = {f"GET {route.path}": Action.OPEN_TO_ALL.value for route in web.ROUTES}
    return files | named


def expected(word: str, relation: str | None) -> str:
    """Return "allowed", "forbidden" or "hidden" for a word of the table."""
    if relation == "foreign" and word != "all":
        return "hidden"
    is_allowed = word in ("yes", "all") or relation in word.split(" and ")
    return "allowed" if is_allowed else "forbidden"


def seen(answer: Answer, session: str) -> str:
    told: dict[str, Any] = answer.json if answer.headers.get("content-type") == "application/problem+json" else {}
    if answer.status == 403 and told["title"] == "Forbidden":
        return "forbidden"
    if answer.status == 404 and told["detail"] == f"there is no session {session!r}":
        return "hidden"
    assert answer.status not in (401, 403, 500), answer
    return "allowed"


class Cast(NamedTuple):
    """One role: its token, and a session for each relation."""

    token: str
    sessions: dict[str, str]


def cast_of(served: Served, role: str) -> Cast:
    sessions = {
        "own": tokens.opened_by(served, role, f"own-{role}"),
        "shared": served.open(name=f"shared-{role}"),
        "foreign": tokens.opened_by(served, "somebody-else", f"foreign-{role}"),
    }
    body = {"shared": [role, "bob"]}
    assert served.request("PUT", f"/v1/sessions/{sessions['shared']}/shared", body).status == 200
    return Cast(tokens.create(served, role, role), sessions)


def ask(served: Served, token: str, route: Route, path: str) -> Answer:
    """Send a request that changes nothing if its body is read: it is no object. Reads no stream."""
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=SECONDS_MAX)
    try:
        body = None if route.body is None else b"[]"
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        connection.request(route.method, path, body, headers)
        response = connection.getresponse()
        found = {name.lower(): value for name, value in response.getheaders()}
        is_stream = found.get("content-type") == "text/event-stream"
        return Answer(response.status, found, b"" if is_stream else response.read())
    finally:
        connection.close()


def differences(served: Served, role: str) -> list[object]:
    """Return the answers of a server to this role that differ from the documented table."""
    table, actions, cast = documented(), documented_actions(), cast_of(served, role)
    wrong: list[object] = []
    # A request that deletes a session comes last.
    for route in sorted(SERVED, key=lambda route: route.method == "DELETE"):
        names_session = route.path.startswith("/v1/sessions/{id}")
        for relation in RELATIONS if names_session else (None,):
            session = cast.sessions[relation] if relation else "none"
            path = re.sub(r"\{\w+\}", "none", route.path.replace("{id}", session))
            found = seen(ask(served, cast.token, route, path), session)
            wanted = expected(table[actions[f"{route.method} {route.path}"]][role], relation)
            if found != wanted:
                wrong.append((route.method, route.path, relation, found, wanted))
    return wrong


@pytest.mark.parametrize("role", list(Role))
def test_every_route_allows_what_the_documented_table_says(served: Served, role: str) -> None:
    assert differences(served, role) == []


@pytest.mark.parametrize("role", list(Role))
@pytest.mark.parametrize("limit", [{"sessions": ["limited-*"]}, {"agents": ["codex"]}], ids=["sessions", "agents"])
def test_every_route_hides_a_session_beyond_the_limits_of_a_token(
    served: Served, role: Role, limit: dict[str, Any]
) -> None:
    name = f"beyond-{role}-{next(iter(limit))}"
    own, shared_one = tokens.opened_by(served, name, f"{name}-own"), served.open(name=f"{name}-shared")
    assert served.request("PUT", f"/v1/sessions/{shared_one}/shared", {"shared": [name]}).status == 200
    token = tokens.create(served, name, role, **limit)
    for route in (route for route in SERVED if route.path.startswith("/v1/sessions/{id}")):
        for session in (own, shared_one, f"{name}-own"):
            path = re.sub(r"\{\w+\}", "none", route.path.replace("{id}", session))
            assert seen(ask(served, token, route, path), session) == "hidden", (route.method, path)
    assert tokens.request(served, token, "GET", "/v1/sessions").json["sessions"] == []


def test_foreign_session_is_answered_like_a_missing_one(served: Served) -> None:
    token = tokens.create(served, "curious", Role.ASKER)
    served.open(name="secret-1")
    answers = [tokens.request(served, token, "GET", f"/v1/sessions/{name}") for name in ("secret-1", "secret-2")]
    told = [(answer.status, answer.body.replace(b"secret-1", b"secret-2")) for answer in answers]
    assert told[0] == told[1]


def test_documented_tables_are_those_of_the_code() -> None:
    page = role_table.PAGE.read_text(encoding="utf-8")
    assert role_table.with_table(page) == page, "regenerate it: make docs-cli"


def test_route_without_action_cannot_be_built() -> None:
    assert {action for action in Action if any(route.action is action for route in ROUTES)} == set(Action)
    with pytest.raises(TypeError):
        Route(method="GET", path="/", handle=ROUTES[0].handle, summary="")  # pyright: ignore[reportCallIssue]
