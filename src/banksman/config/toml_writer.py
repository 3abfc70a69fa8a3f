"""Values as TOML has them, and a file to begin with: every key, commented out, with what holds without it."""

from __future__ import annotations

import json
import os
import tempfile
import textwrap
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from banksman.config.keys import KEYS, TABLES, ConfigKey
from banksman.errors import UsageError

WIDTH = 100

_HEAD = """\
# What Banksman is set to. Each key stands here commented out, with what holds without it, or with an example where
# nothing does. Take the # away, and change it.
# A flag is heard before a variable (BANKSMAN_STORE, BANKSMAN_SERVE_PORT …), a variable before this file.
# `banksman config show` tells what holds, and where each value came from."""


def as_toml(value: Any) -> str:
    """Of what a key may hold. JSON's texts and numbers are TOML's too, but for DEL, which TOML wants escaped."""
    if isinstance(value, list):
        return f"[{', '.join(as_toml(item) for item in value)}]"  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return json.dumps(value)


def template() -> str:
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
    usual = f" Without it: {key.usual}." if key.usual else ""
    yield from textwrap.wrap(
        f"{key.what}{choices}{usual}", WIDTH, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False
    )
    # A default that shows nothing of how it is written gives way to an example.
    shown = key.default if key.example is None else key.example
    yield f"#{key.short} = {as_toml(shown)}"


def put(path: Path, text: str, *, replaces: bool) -> None:
    """Write it for its user only (0600), whole or not at all. `UsageError` if there is one and it may not be replaced,
    or if it cannot be written."""
    target = Path(os.path.abspath(path))
    try:
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        fd, beside = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        try:
            with open(fd, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(fd)
            if replaces:
                os.replace(beside, target)
            else:
                # A link takes nothing away: whoever comes first has the name.
                os.link(beside, target)
        finally:
            with suppress(FileNotFoundError):
                os.unlink(beside)
    except FileExistsError as exc:
        hint = "edit it, or say --force to replace it" if target.is_file() else "a folder of its path is a file"
        raise UsageError(f"{target} is there already", hint=hint) from exc
    except OSError as exc:
        hint = "make its folder yours to write, or take another path with --config"
        raise UsageError(f"cannot write {target}: {exc.strerror}", hint=hint) from exc
