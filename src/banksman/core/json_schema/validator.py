"""Validate a value against a checked schema: keyword by keyword, then part by part, up to the first fault.

`_LIMITS` are the keywords that test the value alone. `_RULES` are those that apply other schemas to the same value, and
`required`, which reports another path. `_parts` applies schemas to members and items.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from banksman.core.json_schema.json_value import (
    COMPARED_CHARS,
    LEAVES,
    STEPS_MAX,
    TYPES,
    SchemaFault,
    canonical,
    is_list,
    is_multiple,
    is_number,
    is_object,
    is_text,
    member,
    no_json,
    shown,
)
from banksman.core.json_schema.regex import TooMuch, compiled
from banksman.core.json_schema.schema_check import target, type_names

# The recursion takes two frames for each schema applied within another, and two for each level of a compared value:
# 2 × 200 + 2 × 64 (VALUE_DEPTH_MAX) of Python's 1000 frames. The rest is for the caller's stack.
NESTED_MAX = 200
# How many choices, and how much of the reasons of alternatives, a reason shows.
CHOICES_SHOWN_MAX, REASONS_CHARS_MAX = 10, 300

# Keywords about members, and about items.
_OF_MEMBERS = frozenset(("properties", "patternProperties", "additionalProperties"))
_OF_ITEMS = frozenset(("prefixItems", "items"))


def fault(value: object, schema: object) -> str | None:
    """The first reason why a value does not fit a checked schema, with its path; None if it fits."""
    found = no_json(value)
    if found is None:
        try:
            found = _Holding(schema).hold(_Place(value, schema, "", 0))
        except TooMuch as exc:
            found = SchemaFault("", str(exc))
    return None if found is None else found.words()


class _Place(NamedTuple):
    """A part of the value, its schema, its path, and the number of schemas around it."""

    value: Any
    schema: Any
    path: str
    nested: int

    def under(self, schema: object) -> _Place:
        """The same value with another schema."""
        return _Place(self.value, schema, self.path, self.nested + 1)


class _Holding:
    """One validation. It knows the root schema, for `$ref`, and counts the steps."""

    def __init__(self, root: object) -> None:
        self.root = root
        self.steps = 0
        # The choices of each `enum`, by the id of its list: they are made once, not for each value.
        self._choices: dict[int, frozenset[str]] = {}

    def spend(self, steps: int) -> None:
        self.steps += steps
        if self.steps > STEPS_MAX:
            raise TooMuch(f"cannot be checked in {STEPS_MAX} steps")

    def compared(self, value: object) -> str:
        """The text that stands for a value in a comparison. It costs steps by its length."""
        text = canonical(value)
        self.spend(1 + len(text) // COMPARED_CHARS)
        return text

    def choices(self, among: Sequence[Any]) -> frozenset[str]:
        made = self._choices.get(id(among))
        if made is None:
            made = self._choices[id(among)] = frozenset(map(self.compared, among))
        return made

    def hold(self, at: _Place) -> SchemaFault | None:
        self.spend(1)
        if at.nested > NESTED_MAX:
            raise TooMuch(f"cannot be checked: more than {NESTED_MAX} schemas apply within each other")
        if isinstance(at.schema, bool):
            return None if at.schema else SchemaFault(at.path, "must not be there")
        # The wrong type is the best reason: other faults follow from it.
        if "type" in at.schema and not _is_typed(at.value, at.schema["type"]):
            return _exceeded(at, "type", at.schema["type"])
        for keyword, given in at.schema.items():
            if keyword == "type":
                continue
            rule = _RULES.get(keyword)
            found = _exceeded(at, keyword, given) if rule is None else rule(self, at, given)
            if found is not None:
                return found
        if type(at.value) in LEAVES:
            return None
        for path, value, schema in _parts(at):
            found = self.hold(_Place(value, schema, path, at.nested + 1))
            if found is not None:
                return found
        return None


def _is_any(value: object) -> bool:
    return True


def _is_typed(value: object, given: Any) -> bool:
    if isinstance(given, str):
        return TYPES[given][1](value)
    return any(TYPES[name][1](value) for name in given)


# Keywords without inner schemas: the values they apply to, the test, and the words of the reason.
_LIMITS: dict[str, tuple[Callable[[Any], bool], Callable[[Any, Any], bool], str]] = {
    "type": (_is_any, _is_typed, "must be {}"),
    "minLength": (is_text, lambda text, least: len(text) >= least, "must have at least {} characters"),
    "maxLength": (is_text, lambda text, most: len(text) <= most, "must have at most {} characters"),
    "pattern": (is_text, lambda text, pattern: compiled(pattern).search(text), "must match the pattern {}"),
    "minimum": (is_number, lambda number, least: number >= least, "must be at least {}"),
    "maximum": (is_number, lambda number, most: number <= most, "must be at most {}"),
    "exclusiveMinimum": (is_number, lambda number, bound: number > bound, "must be above {}"),
    "exclusiveMaximum": (is_number, lambda number, bound: number < bound, "must be below {}"),
    "multipleOf": (is_number, is_multiple, "must be a multiple of {}"),
    "minItems": (is_list, lambda items, least: len(items) >= least, "must have at least {} items"),
    "maxItems": (is_list, lambda items, most: len(items) <= most, "must have at most {} items"),
    "minProperties": (is_object, lambda members, least: len(members) >= least, "must have at least {} members"),
    "maxProperties": (is_object, lambda members, most: len(members) <= most, "must have at most {} members"),
}


def _exceeded(at: _Place, keyword: str, given: Any) -> SchemaFault | None:
    if keyword not in _LIMITS:
        return None
    applies, allows, words = _LIMITS[keyword]
    if not applies(at.value) or allows(at.value, given):
        return None
    if keyword == "type":
        limit = " or ".join(TYPES[name][0] for name in type_names(given))
    else:
        limit = shown(given)
    return _unfit(at, words.format(limit), is_shown=keyword == "type")


def _unfit(at: _Place, words: str, *, is_shown: bool = False) -> SchemaFault:
    # A list or an object is shown only for the type: otherwise being one was not the fault.
    is_shown = is_shown or not (is_list(at.value) or is_object(at.value))
    return SchemaFault(at.path, words + (f", not {shown(at.value)}" if is_shown else ""))


def _const(holding: _Holding, at: _Place, only: object) -> SchemaFault | None:
    return None if holding.compared(at.value) == holding.compared(only) else _unfit(at, f"must be {shown(only)}")


def _enum(holding: _Holding, at: _Place, among: Sequence[Any]) -> SchemaFault | None:
    if holding.compared(at.value) in holding.choices(among):
        return None
    more = ", …" if len(among) > CHOICES_SHOWN_MAX else ""
    return _unfit(at, f"must be one of {', '.join(map(shown, among[:CHOICES_SHOWN_MAX]))}{more}")


def _unique(holding: _Holding, at: _Place, is_wanted: bool) -> SchemaFault | None:
    if not is_wanted or not is_list(at.value) or len(set(map(holding.compared, at.value))) == len(at.value):
        return None
    return SchemaFault(at.path, "must not have an item twice")


def _ref(holding: _Holding, at: _Place, ref: str) -> SchemaFault | None:
    return holding.hold(at.under(target(ref, holding.root, "$ref")))


def _all_of(holding: _Holding, at: _Place, schemas: Sequence[Any]) -> SchemaFault | None:
    for schema in schemas:
        found = holding.hold(at.under(schema))
        if found is not None:
            return found
    return None


def _any_of(holding: _Holding, at: _Place, schemas: Sequence[Any]) -> SchemaFault | None:
    reasons: list[str] = []
    for schema in schemas:
        found = holding.hold(at.under(schema))
        if found is None:
            return None
        reasons.append(found.words(at.path))
    return _none_fits(at, reasons)


def _one_of(holding: _Holding, at: _Place, schemas: Sequence[Any]) -> SchemaFault | None:
    reasons: list[str] = []
    for schema in schemas:
        found = holding.hold(at.under(schema))
        if found is not None:
            reasons.append(found.words(at.path))
    fitting = len(schemas) - len(reasons)
    if fitting > 1:
        return SchemaFault(at.path, f"must fit one alternative, and fits {fitting}")
    return None if fitting else _none_fits(at, reasons)


def _none_fits(at: _Place, reasons: list[str]) -> SchemaFault:
    # Cut, because reasons nest: one may contain those of inner alternatives.
    words = "; ".join(dict.fromkeys(reasons))
    cut = words if len(words) <= REASONS_CHARS_MAX else f"{words[:REASONS_CHARS_MAX]}…"
    return SchemaFault(at.path, f"fits no alternative ({cut})")


def _not(holding: _Holding, at: _Place, schema: object) -> SchemaFault | None:
    return (
        SchemaFault(at.path, "must not fit what stands under not") if holding.hold(at.under(schema)) is None else None
    )


def _if(holding: _Holding, at: _Place, schema: object) -> SchemaFault | None:
    branch = "then" if holding.hold(at.under(schema)) is None else "else"
    return holding.hold(at.under(at.schema.get(branch, True)))


def _required(_: _Holding, at: _Place, names: Sequence[str]) -> SchemaFault | None:
    missing = next((name for name in names if name not in at.value), None) if is_object(at.value) else None
    return None if missing is None else SchemaFault(member(at.path, missing), "is missing")


_RULES: dict[str, Callable[[_Holding, _Place, Any], SchemaFault | None]] = {
    **{"$ref": _ref, "allOf": _all_of, "anyOf": _any_of, "oneOf": _one_of, "not": _not, "if": _if},
    **{"required": _required, "const": _const, "enum": _enum, "uniqueItems": _unique},
}


def _parts(at: _Place) -> Iterator[tuple[str, object, object]]:
    """The parts of a value, each with its path and its schema."""
    schema = at.schema
    if is_object(at.value) and not schema.keys().isdisjoint(_OF_MEMBERS):
        named, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
        for name, value in at.value.items():
            fitting = [named[name]] if name in named else []
            fitting += [each for pattern, each in patterns.items() if compiled(pattern).search(name)]
            for each in fitting or [schema.get("additionalProperties", True)]:
                yield member(at.path, name), value, each
    elif is_list(at.value) and not schema.keys().isdisjoint(_OF_ITEMS):
        first, rest = schema.get("prefixItems", ()), schema.get("items", True)
        for index, value in enumerate(at.value):
            yield f"{at.path}[{index}]", value, first[index] if index < len(first) else rest
