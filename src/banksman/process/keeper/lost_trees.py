"""Trees of lost keepers: the zygote sweeps their orphans, and reports in place of the keepers.

A keeper is lost if it ended without proof that its tree is gone. The zygote is a subreaper too, so
the orphans of that tree become its children. `guard` does the same for its one keeper. The trees of
dead hosts are another case: see `process/orphans.py`.
"""

from __future__ import annotations

import _socket
import os
import time

from banksman.process import syscalls
from banksman.process.keeper import messages
from banksman.process.keeper.keeper import RETRY_SECONDS, ROUND_SECONDS, SWEEP_SECONDS_MAX
from banksman.process.keeper.proc_tree import descendants, survey
from banksman.process.keeper.sweep import Sweep

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

# Bound on the exit statuses that are kept for the report, so that the report fits in one message.
STATUSES_MAX = 1000


class Orphans:
    """The trees of killed keepers: the zygote sweeps them and reports to the host.

    Several keepers may be lost at the same time, and their orphans cannot be distinguished. So each
    control socket gets the report about all orphans. The host recognises the leader of each command
    by its pid.
    """

    def __init__(self, reap: Callable[[], None]) -> None:
        self.controls: list[int] = []
        # Channels to the hosts of handed-over trees among them: see `successors.py`.
        self.channels: list[_socket.socket] = []
        self._statuses: dict[int, int] = {}
        # Count of reaped orphans. `end` compares it before and after a look.
        self._reaped = 0
        self._reap = reap
        self.begin_anew()
        self._sweep = Sweep(os.getpid(), reap)

    def begin_anew(self) -> None:
        """Restart the time bound, because another keeper was lost.

        Its orphans get the full time, even if older orphans are still being swept.
        """
        self.next_round = 0.0
        self._began = time.monotonic()

    def note(self, statuses: dict[int, int]) -> None:
        """Keep the exit statuses of reaped orphans, by pid, for the report.

        The leaders are among these orphans. A tree that forks and exits without end has no bound,
        so the first STATUSES_MAX entries stay.
        """
        self._reaped += len(statuses)
        self._statuses.update(statuses)
        for pid in list(self._statuses)[STATUSES_MAX:]:
            del self._statuses[pid]

    def is_due(self) -> bool:
        return time.monotonic() >= self.next_round

    def end(self, guards: Callable[[], set[int]]) -> bool:
        """Run one round. True if no orphan is left, and every host that waits has its report.

        `guards`: returns the children of this process that are not orphans.
        """
        # Reap first. The orphans that are counted below then died during the look.
        self._reap()
        reaped_before = self._reaped
        if not self._sweep_round(guards()):
            return False
        # ECHILD is no proof here, because the keepers are children of this process too. The proof
        # here is different. A process that escaped the look was born during it, and its parent died
        # during it. That parent (or an ancestor that died in the same way) is now a zombie of this
        # process. So if the look found nothing, and nothing was reaped after it, no orphan is left.
        self._reap()
        is_proven = self._reaped == reaped_before
        # If another keeper was lost during the look, its orphans have to be swept first.
        # `begin_anew` has reset the time then. The clock does not tell: on a busy machine a look
        # takes longer than the pause between two looks.
        if not is_proven or self.next_round == 0.0:
            return False
        self.report([])
        # They are proven gone, so a failure here leaves no tree.
        assert not self.controls
        return True

    def _sweep_round(self, guards: set[int]) -> bool:
        """Run one round. True if it has found no orphan. That alone is no proof: see `end`.

        After SWEEP_SECONDS_MAX the survivors are reported, and the rounds continue at a slower
        pace.
        """
        now = time.monotonic()
        # Set before the look: `begin_anew` may run during it (`reap` finds another lost keeper) and
        # resets this value to 0.
        self.next_round = now + (ROUND_SECONDS if self.controls else RETRY_SECONDS)
        try:
            found = self._sweep.kill(but=guards)
            # The result of `kill` is not enough: this finds denied processes, and processes born
            # after its last pass.
            left = descendants(os.getpid(), near=False, but=guards)
        except OSError:
            return False  # No memory or fds for a scan. The next round may succeed.
        if not left and not found:
            return True
        # The report closes the case for the hosts that wait now. The sweep continues without them,
        # because a survivor may become killable later.
        if now - self._began > SWEEP_SECONDS_MAX:
            self.report(survey(os.getpid(), self._sweep.denied, but=guards))
        return False

    def report(self, survivors: list[tuple[int, str, str]]) -> None:
        """Report the end to every host that waits, in place of its keeper. Closes the sockets."""
        # Send only as many names as certainly fit into the socket buffer. A host that reads slowly
        # must still get GONE.
        names = [(pid, name) for (pid, _start), name in self._sweep.names.items()][
            : 2 * messages.NAMES_PER_MESSAGE
        ]
        for control in self.controls:
            # LOST first: the host must know the exit status of the leader before GONE closes the
            # case.
            tell(control, messages.LOST, self._statuses)
            for first in range(0, len(names), messages.NAMES_PER_MESSAGE):
                tell(control, messages.SWEPT, names[first : first + messages.NAMES_PER_MESSAGE])
            tell(control, messages.GONE, survivors)
            # The end of this stream. Sockets are reported once; later rounds have no reader and run
            # quietly.
            syscalls.close(control)
        self.controls.clear()
        while self.channels:
            self.channels.pop().close()


def tell(control: int, *message: object) -> None:
    """Send one message to a host, or drop it if the socket does not take it now.

    `control`: the fd of the control socket; it stays open.
    """
    sock = _socket.socket(fileno=control)
    try:
        syscalls.send(sock, messages.encode(*message))
    except OSError:
        pass  # The host is gone, or reads so slowly that it learns from the end of the stream.
    finally:
        # `detach` keeps the fd open: it belongs to the caller.
        sock.detach()
