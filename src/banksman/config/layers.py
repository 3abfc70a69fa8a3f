"""The layers of settings and their one precedence: flag, `BANKSMAN_*` variable, file, default.

An unknown variable is not an error: programs that start Banksman have variables with this prefix, and a typo in a shell
profile must not break every command. `config show` and `doctor` list it, with the nearest known name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from banksman.config import toml_file
from banksman.config.keys import KEYS, ConfigKey, checked, nearest, of_text
from banksman.config.toml_file import CONFIG_VARIABLE, ConfigFile, chosen_path
from banksman.errors import UsageError

PREFIX = "BANKSMAN_"
DEFAULT = "default"


class Stray(NamedTuple):
    """An unknown variable, and the known one that is nearest."""

    name: str
    nearest: str


def _variables() -> dict[str, Any]:
    """Values by the names of their keys. An empty variable counts as unset."""
    found: dict[str, Any] = {}
    for name, key in KEYS.items():
        text = os.environ.get(key.variable, "")
        if text:
            found[name] = of_text(key, text, where=key.variable)
    return found


def strays() -> list[Stray]:
    known = [CONFIG_VARIABLE, *(key.variable for key in KEYS.values())]
    return [
        Stray(name, nearest(name, known))
        for name in sorted(os.environ)
        if name.startswith(PREFIX) and name not in known
    ]


@dataclass(frozen=True, slots=True)
class Setting:
    """The value of one key, and the layer it came from."""

    key: ConfigKey
    value: Any
    origin: str

    @property
    def is_set(self) -> bool:
        """A flag, a variable or the file sets it."""
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
        # Not the value itself: it may be a secret, and this may end up in a traceback.
        return f"<Setting {self.key.name}={self.shown!r} from {self.origin}>"


class LayeredConfig:
    """All settings, by the names of their keys, in the order of `KEYS`. Immutable."""

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

    def table(self, table: str) -> dict[str, Any]:
        """All values of a table, by their short names."""
        return {one.key.short: one.value for one in self if one.key.table == table}


def load(*, flags: Mapping[str, Any] | None = None, path: str | os.PathLike[str] | None = None) -> LayeredConfig:
    """`flags` by the names of keys; None: the flag was not given. `path`: the value of `--config`. Raises `UsageError`
    for a file that cannot be read, an unknown key, or a value that its key does not take."""
    place = chosen_path(path)
    in_file = toml_file.read(place)
    in_variables = _variables()
    given = {name: value for name, value in (flags or {}).items() if value is not None}
    for name in given:
        assert name in KEYS, f"a flag for no key: {name}"
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
    # The server uses the user's store unless [serve] names another.
    if settings["serve.store"].value is None:
        settings["serve.store"] = Setting(KEYS["serve.store"], settings["store"].value, settings["store"].origin)
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
    """The key of this name. `UsageError` with the nearest name if there is none."""
    if name not in KEYS:
        raise UsageError(f"there is no key {name!r:.80}", hint=f"do you mean {nearest(name, KEYS)!r}?")
    return KEYS[name]
