"""Usage of turns as values: tokens, cost, working time.

The log holds usage as additions. The events `usage.reported`, `turn.ended` and `turn.requeued` have
a member `added`, and the sum of all of them is the usage of the session. So a reader needs no state
to count, and a host that dies loses at most what the agent has not reported yet.

`Meter` is the running count of one turn. An agent reports the tokens of each model call, often
several times while the call runs, and the tokens and the cost of the whole turn at its boundary.
The boundary decides, unless it has less than the calls had: some agents report nothing at the end
of an interrupted turn.

`additions` reads what events add. Events of a version that counted no usage have no `added`. Their
`turn.ended` events have the agent's own report and the cost, and are counted from these, without
working time.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from banksman.core.dialects.meaning import TurnOver, UsageReported
from banksman.core.dialects.tokens import NO_TOKENS, Tokens, tokens_in
from banksman.core.session.event import TURN_ENDED, TURN_REQUEUED, USAGE_REPORTED, Entry

# Model calls of one turn that may be open at once: the agent and its subagents.
CALLS_MAX = 16


class Usage(Struct, frozen=True):
    """Usage of a turn, or a sum of many.

    `usd`: the agent's own figure, an estimate; None: no agent reported one. `working_seconds`: time
    in which a turn was open and did not wait for an answer to a question. `turns`: turns that were
    sent, or that the agent began unprompted.
    """

    tokens: Tokens = NO_TOKENS
    usd: float | None = None
    working_seconds: float = 0.0
    turns: int = 0

    def plus(self, other: Usage) -> Usage:
        """Return the sum."""
        return Usage(
            self.tokens.plus(other.tokens),
            other.usd if self.usd is None else self.usd + (other.usd or 0.0),
            self.working_seconds + other.working_seconds,
            self.turns + other.turns,
        )

    def minus(self, other: Usage) -> Usage:
        """Return the difference."""
        return Usage(
            self.tokens.minus(other.tokens),
            None if self.usd is None else self.usd - (other.usd or 0.0),
            self.working_seconds - other.working_seconds,
            self.turns - other.turns,
        )

    def most(self, other: Usage) -> Usage:
        """Return the larger number of each kind."""
        usds = [usd for usd in (self.usd, other.usd) if usd is not None]
        return Usage(
            self.tokens.most(other.tokens),
            max(usds, default=None),
            max(self.working_seconds, other.working_seconds),
            max(self.turns, other.turns),
        )


NO_USAGE = Usage()


class Meter(Struct, frozen=True):
    """Running count of one open turn.

    - `logged`: the part that the log has.
    - `over`: tokens and cost of boundaries inside the turn, of steered prompts.
    - `calls`: the latest model calls since then, by their id. `older`: the sum of all others.
    - `usd`: the cost since then, if the agent reports it during the turn.
    - `waited`: seconds of waiting for answers. `asked_at`: the beginning of the current wait.
    """

    logged: Usage = NO_USAGE
    over: Usage = NO_USAGE
    calls: tuple[tuple[str, Tokens], ...] = ()
    older: Tokens = NO_TOKENS
    usd: float | None = None
    waited: float = 0.0
    asked_at: float | None = None

    @property
    def tokens(self) -> Tokens:
        """Tokens since the last boundary."""
        total = self.older
        for _, tokens in self.calls:
            total = total.plus(tokens)
        return total

    def reported(self, report: UsageReported, usd: float | None) -> Meter:
        """Return the meter after a report. `usd`: the cost since the last boundary, if known."""
        older, calls = self.older, dict(self.calls)
        if report.tokens is not None:
            calls[report.call] = calls.get(report.call, NO_TOKENS).most(report.tokens)
        if len(calls) > CALLS_MAX:
            older = older.plus(calls.pop(next(iter(calls))))
        usd = self.usd if usd is None else usd
        return replace(self, older=older, calls=tuple(calls.items()), usd=usd)

    def bounded(self, boundary: TurnOver) -> Meter:
        """Return the meter after a boundary."""
        tokens = self.tokens
        if boundary.tokens is not None and boundary.tokens.total >= tokens.total:
            tokens = boundary.tokens
        usd = self.usd if boundary.cost is None else boundary.cost
        over = self.over.plus(Usage(tokens, usd))
        return replace(self, over=over, calls=(), older=NO_TOKENS, usd=None)

    def paused(self, at: float, *, has_question: bool) -> Meter:
        """Return the meter after a question came or went."""
        if has_question == (self.asked_at is not None):
            return self
        if has_question:
            return replace(self, asked_at=at)
        return replace(self, waited=self._waited(at), asked_at=None)

    def used(self, began_at: float, at: float) -> Usage:
        """Return the usage of the turn until now."""
        seconds = max(0.0, at - began_at - self._waited(at))
        return self.over.plus(Usage(self.tokens, self.usd, working_seconds=seconds))

    def _waited(self, at: float) -> float:
        return self.waited if self.asked_at is None else self.waited + at - self.asked_at


class Counted(Struct, frozen=True):
    """Usage in an event that is not durable yet. If the log loses the event, it is logged again.

    `used_by`: the agent, if it may be another one than the session's first.
    """

    caller: str | None
    used_by: str | None
    added: Usage


_kind_of = itemgetter(1)
USAGE_KINDS = frozenset((USAGE_REPORTED, TURN_ENDED, TURN_REQUEUED))


class Addition(NamedTuple):
    """Usage that one event adds, and the caller and the agent under which it counts.

    `agent`: None means the first agent of the session.
    """

    caller: str | None
    agent: str | None
    usage: Usage


class _Counting(msgspec.Struct):
    """The members of an event that count. The decoder skips all others."""

    added: Usage | msgspec.UnsetType | None = msgspec.UNSET
    caller: str | None = None
    used_by: str | None = None
    # Written by earlier versions.
    by: str | None = None
    usage: dict[str, Any] | None = None
    cost: float | None = None


_decode = msgspec.json.Decoder(_Counting).decode


def additions(entries: Sequence[Entry]) -> list[Addition]:
    """Return what the entries add. An entry that is not valid adds nothing."""
    if USAGE_KINDS.isdisjoint(map(_kind_of, entries)):
        return []
    found = [addition(kind, data) for _, kind, data in entries if kind in USAGE_KINDS]
    return [addition for addition in found if addition is not None]


def without_repeats(entries: Sequence[Entry]) -> Sequence[Entry]:
    """Return the entries without usage that is logged again after a failure of the log.

    A process that counts what it appends has counted it before. See `durability`.
    """
    if USAGE_REPORTED not in map(_kind_of, entries):
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
        return Addition(counting.caller, counting.used_by, counting.added)
    if kind != TURN_ENDED or counting.by == "withdrawn":
        return None
    tokens = tokens_in(counting.usage) or NO_TOKENS
    return Addition(None, None, Usage(tokens, counting.cost, turns=1))
