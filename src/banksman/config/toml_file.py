"""The TOML file: what it says, each value checked, and every error with the line that it is about."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from banksman.config.file_path import ConfigFile
from banksman.config.keys import KEYS, TABLES
from banksman.config.typed_value import checked, nearest
from banksman.errors import UsageError

# A file of settings is a page or two. What is larger is something else, and is not read into memory.
FILE_BYTES_MAX = 1 << 20

_TABLE_LINE = re.compile(r"\s*\[\s*([^\[\]]+?)\s*\]")
_KEY_LINE = re.compile(r"""\s*["']?([^"'=\s]+)["']?\s*=""")


def read(place: ConfigFile) -> dict[str, Any]:
    """Values by the names of their keys. A file that nobody named may be missing. Raises `UsageError`."""
    text = _text(place)
    if text is None:
        return {}
    import tomllib  # noqa: PLC0415

    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as exc:
        raise UsageError(f"{place.path} is not TOML: {exc}", hint="see https://toml.io") from exc
    except RecursionError as exc:
        raise UsageError(f"{place.path} is not TOML: it is nested too deeply", hint="see https://toml.io") from exc
    return dict(_checked(data, text, place.path))


def _text(place: ConfigFile) -> str | None:
    path = place.path
    try:
        # Without waiting: of a pipe nobody knows when somebody writes to it, and every verb reads this.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            is_file = stat.S_ISREG(os.fstat(file.fileno()).st_mode) or str(path) == os.devnull
            data = file.read(FILE_BYTES_MAX + 1) if is_file else None
    except FileNotFoundError as exc:
        if place.is_named:
            hint = f"give the path of a TOML file ({place.origin}); banksman config init makes one"
            raise UsageError(f"there is no file {path}", hint=hint) from exc
        return None
    except IsADirectoryError as exc:
        raise _no_file(path) from exc
    except OSError as exc:
        raise UsageError(f"cannot read {path}: {exc.strerror}", hint="make it readable, or give another") from exc
    if data is None:
        raise _no_file(path)
    if len(data) > FILE_BYTES_MAX:
        raise UsageError(f"{path} is not a file of settings: it is larger than {FILE_BYTES_MAX >> 20} MiB")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as exc:
        raise UsageError(f"{path} is not TOML: it is not UTF-8", hint="see https://toml.io") from exc


def _no_file(path: Path) -> UsageError:
    return UsageError(f"{path} is no file", hint="a file of settings is one that can be read again")


def _checked(data: dict[str, Any], text: str, path: Path) -> Iterator[tuple[str, Any]]:
    for name, value in data.items():
        if name in TABLES:
            if not isinstance(value, dict):
                where = _where(path, text, "", name)
                raise UsageError(f"{where}: {name} cannot be {value!r:.60}", hint=f"a table: [{name}]")
            for short, one in cast("dict[str, Any]", value).items():
                yield _one(name, short, one, text, path)
        elif isinstance(value, dict):
            where = _where(path, text, name, "")
            raise UsageError(f"{where}: there is no table [{name:.60}]", hint=f"do you mean [{nearest(name, TABLES)}]?")
        else:
            yield _one("", name, value, text, path)


def _one(table: str, short: str, value: Any, text: str, path: Path) -> tuple[str, Any]:
    name = f"{table}.{short}" if table else short
    where = _where(path, text, table, short)
    key = KEYS.get(name)
    if key is None:
        raise UsageError(f"{where}: there is no key {name!r:.80}", hint=_meant(table, short))
    if not key.is_in_file:
        hint = f"put it into {key.variable}; the server of this machine needs none"
        raise UsageError(f"{where}: {name} is not taken from a file", hint=hint)
    return name, checked(key, value, where=where)


def _meant(table: str, short: str) -> str:
    """A key of this table that is spelt nearly so; else one of the same name in another."""
    elsewhere = [key for key in KEYS.values() if key.short == short and key.is_in_file]
    if elsewhere:
        other = elsewhere[0]
        return f"do you mean {other.short!r} {f'in [{other.table}]' if other.table else 'before the first table'}?"
    return f"do you mean {nearest(short, (key.short for key in KEYS.values() if key.table == table))!r}?"


def _where(path: Path, text: str, table: str, short: str) -> str:
    line = _line_of(text, table, short)
    return str(path) if line is None else f"{path}, line {line}"


def _line_of(text: str, table: str, short: str) -> int | None:
    """Where it stands, if it is written as nearly everybody does. The error is right without it."""
    current = ""
    for number, line in enumerate(text.splitlines(), 1):
        begun = _TABLE_LINE.match(line)
        if begun:
            current = begun[1].strip("\"'")
            if current == table and not short:
                return number
        elif current == table and (found := _KEY_LINE.match(line)) and found[1] == short:
            return number
    return None
