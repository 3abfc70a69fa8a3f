"""What is set, and where each value came from: a flag, a `BANKSMAN_*` variable, the user's TOML file, or the default.

There is one list of keys (`keys.py`) and one precedence (`layers.py`): a flag is heard before a variable, a variable
before the file, the file before the default. A key that is not known is an error with the nearest one that is, because
what was misspelt would else be silently the usual. What is a secret is never shown, in no layer.

    from banksman import config

    found = config.load(flags={"url": arguments.url, "store": arguments.store})   # None: the flag was not given
    found.value("store")        # "sqlite:/var/lib/banksman/log.db", or None where nobody has said anything
    found["store"].origin       # "--store", "BANKSMAN_STORE", "/home/me/.config/banksman/config.toml", "default"

It starts in no time: without a file nothing is imported that reads one.
"""

from __future__ import annotations

from banksman.config.file_path import chosen_path, default_path
from banksman.config.keys import KEYS, ConfigKey, ValueKind
from banksman.config.layers import LayeredConfig, Setting, Stray, known, load, strays

__all__ = [
    "KEYS",
    "ConfigKey",
    "LayeredConfig",
    "Setting",
    "Stray",
    "ValueKind",
    "chosen_path",
    "default_path",
    "known",
    "load",
    "strays",
]
