"""What a child takes from its host at the moment of the call, and the zygote, made earlier, does not know.

The folder, the umask and the soft limit of open files travel with each order. The rest cannot be set from outside, or
not safely: user and groups, capabilities, no_new_privs, seccomp, limits, priority, CPUs. It is a *fingerprint*: when it
has changed since the zygote was started, a new zygote is. A program that locks itself down after its first command must
not run the next one outside of that.
"""

from __future__ import annotations

import os
import resource
import sys
from dataclasses import dataclass

from banksman.errors import no_room
from banksman.process import limits, syscalls

_RLIMITS = tuple(sorted({value for name, value in vars(resource).items() if name.startswith("RLIMIT_")}))
_STATUS = (
    *(b"Uid:", b"Gid:", b"Groups:", b"CapInh:", b"CapPrm:", b"CapEff:", b"CapBnd:", b"CapAmb:", b"NoNewPrivs:"),
    *(b"Seccomp:", b"Seccomp_filters:", b"Cpus_allowed:"),
)


@dataclass(frozen=True, slots=True)
class Inherited:
    umask: int
    nofile: int
    fingerprint: object


def take() -> Inherited:
    """As this thread is now."""
    if sys.platform != "linux":
        # There is no way to ask for the umask but to set it. And no zygote that could be outdated.
        umask = os.umask(0o077)
        os.umask(umask)
        return Inherited(umask, limits.child_nofile(), None)
    try:
        # Of the thread, not the process: capabilities and seccomp are each thread's own.
        status = syscalls.read_proc("thread-self/status", 8192)
        oom = syscalls.read_proc("self/oom_score_adj", 32)
    except OSError as exc:
        raise no_room("/proc", exc) from exc
    lines = status.splitlines()
    umask = next(int(line[6:], 8) for line in lines if line.startswith(b"Umask:"))
    ours = tuple(line for line in lines if line.startswith(_STATUS))
    # The soft limit of open files travels with the order, so only the hard one counts here.
    rlimits = tuple(resource.getrlimit(which)[which == resource.RLIMIT_NOFILE :] for which in _RLIMITS)
    priority = os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0), oom
    return Inherited(umask, limits.child_nofile(), (ours, rlimits, priority))
