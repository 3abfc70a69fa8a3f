"""Kill a forked program at the entry of its n-th system call, whichever call that is.

All threads of the program are traced, and none of its child processes. The killed call has no effect, and all earlier
calls of its thread have taken effect. The number of calls differs between runs, because threads and timers differ.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Callable

from tests.store.sqlite.kill_at_syscall import PTRACE_GET_SYSCALL_INFO, PTRACE_SEIZE, WAIT_ALL, CallInfo, ptrace

_PTRACE_SYSCALL = 24
# Mark the stops of system calls, follow new threads but no forks, and die with the tracer.
_OPTIONS = 0x1 | 0x8 | 0x100000
_CALL_STOP = signal.SIGTRAP | 0x80
_ENTRY = 1


def run(program: Callable[[], None], kill_at: int, *, seconds: int) -> tuple[int, int, int]:
    """Run the program in a fork, and kill it at its call `kill_at`; never, if that is 0.

    Return the wait status, the number of calls, and the number of the call that was killed, or -1. `seconds`: the life
    of the program at most. The caller has no other children.
    """
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        try:
            signal.alarm(seconds)
            # The tracer has seized this process when it goes on.
            os.kill(os.getpid(), signal.SIGSTOP)
            program()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    os.waitpid(pid, os.WUNTRACED)
    if ptrace(PTRACE_SEIZE, pid, 0, _OPTIONS) < 0:
        number = ctypes.get_errno()
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise OSError(number, f"PTRACE_SEIZE: {os.strerror(number)}")
    os.kill(pid, signal.SIGCONT)
    return _follow(pid, kill_at)


def _follow(leader: int, kill_at: int) -> tuple[int, int, int]:
    info = CallInfo()
    seen, killed = 0, -1
    while True:
        pid, status = os.waitpid(-1, WAIT_ALL)
        if not os.WIFSTOPPED(status):
            # A thread, or the program: the kernel reports the program last.
            if pid == leader:
                return status, seen, killed
            continue
        event, number = status >> 16, os.WSTOPSIG(status)
        if number == _CALL_STOP and killed < 0:
            ptrace(PTRACE_GET_SYSCALL_INFO, pid, ctypes.sizeof(info), ctypes.addressof(info))
            seen += info.op == _ENTRY
            if info.op == _ENTRY and seen == kill_at:
                killed = info.number
                os.kill(leader, signal.SIGKILL)
                continue
        # Pass signals on. The other stops have none.
        ptrace(_PTRACE_SYSCALL, pid, 0, 0 if event or number == _CALL_STOP else number)
