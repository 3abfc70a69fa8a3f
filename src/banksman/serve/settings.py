"""What a server is set to: one value, from the `[serve]` table of a TOML file and what the command line says over it.

Every bound has a name here, so that it can be shown and changed. A key that is not known is an error with the nearest
one that is: a limit that was misspelt is a limit that does not hold.
"""

from __future__ import annotations

import difflib
import ipaddress
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import msgspec

from banksman.errors import UsageError

PORT = 4380
_TOKEN = re.compile(r"[!-~]{8,4096}")
_NAME = re.compile(r"[A-Za-z0-9._-]+|\[?[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*\]?")
Program = str | list[str]


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`programs`: what HTTP callers may start; None: anything. A word is a program, by name or path; a list is the
    beginning of a command. `env`: the variables that they may set while `programs` is set. `roots`: folders that they
    may start something in; None: any. `hosts`: names, besides the loopback's, under which a proxy shows this server.
    """

    bind: str = "127.0.0.1"
    port: int = PORT
    allow_remote: bool = False
    hosts: list[str] = []
    # Where the log is: see Host. None: the user's state folder.
    store: str | None = None
    keep_bytes: int | None = None
    keep_seconds: int | None = None
    # None: the one in `token_file`, which is made if it is missing. None: in the user's state folder.
    token: str | None = None
    token_file: str | None = None
    programs: list[Program] | None = None
    env: list[str] = []
    roots: list[str] | None = None
    user_helper: list[str] | None = None
    processes_max: int | None = None
    secrets: list[str] = []

    body_bytes_max: int = 32 << 20
    # Event streams of one client, which is an address and how it came in.
    streams_max: int = 1024
    heartbeat_seconds: float = 15.0
    stall_seconds: float = 30.0
    # How long what runs may take to finish when the server is told to go.
    drain_seconds: float = 60.0
    log_format: str = "text"
    log_level: str = "info"

    def __post_init__(self) -> None:
        positive = ("body_bytes_max", "streams_max", "heartbeat_seconds", "stall_seconds", "drain_seconds")
        for name in (*positive, "keep_bytes", "keep_seconds"):
            value = getattr(self, name)
            if value is not None and not 0 < value < 1 << 53:
                raise UsageError(f"{name} cannot be {value!r}", hint="a number above 0")
        if not 0 <= self.port <= 65535:
            raise UsageError(f"there is no port {self.port}", hint="0 to 65535; 0: any that is free")
        if self.log_format not in ("text", "json"):
            raise UsageError(f"there is no log_format {self.log_format!r}", hint='"text" or "json"')
        if self.log_level not in ("debug", "info", "warning", "error"):
            raise UsageError(f"there is no log_level {self.log_level!r}", hint='"debug", "info", "warning" or "error"')
        if self.token is not None and not _TOKEN.fullmatch(self.token):
            raise UsageError("that cannot be a token", hint="8 visible ASCII characters or more")
        if any(not entry or not entry[0] for entry in self.programs or ()):
            raise UsageError("programs holds an empty one", hint="a program's name, or the words of a command")
        for name in self.hosts:
            if not _NAME.fullmatch(name):
                raise UsageError(f"{name!r:.60} cannot be in hosts", hint="a name or an address, without a port")
        if not self.allow_remote and not is_loopback(self.bind):
            raise UsageError(
                f"{self.bind} can be reached from other machines, and whoever has the token can start anything here",
                hint="bind 127.0.0.1, or say --allow-remote (allow_remote = true) and put TLS in front of it",
            )

    def shown(self) -> dict[str, Any]:
        """For whoever asks what holds here; without what is nobody's business."""
        hidden = {"secrets", "token", "token_file"}
        return {field: getattr(self, field) for field in self.__struct_fields__ if field not in hidden}


def is_loopback(bind: str) -> bool:
    if bind == "localhost":
        return True
    try:
        return ipaddress.ip_address(bind).is_loopback
    except ValueError:
        return False  # A name may be anything by tomorrow.


def load(path: str | os.PathLike[str] | None = None, flags: Mapping[str, Any] | None = None) -> Settings:
    """`path` None: the user's own file, if there is one. `flags` come first; None among them: not given."""
    table = _table(Path(path), is_named=True) if path is not None else _table(default_path(), is_named=False)
    given = {name: value for name, value in (flags or {}).items() if value is not None}
    return _settings({**table, **given})


def default_path() -> Path:
    config = os.environ.get("XDG_CONFIG_HOME", "")
    folder = Path(config) if os.path.isabs(config) else Path(os.path.expanduser("~")) / ".config"
    return folder / "banksman" / "config.toml"


def _table(path: Path, *, is_named: bool) -> dict[str, Any]:
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as exc:
        if is_named:
            raise UsageError(f"there is no file {path}", hint="give the path of a TOML file") from exc
        return {}
    except OSError as exc:
        raise UsageError(f"cannot read {path}: {exc.strerror}", hint="make it readable, or give another") from exc
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise UsageError(f"{path} is not TOML: {exc}", hint="see https://toml.io") from exc
    for key in data:
        if key != "serve":
            raise UsageError(f"{path}: there is no table [{key}]", hint="[serve] is the one there is")
    table = data.get("serve", {})
    if not isinstance(table, dict):
        raise UsageError(f"{path}: serve cannot be {table!r:.60}", hint="a table: [serve]")
    return cast("dict[str, Any]", table)


def _settings(values: dict[str, Any]) -> Settings:
    known = Settings.__struct_fields__
    for name in values:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1, 0)
            raise UsageError(f"there is no setting {name!r}", hint=f"do you mean {near[0]!r}?")
    try:
        return msgspec.convert(values, Settings)
    except msgspec.ValidationError as exc:
        # What __post_init__ says is our own; the rest says where and what.
        raise (
            exc.__cause__
            if isinstance(exc.__cause__, UsageError)
            else UsageError(f"a setting is not as it must be: {exc}", hint="see docs/server.md")
        ) from None
