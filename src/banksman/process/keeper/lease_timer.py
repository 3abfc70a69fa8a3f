"""Deadlines of a keeper under a lease: read them from the shared page, and decide what is due.

This is the keeper's end of `process/lease_page.py`, which explains the page and its times.
"""

from __future__ import annotations

import mmap

NEVER = float("inf")
# Added to the times that the host sends when it ends the tree under a lease. The host's timers are
# as exact as the keeper's, and the host acts first.
LEASE_MARGIN_SECONDS = 0.02


class LeaseTimer:
    """Deadlines that apply unless the host keeps renewing the lease that the tree works under.

    The host writes the times to a page that all keepers share (`process/lease_page.py`). Once the
    host ends this tree by its ladder, it sends times for this tree alone (`take_over`). When a time
    has passed, the timer reads the page again before it reports the time as due.

    `page`: an fd of the page; the caller may close it afterwards. None: no lease, the tree may live
    as long as its host. `former`: the lease of a former host, which this one replaces.
    """

    def __init__(self, page: int | None, former: LeaseTimer | None = None) -> None:
        # This mapping must never be closed, not even when its times do not matter after
        # `take_over`. mmap keeps a duplicate of the fd, and the keeper closes that duplicate with
        # all other fds that it does not need (`close_all_but`). Closing the mapping later would
        # close its number again, which may belong to another file then.
        shared = None if page is None else mmap.mmap(page, 16, prot=mmap.PROT_READ)
        self._page = None if shared is None else memoryview(shared).cast("d")
        # Only kept, because its mapping must not be closed either.
        self._former = former
        self._is_taken_over = False
        self.term_at = self.kill_at = NEVER
        self._look()
        # The host writes the first times before it passes on the fd (`LeasePage.__init__`). Zeros
        # would end every tree at its start. The command does not run yet, so a failure here leaves
        # no tree.
        assert self.term_at > 0.0
        assert self.kill_at > 0.0

    def take_over(self, term_at: float, kill_at: float) -> None:
        """Replace the times of the page: the host ends this tree, by these times.

        TERM may come later than the page says, because the host is alive and takes the rungs before
        TERM. KILL may not come later.
        """
        # Read the page for the last time, so that the minimum below uses the current kill time.
        # From here on the page is ignored: a renewal must not extend a stop that has begun.
        self._look()
        self._is_taken_over = True
        self.term_at = term_at + LEASE_MARGIN_SECONDS
        # The minimum is the fence. Another host may claim the session at the end of the lease, so
        # no order of this host can move KILL beyond it.
        self.kill_at = min(self.kill_at, kill_at + LEASE_MARGIN_SECONDS)

    def due(self, phase: str) -> float:
        """Return the time of the next step in this phase; infinity if the lease demands none."""
        # The keys are the phases of `Keeper`. Once it kills, it has no further step to take.
        return {"running": self.term_at, "termed": self.kill_at}.get(phase, NEVER)

    def is_due(self, phase: str, now: float) -> bool:
        """Whether the next step of this phase is due, according to the latest times on the page."""
        if now < self.due(phase):
            return False
        # The known time has passed, but the host may have renewed the lease since the last look.
        # Reading the page only now is the point of the page: a renewal wakes no keeper.
        self._look()
        return now >= self.due(phase)

    def _look(self) -> None:
        # The two reads are not atomic together, so one value may be older than the other. That is
        # harmless: the host has granted each of them, and times on the page only move forward. So
        # an old value can only be too early, and `is_due` reads again before the keeper acts.
        if self._page is not None and not self._is_taken_over:
            self.term_at, self.kill_at = self._page
