"""The agents that are known: one TOML profile each, from the package or from the user. And which of them are installed.

The user's profiles are in `banksman/agents/` in the configuration folder (`$XDG_CONFIG_HOME`, else `~/.config`). A
user's profile replaces the package's profile of the same name. `extends = "gemini"` starts from the package's profile
of that name. Only the package's profiles can be extended, so two files say all there is and no circle is possible. A
user's file that is wrong is an error of that one agent.

Files are read at each call: a change needs no restart. The content of a profile is in profile.py. Nothing here starts a
program.
"""

from __future__ import annotations

import difflib
import errno
import functools
import os
import re
import shutil
import stat
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
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
    return sorted({*packaged(), *user_files()})


def packaged() -> list[str]:
    """The agents that come with the package."""
    return sorted(_texts())


def user_files() -> dict[str, Path]:
    """The user's own files, by the name of the agent."""
    folder = user_folder()
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


def user_folder() -> Path | None:
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
    own = user_files().get(name)
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
        hint = f"one of those that come with the package: {', '.join(packaged())}"
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


# -- what is installed -----------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class InstalledAgent:
    """`profile` None: its file is wrong, and `error` says how. `path`: where its program is, None: not found. `source`:
    the user's file that it is from; None: it comes with the package. `overrides`: one of ours has that name too."""

    name: str
    profile: Profile | None
    error: str | None
    path: str | None
    source: str | None
    overrides: bool

    def facts(self) -> dict[str, Any]:
        """All of it in words and lists, as clients of the server and of the command line get it."""
        profile = self.profile
        known: dict[str, Any] = {"command": [], "dialect": "", "capabilities": []}
        if profile is not None:
            known = {
                "title": profile.title,
                "command": list(profile.command),
                "dialect": profile.dialect.name,
                "capabilities": sorted(profile.capabilities),
                "install": profile.install,
                "website": profile.website,
                "repairs": profile.repairs(),
                "note": profile.note,
            }
        where = {"source": self.source, "overrides": self.overrides, "error": self.error}
        return {"name": self.name, "found": self.path is not None, "path": self.path, **known, **where}


def find_agents(only: str | None = None) -> list[InstalledAgent]:
    """All of them, by name, or one. A file that is wrong is told in its place, and hides no other."""
    files, shipped = user_files(), packaged()
    if only is None:
        wanted = sorted({*files, *shipped})
    elif only in files:
        wanted = [only]
    else:
        wanted = [load(only).name]  # Or the error that names those that are known.
    found: list[InstalledAgent] = []
    for name in wanted:
        profile, error = _load(name)
        found.append(
            InstalledAgent(
                name=name,
                profile=profile,
                error=error,
                path=None if profile is None else _path(profile),
                source=str(files[name]) if name in files else None,
                overrides=name in files and name in shipped,
            )
        )
    return found


def _load(name: str) -> tuple[Profile | None, str | None]:
    try:
        return load(name), None
    except UsageError as exc:
        return None, str(exc)


def _path(profile: Profile) -> str | None:
    if not profile.command:
        return None
    path = shutil.which(profile.command[0])
    # A command may name a program by a path, and that of a folder is told as whole as that of PATH.
    return None if path is None else os.path.abspath(path)
