"""A frozen value with some members changed, for the values that change with every frame of every agent.

`dataclasses.replace` asks the class for its fields each time, and calls an `__init__` that sets each of them by name.
With thirty members that is most of what a step costs. Here a class is looked at once, and its members are taken and put
in their slots without a look at their names.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import fields
from functools import cache
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")


class _Plan(NamedTuple):
    """How the values of one class are taken apart and put together: all members at once; the place of each; what puts
    each in its slot."""

    take: Callable[[Any], tuple[Any, ...]]
    places: dict[str, int]
    put: tuple[Callable[[Any, Any], None], ...]


@cache
def _plan(kind: type) -> _Plan:
    names = [field.name for field in fields(kind)]
    assert len(names) > 1, "else what takes all members would give one, and no tuple"
    assert not hasattr(kind, "__post_init__"), "it would not be called"
    slots = [getattr(kind, name) for name in names]
    return _Plan(
        operator.attrgetter(*names),
        {name: place for place, name in enumerate(names)},
        tuple(slot.__set__ for slot in slots),
    )


def changed(value: T, **changes: Any) -> T:
    """The same, but for these members. For dataclasses that are frozen and have slots; a member that there is not is a
    KeyError."""
    kind = type(value)
    take, places, put = _plan(kind)
    members = list(take(value))
    for name, member in changes.items():
        members[places[name]] = member
    other = object.__new__(kind)
    for place, member in zip(put, members, strict=True):
        place(other, member)
    return other
