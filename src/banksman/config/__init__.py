"""Settings with their origin: flag, `BANKSMAN_*` variable, the user's TOML file, or default.

`keys.py` lists every key. `config_file.py` reads and writes the file, and `layers.py` defines the
precedence. An unknown key in the file is an error that names the nearest known key. Secrets are
never shown.

    from banksman import config

    found = config.load(flags={"url": arguments.url, "store": arguments.store})  # None: not given
    found.value("store")        # "sqlite:/var/lib/banksman/log.db", or None if it is not set
    found["store"].origin       # "--store", "BANKSMAN_STORE", the path of the file, "default"

Every command loads this package. Slow imports (tomllib, msgspec) therefore happen only when there
is a file or a value to read.
"""

from __future__ import annotations

from banksman.config.config_file import chosen_path, default_path
from banksman.config.config_key import ConfigKey, ValueKind
from banksman.config.keys import KEYS
from banksman.config.layers import LayeredConfig, Setting, UnknownVariable, known, load, strays

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
