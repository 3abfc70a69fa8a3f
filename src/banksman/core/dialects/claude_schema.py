"""A JSON schema as Claude Code takes it. What it does not take it drops without a word, and works without a schema.

Its validator is strict, and of draft 7: it refuses a whole schema for another draft's keyword, a word it does not know,
a choice that is named twice, a pattern that JavaScript does not read. So it is told what it is known to take (tried
with 2.1.325), and of the rest nothing: the answer is held to the caller's own schema in any case, so what is left out
is only not told to the model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from banksman.core.schema.values import canonical

_TOLD = frozenset(
    (
        *("type", "const", "enum", "title", "description", "default", "format", "$ref", "$defs", "definitions"),
        *("properties", "required", "additionalProperties", "patternProperties", "minProperties", "maxProperties"),
        *("items", "additionalItems", "minItems", "maxItems", "uniqueItems", "minLength", "maxLength", "pattern"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
        *("anyOf", "oneOf", "allOf", "not", "if", "then", "else"),
    )
)
_TEXTS = frozenset(("title", "description", "format"))
# Under these stand schemas by name, and names are no keywords.
_NAMED = frozenset(("properties", "patternProperties", "$defs", "definitions"))
# What is given as a value is no schema, whatever it looks like.
_VALUES = frozenset(("const", "default"))
# Lists in which nothing may stand twice.
_CHOICES = frozenset(("enum", "required", "type"))
# A pattern that means the same to both: characters, classes and groups, each with one quantifier at most. Nothing in it
# can be read in two ways, so there is nothing to go back to; and a possessive quantifier is wrong here before 3.11.5.
_ESCAPED = r"\\[dDwWsSnrtfv/^$.*+?()\[\]{}|\\]"
_ATOM = rf"[^\\()\[\]{{}}*+?|^$]|{_ESCAPED}|\[\^?(?:[^\\\[\]]|{_ESCAPED}|\\-)+\]|\)"
_QUANTIFIED = rf"(?:{_ATOM})(?:(?:[*+?]|\{{\d+(?:,\d*)?\}})\??)?"
_PLAIN_PATTERN = re.compile(rf"(?:{_QUANTIFIED}|\((?:\?:)?(?![*+?])|[|^$](?![*+?{{])|\\[bB](?![*+?{{]))*")


def told(schema: Any) -> Any:
    if isinstance(schema, list | tuple):
        return [told(item) for item in cast(Sequence[Any], schema)]
    if not isinstance(schema, Mapping):
        return schema
    members = _as_draft_7(cast(Mapping[str, Any], schema))
    kept: dict[str, Any] = {}
    for keyword, given in members.items():
        if keyword in _VALUES:
            kept[keyword] = given
        elif keyword in _CHOICES and isinstance(given, list | tuple):
            kept[keyword] = list({canonical(choice): choice for choice in cast(Sequence[Any], given)}.values())
        elif keyword in _NAMED:
            kept[keyword] = {name: told(each) for name, each in cast(Mapping[str, Any], given).items()}
        else:
            kept[keyword] = told(given)
    return kept


def _as_draft_7(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords that are told, as that draft has them."""
    members = dict(schema)
    if "prefixItems" in members:
        rest = members.pop("items", True)
        members |= {"items": members.pop("prefixItems"), "additionalItems": rest}
    untold = {keyword for keyword in members if keyword not in _TOLD}
    untold |= {keyword for keyword in _TEXTS if not isinstance(members.get(keyword, ""), str)}
    if "if" not in members or not members.keys() & {"then", "else"}:
        untold |= {"if", "then", "else"}
    if not is_plain_pattern(members.get("pattern", "")):
        untold.add("pattern")
    patterns: Mapping[str, Any] = members.get("patternProperties") or {}
    named: Mapping[str, Any] = members.get("properties") or {}
    are_apart = all(is_plain_pattern(each) and not any(re.search(each, name) for name in named) for each in patterns)
    if not are_apart:
        # Without one of them its members would be held to what is meant for the others.
        untold |= {"patternProperties", "additionalProperties"}
    return {keyword: given for keyword, given in members.items() if keyword not in untold}


def is_plain_pattern(pattern: Any) -> bool:
    return isinstance(pattern, str) and _PLAIN_PATTERN.fullmatch(pattern) is not None
