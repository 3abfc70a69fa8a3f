"""Server settings: one validated value from flags, variables, a TOML file and defaults.

The file's table is `[serve]`. Every limit has a name here, so that users can see and change it.
`banksman.config` merges the sources and rejects unknown keys. This module checks the values.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from banksman import Budget, config
from banksman.cluster.store_address import is_address, parse
from banksman.errors import UsageError
from banksman.sessions import arguments, session_spec

PORT = 4380
# Longer than any id or name of a session.
NAME_LENGTH_MAX = 512
# Default number of sessions of a host. Most sessions are idle, and `processes_max` limits the
# processes.
ROOM = 64
ROOM_MAX = 100_000
_HOST_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_TOKEN = re.compile(r"[!-~]{8,4096}")
_NAME = re.compile(r"[A-Za-z0-9._-]+|\[?[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*\]?")
Program = str | list[str]


class ServerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All settings of a server.

    `programs`: the programs that HTTP callers may start; None allows any. A string is a program, by
    name or path. A list is the beginning of a command. `env`: variables that callers may set while
    `programs` is set. `roots`: folders in which callers may start something; None allows any.
    `hosts`: host names, besides those of the loopback interface, under which a proxy publishes this
    server.
    """

    bind: str = "127.0.0.1"
    port: int = PORT
    allow_remote: bool = False
    hosts: list[str] = []
    # Address of the log's store: see Host. None: a file in the user's state folder.
    store: str | None = None
    keep_bytes: int | None = None
    keep_seconds: int | None = None
    # `token` None: the server reads the token from `token_file`, and creates the file if it is
    # missing. `token_file` None: a file in the user's state folder.
    token: str | None = None
    token_file: str | None = None
    programs: list[Program] | None = None
    env: list[str] = []
    roots: list[str] | None = None
    user_helper: list[str] | None = None
    processes_max: int | None = None
    secrets: list[str] = []
    # Budgets per day: of all sessions, and of callers, each as CALLER:BUDGET.
    budget: str | None = None
    caller_budgets: list[str] = []

    # For a shared store (nats://…). `name`: name of this host; None takes the machine's name.
    # `labels`: what this host offers to sessions that need it. `room`: how many sessions it takes;
    # None means 0 for a server and ROOM for `banksman host`.
    name: str | None = None
    labels: list[str] = []
    room: int | None = None
    # Keep the agents' transcripts in the shared store, for the host that takes a session over.
    mirror_transcripts: bool = True

    body_bytes_max: int = 32 << 20
    # Limit of open event streams for one client: an address with its way of authentication.
    streams_max: int = 1024
    heartbeat_seconds: float = 15.0
    stall_seconds: float = 30.0
    # How long running turns may take to finish when the server shuts down.
    drain_seconds: float = 60.0
    log_format: str = "text"
    log_level: str = "info"

    def __post_init__(self) -> None:
        positive = (
            "body_bytes_max",
            "streams_max",
            "heartbeat_seconds",
            "stall_seconds",
            "drain_seconds",
        )
        for name in (*positive, "keep_bytes", "keep_seconds"):
            value = getattr(self, name)
            if value is not None and not 0 < value < 1 << 53:
                hint = "use a number above 0"
                raise UsageError(f"{name} cannot be {value!r}", hint=hint, setting=name)
        if self.processes_max is not None and self.processes_max < 1:
            raise UsageError(
                f"processes_max cannot be {self.processes_max}",
                hint="use a whole number, 1 or more, or leave it out",
                setting="processes_max",
            )
        if not 0 <= self.port <= 65535:
            hint = "use 0 to 65535; 0 takes any free port"
            raise UsageError(f"invalid port {self.port}", hint=hint, setting="port")
        if self.log_format not in ("text", "json"):
            raise UsageError(f"unknown log_format {self.log_format!r}", hint='use "text" or "json"')
        if self.log_level not in ("debug", "info", "warning", "error"):
            hint = 'use "debug", "info", "warning" or "error"'
            raise UsageError(f"unknown log_level {self.log_level!r}", hint=hint)
        if self.token is not None and not _TOKEN.fullmatch(self.token):
            hint = "use 8 visible ASCII characters or more"
            raise UsageError("invalid token", hint=hint, setting="token")
        if any(not entry or not entry[0] for entry in self.programs or ()):
            hint = "use a program's name, or the words of a command"
            raise UsageError("programs contains an empty entry", hint=hint, setting="programs")
        for name in self.hosts:
            if not _NAME.fullmatch(name):
                raise UsageError(
                    f"invalid entry {name!r:.60} in hosts",
                    hint="use a name or an address, without a port",
                    setting="hosts",
                )
        self.shared_budgets()
        self._check_membership()
        if not self.allow_remote and not is_loopback(self.bind):
            hint = (
                "bind 127.0.0.1, "
                "or pass --allow-remote (allow_remote = true) and put TLS in front of it"
            )
            if not _is_ip_address(self.bind):
                # A name may resolve to any address, or to none.
                message = f"cannot bind {self.bind!r:.100}: it is not a loopback address"
                raise UsageError(message, hint=hint)
            raise UsageError(
                f"cannot bind {self.bind}: other machines can reach it,"
                " and every client with the token can start any program here",
                hint=hint,
            )

    def shared_budgets(self) -> tuple[Budget | None, dict[str, Budget]]:
        """Return the budgets of the host and of callers. Raises `UsageError`."""
        callers: dict[str, Budget] = {}
        for entry in self.caller_budgets:
            caller, _, text = entry.rpartition(":")
            budget = arguments.parse_budget(text, f"the budget of {caller or 'a caller'}")
            if not caller or budget is None:
                hint = "use CALLER:UNIT=NUMBER,…, or *:UNIT=NUMBER,… for any caller"
                raise UsageError(
                    f"invalid caller budget {entry!r:.60}", hint=hint, setting="caller_budgets"
                )
            callers[caller] = budget
        return (None if self.budget is None else arguments.parse_budget(self.budget)), callers

    def _check_membership(self) -> None:
        session_spec.checked(self.labels)
        if self.name is not None and not _HOST_NAME.fullmatch(self.name):
            hint = "use 1 to 64 letters, digits, . _ -"
            raise UsageError(f"invalid host name {self.name!r:.60}", hint=hint, setting="name")
        if self.room is not None and not 0 <= self.room <= ROOM_MAX:
            hint = f"use 0 (no sessions) to {ROOM_MAX}"
            raise UsageError(f"room cannot be {self.room}", hint=hint, setting="room")
        if (self.room or self.labels or self.name) and not self.is_clustered:
            hint = "set store = nats://…, or leave room, labels and name out"
            raise UsageError(
                "room, labels and name need a store that several hosts share", hint=hint
            )

    def with_room(self, room: int) -> ServerSettings:
        return msgspec.structs.replace(self, room=room)

    @property
    def is_clustered(self) -> bool:
        """Whether hosts on several machines share the store."""
        return self.store is not None and is_address(self.store)

    @property
    def store_shown(self) -> str:
        """The store's address without credentials."""
        if self.store is None:
            return "the state folder"
        return str(parse(self.store)) if is_address(self.store) else self.store

    def shown(self) -> dict[str, Any]:
        """Return the settings for display, without secrets and credentials."""
        hidden = {"secrets", "token", "token_file"}
        found = {
            field: getattr(self, field) for field in self.__struct_fields__ if field not in hidden
        }
        return found if self.store is None else {**found, "store": self.store_shown}


def is_loopback(bind: str) -> bool:
    """Whether this address is reachable from this machine only."""
    if bind == "localhost":
        return True
    # Any other name may resolve to another address tomorrow.
    return _is_ip_address(bind) and ipaddress.ip_address(bind).is_loopback


def _is_ip_address(bind: str) -> bool:
    try:
        ipaddress.ip_address(bind)
    except ValueError:
        return False
    return True


def load(
    path: str | os.PathLike[str] | None = None, flags: Mapping[str, Any] | None = None
) -> ServerSettings:
    """Load the settings.

    `path`: the TOML file; None takes the user's file, if it exists. `flags` win over every other
    source; None stands for a flag that was not given.
    """
    given = {f"serve.{name}": value for name, value in (flags or {}).items()}
    return of(config.load(flags=given, path=path))


def of(found: config.LayeredConfig) -> ServerSettings:
    """Convert the merged configuration. Raises `UsageError` if a value is invalid."""
    try:
        return msgspec.convert(found.table("serve"), ServerSettings)
    except msgspec.ValidationError as exc:
        # An error of `__post_init__` is already a UsageError. msgspec's own message names the field
        # and the fault.
        raise (
            _placed(exc.__cause__, found)
            if isinstance(exc.__cause__, UsageError)
            else UsageError(f"invalid setting: {exc}", hint="see docs/server.md")
        ) from None


def _placed(error: UsageError, found: config.LayeredConfig) -> UsageError:
    """Return the error with the place of the value that it is about, if it is about one value."""
    setting = error.ids.get("setting")
    if setting is None:
        return error
    where = found.where(f"serve.{setting}")
    return UsageError(f"{where}: {error.args[0]}", hint=error.hint, **error.ids)
