"""Signals of a guard: take them over from the caller's settings, and die of one in the end.

The guard blocks the signals that it handles and reads them from a signalfd. That works for signals
that the caller had blocked too, and it tells who sent a signal: the kernel (Ctrl-C at a terminal)
or a process. A signal that was ignored at the start stays ignored: that is how nohup works, and how
a shell keeps Ctrl-C from its background jobs.
"""

from __future__ import annotations

import os
import resource

from banksman.process import syscalls
from banksman.process.keeper.spawn import DEFAULT_SIGNALS
from banksman.process.syscalls import signals

# Plain numbers: the `signal` module imports `enum`, which costs milliseconds.
HUP, INT, QUIT, USR1, USR2, TERM = 1, 2, 3, 10, 12, 15
PIPE, CHLD, CONT, STOP, TSTP, TTIN, TTOU, XFSZ, WINCH = 13, 17, 18, 19, 20, 21, 22, 25, 28

# Signals that ask the guard to end.
ENDING = (HUP, INT, QUIT, TERM)
# Signals that the guard only passes on.
PASSED = (USR1, USR2, WINCH)
_HEARD = (*ENDING, *PASSED, CHLD, CONT, TSTP)
# Blocked and never read: a background process may then write to its terminal, and take it back.
_UNHEARD = (TTIN, TTOU)
# Python ignores these in every program, so the caller's setting is not known.
_PYTHONS = (PIPE, XFSZ)


class CallersSignals:
    """The signal settings that the guard found, and the fd from which it reads its signals."""

    def __init__(self) -> None:
        self.ignored = [
            number
            for number in DEFAULT_SIGNALS
            if signals.getsignal(number) == signals.SIG_IGN and number not in _PYTHONS
        ]
        # With SIGCHLD ignored the kernel would reap the children, and their status would be lost.
        signals.signal(CHLD, signals.SIG_DFL)
        # A blocked signal reaches the signalfd even if it is ignored. So ignored signals stay
        # unblocked.
        heard = {CHLD, *(number for number in _HEARD if number not in self.ignored)}
        before = signals.pthread_sigmask(signals.SIG_BLOCK, heard | {*_UNHEARD})
        self.mask = [int(number) for number in before]
        self.fd = syscalls.signalfd(heard)


def die_of(number: int) -> None:
    """End this process by a signal, so that its parent sees what a shell's child would show.

    A script around the guard then ends on Ctrl-C as it would without the guard. Returns if the
    kernel refuses, as for the first process of a container.
    """
    # QUIT would write a core file of this interpreter.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    signals.signal(number, signals.SIG_DFL)
    signals.pthread_sigmask(signals.SIG_UNBLOCK, {number})
    syscalls.kill(os.getpid(), number)
