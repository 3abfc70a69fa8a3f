"""Agent profiles of the package and of the user, and the search for installed agents.

Each agent has one TOML profile. The user's profiles are in `banksman/agents/` in the configuration
folder (`$XDG_CONFIG_HOME`, else `~/.config`). A user's profile replaces the package's profile of
the same name. `extends = "gemini"` starts from the package's profile of that name. Only the
package's profiles can be extended. So at most two files define an agent, and a cycle is impossible.
A wrong user file is an error of that one agent only.

Files are read at each call, so a change needs no restart. The content of a profile is described in
profile.py. This module starts no program.
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
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any, cast

from banksman.core.dialects.log_dialect import UNKNOWN
from banksman.errors import BanksmanError, MachineError, UsageError
from banksman.folders import config_folder
from banksman.sessions.profile import Profile, parse

# An agent's name is used in shells, URLs and file names. So it is a single word and not a path.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
NAME_HINT = "use at most 64 letters, digits, '.', '_' and '-', the first a letter or a digit"
# The package's profiles have about 2 kB each.
FILE_BYTES_MAX = 256 << 10
_NOT_FOR_US = (
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EACCES,
    errno.EPERM,
    errno.ELOOP,
    errno.ENAMETOOLONG,
)


def names() -> list[str]:
    """Return the names of all known agents, including agents whose file is wrong."""
    return sorted({*packaged(), *user_files()})


def packaged() -> list[str]:
    """Return the names of the agents that come with the package."""
    return sorted(_texts())


def user_files() -> dict[str, Path]:
    """Return the user's profile files by the name of the agent."""
    folder = user_folder()
    if folder is None:
        return {}
    try:
        found = os.listdir(folder)
    except OSError as exc:
        if exc.errno in _NOT_FOR_US:
            # Most users have no such folder. A folder without read permission was not created for
            # this program.
            return {}
        raise MachineError(f"cannot list {folder}: {exc.strerror}", number=exc.errno) from exc
    # Editors create files whose names begin with a dot.
    return {
        name.removesuffix(".toml"): folder / name
        for name in sorted(found)
        if name.endswith(".toml") and not name.startswith(".")
    }


def user_folder() -> Path | None:
    """Return the folder of the user's profiles, even if it does not exist; None without a home."""
    try:
        return config_folder() / "agents"
    except UsageError:
        return None


def load_or_plain(agent: str) -> Profile:
    """Return the profile of an agent, or a substitute if the profile is missing or wrong.

    The substitute keeps the sessions of such an agent readable.
    """
    try:
        return load(agent, is_recorded=True)
    except UsageError:
        return (
            _ours(agent)
            if agent in _texts()
            else replace(_ours("claude"), name=agent, dialect=UNKNOWN)
        )


def load(name: str, *, is_recorded: bool = False) -> Profile:
    """Return the profile of a known agent: the user's file, or else the package's.

    `is_recorded`: for a session that was opened before, see `profile.parse`.
    """
    # The lookup uses the list of known names and never opens a path built from `name`. So a name
    # cannot be used as a path.
    own = user_files().get(name)
    if own is not None:
        return load_file(own, is_recorded=is_recorded)
    if name not in _texts():
        near = difflib.get_close_matches(name, names(), n=1)
        hint = f"{f'do you mean {near[0]}? ' if near else ''}known agents: {', '.join(names())}"
        raise UsageError(f"there is no agent {name!r:.80}", hint=hint, agent=name)
    return _ours(name)


def load_file(path: str | os.PathLike[str], *, is_recorded: bool = False) -> Profile:
    """Load a profile from a file. The file's name without `.toml` is the agent's name."""
    file = Path(path)
    name = file.name.removesuffix(".toml")
    if not _NAME.fullmatch(name):
        message = f"cannot use {str(file)!r} as a profile: its name is not a valid agent name"
        raise UsageError(message, hint=NAME_HINT)
    try:
        text = _read(file).decode("utf-8")
    except OSError as exc:
        message = f"cannot read the profile {file}: {exc.strerror}"
        raise UsageError(message, hint="pass the path of a TOML file") from exc
    except UnicodeDecodeError as exc:
        message = f"cannot read the profile {file}: not UTF-8: {exc.reason}"
        raise UsageError(message, hint="save it as UTF-8") from exc
    said_as = str(file)
    return parse_text(text, name=name, said_as=said_as, source=said_as, is_recorded=is_recorded)


def parse_text(
    text: str, *, name: str, said_as: str, source: str | None = None, is_recorded: bool = False
) -> Profile:
    """Parse the text of a profile.

    `said_as`: the name of the profile in error messages. `source`: the file of the profile; None
    for a profile of the package.
    """
    try:
        data = _extended(_tables(text, said_as), name, said_as)
        return parse(data, name=name, said_as=said_as, source=source, is_recorded=is_recorded)
    except BanksmanError as exc:
        exc.ids.setdefault("agent", name)
        raise


@functools.cache
def _ours(name: str) -> Profile:
    """Return a profile of the package, parsed once.

    A host that takes over hundreds of sessions requests the same profile again and again.
    """
    return parse_text(_texts()[name], name=name, said_as=f"the profile {name!r}")


@functools.cache
def _texts() -> Mapping[str, str]:
    """Return the profile texts of the package, read once.

    They do not change while the process runs, and the cache also works without free file
    descriptors.
    """
    folder = resources.files("banksman") / "profiles"
    files = [entry for entry in folder.iterdir() if entry.name.endswith(".toml")]
    return {file.name.removesuffix(".toml"): file.read_text(encoding="utf-8") for file in files}


def _read(file: Path) -> bytes:
    # O_NONBLOCK: opening a FIFO of that name would otherwise block the whole event loop until
    # another process opens it for writing.
    fd = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        mode = os.fstat(fd).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "not a regular file")
        # For a regular file one read returns all requested bytes up to the end of the file.
        data = os.read(fd, FILE_BYTES_MAX + 1)
    finally:
        os.close(fd)
    if len(data) > FILE_BYTES_MAX:
        raise OSError(errno.EFBIG, f"larger than {FILE_BYTES_MAX} bytes")
    return data


def _tables(text: str, said_as: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as exc:
        message = f"cannot parse {said_as} as TOML: {exc}"
        raise UsageError(message, hint="see https://toml.io") from exc


def _extended(data: dict[str, Any], name: str, said_as: str) -> dict[str, Any]:
    """Merge a profile over the profile that it extends, table by table and key by key."""
    if "extends" not in data:
        return data
    base = data["extends"]
    if not isinstance(base, str) or base not in _texts():
        hint = f"use a profile of the package: {', '.join(packaged())}"
        raise UsageError(f"{said_as}: extends cannot be {base!r:.60}", hint=hint)
    under = _tables(_texts()[base], f"the profile {base!r}")
    assert "extends" not in under, f"the profile {base!r} of the package extends another"
    if base != name:
        # The result is a different agent and must not show the title of the base agent.
        under.pop("title")
    merged = {**under, **data}
    for key, value in under.items():
        if isinstance(value, dict) and isinstance(data.get(key), dict):
            merged[key] = {**cast(dict[str, Any], value), **data[key]}
    return merged


# -- installed agents ----------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class InstalledAgent:
    """Agent with its profile and the path of its program.

    `profile`: None if the file is wrong; `error` then has the reason. `path`: the agent's program;
    None if it was not found. `source`: the user's file; None for a profile of the package.
    `overrides`: the package has a profile of the same name.
    """

    name: str
    profile: Profile | None
    error: str | None
    path: str | None
    source: str | None
    overrides: bool

    def facts(self) -> dict[str, Any]:
        """Return the fields as plain values for the HTTP API and the command line."""
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
        return {
            "name": self.name,
            "found": self.path is not None,
            "path": self.path,
            **known,
            **where,
        }


def find_agents(only: str | None = None) -> list[InstalledAgent]:
    """Return all agents by name, or only one agent.

    A wrong file is reported in the entry of its agent and does not hide other agents.
    """
    files, shipped = user_files(), packaged()
    if only is None:
        wanted = sorted({*files, *shipped})
    elif only in files:
        wanted = [only]
    else:
        # For an unknown name this raises the error that lists the known agents.
        wanted = [load(only).name]
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


def startable() -> list[str]:
    """Return the names of the agents whose recorded sessions this machine can resume."""
    found: list[str] = []
    for name in names():
        with suppress(UsageError):
            if _path(load(name, is_recorded=True)) is not None:
                found.append(name)
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
    # `shutil.which` returns a relative path for a command that contains a folder. Callers get an
    # absolute path in both cases.
    return None if path is None else os.path.abspath(path)
