"""A JSON schema as Claude Code takes it. What it does not take it drops without a word, and works without a schema.

It wants no draft named but its own, and patterns as JavaScript writes them. Both are left out where they could cost the
whole: the answer is held to the caller's own schema in any case, so what is left out is only not told to the model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, cast

# Words for readers, and the name of a draft.
_UNTOLD = frozenset(("$schema", "$id", "$comment"))
# Under these stand schemas by name, and names are no keywords.
_NAMED = frozenset(("properties", "patternProperties", "$defs", "definitions"))
# What is given as a value is no schema, whatever it looks like.
_VALUES = frozenset(("const", "enum", "default", "examples", "required"))
# A pattern that means the same to both: no escape that only one of them has, no group with a flag or a name.
_PLAIN_PATTERN = re.compile(r"(?:[^\\(]|\\[dDwWsSbBnrtfv/^$.*+?()\[\]{}|\\]|\((?!\?)|\(\?[:=!])*+")


def told(schema: Any) -> Any:
    if isinstance(schema, list | tuple):
        return [told(item) for item in cast(list[Any], schema)]
    if not isinstance(schema, Mapping):
        return schema
    members = cast(Mapping[str, Any], schema)
    patterns: Mapping[str, Any] = members.get("patternProperties") or {}
    # Without one of them its members would be held to what is meant for the others.
    is_plain = all(map(is_plain_pattern, patterns))
    kept: dict[str, Any] = {}
    for keyword, given in members.items():
        if keyword in _UNTOLD or (keyword == "pattern" and not is_plain_pattern(given)):
            continue
        if keyword in ("patternProperties", "additionalProperties") and not is_plain:
            continue
        if keyword in _VALUES:
            kept[keyword] = given
        elif keyword in _NAMED:
            kept[keyword] = {name: told(each) for name, each in cast(Mapping[str, Any], given).items()}
        else:
            kept[keyword] = told(given)
    return kept


def is_plain_pattern(pattern: Any) -> bool:
    return isinstance(pattern, str) and _PLAIN_PATTERN.fullmatch(pattern) is not None
