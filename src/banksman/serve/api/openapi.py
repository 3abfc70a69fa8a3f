"""The OpenAPI 3.1 description, made from the table of routes and the types that they take and answer."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from banksman import __version__
from banksman.serve.api.messages.events import Event
from banksman.serve.api.messages.operation import Problem
from banksman.serve.api.routes import Route
from banksman.serve.problems import MEDIA_TYPE

_REF = "#/components/schemas/{name}"
_PARAMETER = re.compile(r"\{(\w+)\}")
_ID = {"type": "string", "minLength": 1, "maxLength": 255}

# What any request may be answered, besides what its route does.
_ALWAYS = (400, 403, 405, 408, 414, 431, 500, 503)
_WITH_TOKEN = (401,)
_WITH_ID = (404,)
_WITH_BODY = (413, 415)
# About a session that another host may have.
_TO_OWNER = (502, 504)

_WORDS = {
    400: "It could not be understood.",
    401: "There is no token, or not the right one.",
    403: "It comes from a foreign site, or is not allowed here.",
    404: "There is no such thing.",
    405: "The path does not take this method.",
    408: "It took too long to send it.",
    409: "It cannot be done now: busy, closed, or another host's.",
    410: "The store does not have that history any more: begin again.",
    413: "The body is too large.",
    414: "The URL is too long.",
    415: "The body is not JSON.",
    422: "It was understood, and cannot be done.",
    429: "Too many are waiting already.",
    431: "The head is too large.",
    500: "A bug of Banksman's own.",
    502: "The agent failed.",
    503: "The server is on its way out, the store or the machine has no room, or the host of the session is silent.",
    504: "The host that has the session has not answered: whether it was done is not known.",
}


def describe(routes: Sequence[Route]) -> dict[str, Any]:
    types = [kind for route in routes for kind in (route.body, route.answer) if kind not in (None, str)]
    _, components = msgspec.json.schema_components([Problem, Event, *types], ref_template=_REF)
    paths: dict[str, Any] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Banksman",
            "version": __version__,
            "description": "Sessions with coding agents, and commands, as subprocesses: docs/server.md says more.",
        },
        "paths": paths,
        "security": [{"token": []}, {"cookie": []}],
        "components": {
            "schemas": components,
            "securitySchemes": {
                "token": {"type": "http", "scheme": "bearer"},
                "cookie": {"type": "apiKey", "in": "cookie", "name": "banksman-PORT"},
            },
        },
    }


def _operation(route: Route) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": route.summary,
        "operationId": route.handle.__module__.rpartition(".")[2] + "_" + route.handle.__name__,
        "parameters": list(_parameters(route)),
        "responses": {**_success(route), **{str(status): _problem(status) for status in sorted(_statuses(route))}},
    }
    if route.is_open:
        operation["security"] = []
    if route.body is not None:
        # A body may be left out where nothing in it must be given.
        schema = _reference(route.body)
        fields = msgspec.structs.fields(route.body)
        operation["requestBody"] = {
            "required": any(field.required for field in fields),
            "content": {"application/json": {"schema": schema}},
        }
    return operation


def _parameters(route: Route) -> Iterable[dict[str, Any]]:
    for name in _PARAMETER.findall(route.path):
        yield {"name": name, "in": "path", "required": True, "schema": _ID}
    if route.query is not None:
        (schema,), components = msgspec.json.schema_components([route.query], ref_template=_REF)
        properties = components[schema["$ref"].rpartition("/")[2]]
        required = properties.get("required", [])
        for name, shape in properties["properties"].items():
            yield {"name": name, "in": "query", "required": name in required, "schema": shape}
    if route.streams:
        yield {"name": "Last-Event-ID", "in": "header", "required": False, "schema": {"type": "string"}}
    if route.has_key:
        schema = {"type": "string", "pattern": "^[!-~]{1,255}$"}
        yield {"name": "Idempotency-Key", "in": "header", "required": False, "schema": schema}


def _success(route: Route) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if route.answer is str:
        content[route.media_type] = {"schema": {"type": "string"}}
    elif route.answer is not None:
        content[route.media_type] = {"schema": _reference(route.answer)}
    # There is no schema of a stream as a whole: it has no end.
    content |= {media_type: {} for media_type in route.streams}
    more = " A stream has each event as #/components/schemas/Event." if route.streams else ""
    answer: dict[str, Any] = {"description": f"Done.{more}"}
    if content:
        answer["content"] = content
    # A session that is forgotten has nothing to show.
    gone = {"204": {"description": "Done."}} if route.method == "DELETE" else {}
    return {str(route.status): answer, **gone}


def _statuses(route: Route) -> set[int]:
    return {
        *_ALWAYS,
        *route.problems,
        *(_WITH_TOKEN if not route.is_open or route.body is not None else ()),
        *(_WITH_ID if "{" in route.path else ()),
        *(_WITH_BODY if route.body is not None else ()),
        *(_TO_OWNER if route.to_owner is not None else ()),
    }


def _problem(status: int) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "description": _WORDS[status],
        "content": {MEDIA_TYPE: {"schema": _reference(Problem)}},
    }
    if status in (429, 503):
        answer["headers"] = {"Retry-After": {"schema": {"type": "string"}, "description": "Seconds."}}
    return answer


def _reference(kind: Any) -> dict[str, Any]:
    return {"$ref": _REF.format(name=kind.__name__)}
