"""The values of JSON: what is none, which two are equal, and how one is shown in a reason.

All of it is asked about values of an agent, which may be hostile. `no_json` comes first and does not recurse; what
recurses here (`canonical`) is for values that it let pass.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple, TypeGuard

# Its part in the depth of the stack is reckoned in validator.py, at NESTED_MAX.
VALUE_DEPTH_MAX = 64
# Schemas applied to parts of one value, in all: a tenth to a third of a second (measured), and it is spent inside a
# session's door, where the loop stands still. Also the parts of the value, in all. What is compared (const, enum,
# uniqueItems) counts by its size; a pattern takes as long as `re` does.
STEPS_MAX = 100_000
# Of what is compared, so many characters are a step.
COMPARED_CHARS = 16
# What is shown of a text.
SHOWN_CHARS_MAX = 40

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")


class SchemaFault(NamedTuple):
    path: str
    why: str

    def words(self, above: str = "") -> str:
        """The path is left out where it was said already."""
        return self.why if self.path == above else f"{self.path}: {self.why}"


def is_text(value: object) -> TypeGuard[str]:
    return isinstance(value, str)


def is_number(value: object) -> TypeGuard[int | float]:
    # True is an int of Python's, and no number of JSON's. An int is always finite, and may be larger than any float.
    if isinstance(value, int):
        return not isinstance(value, bool)
    return isinstance(value, float) and math.isfinite(value)


def is_whole(value: object) -> bool:
    return is_number(value) and (isinstance(value, int) or value.is_integer())


def is_list(value: object) -> TypeGuard[list[Any]]:
    return isinstance(value, list)


def is_object(value: object) -> TypeGuard[dict[Any, Any]]:
    return isinstance(value, dict)


# What a decoder of JSON makes of most leaves. A float is not among them: it may be no number.
LEAVES = frozenset((str, int, bool, type(None)))
# Each type in words, and whether a value is of it.
TYPES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "string": ("text", is_text),
    "number": ("a number", is_number),
    "integer": ("a whole number", is_whole),
    "boolean": ("true or false", lambda value: isinstance(value, bool)),
    "null": ("null", lambda value: value is None),
    "array": ("a list", is_list),
    "object": ("an object", is_object),
}


def no_json(value: object) -> SchemaFault | None:
    """Why a value is none that JSON has, or too deep. Level by level: it is this that makes all recursion safe."""
    level: list[tuple[str, object]] = [("", value)]
    parts = 0
    for depth in range(VALUE_DEPTH_MAX + 1):
        below: list[tuple[str, object]] = []
        for path, item in level:
            if is_object(item) or is_list(item):
                if depth == VALUE_DEPTH_MAX:
                    return SchemaFault("", f"must not be nested deeper than {VALUE_DEPTH_MAX}")
                # A list of Python's may hold itself twice, and then doubles with each level.
                parts += len(item)
                if parts > STEPS_MAX:
                    return SchemaFault("", f"must not have more than {STEPS_MAX} parts")
                if is_object(item):
                    if not all(isinstance(name, str) for name in item):
                        return SchemaFault(path, "must have text for its names")
                    below += [(member(path, name), each) for name, each in item.items() if type(each) not in LEAVES]
                else:
                    below += [(f"{path}[{index}]", each) for index, each in enumerate(item) if type(each) not in LEAVES]
            elif not (item is None or isinstance(item, str | bool) or is_number(item)):
                return SchemaFault(path, f"must be a value of JSON, not {shown(item)}")
        level = below
    return None


def canonical(value: Any) -> str:
    """One text for all values that JSON Schema calls equal: 1 is 1.0 and not true, and names have no order.

    A text and no tuple, because the hash of a text is secret: numbers can be chosen so that all their hashes are one,
    and then to look for two that are equal takes the square of their count.
    """
    if is_object(value):
        return "{" + ",".join([f"{name!r}:{canonical(value[name])}" for name in sorted(value)]) + "}"
    if is_list(value):
        return "[" + ",".join([canonical(item) for item in value]) + "]"
    # In hex, because Python refuses to write long numbers in tens.
    return hex(int(value)) if is_whole(value) else repr(value)


def is_multiple(value: int | float, of: int | float) -> bool:
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


def member(path: str, name: str) -> str:
    if _IDENTIFIER.fullmatch(name):
        return f"{path}.{name}" if path else name
    return f"{path}[{shown(name)}]"


def shown(value: object) -> str:
    """Short, and printable whatever it is."""
    if is_text(value):
        return f"{value!r}" if len(value) <= SHOWN_CHARS_MAX else f"{value[:SHOWN_CHARS_MAX]!r}…"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int):
        return f"{value}" if value.bit_length() < 128 else "a number that long"
    if isinstance(value, float):
        return f"{value}"
    return "a list" if is_list(value) else "an object" if is_object(value) else f"a {type(value).__name__}"
