"""Kill a program at an exact system call: the n-th call that changes or syncs a watched file.

The program is a function in a fork of this process, so a thousand deaths need no interpreter start. The fork is traced.
A seccomp filter stops it only at the relevant calls. It is killed at the *entry* of the call: this call has no effect,
and all earlier calls have taken effect. The files are then in the state that any process death at this point leaves.

A first run without a kill counts the calls. Alternatively the caller increases the number until a run completes. The
tracer follows the program's threads. The bytes that the program writes to its pipe are returned, also after a kill.

The caller must have one thread and no other children, because `waitpid` takes any child. The module supports x86_64 and
aarch64, where the process may trace its children. `why_not` returns the reason if it cannot work.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]

# Time limit of a child, with the tracing. A signal ends it after that.
CHILD_SECONDS_MAX = 30
# The output must fit into a pipe that is not read while the child lives.
SAID_BYTES_MAX = 1 << 16

# For each call: its number, and how to find the file: by the fd argument ("fd"), or by the index of the path argument.
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
PTRACE_SEIZE = 0x4206
PTRACE_GET_SYSCALL_INFO = 0x420E
_EVENT_SECCOMP = 7
# Stop at the filter's events and at new threads and forks, which are traced too. Die with the tracer.
_OPTIONS = 0x80 | 0x8 | 0x4 | 0x2 | 0x100000
WAIT_ALL = 0x40000000
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 22, 38
_RET_TRACE, _RET_ALLOW = 0x7FF00000, 0x7FFF0000

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.restype = ctypes.c_long
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]


class _Instruction(ctypes.Structure):
    _fields_ = [("code", ctypes.c_ushort), ("jt", ctypes.c_ubyte), ("jf", ctypes.c_ubyte), ("k", ctypes.c_uint)]


class _Filter(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.POINTER(_Instruction))]


class CallInfo(ctypes.Structure):
    """struct ptrace_syscall_info at a seccomp stop. It is the same on every machine."""

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
    """Counted call: its name, and the suffix of the file's path after the watched prefix."""

    name: str
    file: str


class Death(NamedTuple):
    """Result of a run: the counted calls, the output, the exit code or minus the signal, and the seconds.

    If the run was killed at a call, that call is the last one and had no effect.
    """

    calls: list[Call]
    said: bytes
    code: int
    seconds: float

    @property
    def is_killed(self) -> bool:
        return self.code == -signal.SIGKILL


def why_not() -> str:
    """Return why a kill at a call cannot work here, or an empty string."""
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


def skip_unless_possible() -> None:
    """Skip the test if a child cannot be traced. The check runs in a separate process because it forks."""
    code = f"from {__name__} import why_not; print(why_not(), end='')"
    argv = [sys.executable, "-c", code]
    done = subprocess.run(argv, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=True)
    if done.stdout:
        pytest.skip(f"NOT TESTED: {done.stdout}")


def run(program: Callable[[int], None], watched: str, *, kill_at: int | None = None) -> Death:
    """Run `program(fd of the pipe)` in a fork, and kill it at the entry of its call number `kill_at`.

    The count begins at 1 and includes calls on files whose path begins with `watched`. With None, or a number past the
    last call, the program runs to its end.
    """
    pid, said, go = _fork(program, is_traced=True)
    try:
        if ptrace(PTRACE_SEIZE, pid, 0, _OPTIONS) < 0:
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
    """Run the program without tracing, and kill it `seconds` after its line number `lines`.

    The kill comes at any place, inside a call or between calls. The program never exits, so every run is killed.
    """
    pid, pipe, go = _fork(program, is_traced=False)
    try:
        began = time.monotonic()
        os.write(go, b"x")
        said = b""
        while said.count(b"\n") < lines and (more := os.read(pipe, SAID_BYTES_MAX)):
            said += more
        time.sleep(seconds)  # The random moment is the purpose of the test.
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        while more := os.read(pipe, SAID_BYTES_MAX):
            said += more
        return Death([], said, os.waitstatus_to_exitcode(status), time.monotonic() - began)
    finally:
        os.close(pipe)
        os.close(go)


def _fork(program: Callable[[int], None], *, is_traced: bool) -> tuple[int, int, int]:
    """Return the child's pid, the read end of its output, and the write end of the pipe that starts it."""
    said, saying = os.pipe()
    begin, go = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            os.close(said)
            os.close(go)
            signal.alarm(CHILD_SECONDS_MAX)
            if os.read(begin, 1):  # Empty if the parent failed.
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
    """Follow the child to its end, and kill it at the chosen call."""
    known = {number: (name, where) for name, (number, where) in _CALLS[platform.machine()].items()}
    info = CallInfo()
    deadline = time.monotonic() + CHILD_SECONDS_MAX + 10
    while True:
        pid, status = os.waitpid(-1, WAIT_ALL)
        if not os.WIFSTOPPED(status):
            # A thread, or the child: the kernel reports the child last.
            if pid == leader:
                return os.waitstatus_to_exitcode(status)
            continue
        assert time.monotonic() < deadline, "the child outlived its own alarm"
        event, number = status >> 16, os.WSTOPSIG(status)
        if event == _EVENT_SECCOMP:
            ptrace(PTRACE_GET_SYSCALL_INFO, pid, ctypes.sizeof(info), ctypes.addressof(info))
            name, where = known[info.number]
            file = _file(pid, info, where)
            if file.startswith(watched):
                calls.append(Call(name, file[len(watched) :]))
                if len(calls) == kill_at:
                    # The kernel skips a call if a fatal signal is pending at its entry. The signal goes to the whole
                    # process.
                    os.kill(leader, signal.SIGKILL)
                    continue
        # Pass signals on. A stop for a new thread, a fork or the filter has no signal.
        ptrace(_PTRACE_CONT, pid, 0, 0 if event else number)


def _file(pid: int, info: CallInfo, where: str | int) -> str:
    """Return the file of a call. The caller is stopped, so neither the fd nor the memory changes."""
    try:
        if where == "fd":
            return os.readlink(f"/proc/{pid}/fd/{info.arguments[0]}").removesuffix(" (deleted)")
        assert isinstance(where, int)
        with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
            # A path can end near the border of a mapping. Then the read is short.
            return os.fsdecode(os.pread(memory.fileno(), 1024, info.arguments[where]).partition(b"\0")[0])
    except OSError:
        return ""  # A bad fd or address, so the call will fail; or the alarm has killed the child.


def _install_filter() -> None:
    """Stop at these calls, in this thread and those that it starts."""
    numbers = [number for number, _ in _CALLS[platform.machine()].values()]
    program = [_Instruction(0x20, 0, 0, 0)]  # Load the number.
    for place, number in enumerate(numbers):
        # If equal, jump over the other comparisons and over the allow instruction after them.
        program.append(_Instruction(0x15, len(numbers) - place, 0, number))
    program += [_Instruction(0x06, 0, 0, _RET_ALLOW), _Instruction(0x06, 0, 0, _RET_TRACE)]
    wanted = _Filter(len(program), (_Instruction * len(program))(*program))
    for arguments in ((_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), (_PR_SET_SECCOMP, 2, ctypes.byref(wanted), 0, 0)):
        if _libc.prctl(*arguments) != 0:
            raise OSError(ctypes.get_errno(), f"prctl {arguments[0]}")


def ptrace(request: int, pid: int, address: int, data: int) -> int:
    return _libc.ptrace(request, pid, address, data)
