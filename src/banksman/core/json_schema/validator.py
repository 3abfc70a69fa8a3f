"""Check a JSON Schema, and validate values against a checked schema.

`check` ensures that every keyword is known and has a valid value, and that every `$ref` has a
target and is not circular. `fault` relies on this and does not look for mistakes in the schema
again.

`fault` tests keyword by keyword, then part by part, up to the first fault. `_LIMITS` are the
keywords that test the value alone. `_RULES` are the keywords that apply other schemas to the same
value, compare it, or report another path (`required`). `_parts` applies schemas to members and
items.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

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
    is_whole,
    member,
    no_json,
    shown,
)
from banksman.core.json_schema.regex import HINT, BadPattern, MatchTooCostly, compiled
from banksman.core.wire.elided_text import cut
from banksman.errors import UsageError

# Bounds nested schemas, and a chain of `$ref` that does not descend in the value.
SCHEMA_DEPTH_MAX = 64

_ANNOTATIONS = frozenset(
    (
        *(
            "title",
            "description",
            "default",
            "examples",
            "deprecated",
            "readOnly",
            "writeOnly",
            "format",
        ),
        *("$schema", "$id", "$comment", "contentEncoding", "contentMediaType"),
        # From OpenAPI. pydantic writes it beside an equivalent oneOf.
        "discriminator",
    )
)
# Keywords whose value is a schema, a list of schemas, or a mapping to schemas.
_ONE = frozenset(("additionalProperties", "items", "not", "if", "then", "else"))
_MANY = frozenset(("allOf", "anyOf", "oneOf", "prefixItems"))
_NAMED = frozenset(("properties", "patternProperties", "$defs", "definitions"))
# Keywords whose schemas apply to the value itself, not to a part of it.
_IN_PLACE = frozenset(("allOf", "anyOf", "oneOf", "not", "if", "then", "else"))
_REF = re.compile(r"#(?:/(\$defs|definitions)/([^/]+))?")

# The recursion takes two frames for each schema applied within another, and two for each level of a
# compared value. These are 2 × 200 + 2 × 64 (VALUE_DEPTH_MAX) of Python's 1000 frames. The caller's
# stack has the rest.
NESTED_MAX = 200
# Keywords about members, and about items.
_OF_MEMBERS = frozenset(("properties", "patternProperties", "additionalProperties"))
_OF_ITEMS = frozenset(("prefixItems", "items"))


def check(schema: object) -> None:
    """Raise `UsageError` for a schema that cannot be applied in full.

    The error names the keyword and the supported ones.
    """
    refs: dict[str, str] = {}
    _check(schema, schema, "#", 0, refs)
    heights: dict[str, int] = {}
    for ref, place in refs.items():
        _height(ref, schema, place, (), heights)


def _check(schema: object, root: object, place: str, depth: int, refs: dict[str, str]) -> None:
    if isinstance(schema, bool):
        return
    if not _is_mapping(schema):
        hint = "use a mapping, true or false"
        raise UsageError(f"{place}: a schema cannot be {shown(schema)}", hint=hint)
    if depth > SCHEMA_DEPTH_MAX:
        hint = f"use at most {SCHEMA_DEPTH_MAX} levels"
        raise UsageError(f"{place[:100]}…: the schema is nested too deep", hint=hint)
    for keyword, given in schema.items():
        here = f"{place}/{keyword}"
        if keyword in _FORMS:
            _check_form(keyword, given, root, here, refs)
        elif keyword in _ONE:
            _check(given, root, here, depth + 1, refs)
        elif keyword in _MANY:
            if not _is_sequence(given) or not given:
                raise _wrong(here, given, "a list of schemas that is not empty")
            for index, inner in enumerate(given):
                _check(inner, root, f"{here}/{index}", depth + 1, refs)
        elif keyword in _NAMED:
            if not _is_mapping(given) or not _is_names(list(given)):
                raise _wrong(here, given, "a mapping from text to schemas")
            for name, inner in given.items():
                if keyword == "patternProperties":
                    _check_pattern(here, name)
                _check(inner, root, f"{here}/{name}", depth + 1, refs)
        elif keyword not in _ANNOTATIONS:
            known = ", ".join(sorted(_ONE | _MANY | _NAMED | _FORMS.keys()))
            raise UsageError(f"{here}: this keyword is not supported", hint=f"use one of: {known}")


def _check_form(keyword: str, given: Any, root: object, place: str, refs: dict[str, str]) -> None:
    is_right, words = _FORMS[keyword]
    if not is_right(given):
        raise _wrong(place, given, words)
    if keyword == "pattern":
        _check_pattern(place, given)
    elif keyword == "$ref":
        target(given, root, place)
        refs.setdefault(given, place)


def _wrong(place: str, given: object, words: str) -> UsageError:
    return UsageError(f"{place} cannot be {shown(given)}", hint=f"use {words}")


def _check_pattern(place: str, pattern: str) -> None:
    try:
        compiled(pattern)
    except BadPattern as exc:
        raise UsageError(f"{place}: {shown(pattern)} {exc}", hint=HINT) from exc


def target(ref: str, root: object, place: str) -> object:
    """Return the schema to which a `$ref` leads."""
    match = _REF.fullmatch(ref)
    if match is None:
        words = '"#", "#/$defs/name" or "#/definitions/name": other references are not resolved'
        raise _wrong(place, ref, words)
    home, name = match.groups()
    if home is None:
        return root
    homes = root.get(home) if _is_mapping(root) else None
    # RFC 6901 defines the order: `~01` means `~1`, not a slash.
    name = name.replace("~1", "/").replace("~0", "~")
    if not _is_mapping(homes) or name not in homes:
        hint = f"define it under {home} at the root"
        raise UsageError(f"{place}: there is no {ref:.60}", hint=hint)
    return homes[name]


def _height(
    ref: str, root: object, place: str, above: tuple[str, ...], heights: dict[str, int]
) -> int:
    """Return the length of the longest chain of `$ref` that does not descend in the value.

    Every loop goes through a `$ref`.
    """
    if ref in above:
        hint = "recurse through properties or items"
        raise UsageError(f"{place}: {ref} leads back to itself", hint=hint)
    if ref not in heights:
        deeper = (*above, ref)
        # The bound also applies on the way down: the recursion must end before the sum is known.
        height = len(deeper)
        if height <= SCHEMA_DEPTH_MAX:
            inner = _refs_in_place(target(ref, root, place))
            height = 1 + max(
                (_height(each, root, place, deeper, heights) for each in inner), default=0
            )
        if height > SCHEMA_DEPTH_MAX:
            hint = f"use at most {SCHEMA_DEPTH_MAX} in a row"
            raise UsageError(f"{place}: the chain of $ref is too long", hint=hint)
        heights[ref] = height
    return heights[ref]


def _refs_in_place(schema: object) -> list[str]:
    refs: list[str] = []
    todo = [schema]
    while todo:
        each = todo.pop()
        if _is_mapping(each):
            if "$ref" in each:
                refs.append(each["$ref"])
            for keyword in _IN_PLACE & each.keys():
                given = each[keyword]
                todo.extend(given if _is_sequence(given) else [given])
    return refs


def _is_mapping(value: object) -> TypeGuard[Mapping[Any, Any]]:
    return isinstance(value, Mapping)


def _is_sequence(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, list | tuple)


def type_names(given: Any) -> Sequence[Any]:
    """Return the names in the value of `type`, which is a name or a list."""
    return given if _is_sequence(given) else (given,)


def _is_count(given: object) -> bool:
    return is_whole(given) and is_number(given) and given >= 0


def _is_types(given: object) -> bool:
    names = type_names(given)
    return bool(names) and all(isinstance(name, str) and name in TYPES for name in names)


def _is_names(given: object) -> bool:
    return _is_sequence(given) and all(isinstance(name, str) for name in given)


def _is_choices(given: object) -> bool:
    return _is_sequence(given) and bool(given) and no_json(list(given)) is None


# The keywords whose value is not a schema: the test for that value, and the hint of the error.
_FORMS: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(
        ("minLength", "maxLength", "minItems", "maxItems"), (_is_count, "a whole number from 0")
    ),
    **dict.fromkeys(("minProperties", "maxProperties"), (_is_count, "a whole number from 0")),
    **dict.fromkeys(
        ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), (is_number, "a number")
    ),
    "multipleOf": (lambda given: is_number(given) and given > 0, "a number above 0"),
    "type": (_is_types, f"one of {', '.join(TYPES)}, or a list of them"),
    "enum": (_is_choices, "a list of JSON values that is not empty"),
    "const": (lambda given: no_json(given) is None, "a JSON value"),
    "required": (_is_names, "a list of names"),
    "uniqueItems": (lambda given: isinstance(given, bool), "true or false"),
    "pattern": (is_text, "text"),
    "$ref": (is_text, "text"),
}


# Limits of a message: the number of choices, and the characters of the reasons of alternatives.
CHOICES_SHOWN_MAX, REASONS_CHARS_MAX = 10, 300


def fault(value: object, schema: object) -> str | None:
    """Return the first reason, with its path, why a value does not fit; None if it fits."""
    found = no_json(value)
    if found is None:
        try:
            found = _Holding(schema).hold(_Place(value, schema, "", 0))
        except MatchTooCostly as exc:
            found = SchemaFault("", str(exc))
    return None if found is None else found.words()


class _Place(NamedTuple):
    """A part of the value, its schema, its path, and the number of schemas around it."""

    value: Any
    schema: Any
    path: str
    nested: int

    def under(self, schema: object) -> _Place:
        """Return the same value with another schema."""
        return _Place(self.value, schema, self.path, self.nested + 1)


class _Holding:
    """One validation. It keeps the root schema for `$ref`, and counts the steps."""

    def __init__(self, root: object) -> None:
        self.root = root
        self.steps = 0
        # The choices of each `enum`, by the id of its list. They are computed once, not for each
        # value.
        self._choices: dict[int, frozenset[str]] = {}

    def spend(self, steps: int) -> None:
        self.steps += steps
        if self.steps > STEPS_MAX:
            raise MatchTooCostly(f"cannot be checked in {STEPS_MAX} steps")

    def compared(self, value: object) -> str:
        """Return the text that represents a value in a comparison. Its length costs steps."""
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
            raise MatchTooCostly(f"cannot be checked: more than {NESTED_MAX} nested schemas apply")
        if isinstance(at.schema, bool):
            return None if at.schema else SchemaFault(at.path, "is not allowed")
        # The wrong type is the best reason, because other faults follow from it.
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


# Keywords without inner schemas: the values they apply to, the test, and the message.
_LIMITS: dict[str, tuple[Callable[[Any], bool], Callable[[Any, Any], bool], str]] = {
    "type": (_is_any, _is_typed, "must be {}"),
    "minLength": (
        is_text,
        lambda text, least: len(text) >= least,
        "must have at least {} characters",
    ),
    "maxLength": (is_text, lambda text, most: len(text) <= most, "must have at most {} characters"),
    "pattern": (
        is_text,
        lambda text, pattern: compiled(pattern).search(text),
        "must match the pattern {}",
    ),
    "minimum": (is_number, lambda number, least: number >= least, "must be at least {}"),
    "maximum": (is_number, lambda number, most: number <= most, "must be at most {}"),
    "exclusiveMinimum": (is_number, lambda number, bound: number > bound, "must be above {}"),
    "exclusiveMaximum": (is_number, lambda number, bound: number < bound, "must be below {}"),
    "multipleOf": (is_number, is_multiple, "must be a multiple of {}"),
    "minItems": (is_list, lambda items, least: len(items) >= least, "must have at least {} items"),
    "maxItems": (is_list, lambda items, most: len(items) <= most, "must have at most {} items"),
    "minProperties": (
        is_object,
        lambda members, least: len(members) >= least,
        "must have at least {} members",
    ),
    "maxProperties": (
        is_object,
        lambda members, most: len(members) <= most,
        "must have at most {} members",
    ),
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
    # A list or an object is shown only for a type fault. Otherwise its type was not the fault.
    is_shown = is_shown or not (is_list(at.value) or is_object(at.value))
    return SchemaFault(at.path, words + (f", not {shown(at.value)}" if is_shown else ""))


def _const(holding: _Holding, at: _Place, only: object) -> SchemaFault | None:
    return (
        None
        if holding.compared(at.value) == holding.compared(only)
        else _unfit(at, f"must be {shown(only)}")
    )


def _enum(holding: _Holding, at: _Place, among: Sequence[Any]) -> SchemaFault | None:
    if holding.compared(at.value) in holding.choices(among):
        return None
    more = ", …" if len(among) > CHOICES_SHOWN_MAX else ""
    return _unfit(at, f"must be one of {', '.join(map(shown, among[:CHOICES_SHOWN_MAX]))}{more}")


def _unique(holding: _Holding, at: _Place, is_wanted: bool) -> SchemaFault | None:
    if (
        not is_wanted
        or not is_list(at.value)
        or len(set(map(holding.compared, at.value))) == len(at.value)
    ):
        return None
    return SchemaFault(at.path, "must not have duplicate items")


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
        return SchemaFault(at.path, f"must match one alternative, but matches {fitting}")
    return None if fitting else _none_fits(at, reasons)


def _none_fits(at: _Place, reasons: list[str]) -> SchemaFault:
    # Cut the text, because reasons nest: a reason may contain the reasons of inner alternatives.
    words = "; ".join(dict.fromkeys(reasons))
    return SchemaFault(at.path, f"matches no alternative ({cut(words, REASONS_CHARS_MAX)})")


def _not(holding: _Holding, at: _Place, schema: object) -> SchemaFault | None:
    if holding.hold(at.under(schema)) is not None:
        return None
    return SchemaFault(at.path, "must not match the schema under not")


def _if(holding: _Holding, at: _Place, schema: object) -> SchemaFault | None:
    branch = "then" if holding.hold(at.under(schema)) is None else "else"
    return holding.hold(at.under(at.schema.get(branch, True)))


def _required(_: _Holding, at: _Place, names: Sequence[str]) -> SchemaFault | None:
    missing = (
        next((name for name in names if name not in at.value), None)
        if is_object(at.value)
        else None
    )
    return None if missing is None else SchemaFault(member(at.path, missing), "is missing")


_RULES: dict[str, Callable[[_Holding, _Place, Any], SchemaFault | None]] = {
    **{"$ref": _ref, "allOf": _all_of, "anyOf": _any_of, "oneOf": _one_of, "not": _not, "if": _if},
    **{"required": _required, "const": _const, "enum": _enum, "uniqueItems": _unique},
}


def _parts(at: _Place) -> Iterator[tuple[str, object, object]]:
    """Yield the parts of a value, each with its path and its schema."""
    schema = at.schema
    if is_object(at.value) and not schema.keys().isdisjoint(_OF_MEMBERS):
        named, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
        for name, value in at.value.items():
            fitting = [named[name]] if name in named else []
            fitting += [
                each for pattern, each in patterns.items() if compiled(pattern).search(name)
            ]
            for each in fitting or [schema.get("additionalProperties", True)]:
                yield member(at.path, name), value, each
    elif is_list(at.value) and not schema.keys().isdisjoint(_OF_ITEMS):
        first, rest = schema.get("prefixItems", ()), schema.get("items", True)
        for index, value in enumerate(at.value):
            yield f"{at.path}[{index}]", value, first[index] if index < len(first) else rest
