"""OpenAPI description, generated from the route table and the message types.

msgspec makes a JSON Schema for each type. This module adds what client generators need:

- A description of each member, from the docstring (see messages/__init__.py).
- Names: a schema with a title becomes a component of that name, wherever it is used.
- Members of responses are required and have no default. An optional member of a request has its
  default in the description: some generators treat a member with a `default` as required.
- An object without known members accepts any: some generators read a missing `additionalProperties`
  as "none".
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import msgspec

from banksman import __version__
from banksman.server.api import messages
from banksman.server.api.messages.admin_messages import Problem
from banksman.server.api.messages.common_messages import Body, Query
from banksman.server.api.messages.event_messages import EVENTS, MARKS, Event, OtherEvent
from banksman.server.api.route import Route
from banksman.server.problems import MEDIA_TYPE

REF = "#/components/schemas/{name}"
Schema = dict[str, Any]

_MEMBER = re.compile(r"^    (\w+): ", re.MULTILINE)


def make(types: Iterable[Any]) -> dict[str, Schema]:
    """Return the components of these types and of all types that they refer to, by name."""
    _, made = msgspec.json.schema_components(types, ref_template=REF)
    known = {kind.__name__: kind for kind in _message_types(msgspec.Struct)}
    components: dict[str, Schema] = {}
    for name, schema in made.items():
        kind = known[name]
        defaults = {
            name: member.pop("default", None) for name, member in schema["properties"].items()
        }
        is_request = issubclass(kind, Body | Query)
        schema = components[name] = _named_parts(schema, components)  # noqa: PLW2901
        _describe(schema, kind, defaults if is_request else {})
        if not is_request and not kind.__struct_config__.omit_defaults:
            schema["required"] = list(schema["properties"])
    return components


def reference(kind: Any) -> Schema:
    return {"$ref": REF.format(name=kind.__name__)}


def _message_types(base: type[msgspec.Struct]) -> Iterator[type[msgspec.Struct]]:
    for kind in base.__subclasses__():
        if kind.__module__.startswith(f"{messages.__name__}."):
            yield kind
        yield from _message_types(kind)


def _describe(schema: Schema, kind: type[msgspec.Struct], defaults: dict[str, Any]) -> None:
    members: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        said, of_members = _parts(vars(base).get("__doc__") or "")
        members |= of_members
        if base is kind:
            schema["description"] = said
    for name, member in schema["properties"].items():
        member["description"] = members.get(name, "")
        # Null, false, zero and empty defaults need no mention.
        if default := defaults.get(name):
            member["description"] += f" Default: {msgspec.json.encode(default).decode()}."


def _parts(docstring: str) -> tuple[str, dict[str, str]]:
    """Split a docstring into the description of the type and those of its members."""
    said, _, listed = inspect.cleandoc(docstring).partition("\n\nAttributes:\n")
    # The text before the first name is empty. After it names and texts alternate.
    parts = _MEMBER.split(listed)[1:]
    members = zip(parts[::2], parts[1::2], strict=True)
    return _one_line(said), {name: _one_line(text) for name, text in members}


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _named_parts(schema: Schema, components: dict[str, Schema]) -> Schema:
    """Return the schema with its titled parts replaced by references; these become components."""
    found: Schema = {}
    for key, value in schema.items():
        if key in ("properties", "$defs"):
            found[key] = {name: _part(part, components) for name, part in value.items()}
        elif key in ("items", "additionalProperties") and isinstance(value, dict):
            found[key] = _part(cast("Schema", value), components)
        elif key in ("anyOf", "oneOf", "allOf", "prefixItems"):
            found[key] = [_part(part, components) for part in value]
        else:
            found[key] = value
    if found.get("type") == "object" and "properties" not in found:
        found.setdefault("additionalProperties", True)
    if "enum" in found:
        found.pop("minLength", None)
        found.pop("maxLength", None)
        found.setdefault("type", "string")
        if len(found["enum"]) == 1 and "title" not in found:
            (found["const"],) = found.pop("enum")
    return found


def _part(schema: Schema, components: dict[str, Schema]) -> Schema:
    found = _named_parts(schema, components)
    name = found.pop("title", None)
    if name is None:
        return found
    components.setdefault(name, found)
    return {"$ref": REF.format(name=name)}


# The OpenAPI 3.1 document, generated from the routes and the types of their messages.

_PARAMETER = re.compile(r"\{(\w+)\}")
_ID = {"type": "string", "minLength": 1, "maxLength": 255}

# Error statuses of every request, besides those of its route.
_ALWAYS = (400, 403, 405, 408, 414, 431, 500, 503)
_WITH_TOKEN = (401,)
# A request with a token counts against its limit (`requests_per_second`).
_LIMITED = (429,)
_WITH_ID = (404,)
_WITH_BODY = (413, 415)
# For a session that another host may own.
_TO_OWNER = (504,)
# The same, if the request changes something. A read does not use the agent.
_CHANGE_AT_OWNER = (502,)

_WORDS = {
    400: "The request is malformed.",
    401: "The token is missing or wrong.",
    403: "The request comes from a foreign site, or is not allowed here.",
    404: "Not found.",
    405: "The path does not support this method.",
    406: "The answer has no media type that the request accepts.",
    408: "The request was sent too slowly.",
    409: "Conflict: the session is busy or closed, or another host owns it.",
    410: "The store no longer has this history: start again from the first event.",
    413: "The body is too large.",
    414: "The URL is too long.",
    415: "The body is not JSON.",
    422: "The request is well-formed but cannot be carried out.",
    429: (
        "The queue is full, too many streams are open, or the token has sent too many requests: "
        "try again later."
    ),
    431: "The headers are too large.",
    500: "A bug in Banksman.",
    502: "The agent failed.",
    503: (
        "The server is shutting down, the store or the machine has no room, "
        "or the session's host does not answer."
    ),
    504: "The host that owns the session did not answer: whether the request was done is unknown.",
}

# Prefixes of operation ids. Generated clients have functions of these names, so the prefixes must
# not change with the names of the modules.
_GROUPS = {
    "admin_routes": "operation",
    "command_routes": "commands",
    "event_routes": "events",
    "export_routes": "sessions",
    "hold_routes": "holds",
    "host_routes": "hosts",
    "session_routes": "sessions",
    "turn_routes": "turns",
}
_TAGS = {
    "sessions": (
        "Conversations with an agent. A session outlives the agent's process and the server."
    ),
    "turns": "Asks and their outcomes. One turn of a session runs at a time.",
    "holds": "Reservations of a session for several asks of one caller.",
    "questions": "Questions of agents: permissions and input.",
    "events": "The event log of sessions, as pages and as streams.",
    "commands": "Programs that run in the background of the server.",
    "hosts": "The hosts that share a store.",
    "server": "The server itself.",
}

# Descriptions of path parameters, by the beginning of the path.
_SUBJECTS = (
    ("/v1/sessions/", "id", "Id or name of a session."),
    ("/v1/sessions/", "turn", "Id of a turn."),
    ("/v1/sessions/", "hold", "Id of a hold."),
    ("/v1/sessions/", "question", "Id of a question."),
    ("/v1/commands/", "id", "Id of a command."),
    ("/v1/hosts/", "id", "Id or name of a host."),
)
_KEY = {
    "name": "Idempotency-Key",
    "in": "header",
    "required": False,
    "schema": {"type": "string", "pattern": "^[!-~]{1,255}$"},
    "description": "Key of the request: requests with the same key are done once.",
}
_LAST_EVENT_ID = {
    "name": "Last-Event-ID",
    "in": "header",
    "required": False,
    "schema": {"type": "string"},
    "description": "Id of the last event that the client has seen, as `after`.",
}
# Text without an end. Each `data:` of it, or each line, is JSON.
_STREAM = {
    "type": "string",
    "description": (
        "A stream of `StreamItem`: one in each event's `data:`, or one per line in NDJSON."
    ),
    "contentMediaType": "application/json",
    "contentSchema": {"$ref": REF.format(name="StreamItem")},
}


def describe(routes: Sequence[Route]) -> dict[str, Any]:
    """Return the OpenAPI document of these routes."""
    queries = {route.query for route in routes if route.query is not None}
    answers = {route.answer for route in routes if route.answer not in (None, str, bytes)}
    bodies = {route.body for route in routes if route.body is not None}
    types = {Problem, OtherEvent, *EVENTS.values(), *MARKS, *queries, *answers, *bodies}
    components = make(sorted(types, key=lambda kind: kind.__name__))
    # The document shows a query as its parameters, and an event by its kind.
    parameters = {kind: components.pop(kind.__name__) for kind in queries}
    components |= _events(components)
    paths: dict[str, Any] = {}
    for route in routes:
        query = parameters[route.query] if route.query is not None else {}
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, query)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Banksman",
            "version": __version__,
            "description": (
                "Sessions with coding agents, and background commands. See docs/server.md."
            ),
        },
        "tags": [{"name": name, "description": description} for name, description in _TAGS.items()],
        "paths": paths,
        "security": [{"token": []}],
        "components": {
            "schemas": dict(sorted(components.items())),
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _events(components: dict[str, Any]) -> dict[str, Any]:
    """Return the schemas of an event, by its kind, and of all items of a stream.

    The last variant accepts any other kind: a generated client keeps working when there are more.
    """
    components["OtherEvent"]["properties"]["kind"]["not"] = {"enum": sorted(EVENTS)}
    kinds = {kind: reference(event)["$ref"] for kind, event in EVENTS.items()}
    return {
        "Event": {
            "description": components["Event"]["description"],
            "oneOf": [*({"$ref": place} for place in kinds.values()), reference(OtherEvent)],
            "discriminator": {"propertyName": "kind", "mapping": kinds},
        },
        "StreamItem": {
            "description": (
                "An item of a stream: an event of the log, or a mark for this client only."
            ),
            "oneOf": [reference(Event), *(reference(mark) for mark in MARKS)],
        },
    }


def _operation(route: Route, query: dict[str, Any]) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "tags": [_tag(route)],
        "summary": route.summary,
        "operationId": f"{_group(route)}_{route.handle.__name__}",
        "parameters": list(_parameters(route, query)),
        "responses": {
            **_success(route),
            **{str(status): _problem(status) for status in sorted(_statuses(route))},
        },
    }
    if route.is_open:
        operation["security"] = []
    if route.body is not None:
        # A body is optional if none of its members is required.
        fields = msgspec.structs.fields(route.body)
        operation["requestBody"] = {
            "required": any(field.required for field in fields),
            "content": {"application/json": {"schema": reference(route.body)}},
        }
    return operation


def _group(route: Route) -> str:
    module = route.handle.__module__.rpartition(".")[2]
    return _GROUPS.get(module, module)


def _tag(route: Route) -> str:
    group = _group(route)
    return "questions" if "/questions" in route.path else group if group in _TAGS else "server"


def _parameters(route: Route, query: dict[str, Any]) -> Iterable[dict[str, Any]]:
    for name in _PARAMETER.findall(route.path):
        said = (said for path, of, said in _SUBJECTS if route.path.startswith(path) and of == name)
        yield {
            "name": name,
            "in": "path",
            "required": True,
            "schema": _ID,
            "description": next(said, ""),
        }
    required = query.get("required", [])
    for name, shape in query.get("properties", {}).items():
        # A parameter that is left out is null.
        (schema,) = [each for each in shape.get("anyOf", [shape]) if each != {"type": "null"}]
        schema = {key: value for key, value in schema.items() if key != "description"}
        where = {"name": name, "in": "query", "required": name in required}
        yield {**where, "schema": schema, "description": shape["description"]}
    if route.streams:
        yield _LAST_EVENT_ID
        yield _accept(route)
    if route.has_key:
        yield _KEY


def _accept(route: Route) -> dict[str, Any]:
    media_types = [*([] if route.answer is None else [route.media_type]), *route.streams]
    return {
        "name": "Accept",
        "in": "header",
        "required": False,
        "schema": {"type": "string", "enum": media_types},
        "description": f"Media type of the response. Default: `{media_types[0]}`.",
    }


def _success(route: Route) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if route.answer in (str, bytes):
        form = {} if route.answer is str else {"format": "binary"}
        content[route.media_type] = {"schema": {"type": "string", **form}}
    elif route.answer is not None:
        content[route.media_type] = {"schema": reference(route.answer)}
    content |= {media_type: {"schema": _STREAM} for media_type in route.streams}
    answer: dict[str, Any] = {"description": "Success."}
    if content:
        answer["content"] = content
    # A session that was deleted with `forget` has nothing to show.
    gone = {"204": {"description": "Success, without content."}} if route.method == "DELETE" else {}
    return {str(route.status): answer, **gone}


def _statuses(route: Route) -> set[int]:
    return {
        *_ALWAYS,
        *route.problems,
        *(_WITH_TOKEN if not route.is_open or route.body is not None else ()),
        *(() if route.is_open else _LIMITED),
        *(_WITH_ID if "{" in route.path else ()),
        *(_WITH_BODY if route.body is not None else ()),
        *(_TO_OWNER if route.to_owner is not None else ()),
        *(_CHANGE_AT_OWNER if route.to_owner is not None and route.method != "GET" else ()),
    }


def _problem(status: int) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "description": _WORDS[status],
        "content": {MEDIA_TYPE: {"schema": reference(Problem)}},
    }
    if status in (429, 503):
        answer["headers"] = {
            "Retry-After": {
                "schema": {"type": "string"},
                "description": "Seconds to wait before the next try.",
            }
        }
    return answer
