"""Tell whether a child can have noticed the end of its stdin.

A stop closes the child's stdin and waits for its exit. The wait is useless if no process of the
child waits for input. `EofReaction` proves that without the child's help: the close wakes every
thread that reads or polls the pipe. So no process has noticed the end of the pipe if

- no thread of the child has run since the close, and none is about to run, and
- no other process of the tree has the pipe as its stdin. A child may be a wrapper whose own child
  reads.

Without the proof (a thread ran, /proc is unreadable) the answer is that it may have noticed.
"""

from __future__ import annotations

import os

from banksman.process.keeper.proc_tree import descendants, read_stat

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
        # The parent is the keeper, and it adopts the orphans of the tree. So each process that has
        # inherited the pipe from the child descends from it. An orphan may change its parent during
        # the walk and be missed. Then the child only loses the rest of the wait.
        try:
            found = read_stat(self._pid)
            if found is None:
                return True
            tree = {pid for pid, _start in descendants(found[0], near=False)}
            return any(_stdin(pid) == self._pipe for pid in tree - {self._pid})
        except (OSError, LookupError, ValueError):
            return True  # A process may hide its stdin: it is not dumpable, or of another user.


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
    except (FileNotFoundError, ProcessLookupError):
        return ""  # The process is gone, or has no stdin.
