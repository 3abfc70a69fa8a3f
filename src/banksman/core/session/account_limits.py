"""Usage windows of the agent's account, as the agent reports them.

An account has one or several windows (five hours, a week). Each has a used fraction and a time at
which it resets. `merge` applies a report to the known windows, `limited_until` says until when the
account answers nothing. Times are wall clock seconds, UTC, because the provider names them so.
All functions are pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from banksman.core.dialects.meaning import LimitWindow
from banksman.core.session.outcome import Kind

# Limit on a report: known providers have at most four windows.
WINDOWS_MAX = 16

Windows = tuple[LimitWindow, ...]


def merge(known: Windows, told: Sequence[LimitWindow]) -> Windows:
    """Return the known windows after a report. A report may name only some of them."""
    merged = {window.name: window for window in known}
    for window in told:
        if window.name in merged or len(merged) < WINDOWS_MAX:
            merged[window.name] = window
    return tuple(merged.values())


def limited_until(windows: Sequence[LimitWindow]) -> float | None:
    """Return when the last exhausted window resets; None if no window is known to be exhausted."""
    resets = [
        window.resets_at
        for window in windows
        if window.is_exhausted and window.resets_at is not None
    ]
    return max(resets, default=None)


def as_json(windows: Sequence[LimitWindow]) -> list[dict[str, Any]]:
    """Return the windows for an event and for callers."""
    return [
        {
            "name": window.name,
            "used": window.used,
            "resets_at": window.resets_at,
            "exhausted": window.is_exhausted,
        }
        for window in windows
    ]


def from_json(windows: Sequence[Mapping[str, Any]]) -> Windows:
    """Return the windows of an event."""
    return tuple(
        LimitWindow(each["name"], each["used"], each["resets_at"], each["exhausted"])
        for each in windows
    )


def limited_after(known: float | None, outcome: Kind, told: float | None) -> float | None:
    """Return until when the account is limited, after a turn with this outcome."""
    if outcome is Kind.DONE:
        return None  # The provider has answered.
    return known if told is None else told
