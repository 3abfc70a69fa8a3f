"""The description: valid by the rules of OpenAPI 3.1 and JSON Schema, and about every route there is."""

from __future__ import annotations

import re
from typing import Any

import jsonschema_rs
import msgspec
from schemathesis.specs.openapi import definitions

from banksman.serve import problems
from banksman.serve.api import openapi
from banksman.serve.app import ROUTES

DESCRIBED: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(openapi.describe(ROUTES)))
OPERATIONS = {
    (method.upper(), path): operation
    for path, methods in DESCRIBED["paths"].items()
    for method, operation in methods.items()
}


def test_it_is_openapi_3_1() -> None:
    assert DESCRIBED["openapi"] == "3.1.0"
    definitions.OPENAPI_31_VALIDATOR.validate(DESCRIBED)
    for name, schema in DESCRIBED["components"]["schemas"].items():
        jsonschema_rs.meta.validate({**schema, "$schema": "https://json-schema.org/draft/2020-12/schema"})
        assert re.fullmatch(r"[A-Za-z0-9._-]+", name)


def test_every_route_is_in_it_and_by_a_name_of_its_own() -> None:
    assert set(OPERATIONS) == {(route.method, route.path) for route in ROUTES}
    names = [operation["operationId"] for operation in OPERATIONS.values()]
    assert len(set(names)) == len(names)


def test_every_reference_leads_somewhere() -> None:
    text = msgspec.json.encode(DESCRIBED).decode()
    for name in re.findall(r'"\$ref":"#/components/schemas/([^"]+)"', text):
        assert name in DESCRIBED["components"]["schemas"]


def test_every_error_is_a_problem_and_what_may_be_tried_again_says_when() -> None:
    for (method, path), operation in OPERATIONS.items():
        for status, answer in operation["responses"].items():
            if int(status) >= 400:
                assert list(answer["content"]) == [problems.MEDIA_TYPE], (method, path, status)
            if status in ("429", "503"):
                assert "Retry-After" in answer["headers"]


def test_what_any_request_may_be_answered_is_in_each() -> None:
    for (method, path), operation in OPERATIONS.items():
        found = {int(status) for status in operation["responses"]}
        assert {400, 403, 405, 408, 414, 431, 500, 503} <= found, (method, path)
        assert (401 in found) == (path != "/healthz"), (method, path)
        if "{" in path:
            assert 404 in found
        if "requestBody" in operation:
            assert {413, 415} <= found
            # What is well-formed and cannot be done; to end, to log in and to stop can always be done.
            ends = ("/v1/drain", "/v1/hosts/{id}/drain", "/v1/login", "/v1/commands/{id}/stop")
            assert 422 in found or path in ends, (method, path)


def test_every_status_that_an_error_can_have_has_words() -> None:
    for _, status in problems._STATUSES:  # pyright: ignore[reportPrivateUsage]
        assert status in openapi._WORDS  # pyright: ignore[reportPrivateUsage]


def test_what_is_open_says_so_and_nothing_else_does() -> None:
    open_ = {place for place, operation in OPERATIONS.items() if operation.get("security") == []}
    assert open_ == {("GET", "/healthz"), ("POST", "/v1/login")}
    assert DESCRIBED["security"]


def test_bodies_take_no_member_that_is_not_known() -> None:
    for operation in OPERATIONS.values():
        if "requestBody" in operation:
            reference = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
            assert DESCRIBED["components"]["schemas"][reference.rpartition("/")[2]]["additionalProperties"] is False
