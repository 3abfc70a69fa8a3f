"""The TOML file of settings: its path, its values, and a template for a new file.

`read` checks every key and value. Its errors name the file, the line, the key, and the key or
value that the user probably meant. `template` lists every key, commented out, with its default.
`put` writes a file. `keys.py` lists the keys and checks single values.
"""

from __future__ import annotations

import json
import os
import re
import stat
import textwrap
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, cast

from banksman.config.config_key import ConfigKey, checked
from banksman.config.keys import KEYS, TABLES, nearest
from banksman.errors import UsageError

ALL_KEYS_HINT = "see docs/reference/configuration.md for all keys"
CONFIG_VARIABLE = "BANKSMAN_CONFIG"
# A settings file is a page or two. A larger file is something else and is not read into memory.
FILE_BYTES_MAX = 1 << 20
TEMPLATE_WIDTH = 100
_TABLE_LINE = re.compile(r"\s*\[\s*([^\[\]]+?)\s*\]")
_KEY_LINE = re.compile(r"""\s*["']?([^"'=\s]+)["']?\s*=""")
_HEAD = """\
# Settings of Banksman. Every key is commented out, with its default, or with an example if it has no
# default. To change a setting, remove the # and edit the value.
# Precedence: flag, environment variable (BANKSMAN_STORE, BANKSMAN_SERVE_PORT …), this file, default.
# `banksman config show` prints the settings in effect, and the origin of each value."""  # noqa: E501


class ConfigFile(NamedTuple):
    """Path of the settings file, and how it was chosen.

    `origin`: the flag or the variable that names the file, or "default". `is_named`: a flag or a
    variable names the file, so a missing file is an error.
    """

    path: Path
    origin: str
    is_named: bool


def default_path() -> Path:
    """Return the path of the settings file that is read when no flag or variable names one."""
    # The XDG specification says to ignore a relative path.
    base = os.environ.get("XDG_CONFIG_HOME", "")
    folder = Path(base) if os.path.isabs(base) else Path(os.path.expanduser("~")) / ".config"
    return folder / "banksman" / "config.toml"


def chosen_path(path: str | os.PathLike[str] | None = None) -> ConfigFile:
    """Choose the settings file. `path`: the value of `--config`; None if the flag was not given."""
    if path is not None:
        return ConfigFile(Path(path), "--config", is_named=True)
    named = os.environ.get(CONFIG_VARIABLE, "")
    if named:
        return ConfigFile(Path(named), CONFIG_VARIABLE, is_named=True)
    return ConfigFile(default_path(), "default", is_named=False)


def read(place: ConfigFile) -> dict[str, Any]:
    """Read and check the settings file. Return its values by key name.

    The default file may be missing. Raises `UsageError` for every other problem.
    """
    text = text_of(place)
    if text is None:
        return {}
    import tomllib  # noqa: PLC0415

    try:
        data = tomllib.loads(text)
    except ValueError as exc:
        # This is a TOMLDecodeError, or a number with more digits than Python accepts.
        raise UsageError(f"{place.path} is not TOML: {exc}", hint="see https://toml.io") from exc
    except RecursionError as exc:
        raise UsageError(
            f"{place.path} is not TOML: it is nested too deeply", hint="see https://toml.io"
        ) from exc
    return dict(_checked(data, text, place.path))


def text_of(place: ConfigFile) -> str | None:
    """Return the text of the file, or None if the default file is missing."""
    path = place.path
    try:
        # O_NONBLOCK: every command reads this file, and the open of a FIFO without a writer would
        # block forever.
        with open(
            path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)
        ) as file:
            is_file = stat.S_ISREG(os.fstat(file.fileno()).st_mode) or str(path) == os.devnull
            data = file.read(FILE_BYTES_MAX + 1) if is_file else None
    except FileNotFoundError as exc:
        if place.is_named:
            hint = f"pass the path of a TOML file ({place.origin}), or run `banksman config init`"
            raise UsageError(f"cannot read {path}: it does not exist", hint=hint) from exc
        return None
    except IsADirectoryError as exc:
        raise _no_file(path) from exc
    except OSError as exc:
        raise UsageError(
            f"cannot read {path}: {exc.strerror}", hint="make it readable, or pass another path"
        ) from exc
    if data is None:
        raise _no_file(path)
    if len(data) > FILE_BYTES_MAX:
        raise UsageError(f"cannot read {path}: it is larger than {FILE_BYTES_MAX >> 20} MiB")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as exc:
        raise UsageError(
            f"{path} is not TOML: it is not UTF-8", hint="see https://toml.io"
        ) from exc


def _no_file(path: Path) -> UsageError:
    return UsageError(
        f"cannot read {path}: it is not a regular file", hint="pass the path of a regular file"
    )


def _checked(data: dict[str, Any], text: str, path: Path) -> Iterator[tuple[str, Any]]:
    for name, value in data.items():
        if name in TABLES:
            if not isinstance(value, dict):
                where = where_of(path, text, "", name)
                raise UsageError(
                    f"{where}: {name} cannot be {value!r:.60}", hint=f"use a table: [{name}]"
                )
            for short, one in cast("dict[str, Any]", value).items():
                yield _one(name, short, one, text, path)
        elif isinstance(value, dict):
            where = where_of(path, text, name, "")
            meant = nearest(name, TABLES)
            tables = " or ".join(f"[{table}]" for table in TABLES)
            raise UsageError(
                f"{where}: unknown table [{name:.60}]",
                hint=f"use {tables}" if meant is None else f"did you mean [{meant}]?",
            )
        else:
            yield _one("", name, value, text, path)


def _one(table: str, short: str, value: Any, text: str, path: Path) -> tuple[str, Any]:
    name = f"{table}.{short}" if table else short
    where = where_of(path, text, table, short)
    key = KEYS.get(name)
    if key is None:
        raise UsageError(f"{where}: unknown key {name!r:.80}", hint=_meant(table, short))
    if not key.is_in_file:
        hint = f"set {key.variable} instead; the server of this machine needs no token"
        raise UsageError(f"{where}: cannot set {name} in a file", hint=hint)
    return name, checked(key, value, where=where)


def _meant(table: str, short: str) -> str:
    """Suggest the key of this name in another table, else the nearest key of this table."""
    elsewhere = [key for key in KEYS.values() if key.short == short and key.is_in_file]
    if elsewhere:
        other = elsewhere[0]
        where = f"in [{other.table}]" if other.table else "before the first table"
        return f"did you mean {other.short!r} {where}?"
    meant = nearest(short, (key.short for key in KEYS.values() if key.table == table))
    return ALL_KEYS_HINT if meant is None else f"did you mean {meant!r}?"


def where_of(path: Path, text: str, table: str, short: str) -> str:
    line = _line_of(text, table, short)
    return str(path) if line is None else f"{path}, line {line}"


def _line_of(text: str, table: str, short: str) -> int | None:
    """Find the line of a key or table, or None.

    Finds only keys that are written in the usual way. Without a line number the error is still
    correct.
    """
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


def as_toml(value: Any) -> str:
    """Format the value of a key as TOML.

    JSON strings and numbers are valid TOML, with one exception: TOML requires DEL to be escaped.
    """
    if isinstance(value, list):
        return f"[{', '.join(as_toml(item) for item in value)}]"  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return json.dumps(value)


def template() -> str:
    """Return a settings file with every key, commented out, with its default or an example."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield _HEAD
    for key in KEYS.values():
        if not key.table and key.is_in_file:
            yield ""
            yield from _entry(key)
    for table, what in TABLES.items():
        yield ""
        yield f"# -- {what}"
        yield f"[{table}]"
        for key in KEYS.values():
            if key.table == table:
                yield ""
                yield from _entry(key)


def _entry(key: ConfigKey) -> Iterator[str]:
    choices = f" One of: {', '.join(key.choices)}." if key.choices else ""
    usual = f" Default: {key.usual}." if key.usual else ""
    yield from textwrap.wrap(
        f"{key.what}{choices}{usual}",
        TEMPLATE_WIDTH,
        initial_indent="# ",
        subsequent_indent="# ",
        break_on_hyphens=False,
    )
    # The template shows the example of a key whose default does not show how a value is written.
    shown = key.default if key.example is None else key.example
    yield f"#{key.short} = {as_toml(shown)}"


def put(path: Path, text: str, *, replaces: bool) -> None:
    """Write a file atomically with mode 0600.

    Raises `UsageError` if the write fails, or if the file exists and `replaces` is False.
    """
    # This import takes 4 ms, which the other commands should not pay.
    import tempfile  # noqa: PLC0415

    target = Path(os.path.abspath(path))
    try:
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        fd, beside = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        try:
            with open(fd, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                # Sync before the name appears, so that a crash cannot leave an empty file under it.
                os.fsync(fd)
            if replaces:
                os.replace(beside, target)
            else:
                # link() fails if the name exists. It therefore cannot replace a file that another
                # process wrote in the meantime, which a check followed by a rename could.
                os.link(beside, target)
        finally:
            with suppress(FileNotFoundError):
                os.unlink(beside)
    except FileExistsError as exc:
        hint = (
            "edit it, or pass --force to replace it"
            if target.is_file()
            else "a folder of its path is a file"
        )
        raise UsageError(f"cannot write {target}: it exists", hint=hint) from exc
    except OSError as exc:
        hint = "make its folder writable, or pass another path with --config"
        raise UsageError(f"cannot write {target}: {exc.strerror}", hint=hint) from exc
