"""Check the words and the folder of a command, and find its program as the child would.

`launch.py` and `guard` use this. It imports little, because `guard` has to start fast.
"""

from __future__ import annotations

import os
import stat

from banksman.errors import ProgramNotExecutable, ProgramNotFound, UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any


def argv_words(argv: Any) -> tuple[bytes, ...]:
    """Return the words as the kernel takes them."""
    if isinstance(argv, str | bytes):
        raise UsageError(
            f"argv must be a list of words, not the text {argv!r}",
            hint='pass a list; to use a shell, pass ["sh", "-c", "…"]',
        )
    try:
        words = tuple(os.fsencode(word) for word in argv)
    except TypeError as exc:
        raise UsageError(
            f"argv must be a list of words: {exc}", hint="write numbers as str(…)"
        ) from exc
    except UnicodeEncodeError as exc:
        hint = "see sys.getfilesystemencoding(), or pass bytes"
        raise UsageError(f"argv holds text that cannot be encoded: {exc}", hint=hint) from exc
    if not words:
        raise UsageError("argv is empty", hint="pass the program as its first word")
    for word in words:
        if b"\0" in word:
            hint = "remove the NUL; no argument of a program can contain it"
            raise UsageError(f"argv holds a NUL: {word!r}", hint=hint)
    return words


def working_folder(cwd: Any) -> bytes:
    """Return the folder of the child, after a check that it exists. `cwd`: None is this one."""
    if cwd is None:
        return b"."
    try:
        folder = os.fsencode(cwd)
        mode = os.stat(folder).st_mode
    except (TypeError, ValueError) as exc:
        hint = "pass the path of an existing folder"
        raise UsageError(f"cwd cannot be {cwd!r}", hint=hint) from exc
    except OSError as exc:
        hint = "pass an existing folder as cwd"
        raise UsageError(f"cannot start in {cwd!s}: {exc.strerror}", hint=hint) from exc
    if not stat.S_ISDIR(mode):
        hint = "pass an existing folder as cwd"
        raise UsageError(f"cannot start in {cwd!s}: it is not a folder", hint=hint)
    return folder


def resolve_program(word: bytes, folder: bytes, env: Mapping[bytes, bytes]) -> bytes:
    """Find the program as the child would: by the child's PATH, relative to the child's folder."""
    shown = os.fsdecode(word)
    if b"/" in word:
        candidates = [word]
    elif word:
        places = env.get(b"PATH", os.fsencode(os.defpath)).split(b":")
        # Not os.path.join: PATH is long, and this runs at every start.
        candidates = [(place.rstrip(b"/") if place else b".") + b"/" + word for place in places]
    else:
        hint = "pass the program as the first word of argv"
        raise ProgramNotFound("cannot run the program: its name is empty", hint=hint)
    reason = hint = ""
    for candidate in candidates:
        # If the candidate is absolute, join() ignores the folder.
        path = candidate if folder == b"." else os.path.join(folder, candidate)
        try:
            mode = os.stat(path).st_mode
        except ValueError as exc:
            hint = "pass the program as the first word of argv"
            raise UsageError(f"cannot run {shown!r}: it is not a path", hint=hint) from exc
        except OSError:
            continue
        if not stat.S_ISREG(mode):
            kind = "a folder" if stat.S_ISDIR(mode) else "not a regular file"
            hint = hint if reason else "pass the path of a program"
            reason = reason or f"{_shown(folder, candidate)} is {kind}"
        elif not os.access(path, os.X_OK):
            hint = hint if reason else "run chmod +x on it, or put its interpreter before it"
            reason = reason or f"{_shown(folder, candidate)} is not executable"
        else:
            # A relative path means a file in the child's folder. If the child starts elsewhere than
            # this process, the path is made absolute, because it would be wrong there.
            return (
                candidate if folder == b"." or os.path.isabs(candidate) else os.path.abspath(path)
            )
    if reason:
        raise ProgramNotExecutable(f"cannot run {shown!r}: {reason}", hint=hint)
    where = "at that path" if b"/" in word else "on PATH"
    if b"/" not in word:
        hint = "install it, or pass its full path"
    elif os.path.isabs(word):
        hint = "install it, or correct the path"
    else:
        hint = "pass its full path, or a path relative to cwd"
    raise ProgramNotFound(f"there is no program {shown!r} {where}", hint=hint)


def _shown(folder: bytes, candidate: bytes) -> str:
    """Return the path of a candidate for people, without repeated `./`."""
    if folder == b".":
        return os.fsdecode(candidate)
    return os.fsdecode(os.path.join(folder, candidate.removeprefix(b"./")))
