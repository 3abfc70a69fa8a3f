"""Values for callers: the outcome of an ask, the receipt of an interrupt, idempotency keys."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, overload

import msgspec

from banksman.errors import AgentError, BanksmanError

# Number of idempotency keys that a session remembers: the most recent ones.
KEYS_MAX = 1024


class Kind(enum.StrEnum):
    """How an ask ended. Never inferred from the agent's text."""

    # The boundary came, without an error.
    DONE = "done"
    # A caller, a watchdog or a close stopped it, and it ended by the boundary or by the ladder.
    INTERRUPTED = "interrupted"
    # It was stopped for a more urgent ask.
    PREEMPTED = "preempted"
    # It ended while it was queued.
    WITHDRAWN = "withdrawn"
    # The agent reported a failure or exited while the host lived, or the log could not be written.
    FAILED = "failed"
    # Declined before any byte was sent: the session drains or is closed, or its place was needed.
    REFUSED = "refused"
    # The host died, or lost the session, while the turn was open.
    UNKNOWN = "unknown"


class By(enum.StrEnum):
    """How a turn with a pending interrupt ended."""

    BOUNDARY = "boundary"
    LADDER = "ladder"
    EXIT = "exit"
    WITHDRAWN = "withdrawn"
    ALREADY_OVER = "already_over"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The one outcome of an ask.

    `text`: the final answer, or the text so far. `structured`: the answer as a value, if the ask
    has a schema. `cost`: cost of this turn in US dollars; None: the agent does not report it, or
    only a total over several turns.

    `clock`: the watchdog that ended the turn, if one did. `durable` False: the log could not be
    written.
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
    """Return the outcome in the body of a `turn.ended` event."""
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
    """The result of an interrupt.

    `kept`: the output of the turn. `queued`: the asks that were still waiting, by turn id.
    """

    BOUNDARY: ClassVar[By] = By.BOUNDARY
    LADDER: ClassVar[By] = By.LADDER
    EXIT: ClassVar[By] = By.EXIT
    WITHDRAWN: ClassVar[By] = By.WITHDRAWN
    ALREADY_OVER: ClassVar[By] = By.ALREADY_OVER

    stopped: bool
    by: By
    kept: str | None = None
    queued: tuple[str, ...] = ()


# Idempotency keys of a session: an immutable sequence with appends in constant time.
#
# The keys of waiting and running turns are few, and are kept in a tuple. The keys of ended turns
# are many, and are only appended to. They are kept in a list that several values share. Each value
# sees the list up to its own end. An append to the newest value extends the list in place. An
# append to an older value copies the list first. So the values are immutable, as everything in the
# core is, and a session with a thousand keys copies about one of them per turn.

# An ask that was never sent can be repeated with the same key. A program that is closed while its
# asks wait sends them again when it returns.
UNUSED = frozenset((Kind.REFUSED, Kind.WITHDRAWN))


class IdempotencyKey(msgspec.Struct, frozen=True, array_like=True):
    """An idempotency key, and the turn that it was used for.

    `after`: the seq before the turn was queued. `outcome`: how the turn ended; None: it is not
    over. A caller that repeats the ask gets this, even after retention has removed the events.
    """

    key: str
    turn: str
    after: int
    outcome: Kind | None = None


class IdempotencyKeys(Sequence[IdempotencyKey]):
    """The keys of a session, in two parts.

    - The last `KEYS_MAX` keys of ended turns, in the order of their ends.
    - The keys of the other turns, in the order of acceptance; the queue limits their number.

    If a key occurs twice, the later entry counts.
    """

    __slots__ = ("_end", "_over", "_waiting")

    def __init__(self, keys: Iterable[IdempotencyKey] = ()) -> None:
        keys = tuple(keys)
        self._over = [key for key in keys if key.outcome is not None]
        self._end = len(self._over)
        self._waiting = tuple(key for key in keys if key.outcome is None)

    def queued(self, key: IdempotencyKey) -> IdempotencyKeys:
        """Add the key of an accepted ask."""
        waiting = (*(known for known in self._waiting if known.key != key.key), key)
        return self._with(self._over, self._end, waiting[-KEYS_MAX:])

    def ended(self, turn: str | None, kind: Kind) -> IdempotencyKeys:
        """Move the keys of a turn to the ended ones. Usually the turn has none."""
        mine = [key for key in self._waiting if key.turn == turn]
        if not mine:
            return self
        waiting = tuple(key for key in self._waiting if key.turn != turn)
        if kind in UNUSED:
            return self._with(self._over, self._end, waiting)
        over = self._over
        if len(over) != self._end or len(over) >= 2 * KEYS_MAX:
            # Another value has already extended the list, or the older half of it can be dropped.
            # Amortised, each key is copied about once for that.
            over = over[max(0, self._end - KEYS_MAX) : self._end]
        over += [IdempotencyKey(key.key, key.turn, key.after, kind) for key in mine]
        return self._with(over, len(over), waiting)

    def without_waiting(self) -> IdempotencyKeys:
        """Return the keys without those of waiting and running turns."""
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
