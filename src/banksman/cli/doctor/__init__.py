"""Whether all is well on this machine: a file for each group of checks. A check looks, and changes nothing.

Each check is a function that returns what it found. None of them raises: one that cannot be made says so, and keeps
none of the others from being made.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from banksman.errors import BanksmanError


class FindingVerdict(enum.Enum):
    """NOTE: worth knowing, and nothing to be put right. WRONG: something does not work, or is not safe."""

    OK = "ok"
    NOTE = "note"
    WRONG = "wrong"


@dataclass(frozen=True, slots=True)
class Finding:
    """`name`: what was looked at. `fix`: what to do; empty where there is nothing to do."""

    name: str
    verdict: FindingVerdict
    seen: str
    fix: str = ""

    def __post_init__(self) -> None:
        assert self.fix or self.verdict is not FindingVerdict.WRONG, f"what is wrong can be put right: {self.name}"


Check = Callable[[], Iterable[Finding]]


@dataclass(frozen=True, slots=True)
class DoctorOptions:
    """What is to be looked at, where it is not what the settings say. `store`: this one alone. `monitors`: where the
    servers of a cluster tell how they are."""

    store: str | None = None
    monitors: tuple[str, ...] = ()


def ok(name: str, seen: str) -> Finding:
    return Finding(name, FindingVerdict.OK, seen)


def note(name: str, seen: str, fix: str = "") -> Finding:
    return Finding(name, FindingVerdict.NOTE, seen, fix)


def wrong(name: str, seen: str, fix: str) -> Finding:
    return Finding(name, FindingVerdict.WRONG, seen, fix)


def made(check: Check) -> Iterator[Finding]:
    """What it found; and where it could not be made, that."""
    name = check.__name__.strip("_").replace("_", " ")
    try:
        yield from check()
    except BanksmanError as exc:
        yield wrong(name, exc.args[0], exc.hint or "see what it says")
    except (OSError, ValueError) as exc:
        yield wrong(name, f"cannot be looked at: {exc}", "let this user look at it")
