"""The API description is valid by OpenAPI 3.1 and JSON Schema, and covers every route."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import jsonschema_rs
import msgspec
from schemathesis.specs.openapi import definitions
from tests.server.kit import Served

from banksman.core.dialects.dialect import Verdict
from banksman.core.session import event as kinds
from banksman.core.session import outcome, watchdogs
from banksman.core.session.ask_queue import Priority
from banksman.core.session.state import Mode, ProcessPhase
from banksman.core.session.turn import Cause, TurnPhase
from banksman.server import problems
from banksman.server.api import command_routes, openapi
from banksman.server.api import openapi as schemas
from banksman.server.api.messages import common_messages, event_messages
from banksman.server.api.messages.common_messages import Body, Query
from banksman.server.app import ROUTES

DESCRIBED: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(openapi.describe(ROUTES)))
OPERATIONS = {
    (method.upper(), path): operation
    for path, methods in DESCRIBED["paths"].items()
    for method, operation in methods.items()
}


def test_openapi_description_is_valid_3_1() -> None:
    assert DESCRIBED["openapi"] == "3.1.0"
    definitions.OPENAPI_31_VALIDATOR.validate(DESCRIBED)
    for name, schema in DESCRIBED["components"]["schemas"].items():
        jsonschema_rs.meta.validate({**schema, "$schema": "https://json-schema.org/draft/2020-12/schema"})
        assert re.fullmatch(r"[A-Za-z0-9._-]+", name)


def test_openapi_description_has_every_route_with_a_unique_operation_id() -> None:
    assert set(OPERATIONS) == {(route.method, route.path) for route in ROUTES}
    names = [operation["operationId"] for operation in OPERATIONS.values()]
    assert len(set(names)) == len(names)


def test_openapi_operation_ids_do_not_follow_module_names() -> None:
    """Generated clients have functions of these names."""
    words = {operation["operationId"].partition("_")[0] for operation in OPERATIONS.values()}
    assert words == {"access", "sessions", "turns", "holds", "events", "commands", "hosts", "operation", "usage"}


def test_openapi_references_resolve() -> None:
    text = msgspec.json.encode(DESCRIBED).decode()
    for name in re.findall(r'"\$ref":"#/components/schemas/([^"]+)"', text):
        assert name in DESCRIBED["components"]["schemas"]


def test_openapi_errors_are_problems_and_retryable_ones_have_retry_after() -> None:
    for (method, path), operation in OPERATIONS.items():
        for status, answer in operation["responses"].items():
            if int(status) >= 400:
                assert list(answer["content"]) == [problems.MEDIA_TYPE], (method, path, status)
            if status in ("429", "503"):
                assert "Retry-After" in answer["headers"]


def test_openapi_operations_list_the_common_error_statuses() -> None:
    for (method, path), operation in OPERATIONS.items():
        found = {int(status) for status in operation["responses"]}
        assert {400, 403, 405, 408, 414, 431, 500, 503} <= found, (method, path)
        assert (401 in found) == (path not in ("/readyz", "/healthz", "/livez")), (method, path)
        if "{" in path:
            assert 404 in found
        if "requestBody" in operation:
            assert {413, 415} <= found
            # 422 answers a well-formed request that cannot be done. Drain, login and stop always can.
            ends = ("/v1/drain", "/v1/hosts/{id}/drain", "/v1/login", "/v1/commands/{id}/stop")
            assert 422 in found or path in ends, (method, path)


def test_openapi_describes_every_error_status() -> None:
    for _, status in problems._STATUSES:  # pyright: ignore[reportPrivateUsage]
        assert status in openapi._WORDS  # pyright: ignore[reportPrivateUsage]


def test_openapi_marks_exactly_the_routes_without_authentication() -> None:
    open_ = {place for place, operation in OPERATIONS.items() if operation.get("security") == []}
    assert open_ == {("GET", "/readyz"), ("GET", "/healthz"), ("GET", "/livez"), ("POST", "/v1/login")}
    assert DESCRIBED["security"]


def test_openapi_bodies_refuse_unknown_members() -> None:
    for operation in OPERATIONS.values():
        if "requestBody" in operation:
            reference = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
            assert DESCRIBED["components"]["schemas"][reference.rpartition("/")[2]]["additionalProperties"] is False


# -- needs of generated clients --------------------------------------------------------------------------------------
SCHEMAS: dict[str, Any] = DESCRIBED["components"]["schemas"]


def parts(schema: Any, place: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each schema within this one, including itself."""
    found = cast("dict[str, Any]", schema)
    yield place, found
    for name, part in found.get("properties", {}).items():
        yield from parts(part, f"{place}.{name}")
    for key in ("items", "additionalProperties"):
        if isinstance(found.get(key), dict):
            yield from parts(found[key], f"{place}.{key}")
    for key in ("anyOf", "oneOf"):
        for number, part in enumerate(found.get(key, [])):
            yield from parts(part, f"{place}.{key}[{number}]")


def test_openapi_schemas_and_properties_have_descriptions() -> None:
    for name, schema in SCHEMAS.items():
        assert schema["description"], name
        for member, shape in schema.get("properties", {}).items():
            assert shape["description"], (name, member)


def test_openapi_described_attributes_are_members() -> None:
    for kind in schemas._message_types(msgspec.Struct):  # pyright: ignore[reportPrivateUsage]
        _, members = schemas._parts(kind.__doc__ or "")  # pyright: ignore[reportPrivateUsage]
        assert set(members) <= set(kind.__struct_encode_fields__), kind


def test_openapi_operations_have_a_described_tag() -> None:
    described = {tag["name"] for tag in DESCRIBED["tags"] if tag["description"]}
    for place, operation in OPERATIONS.items():
        (tag,) = operation["tags"]
        assert tag in described, place
        for parameter in operation["parameters"]:
            assert parameter["description"], (place, parameter["name"])


def test_openapi_fixed_choices_are_named_enums() -> None:
    named = {name for name, schema in SCHEMAS.items() if "enum" in schema}
    assert named >= {"TurnState", "SessionState", "OutcomeKind", "OnBusy", "PriorityName", "SignalName", "CommandState"}
    assert SCHEMAS["OnBusy"]["enum"] == ["enqueue", "reject", "interrupt", "steer", "collect"]
    assert SCHEMAS["Turn"]["properties"]["state"]["$ref"] == "#/components/schemas/TurnState"


def test_openapi_enums_match_the_core() -> None:
    assert tuple(TurnPhase) == common_messages.TURN_STATES
    assert tuple(outcome.Kind) == common_messages.OUTCOME_KINDS
    assert tuple(outcome.By) == common_messages.ENDED_BY
    assert tuple(cause.value for cause in Cause) == common_messages.INTERRUPT_CAUSES
    assert (*watchdogs.ClockName, watchdogs.DEADLINE) == common_messages.CLOCK_NAMES
    assert tuple(priority.name.lower() for priority in Priority) == common_messages.PRIORITY_NAMES
    assert tuple(Verdict) == common_messages.RULINGS


def test_openapi_phase_enum_has_every_phase_of_an_open_session() -> None:
    """`phase` in status.py uses these words."""
    modes = {mode.name.lower() for mode in Mode} - {"open"}
    processes = {phase.name.lower() for phase in ProcessPhase} - {"none", "ready"}
    turns = set(TurnPhase) - {TurnPhase.QUEUED, TurnPhase.ENDED}
    assert modes | processes | turns <= set(common_messages.PHASES)


def test_openapi_optional_members_have_no_default() -> None:
    """openapi-typescript makes a member with a `default` a required one."""
    for name, schema in SCHEMAS.items():
        for place, part in parts(schema, name):
            assert "default" not in part, place


def test_openapi_always_sent_members_are_required() -> None:
    """Otherwise a generated client has to test each of them for its presence."""
    for kind in schemas._message_types(msgspec.Struct):  # pyright: ignore[reportPrivateUsage]
        schema = SCHEMAS.get(kind.__name__, {})
        if not issubclass(kind, Body | Query) and not kind.__struct_config__.omit_defaults and "properties" in schema:
            assert set(schema["required"]) == set(schema["properties"]), kind


def test_openapi_objects_declare_their_properties() -> None:
    for name, schema in SCHEMAS.items():
        for place, part in parts(schema, name):
            if part.get("type") == "object":
                assert "properties" in part or "additionalProperties" in part, place


def test_openapi_media_types_have_a_schema() -> None:
    for place, operation in OPERATIONS.items():
        for status, answer in operation["responses"].items():
            for media_type, content in answer.get("content", {}).items():
                assert content.get("schema"), (place, status, media_type)


def test_openapi_stream_routes_have_an_accept_parameter() -> None:
    operation = OPERATIONS["GET", "/v1/sessions/{id}/events"]
    (accept,) = [each for each in operation["parameters"] if each["name"] == "Accept"]
    assert accept["schema"]["enum"] == list(operation["responses"]["200"]["content"])


def test_openapi_describes_every_event_kind() -> None:
    written = {value for name, value in vars(kinds).items() if name.isupper() and isinstance(value, str)}
    assert set(event_messages.EVENTS) == written - {kinds.STREAM_GAP}
    described = SCHEMAS["Event"]["discriminator"]["mapping"]
    assert described.keys() == set(event_messages.EVENTS)
    places = [each["$ref"] for each in SCHEMAS["Event"]["oneOf"]]
    assert places == [*described.values(), "#/components/schemas/OtherEvent"]


def test_openapi_signal_enum_is_accepted_by_the_route() -> None:
    assert all(command_routes._signal(name) for name in common_messages.SIGNALS)  # pyright: ignore[reportPrivateUsage]


def test_openapi_event_schema_matches_events_of_a_real_session(tmp_path: Path) -> None:
    schema = {"$ref": "#/components/schemas/Event", "components": DESCRIBED["components"]}
    validator = jsonschema_rs.Draft202012Validator(schema)
    script = {"prompt 1": ['ask Bash {"command": "make"}', "say done"], "prompt 2": ["exit 3"]}
    with Served(tmp_path / "server") as served:
        session = served.open(script, options={"drain_seconds": 0.1})
        turns = [served.ask(session, "go", priority=priority) for priority in ("normal", 3)]
        path = f"/v1/sessions/{session}"
        with served.stream(f"{path}/events") as stream:
            asked = next(each.data for each in stream.messages() if each.data["kind"] == "question.asked")
        (question,) = served.get(f"{path}/questions")["questions"]
        assert question["question"] == question["id"] == asked["body"]["question"]
        served.post(f"{path}/questions/{question['question']}", {"decision": "allow"})
        for turn in turns:
            served.outcome(session, turn)
        events = served.get(f"{path}/events?limit=1000&raw=1&partial=1")["events"]
    for event in events:
        validator.validate(event)
    # Each event matches the schema of its kind, and none that of an unknown kind.
    other = jsonschema_rs.Draft202012Validator({**schema, "$ref": "#/components/schemas/OtherEvent"})
    assert not [event for event in events if other.is_valid(event)]
    assert {"turn.ended", "question.answered", "process.exited", "update"} <= {event["kind"] for event in events}
