"""When a keeper has to act because nobody has told it that the host still has what the tree works for.

The host writes the times to a page that is shared by all keepers (`process/lease_page.py`), or, once it ends the tree
itself, tells them for this one tree. A time that has come is looked up again before it is believed.
"""

from __future__ import annotations

import mmap

NEVER = float("inf")
# How much later than the host said: its own timers are as punctual as ours, and it comes first.
MARGIN_SECONDS = 0.02


class LeaseTimer:
    """`page`: an fd of it, which may be closed afterwards; None: the tree may live for as long as its host does."""

    def __init__(self, page: int | None) -> None:
        # Never let go of, not even when it is not looked at any more: the mapping has a copy of the fd, and the keeper
        # closes that with all others it does not need. To close the mapping would close whatever has that number then.
        shared = None if page is None else mmap.mmap(page, 16, prot=mmap.PROT_READ)
        self._page = None if shared is None else memoryview(shared).cast("d")
        self._is_taken_over = False
        self.term_at = self.kill_at = NEVER
        self._look()

    def take_over(self, term_at: float, kill_at: float) -> None:
        """The host ends the tree itself, by these times. TERM may come later than the page has it, for the host is
        there and does what comes before it; KILL may not."""
        self._look()
        self._is_taken_over = True
        self.term_at = term_at + MARGIN_SECONDS
        self.kill_at = min(self.kill_at, kill_at + MARGIN_SECONDS)

    def due(self, phase: str) -> float:
        return {"running": self.term_at, "termed": self.kill_at}.get(phase, NEVER)

    def is_due(self, phase: str, now: float) -> bool:
        if now < self.due(phase):
            return False
        self._look()
        return now >= self.due(phase)

    def _look(self) -> None:
        if self._page is not None and not self._is_taken_over:
            self.term_at, self.kill_at = self._page
