"""Check access to the state folder, the token and the sockets; find the store files.

`specs` and `stores` return the stores that the settings name, for the other modules and for
`completion`. `stores.py` checks the stores, and `settings.py` the settings file.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from banksman import config
from banksman.cli.doctor import Check, DoctorOptions, Finding, ok, wrong
from banksman.errors import UsageError
from banksman.folders import sockets_folder, state_folder

# Settings that may follow the path of a store.
_SETTINGS = ("?level=", "?keep_bytes=", "?keep_seconds=")


def checks(_: DoctorOptions) -> list[Check]:
    return [state, token, sockets]


def specs(chosen: str | None = None) -> list[str | None]:
    """Return the stores that the settings name: the user's, and the server's if it differs.

    None stands for the default file. `chosen`: check only this store.
    """
    if chosen is not None:
        return [chosen]
    try:
        found = config.load()
        return list(dict.fromkeys([found.value("store"), found.value("serve.store")]))
    except UsageError:
        # Another check reports the broken settings. The default store is still worth checking.
        return [None]


def stores(chosen: str | None = None) -> list[Path]:
    """Return the paths of the stores that are files."""
    paths: list[Path] = []
    for spec in specs(chosen):
        path = store_path(spec)
        if path is not None and path not in paths:
            paths.append(path)
    return paths


def store_path(spec: str | None) -> Path | None:
    """Return the path of a store; None if the store is not a file."""
    if spec is None:
        return state_folder() / "store.db"
    if not spec.startswith("sqlite:"):
        return None
    text = spec.removeprefix("sqlite:")
    ends = [text.index(word) for word in _SETTINGS if word in text]
    return Path(os.path.abspath(text[: min(ends)] if ends else text))


def state() -> Iterator[Finding]:
    """Check the state folder."""
    folder = state_folder()
    found = _stat(folder)
    if found is None:
        base = next(parent for parent in folder.parents if parent.exists())
        if os.access(base, os.W_OK | os.X_OK):
            yield ok("state folder", f"{folder} (does not exist yet)")
        else:
            fix = "set XDG_STATE_HOME to a writable folder"
            yield wrong("state folder", f"cannot create {folder}: {base} is not writable", fix)
        return
    yield private("state folder", folder, found, may_be_read=True)


def token() -> Iterator[Finding]:
    """Check that only this user can read the token."""
    path = state_folder() / "token"
    found = _stat(path)
    if found is None:
        yield ok("token", f"{path} (does not exist yet; banksman serve creates it)")
        return
    fix = f"rm {path}: the token may have been read, and the next server creates another"
    if found.st_uid != os.geteuid() or found.st_mode & 0o077:
        seen = (
            f"other users can read {path} ({_mode(found)}), "
            "and a client with the token can run any program"
        )
        yield wrong("token", seen, fix)
    else:
        yield ok("token", f"{path}, only for this user")


def sockets() -> Iterator[Finding]:
    """Check that only this user can reach the folder of the sockets."""
    folder = sockets_folder()
    found = _stat(folder)
    if found is None:
        return
    yield private("sockets", folder, found, may_be_read=False)


def private(name: str, path: Path, found: os.stat_result, *, may_be_read: bool) -> Finding:
    """Check that other users cannot change a file, and cannot read it unless `may_be_read`."""
    if found.st_uid != os.geteuid():
        return wrong(
            name, f"{path} belongs to user {found.st_uid}", f"chown -R {os.geteuid()} {path}"
        )
    if found.st_mode & 0o022:
        return wrong(name, f"other users can change {path} ({_mode(found)})", f"chmod go-w {path}")
    if not may_be_read and found.st_mode & 0o077:
        return wrong(name, f"other users can read {path} ({_mode(found)})", f"chmod go= {path}")
    return ok(name, f"{path}, {_mode(found)}")


def _stat(path: Path) -> os.stat_result | None:
    try:
        return os.stat(path)
    except FileNotFoundError:
        return None


def _mode(found: os.stat_result) -> str:
    return f"mode {stat.S_IMODE(found.st_mode):o}"
