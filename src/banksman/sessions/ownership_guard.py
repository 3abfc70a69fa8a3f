"""The guard of a host's store: what happens when what the host has claimed is not its own any more.

A store on this machine never says so. One that is far away knows a host by its heartbeats, and gives its sessions to
others when they stop: by then nothing of theirs may run here. So the host says how long that is (`Lease`) to the keeper
of each process, which needs nobody to act on it; and is itself told to let go, in time for the ladder.

To let go is, for each session that is open here, in this order: whoever waits in it is told (UNKNOWN, and not durable:
the log is another's now), its processes walk the ladder, with its waits cut to the time that is left, and it is closed
here. What is being opened at that moment fails. Whoever asks for a session after that gets another handle on it, which
claims it anew: from a store that has begun anew, under another lease.
"""

from __future__ import annotations

import logging
import sys
import time

from banksman.errors import BanksmanError, NotOwner
from banksman.process import lease_page as leases
from banksman.process.lease_page import LeasePage
from banksman.sessions.life import Life

log = logging.getLogger("banksman")

# Only a keeper reads it. Without one, the host's own ladder is all there is: see process/portable.py.
HAS_KEEPERS = sys.platform == "linux"


class Fence:
    """For one loop. It is the `Guard` of one log."""

    def __init__(self) -> None:
        # What processes are started under; None: they may live for as long as we do.
        self.lease: LeasePage | None = None
        self._lives: dict[str, Life] = {}
        # How often all was lost, and by which error the last time.
        self._losses = 0
        self._error: NotOwner | None = None
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<Fence {len(self._lives)} sessions, {self.lease or 'no lease'}, lost {self._losses} times>"

    # -- what the store says -----------------------------------------------------------------------------------------
    def on_held(self, fence_at: float, dead_by: float) -> None:
        if self._is_closed or not HAS_KEEPERS:
            return
        if self.lease is not None:
            self.lease.hold(fence_at, dead_by)
            return
        try:
            self.lease = LeasePage(fence_at, dead_by)
        except BanksmanError as exc:
            # No fds. The host's own ladder still holds, and the next heartbeat tries again.
            log.error("! keepers cannot be told how long they may keep what they have: %s", exc)

    def on_lost(self, error: NotOwner, dead_by: float) -> None:
        self._losses += 1
        self._error = error
        self._drop_lease()
        kill_by = leases.kill_by(time.monotonic(), dead_by)
        for id, life in list(self._lives.items()):
            if not life.is_lost:
                try:
                    life.lose(error, kill_by)
                except Exception:
                    # A bug in one of them must not keep the others from their end; its keeper has the page.
                    log.exception("! session %s cannot be let go of", id)

    # -- what is open here -------------------------------------------------------------------------------------------
    def watch(self, id: str, life: Life) -> None:
        """It is ours from here on."""
        self._lives[id] = life
        life.promises.finished.add_done_callback(lambda _: self._forget(id, life))

    def _forget(self, id: str, life: Life) -> None:
        if self._lives.get(id) is life:
            del self._lives[id]

    def is_ending(self, id: str) -> bool:
        """It was taken from us, and what we had of it is not gone yet."""
        life = self._lives.get(id)
        return life is not None and life.is_lost

    @property
    def losses(self) -> int:
        """For who claims something, before it does: see `check`."""
        return self._losses

    def check(self, losses: int) -> None:
        """What was claimed when there were so many losses is still ours."""
        if losses != self._losses:
            assert self._error is not None
            raise NotOwner(str(self._error.args[0]), hint="try again") from self._error

    def close(self) -> None:
        self._is_closed = True
        self._drop_lease()

    def _drop_lease(self) -> None:
        if self.lease is not None:
            self.lease.close()
            self.lease = None
