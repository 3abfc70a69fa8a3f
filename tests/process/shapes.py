"""Process trees of every awkward shape, for the kill matrix: `python -I -S shapes.py MARKER SHAPE ROLE FIFO LEAVES`.

Each process of a tree has MARKER in its argv, which it cannot scrub as it can its environment. When the tree stands,
the process that has the shape writes its pid to FIFO, last of all: whoever reads it knows that the rest is set up. Each
keeps FIFO open for as long as it lives, so its end of file means that nobody is left, not even one who is too quick to
be met in /proc.

The leader is the command itself. In the role `leader` it has the shape; in the role `descendant` it is plain, and a
child of it has the shape. LEAVES says when the leader goes of its own accord: `never`, or `at_eof` of its stdin. A
daemon's leader always goes at once.

Whatever becomes of the test, every process here ends by itself within `LIFE_SECONDS_MAX`. Standard library only, and
little of it: a tree must stand in some tens of milliseconds.
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
# The fork loop: how many lines of descent it has (each is one process, or two at the moment of a fork), and how long it
# goes on. Few: what outruns a sweep is the rate of a line, and more of them only slow each other down.
LOOP_LINES = 8
LOOP_SECONDS_MAX = 20

# Shapes that a program in front of ours makes, as they come in real commands.
WRAPPERS = {"setsid": ("setsid",), "env_i_setsid": ("env", "-i", "setsid")}


def argv(marker: str, shape: str, role: Role, fifo: str, leaves: Leaves) -> list[str]:
    """The command line of a tree."""
    if role == "leader" and shape in WRAPPERS:
        # A command is the leader of its group, so setsid(1) has to fork; its `--wait` decides whether the leader stays
        # or exits at once. (As a descendant it need not fork, and becomes the program itself.)
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
    # For the one that is blocked on a pipe to its leader, who holds the other end and never reads.
    _unread, full = os.pipe()
    if os.fork() == 0:
        _bound_life()
        os.close(leader_is_quiet)
        os.read(wait_for_leader, 1)  # Its end: from here on the leader holds the inherited stdout no more.
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
    """Become what `shape` says, say so, and stay."""
    if shape in ("blocked_on_full_stdout", "blocked_on_its_leader"):
        _block_on_stdout(up)
    if shape != "holds_stdout":
        _be_quiet()
    if shape == "double_fork":
        _daemonise()
        leaves = "never"  # That was said to the leader, which is gone.
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
    """Let go of the inherited stdout, so that a shape that holds it is the only one to."""
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 1)
    os.dup2(null, 2)
    os.close(null)


def _bound_life() -> None:
    """To be called in each process: a fork does not inherit the alarm."""
    signal.alarm(LIFE_SECONDS_MAX)


def _bound_life_of_stopped() -> None:
    """An alarm stays pending while a process is stopped. SIGKILL does not, and a POSIX timer may send it."""
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
    """The two forks of every daemon. Returns in the last process, when both that came before it are gone."""
    # Opened by the one it names, so it cannot be another's. It becomes readable when that one has ended, and by then
    # the kernel has given its children to the next subreaper.
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
        # The reader is gone. Leaving now would hide a killer that forgot us.
        while True:
            signal.pause()


def _fork_for_ever(up: int, leaves: str) -> NoReturn:
    """Fork as fast as it goes. The first process makes the lines of descent, and then children that end at once.

    The lines do not end with it, nor with each other: a loop that died out by itself would hide a killer that is slow.
    They end when nobody reads the fifo any more, that is, with the test: they are too quick for it to kill them.
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
    """A process that goes on in a child as soon as it is born, in a session of its own each time, and deaf to TERM.

    Whoever has read its pid from /proc comes too late, unless it is quick to stop it; and no signal to a group, nor one
    to each that is there at a moment, ends the line.
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
