"""Watchdog clocks of a turn, as values. `timers.py` ends the turn when a clock has run out.

- `bytes`: no output at all. Pauses while a tool runs or a question waits.
- `progress`: no meaningful frame. Pauses while a tool runs or a question waits.
- `tool`: a tool runs. Pauses while a question waits.
- `human`: a question waits. All other clocks pause then.
- `overall`: the whole turn, except the time in which a question waits.

`start` watches a process and not a turn; the session arms it. A clock warns once, after half its
time. The event that it waits for resets it. No timer is set per frame: one timer per turn fires
when the next clock could be due, and then checks again.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

from msgspec import Struct
from msgspec.structs import replace


class ClockName(enum.StrEnum):
    """Names of the watchdogs."""

    START = "start"
    BYTES = "bytes"
    PROGRESS = "progress"
    TOOL = "tool"
    HUMAN = "human"
    OVERALL = "overall"


class Watchdog(Struct, frozen=True):
    """One watchdog: its time limit, and the time that has passed."""

    name: ClockName
    seconds: float
    # When it was last reset. While it is paused, `passed` holds the elapsed time instead.
    since: float
    passed: float | None = None
    has_warned: bool = False

    @property
    def is_running(self) -> bool:
        return self.passed is None

    def elapsed(self, at: float) -> float:
        return at - self.since if self.passed is None else self.passed

    # Both compare with exactly the time that the timer is set to. A difference could round to just
    # before it, and the timer would fire forever.
    def is_half_through(self, at: float) -> bool:
        return self.is_running and at >= self.since + self.seconds / 2

    def has_run_out(self, at: float) -> bool:
        return self.is_running and at >= self.since + self.seconds

    def next_at(self) -> float | None:
        """When this clock is next due, for its warning or its end; None while it is paused."""
        if not self.is_running:
            return None
        return self.since + (self.seconds if self.has_warned else self.seconds / 2)


Watchdogs = tuple[Watchdog, ...]

_OF_TURN = tuple(name for name in ClockName if name is not ClockName.START)

# `Outcome.clock` of an ask that was not over in time. It is no clock of the turn: each ask has its
# own, it runs while the ask waits in the queue too, and no question pauses it. See `asks.expire`.
DEADLINE = "deadline"


def wound(limits: Mapping[str, float | None], at: float) -> Watchdogs:
    """Return the clocks of a turn that starts now. Those for a tool or a question are paused."""
    return tuple(
        Watchdog(
            name, seconds, at, passed=0.0 if name in (ClockName.TOOL, ClockName.HUMAN) else None
        )
        for name in _OF_TURN
        if (seconds := limits.get(name)) is not None
    )


def wind(clocks: Watchdogs, at: float, *names: ClockName) -> Watchdogs:
    """Reset the named clocks, because the event that they wait for has happened."""
    if not any(clock.name in names for clock in clocks):
        return clocks
    return tuple(
        replace(clock, since=at, passed=None if clock.is_running else 0.0, has_warned=False)
        if clock.name in names
        else clock
        for clock in clocks
    )


def attend(clocks: Watchdogs, at: float, *, has_tool: bool, has_question: bool) -> Watchdogs:
    """Run the clocks that may run, and pause the others."""
    return tuple(
        _set_running(clock, at, _may_run(clock.name, has_tool, has_question)) for clock in clocks
    )


def _may_run(name: ClockName, has_tool: bool, has_question: bool) -> bool:
    match name:
        case ClockName.HUMAN:
            return has_question
        case ClockName.TOOL:
            return has_tool and not has_question
        case ClockName.OVERALL:
            return not has_question
        case _:
            return not has_tool and not has_question


def _set_running(clock: Watchdog, at: float, is_running: bool) -> Watchdog:
    if is_running == clock.is_running:
        return clock
    if is_running:
        assert clock.passed is not None
        # The clock of a tool or a question starts at zero for each one.
        passed = 0.0 if clock.name in (ClockName.TOOL, ClockName.HUMAN) else clock.passed
        return replace(
            clock, since=at - passed, passed=None, has_warned=clock.has_warned and passed > 0
        )
    return replace(clock, passed=at - clock.since)


def next_at(clocks: Watchdogs) -> float | None:
    """When the next clock is due; None if all of them are paused."""
    return min((at for clock in clocks if (at := clock.next_at()) is not None), default=None)


def expired(clocks: Watchdogs, at: float) -> Watchdog | None:
    """Return the first clock that has run out."""
    return next((clock for clock in clocks if clock.has_run_out(at)), None)


def warn(clocks: Watchdogs, at: float) -> tuple[Watchdogs, list[Watchdog]]:
    """Mark the clocks past half their time as warned, and return the newly marked ones."""
    due = [clock for clock in clocks if not clock.has_warned and clock.is_half_through(at)]
    return tuple(
        replace(clock, has_warned=True) if clock in due else clock for clock in clocks
    ), due
