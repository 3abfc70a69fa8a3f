"""The layers of settings and their precedence: flag, `BANKSMAN_*` variable, file, default.

`load` merges a flag, a `BANKSMAN_*` variable, the user's TOML file (`config_file.py`) and the
default of each key, and keeps the origin.

An unknown variable is not an error. Programs that start Banksman have variables with this prefix,
and a typo in a shell profile must not break every command. `config show` and `doctor` list unknown
variables, each with the nearest known name, and a server logs them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from banksman.config.config_file import (
    ALL_KEYS_HINT,
    CONFIG_VARIABLE,
    ConfigFile,
    chosen_path,
    read,
    text_of,
    where_of,
)
from banksman.config.config_key import ConfigKey, checked, of_text
from banksman.config.keys import KEYS, nearest, nearest_key
from banksman.errors import UsageError

PREFIX = "BANKSMAN_"
DEFAULT = "default"
# Variables of a session hook (session_hooks.py), which may call `banksman`.
_OF_HOOKS = ("BANKSMAN_CWD", "BANKSMAN_SESSION")


class UnknownVariable(NamedTuple):
    """An unknown `BANKSMAN_*` variable and the nearest known name; None if none is similar."""

    name: str
    nearest: str | None

    @property
    def hint(self) -> str:
        """The hint of a message about this variable."""
        return ALL_KEYS_HINT if self.nearest is None else f"did you mean {self.nearest}?"


def _variables() -> dict[str, Any]:
    """Read the `BANKSMAN_*` variables.

    Return values by key name; an empty variable counts as unset.
    """
    found: dict[str, Any] = {}
    for name, key in KEYS.items():
        text = os.environ.get(key.variable, "")
        if text:
            found[name] = of_text(key, text, where=key.variable)
    return found


def strays() -> list[UnknownVariable]:
    """List the `BANKSMAN_*` variables of the environment that no key defines."""
    known = [CONFIG_VARIABLE, *_OF_HOOKS, *(key.variable for key in KEYS.values())]
    return [
        UnknownVariable(name, _nearest_variable(name))
        for name in sorted(os.environ)
        if name.startswith(PREFIX) and name not in known
    ]


def _nearest_variable(name: str) -> str | None:
    # Without the prefix: it is in every name, and makes them all similar.
    names = {key.short.upper(): key.variable for key in KEYS.values()}
    names |= {
        variable.removeprefix(PREFIX): variable
        for variable in (CONFIG_VARIABLE, *(key.variable for key in KEYS.values()))
    }
    found = nearest(name.removeprefix(PREFIX), names)
    return None if found is None else names[found]


@dataclass(frozen=True, slots=True)
class Setting:
    """The value of one key and the layer that set it."""

    key: ConfigKey
    value: Any
    origin: str

    @property
    def is_set(self) -> bool:
        """Whether a flag, a variable or the file set this value."""
        return self.origin != DEFAULT

    @property
    def shown(self) -> Any:
        """The value without secrets, as `config show` prints it."""
        if self.key.is_secret and self.value:
            return "set"
        if isinstance(self.value, str):
            if self.key.name == "url" and not self.value.startswith("unix:"):
                return _without_secrets(self.value)
            if self.key.short == "store" and "://" in self.value:
                return _without_secrets(self.value)
        return self.value

    def __repr__(self) -> str:
        # Shows `shown` instead of `value`: the value may be a secret, and a repr may appear in a
        # traceback.
        return f"<Setting {self.key.name}={self.shown!r} from {self.origin}>"


class LayeredConfig:
    """All settings by key name, in the order of `KEYS`. Immutable."""

    def __init__(self, settings: dict[str, Setting], place: ConfigFile) -> None:
        assert settings.keys() == KEYS.keys(), "every key has a setting"
        self._settings = settings
        self.place = place

    def __getitem__(self, name: str) -> Setting:
        return self._settings[name]

    def __iter__(self) -> Iterator[Setting]:
        return iter(self._settings.values())

    def value(self, name: str) -> Any:
        return self._settings[name].value

    def where(self, name: str) -> str:
        """Return the place of a value for an error: a flag, a variable, or a file and a line."""
        found = self._settings[name]
        if found.origin != str(self.place.path):
            return found.origin
        # The server's store may be the value of another key. Its line is then not found.
        text = text_of(self.place) or ""
        return where_of(self.place.path, text, found.key.table, found.key.short)

    def table(self, table: str) -> dict[str, Any]:
        """Return all values of a table by their short names."""
        return {one.key.short: one.value for one in self if one.key.table == table}


def load(
    *, flags: Mapping[str, Any] | None = None, path: str | os.PathLike[str] | None = None
) -> LayeredConfig:
    """Load all settings and merge the layers.

    `flags`: values by key name; None means that the flag was not given. `path`: the value of
    `--config`. Raises `UsageError` for an unreadable file, an unknown key, or a value that its key
    does not accept.
    """
    place = chosen_path(path)
    in_file = read(place)
    in_variables = _variables()
    given = {name: value for name, value in (flags or {}).items() if value is not None}
    for name in given:
        assert name in KEYS, f"a flag without a key: {name}"
    settings: dict[str, Setting] = {}
    for name, key in KEYS.items():
        if name in given:
            settings[name] = Setting(key, checked(key, given[name], where=key.flag), key.flag)
        elif name in in_variables:
            settings[name] = Setting(key, in_variables[name], key.variable)
        elif name in in_file:
            settings[name] = Setting(key, in_file[name], str(place.path))
        else:
            settings[name] = Setting(key, key.default, DEFAULT)
    # The server uses the user's store unless the [serve] table names another.
    if settings["serve.store"].value is None:
        settings["serve.store"] = Setting(
            KEYS["serve.store"], settings["store"].value, settings["store"].origin
        )
    return LayeredConfig(settings, place)


def _without_secrets(url: str) -> str:
    """Remove user, password, query and fragment. A fragment may be a token or a one-time code."""
    begin, mark, rest = re.split("#(?:token|code)=", url, maxsplit=1)[0].rpartition("://")
    authority = re.split("[/?#]", rest, maxsplit=1)[0]
    after = rest.removeprefix(authority)
    if "@" in after:
        # This may be the rest of a password that contains /, ? or #.
        return f"{begin}{mark}…"
    user, at, host = authority.rpartition("@")
    return f"{begin}{mark}{'…' if user else ''}{at}{host}{re.split('[?#]', after, maxsplit=1)[0]}"


def known(name: str) -> ConfigKey:
    """Return the key of this name.

    Raises `UsageError` with the nearest name if the key is unknown.
    """
    if name not in KEYS:
        meant = nearest_key(name)
        others = "run `banksman config show` for all keys"
        hint = others if meant is None else f"did you mean {meant.name!r}?"
        raise UsageError(f"unknown key {name!r:.80}", hint=hint)
    return KEYS[name]
