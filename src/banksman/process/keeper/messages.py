"""What host, zygote and keeper say to each other: one marshalled tuple per SEQPACKET message.

A message arrives whole or not at all, so a keeper killed in mid-word cannot leave half a frame. `marshal` is safe here
and only here: both ends are one program, run by one interpreter, joined by a socketpair that nobody else can open.

    host → zygote    (SPAWN, count, grace, order) + fds [control, cwd, (lease), *the child's]  give this to a keeper
                     (SPAWN, count, grace, None) + fds […, file]        the same; the order is too long, and in a file
                     (KILL_KEEPER, pid)                  a keeper that does not answer; the zygote ends its tree
    host → keeper    (TERM, seconds)                     TERM (a shell: HUP too) to the leader's group, then go on alone
                     (REST, seconds)                     TERM to what is left of the tree; likewise
                     (KILL,)                             freeze and kill everything
                     (SIGNAL, number, to_group)
                     (RENEW, seconds | None)             the deadline after which the keeper acts alone
                     (HURRY, term_at, kill_at)           the host ends it by these times, in the place of the lease's
                     (SWEEP, number, tick, pid, ends)    end what was born since, or only look; SWEEP_REPORT answers
    keeper → host    (STARTED, leader, keeper, at)
                     (FAILED, step, errno)               nothing runs
                     (EXITED, code, signal, at, by_itself)   sent while the leader is a zombie
                     (ACTED, rung, at, by_lease)         a rung taken without being told
                     (SWEPT, [(pid, command), …])        what had to be ended besides the leader; may be repeated
                     (GONE, [(pid, command, why), …])    the tree is gone, but for these
                     (SWEEP_REPORT, number, [(pid, command), …], [(pid, command, why), …], is_over)
                                                         what a sweep ended, and who is left; repeated until over
    zygote → host    (LOST, {pid: status})               in the dead keeper's place; SWEPT and GONE follow

Times are CLOCK_MONOTONIC, which is one clock for all processes of a machine; ticks are the kernel's, since the boot.
"""

from __future__ import annotations

import marshal

from banksman.process.syscalls import MESSAGE_BYTES_MAX

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

SPAWN, KILL_KEEPER = "spawn", "kill-keeper"
TERM, REST, KILL, SIGNAL, RENEW, SWEEP = "term", "rest", "kill", "signal", "renew", "sweep"
HURRY = "hurry"
STARTED, FAILED, EXITED, ACTED, SWEPT, GONE, LOST = "started", "failed", "exited", "acted", "swept", "gone", "lost"
SWEEP_REPORT = "sweep-report"

# The names of keepers, as `ps` shows them: 15 bytes at most. Servers of this user know an agent's tree by its keeper.
KEEPER, AGENTS_KEEPER = b"banksman-keeper", b"bm-agent-keeper"

# The exit status of a keeper that has nothing left to do: its tree is proven gone, or was never started. Every other
# one is a loss, 0 too: that is what a process exits with that something else has made leave.
DUTY_DONE = 86

# An order longer than this goes as a memory file: a socket takes some hundred kB at most, an environment can be larger.
ORDER_BYTES_MAX = 16384
# A SWEPT message holds at most this many names, so that none comes near the largest message the socket takes.
NAMES_PER_MESSAGE = 50
# A command's name is its argv, cut: enough to recognise it, and bounded whatever the process made of it.
NAME_BYTES_MAX = 200


def encode(*message: Any) -> bytes:
    data = marshal.dumps(message)
    assert len(data) <= MESSAGE_BYTES_MAX
    return data


def decode(data: bytes) -> tuple[Any, ...]:
    message = marshal.loads(data)
    assert isinstance(message, tuple)
    return message  # pyright: ignore[reportUnknownVariableType]
