"""Paths of the user's folders for state, configuration and sockets, by the XDG standard.

The functions read the environment. They neither read nor create a file or a folder.

The standard says that an empty variable or a relative path is to be ignored: a relative path would
be a different folder for each program. Without the variable the folder is in the user's home. A
user may have no home.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

from banksman.errors import UsageError

NAME = "banksman"


def state_folder() -> Path:
    """Folder for data that persists between runs: the store, the token, the address of a server.

    Raises `UsageError` if there is no home.
    """
    return _folder("XDG_STATE_HOME", ".local/state")


def config_folder() -> Path:
    """Folder for files that the user writes. Raises `UsageError` if there is no home."""
    return _folder("XDG_CONFIG_HOME", ".config")


def sockets_folder() -> Path:
    """Folder for the sockets of this user's servers and commands: see `sockets.py`."""
    return _below(str(state_folder()), "sockets")


def held_folder() -> Path:
    """Folder for the sockets of processes that wait for another host: see `adoption.py`."""
    return _below(str(state_folder()), "held")


def _folder(variable: str, usual: str) -> Path:
    base = os.environ.get(variable, "")
    if os.path.isabs(base):
        return _below(base, NAME)
    home = os.path.expanduser("~")
    # An account without a home has / there, or text that is not an absolute path.
    if not os.path.isabs(home) or not home.strip("/"):
        message = "cannot find a folder for files: this user has no home folder"
        raise UsageError(message, hint=f"set {variable}", variable=variable)
    return _below(home, f"{usual}/{NAME}")


# A host asks for its folders several times for each session.
@functools.lru_cache(16)
def _below(folder: str, name: str) -> Path:
    return Path(folder) / name
