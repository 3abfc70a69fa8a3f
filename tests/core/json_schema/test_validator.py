"""JSON Schema validator: it enforces what it supports, refuses what it cannot enforce, and never raises for a value."""

from __future__ import annotations

import inspect
import json
import sys
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from banksman.core.json_schema import (
    NESTED_MAX,
    SCHEMA_DEPTH_MAX,
    STEPS_MAX,
    VALUE_DEPTH_MAX,
    check,
    fault,
    json_value,
    validator,
)
from banksman.errors import UsageError

NODE: dict[str, Any] = {
    "type": "object",
    "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
    "additionalProperties": False,
}

# Each case: a schema, values that fit it, values that do not fit it.
CASES: list[tuple[Any, list[Any], list[Any]]] = [
    (True, [None, 1, {}], []),
    (False, [], [None, 1, {}]),
    ({}, [None, True, 1.5, "", [], {}], []),
    ({"type": "integer"}, [1, 1.0, -(10**400), 1e300], [1.5, True, "1", None]),
    ({"type": "number"}, [1, 1.5, 10**400], [True, False, "1"]),
    ({"type": "boolean"}, [True, False], [0, 1, "true"]),
    ({"type": "null"}, [None], [False, 0, ""]),
    ({"type": "string"}, ["", "a"], [1, None]),
    ({"type": "array"}, [[], [1]], [{}, "a"]),
    ({"type": "object"}, [{}, {"a": 1}], [[], "a"]),
    ({"type": ["string", "null"]}, ["a", None], [1, []]),
    ({"enum": [1, "a", None, [1, {"b": 2}]]}, [1, 1.0, "a", None, [1.0, {"b": 2}]], [True, "1", [1], {}]),
    ({"const": 0}, [0, 0.0, -0.0], [False, "0", None]),
    ({"const": {"a": 1, "b": [True]}}, [{"b": [True], "a": 1.0}], [{"a": 1, "b": [1]}, {"a": 1}]),
    ({"const": False}, [False], [0, None]),
    ({"properties": {"a": {"type": "string"}}}, [{}, {"a": "x"}, {"b": 1}, [], 1], [{"a": 1}]),
    ({"required": ["a"]}, [{"a": None}, "a", []], [{}, {"b": 1}]),
    ({"properties": {"a": True}, "additionalProperties": False}, [{}, {"a": 1}], [{"b": 1}, {"a": 1, "b": 1}]),
    ({"additionalProperties": {"type": "integer"}}, [{}, {"a": 1}], [{"a": "x"}]),
    (
        {"patternProperties": {"^x-": {"type": "string"}}, "properties": {"x-a": {"minLength": 2}}},
        [{"x-a": "ab"}, {"y": 1}],
        [{"x-b": 1}, {"x-a": "a"}],
    ),
    ({"patternProperties": {"^x-": True}, "additionalProperties": False}, [{"x-1": 1}], [{"y": 1}]),
    ({"minProperties": 1, "maxProperties": 2}, [{"a": 1}, {"a": 1, "b": 1}, []], [{}, {"a": 1, "b": 1, "c": 1}]),
    ({"items": {"type": "integer"}}, [[], [1, 2], "no list"], [["a"], [1, "a"]]),
    ({"prefixItems": [{"type": "integer"}], "items": False}, [[], [1], {}], [["a"], [1, 2]]),
    ({"prefixItems": [{"type": "integer"}], "items": {"type": "string"}}, [[1, "a"]], [[1, 2]]),
    ({"minItems": 1, "maxItems": 2.0}, [[1], [1, 2], {}], [[], [1, 2, 3]]),
    (
        {"uniqueItems": True},
        [[], [1, True, "1"], [[], {}], [0, False]],
        [[1, 1.0], [{"a": 1, "b": 2}, {"b": 2, "a": 1}]],
    ),
    ({"uniqueItems": False}, [[1, 1]], []),
    ({"minLength": 2, "maxLength": 2}, ["ab", "😀😀", 3], ["a", "abc", "😀"]),
    ({"pattern": "^a+$"}, ["a", "aa", 1], ["ab", "a\n", ""]),
    ({"pattern": r"\$[$]"}, ["$$", "x$$\n"], ["$", ""]),
    ({"pattern": r"^\d$"}, ["1"], ["\u0661"]),
    ({"pattern": "b"}, ["abc"], ["ac"]),
    ({"minimum": 1, "maximum": 2}, [1, 2, 1.5, "0"], [0.9, 2.1, -(10**400), 10**400]),
    ({"exclusiveMinimum": 1, "exclusiveMaximum": 2}, [1.5], [1, 2]),
    ({"minimum": 1}, [True], []),
    ({"multipleOf": 0.1}, [0.3, 1, 0, -0.7, "x"], [0.35]),
    ({"multipleOf": 2}, [4, 4.0, 1e300], [3, 2.5]),
    ({"multipleOf": 1e-8}, [12391239123], []),
    ({"multipleOf": 0.123456789}, [], [1e308]),
    ({"allOf": [{"minimum": 1}, {"maximum": 2}]}, [1], [0, 3]),
    ({"anyOf": [{"type": "string"}, {"minimum": 2}]}, ["a", 2], [1]),
    ({"oneOf": [{"multipleOf": 2}, {"multipleOf": 3}]}, [2, 3], [6, 1]),
    ({"not": {"type": "string"}}, [1], ["a"]),
    ({"if": {"type": "string"}, "then": {"minLength": 1}, "else": {"minimum": 1}}, ["a", 1], ["", 0]),
    ({"if": {"type": "string"}}, ["a", 1], []),
    ({"then": False}, [1], []),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "string"}}, "minLength": 1}, ["a"], ["", 1]),
    ({"$ref": "#/definitions/a~1b~01", "definitions": {"a/b~1": {"type": "string"}}}, ["a"], [1]),
    ({"$ref": "#/$defs/no", "$defs": {"no": False}}, [], [1]),
    (NODE, [{}, {"next": None}, {"next": {"next": {}}}], [{"next": 1}, {"next": {"next": {"last": 1}}}]),
    ({"title": "t", "format": "date", "$schema": "x", "default": object, "examples": 3}, [1, "x"], []),
]


@pytest.mark.parametrize(("given_schema", "fitting", "others"), CASES)
def test_schema_accepts_fitting_values_only(given_schema: Any, fitting: list[Any], others: list[Any]) -> None:
    check(given_schema)
    assert [fault(value, given_schema) for value in fitting] == [None] * len(fitting)
    assert [value for value in others if fault(value, given_schema) is None] == []


@pytest.mark.parametrize(
    ("value", "given_schema", "reason"),
    [
        (
            {"items": [{"name": "a"}, {"name": "b"}, {"name": 3}]},
            {"properties": {"items": {"items": {"properties": {"name": {"type": "string"}}}}}},
            "items[2].name: must be text, not 3",
        ),
        ([], {"type": ["object", "null"]}, "must be an object or null, not a list"),
        ({"a": {}}, {"properties": {"a": {"required": ["b", "c"]}}}, "a.b: is missing"),
        ({"two words": 1}, {"additionalProperties": False}, "['two words']: is not allowed"),
        ("x" * 100, {"maxLength": 3}, f"must have at most 3 characters, not '{'x' * 33}… [cut]'"),
        ([1, 1], {"uniqueItems": True}, "must not have duplicate items"),
        ("c", {"enum": ["a", "b"]}, "must be one of 'a', 'b', not 'c'"),
        ([10**5000], {"items": {"maximum": 1.5}}, "[0]: must be at most 1.5, not a very long number"),
        (
            {"a": 3},
            {"properties": {"a": {"anyOf": [{"type": "string"}, {"type": "null"}]}}},
            "a: matches no alternative (must be text, not 3; must be null, not 3)",
        ),
        (6, {"oneOf": [{"multipleOf": 2}, {"multipleOf": 3}]}, "must match one alternative, but matches 2"),
        # The type is checked first, independent of its place in the schema.
        ("", {"minLength": 1, "type": "integer"}, "must be a whole number, not ''"),
    ],
)
def test_fault_names_path_and_reason(value: Any, given_schema: Any, reason: str) -> None:
    check(given_schema)
    assert fault(value, given_schema) == reason


def _list(depth: int, bottom: Any = 0.5) -> Any:
    value = bottom
    for _ in range(depth):
        value = [value]
    return value


def _deep_schema(depth: int) -> Any:
    given_schema: Any = {}
    for _ in range(depth):
        given_schema = {"items": given_schema}
    return given_schema


def _chain(length: int) -> Any:
    links: dict[str, Any] = {f"d{number}": {"$ref": f"#/$defs/d{number + 1}"} for number in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": {**links, f"d{length}": {"type": "string"}}}


@pytest.mark.parametrize(
    ("given_schema", "place", "hint"),
    [
        (3, "#", "a mapping"),
        (None, "#", "a mapping"),
        ([], "#", "a mapping"),
        ({"properties": {"a": {"kind": 1}}}, "#/properties/a/kind", "use one of: $defs, $ref, additionalProperties"),
        ({"unevaluatedProperties": False}, "#/unevaluatedProperties", "use one of"),
        ({3: 3}, "#/3", "use one of"),
        ({"type": "text"}, "#/type", "string"),
        ({"type": []}, "#/type", "string"),
        ({"type": [["string"]]}, "#/type", "string"),
        ({"enum": []}, "#/enum", "not empty"),
        ({"enum": "ab"}, "#/enum", "a list"),
        ({"enum": [object()]}, "#/enum", "JSON value"),
        ({"const": (1, 2)}, "#/const", "JSON value"),
        ({"minLength": -1}, "#/minLength", "from 0"),
        ({"minLength": True}, "#/minLength", "from 0"),
        ({"maxItems": 1.5}, "#/maxItems", "from 0"),
        ({"exclusiveMinimum": True}, "#/exclusiveMinimum", "a number"),
        ({"maximum": float("inf")}, "#/maximum", "a number"),
        ({"multipleOf": 0}, "#/multipleOf", "above 0"),
        ({"required": "name"}, "#/required", "a list of names"),
        ({"required": [1]}, "#/required", "a list of names"),
        ({"required": _list(100_000)}, "#/required", "a list of names"),
        ({"const": _list(100_000)}, "#/const", "JSON value"),
        ({"maximum": 10**5000, "minimum": "a"}, "#/minimum", "a number"),
        ({"maxItems": -(10**5000)}, "#/maxItems", "from 0"),
        ({"uniqueItems": 1}, "#/uniqueItems", "true or false"),
        ({"pattern": 1}, "#/pattern", "text"),
        ({"pattern": "("}, "#/pattern", "re"),
        ({"patternProperties": {"[": True}}, "#/patternProperties", "re"),
        ({"properties": [True]}, "#/properties", "a mapping"),
        ({"properties": {1: True}}, "#/properties", "a mapping"),
        ({"properties": {"a": 1}}, "#/properties/a", "a mapping"),
        ({"items": [True]}, "#/items", "a mapping"),
        ({"anyOf": []}, "#/anyOf", "not empty"),
        ({"anyOf": {}}, "#/anyOf", "a list"),
        ({"allOf": [True, 1]}, "#/allOf/1", "a mapping"),
        ({"$ref": 1}, "#/$ref", "text"),
        ({"$ref": "https://example.org/a"}, "#/$ref", "other references are not resolved"),
        ({"$ref": "#/properties/a", "properties": {"a": True}}, "#/$ref", "#/$defs/name"),
        ({"items": {"$ref": "#/$defs/a"}}, "#/items/$ref", "at the root"),
        ({"$ref": "#"}, "#/$ref", "recurse through"),
        ({"anyOf": [{"not": {"$ref": "#"}}]}, "#/anyOf/0/not/$ref", "recurse through"),
        (
            {"$defs": {"a": {"if": {"$ref": "#/$defs/b"}}, "b": {"allOf": [{"$ref": "#/$defs/a"}]}}},
            "#/$defs/a/if/$ref",
            "recurse through",
        ),
        (_deep_schema(SCHEMA_DEPTH_MAX + 1), "#/items", "at most"),
        (_deep_schema(100_000), "#/items", "at most"),
        (_chain(SCHEMA_DEPTH_MAX), "#/$ref", "at most"),
        (_chain(5000), "#/$ref", "at most"),
    ],
)
def test_unsupported_schema_is_refused(given_schema: Any, place: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        check(given_schema)
    assert str(caught.value).startswith(place)
    assert hint in caught.value.hint


def test_schema_of_maximum_depth_is_accepted() -> None:
    check(_deep_schema(SCHEMA_DEPTH_MAX))
    chain = _chain(SCHEMA_DEPTH_MAX - 1)
    check(chain)
    assert fault("a", chain) is None
    assert fault(1, chain) == "must be text, not 1"


def test_schema_recursion_into_value_is_accepted() -> None:
    tree: Any = {
        "$defs": {"tree": {"type": "object", "properties": {"both": {"items": {"$ref": "#/$defs/tree"}}}}},
        "$ref": "#/$defs/tree",
    }
    check(tree)
    assert fault({"both": [{"both": [{"both": None}]}]}, tree) is None
    assert fault({"both": [{}, {"both": [1]}]}, tree) == "both[1].both[0]: must be an object, not 1"


# -- hostile values --------------------------------------------------------------------------------------------------
def test_value_depth_is_bounded() -> None:
    assert fault(_list(VALUE_DEPTH_MAX), True) is None
    assert fault(_list(VALUE_DEPTH_MAX + 1), True) == f"must not be nested deeper than {VALUE_DEPTH_MAX}"
    assert fault(_list(100_000), {"not": {"const": 1}}) == f"must not be nested deeper than {VALUE_DEPTH_MAX}"


def test_deepest_check_leaves_stack_room() -> None:
    value: Any = {}
    for _ in range(VALUE_DEPTH_MAX - 1):
        value = {"next": value}
    # The check uses three schemas for each level, and compares a deep value at the bottom.
    assert 3 * VALUE_DEPTH_MAX <= NESTED_MAX
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack(0)) + 600)
    try:
        assert fault(value, NODE) is None
        assert fault(value, {"const": value}) is None
        assert fault([value], {"items": {"$ref": "#"}, "uniqueItems": True}) is not None
    finally:
        sys.setrecursionlimit(before)


def test_schema_nesting_beyond_bound_is_fault_even_under_not() -> None:
    doubled: Any = {"items": {"$ref": "#"}}
    for _ in range(5):
        doubled = {"allOf": [doubled]}
    assert "nested schemas apply" in str(fault(_list(VALUE_DEPTH_MAX), doubled))
    assert "nested schemas apply" in str(fault(_list(VALUE_DEPTH_MAX), {"not": {"not": doubled}, **doubled}))


def _set_steps_max(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    # Each module imports the constant under its own name.
    monkeypatch.setattr(json_value, "STEPS_MAX", steps)
    monkeypatch.setattr(validator, "STEPS_MAX", steps)


# Each level is checked twice, and the bottom is a fault for both alternatives.
_BOTH: dict[str, Any] = {"items": {"$ref": "#"}, "minItems": 1}
DOUBLING: dict[str, Any] = {"anyOf": [_BOTH, dict(_BOTH)]}
DEEPEST = _list(VALUE_DEPTH_MAX - 1, [])


def test_schema_that_doubles_with_depth_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    check(DOUBLING)
    _set_steps_max(monkeypatch, 10_000)
    assert fault(DEEPEST, DOUBLING) == "cannot be checked in 10000 steps"


def test_value_parts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    _set_steps_max(monkeypatch, 100)
    numbers: Any = {"items": {"type": "integer"}}
    assert fault([1] * 99, numbers) is None
    assert fault([1] * 100, numbers) == "cannot be checked in 100 steps"
    assert fault([1] * 101, numbers) == "must not have more than 100 parts"
    # The list contains itself twice: a traversal of each part would visit about 10^12 parts.
    twice: list[Any] = []
    twice += [twice, twice]
    assert fault(twice, True) == "must not have more than 100 parts"


def _calls(value: Any, given_schema: Any) -> tuple[str | None, int]:
    """Return the fault and the number of function calls, Python and C: a cost that is the same on every machine."""
    calls = 0

    def count(_: object, event: str, __: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        found = fault(value, given_schema)
    finally:
        sys.setprofile(before)
    return found, calls


_SMALL: dict[str, Any] = {
    "items": {"type": "object", "required": ["a"], "properties": {"a": {"minimum": 0}}, "additionalProperties": False}
}
_ALTERNATIVES: dict[str, Any] = {"items": {"oneOf": [{"type": "null"}, {"const": 1}, {"minLength": 1, "pattern": "a"}]}}
_TWICE: list[Any] = []
_TWICE.extend([_TWICE, _TWICE])


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("value", "given_schema", "reason"),
    [
        ([1] * (STEPS_MAX - 1), {"items": {"type": "integer"}}, None),
        ([1] * STEPS_MAX, {"items": {"type": "integer"}}, f"cannot be checked in {STEPS_MAX} steps"),
        ([1] * (STEPS_MAX + 1), {"items": {"type": "integer"}}, f"must not have more than {STEPS_MAX} parts"),
        ([{"a": 1}] * (STEPS_MAX // 2 - 1), _SMALL, None),
        (["a"] * STEPS_MAX, _ALTERNATIVES, f"cannot be checked in {STEPS_MAX} steps"),
        (DEEPEST, DOUBLING, f"cannot be checked in {STEPS_MAX} steps"),
        (_TWICE, True, f"must not have more than {STEPS_MAX} parts"),
    ],
    # The values are too long to be test ids.
    ids=["fits", "a step more", "a part more", "objects", "alternatives", "doubling", "itself"],
)
def test_largest_check_is_bounded_by_steps(value: Any, given_schema: Any, reason: str | None) -> None:
    # A check blocks the event loop of every session. The test counts instead of measuring time: a maximum of steps, and
    # a maximum of calls for each step. It leaves out the steps whose length the schema determines: a comparison with a
    # large value, and a pattern that retries.
    assert STEPS_MAX <= 100_000
    check(given_schema)
    found, calls = _calls(value, given_schema)
    assert found == reason
    assert calls <= 40 * STEPS_MAX


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (float("nan"), "must be a JSON value, not nan"),
        ({"a": [float("inf")]}, "a[0]: must be a JSON value, not inf"),
        ({"a": (1,)}, "a: must be a JSON value, not a tuple"),
        ([b"x"], "[0]: must be a JSON value, not a bytes"),
        ({"a": {1: 2}}, "a: must have text as names"),
    ],
)
def test_value_outside_json_is_fault(value: Any, reason: str) -> None:
    assert fault(value, True) == reason


def test_fault_reason_is_printable_with_lone_surrogates() -> None:
    for found in (fault({"\ud800": "\ud800"}, {"additionalProperties": False}), fault("\ud800", {"const": 1})):
        assert found is not None
        assert found.isprintable()
        assert found.encode()


def test_unique_items_with_equal_hashes_are_compared_quickly() -> None:
    # Hashed as numbers, these items would take the square of their count: minutes.
    items = [number * sys.hash_info.modulus for number in range(1, 20_001)]
    assert fault(items, {"uniqueItems": True}) is None
    assert fault([*items, items[5]], {"uniqueItems": True}) is not None


# -- properties ------------------------------------------------------------------------------------------------------
_scalars = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=3)
)
_values: st.SearchStrategy[Any] = st.recursive(
    _scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
)
_counts = st.integers(0, 3)
_leaves: st.SearchStrategy[Any] = st.booleans() | st.one_of(
    st.fixed_dictionaries({}, optional={"minLength": _counts, "maxLength": _counts, "pattern": st.just("^[a-f]")}),
    st.fixed_dictionaries({"type": st.sampled_from(["string", "integer", "number", "null", "array", "object"])}),
    st.fixed_dictionaries({"type": st.lists(st.sampled_from(["boolean", "integer", "object"]), min_size=1)}),
    st.fixed_dictionaries({"enum": st.lists(_values, min_size=1, max_size=3)}),
    st.fixed_dictionaries({}, optional={"minimum": st.integers(), "multipleOf": st.floats(0.01, 10)}),
    st.fixed_dictionaries({}, optional={"minItems": _counts, "uniqueItems": st.booleans(), "maxProperties": _counts}),
    st.fixed_dictionaries({"required": st.lists(st.sampled_from("abc"))}),
)


def _within(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    many = st.lists(inner, min_size=1, max_size=3)
    named = st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
    return st.fixed_dictionaries(
        {},
        optional={
            **{"allOf": many, "anyOf": many, "oneOf": many, "prefixItems": many, "properties": named},
            **{"not": inner, "if": inner, "then": inner, "else": inner, "items": inner, "additionalProperties": inner},
        },
    )


_schemas = st.recursive(_leaves, _within, max_leaves=6)


def _equal(one: Any, other: Any) -> bool:
    """Equality as JSON Schema defines it, as a simple recursive reference."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    match one, other:
        case [*_], [*_]:
            return len(one) == len(other) and all(map(_equal, one, other))
        case {}, {}:
            return one.keys() == other.keys() and all(_equal(one[name], other[name]) for name in one)
        case _:
            return one == other


@given(value=_values, given_schema=_schemas)
@pytest.mark.thorough
def test_fault_is_printable_for_every_value(value: Any, given_schema: Any) -> None:
    check(given_schema)
    found = fault(value, given_schema)
    assert found is None or found.isprintable()
    # The value after a round trip through JSON gives the same result.
    assert fault(json.loads(json.dumps(value)), given_schema) == found


@given(value=_values, schemas=st.lists(_schemas, min_size=1, max_size=3))
def test_applicators_count_fitting_schemas(value: Any, schemas: list[Any]) -> None:
    fitting = sum(fault(value, each) is None for each in schemas)
    assert (fault(value, {"allOf": schemas}) is None) == (fitting == len(schemas))
    assert (fault(value, {"anyOf": schemas}) is None) == (fitting > 0)
    assert (fault(value, {"oneOf": schemas}) is None) == (fitting == 1)
    assert (fault(value, {"not": schemas[0]}) is None) == (fault(value, schemas[0]) is not None)


@given(one=_values, other=_values)
def test_equality_follows_json(one: Any, other: Any) -> None:
    assert fault(one, {"const": one}) is None
    assert (fault(one, {"enum": [other]}) is None) == _equal(one, other)
    assert (fault([one, other], {"uniqueItems": True}) is None) != _equal(one, other)


_numbers = st.integers(-(10**20), 10**20) | st.floats(-1e20, 1e20) | st.decimals(-100, 100, places=2).map(float)


@given(number=_numbers, of=_numbers.filter(lambda of: of > 0))
def test_multiple_of_uses_written_numbers(number: float, of: float) -> None:
    quotient = Fraction(Decimal(repr(number))) / Fraction(Decimal(repr(of)))
    assert (fault(number, {"multipleOf": of}) is None) == (quotient.denominator == 1)


NESTED_LISTS: dict[str, Any] = {"uniqueItems": True, "items": {"$ref": "#"}}


def _deep(depth: int, width: int) -> list[Any]:
    value: list[Any] = [float(number) for number in range(width)]
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("value", "held_to"),
    [
        pytest.param([99_999] * 50_000, {"items": {"enum": list(range(100_000))}}, id="enum"),
        pytest.param(_deep(60, 20_000), NESTED_LISTS, id="uniqueItems at each depth"),
        pytest.param([[10**18] * 1000] * 90, {"items": {"const": [10**18] * 1000}}, id="const"),
        pytest.param([[1] * 1000] * 101, True, id="leaves of many lists"),
    ],
)
def test_comparison_and_count_cost_steps(value: object, held_to: object) -> None:
    """Each of these values once blocked the event loop for seconds, one of them for most of a minute."""
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    sys.setprofile(count)
    try:
        found = fault(value, held_to)
    finally:
        sys.setprofile(None)
    assert found is not None
    assert str(STEPS_MAX) in found
    # The profiler counts events: each call is two events, and library calls count too.
    assert calls < 100 * STEPS_MAX
