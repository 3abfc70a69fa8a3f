"""Where things of the user's are kept, by the standard of these folders (XDG). Nothing is read or made here.

A variable that is empty or holds a relative path is to be ignored, says the standard: a relative one would be another
folder for each program. Without the variable it is a folder of the user's home; a user may have none.
"""

from __future__ import annotations

import os
from pathlib import Path

from banksman.errors import UsageError

NAME = "banksman"


def state_folder() -> Path:
    """What is kept from one run to the next: the store, the token, where a server is. `UsageError`: no home."""
    return _folder("XDG_STATE_HOME", ".local/state")


def config_folder() -> Path:
    """What the user has written. `UsageError`: there is no home."""
    return _folder("XDG_CONFIG_HOME", ".config")


def sockets_folder() -> Path:
    """The sockets by which a server or a verb of this user can be asked: see `sockets.py`."""
    return state_folder() / "sockets"


def _folder(variable: str, usual: str) -> Path:
    base = os.environ.get(variable, "")
    if os.path.isabs(base):
        return Path(base) / NAME
    home = os.path.expanduser("~")
    # An account without a home has / there, or a folder that is no path at all.
    if not os.path.isabs(home) or not home.strip("/"):
        raise UsageError("there is no home folder to keep anything in", hint=f"set {variable}", variable=variable)
    return Path(home) / usual / NAME
