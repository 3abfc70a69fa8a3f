"""Limits of a child (`limits=`), and the fd limit of this process."""

from __future__ import annotations

import resource
from collections.abc import Mapping
from typing import Any, cast

from banksman.errors import UsageError

_NAMES = {name.removeprefix("RLIMIT_").lower(): number for name, number in vars(resource).items() if "RLIMIT_" in name}
_RANGES = {"nice": (-20, 19), "oom_score_adj": (-1000, 1000)}
# The soft limit this process had before we raised it; children get this one.
_soft_before: int | None = None


def parse(limits: Mapping[Any, Any] | None) -> dict[str, Any] | None:
    """`{"nofile": 64, "as": (soft, hard), "nice": 5, "oom_score_adj": 500}` as the keeper takes it.

    A key is the name of an rlimit (`nofile` or `RLIMIT_NOFILE`), a number of the `resource` module, `nice` (absolute)
    or `oom_score_adj`. One number sets soft and hard.
    """
    if limits is None:
        return None
    if not isinstance(limits, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UsageError(f"limits cannot be {limits!r:.60}", hint='a mapping such as {"nofile": 64, "nice": 5}')
    rlimits: list[tuple[int, tuple[int, int]]] = []
    others: dict[str, int | None] = {"nice": None, "oom_score_adj": None}
    for key, value in limits.items():
        if key in _RANGES:
            others[key] = _number(key, value, *_RANGES[key])
        else:
            rlimits.append((_rlimit(key), _pair(key, value)))
    return {"rlimits": rlimits, **others} if limits else None


def _rlimit(key: Any) -> int:
    number = _NAMES.get(key.lower().removeprefix("rlimit_")) if isinstance(key, str) else key
    if number is None or number not in _NAMES.values():
        known = ", ".join(sorted(_NAMES))
        raise UsageError(f"there is no limit {key!r}", hint=f"known are nice, oom_score_adj, {known}")
    return number


def _pair(key: Any, value: Any) -> tuple[int, int]:
    pair = cast(tuple[Any, ...], value if isinstance(value, tuple) else (value, value))
    if len(pair) != 2:
        raise UsageError(f"limit {key!r} cannot be {value!r}", hint="one whole number, or a pair (soft, hard)")
    soft, hard = (_number(key, number, resource.RLIM_INFINITY, (1 << 63) - 1) for number in pair)
    if hard != resource.RLIM_INFINITY and (soft == resource.RLIM_INFINITY or soft > hard):
        raise UsageError(f"limit {key!r} cannot be {value!r}", hint="the soft limit must not be above the hard one")
    return soft, hard


def _number(key: object, value: object, least: int, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise UsageError(f"limit {key!r} cannot be {value!r}", hint=f"a whole number from {least} to {most}")
    return value


def raise_fd_limit() -> int:
    """Raise this process's soft limit of open files to its hard limit, and return it. Children keep the old one.

    A running command takes three or four fds here. For programs of ours, and for those that start hundreds at once; a
    library does not do it unasked, because a program that uses select() breaks on fds over 1023.
    """
    global _soft_before  # noqa: PLW0603
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        _soft_before = soft
    return hard


def child_nofile() -> int:
    """The soft limit of open files a child starts with: ours, unless we raised it."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] if _soft_before is None else _soft_before
