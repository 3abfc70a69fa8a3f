"""What was asked of a keeper about a part of its tree, until it is answered.

It promises that each question is answered once, in a bounded time, whatever becomes of the keeper, unless the whole
tree ends before: then nothing is told here, and the end of the tree says the rest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from banksman.core.facts import Survivor, Swept
from banksman.run.child.keeper.pruning import GRACE_SECONDS, KILL_SECONDS_MAX

# The keeper's own bounds, and a second and a half for one last look at a tree that forks without end. Past that it does
# not run, and nothing is known.
ANSWER_SECONDS_MAX = GRACE_SECONDS + KILL_SECONDS_MAX + 1.5
UNKNOWN = Survivor(0, "", "unknown: its keeper does not answer")


@dataclass(frozen=True, slots=True)
class Pruned:
    """What was born since a moment has been ended, or was only looked for. `survivors`: who of it is still there."""

    swept: tuple[Swept, ...] = ()
    survivors: tuple[Survivor, ...] = ()


OnPruned = Callable[[Pruned], None]


@dataclass(slots=True)
class _Open:
    on_pruned: OnPruned
    timer: asyncio.TimerHandle
    swept: list[Swept] = field(default_factory=list[Swept])


class Prunings:
    """Those that are open. A late answer finds its question gone, and is not taken for that of another."""

    def __init__(self, loop: asyncio.AbstractEventLoop, look_now: Callable[[], None]) -> None:
        """`look_now`: hear what the keeper has said already."""
        self._loop = loop
        self._look_now = look_now
        self._last = 0
        self._open: dict[int, _Open] = {}

    def begin(self, on_pruned: OnPruned) -> int:
        self._last += 1
        timer = self._loop.call_later(ANSWER_SECONDS_MAX, self._on_silence, self._last)
        self._open[self._last] = _Open(on_pruned, timer)
        return self._last

    def hear(
        self, number: int, swept: tuple[Swept, ...], survivors: tuple[Survivor, ...], *, is_over: bool
    ) -> tuple[Swept, ...]:
        """Take what the keeper says. Back come those whom nobody waits for any more: they were ended all the same."""
        pruning = self._open.get(number)
        if pruning is None:
            return swept
        pruning.swept.extend(swept)
        if is_over:
            self._answer(number, survivors)
        return ()

    def drop(self) -> None:
        """The whole tree has ended, or nobody listens."""
        for pruning in self._open.values():
            pruning.timer.cancel()
        self._open.clear()

    def _on_silence(self, number: int) -> None:
        # The timer may have run late, behind a busy loop, while the answer was waiting to be read.
        self._look_now()
        if number in self._open:
            self._answer(number, (UNKNOWN,))

    def _answer(self, number: int, survivors: tuple[Survivor, ...]) -> None:
        pruning = self._open.pop(number)
        pruning.timer.cancel()
        pruning.on_pruned(Pruned(tuple(pruning.swept), survivors))
