"""Another user: who it is, whether we may become them, and who does it for us if not.

Whoever may change user and groups (root, or the capabilities for it) does so in the child, just before the program.
Whoever may not needs a *helper*, a program with more rights such as `sudo -n`: it is given the command to run, and
later `kill` and the processes that are not ours to signal. A helper is configured by whoever made the host, never by
a call.
"""

from __future__ import annotations

import os
import pwd
import sys
from collections.abc import Sequence

from banksman.errors import UsageError, no_room
from banksman.process import syscalls

# uid, gid, groups, and the folder by its whole path: the user must be able to enter it by themselves.
Become = tuple[int, int, tuple[int, ...], bytes]
# Bits of the kernel's sets of capabilities.
_SETGID, _SETUID = 1 << 6, 1 << 7


def find(user: object) -> pwd.struct_passwd:
    hint = "a user of this machine, by name or by number"
    try:
        if isinstance(user, str) and user:
            return pwd.getpwnam(user)
        if isinstance(user, int) and not isinstance(user, bool):
            return pwd.getpwuid(user)
    except (KeyError, ValueError, OverflowError):
        raise UsageError(f"there is no user {user!r:.100}", hint=hint) from None
    raise UsageError(f"user cannot be {user!r:.60}", hint=hint)


def is_us(user: pwd.struct_passwd) -> bool:
    """Nothing is left to become."""
    return os.getuid() == os.geteuid() == user.pw_uid


def may_become_others() -> bool:
    if sys.platform != "linux":
        return os.geteuid() == 0
    try:
        # Of the thread: capabilities are each thread's own.
        status = syscalls.read_proc("thread-self/status", 8192)
    except OSError as exc:
        raise no_room("/proc", exc) from exc
    effective = next(int(line.split()[1], 16) for line in status.splitlines() if line.startswith(b"CapEff:"))
    return effective & (_SETGID | _SETUID) == _SETGID | _SETUID


def become(user: pwd.struct_passwd, folder: bytes) -> Become:
    """What a child needs to know. The groups are looked up here: it must not ask a directory service."""
    groups = tuple(os.getgrouplist(user.pw_name, user.pw_gid))
    return user.pw_uid, user.pw_gid, groups, os.path.abspath(folder)


def variables(user: pwd.struct_passwd) -> dict[bytes, bytes | None]:
    name = os.fsencode(user.pw_name)
    return {b"HOME": os.fsencode(user.pw_dir), b"USER": name, b"LOGNAME": name}


def by_helper(user: pwd.struct_passwd, words: tuple[bytes, ...], helper: Sequence[str]) -> tuple[bytes, ...]:
    if not helper:
        raise UsageError(
            f"cannot run a command as {user.pw_name!r}: only root may, and this host has no helper for it",
            hint='Host(user_helper=("sudo", "-n")), and a rule for it in sudoers',
        )
    return *(os.fsencode(word) for word in helper), b"-u", os.fsencode(user.pw_name), b"--", *words


def check_helper(helper: object) -> tuple[str, ...]:
    hint = 'the words that a command of another user is put after, such as ("sudo", "-n")'
    if helper is None:
        return ()
    if isinstance(helper, str | bytes) or not isinstance(helper, Sequence) or not helper:
        raise UsageError(f"user_helper cannot be {helper!r:.60}", hint=hint)
    words: list[str] = []
    for word in helper:  # pyright: ignore[reportUnknownVariableType]
        if not isinstance(word, str) or not word or "\0" in word:
            raise UsageError(f"user_helper cannot hold {word!r:.60}", hint=hint)
        words.append(word)
    return tuple(words)
