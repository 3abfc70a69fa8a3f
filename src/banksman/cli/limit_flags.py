"""Flags that `exec` and `guard` share: the limits of the process tree, and how values are parsed.

It imports little, because both verbs start fast.
"""

from __future__ import annotations

from banksman.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
# Longer times count as no limit. Some timers do not count further.
SECONDS_MAX = 100 * 365 * 86400.0


def add_limits(flags: argparse.ArgumentParser) -> None:
    """Add --memory and --pids."""
    flags.add_argument(
        "--memory",
        type=size,
        metavar="SIZE",
        help="end the command if its tree uses more memory: 512M, 4G",
    )
    flags.add_argument(
        "--pids",
        type=whole_number,
        metavar="N",
        help="end the command if its tree has more than N processes",
    )


def seconds(text: str) -> float:
    """Parse a time: a number of seconds that is not negative."""
    value = float(text)
    if not value >= 0:
        raise ValueError(text)
    return min(value, SECONDS_MAX)


def size(text: str) -> int:
    """Parse a size in bytes: a whole number with an optional unit K, M, G or T."""
    number = text.upper().removesuffix("IB").removesuffix("B")
    unit = number[-1:] if number[-1:] in _UNITS else ""
    return whole_number(number.removesuffix(unit)) * _UNITS[unit]


def whole_number(text: str) -> int:
    """Parse a whole number above 0."""
    value = int(text)
    if value <= 0:
        raise ValueError(text)
    return value


def environment(pairs: list[str]) -> dict[str, str]:
    """Parse the values of --env."""
    for pair in pairs:
        if "=" not in pair or pair.startswith("="):
            raise UsageError(f"--env {pair!r} is not of the form K=V")
    return dict(pair.split("=", 1) for pair in pairs)
