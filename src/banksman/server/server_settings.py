"""Server settings: one validated value from flags, variables, a TOML file and defaults.

The file's table is `[serve]`. Every limit has a name here, so that users can see and change it.
`banksman.config` merges the sources and rejects unknown keys. This module checks the values.
"""

from __future__ import annotations

import ipaddress
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from banksman import Budget, config
from banksman.cluster.store_address import is_address, parse
from banksman.errors import UsageError
from banksman.folders import state_folder
from banksman.process.tree_hand_over import HOLD_SECONDS_MAX
from banksman.server.access import named_tokens
from banksman.server.ops import webhook_targets
from banksman.server.ops.webhook_targets import WebhookTarget
from banksman.sessions import arguments, containment, host_needs
from banksman.sessions.containment import Containment

PORT = 4380
# Longer than any id or name of a session.
NAME_LENGTH_MAX = 512
# The default burst of requests is what the limit allows in this time. A page sends ten requests or
# so when it is opened.
BURST_SECONDS = 10
# Default number of sessions of a host. Most sessions are idle, and `processes_max` limits the
# processes.
ROOM = 64
ROOM_MAX = 100_000
# Separates the path of a store from its settings, as `Host` reads a store address.
STORE_SETTING = re.compile(r"\?(?=(?:level|keep_bytes|keep_seconds)=)")
# What the settings may let callers choose for an agent.
CHOICES = (*containment.PARTS, "survive")
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
    server. `agent_…`: what agents may use, see `sessions/containment.py`. `callers_choose`: the
    parts of it that HTTP callers may choose.
    """

    bind: str = "127.0.0.1"
    port: int = PORT
    allow_remote: bool = False
    hosts: list[str] = []
    # Proxies that name their users: each as NAME@ADDRESS. See `access/trusted_proxy.py`.
    trusted_proxies: list[str] = []
    # PEM files of the port's certificate chain and its key. None: plain HTTP.
    tls_cert: str | None = None
    tls_key: str | None = None
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
    agent_user: str | None = None
    agent_limits: list[str] = []
    agent_scrub: list[str] | None = None
    agent_wrap: list[str] | None = None
    agent_sandbox: str | None = None
    agent_on_open: list[str] | None = None
    agent_on_close: list[str] | None = None
    callers_choose: list[str] = []
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
    # Requests of one token: `requests_burst` at once, and so many a second. None: no limit. The
    # burst's default is what `BURST_SECONDS` of the rate allow.
    requests_per_second: float | None = None
    requests_burst: int | None = None
    # Limit of open event streams for one client: an address with its way of authentication.
    streams_max: int = 1024
    heartbeat_seconds: float = 15.0
    stall_seconds: float = 30.0
    # How long running turns may take to finish when the server shuts down.
    drain_seconds: float = 60.0
    # Whether TERM hands the running work over to the next server; None: under a service manager.
    hand_over: bool | None = None
    # How long processes that were handed over wait for the next server.
    hold_seconds: float = 60.0
    # With less free space on the disk of the store, the server is not ready.
    disk_free_bytes_min: int = 256 << 20
    # "crash": agents survive a server that is killed, for as many seconds.
    survive: str | None = None
    # URLs that get events, the hosts that may get them beside this machine, and the events.
    webhooks: list[str] = []
    webhook_hosts: list[str] = []
    webhook_events: list[str] = msgspec.field(default_factory=lambda: [*webhook_targets.EVENTS])
    # The key of their signatures. None: a file in the user's state folder.
    webhook_secret_file: str | None = None
    # The OTLP collector that gets spans of turns, and whether they have prompts and outputs.
    otel_endpoint: str | None = None
    otel_content: bool = False
    log_format: str = "text"
    log_level: str = "info"

    def __post_init__(self) -> None:
        positive = (
            "body_bytes_max",
            "streams_max",
            "heartbeat_seconds",
            "stall_seconds",
            "drain_seconds",
            "hold_seconds",
        )
        optional = ("keep_bytes", "keep_seconds", "requests_per_second", "requests_burst")
        for name in (*positive, *optional):
            value = getattr(self, name)
            if value is not None and not 0 < value < 1 << 53:
                hint = "use a number above 0"
                raise UsageError(f"{name} cannot be {value!r}", hint=hint, setting=name)
        if not 0 <= self.disk_free_bytes_min < 1 << 53:
            hint = "use a number of bytes; 0 accepts a full disk"
            message = f"disk_free_bytes_min cannot be {self.disk_free_bytes_min}"
            raise UsageError(message, hint=hint, setting="disk_free_bytes_min")
        if self.hold_seconds > HOLD_SECONDS_MAX:
            hint = f"use at most {HOLD_SECONDS_MAX:.0f}"
            message = f"hold_seconds cannot be {self.hold_seconds!r}"
            raise UsageError(message, hint=hint, setting="hold_seconds")
        self._check_access()
        self._check_survival()
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
        self.webhook_targets()
        self.containment().check_limits()
        for part in self.callers_choose:
            if part not in CHOICES:
                hint = f"use some of: {', '.join(CHOICES)}"
                message = f"callers_choose cannot contain {part!r:.60}"
                raise UsageError(message, hint=hint, setting="callers_choose")
        self._check_membership()
        if not self.allow_remote and not is_loopback(self.bind):
            hint = (
                "bind 127.0.0.1, "
                "or pass --allow-remote (allow_remote = true), with --tls-cert and --tls-key or"
                " with TLS in front of it"
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

    def containment(self) -> Containment:
        """Return what agents may use by these settings. Raises `UsageError`."""
        if self.agent_wrap is not None and self.agent_sandbox is not None:
            hint = "leave out one of them"
            message = "cannot use both agent_wrap and agent_sandbox"
            raise UsageError(message, hint=hint, setting="agent_wrap")
        return containment.checked(
            user=self.agent_user,
            limits=containment.parse_limits(self.agent_limits, "agent_limits"),
            scrub=self.agent_scrub,
            wrap=self.agent_wrap if self.agent_sandbox is None else self.agent_sandbox,
            on_open=self.agent_on_open,
            on_close=self.agent_on_close,
        )

    @property
    def burst(self) -> int:
        """How many requests a token may send at once. Only with a limit of requests."""
        assert self.requests_per_second is not None
        usual = math.ceil(self.requests_per_second * BURST_SECONDS)
        return usual if self.requests_burst is None else self.requests_burst

    def _check_access(self) -> None:
        for entry in self.trusted_proxies:
            named_tokens.proxy_of(entry)
        if self.requests_burst is not None and self.requests_per_second is None:
            hint = "set both of them, or leave requests_burst out"
            message = "cannot use requests_burst without requests_per_second"
            raise UsageError(message, hint=hint, setting="requests_burst")
        if (self.tls_cert is None) != (self.tls_key is None):
            has, lacks = ("tls_cert", "tls_key") if self.tls_cert else ("tls_key", "tls_cert")
            hint = "set both of them, or neither"
            raise UsageError(f"cannot use {has} without {lacks}", hint=hint, setting=has)

    def webhook_targets(self) -> list[WebhookTarget]:
        """Return the targets of webhooks. Raises `UsageError`."""
        for event in self.webhook_events:
            if event not in webhook_targets.EVENTS:
                hint = f"use some of: {', '.join(webhook_targets.EVENTS)}"
                message = f"webhook_events cannot contain {event!r:.60}"
                raise UsageError(message, hint=hint, setting="webhook_events")
        return webhook_targets.targets_of(self.webhooks, self.webhook_hosts)

    def _check_survival(self) -> None:
        if arguments.checked_survive(self.survive) and (self.is_clustered or not self.is_durable):
            hint = "use a store in a file, or leave survive out"
            message = "cannot survive a crash of the server: the next one could not open its store"
            raise UsageError(message, hint=hint, setting="survive")

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
        host_needs.checked_labels(self.labels)
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
    def store_file(self) -> Path | None:
        """The file of the store; None for another store."""
        store = self.store or "sqlite:"
        if not store.startswith("sqlite:"):
            return None
        path = STORE_SETTING.split(store.removeprefix("sqlite:"), maxsplit=1)[0]
        return Path(os.path.realpath(os.path.expanduser(path) if path else default_store()))

    @property
    def store_folder(self) -> Path | None:
        """The folder that this server stores events in; None for a store in memory.

        In a cluster it is the folder of the journal.
        """
        if self.is_clustered:
            journal = parse(str(self.store)).journal
            return state_folder() / "journals" if journal is None else Path(journal)
        return None if self.store_file is None else self.store_file.parent

    @property
    def is_durable(self) -> bool:
        """Whether the store outlives the server."""
        return self.store != "memory:"

    @property
    def store_shown(self) -> str:
        """The store's address without credentials."""
        if self.store is None:
            return "the state folder"
        return str(parse(self.store)) if is_address(self.store) else self.store

    def shown(self) -> dict[str, Any]:
        """Return the settings for display, without secrets and credentials."""
        hidden = {"secrets", "token", "token_file", "tls_key", "webhook_secret_file"}
        found = {
            field: getattr(self, field) for field in self.__struct_fields__ if field not in hidden
        }
        # The path of a URL may contain a key.
        found["webhooks"] = [target.label for target in self.webhook_targets()]
        if self.otel_endpoint is not None:
            found["otel_endpoint"] = webhook_targets.origin_of(self.otel_endpoint)
        return found if self.store is None else {**found, "store": self.store_shown}


def default_store() -> Path:
    return state_folder() / "store.db"


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
