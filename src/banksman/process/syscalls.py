"""The one seam through which host, zygote and keeper make system calls.

Every call that can fail for a reason outside this program goes through a name of this module, so that a test can make
the n-th `fork` of the zygote fail, and can record a good run to learn which calls there are. Nothing here decides
anything: the names are the kernel's own, and a fault is whatever `OSError` the kernel could have given.

The module is loaded into every keeper, of which there is one per live command. It therefore imports the C modules
`_signal` (as `signals`) and `_socket` and not their Python faces, and `typing` not at all: those bring `enum` and `re`
and cost each keeper 130 kB of private memory.
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
    from collections.abc import Sequence
else:
    import _signal as signals

# `waitpid` and `waitid` skip children made by clone() with another exit signal than SIGCHLD unless told __WALL, which
# the os module does not name. A tree is only proven empty when those are counted too.
WALL = 0x40000000
PR_SET_DUMPABLE = 4
PR_SET_NAME = 15
PR_SET_CHILD_SUBREAPER = 36
# A message on a control socket is small, save the list of what was swept, which is sent in pieces of this size at most.
MESSAGE_BYTES_MAX = 65536
# A call that failed like this may work a moment later, with nothing changed by us.
PASSING = (errno.ENOMEM, errno.ENOBUFS, errno.EINTR)
# The kernel takes 253 fds in one message (SCM_MAX_FD); a few of them are ours.
PASSED_FDS_MAX = 240

# In how many steps of a second the kernel tells when a process was born.
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")

# -- fds -------------------------------------------------------------------------------------------------------------
pipe = os.pipe
socketpair = _socket.socketpair
open_fd = os.open
read = os.read
write = os.write
close_fd = os.close
set_blocking = os.set_blocking
listdir = os.listdir
ioctl = fcntl.ioctl
chown = os.chown


# /proc as it was when this process began: a command that mounts something over it does not blind us. Opened by the
# zygote, kept by its keepers.
proc_fd = -1


def open_proc() -> None:
    global proc_fd  # noqa: PLW0603
    proc_fd = open_fd("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def _open_in_proc(path: str, flags: int) -> int:
    if proc_fd < 0:
        return open_fd(f"/proc/{path}", flags | os.O_RDONLY | os.O_CLOEXEC)
    return open_fd(path, flags | os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc_fd)


def read_proc(path: str, size: int) -> bytes:
    fd = _open_in_proc(path, 0)
    try:
        return read(fd, size)
    finally:
        close(fd)


def list_proc(path: str) -> list[str]:
    fd = _open_in_proc(path, os.O_DIRECTORY)
    try:
        return listdir(fd)
    finally:
        close(fd)


def close(fd: int) -> None:
    """Give an fd back. An error (a full or lost network disk) changes nothing: the kernel has freed it all the same."""
    try:
        close_fd(fd)
    except OSError as exc:
        if exc.errno == errno.EBADF:
            raise AssertionError("an fd that is not ours any more was closed again") from exc


def set_pipe_size(fd: int, size: int) -> int:
    """The size that the kernel made of it. Where there is no such call (macOS) it stays what it is."""
    return fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, size) if hasattr(fcntl, "F_SETPIPE_SZ") else 0


def dup(fd: int) -> int:
    """A copy above the standard streams, closed on exec."""
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)


def above_stdio(fd: int) -> int:
    """The same file, not under the number of a standard stream.

    Where the program has closed its own stdio the kernel hands out 0, 1 and 2 again, and the next print() of anybody
    would write into our pipe.
    """
    if fd > 2:
        return fd
    try:
        return dup(fd)
    finally:
        close(fd)


def open_pty() -> tuple[int, int]:
    """Both ends of a new terminal, `(ours, the child's)`. Neither becomes anybody's controlling terminal by this.

    Not os.openpty, where there is another way: its fds are inheritable for a moment, and a program that another thread
    starts in that moment would keep the terminal open.
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
    """False for one that is ending: what it ran is not known any more."""
    try:
        os.readlink(f"{pid}/exe" if proc_fd >= 0 else f"/proc/{pid}/exe", dir_fd=proc_fd if proc_fd >= 0 else None)
    except FileNotFoundError:
        return False
    except OSError:
        return True  # Somebody else's, whose link we may not read.
    return True


# -- processes -------------------------------------------------------------------------------------------------------
fork = os.fork
posix_spawn = os.posix_spawn
execve = os.execve
setsid = os.setsid
umask = os.umask
fchdir = os.fchdir
waitpid = os.waitpid
waitid = os.waitid
kill = os.kill
killpg = os.killpg
# Pythons that are built for every Linux lack what their builders' C library lacked. The kernel has it all the same.
_PIDFD_SEND_SIGNAL, _PIDFD_OPEN = 424, 434


def pidfd_open(pid: int) -> int:
    if hasattr(os, "pidfd_open"):
        return os.pidfd_open(pid)
    return _call("syscall", _PIDFD_OPEN, pid, 0)


def pidfd_send_signal(fd: int, signum: int) -> None:
    if hasattr(signals, "pidfd_send_signal"):
        signals.pidfd_send_signal(fd, signum)
    else:
        _call("syscall", _PIDFD_SEND_SIGNAL, fd, signum, None, 0)


def become_user(uid: int, gid: int, groups: Sequence[int]) -> None:
    """For good: real, effective and saved. The groups first, which is a privilege of the user we are until then."""
    os.setgroups(groups)
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)


def memfd_create(name: str) -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    return os.open("/tmp", os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)


def prctl(option: int, value: int | bytes) -> None:
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
    # Nearly only zygote and keeper come here, so the host does not pay for ctypes; and a keeper finds it loaded.
    global _library  # noqa: PLW0603
    import ctypes  # noqa: PLC0415

    if _library is None:
        _library = ctypes.CDLL(None, use_errno=True)
    return _library


def _call(name: str, *arguments: int | bytes | None) -> int:
    import ctypes  # noqa: PLC0415

    result: int = getattr(_libc(), name)(*arguments)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


# -- waiting and messages --------------------------------------------------------------------------------------------
def poll(poller: select.poll, timeout_ms: float | None) -> list[tuple[int, int]]:
    return poller.poll(timeout_ms)


def send(sock: _socket.socket, data: bytes) -> None:
    # Without MSG_NOSIGNAL a program that has restored SIGPIPE's default would die of its peer's death.
    sock.send(data, _socket.MSG_NOSIGNAL | _socket.MSG_DONTWAIT)


def recv(sock: _socket.socket) -> bytes:
    """The next message, or nothing at its end."""
    try:
        return sock.recv(MESSAGE_BYTES_MAX, _socket.MSG_DONTWAIT)
    except ConnectionResetError:
        # The peer closed with messages of ours unread. The kernel says so once, ahead of what the peer had still sent;
        # after that its last words are there to be read.
        return sock.recv(MESSAGE_BYTES_MAX, _socket.MSG_DONTWAIT)


def send_fds(sock: _socket.socket, data: bytes, fds: Sequence[int]) -> None:
    rights = b"".join(fd.to_bytes(4, sys.byteorder) for fd in fds)
    ancillary = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, rights)]
    sock.sendmsg([data], ancillary, _socket.MSG_NOSIGNAL | _socket.MSG_DONTWAIT)


def recv_fds(sock: _socket.socket) -> tuple[bytes, list[int]]:
    room = _socket.CMSG_SPACE(4 * (PASSED_FDS_MAX + 13))
    data, ancillary, _flags, _address = sock.recvmsg(
        MESSAGE_BYTES_MAX, room, _socket.MSG_CMSG_CLOEXEC | _socket.MSG_DONTWAIT
    )
    fds: list[int] = []
    for level, kind, rights in ancillary:
        if level == _socket.SOL_SOCKET and kind == _socket.SCM_RIGHTS:
            fds.extend(int.from_bytes(rights[i : i + 4], sys.byteorder) for i in range(0, len(rights) - 3, 4))
    return data, fds
