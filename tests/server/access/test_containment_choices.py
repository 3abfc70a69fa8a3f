"""No caller chooses what an agent may use, unless the settings and its role allow it.

The routes and the generated values come from the API description. So neither a new route nor a new part can be
forgotten.
"""

from __future__ import annotations

import itertools
import os
import pwd
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.server.access import tokens
from tests.server.kit import Served, shared

from banksman.server.access.roles import OPERATORS, Action, Caller, Role, may
from banksman.server.api import openapi
from banksman.server.app import ROUTES
from banksman.server.server_settings import CHOICES
from banksman.testing import fake_agent

DESCRIBED: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(openapi.describe(ROUTES)))
SCHEMAS: dict[str, Any] = DESCRIBED["components"]["schemas"]
ACTIONS = {(route.method, route.path): route.action for route in ROUTES}
AGENT = fake_agent.command()
# What else a request needs, so that it would be served without the part.
BASES: dict[str, dict[str, Any]] = {"/v1/sessions": {"command": AGENT}, "/v1/commands": {"argv": ["true"]}}
EXAMPLES = 8


class Choice(NamedTuple):
    """A member of a request that says what an agent or a command may use."""

    method: str
    path: str
    part: str
    schema: dict[str, Any]


def choices() -> list[Choice]:
    found: list[Choice] = []
    for path, operations in DESCRIBED["paths"].items():
        for method, operation in operations.items():
            if "requestBody" in operation:
                reference = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
                members = SCHEMAS[reference.rpartition("/")[2]].get("properties", {})
                found += [Choice(method.upper(), path, part, members[part]) for part in CHOICES if part in members]
    return found


CHOSEN = choices()
JSON = st.recursive(
    st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def values(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Values that the schema of a member allows, without null: that chooses nothing."""
    match schema:
        case {"anyOf": kinds}:
            some = [kind for kind in cast("list[dict[str, Any]]", kinds) if kind.get("type") != "null"]
            return st.one_of([values(kind) for kind in some])
        case {"const": value}:
            return st.just(value)
        case {"type": "string"}:
            return st.text(min_size=schema.get("minLength", 0), max_size=min(schema.get("maxLength", 30), 30))
        case {"type": "integer"}:
            return st.integers(-(2**53), 2**53)
        case {"type": "number"}:
            return st.floats(allow_nan=False, allow_infinity=False)
        case {"type": "array", "items": inner}:
            return st.lists(values(inner), min_size=schema.get("minItems", 0), max_size=min(schema["maxItems"], 4))
        case {"type": "object", "additionalProperties": inner}:
            return st.dictionaries(values({"type": "string", "minLength": 1}), values(inner), max_size=3)
        case _:
            raise AssertionError(f"no generator for {schema}")


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server that lets callers choose nothing, with a session."""
    with shared(tmp_path_factory.mktemp("strict"), programs=[AGENT[:-1], "true"]) as served:
        served.open(name="there")
        yield served


@pytest.fixture(scope="module")
def lenient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server that lets callers choose everything, with a session."""
    with shared(tmp_path_factory.mktemp("lenient"), callers_choose=list(CHOICES)) as served:
        served.open(name="there")
        yield served


def started(served: Served) -> Any:
    """Everything that a request could have started or changed."""
    shown = served.get("/v1/sessions")["sessions"]
    contained = [served.get(f"/v1/sessions/{each['id']}/why")["containment"] for each in shown]
    # A program of any kind needs the zygote first.
    below = Path(f"/proc/{served.pid}/task/{served.pid}/children").read_text()
    return below, [each["id"] for each in shown], contained, served.get("/v1/commands")["commands"]


def token_of(served: Served, role: Role) -> str:
    return tokens.create(served, f"{role}-{os.urandom(3).hex()}", role)


@pytest.mark.parametrize("role", list(Role))
@pytest.mark.parametrize("choice", CHOSEN, ids=lambda choice: f"{choice.path}-{choice.part}")
def test_part_that_the_settings_do_not_name_is_refused_to_every_role(
    strict: Served, choice: Choice, role: Role
) -> None:
    attack(strict, choice, role)


@pytest.mark.parametrize("role", [role for role in Role if role not in OPERATORS])
@pytest.mark.parametrize("choice", CHOSEN, ids=lambda choice: f"{choice.path}-{choice.part}")
def test_part_that_the_settings_name_is_refused_to_other_roles_than_operators(
    lenient: Served, choice: Choice, role: Role
) -> None:
    attack(lenient, choice, role)


def attack(served: Served, choice: Choice, role: Role) -> None:
    """Send generated values of a part as this role. Each is refused, and nothing is started or changed."""
    token, number = token_of(served, role), itertools.count()
    may_use_route = may(Caller("anybody", role), ACTIONS[choice.method, choice.path])
    before = started(served)

    # For other roles than operators, the command of the agent is refused, too.
    base = BASES[choice.path]
    bases = [base] if role in OPERATORS or "argv" in base else [base, {}]
    names: list[dict[str, Any]] = [{}, {"name": "there"}, {"name": "new"}] if choice.path == "/v1/sessions" else [{}]
    keyed = st.sampled_from([True, False])

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(values(choice.schema), JSON, st.sampled_from(bases), st.sampled_from(names), keyed)
    def refused(value: Any, other: Any, base: dict[str, Any], name: dict[str, Any], has_key: bool) -> None:
        headers = {"Idempotency-Key": f"key-{role}-{next(number)}"} if has_key else None
        for is_valid, each in ((True, value), (False, other)):
            body = {**base, **name, choice.part: each}
            answer = tokens.request(served, token, choice.method, choice.path, body, headers)
            told = answer.json
            if not is_valid and may_use_route and answer.status == 400:
                assert told["title"] == "BadRequest", (body, answer)
                continue
            assert (answer.status, told["title"]) == (403, "Forbidden"), (body, answer)
            assert answer.headers["content-type"] == "application/problem+json"
            assert told["hint"]
            if role in OPERATORS:
                assert choice.part in told["detail"] + told["hint"], (body, answer)

    refused()
    assert started(served) == before
    assert "Traceback" not in served.log.read_text(encoding="utf-8")


GOOD: dict[str, Any] = {
    "user": pwd.getpwuid(os.geteuid()).pw_name,
    "limits": {"nofile": 100},
    "scrub": ["PLAIN"],
    "wrap": ["env", "WRAPPED=yes"],
    "on_open": ["true"],
    "on_close": ["true"],
    "survive": "crash",
}


def test_part_that_the_settings_name_is_chosen_by_operators(tmp_path: Path) -> None:
    """The control: the requests above are refused because of the part alone."""
    with Served(tmp_path / "server", callers_choose=list(CHOICES)) as served:
        for role in OPERATORS:
            token = token_of(served, role)
            for method, path, part, _schema in CHOSEN:
                answer = tokens.request(served, token, method, path, {**BASES[path], part: GOOD[part]})
                assert answer.status == 201, (part, answer)


def test_parts_are_found_in_the_description() -> None:
    found = {(choice.method, choice.path, choice.part) for choice in CHOSEN}
    assert found >= {("POST", "/v1/sessions", part) for part in CHOICES}
    assert ("POST", "/v1/commands", "user") in found
    assert {(choice.method, choice.path) for choice in CHOSEN} == {("POST", path) for path in BASES}
    assert ACTIONS["POST", "/v1/commands"] is Action.OPERATE
