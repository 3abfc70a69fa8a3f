"""System calls of host, zygote and keeper, behind one module so that tests can inject faults.

Nearly every call that can fail for a reason outside this program goes through a name of this
module. So a test can make the n-th `fork` of the zygote fail, and can record a good run to learn
which calls there are (`fault_plan.py`). An injected fault is an `OSError` that the kernel could
have raised. This module takes no decisions. Most names are the kernel's, and a few combine calls
(`read_proc`, `above_stdio`).

The module is loaded into every keeper, and there is one keeper per live command. Therefore it
imports the C modules `_signal` (as `signals`) and `_socket` instead of their Python wrappers, and
does not import `typing`. These would load `enum` and `re`, and cost each keeper 130 kB of private
memory.
"""

from __future__ import annotations

import _socket
import errno
import fcntl
import os
import select
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    import ctypes
    import signal as signals
    from collections.abc import Callable, Iterable, Sequence
    from typing import Any
else:
    import _signal as signals

# Without __WALL, `waitpid` and `waitid` skip children that clone() made with another exit signal
# than SIGCHLD. A tree is only proven empty if those children count too. The os module does not
# define this flag.
WALL = 0x40000000
PR_SET_DUMPABLE = 4
PR_SET_NAME = 15
PR_SET_CHILD_SUBREAPER = 36
# Messages on a control socket are small, except the list of swept processes. That list is sent in
# pieces of at most this size.
MESSAGE_BYTES_MAX = 65536
# Errors that may disappear a moment later without any change on this side.
PASSING = (errno.ENOMEM, errno.ENOBUFS, errno.EINTR)
# The kernel takes 253 fds in one message (SCM_MAX_FD). Banksman needs a few of them.
PASSED_FDS_MAX = 240

# Resolution of process start times: ticks per second.
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")

# -- fds ------------------------------------------------------------------------------------------
pipe = os.pipe
socketpair = _socket.socketpair
open_fd = os.open
read = os.read
write = os.write
pread = os.pread
pwrite = os.pwrite
ftruncate = os.ftruncate
close_fd = os.close
set_blocking = os.set_blocking
listdir = os.listdir
ioctl = fcntl.ioctl
chown = os.chown
unlink = os.unlink
mkdir = os.mkdir
rmdir = os.rmdir
statvfs = os.statvfs


# /proc as it was when this process began. If a command mounts something over /proc, this process
# still sees the original. The zygote opens it, and its keepers inherit it.
proc_fd = -1


def open_proc() -> None:
    """Open /proc for the lifetime of this process."""
    global proc_fd  # noqa: PLW0603
    proc_fd = open_fd("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def _open_in_proc(path: str, flags: int) -> int:
    if proc_fd < 0:
        return open_fd(f"/proc/{path}", flags | os.O_RDONLY | os.O_CLOEXEC)
    return open_fd(path, flags | os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc_fd)


def read_proc(path: str, size: int) -> bytes:
    """Read up to `size` bytes of a file in /proc."""
    fd = _open_in_proc(path, 0)
    try:
        return read(fd, size)
    finally:
        close(fd)


def list_proc(path: str) -> list[str]:
    """List a folder in /proc."""
    fd = _open_in_proc(path, os.O_DIRECTORY)
    try:
        return listdir(fd)
    finally:
        close(fd)


def close(fd: int) -> None:
    """Close an fd. Errors are ignored, except EBADF.

    An error (a full or lost network disk) does not matter: the kernel has freed the fd all the
    same.
    """
    try:
        close_fd(fd)
    except OSError as exc:
        # A bug of the caller. The next time the number may belong to another file.
        if exc.errno == errno.EBADF:
            raise AssertionError("closed an fd that was closed before") from exc


def set_pipe_size(fd: int, size: int) -> int:
    """Set the size of a pipe and return the size that the kernel chose; 0 on macOS."""
    return fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, size) if hasattr(fcntl, "F_SETPIPE_SZ") else 0


def splice(pipe: int, file: int, size: int) -> int:
    """Move up to `size` bytes from a pipe to a file, at its position, without blocking.

    Return the number of bytes, 0 at the end of the pipe. The kernel moves the bytes and the
    position in one call: SIGKILL cannot separate them.
    """
    if hasattr(os, "splice"):
        return os.splice(pipe, file, size, flags=_SPLICE_F_NONBLOCK)
    return _call("splice", pipe, None, file, None, size, _SPLICE_F_NONBLOCK)


_SPLICE_F_NONBLOCK = 2


def position(file: int) -> int:
    """Return the position of a file."""
    return os.lseek(file, 0, os.SEEK_CUR)


def seek(file: int, to: int) -> None:
    """Set the position of a file."""
    os.lseek(file, to, os.SEEK_SET)


def dup(fd: int) -> int:
    """Duplicate an fd to a number above the standard streams, with close-on-exec."""
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)


def above_stdio(fd: int) -> int:
    """Return the same file under a number above the standard streams.

    If the program has closed its stdio, the kernel assigns 0, 1 and 2 again. The next print()
    anywhere in the program would then write into this file.
    """
    if fd > 2:
        return fd
    try:
        return dup(fd)
    finally:
        close(fd)


def open_pty() -> tuple[int, int]:
    """Open a new terminal and return `(host's fd, child's fd)`.

    It becomes the controlling terminal of no process. On Linux this avoids os.openpty: the fds of
    os.openpty are inheritable for a moment. A program that another thread starts in that moment
    would keep the terminal open.
    """
    if sys.platform != "linux":
        return os.openpty()
    flags = os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC
    ours = open_fd("/dev/ptmx", flags)
    try:
        _call("unlockpt", ours)
        return ours, open_fd(_ptsname(ours), flags)
    except OSError:
        close(ours)
        raise


def has_memory(pid: int) -> bool:
    """Whether a process still has its memory.

    False for a process that is exiting: its program is unknown then.
    """
    try:
        os.readlink(
            f"{pid}/exe" if proc_fd >= 0 else f"/proc/{pid}/exe",
            dir_fd=proc_fd if proc_fd >= 0 else None,
        )
    except FileNotFoundError:
        return False
    except OSError:
        return True  # The process belongs to another user, and the link is not readable.
    return True


# -- processes -----------------------------------------------------------------------------------
fork = os.fork
posix_spawn = os.posix_spawn
execve = os.execve
setsid = os.setsid
setpgid = os.setpgid
getpgid = os.getpgid
umask = os.umask
fchdir = os.fchdir
waitpid = os.waitpid
waitid = os.waitid
kill = os.kill
killpg = os.killpg
# Python builds for every Linux lack functions that the C library of their build machine lacked. The
# kernel has them all the same, so they are called by number.
_PIDFD_SEND_SIGNAL, _PIDFD_OPEN = 424, 434


def pidfd_open(pid: int) -> int:
    """Open a pidfd for a process."""
    if hasattr(os, "pidfd_open"):
        return os.pidfd_open(pid)
    return _call("syscall", _PIDFD_OPEN, pid, 0)


def pidfd_send_signal(fd: int, signum: int) -> None:
    """Send a signal to the process of a pidfd."""
    if hasattr(signals, "pidfd_send_signal"):
        signals.pidfd_send_signal(fd, signum)
    else:
        _call("syscall", _PIDFD_SEND_SIGNAL, fd, signum, None, 0)


def become_user(uid: int, gid: int, groups: Sequence[int]) -> None:
    """Change the real, effective and saved user of this process for good.

    The groups come first, because changing them needs the privileges of the current user.
    """
    os.setgroups(groups)
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)


def getxattr(path: str, name: str) -> bytes:
    """Return an extended attribute of a file. Linux only."""
    return os.getxattr(path, name)


def memfd_create(name: str) -> int:
    """Create an unnamed file in memory, or in /tmp where memfd_create is missing."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    return os.open("/tmp", os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)


def prctl(option: int, value: int | bytes) -> None:
    """Set an attribute of this process."""
    _call("prctl", option, value, 0, 0, 0)


def _ptsname(fd: int) -> bytes:
    import ctypes  # noqa: PLC0415

    name = ctypes.create_string_buffer(128)
    number = _libc().ptsname_r(fd, name, ctypes.c_size_t(len(name)))
    if number:
        raise OSError(number, os.strerror(number))
    return name.value


_library: ctypes.CDLL | None = None


def _libc() -> ctypes.CDLL:
    # Nearly all callers are the zygote and the keepers, so the host does not pay for ctypes. A
    # keeper inherits the loaded module.
    global _library  # noqa: PLW0603
    import ctypes  # noqa: PLC0415

    if _library is None:
        _library = ctypes.CDLL(None, use_errno=True)
    return _library


# Functions of the C library that were called. Without this table, each call would run an `import`
# and look the function up, and so write to more of the pages that the keepers share.
_functions: dict[str, Callable[..., int]] = {}


def _call(name: str, *arguments: int | bytes | None) -> int:
    """Call a function of the C library; a negative result raises OSError."""
    function = _functions.get(name)
    if function is None:
        function = _functions[name] = getattr(_libc(), name)
    result = function(*arguments)
    if result < 0:
        import ctypes  # noqa: PLC0415

        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


# -- signals -------------------------------------------------------------------------------------
# `si_code` of a signal that the kernel sent, such as Ctrl-C by a terminal.
SI_KERNEL = 0x80
# Size of one record of a signalfd: see signalfd(2).
_SIGNAL_RECORD_BYTES = 128


def signalfd(numbers: Iterable[int]) -> int:
    """Open an fd that becomes readable when one of these signals is pending. Block them first."""
    mask = sum(1 << (number - 1) for number in set(numbers))
    # sigset_t of the C library has 128 bytes, of which the kernel uses the first 8.
    data = mask.to_bytes(8, sys.byteorder) + bytes(120)
    # SFD_CLOEXEC and SFD_NONBLOCK have the values of these flags.
    return _call("signalfd", -1, data, os.O_CLOEXEC | os.O_NONBLOCK)


def read_signals(fd: int) -> list[tuple[int, int]]:
    """Return the number and the `si_code` of each pending signal of a signalfd."""
    try:
        data = read(fd, 16 * _SIGNAL_RECORD_BYTES)
    except BlockingIOError:
        return []
    return [
        (
            int.from_bytes(data[at : at + 4], sys.byteorder),
            int.from_bytes(data[at + 8 : at + 12], sys.byteorder, signed=True),
        )
        for at in range(0, len(data), _SIGNAL_RECORD_BYTES)
    ]


# -- poll and messages ---------------------------------------------------------------------------
def poll(poller: select.poll, timeout_ms: float | None) -> list[tuple[int, int]]:
    return poller.poll(timeout_ms)


def send(sock: _socket.socket, data: bytes) -> None:
    """Send one message without blocking."""
    # Without MSG_NOSIGNAL, a program that has restored the default of SIGPIPE would be killed when
    # its peer is gone.
    sock.send(data, _socket.MSG_NOSIGNAL | _socket.MSG_DONTWAIT)


def recv(sock: _socket.socket) -> bytes:
    """Return the next message, or b"" at the end of the stream. Never blocks."""
    try:
        return sock.recv(MESSAGE_BYTES_MAX, _socket.MSG_DONTWAIT)
    except ConnectionResetError:
        # The peer closed its end without reading all messages. The kernel reports that once, before
        # the messages that the peer sent last. After that report those messages can be read.
        return sock.recv(MESSAGE_BYTES_MAX, _socket.MSG_DONTWAIT)


def send_fds(sock: _socket.socket, data: bytes, fds: Sequence[int]) -> None:
    """Send one message with fds, without blocking."""
    rights = b"".join(fd.to_bytes(4, sys.byteorder) for fd in fds)
    ancillary = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, rights)]
    sock.sendmsg([data], ancillary, _socket.MSG_NOSIGNAL | _socket.MSG_DONTWAIT)


def accept(listener: _socket.socket) -> _socket.socket:
    """Accept one connection. Never blocks, if the listener does not."""
    # `accept` is a method of the wrapper in `socket` only. The type stubs do not know this one.
    raw: Any = listener
    fd: int = raw._accept()[0]
    return _socket.socket(fileno=fd)


def peer_uid(sock: _socket.socket) -> int:
    """Return the uid of the process that made the connection, as the kernel knows it."""
    # `struct ucred`: pid, uid, gid.
    found = sock.getsockopt(_socket.SOL_SOCKET, _socket.SO_PEERCRED, 12)
    return int.from_bytes(found[4:8], sys.byteorder)


def recv_fds(sock: _socket.socket) -> tuple[bytes, list[int]]:
    """Return the next message and its fds, or b"" at the end of the stream. Never blocks."""
    # Room for 253 fds, the kernel's maximum, so that no fd is lost.
    room = _socket.CMSG_SPACE(4 * (PASSED_FDS_MAX + 13))
    flags = _socket.MSG_CMSG_CLOEXEC | _socket.MSG_DONTWAIT
    try:
        data, ancillary, _flags, _address = sock.recvmsg(MESSAGE_BYTES_MAX, room, flags)
    except ConnectionResetError:
        # Once, before the last messages of the peer: see `recv`.
        data, ancillary, _flags, _address = sock.recvmsg(MESSAGE_BYTES_MAX, room, flags)
    fds: list[int] = []
    for level, kind, rights in ancillary:
        if level == _socket.SOL_SOCKET and kind == _socket.SCM_RIGHTS:
            fds.extend(
                int.from_bytes(rights[i : i + 4], sys.byteorder)
                for i in range(0, len(rights) - 3, 4)
            )
    return data, fds
