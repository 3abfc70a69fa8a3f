"""Settings, and the layer each value came from: a flag, a `BANKSMAN_*` variable, the user's TOML file, or the default.

`keys.py` lists every key. `layers.py` reads and writes the file and has the precedence. An unknown key in the file is
an error that names the nearest known key. Secrets are never shown.

    from banksman import config

    found = config.load(flags={"url": arguments.url, "store": arguments.store})   # None: the flag was not given
    found.value("store")        # "sqlite:/var/lib/banksman/log.db", or None if it is not set
    found["store"].origin       # "--store", "BANKSMAN_STORE", "/home/me/.config/banksman/config.toml", "default"

Every command loads this, so what takes long to import (tomllib, msgspec) is imported when there is something to read.
"""

from __future__ import annotations

from banksman.config.keys import KEYS, ConfigKey, ValueKind
from banksman.config.layers import (
    LayeredConfig,
    Setting,
    UnknownVariable,
    chosen_path,
    default_path,
    known,
    load,
    strays,
)

__all__ = [
    "KEYS",
    "ConfigKey",
    "LayeredConfig",
    "Setting",
    "UnknownVariable",
    "ValueKind",
    "chosen_path",
    "default_path",
    "known",
    "load",
    "strays",
]
