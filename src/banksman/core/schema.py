"""JSON Schema, as far as the result of a turn and the input of a tool need it: `check` a schema, then `fault` a value.

**What is promised.** A schema that passes `check` is held to in full: no keyword is skipped because it is not known
here. One that could not be held to is refused with the keyword's place, before anything was started. `fault` gives an
answer to every value: nothing in it is too deep, too large or too odd, and none makes it raise.

**Which dialect.** 2020-12, and from before it `definitions`. A `$ref` stands beside other keywords and leads to the
root or to one of its definitions, never out of the schema. `format` and its like are annotations there, and here.

**Why it ends.** A value comes from an agent, which may be hostile; a schema comes from the caller. So the value's depth
is looked at before anything else, without recursion, and all that recurses afterwards follows the value or the schema.
A schema that leads back to itself without going down in the value is refused. What is left is a schema that looks at
each part of a value twice, at each depth: that doubles with the depth, and the steps are counted.

**What does not end** is a pattern that tries the same text in ever more ways, such as `(a+)+$`. Python's `re` cannot be
stopped. A pattern is part of the caller's own schema: write it so that there is one way to match.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

from banksman.errors import UsageError

# The recursion below takes two frames for each schema that is applied within another, and two for each level of a value
# that is compared: 2 × 200 + 2 × 64 of Python's 1000, which leaves the caller's own stack room.
VALUE_DEPTH_MAX = 64
SCHEMA_DEPTH_MAX = 64
NESTED_MAX = 200
# Schemas applied to parts of one value, in all: between one and two seconds, in which the loop stands still. Also the
# parts at one level of it.
STEPS_MAX = 500_000
# What is shown of a text, of a list of choices, of the reasons of several alternatives.
SHOWN_CHARS_MAX, CHOICES_SHOWN_MAX, REASONS_CHARS_MAX = 40, 10, 300

_ANNOTATIONS = frozenset(
    (
        *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "format"),
        *("$schema", "$id", "$comment", "contentEncoding", "contentMediaType"),
        # Of OpenAPI, and written by pydantic beside a oneOf that says the same.
        "discriminator",
    )
)
# Keywords that hold a schema, several, or several by name.
_ONE = frozenset(("additionalProperties", "items", "not", "if", "then", "else"))
_MANY = frozenset(("allOf", "anyOf", "oneOf", "prefixItems"))
_NAMED = frozenset(("properties", "patternProperties", "$defs", "definitions"))
# Those whose schemas are applied to the very value, and not to a part of it.
_IN_PLACE = frozenset(("allOf", "anyOf", "oneOf", "not", "if", "then", "else"))

# Those that say something about members, and about items.
_OF_MEMBERS = frozenset(("properties", "patternProperties", "additionalProperties"))
_OF_ITEMS = frozenset(("prefixItems", "items"))

_REF = re.compile(r"#(?:/(\$defs|definitions)/([^/]+))?")
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
# An escape, a class, or the dollar that is neither.
_DOLLAR = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|(\$)", re.DOTALL)


def check(schema: object) -> None:
    """Raise UsageError for a schema that a value could not be held to; it names the keyword and what is supported."""
    refs: dict[str, str] = {}
    _check(schema, schema, "#", 0, refs)
    heights: dict[str, int] = {}
    for ref, place in refs.items():
        _height(ref, schema, place, (), heights)


def fault(value: object, schema: object) -> str | None:
    """The first reason why a value does not fit a schema that was checked, with its path; None if it fits."""
    found = _no_json(value)
    if found is None:
        try:
            found = _Holding(schema).hold(_Place(value, schema, "", 0))
        except _TooMuch as exc:
            found = _Fault("", str(exc))
    return None if found is None else found.words()


class _Fault(NamedTuple):
    path: str
    why: str

    def words(self, above: str = "") -> str:
        """The path is left out where it was said already."""
        return self.why if self.path == above else f"{self.path}: {self.why}"


class _TooMuch(Exception):
    """No fault, which a `not` would turn into a fit: the value cannot be judged at all."""


# -- the schema ------------------------------------------------------------------------------------------------------
def _check(schema: object, root: object, place: str, depth: int, refs: dict[str, str]) -> None:
    if isinstance(schema, bool):
        return
    if not _is_mapping(schema):
        raise UsageError(f"{place}: a schema cannot be {_shown(schema)}", hint="a mapping, true or false")
    if depth > SCHEMA_DEPTH_MAX:
        raise UsageError(f"{place[:100]}…: a schema cannot be nested this deep", hint=f"at most {SCHEMA_DEPTH_MAX}")
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
            raise UsageError(f"{here}: this keyword is not supported", hint=f"supported are {known}")


def _check_form(keyword: str, given: Any, root: object, place: str, refs: dict[str, str]) -> None:
    is_right, words = _FORMS[keyword]
    if not is_right(given):
        raise _wrong(place, given, words)
    if keyword == "pattern":
        _check_pattern(place, given)
    elif keyword == "$ref":
        _target(given, root, place)
        refs.setdefault(given, place)


def _wrong(place: str, given: object, words: str) -> UsageError:
    return UsageError(f"{place} cannot be {_shown(given)}", hint=words)


def _check_pattern(place: str, pattern: str) -> None:
    try:
        _compiled(pattern)
    except (re.error, OverflowError, RecursionError) as exc:
        raise UsageError(f"{place}: {_shown(pattern)} is no pattern: {exc}", hint="as Python's re writes them") from exc


@functools.lru_cache(maxsize=256)
def _compiled(pattern: str) -> re.Pattern[str]:
    # In JSON Schema `$` is the end of the text and of nothing else, and \d and \w are of ASCII (as is \s here, which it
    # is not there). In Python `$` is also before a last newline: what was to be one line would then pass with two.
    ended = _DOLLAR.sub(lambda match: r"\Z" if match[1] else match[0], pattern)
    return re.compile(ended, re.ASCII)


def _target(ref: str, root: object, place: str) -> object:
    """The schema a `$ref` leads to."""
    match = _REF.fullmatch(ref)
    if match is None:
        raise _wrong(place, ref, '"#", "#/$defs/name" or "#/definitions/name": nothing is fetched, nothing else found')
    home, name = match.groups()
    if home is None:
        return root
    homes = root.get(home) if _is_mapping(root) else None
    # In this order, as RFC 6901 says: `~01` is `~1` and no slash.
    name = name.replace("~1", "/").replace("~0", "~")
    if not _is_mapping(homes) or name not in homes:
        raise UsageError(f"{place}: there is no {ref:.60}", hint=f"definitions stand under {home} at the root")
    return homes[name]


def _height(ref: str, root: object, place: str, above: tuple[str, ...], heights: dict[str, int]) -> int:
    """How many `$ref` follow each other from here with no step down in the value. Every loop goes through a `$ref`."""
    if ref in above:
        raise UsageError(f"{place}: {ref} leads back to itself", hint="recursion must go through properties or items")
    if ref not in heights:
        deeper = (*above, ref)
        # Looked at on the way down as well: the recursion must end before the sum is known.
        height = len(deeper)
        if height <= SCHEMA_DEPTH_MAX:
            inner = _refs_in_place(_target(ref, root, place))
            height = 1 + max((_height(each, root, place, deeper, heights) for each in inner), default=0)
        if height > SCHEMA_DEPTH_MAX:
            raise UsageError(f"{place}: too many $ref lead to each other", hint=f"at most {SCHEMA_DEPTH_MAX} in a row")
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


# -- values ----------------------------------------------------------------------------------------------------------
def _is_text(value: object) -> TypeGuard[str]:
    return isinstance(value, str)


def _is_number(value: object) -> TypeGuard[int | float]:
    # True is an int of Python's, and no number of JSON's. An int is always finite, and may be larger than any float.
    if isinstance(value, int):
        return not isinstance(value, bool)
    return isinstance(value, float) and math.isfinite(value)


def _is_whole(value: object) -> bool:
    return _is_number(value) and (isinstance(value, int) or value.is_integer())


def _is_list(value: object) -> TypeGuard[list[Any]]:
    return isinstance(value, list)


def _is_object(value: object) -> TypeGuard[dict[Any, Any]]:
    return isinstance(value, dict)


def _is_any(value: object) -> bool:
    return True


# What a decoder of JSON makes of most leaves. A float is not among them: it may be no number.
_LEAVES = frozenset((str, int, bool, type(None)))


def _no_json(value: object) -> _Fault | None:
    """Why a value is none that JSON has, or too deep. Level by level: it is this that makes all recursion safe."""
    level: list[tuple[str, object]] = [("", value)]
    for depth in range(VALUE_DEPTH_MAX + 1):
        below: list[tuple[str, object]] = []
        for path, item in level:
            if _is_object(item) or _is_list(item):
                if depth == VALUE_DEPTH_MAX:
                    return _Fault("", f"must not be nested deeper than {VALUE_DEPTH_MAX}")
                # A list of Python's may hold itself twice, and then doubles with each level.
                if len(below) + len(item) > STEPS_MAX:
                    return _Fault("", f"must not have more than {STEPS_MAX} parts")
                if _is_object(item):
                    if not all(isinstance(name, str) for name in item):
                        return _Fault(path, "must have text for its names")
                    below += [(_member(path, name), each) for name, each in item.items() if type(each) not in _LEAVES]
                else:
                    below += [
                        (f"{path}[{index}]", each) for index, each in enumerate(item) if type(each) not in _LEAVES
                    ]
            elif not (item is None or isinstance(item, str | bool) or _is_number(item)):
                return _Fault(path, f"must be a value of JSON, not {_shown(item)}")
        level = below
    return None


def _canonical(value: Any) -> str:
    """One text for all values that JSON Schema calls equal: 1 is 1.0 and not true, and names have no order.

    A text and no tuple, because the hash of a text is secret: numbers can be chosen so that all their hashes are one,
    and then to look for two that are equal takes the square of their count.
    """
    if _is_object(value):
        return "{" + ",".join([f"{name!r}:{_canonical(value[name])}" for name in sorted(value)]) + "}"
    if _is_list(value):
        return "[" + ",".join([_canonical(item) for item in value]) + "]"
    # In hex, because Python refuses to write long numbers in tens.
    return hex(int(value)) if _is_whole(value) else repr(value)


def _is_unique(items: list[Any]) -> bool:
    return len({_canonical(item) for item in items}) == len(items)


def _is_multiple(value: int | float, of: int | float) -> bool:
    """Exactly, and of the numbers as they are written: 0.3 is three times 0.1, whatever the floats say."""
    (digits, exponent), (of_digits, of_exponent) = _decimal(value), _decimal(of)
    least = min(exponent, of_exponent)
    return digits * 10 ** (exponent - least) % (of_digits * 10 ** (of_exponent - least)) == 0


def _decimal(number: int | float) -> tuple[int, int]:
    """Digits and exponent: 0.25 is (25, -2)."""
    if isinstance(number, int):
        return number, 0
    mantissa, _, exponent = repr(number).partition("e")
    whole, _, fraction = mantissa.partition(".")
    return int(whole + fraction), int(exponent or 0) - len(fraction)


def _member(path: str, name: str) -> str:
    if _IDENTIFIER.fullmatch(name):
        return f"{path}.{name}" if path else name
    return f"{path}[{_shown(name)}]"


def _shown(value: object) -> str:
    """Short, and printable whatever it is."""
    if _is_text(value):
        return f"{value!r}" if len(value) <= SHOWN_CHARS_MAX else f"{value[:SHOWN_CHARS_MAX]!r}…"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int):
        return f"{value}" if value.bit_length() < 128 else "a number that long"
    if isinstance(value, float):
        return f"{value}"
    return "a list" if _is_list(value) else "an object" if _is_object(value) else f"a {type(value).__name__}"


# -- keywords --------------------------------------------------------------------------------------------------------
# Each type in words, and whether a value is of it.
_TYPES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "string": ("text", _is_text),
    "number": ("a number", _is_number),
    "integer": ("a whole number", _is_whole),
    "boolean": ("true or false", lambda value: isinstance(value, bool)),
    "null": ("null", lambda value: value is None),
    "array": ("a list", _is_list),
    "object": ("an object", _is_object),
}


def _type_names(given: Any) -> Sequence[Any]:
    return given if _is_sequence(given) else (given,)


def _is_typed(value: object, given: Any) -> bool:
    if isinstance(given, str):
        return _TYPES[given][1](value)
    return any(_TYPES[name][1](value) for name in given)


# Keywords that need no other schema: the values it applies to, whether one is within it, and what to say if not.
_LIMITS: dict[str, tuple[Callable[[Any], bool], Callable[[Any, Any], bool], str]] = {
    "type": (_is_any, _is_typed, "must be {}"),
    "const": (_is_any, lambda value, only: _canonical(value) == _canonical(only), "must be {}"),
    "enum": (_is_any, lambda value, among: _canonical(value) in map(_canonical, among), "must be one of {}"),
    "minLength": (_is_text, lambda text, least: len(text) >= least, "must have at least {} characters"),
    "maxLength": (_is_text, lambda text, most: len(text) <= most, "must have at most {} characters"),
    "pattern": (_is_text, lambda text, pattern: bool(_compiled(pattern).search(text)), "must match the pattern {}"),
    "minimum": (_is_number, lambda number, least: number >= least, "must be at least {}"),
    "maximum": (_is_number, lambda number, most: number <= most, "must be at most {}"),
    "exclusiveMinimum": (_is_number, lambda number, bound: number > bound, "must be above {}"),
    "exclusiveMaximum": (_is_number, lambda number, bound: number < bound, "must be below {}"),
    "multipleOf": (_is_number, _is_multiple, "must be a multiple of {}"),
    "minItems": (_is_list, lambda items, least: len(items) >= least, "must have at least {} items"),
    "maxItems": (_is_list, lambda items, most: len(items) <= most, "must have at most {} items"),
    "uniqueItems": (_is_list, lambda items, on: not on or _is_unique(items), "must not have an item twice"),
    "minProperties": (_is_object, lambda members, least: len(members) >= least, "must have at least {} members"),
    "maxProperties": (_is_object, lambda members, most: len(members) <= most, "must have at most {} members"),
}


def _is_count(given: object) -> bool:
    return _is_whole(given) and _is_number(given) and given >= 0


def _is_types(given: object) -> bool:
    names = _type_names(given)
    return bool(names) and all(isinstance(name, str) and name in _TYPES for name in names)


def _is_names(given: object) -> bool:
    return _is_sequence(given) and all(isinstance(name, str) for name in given)


def _is_choices(given: object) -> bool:
    return _is_sequence(given) and bool(given) and _no_json(list(given)) is None


# What stands in a keyword that holds no schema, and how to say so.
_FORMS: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems"), (_is_count, "a whole number from 0")),
    **dict.fromkeys(("minProperties", "maxProperties"), (_is_count, "a whole number from 0")),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), (_is_number, "a number")),
    "multipleOf": (lambda given: _is_number(given) and given > 0, "a number above 0"),
    "type": (_is_types, f"one of {', '.join(_TYPES)}, or a list of them"),
    "enum": (_is_choices, "a list of values of JSON that is not empty"),
    "const": (lambda given: _no_json(given) is None, "a value of JSON"),
    "required": (_is_names, "a list of names"),
    "uniqueItems": (lambda given: isinstance(given, bool), "true or false"),
    "pattern": (_is_text, "text"),
    "$ref": (_is_text, "text"),
}


class _Place(NamedTuple):
    """A part of the value, what it is held to, where it stands, and within how many other schemas."""

    value: Any
    schema: Any
    path: str
    nested: int

    def under(self, schema: object) -> _Place:
        """The very value, to be held to another schema."""
        return _Place(self.value, schema, self.path, self.nested + 1)


class _Holding:
    """One value held to one schema. It knows the root, for the `$ref`, and what was spent so far."""

    def __init__(self, root: object) -> None:
        self.root = root
        self.steps = 0

    def hold(self, at: _Place) -> _Fault | None:
        self.steps += 1
        if self.steps > STEPS_MAX:
            raise _TooMuch(f"cannot be checked in {STEPS_MAX} steps")
        if at.nested > NESTED_MAX:
            raise _TooMuch(f"cannot be checked: more than {NESTED_MAX} schemas apply within each other")
        if isinstance(at.schema, bool):
            return None if at.schema else _Fault(at.path, "must not be there")
        # The wrong type is the best reason there is: whatever else is wrong follows from it.
        if "type" in at.schema and not _is_typed(at.value, at.schema["type"]):
            return _exceeded(at, "type", at.schema["type"])
        for keyword, given in at.schema.items():
            if keyword == "type":
                continue
            rule = _RULES.get(keyword)
            found = _exceeded(at, keyword, given) if rule is None else rule(self, at, given)
            if found is not None:
                return found
        if type(at.value) in _LEAVES:
            return None
        for path, value, schema in _parts(at):
            found = self.hold(_Place(value, schema, path, at.nested + 1))
            if found is not None:
                return found
        return None


def _exceeded(at: _Place, keyword: str, given: Any) -> _Fault | None:
    if keyword not in _LIMITS:
        return None
    applies, allows, words = _LIMITS[keyword]
    if not applies(at.value) or allows(at.value, given):
        return None
    if keyword == "type":
        shown = " or ".join(_TYPES[name][0] for name in _type_names(given))
    elif keyword == "enum":
        more = ", …" if len(given) > CHOICES_SHOWN_MAX else ""
        shown = ", ".join(_shown(choice) for choice in given[:CHOICES_SHOWN_MAX]) + more
    else:
        shown = _shown(given)
    # A list or an object is not shown: that it is one was never the fault, but for the type.
    is_shown = keyword == "type" or not (_is_list(at.value) or _is_object(at.value))
    return _Fault(at.path, words.format(shown) + (f", not {_shown(at.value)}" if is_shown else ""))


def _ref(holding: _Holding, at: _Place, ref: str) -> _Fault | None:
    return holding.hold(at.under(_target(ref, holding.root, "$ref")))


def _all_of(holding: _Holding, at: _Place, schemas: Sequence[Any]) -> _Fault | None:
    for schema in schemas:
        found = holding.hold(at.under(schema))
        if found is not None:
            return found
    return None


def _any_of(holding: _Holding, at: _Place, schemas: Sequence[Any]) -> _Fault | None:
    reasons: list[str] = []
    for schema in schemas:
        found = holding.hold(at.under(schema))
        if found is None:
            return None
        reasons.append(found.words(at.path))
    return _none_fits(at, reasons)


def _one_of(holding: _Holding, at: _Place, schemas: Sequence[Any]) -> _Fault | None:
    reasons: list[str] = []
    for schema in schemas:
        found = holding.hold(at.under(schema))
        if found is not None:
            reasons.append(found.words(at.path))
    fitting = len(schemas) - len(reasons)
    if fitting > 1:
        return _Fault(at.path, f"must fit one alternative, and fits {fitting}")
    return None if fitting else _none_fits(at, reasons)


def _none_fits(at: _Place, reasons: list[str]) -> _Fault:
    # Cut, because they nest: a reason may hold those of the alternatives below.
    words = "; ".join(dict.fromkeys(reasons))
    cut = words if len(words) <= REASONS_CHARS_MAX else f"{words[:REASONS_CHARS_MAX]}…"
    return _Fault(at.path, f"fits no alternative ({cut})")


def _not(holding: _Holding, at: _Place, schema: object) -> _Fault | None:
    return _Fault(at.path, "must not fit what stands under not") if holding.hold(at.under(schema)) is None else None


def _if(holding: _Holding, at: _Place, schema: object) -> _Fault | None:
    branch = "then" if holding.hold(at.under(schema)) is None else "else"
    return holding.hold(at.under(at.schema.get(branch, True)))


def _required(_: _Holding, at: _Place, names: Sequence[str]) -> _Fault | None:
    missing = next((name for name in names if name not in at.value), None) if _is_object(at.value) else None
    return None if missing is None else _Fault(_member(at.path, missing), "is missing")


_RULES: dict[str, Callable[[_Holding, _Place, Any], _Fault | None]] = {
    **{"$ref": _ref, "allOf": _all_of, "anyOf": _any_of, "oneOf": _one_of, "not": _not, "if": _if},
    "required": _required,
}


def _parts(at: _Place) -> Iterator[tuple[str, object, object]]:
    """The parts of a value, each with its path and a schema that it is held to."""
    schema = at.schema
    if _is_object(at.value) and not schema.keys().isdisjoint(_OF_MEMBERS):
        named, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
        for name, value in at.value.items():
            fitting = [named[name]] if name in named else []
            fitting += [each for pattern, each in patterns.items() if _compiled(pattern).search(name)]
            for each in fitting or [schema.get("additionalProperties", True)]:
                yield _member(at.path, name), value, each
    elif _is_list(at.value) and not schema.keys().isdisjoint(_OF_ITEMS):
        first, rest = schema.get("prefixItems", ()), schema.get("items", True)
        for index, value in enumerate(at.value):
            yield f"{at.path}[{index}]", value, first[index] if index < len(first) else rest
