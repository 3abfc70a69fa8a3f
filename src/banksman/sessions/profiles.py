"""The agents that are known, one TOML file each: those that come with the package, and the user's own.

The user's are in `banksman/agents/` in the configuration folder (`$XDG_CONFIG_HOME`, else `~/.config`). One with the
name of ours is used instead of ours. `extends = "gemini"` begins with what our file of that name says; only ours can be
extended, so that what a file means is known from two files and cannot go round in a circle. A file of the user's that
is wrong is an error of that one agent, and of no other.

Files are read at each call: whoever changes one need not restart what is running. What is in one is in profile.py.
"""

from __future__ import annotations

import difflib
import errno
import functools
import os
import re
import stat
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any, cast

from banksman.core.dialects.unknown import UNKNOWN
from banksman.errors import BanksmanError, MachineError, UsageError
from banksman.folders import config_folder
from banksman.sessions.profile import Profile, parse

# A name is said in a shell and in a URL, and is a file's: it is one word, and no path.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
NAME_HINT = "letters, digits, '.', '_' and '-', at most 64, the first a letter or a digit"
# Ours have about 2 kB.
FILE_BYTES_MAX = 256 << 10
_NOT_FOR_US = (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG)


def names() -> list[str]:
    """All that are known, the user's among them, also those whose file is wrong."""
    return sorted({*ours(), *users()})


def ours() -> list[str]:
    """The agents that come with the package."""
    return sorted(_texts())


def users() -> dict[str, Path]:
    """The user's own files, by the name of the agent."""
    folder = users_folder()
    if folder is None:
        return {}
    try:
        found = os.listdir(folder)
    except OSError as exc:
        if exc.errno in _NOT_FOR_US:
            # Most users have none; and what we may not look into was not put there for us.
            return {}
        raise MachineError(f"cannot look into {folder}: {exc.strerror}", number=exc.errno) from exc
    # What begins with a dot is an editor's.
    return {
        name.removesuffix(".toml"): folder / name
        for name in sorted(found)
        if name.endswith(".toml") and not name.startswith(".")
    }


def users_folder() -> Path | None:
    """Where the user's own are, whether or not it is there; None: the user has no home."""
    try:
        return config_folder() / "agents"
    except UsageError:
        return None


def load_or_plain(agent: str) -> Profile:
    """Of an agent whose profile is gone, or wrong: its sessions can be read all the same."""
    try:
        return load(agent)
    except UsageError:
        return _ours(agent) if agent in _texts() else replace(_ours("claude"), name=agent, dialect=UNKNOWN)


def load(name: str) -> Profile:
    """The profile of an agent that is known: the user's own, or ours."""
    # Membership, and not the file system, decides: a name is no path.
    own = users().get(name)
    if own is not None:
        return load_file(own)
    if name not in _texts():
        near = difflib.get_close_matches(name, names(), n=1)
        hint = f"{f'do you mean {near[0]}? ' if near else ''}known are: {', '.join(names())}"
        raise UsageError(f"there is no agent {name!r:.80}", hint=hint, agent=name)
    return _ours(name)


def load_file(path: str | os.PathLike[str]) -> Profile:
    """A profile of the caller's own; its name is the file's."""
    file = Path(path)
    name = file.name.removesuffix(".toml")
    if not _NAME.fullmatch(name):
        raise UsageError(f"{str(file)!r} cannot be the profile of an agent: it would be its name", hint=NAME_HINT)
    try:
        text = _read(file).decode("utf-8")
    except OSError as exc:
        raise UsageError(f"cannot read the profile {file}: {exc.strerror}", hint="the path of a TOML file") from exc
    except UnicodeDecodeError as exc:
        raise UsageError(f"the profile {file} is not UTF-8: {exc.reason}", hint="TOML is always UTF-8") from exc
    return parse_text(text, name=name, said_as=str(file), source=str(file))


def parse_text(text: str, *, name: str, said_as: str, source: str | None = None) -> Profile:
    """`said_as` is what an error calls it. `source`: the file that it is from; None: it is ours."""
    try:
        data = _tables(text, said_as)
        return parse(_extended(data, name, said_as), name=name, said_as=said_as, source=source)
    except BanksmanError as exc:
        exc.ids.setdefault("agent", name)
        raise


@functools.cache
def _ours(name: str) -> Profile:
    """Read once, like the texts: a host that takes over hundreds of sessions asks for one again and again."""
    return parse_text(_texts()[name], name=name, said_as=f"the profile {name!r}")


@functools.cache
def _texts() -> Mapping[str, str]:
    """What comes with the package does not change while we run, and is read once: also when there are no fds left."""
    folder = resources.files("banksman") / "profiles"
    files = [entry for entry in folder.iterdir() if entry.name.endswith(".toml")]
    return {file.name.removesuffix(".toml"): file.read_text(encoding="utf-8") for file in files}


def _read(file: Path) -> bytes:
    # Opened without waiting: a pipe by that name would else keep the whole loop until somebody writes into it.
    fd = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        mode = os.fstat(fd).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "it is no plain file")
        # Of a plain file one read gives all that is asked for, as far as it goes.
        data = os.read(fd, FILE_BYTES_MAX + 1)
    finally:
        os.close(fd)
    if len(data) > FILE_BYTES_MAX:
        raise OSError(errno.EFBIG, f"it has more than {FILE_BYTES_MAX} bytes")
    return data


def _tables(text: str, said_as: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as exc:
        raise UsageError(f"{said_as} is not TOML: {exc}", hint="see https://toml.io") from exc


def _extended(data: dict[str, Any], name: str, said_as: str) -> dict[str, Any]:
    """With what it extends under it, table by table and key by key."""
    if "extends" not in data:
        return data
    base = data["extends"]
    if not isinstance(base, str) or base not in _texts():
        hint = f"one of those that come with the package: {', '.join(ours())}"
        raise UsageError(f"{said_as}: extends cannot be {base!r:.60}", hint=hint)
    under = _tables(_texts()[base], f"the profile {base!r}")
    assert "extends" not in under, f"the profile {base!r} of the package extends another"
    if base != name:
        under.pop("title")  # It is another agent, and is not to be told by that one's title.
    merged = {**under, **data}
    for key, value in under.items():
        if isinstance(value, dict) and isinstance(data.get(key), dict):
            merged[key] = {**cast(dict[str, Any], value), **data[key]}
    return merged
