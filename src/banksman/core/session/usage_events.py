"""Read the usage that events add. The sum over a log is the usage of its session.

Events of a version that counted no usage have no `added`. Their `turn.ended` events have the
agent's own report and the cost, and are counted from these, without working time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from banksman.core.dialects.tokens import NO_TOKENS, tokens_in
from banksman.core.session.event import TURN_ENDED, TURN_REQUEUED, USAGE_REPORTED, Entry
from banksman.core.session.usage import Usage

KINDS = frozenset((USAGE_REPORTED, TURN_ENDED, TURN_REQUEUED))


class Addition(NamedTuple):
    """Usage that one event adds, and the caller under which it counts."""

    caller: str | None
    usage: Usage


class _Counting(msgspec.Struct):
    """The members of an event that count. The decoder skips all others."""

    added: Usage | msgspec.UnsetType | None = msgspec.UNSET
    caller: str | None = None
    # Written by earlier versions.
    by: str | None = None
    usage: dict[str, Any] | None = None
    cost: float | None = None


_decode = msgspec.json.Decoder(_Counting).decode


def additions(entries: Iterable[Entry]) -> list[Addition]:
    """Return what the entries add. An entry that is not valid adds nothing."""
    found = [addition(kind, data) for _, kind, data in entries if kind in KINDS]
    return [addition for addition in found if addition is not None]


def without_repeats(entries: Sequence[Entry]) -> Sequence[Entry]:
    """Return the entries without usage that is logged again after a failure of the log.

    A process that counts what it appends has counted it before. See `durability`.
    """
    if not any(turn is None and kind == USAGE_REPORTED for turn, kind, _ in entries):
        return entries
    return [entry for entry in entries if entry[0] is not None or entry[1] != USAGE_REPORTED]


def addition(kind: str, data: bytes) -> Addition | None:
    """Return what an event of one of these kinds adds; None if it adds nothing."""
    try:
        counting = _decode(data)
    except (msgspec.DecodeError, RecursionError):
        return None
    if counting.added is None:
        return None
    if counting.added is not msgspec.UNSET:
        return Addition(counting.caller, counting.added)
    if kind != TURN_ENDED or counting.by == "withdrawn":
        return None
    tokens = tokens_in(counting.usage) or NO_TOKENS
    return Addition(None, Usage(tokens, counting.cost, turns=1))
