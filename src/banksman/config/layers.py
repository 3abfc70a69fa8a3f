"""The layer of `BANKSMAN_*` variables, and those that are none of ours.

A variable that is not known is no error: programs that start us have variables of their own, and a letter too many in
somebody's profile must not end every verb. `config show` and `doctor` mention it, with the nearest that is known.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from banksman.config import toml_file
from banksman.config.file_path import CONFIG_VARIABLE, ConfigFile, chosen_path
from banksman.config.keys import KEYS, ConfigKey
from banksman.config.typed_value import checked, nearest, of_text
from banksman.errors import UsageError

PREFIX = "BANKSMAN_"


class Stray(NamedTuple):
    """A variable that means nothing to us, and the one that may be meant."""

    name: str
    nearest: str


def read() -> dict[str, Any]:
    """Values by the names of their keys. An empty variable is one that is not set."""
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


# One precedence for every key: flag, variable, file, default.

DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class Setting:
    """What holds for one key, and who said so."""

    key: ConfigKey
    value: Any
    origin: str

    @property
    def is_set(self) -> bool:
        """Somebody has said something."""
        return self.origin != DEFAULT

    @property
    def shown(self) -> Any:
        """For people and for programs; of a secret only that it is set."""
        if self.key.is_secret and self.value:
            return "set"
        if isinstance(self.value, str):
            if self.key.name == "url" and not self.value.startswith("unix:"):
                return _without_secrets(self.value)
            if self.key.short == "store" and "://" in self.value:
                return _without_secrets(self.value)
        return self.value

    def __repr__(self) -> str:
        # Never the value itself, which may be a secret: this may end up in a traceback.
        return f"<Setting {self.key.name}={self.shown!r} from {self.origin}>"


class LayeredConfig:
    """What holds, by the names of keys, in the order of the list. It does not change any more."""

    def __init__(self, settings: dict[str, Setting], place: ConfigFile) -> None:
        assert settings.keys() == KEYS.keys(), "every key holds something"
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
    """`flags` by the names of keys; None among them: not given. `path`: what `--config` says. Raises `UsageError`: a
    file that cannot be read, a key that is not known, a value that is not what its key takes."""
    place = chosen_path(path)
    in_file = toml_file.read(place)
    in_variables = read()
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
    # A server keeps its sessions where this user keeps them, unless it was told otherwise.
    if settings["serve.store"].value is None:
        settings["serve.store"] = Setting(KEYS["serve.store"], settings["store"].value, settings["store"].origin)
    return LayeredConfig(settings, place)


def _without_secrets(url: str) -> str:
    """Neither a user and a password nor what follows ? or #. It may end with a token or a one-time code."""
    begin, mark, rest = re.split("#(?:token|code)=", url, maxsplit=1)[0].rpartition("://")
    authority = re.split("[/?#]", rest, maxsplit=1)[0]
    after = rest.removeprefix(authority)
    if "@" in after:
        # It may be the end of a password with one of these letters in it.
        return f"{begin}{mark}…"
    user, at, host = authority.rpartition("@")
    return f"{begin}{mark}{'…' if user else ''}{at}{host}{re.split('[?#]', after, maxsplit=1)[0]}"


def known(name: str) -> ConfigKey:
    """The key of this name. `UsageError` with the nearest if there is none."""
    if name not in KEYS:
        from banksman.config.typed_value import nearest  # noqa: PLC0415

        raise UsageError(f"there is no key {name!r:.80}", hint=f"do you mean {nearest(name, KEYS)!r}?")
    return KEYS[name]
