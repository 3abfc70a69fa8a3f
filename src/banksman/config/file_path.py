"""Where the file is. Nothing is read here."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

CONFIG_VARIABLE = "BANKSMAN_CONFIG"


class ConfigFile(NamedTuple):
    """`origin`: who chose it. `is_named`: somebody did, so that a file that is not there is an error."""

    path: Path
    origin: str
    is_named: bool


def default_path() -> Path:
    # A relative one is to be ignored, says the standard of these folders.
    base = os.environ.get("XDG_CONFIG_HOME", "")
    folder = Path(base) if os.path.isabs(base) else Path(os.path.expanduser("~")) / ".config"
    return folder / "banksman" / "config.toml"


def chosen_path(path: str | os.PathLike[str] | None = None) -> ConfigFile:
    """`path`: what `--config` says; None: it was not given."""
    if path is not None:
        return ConfigFile(Path(path), "--config", is_named=True)
    named = os.environ.get(CONFIG_VARIABLE, "")
    if named:
        return ConfigFile(Path(named), CONFIG_VARIABLE, is_named=True)
    return ConfigFile(default_path(), "default", is_named=False)
