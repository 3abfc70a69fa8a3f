"""Values of JSON from outside, believed as far as they have the right type, and else as if they were not there."""

from __future__ import annotations

from typing import Any, cast


def text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def texts(value: Any) -> tuple[str, ...]:
    """Those items of a list that are text."""
    return tuple(item for item in items(value) if isinstance(item, str))


def items(value: Any) -> list[Any]:
    return cast(list[Any], value) if isinstance(value, list) else []


def mapping(value: Any) -> dict[str, Any]:
    return cast(dict[str, Any], value) if isinstance(value, dict) else {}


def mappings(value: Any) -> list[dict[str, Any]]:
    """Those items of a list that are objects."""
    return [cast(dict[str, Any], item) for item in items(value) if isinstance(item, dict)]
