"""Reduce a JSON schema to what Claude Code accepts: only the parts that would invalidate the whole are left out."""

from __future__ import annotations

from typing import Any

import pytest

from banksman.core.dialects.claude.writer import is_plain_pattern, told

DRAFT = "https://json-schema.org/draft/2020-12/schema"


def test_schema_drops_draft_names_at_every_depth() -> None:
    inner = {"$comment": "x", "type": "array", "items": {"$id": "y", "type": "string"}}
    schema = {"$schema": DRAFT, "type": "object", "properties": {"a": inner}, "required": ["a"]}
    expected = {"type": "array", "items": {"type": "string"}}
    assert told(schema) == {"type": "object", "properties": {"a": expected}, "required": ["a"]}


def test_schema_keeps_names_and_values_that_look_like_keywords() -> None:
    named = {"pattern": {"type": "string"}, "$schema": {"const": {"$schema": "(?i)"}}}
    schema = {"type": "object", "properties": named, "default": {"$id": 1}, "enum": [{"$comment": 2}]}
    assert told(schema) == schema


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"discriminator": {"propertyName": "kind"}, "examples": [1], "readOnly": True}, {}),
        ({"title": 3, "description": "so"}, {"description": "so"}),
        ({"if": {}, "type": "string"}, {"type": "string"}),
        ({"then": {}, "else": {}}, {}),
        ({"if": {"$id": "x"}, "then": {}}, {"if": {}, "then": {}}),
        ({"enum": ["a", "b", "a"], "type": ["string", "string"]}, {"enum": ["a", "b"], "type": ["string"]}),
        ({"required": ["a", "a"]}, {"required": ["a"]}),
        (
            {"prefixItems": [{"type": "string"}], "items": False},
            {"items": [{"type": "string"}], "additionalItems": False},
        ),
        (
            {"properties": {"ab": {}}, "patternProperties": {"^a": {}}, "additionalProperties": False},
            {"properties": {"ab": {}}},
        ),
    ],
)
def test_schema_drops_what_agent_validator_refuses(schema: Any, expected: Any) -> None:
    assert told(schema) == expected


@pytest.mark.parametrize(
    "pattern",
    [
        *(r"^\d{3}\-\d{4}$", "(?i)^yes$", "(?P<x>a)", r"\Aa\Z", r"(?<=a)b", "(?=a)*", "a++", "a*+", "x{2}+", "^{", "}"),
        *("a]", "x{,3}", "a{2", "[]a]", "[^]a]", "[[a]", "^*"),
    ],
)
def test_schema_drops_pattern_that_only_python_reads(pattern: str) -> None:
    assert not is_plain_pattern(pattern)
    assert told({"type": "string", "pattern": pattern, "minLength": 1}) == {"type": "string", "minLength": 1}
    named: dict[str, Any] = {
        "type": "object",
        "patternProperties": {pattern: {}, "^x": {}},
        "additionalProperties": False,
    }
    assert told(named) == {"type": "object"}


@pytest.mark.parametrize("pattern", [r"^\d{3}-\d{4}$", "^(?:a|b)$", r"^[a-z\-]+?\.py$", r"(a|b){2,3}", r"\\", "ü", ""])
def test_schema_keeps_pattern_that_both_read_alike(pattern: str) -> None:
    schema = {"type": "object", "patternProperties": {pattern: {"pattern": pattern}}, "additionalProperties": False}
    assert told(schema) == schema
