"""Messages between host, zygote and keeper: their list, encoding and size limits.

A message is one marshalled tuple in one SEQPACKET message; `process/syscalls.py` sends and receives
it. The names and the exit status of these processes are here too. An *order* is the description of
one command to start (`process/process.py`).

A message arrives whole or not at all, so a keeper that is killed while it sends cannot leave half a
frame. `marshal` is safe here and only here: both ends speak the same version of this list, and no
other process can open the socketpair between them. Usually both ends are the same program. After a
hand-over they may be two versions of it, so the successor first compares `WIRE` (see below).

    host → zygote
      (SPAWN, count, grace, order)         give this command to a keeper
          + fds [control, cwd, (lease), *the child's]
      (SPAWN, count, grace, None)          the same, with a long order in a file
          + fds […, file]
      (KILL_KEEPER, pid)                   the keeper does not answer: end its tree
      (HAND_OVER, pid, seconds)            another host takes over the tree of this keeper within
          + fd [channel]                   `seconds`; it sends its requests by this channel
      (KEEP, pid)                          the hand-over is cancelled
      (SURVIVE, pid, seconds) + fd [channel]
                                           after the death of the host, another one takes over the
                                           tree of this keeper within `seconds`
      (ADOPT, pid) + fd [pidfd]            on a channel: the process of the pidfd is the host now
    host → keeper
      (TERM, seconds)                      TERM (HUP too, for a shell) to the leader's group;
                                           without a further order, the next rung after `seconds`
      (REST, seconds)                      TERM to the rest of the tree; likewise
      (KILL,)                              freeze and kill the whole tree
      (SIGNAL, number, to_group)           signal the leader, or its group
      (RENEW, seconds | None)              new deadline, after which the keeper acts alone
      (HURRY, term_at, kill_at)            the host ends the tree by these times; they replace
                                           the times of the lease
      (SWEEP, number, tick, pid, ends)     end the processes started since, or only list them;
                                           SWEEP_REPORT answers
      (HAND_OVER, seconds, secret, path, streams)
          + fds [answer, listener,         hold the tree for another host; HELD or REFUSED
                 *the host's]              answers
      (KEEP,)                              the hand-over is cancelled
      (SURVIVE, seconds, secret, path, streams)
          + fds as of HAND_OVER            after the death of the host, hold the tree for another
                                           one; the host keeps its end of `answer` open until then
      (FORGO,)                             do not: the tree ends with the host
      (DROP, name)                         the host has closed this stream
    keeper → host, on the socket `answer`
      (HELD,)                              the keeper holds the tree: the host may leave
      (REFUSED, why)                       the host stays the host
    keeper → host
      (STARTED, leader, keeper, at)
      (FAILED, step, errno)                nothing runs
      (EXITED, code, signal, at, by_itself)  sent while the leader is a zombie
      (ACTED, rung, at, by_lease)          the keeper took a rung without an order; CGROUP is a
                                           part of KILL
      (OUT_OF_MEMORY,)                     before EXITED: the kernel killed the leader for memory
      (STOPPED,)                           the leader was stopped (Ctrl-Z); only for a command
                                           that shares the terminal of its caller
      (SWEPT, [(pid, command), …])         processes ended besides the leader; may be repeated
      (GONE, [(pid, command, why), …])     the tree is gone, except these survivors
      (SWEEP_REPORT, number, [(pid, command), …], [(pid, command, why), …], is_over)
                                           processes that a sweep ended, and its survivors;
                                           repeated until `is_over`
    zygote → host
      (LOST, {pid: status})                in place of a dead keeper; SWEPT and GONE follow
      (DONE,)                              only trees that were handed over are left

A hand-over passes the host's fds from host to host (`process/tree_hand_over.py`): those of
`HOST_FDS`, then those of the open `streams`. The spools and the mark of a surviving child are
streams too. A successor connects to the socket at `path` and sends one message, and gets one
answer. Both begin with `WIRE`, as plain bytes, so that any two versions understand the refusal:

    successor → keeper
      WIRE claim SECRET + fds [pidfd of the successor, (lease)]
    keeper → successor
      WIRE yours TUPLE + the host's fds    TUPLE, marshalled: leader, keeper, zygote, started_at,
                                           grace, linger, has_terminal, is_lasting, streams;
                                           `is_lasting`: the tree survives this successor too
      WIRE no WHY

Times are CLOCK_MONOTONIC, which is the same clock in all processes of a machine. Ticks are the
kernel's, counted since the boot.
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
HAND_OVER, KEEP, ADOPT = "hand-over", "keep", "adopt"
SURVIVE, FORGO, DROP = "survive", "forgo", "drop"
HELD, REFUSED, DONE = "held", "refused", "done"
STARTED, FAILED, EXITED, ACTED, STOPPED, SWEPT, GONE, LOST = (
    "started",
    "failed",
    "exited",
    "acted",
    "stopped",
    "swept",
    "gone",
    "lost",
)
SWEEP_REPORT = "sweep-report"
OUT_OF_MEMORY, CGROUP = "out-of-memory", "cgroup"

# Version of the messages between host and keeper, and between host and zygote on a channel. Raise
# the number with each change that the other version would not understand: the two refuse each other
# then, before anything is handed over.
WIRE = b"banksman-keeper-3"
# A hand-over begins with these fds: the host's end of the control socket, the channel to the
# zygote, and a pidfd of the zygote.
HOST_FDS = ("control", "channel", "zygote")

# The part of an order that says how the command relates to its caller. `group`: the process group
# that it joins; None makes it the leader of a new session. `mask` and `ignored`: the signals that
# are blocked and ignored in it. Only `guard` passes other values than these.
OWN_SESSION: dict[str, Any] = {"group": None, "mask": (), "ignored": ()}

# Process names of keepers, as `ps` shows them; the kernel allows 15 bytes. Servers of this user
# recognise an agent's tree by the name of its keeper.
KEEPER, AGENTS_KEEPER = b"banksman-keeper", b"bm-agent-keeper"
SPARE, ZYGOTE = b"banksman-spare", b"banksman-zygote"
# The names of all children of a zygote that are not orphans of a killed keeper. A keeper has the
# zygote's name between its fork and its own name.
GUARDS = frozenset((KEEPER, AGENTS_KEEPER, SPARE, ZYGOTE))

# Exit status of a keeper whose work is done: its tree is proven gone, or was never started. Every
# other status counts as a loss, 0 too: a process exits with 0 if something else made it exit.
DUTY_DONE = 86

# A longer order is sent as a memory file. A socket takes a few hundred kB at most, and an
# environment can be larger.
ORDER_BYTES_MAX = 16384
# Bound on the names in a SWEPT message, which keeps it far below the largest message that the
# socket takes.
NAMES_PER_MESSAGE = 50
# A command's name is its argv, cut to this length. That is enough to recognise the command, and
# bounded whatever the process writes into its argv.
NAME_BYTES_MAX = 200


# Pinned, because a later interpreter may have another default, and a host may have another
# interpreter than the keeper that it takes over.
_MARSHAL_VERSION = 4


def encode(*message: Any) -> bytes:
    """Encode one message; all its parts must be types that `marshal` knows."""
    data = marshal.dumps(message, _MARSHAL_VERSION)
    assert len(data) <= MESSAGE_BYTES_MAX
    return data


def decode(data: bytes) -> tuple[Any, ...]:
    """Decode one message into a tuple."""
    message = marshal.loads(data)
    assert isinstance(message, tuple)
    return message  # pyright: ignore[reportUnknownVariableType]
