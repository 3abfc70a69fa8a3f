"""Kill a program at one exact system call: at the n-th by which it changes, or syncs, a file that is watched.

The program is a function that runs in a fork of this process, so that no interpreter has to be started for each of a
thousand deaths. It is traced, with a seccomp filter that stops it at the calls that matter and at no other, and is
killed at the *entry* of the call: that one has no effect, all before have theirs. What the kernel has of its files then
is what any death of processes at this place leaves behind.

A first run without a kill counts the calls; or one goes on until a run ends by itself. The program's threads are
followed. Whatever it writes to the pipe that it is given is returned, also when it was killed.

Only for a process with one thread, and no children but these: `waitpid` takes whatever comes. It works for x86_64 and
aarch64, where the process may trace its own children; `why_not` says what is missing.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import time
import traceback
from collections.abc import Callable
from typing import NamedTuple

# What a child may take, the tracing included, before it is ended by a signal of its own.
CHILD_SECONDS_MAX = 30
# What it says must fit into a pipe that nobody reads while it lives.
SAID_BYTES_MAX = 1 << 16

# By name: the number of the call, and what tells which file it is about: the argument with its fd ("fd"), or that with
# its path, the first or the second.
_CALLS: dict[str, dict[str, tuple[int, str | int]]] = {
    "x86_64": {
        "write": (1, "fd"),
        "pwrite64": (18, "fd"),
        "writev": (20, "fd"),
        "fsync": (74, "fd"),
        "fdatasync": (75, "fd"),
        "ftruncate": (77, "fd"),
        "rename": (82, 0),
        "unlink": (87, 0),
        "unlinkat": (263, 1),
        "renameat": (264, 1),
        "fallocate": (285, "fd"),
        "pwritev": (296, "fd"),
        "renameat2": (316, 1),
    },
    "aarch64": {
        "unlinkat": (35, 1),
        "renameat": (38, 1),
        "ftruncate": (46, "fd"),
        "fallocate": (47, "fd"),
        "write": (64, "fd"),
        "writev": (66, "fd"),
        "pwrite64": (68, "fd"),
        "pwritev": (70, "fd"),
        "fsync": (82, "fd"),
        "fdatasync": (83, "fd"),
        "renameat2": (276, 1),
    },
}

_PTRACE_CONT = 7
_PTRACE_SEIZE = 0x4206
_PTRACE_GET_SYSCALL_INFO = 0x420E
_EVENT_SECCOMP = 7
# Stop at the filter's word and at new threads and forks, which are traced like their maker; die with the tracer.
_OPTIONS = 0x80 | 0x8 | 0x4 | 0x2 | 0x100000
_WAIT_ALL = 0x40000000
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 22, 38
_RET_TRACE, _RET_ALLOW = 0x7FF00000, 0x7FFF0000

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.restype = ctypes.c_long
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]


class _Instruction(ctypes.Structure):
    _fields_ = [("code", ctypes.c_ushort), ("jt", ctypes.c_ubyte), ("jf", ctypes.c_ubyte), ("k", ctypes.c_uint)]


class _Filter(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.POINTER(_Instruction))]


class _CallInfo(ctypes.Structure):
    """struct ptrace_syscall_info at a stop of seccomp's: the same for every machine."""

    _fields_ = [
        ("op", ctypes.c_ubyte),
        ("padding", ctypes.c_ubyte * 3),
        ("arch", ctypes.c_uint),
        ("instruction_pointer", ctypes.c_ulonglong),
        ("stack_pointer", ctypes.c_ulonglong),
        ("number", ctypes.c_ulonglong),
        ("arguments", ctypes.c_ulonglong * 6),
        ("data", ctypes.c_uint),
    ]


class Call(NamedTuple):
    """One that counts: its name, and the end of the file's name after what is watched."""

    name: str
    file: str


class Death(NamedTuple):
    """How a run went: the calls that were counted (the last one had no effect, if it was the one to die at), what was
    said, how it ended (minus the signal, or its code), and after how long."""

    calls: list[Call]
    said: bytes
    code: int
    seconds: float

    @property
    def is_killed(self) -> bool:
        return self.code == -signal.SIGKILL


def why_not() -> str:
    """Why nothing can be killed in this way here; empty if it can."""
    if platform.machine() not in _CALLS:
        return f"no system call numbers for {platform.machine()}"

    def write_once(_: int) -> None:
        with open("/dev/null", "wb", buffering=0) as file:
            file.write(b"x")

    try:
        death = run(write_once, "/dev/null", kill_at=1)
    except OSError as exc:
        return f"a child cannot be traced: {exc}"
    return "" if death.is_killed else f"a traced child was not killed: {death}"


def run(program: Callable[[int], None], watched: str, *, kill_at: int | None = None) -> Death:
    """Run `program(fd of the pipe)` in a fork and kill it at the entry of its call number `kill_at`, counted from 1,
    on a file whose path begins with `watched`. None, or more than there are: it ends by itself."""
    pid, said, go = _fork(program, is_traced=True)
    try:
        if _ptrace(_PTRACE_SEIZE, pid, 0, _OPTIONS) < 0:
            number = ctypes.get_errno()
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise OSError(number, f"PTRACE_SEIZE: {os.strerror(number)}")
        began = time.monotonic()
        os.write(go, b"x")
        calls: list[Call] = []
        code = _trace(pid, watched, kill_at, calls)
        return Death(calls, os.read(said, SAID_BYTES_MAX), code, time.monotonic() - began)
    finally:
        os.close(said)
        os.close(go)


def run_until(program: Callable[[int], None], lines: int, seconds: float) -> Death:
    """The same without tracing, killed `seconds` after its line number `lines`: at any place, in the middle of calls
    and between them. The program does not end by itself, so every run is killed."""
    pid, pipe, go = _fork(program, is_traced=False)
    try:
        began = time.monotonic()
        os.write(go, b"x")
        said = b""
        while said.count(b"\n") < lines and (more := os.read(pipe, SAID_BYTES_MAX)):
            said += more
        time.sleep(seconds)  # The moment is the point here.
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        while more := os.read(pipe, SAID_BYTES_MAX):
            said += more
        return Death([], said, os.waitstatus_to_exitcode(status), time.monotonic() - began)
    finally:
        os.close(pipe)
        os.close(go)


def _fork(program: Callable[[int], None], *, is_traced: bool) -> tuple[int, int, int]:
    """The child, the read end of what it says, and the write end of what lets it begin."""
    said, saying = os.pipe()
    begin, go = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            os.close(said)
            os.close(go)
            signal.alarm(CHILD_SECONDS_MAX)
            if os.read(begin, 1):  # Nothing, if whoever forked us has failed.
                if is_traced:
                    _install_filter()
                program(saying)
                code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(saying)
    os.close(begin)
    return pid, said, go


def _trace(leader: int, watched: str, kill_at: int | None, calls: list[Call]) -> int:
    """Follow the child to its end, and bring it about at the right call."""
    known = {number: (name, where) for name, (number, where) in _CALLS[platform.machine()].items()}
    info = _CallInfo()
    deadline = time.monotonic() + CHILD_SECONDS_MAX + 10
    while True:
        pid, status = os.waitpid(-1, _WAIT_ALL)
        if not os.WIFSTOPPED(status):
            # A thread, or the child itself: the kernel reports that one last.
            if pid == leader:
                return os.waitstatus_to_exitcode(status)
            continue
        assert time.monotonic() < deadline, "the child outlived its own alarm"
        event, number = status >> 16, os.WSTOPSIG(status)
        if event == _EVENT_SECCOMP:
            _ptrace(_PTRACE_GET_SYSCALL_INFO, pid, ctypes.sizeof(info), ctypes.addressof(info))
            name, where = known[info.number]
            file = _file(pid, info, where)
            if file.startswith(watched):
                calls.append(Call(name, file[len(watched) :]))
                if len(calls) == kill_at:
                    # The kernel skips a call at whose entry a fatal signal waits. The whole process gets it.
                    os.kill(leader, signal.SIGKILL)
                    continue
        # Signals are handed on; a new thread, a fork or the filter has none to hand on.
        _ptrace(_PTRACE_CONT, pid, 0, 0 if event else number)


def _file(pid: int, info: _CallInfo, where: str | int) -> str:
    """Which file a call is about. Its caller stands still, so neither the fd nor the memory changes under us."""
    try:
        if where == "fd":
            return os.readlink(f"/proc/{pid}/fd/{info.arguments[0]}").removesuffix(" (deleted)")
        assert isinstance(where, int)
        with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
            # A path may end near the border of what is mapped; a short read is then what there is.
            return os.fsdecode(os.pread(memory.fileno(), 1024, info.arguments[where]).partition(b"\0")[0])
    except OSError:
        return ""  # A bad fd or address, for which the call will fail; or killed meanwhile, by its alarm.


def _install_filter() -> None:
    """Stop at these calls, for this thread and those it will start."""
    numbers = [number for number, _ in _CALLS[platform.machine()].values()]
    program = [_Instruction(0x20, 0, 0, 0)]  # load the number
    for place, number in enumerate(numbers):
        # Equal: jump over the comparisons that are left, and over the permission behind them.
        program.append(_Instruction(0x15, len(numbers) - place, 0, number))
    program += [_Instruction(0x06, 0, 0, _RET_ALLOW), _Instruction(0x06, 0, 0, _RET_TRACE)]
    wanted = _Filter(len(program), (_Instruction * len(program))(*program))
    for arguments in ((_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), (_PR_SET_SECCOMP, 2, ctypes.byref(wanted), 0, 0)):
        if _libc.prctl(*arguments) != 0:
            raise OSError(ctypes.get_errno(), f"prctl {arguments[0]}")


def _ptrace(request: int, pid: int, address: int, data: int) -> int:
    return _libc.ptrace(request, pid, address, data)
