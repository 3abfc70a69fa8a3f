"""All settings as data: name, accepted values, default and purpose of each key.

`KEYS` is the source for `banksman config init`, the names of variables, the checks and the help. A
test compares the keys of `[serve]` with `ServerSettings`.

`checked` accepts a value from TOML or from a flag. `of_text` accepts the text of a variable. Their
errors name the place of the value and the values that the key accepts. They never show a secret.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from banksman.errors import UsageError

_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


class ValueKind(enum.Enum):
    """Type of value that a key accepts. The enum value names it in the hint of the error."""

    TEXT = "a string"
    WHOLE = "a whole number"
    NUMBER = "a number"
    FLAG = "true or false"
    WORDS = "a list of strings"
    PROGRAMS = "a list of programs: each a string, or a list of the first words of a command"


_TYPES: dict[ValueKind, Any] = {
    ValueKind.TEXT: str,
    ValueKind.WHOLE: int,
    ValueKind.NUMBER: float,
    ValueKind.FLAG: bool,
    ValueKind.WORDS: list[str],
    ValueKind.PROGRAMS: list[str | list[str]],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigKey:
    """One setting.

    `name`: as in the file, with its table before a dot. `default`: None if the key has no default;
    `usual` then describes the behaviour without it. `choices`: the only accepted values.
    `is_secret`: `config show` prints "set" instead of the value. `is_in_file`: False for a value
    that does not belong in a file. `example`: the value for the template, where the default does
    not show how a value is written.
    """

    name: str
    kind: ValueKind
    what: str
    default: Any = None
    usual: str = ""
    choices: tuple[str, ...] = ()
    example: Any = None
    is_secret: bool = False
    is_in_file: bool = True

    @property
    def table(self) -> str:
        """The name of the table; empty at the top level."""
        return self.name.rpartition(".")[0]

    @property
    def short(self) -> str:
        """The name within the table."""
        return self.name.rpartition(".")[2]

    @property
    def variable(self) -> str:
        """The environment variable of this key, such as BANKSMAN_SERVE_PORT."""
        return f"BANKSMAN_{self.name.replace('.', '_').upper()}"

    @property
    def flag(self) -> str:
        """The command-line flag of this key, such as --port."""
        return f"--{self.short.replace('_', '-')}"

    @property
    def expected(self) -> str:
        """The values that the key accepts, as the hint of an error."""
        found = f"one of: {', '.join(self.choices)}" if self.choices else self.kind.value
        return f"use {found}"


# The comment above each table of the template.
TABLES = {
    "serve": "The server: `banksman serve`, and `banksman host`.",
    "run": "`banksman run`.",
}

_TOP = (
    ConfigKey(
        name="url",
        kind=ValueKind.TEXT,
        what="The server that verbs use.",
        usual="this user's running server, else an embedded host",
        example="http://127.0.0.1:4380",
    ),
    ConfigKey(
        name="store",
        kind=ValueKind.TEXT,
        what=(
            'The store of sessions: "sqlite:PATH", "memory:" or "nats://HOST". '
            "[serve] may set another."
        ),
        usual="store.db in the state folder",
        example="sqlite:/var/lib/banksman/log.db",
    ),
    ConfigKey(
        name="format",
        kind=ValueKind.TEXT,
        what="The output format of verbs.",
        default="text",
        choices=("text", "json", "quiet"),
    ),
    ConfigKey(
        name="agent",
        kind=ValueKind.TEXT,
        what="The default agent. `banksman agents` lists all agents.",
        default="claude",
    ),
    ConfigKey(
        name="fallback",
        kind=ValueKind.WORDS,
        what=(
            "Agents that serve a new session while its agent is limited or not installed, "
            "for `open`, `run` and `ask --open`."
        ),
        default=[],
        example=["codex", "gemini"],
    ),
    ConfigKey(
        name="token",
        kind=ValueKind.TEXT,
        what="The token for a server on another machine.",
        usual="the token of this user's server, from the state folder",
        is_secret=True,
        is_in_file=False,
    ),
)

_SERVE = (
    ConfigKey(
        name="serve.bind",
        kind=ValueKind.TEXT,
        what="The address to listen on.",
        default="127.0.0.1",
    ),
    ConfigKey(
        name="serve.port",
        kind=ValueKind.WHOLE,
        what="The port to listen on; 0 for any free port.",
        default=4380,
    ),
    ConfigKey(
        name="serve.allow_remote",
        kind=ValueKind.FLAG,
        what="Allow an address that other machines can reach. Put TLS in front of it.",
        default=False,
    ),
    ConfigKey(
        name="serve.hosts",
        kind=ValueKind.WORDS,
        what="Host names, besides those of loopback, under which a proxy publishes this server.",
        default=[],
        example=["banksman.example.org"],
    ),
    ConfigKey(
        name="serve.store",
        kind=ValueKind.TEXT,
        what="The store of the server, if it differs from `store`.",
        usual="the value of `store`",
        example="sqlite:/var/lib/banksman/log.db",
    ),
    ConfigKey(
        name="serve.keep_bytes",
        kind=ValueKind.WHOLE,
        what="The maximum number of bytes of events to keep per session.",
        usual="no limit",
        example=1 << 30,
    ),
    ConfigKey(
        name="serve.keep_seconds",
        kind=ValueKind.WHOLE,
        what="The number of seconds to keep events.",
        usual="no limit",
        example=30 * 24 * 3600,
    ),
    ConfigKey(
        name="serve.token",
        kind=ValueKind.TEXT,
        what="The token, 8 characters or more. Prefer token_file.",
        usual="the token in token_file",
        example="…",
        is_secret=True,
    ),
    ConfigKey(
        name="serve.token_file",
        kind=ValueKind.TEXT,
        what="The file of the token; created at the first start, only for this user.",
        usual="token in the state folder",
        example="/etc/banksman/token",
    ),
    ConfigKey(
        name="serve.programs",
        kind=ValueKind.PROGRAMS,
        what=(
            "The programs that callers may start: a name, a path, or the first words of a command."
        ),
        usual="all programs",
        example=["claude", ["python3", "-m", "agent"]],
    ),
    ConfigKey(
        name="serve.env",
        kind=ValueKind.WORDS,
        what="The variables that callers may set while `programs` is set.",
        default=[],
        example=["LANG"],
    ),
    ConfigKey(
        name="serve.roots",
        kind=ValueKind.WORDS,
        what="The folders in which callers may start programs.",
        usual="all folders",
        example=["/srv/work"],
    ),
    ConfigKey(
        name="serve.user_helper",
        kind=ValueKind.WORDS,
        what="The command prefix that starts a command as another user.",
        usual="none",
        example=["sudo", "-n"],
    ),
    ConfigKey(
        name="serve.processes_max",
        kind=ValueKind.WHOLE,
        what="The maximum number of agent processes at one time.",
        usual="no limit",
        example=8,
    ),
    ConfigKey(
        name="serve.secrets",
        kind=ValueKind.WORDS,
        what="Texts that are never written to the store or to log lines.",
        default=[],
        example=["…"],
        is_secret=True,
    ),
    ConfigKey(
        name="serve.budget",
        kind=ValueKind.TEXT,
        what=(
            "What all sessions may use in a day (UTC): "
            "caps on tokens, usd (an estimate), working_seconds and turns."
        ),
        usual="no limit",
        example="tokens=5000000,turns=500",
    ),
    ConfigKey(
        name="serve.caller_budgets",
        kind=ValueKind.WORDS,
        what="The same for each caller, as CALLER:BUDGET; `*` stands for any other caller.",
        default=[],
        example=["alice:tokens=1000000", "*:turns=50"],
    ),
    ConfigKey(
        name="serve.name",
        kind=ValueKind.TEXT,
        what="The name of this host among the hosts that share a store (nats://…).",
        usual="the name of the machine",
        example="build-1",
    ),
    ConfigKey(
        name="serve.labels",
        kind=ValueKind.WORDS,
        what="Properties of this host that a session may require.",
        default=[],
        example=["gpu", "repo=x"],
    ),
    ConfigKey(
        name="serve.room",
        kind=ValueKind.WHOLE,
        what="The maximum number of sessions of a shared store on this host.",
        usual="64 for `banksman host`; 0 for a server, which forwards to the other hosts",
        example=16,
    ),
    ConfigKey(
        name="serve.mirror_transcripts",
        kind=ValueKind.FLAG,
        what=(
            "Copy transcripts to the shared store, for hosts that take sessions over. "
            "A transcript that contains a value of `secrets` is not copied; "
            "other credentials are not detected."
        ),
        default=True,
    ),
    ConfigKey(
        name="serve.body_bytes_max",
        kind=ValueKind.WHOLE,
        what="The maximum size of a request, in bytes.",
        default=32 << 20,
    ),
    ConfigKey(
        name="serve.streams_max",
        kind=ValueKind.WHOLE,
        what="The maximum number of event streams per client.",
        default=1024,
    ),
    ConfigKey(
        name="serve.heartbeat_seconds",
        kind=ValueKind.NUMBER,
        what="The maximum number of seconds between two messages of a stream.",
        default=15.0,
    ),
    ConfigKey(
        name="serve.stall_seconds",
        kind=ValueKind.NUMBER,
        what="The number of seconds after which a client that reads nothing is disconnected.",
        default=30.0,
    ),
    ConfigKey(
        name="serve.drain_seconds",
        kind=ValueKind.NUMBER,
        what=(
            "The number of seconds that running turns and commands get to finish "
            "when the server stops."
        ),
        default=60.0,
    ),
    ConfigKey(
        name="serve.log_format",
        kind=ValueKind.TEXT,
        what="The format of log lines.",
        default="text",
        choices=("text", "json"),
    ),
    ConfigKey(
        name="serve.log_level",
        kind=ValueKind.TEXT,
        what="The lowest level of log lines to write.",
        default="info",
        choices=("debug", "info", "warning", "error"),
    ),
)

_RUN = (
    ConfigKey(
        name="run.priority",
        kind=ValueKind.TEXT,
        what="The priority of the turn: interactive, normal, background, or a number.",
        default="normal",
    ),
    ConfigKey(
        name="run.on_question",
        kind=ValueKind.TEXT,
        what="How to answer a question of the agent. ask: ask the user. fail: stop the turn.",
        default="ask",
        choices=("ask", "allow", "deny", "fail"),
    ),
    ConfigKey(
        name="run.on_limit",
        kind=ValueKind.TEXT,
        what="What the turn does while the agent's account is limited. wait: for the limit's end.",
        default="fail",
        choices=("fail", "wait"),
    ),
)

KEYS: dict[str, ConfigKey] = {key.name: key for key in (*_TOP, *_SERVE, *_RUN)}


# Words below this similarity (0 to 1) are not the same word with a typing error.
_SIMILARITY_MIN = 0.6


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word with the most similar spelling; None if no word is similar."""
    # Loaded only for a misspelt word.
    from difflib import get_close_matches  # noqa: PLC0415

    found = get_close_matches(word, sorted(known), 1, _SIMILARITY_MIN)
    return found[0] if found else None


def nearest_key(name: str) -> ConfigKey | None:
    """Return the key with the most similar name, with or without its table; None if none is."""
    # A full name comes first: `store` is also the short name of `serve.store`.
    named = {key.short: key for key in KEYS.values()} | KEYS
    found = nearest(name, named)
    return None if found is None else named[found]


def checked(key: ConfigKey, value: Any, *, where: str) -> Any:
    """Check a value and convert it to the type of its key.

    `where`: the first words of the error.
    """
    taken = value
    if type(value) is not _TYPES[key.kind]:
        # Importing msgspec takes 14 ms, which settings of the exact type do not pay.
        import msgspec  # noqa: PLC0415

        try:
            taken = msgspec.convert(value, _TYPES[key.kind])
        except msgspec.ValidationError:
            raise _wrong(key, value, where) from None
    # Infinity and NaN are refused: every timeout in Banksman has an end.
    is_endless = isinstance(taken, float) and not math.isfinite(taken)
    if is_endless or (key.choices and taken not in key.choices):
        raise _wrong(key, value, where)
    return taken


def of_text(key: ConfigKey, text: str, *, where: str) -> Any:
    """Parse the text of a variable. A list is TOML, or words separated by commas."""
    value: Any = text
    # This does not use msgspec's lax mode, which rejects "yes", "+5", "1_000" and spaces around a
    # number.
    match key.kind:
        case ValueKind.TEXT:
            pass
        case ValueKind.FLAG:
            word = text.strip().lower()
            value = word in _TRUE if word in (*_TRUE, *_FALSE) else text
        case ValueKind.WHOLE | ValueKind.NUMBER:
            try:
                value = int(text) if key.kind is ValueKind.WHOLE else float(text)
            except ValueError:
                raise _wrong(key, text, where) from None
        case ValueKind.WORDS | ValueKind.PROGRAMS:
            value = _list(key, text, where)
    return checked(key, value, where=where)


def _list(key: ConfigKey, text: str, where: str) -> Any:
    if not text.lstrip().startswith("["):
        return [word.strip() for word in text.split(",") if word.strip()]
    import tomllib  # noqa: PLC0415

    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        # ValueError covers TOML errors, and a number with more digits than Python accepts.
        raise _wrong(key, text, where) from None


def _wrong(key: ConfigKey, value: Any, where: str) -> UsageError:
    try:
        shown = "the given value" if key.is_secret else f"{value!r:.60}"
    except ValueError:
        shown = "a number with so many digits"
    return UsageError(f"{where}: {key.name} cannot be {shown}", hint=key.expected)
