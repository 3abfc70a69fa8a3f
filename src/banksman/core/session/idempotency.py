"""Idempotency keys of a session: an immutable sequence with appends in constant time.

The sequence is part of the folded log. `KeyedTurns` in `sessions/caller_futures.py` finds the turn
of a repeated ask.

The keys of waiting and running turns are few, and are kept in a tuple. The keys of ended turns
are many, and are only appended to. They are kept in a list that several values share. Each value
sees the list up to its own end. An append to the newest value extends the list in place. An
append to an older value copies the list first. So the values are immutable, as nearly everything
in the core is, and a session with a thousand keys copies about one of them per turn.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import overload

import msgspec

from banksman.core.session.outcome import Kind

# Number of idempotency keys that a session remembers: the most recent ones.
KEYS_MAX = 1024
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
    def _with(
        cls, over: list[IdempotencyKey], end: int, waiting: tuple[IdempotencyKey, ...]
    ) -> IdempotencyKeys:
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
        return f"IdempotencyKeys({self._all()!r})"
