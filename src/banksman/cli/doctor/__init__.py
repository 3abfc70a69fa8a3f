"""Types and runner of the checks of `banksman doctor`. The checks are in one module per group.

A check is a function that yields findings and changes nothing. `made` runs it: a check that fails
to run becomes a finding, and the other checks still run. `commands/doctor.py` runs the groups and
prints the findings. Only `leftovers.sweep` changes anything, and only on request.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from banksman.errors import BanksmanError


class FindingVerdict(enum.Enum):
    """Severity of a finding.

    NOTE: worth knowing, but not a fault. WRONG: something does not work or is not safe.
    """

    OK = "ok"
    NOTE = "note"
    WRONG = "wrong"


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check.

    `name`: the subject of the check. `seen`: the observation. `fix`: how to fix it; empty if there
    is nothing to fix.
    """

    name: str
    verdict: FindingVerdict
    seen: str
    fix: str = ""

    def __post_init__(self) -> None:
        assert self.fix or self.verdict is not FindingVerdict.WRONG, (
            f"a fault needs a fix: {self.name}"
        )


Check = Callable[[], Iterable[Finding]]


@dataclass(frozen=True, slots=True)
class DoctorOptions:
    """Targets of the checks, where they differ from the settings.

    `store`: check only this store. `monitors`: URLs of the monitoring ports of NATS servers.
    """

    store: str | None = None
    monitors: tuple[str, ...] = ()


def ok(name: str, seen: str) -> Finding:
    """Return a finding without a fault."""
    return Finding(name, FindingVerdict.OK, seen)


def note(name: str, seen: str, fix: str = "") -> Finding:
    """Return a finding that is worth knowing."""
    return Finding(name, FindingVerdict.NOTE, seen, fix)


def wrong(name: str, seen: str, fix: str) -> Finding:
    """Return a finding of a fault."""
    return Finding(name, FindingVerdict.WRONG, seen, fix)


def made(check: Check) -> Iterator[Finding]:
    """Run a check. If it fails, yield the failure as a finding."""
    name = check.__name__.strip("_").replace("_", " ")
    try:
        yield from check()
    except BanksmanError as exc:
        yield wrong(name, exc.args[0], exc.hint or "fix the cause that the error names")
    except (OSError, ValueError) as exc:
        yield wrong(name, f"cannot check it: {exc}", "give this user access to it")
