"""A table of a TOML file, and checks that name the key they are about.

Whoever reads the error has the file open: it says which file, which key, what was there, and what may be. A key that is
not known is an error too, with the nearest one that is: what was misspelt would else be silently the usual.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, cast

from banksman.errors import UsageError
from banksman.run.commands.options import SECONDS_MAX


class Table:
    """`path`: what stands before a key when it is told, as in `ladder.`"""

    def __init__(self, source: str, path: str, data: Mapping[str, Any], known: Iterable[str]) -> None:
        self.source = source
        self.path = path
        self.data = data
        known = sorted(known)
        for key in data:
            if key not in known:
                # Without a bound on how near: something is always the nearest, and all of them follow.
                nearest = difflib.get_close_matches(key, known, 1, 0)[0]
                hint = f"do you mean {path}{nearest}? known are: {', '.join(known)}"
                raise self.wrong(f"there is no key {path}{key:.60}", hint)

    def wrong(self, what: str, hint: str) -> UsageError:
        return UsageError(f"{self.source}: {what}", hint=hint)

    def cannot_be(self, key: str, hint: str) -> UsageError:
        return self.wrong(f"{self.path}{key} cannot be {self.data.get(key)!r:.60}", hint)

    def cannot_hold(self, key: str, item: object, hint: str) -> UsageError:
        return self.wrong(f"{self.path}{key} cannot hold {item!r:.60}", hint)

    def table(self, key: str, known: Iterable[str]) -> Table:
        return Table(self.source, f"{self.path}{key}.", self._mapping(key), known)

    def text(self, key: str, default: str = "") -> str:
        value = self.data.get(key, default)
        if not isinstance(value, str):
            raise self.cannot_be(key, "text")
        return value

    def one_of(self, key: str, known: Iterable[str], default: str = "") -> str:
        value = self.text(key, default)
        if value not in known:
            raise self.cannot_be(key, f"one of: {', '.join(sorted(known))}")
        return value

    def flag(self, key: str) -> bool:
        value = self.data.get(key, False)
        if not isinstance(value, bool):
            raise self.cannot_be(key, "true or false")
        return value

    def words(
        self, key: str, default: tuple[str, ...] = (), *, among: Iterable[str] | None = None, hint: str = ""
    ) -> tuple[str, ...]:
        value = self.data.get(key, list(default))
        items: list[Any] = cast(list[Any], value) if isinstance(value, list) else [None]
        if not all(isinstance(item, str) and item for item in items):
            raise self.cannot_be(key, hint or "a list of words")
        for item in items:
            if among is not None and item not in among:
                raise self.cannot_hold(key, item, f"known are: {', '.join(sorted(among))}")
        return tuple(items)

    def texts(self, key: str) -> dict[str, str]:
        """A table of names to texts."""
        mapping = self._mapping(key)
        for name, value in mapping.items():
            if not isinstance(value, str):
                raise self.wrong(f"{self.path}{key}.{name} cannot be {value!r:.60}", "text")
        return dict(mapping)

    def seconds(self, key: str, default: float) -> float:
        value = self.data.get(key, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        # Every wait has an end, so infinity is none of them; and NaN is not between any two numbers.
        if not is_number or not 0 <= value <= SECONDS_MAX:
            raise self.cannot_be(key, "a number of seconds, 0 or more")
        return float(value)

    def _mapping(self, key: str) -> dict[str, Any]:
        value = self.data.get(key, {})
        if not isinstance(value, dict):
            raise self.cannot_be(key, f"a table: [{self.path}{key}]")
        return cast(dict[str, Any], value)
