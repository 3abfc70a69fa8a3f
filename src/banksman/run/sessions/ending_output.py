"""Limit the output that is logged of an agent that is ending.

The output of an agent that works is bounded by backpressure: while the log or the backlog is behind, the driver does
not read the pipe, and the agent waits. That stops working when the agent exits or is stopped. A process that is blocked
on a full pipe cannot react to a signal, so from then on the pipe is read as fast as it fills. A flood would fill the
memory of the host for as long as the stop ladder takes. Two rules bound it:

1. The driver stops an agent that floods. Nothing more of it is logged.
2. The agent exits by itself, or its stdin breaks because it is about to exit. The result of its turn may already be in
   the pipe, so output is logged on. But what the agent wrote before that moment is no more than a pipe holds. After
   `LAST_BYTES_MAX` bytes the rest is dropped: it comes from an agent that has closed its stdin and does not exit, or
   from a process that an exited agent has left behind.

Dropped lines are counted (`Counters.dropped`). Oversize frames have a bound of their own: see oversize.py.
"""

from __future__ import annotations

from banksman.core.state import Process, Stdin

# More than an agent can have written before it ended: a pipe holds at most 1 MiB (`widen_stdout`), and as much again is
# in reserve.
LAST_BYTES_MAX = 2 << 20


class EndingOutput:
    """Decides for the output of one process what is logged. Make another one for the next process."""

    def __init__(self) -> None:
        self._has_exited = False
        self._left = LAST_BYTES_MAX

    def note_exit(self) -> None:
        """The process has exited. Called when that happens, though output that was read before is not logged yet: from
        now on the pipe cannot push back."""
        self._has_exited = True

    def admits(self, size: int, process: Process) -> bool:
        """Whether the lines of the next `size` bytes that were read are logged."""
        if self._has_exited or process.stdin is Stdin.BROKEN:
            self._left -= size
        return self._left >= 0


def drops_floods(process: Process) -> bool:
    """Whether the rest of a flood is dropped: only after the driver itself chose to stop the process."""
    return process.was_told_to_stop and not process.exited_by_itself and process.stdin is not Stdin.BROKEN
