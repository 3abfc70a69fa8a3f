"""Request to start a child: an encoded order for its keeper, and fds, until a zygote takes them.

The zygote forks a keeper, the parent process of the child, and the keeper carries out the order
(`keeper/spare.py`). A start can fail at many steps, on both sides of the socket. This module has
the host's side of it:
- `SpawnRequest` owns the fds that the keeper is to get, and sends them with the order. A busy
  zygote, or a kernel that has no room, delays the request.
- `start_error` translates the step that failed in the keeper into an error for the caller.
"""

from __future__ import annotations

import _socket
import asyncio
import errno
import marshal
import os
from collections.abc import Callable

from banksman.errors import (
    BanksmanError,
    NotOwner,
    ProgramNotExecutable,
    UsageError,
    no_room,
)
from banksman.process import syscalls
from banksman.process.attributes import user_name
from banksman.process.keeper import messages
from banksman.process.launch import Launch
from banksman.process.lease_page import LeasePage
from banksman.process.stdio import TAKE_TERMINAL, ChildStreams
from banksman.process.zygote_client import ZygoteHandle, spawner

RETRY_SECONDS = 0.005


class SpawnRequest:
    """Order and fds of one start.

    The caller holds `spawner.fork_lock` around `open`, `send` and `close`. No fork of the program
    may happen between the creation of an fd and its registration, or between its removal and its
    close. The forked child would keep a copy of the fd open.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, fingerprint: object, grace: float) -> None:
        """Prepare a request without fds. `fingerprint`: attributes that the zygote must have."""
        self._loop = loop
        self._fingerprint = fingerprint
        self._grace = grace
        # The fds for the keeper, in the order that it expects.
        self._fds: list[int] = []
        self._order: bytes | None = None
        self._busy_fd = -1

    def open(
        self,
        launch: Launch,
        control: _socket.socket,
        streams: ChildStreams,
        lease: LeasePage | None,
        *,
        linger: float,
        deadline: float | None,
        has_terminal: bool,
    ) -> None:
        """Collect the fds for the keeper and encode the order.

        `control`: the keeper's end of the control socket. This request closes it.
        """
        fds = self._fds
        order = {
            "grace": self._grace,
            "linger": linger,
            "deadline": deadline,
            "terminal": TAKE_TERMINAL if has_terminal else None,
            "has_lease": lease is not None,
            "path": launch.path,
            "argv": launch.argv,
            "env": launch.env,
            "umask": launch.inherited.umask,
            "limits": launch.limits,
            "nofile": launch.inherited.nofile,
            "targets": [*(target for _fd, target in streams.theirs), *launch.pass_fds],
            "user": launch.user,
            "ender": launch.ender,
            "is_agents": launch.is_agents,
        }
        # Each fd enters the list as soon as it exists, so that `close` finds it if a later step
        # fails.
        fds.append(control.detach())
        fds.append(
            syscalls.above_stdio(
                syscalls.open_fd(launch.cwd, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            )
        )
        if lease is not None:
            fds.append(lease.copy_fd())
        fds.extend(fd for fd, _target in streams.theirs)
        streams.theirs.clear()
        fds.extend(syscalls.dup(fd) for fd in launch.pass_fds)
        self._order = marshal.dumps(order)
        if len(self._order) > messages.ORDER_BYTES_MAX:
            fds.append(_write_order(self._order))
            self._order = None

    def send(self, retry: Callable[[], None]) -> ZygoteHandle | None:
        """Send the order and the fds, and return the zygote that has taken them.

        None if there is no room now. Then the loop calls `retry` when sending may succeed.
        """
        try:
            return spawner.spawn(self._order, self._fds, self._grace, self._fingerprint)
        except BlockingIOError:
            # The queue of the zygote is full. Its socket is shared with other loops and other
            # starts of this loop, and a selector has one writer per fd. Hence a separate copy of
            # the fd to wait on.
            self._busy_fd = syscalls.dup(spawner.current(self._fingerprint).fileno())
            self._loop.add_writer(self._busy_fd, retry)
        except OSError as exc:
            if exc.errno != errno.ETOOMANYREFS:
                raise
            # ETOOMANYREFS: a user without root rights may have only a limited number of fds in
            # flight between processes. The kernel does not tell when there is room again, so this
            # start retries. The start timer bounds the retries.
            self._loop.call_later(RETRY_SECONDS, retry)
        return None

    def stop_waiting(self) -> None:
        """Stop waiting for the zygote's socket."""
        if self._busy_fd >= 0:
            self._loop.remove_writer(self._busy_fd)
            self._close_busy_fd()

    def close(self) -> None:
        """Stop waiting, and close the fds: the keeper has its copies, or none is needed."""
        self.stop_waiting()
        self.forget()

    def forget(self) -> None:
        """Close the fds without touching the loop."""
        self._order = None
        self._close_busy_fd()
        while self._fds:
            syscalls.close(self._fds.pop())

    def _close_busy_fd(self) -> None:
        if self._busy_fd >= 0:
            fd, self._busy_fd = self._busy_fd, -1
            syscalls.close(fd)


def _write_order(data: bytes) -> int:
    """Write the order to a memory file and return its fd.

    A file takes any size. A message on a socket would be refused as too long.
    """
    fd = syscalls.above_stdio(syscalls.memfd_create("banksman-order"))
    try:
        written = 0
        while written < len(data):
            written += syscalls.write(fd, data[written:] if written else data)
    except OSError:
        syscalls.close(fd)
        raise
    return fd


def start_error(
    step: str, number: int, *, cwd: bytes = b".", uid: int | None = None
) -> BanksmanError:
    """Translate a failed step of the keeper into an error. Its cause is the OSError of that step.

    `cwd`: the child's folder. `uid`: the user of the child; None is the user of this process.
    """
    error = _explain(step, number, os.strerror(number), cwd, uid)
    error.__cause__ = OSError(number, os.strerror(number))
    return error


def _explain(step: str, number: int, text: str, cwd: bytes, uid: int | None) -> BanksmanError:
    if step == "exec" and number in (
        errno.ENOEXEC,
        errno.EACCES,
        errno.ENOENT,
        errno.ENOTDIR,
        errno.ELOOP,
    ):
        hint = "check the interpreter in the script's first line (#!), or the binary's architecture"
        return ProgramNotExecutable(f"cannot run the program: {text}", hint=hint)
    if number == errno.E2BIG:
        message = "cannot start the command: argv and env together exceed the kernel's limit"
        return UsageError(message, hint="pass long data by stdin")
    if step == "limits":
        hint = "pass no hard limit above the current one; only root may raise it"
        return UsageError(f"cannot set the limits: {text}", hint=hint)
    if step == "cwd":
        folder = "the current folder" if cwd == b"." else os.fsdecode(cwd)
        hint = f"pass a cwd that user {user_name(uid)} may enter"
        return UsageError(f"cannot start in {folder}: {text}", hint=hint)
    if step == "lease":
        hint = "use the session's new owner; check whether this host was overloaded or stopped"
        return NotOwner("cannot start the command: the host's lease has expired", hint=hint)
    if step == "user":
        hint = "run this process with the right to change user and groups"
        return UsageError(f"cannot change to that user: {text}", hint=hint)
    return no_room(step, OSError(number, text))
