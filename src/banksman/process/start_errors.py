"""Errors for a start that failed in the keeper: `start_error` translates the step that failed.

`process.py` and `guard` use this, each after a FAILED message of its keeper.
"""

from __future__ import annotations

import errno
import os

from banksman.errors import (
    BanksmanError,
    NotOwner,
    ProgramNotExecutable,
    UsageError,
    no_room,
)
from banksman.process.attributes import user_name


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
    if step == "cgroup":
        hint = "run `banksman doctor`, which checks the control groups"
        return UsageError(f"cannot make the control group: {text}", hint=hint)
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
