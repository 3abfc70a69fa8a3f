"""JSON values: check that a value is JSON, test types, compare, and show in messages.

The values come from an agent, which may be hostile. `no_json` runs first and does not recurse.
`canonical` recurses, and gets only values that `no_json` has accepted.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple, TypeGuard

from banksman.core.wire.elided_text import cut

# NESTED_MAX in validator.py explains the share of this depth in the stack.
VALUE_DEPTH_MAX = 64
# The bound of one validation: the number of schemas applied to parts of the value. This takes a
# tenth to a third of a second (measured), and the event loop is blocked meanwhile. It also bounds
# the number of parts. A comparison (const, enum, uniqueItems) counts by the size of the value. A
# pattern has a separate bound.
STEPS_MAX = 100_000
# This many characters of a comparison count as one step.
COMPARED_CHARS = 16
# A message cuts longer texts.
SHOWN_CHARS_MAX = 40

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")


class SchemaFault(NamedTuple):
    """Reason why a value does not fit, with the path of the failing part."""

    path: str
    why: str

    def words(self, above: str = "") -> str:
        """Return the message. `above`: a path that the message around it has already named."""
        return self.why if self.path == above else f"{self.path}: {self.why}"


def is_text(value: object) -> TypeGuard[str]:
    return isinstance(value, str)


def is_number(value: object) -> TypeGuard[int | float]:
    """Return whether a value is a JSON number."""
    # True is an int in Python, but not a number in JSON. An int is always finite, and may exceed
    # every float.
    if isinstance(value, int):
        return not isinstance(value, bool)
    return isinstance(value, float) and math.isfinite(value)


def is_whole(value: object) -> bool:
    """Return whether a value is a number without a fraction: 1.0 counts."""
    return is_number(value) and (isinstance(value, int) or value.is_integer())


def is_list(value: object) -> TypeGuard[list[Any]]:
    return isinstance(value, list)


def is_object(value: object) -> TypeGuard[dict[Any, Any]]:
    return isinstance(value, dict)


# Leaf types that need no check. A float needs one: it may be infinite or NaN.
LEAVES = frozenset((str, int, bool, type(None)))
# For each type: its name in a message, and its test.
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
    """Return why a value is not JSON or too deep, or None.

    The walk goes level by level without recursion, so later recursion is safe.
    """
    level: list[tuple[str, object]] = [("", value)]
    parts = 0
    for depth in range(VALUE_DEPTH_MAX + 1):
        below: list[tuple[str, object]] = []
        for path, item in level:
            if is_object(item) or is_list(item):
                if depth == VALUE_DEPTH_MAX:
                    return SchemaFault("", f"must not be nested deeper than {VALUE_DEPTH_MAX}")
                # A Python list may contain itself twice, and then the number of parts doubles with
                # each level.
                parts += len(item)
                if parts > STEPS_MAX:
                    return SchemaFault("", f"must not have more than {STEPS_MAX} parts")
                if is_object(item):
                    if not all(isinstance(name, str) for name in item):
                        return SchemaFault(path, "must have text as names")
                    below += [
                        (member(path, name), each)
                        for name, each in item.items()
                        if type(each) not in LEAVES
                    ]
                else:
                    below += [
                        (f"{path}[{index}]", each)
                        for index, each in enumerate(item)
                        if type(each) not in LEAVES
                    ]
            elif not (item is None or isinstance(item, str | bool) or is_number(item)):
                return SchemaFault(path, f"must be a JSON value, not {shown(item)}")
        level = below
    return None


def canonical(value: Any) -> str:
    """Return a text that is the same for all values that JSON Schema treats as equal.

    1 equals 1.0 but not true, and the order of names is irrelevant. The result is a text and not a
    tuple, because hashes of texts are seeded. An agent could choose numbers with the same hash, and
    then a set of them would take quadratic time.
    """
    if is_object(value):
        return (
            "{" + ",".join([f"{name!r}:{canonical(value[name])}" for name in sorted(value)]) + "}"
        )
    if is_list(value):
        return "[" + ",".join([canonical(item) for item in value]) + "]"
    # Hexadecimal, because Python refuses to write more than 4300 decimal digits.
    return hex(int(value)) if is_whole(value) else repr(value)


def is_multiple(value: int | float, of: int | float) -> bool:
    """Return whether a number is a multiple, exactly for numbers as they are written.

    0.3 is three times 0.1, although the floats are not.
    """
    (digits, exponent), (of_digits, of_exponent) = _decimal(value), _decimal(of)
    least = min(exponent, of_exponent)
    return digits * 10 ** (exponent - least) % (of_digits * 10 ** (of_exponent - least)) == 0


def _decimal(number: int | float) -> tuple[int, int]:
    """Return digits and exponent: 0.25 is (25, -2)."""
    if isinstance(number, int):
        return number, 0
    mantissa, _, exponent = repr(number).partition("e")
    whole, _, fraction = mantissa.partition(".")
    return int(whole + fraction), int(exponent or 0) - len(fraction)


def member(path: str, name: str) -> str:
    """Return the path of a member."""
    if _IDENTIFIER.fullmatch(name):
        return f"{path}.{name}" if path else name
    return f"{path}[{shown(name)}]"


def shown(value: object) -> str:
    """Return a short printable form of any value."""
    if is_text(value):
        return repr(cut(value, SHOWN_CHARS_MAX))
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int):
        return f"{value}" if value.bit_length() < 128 else "a very long number"
    if isinstance(value, float):
        return f"{value}"
    return (
        "a list"
        if is_list(value)
        else "an object"
        if is_object(value)
        else f"a {type(value).__name__}"
    )
