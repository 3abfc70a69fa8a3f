"""What an agent says in a request, taken one by one: it may be anything, and whatever it must not be is told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from banksman.errors import UsageError

# Words and variables of one command. The kernel's own limit is in bytes; this one is for what we do with each.
COUNT_MAX = 10_000


def text(params: Mapping[str, Any], name: str) -> str:
    value = params.get(name)
    if not isinstance(value, str):
        raise _wrong(name, value, "text")
    return value


def number(params: Mapping[str, Any], name: str) -> int | None:
    """A whole number from 0 on; None: it is not said."""
    value = params.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise _wrong(name, value, "a whole number, 0 or more")
    return value


def words(params: Mapping[str, Any], name: str) -> list[str]:
    return [_text(name, item) for item in _items(params, name)]


def variables(params: Mapping[str, Any], name: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for item in _items(params, name):
        if not isinstance(item, Mapping):
            raise _wrong(name, item, '{"name": …, "value": …}, both text')
        pair = cast(Mapping[str, Any], item)
        found[_text(name, pair.get("name"))] = _text(name, pair.get("value"))
    return found


def _items(params: Mapping[str, Any], name: str) -> Sequence[Any]:
    value = params.get(name)
    if value is None:
        return ()
    items = cast(Sequence[Any], value) if isinstance(value, list | tuple) else None
    if items is None or len(items) > COUNT_MAX:
        raise _wrong(name, cast(object, value), f"a list of at most {COUNT_MAX}")
    return items


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise _wrong(name, value, "text")
    return value


def _wrong(name: str, value: object, hint: str) -> UsageError:
    # Of a huge value not even its whole repr is made.
    told = f"{value[:60]!r}" if isinstance(value, str) else type(value).__name__
    return UsageError(f"{name} cannot be {told}", hint=hint)
