"""Tell whether a child can have noticed the end of its stdin.

A stop closes the child's stdin and waits for its exit. The wait is useless if no process of the
child waits for input. `EofReaction` proves that without the child's help: the close wakes every
thread that reads or polls the pipe. So no process has noticed the end of the pipe if

- no thread of the child has run since the close, and none is about to run, and
- no other process has the pipe as its stdin. A child may be a wrapper whose own child reads.

Without the proof (a thread ran, /proc is unreadable) the answer is that it may have noticed.
"""

from __future__ import annotations

import os

# Other processes to look at. A machine that has started more since the child gets no proof, because
# each costs 20 us of the event loop.
OTHERS_MAX = 200
_ASLEEP = ("S", "T", "t")


class EofReaction:
    """One child around the close of its stdin. Create this before the close.

    `pid`: the unreaped child. `stdin`: the write end of its stdin.
    """

    def __init__(self, pid: int, stdin: int) -> None:
        assert pid > 0
        self._pid = pid
        self._pipe = f"pipe:[{os.fstat(stdin).st_ino}]"
        self._before = _threads(pid)

    def is_impossible(self) -> bool:
        """Return whether no process can have noticed the end of this stdin so far."""
        now = _threads(self._pid)
        if not now or any(state not in _ASLEEP for state, _switches in now.values()):
            return False
        ran = {thread: switches for thread, (_state, switches) in now.items()}
        before = {thread: switches for thread, (_state, switches) in self._before.items()}
        return ran == before and not self._has_other_reader()

    def _has_other_reader(self) -> bool:
        # A process that inherited the pipe from the child is younger. After a wrap of the pids it
        # may have a lower number, and then the child only loses the rest of the wait.
        younger = [
            pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if pid > self._pid
        ]
        return len(younger) > OTHERS_MAX or any(_stdin(pid) == self._pipe for pid in younger)


def _threads(pid: int) -> dict[str, tuple[str, int]]:
    """Return the state and the context switches of each thread; nothing if they are unknown."""
    found: dict[str, tuple[str, int]] = {}
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(
                f"/proc/{pid}/task/{thread}/status", encoding="utf-8", errors="replace"
            ) as file:
                fields = dict(line.split(":", 1) for line in file if ":" in line)
            switches = ("voluntary_ctxt_switches", "nonvoluntary_ctxt_switches")
            found[thread] = (
                fields["State"].split()[0],
                sum(int(fields[name]) for name in switches),
            )
    except (OSError, KeyError, ValueError):
        return {}
    return found


def _stdin(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/fd/0")
    except OSError:
        return ""  # It is gone, has no stdin, or belongs to another user.
