"""Process trees of every difficult shape, for the kill matrix: `python -I -S shapes.py MARKER SHAPE ROLE FIFO LEAVES`.

Each process of a tree has MARKER in its argv, which it cannot remove as it can its environment. When the tree is
complete, the process with the shape writes its pid to FIFO as its last step. Each process keeps FIFO open for as long
as it lives. So the end of file on FIFO means that no process is left, not even one that is too quick for a look at
/proc.

The leader is the command itself. In the role `leader` it has the shape. In the role `descendant` it is plain, and a
child of it has the shape. LEAVES says when the leader exits without a signal: `never`, or `at_eof` of its stdin. The
leader of a daemon always exits immediately.

Every process here ends within `LIFE_SECONDS_MAX`, whatever happens to the test. The module uses only a small part of
the standard library, because a tree must be up in some tens of milliseconds.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Literal, NoReturn

    Role = Literal["leader", "descendant"]
    Leaves = Literal["never", "at_eof"]

LIFE_SECONDS_MAX = 60
# The fork loop: the number of its lines of descent (each is one process, or two at the moment of a fork), and its
# duration. The number is small: the rate of a line outruns a sweep, and more lines only slow each other down.
LOOP_LINES = 8
LOOP_SECONDS_MAX = 20

# Shapes that a wrapper program makes, as in real commands.
WRAPPERS = {"setsid": ("setsid",), "env_i_setsid": ("env", "-i", "setsid")}


def argv(marker: str, shape: str, role: Role, fifo: str, leaves: Leaves) -> list[str]:
    """Return the command line of a tree."""
    if role == "leader" and shape in WRAPPERS:
        # A command is the leader of its group, so setsid(1) has to fork. Its `--wait` decides whether the leader stays
        # or exits immediately. As a descendant it need not fork, and becomes the program itself.
        wait = ["--wait"] if leaves == "never" else []
        return [*WRAPPERS[shape], *wait, *_program(marker), "plain", "leader", fifo, "never"]
    return [*_program(marker), shape, role, fifo, leaves]


def _program(marker: str) -> list[str]:
    return [sys.executable, "-I", "-S", os.path.abspath(__file__), marker]


def main(marker: str, shape: str, role: str, fifo: str, leaves: str) -> None:
    _bound_life()
    up = os.open(fifo, os.O_WRONLY | os.O_CLOEXEC)
    if role == "leader":
        _take_shape(shape, up, leaves)
        return
    wait_for_leader, leader_is_quiet = os.pipe()
    # For the shape that is blocked on a pipe to its leader. The leader holds the other end and never reads.
    _unread, full = os.pipe()
    if os.fork() == 0:
        _bound_life()
        os.close(leader_is_quiet)
        # Wait for the end of file: from here on the leader does not hold the inherited stdout.
        os.read(wait_for_leader, 1)
        os.close(wait_for_leader)
        if shape == "blocked_on_its_leader":
            os.dup2(full, 1)
        if shape in WRAPPERS:
            wrapper = WRAPPERS[shape]
            os.execvp(wrapper[0], [*wrapper, *_program(marker), "plain", "leader", fifo, "never"])
        _take_shape(shape, up, "never")
        os._exit(0)
    os.close(wait_for_leader)
    _be_quiet()
    os.close(leader_is_quiet)
    _stay(leaves)


def _take_shape(shape: str, up: int, leaves: str) -> None:
    """Take the shape, report it, and stay."""
    if shape in ("blocked_on_full_stdout", "blocked_on_its_leader"):
        _block_on_stdout(up)
    if shape != "holds_stdout":
        _be_quiet()
    if shape == "double_fork":
        _daemonise()
        leaves = "never"  # That was for the leader, which is gone.
    if shape == "fork_loop":
        _fork_for_ever(up, leaves)
    if shape == "term_proof":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if shape == "stopped":
        _bound_life_of_stopped()
    _say(up)
    if shape == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    _stay(leaves)


def _say(up: int) -> None:
    os.write(up, f"{os.getpid()}\n".encode())


def _stay(leaves: str) -> None:
    while leaves == "never":
        signal.pause()
    while os.read(0, 4096):
        pass


def _be_quiet() -> None:
    """Close the inherited stdout, so that only a shape that holds it has it open."""
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 1)
    os.dup2(null, 2)
    os.close(null)


def _bound_life() -> None:
    """Set the alarm. Each process calls this, because a fork does not inherit the alarm."""
    signal.alarm(LIFE_SECONDS_MAX)


def _bound_life_of_stopped() -> None:
    """Bound the life of a stopped process.

    An alarm stays pending while a process is stopped. SIGKILL does not, and a POSIX timer may send it.
    """
    import ctypes

    class SignalEvent(ctypes.Structure):
        _fields_ = (
            ("value", ctypes.c_void_p),
            ("signal", ctypes.c_int),
            ("notify", ctypes.c_int),  # 0 is SIGEV_SIGNAL.
            ("rest", ctypes.c_char * 48),
        )

    library = ctypes.CDLL(None, use_errno=True)
    timer = ctypes.c_void_p()
    event = SignalEvent(signal=signal.SIGKILL)
    # Interval (none) and first expiry, each in seconds and nanoseconds.
    times = (ctypes.c_long * 4)(0, 0, LIFE_SECONDS_MAX, 0)
    assert library.timer_create(time.CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(timer)) == 0
    assert library.timer_settime(timer, 0, times, None) == 0


def _daemonise() -> None:
    """Fork twice like a daemon. Return in the last process, when both earlier processes are gone."""
    # Each process opens its own pidfd, so the pid cannot be another's. The pidfd becomes readable when that process has
    # ended. By then the kernel has given its children to the next subreaper.
    first = os.pidfd_open(os.getpid())
    if os.fork():
        os._exit(0)
    os.setsid()
    second = os.pidfd_open(os.getpid())
    if os.fork():
        os._exit(0)
    _bound_life()
    for fd in (first, second):
        gone = select.poll()
        gone.register(fd, select.POLLIN)
        gone.poll()
        os.close(fd)


def _block_on_stdout(up: int) -> NoReturn:
    chunk = b"x" * 65536
    os.set_blocking(1, False)
    try:
        while True:
            os.write(1, chunk)
    except BlockingIOError:
        os.set_blocking(1, True)
    _say(up)
    try:
        while True:
            os.write(1, chunk)
    except OSError:
        # The reader is gone. An exit now would hide a killer that missed this process.
        while True:
            signal.pause()


def _fork_for_ever(up: int, leaves: str) -> NoReturn:
    """Fork as fast as possible.

    The first process makes the lines of descent, and then children that exit immediately.

    The lines do not end with it, nor with each other: a loop that died out without a signal would hide a slow killer.
    They end when the reader closes the fifo, that is, with the test. They are too quick for the test to kill them.
    """
    over_at = time.monotonic() + LOOP_SECONDS_MAX
    reader_is_gone = select.poll()
    reader_is_gone.register(up, 0)
    for _ in range(LOOP_LINES):
        if os.fork() == 0:
            _be_a_line_of_descent(over_at, reader_is_gone)
    _say(up)
    while time.monotonic() < over_at and not reader_is_gone.poll(0):
        if leaves == "at_eof" and select.select([0], [], [], 0)[0]:
            os._exit(0)
        child = os.fork()
        if child == 0:
            os._exit(0)
        while os.waitpid(-1, 0)[0] != child:
            pass  # One of the lines has left its first process behind.
    os._exit(0)


def _be_a_line_of_descent(over_at: float, reader_is_gone: select.poll) -> NoReturn:
    """Continue in a new child forever: each child takes a new session, ignores TERM and forks the next.

    A killer that has read a pid from /proc comes too late, unless it stops the process quickly. No signal to a group,
    and none to each process of one moment, ends the line.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while time.monotonic() < over_at and not reader_is_gone.poll(0):
        _bound_life()
        os.setsid()
        if os.fork():
            os._exit(0)
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
