"""How a turn ended, and what became of an interrupt: the values that callers get."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, overload

import msgspec

from banksman.errors import AgentError, BanksmanError

# How many idempotency keys a session remembers, the last ones.
KEYS_MAX = 1024


class Kind(enum.StrEnum):
    """How an ask ended. Never inferred from what the agent wrote."""

    # The boundary came, without an error.
    DONE = "done"
    # It was asked to stop, and ended by the boundary or by the ladder.
    INTERRUPTED = "interrupted"
    # It was stopped for a more urgent ask.
    PREEMPTED = "preempted"
    # It ended while it was queued.
    WITHDRAWN = "withdrawn"
    # The agent said so, or exited under a living host; or the log could not be written.
    FAILED = "failed"
    # We declined it before any byte was sent: the session is drained or closed, or its place was needed.
    REFUSED = "refused"
    # The host died, or lost the session, while the turn was open.
    UNKNOWN = "unknown"


class By(enum.StrEnum):
    """What ended the turn that was to be interrupted."""

    BOUNDARY = "boundary"
    LADDER = "ladder"
    EXIT = "exit"
    WITHDRAWN = "withdrawn"
    ALREADY_OVER = "already_over"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The one outcome of an ask. `text`: the final answer, else what was said so far. `structured`: the answer as a
    value, if a schema was asked for. `cost`: of this turn, in US dollars; None: the agent does not say, or only of more
    than this turn.

    `clock` names the watchdog that ended it, if one did. `durable` False: the log could not be written.
    """

    DONE: ClassVar[Kind] = Kind.DONE
    INTERRUPTED: ClassVar[Kind] = Kind.INTERRUPTED
    PREEMPTED: ClassVar[Kind] = Kind.PREEMPTED
    WITHDRAWN: ClassVar[Kind] = Kind.WITHDRAWN
    FAILED: ClassVar[Kind] = Kind.FAILED
    REFUSED: ClassVar[Kind] = Kind.REFUSED
    UNKNOWN: ClassVar[Kind] = Kind.UNKNOWN

    kind: Kind
    stop_reason: str | None = None
    text: str | None = None
    structured: Any = None
    usage: Mapping[str, Any] | None = None
    cost: float | None = None
    error: BanksmanError | None = None
    clock: str | None = None
    durable: bool = True


def outcome_of(body: Mapping[str, Any]) -> Outcome:
    """What a `turn.ended` of the log says."""
    error = body["error"]
    return Outcome(
        kind=Kind(body["outcome"]),
        stop_reason=body["stop_reason"],
        text=body["text"],
        structured=body["structured"],
        usage=body["usage"],
        cost=body["cost"],
        error=None if error is None else AgentError(error),
        clock=body["clock"],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """What an interrupt did. `kept`: what the turn had said. `queued`: the asks that were still waiting, by turn id."""

    BOUNDARY: ClassVar[By] = By.BOUNDARY
    LADDER: ClassVar[By] = By.LADDER
    EXIT: ClassVar[By] = By.EXIT
    WITHDRAWN: ClassVar[By] = By.WITHDRAWN
    ALREADY_OVER: ClassVar[By] = By.ALREADY_OVER

    stopped: bool
    by: By
    kept: str | None = None
    queued: tuple[str, ...] = ()


# Idempotency keys of a session: an immutable sequence to which a key is added in constant time.
#
# The keys of turns that wait or run are few, and are kept in a tuple. The keys of turns that are over are many, and
# only ever added to. They lie in a list that several values share: each value sees the list up to its own end, and
# adding to the newest value extends the list in place. Adding to an older value copies the list first. So the values
# are immutable, as everything in the core is, and a session of a thousand keys pays for one of them per turn.

# What was never sent can be asked again: a program that is closed while its asks wait comes back with them.
UNUSED = frozenset((Kind.REFUSED, Kind.WITHDRAWN))


class IdempotencyKey(msgspec.Struct, frozen=True, array_like=True):
    """An idempotency key, the turn that it was used for, the seq before that was queued, and how it ended: whoever asks
    again hears that much, also when retention has taken the rest."""

    key: str
    turn: str
    after: int
    outcome: Kind | None = None


class IdempotencyKeys(Sequence[IdempotencyKey]):
    """The last `KEYS_MAX` keys of turns that are over, in the order of their ends, then those of the others, which are
    as few as the queue is short, in the order of their acceptance. Of two that are the same the later one counts."""

    __slots__ = ("_end", "_over", "_waiting")

    def __init__(self, keys: Iterable[IdempotencyKey] = ()) -> None:
        keys = tuple(keys)
        self._over = [key for key in keys if key.outcome is not None]
        self._end = len(self._over)
        self._waiting = tuple(key for key in keys if key.outcome is None)

    def queued(self, key: IdempotencyKey) -> IdempotencyKeys:
        """With the key of an ask that was accepted."""
        waiting = (*(known for known in self._waiting if known.key != key.key), key)
        return self._with(self._over, self._end, waiting[-KEYS_MAX:])

    def ended(self, turn: str | None, kind: Kind) -> IdempotencyKeys:
        """With the keys of a turn that is over. Mostly it has none."""
        mine = [key for key in self._waiting if key.turn == turn]
        if not mine:
            return self
        waiting = tuple(key for key in self._waiting if key.turn != turn)
        if kind in UNUSED:
            return self._with(self._over, self._end, waiting)
        over = self._over
        if len(over) != self._end or len(over) >= 2 * KEYS_MAX:
            # Another value goes on from here, or half of the list is forgotten: each key is copied about once for that.
            over = over[max(0, self._end - KEYS_MAX) : self._end]
        over += [IdempotencyKey(key.key, key.turn, key.after, kind) for key in mine]
        return self._with(over, len(over), waiting)

    def without_waiting(self) -> IdempotencyKeys:
        return self._with(self._over, self._end, ())

    @classmethod
    def _with(cls, over: list[IdempotencyKey], end: int, waiting: tuple[IdempotencyKey, ...]) -> IdempotencyKeys:
        made = cls.__new__(cls)
        made._over, made._end, made._waiting = over, end, waiting
        return made

    def _all(self) -> tuple[IdempotencyKey, ...]:
        return (*self._over[max(0, self._end - KEYS_MAX) : self._end], *self._waiting)

    def __len__(self) -> int:
        return min(KEYS_MAX, self._end) + len(self._waiting)

    def __iter__(self) -> Iterator[IdempotencyKey]:
        return iter(self._all())

    @overload
    def __getitem__(self, index: int) -> IdempotencyKey: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[IdempotencyKey, ...]: ...
    def __getitem__(self, index: int | slice) -> IdempotencyKey | tuple[IdempotencyKey, ...]:
        return self._all()[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, IdempotencyKeys) and self._all() == other._all()

    def __hash__(self) -> int:
        return hash(self._all())

    def __repr__(self) -> str:
        return f"Keys({self._all()!r})"
