"""Check a schema: every keyword is known and has a valid value, and every `$ref` has a target and is not circular.

validator.py relies on this and looks for no mistake in a schema again. Both use `target` (where a `$ref` leads) and
`type_names`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

from banksman.core.json_schema.json_value import TYPES, is_number, is_text, is_whole, no_json, shown
from banksman.core.json_schema.regex import HINT, NoPattern, compiled
from banksman.errors import UsageError

# Bounds nested schemas, and a chain of `$ref` that does not go down in the value.
SCHEMA_DEPTH_MAX = 64

_ANNOTATIONS = frozenset(
    (
        *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "format"),
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


def check(schema: object) -> None:
    """Raise UsageError for a schema that cannot be applied in full. It names the keyword and what is supported."""
    refs: dict[str, str] = {}
    _check(schema, schema, "#", 0, refs)
    heights: dict[str, int] = {}
    for ref, place in refs.items():
        _height(ref, schema, place, (), heights)


def _check(schema: object, root: object, place: str, depth: int, refs: dict[str, str]) -> None:
    if isinstance(schema, bool):
        return
    if not _is_mapping(schema):
        raise UsageError(f"{place}: a schema cannot be {shown(schema)}", hint="a mapping, true or false")
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
        target(given, root, place)
        refs.setdefault(given, place)


def _wrong(place: str, given: object, words: str) -> UsageError:
    return UsageError(f"{place} cannot be {shown(given)}", hint=words)


def _check_pattern(place: str, pattern: str) -> None:
    try:
        compiled(pattern)
    except NoPattern as exc:
        raise UsageError(f"{place}: {shown(pattern)} {exc}", hint=HINT) from exc


def target(ref: str, root: object, place: str) -> object:
    """The schema a `$ref` leads to."""
    match = _REF.fullmatch(ref)
    if match is None:
        raise _wrong(place, ref, '"#", "#/$defs/name" or "#/definitions/name": nothing is fetched, nothing else found')
    home, name = match.groups()
    if home is None:
        return root
    homes = root.get(home) if _is_mapping(root) else None
    # RFC 6901 gives the order: `~01` means `~1`, not a slash.
    name = name.replace("~1", "/").replace("~0", "~")
    if not _is_mapping(homes) or name not in homes:
        raise UsageError(f"{place}: there is no {ref:.60}", hint=f"definitions stand under {home} at the root")
    return homes[name]


def _height(ref: str, root: object, place: str, above: tuple[str, ...], heights: dict[str, int]) -> int:
    """The longest chain of `$ref` from here that does not go down in the value. Every loop goes through a `$ref`."""
    if ref in above:
        raise UsageError(f"{place}: {ref} leads back to itself", hint="recursion must go through properties or items")
    if ref not in heights:
        deeper = (*above, ref)
        # Checked on the way down too: the recursion must end before the sum is known.
        height = len(deeper)
        if height <= SCHEMA_DEPTH_MAX:
            inner = _refs_in_place(target(ref, root, place))
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


def type_names(given: Any) -> Sequence[Any]:
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
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems"), (_is_count, "a whole number from 0")),
    **dict.fromkeys(("minProperties", "maxProperties"), (_is_count, "a whole number from 0")),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), (is_number, "a number")),
    "multipleOf": (lambda given: is_number(given) and given > 0, "a number above 0"),
    "type": (_is_types, f"one of {', '.join(TYPES)}, or a list of them"),
    "enum": (_is_choices, "a list of values of JSON that is not empty"),
    "const": (lambda given: no_json(given) is None, "a value of JSON"),
    "required": (_is_names, "a list of names"),
    "uniqueItems": (lambda given: isinstance(given, bool), "true or false"),
    "pattern": (is_text, "text"),
    "$ref": (is_text, "text"),
}
