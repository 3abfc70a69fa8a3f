"""JSON Schemas of the messages, made so that generated clients can use them.

msgspec makes a schema from each type. What generators need besides is added here:

- a description of each member, from the docstring (see messages/__init__.py);
- names: a schema with a title is a component of that name, wherever it is used;
- what is sent is required, and has no default. What may be left out of a request has its default in its description:
  some generators take a member with a `default` for one that must be given;
- an object without known members takes any: some generators read nothing as "none".
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator
from typing import Any, cast

import msgspec

from banksman.serve.api import messages
from banksman.serve.api.messages.parts import Body, Query

REF = "#/components/schemas/{name}"
Schema = dict[str, Any]

_MEMBER = re.compile(r"^    (\w+): ", re.MULTILINE)


def make(types: Iterable[Any]) -> dict[str, Schema]:
    """The components of these types and of all that they refer to, by name."""
    _, made = msgspec.json.schema_components(types, ref_template=REF)
    known = {kind.__name__: kind for kind in _message_types(msgspec.Struct)}
    components: dict[str, Schema] = {}
    for name, schema in made.items():
        kind = known[name]
        defaults = {name: member.pop("default", None) for name, member in schema["properties"].items()}
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
        # Null, false, zero and empty go without saying.
        if default := defaults.get(name):
            member["description"] += f" Default: {msgspec.json.encode(default).decode()}."


def _parts(docstring: str) -> tuple[str, dict[str, str]]:
    """What a docstring says of the type, and of each member."""
    said, _, listed = inspect.cleandoc(docstring).partition("\n\nAttributes:\n")
    # After the text before the first name, which is empty, names and texts alternate.
    parts = _MEMBER.split(listed)[1:]
    members = zip(parts[::2], parts[1::2], strict=True)
    return _one_line(said), {name: _one_line(text) for name, text in members}


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _named_parts(schema: Schema, components: dict[str, Schema]) -> Schema:
    """The schema with references in place of its parts that have a title, which become components."""
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
