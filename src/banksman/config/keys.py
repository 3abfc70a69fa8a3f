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
    """Type of value that a key accepts. The enum value is the hint of the error."""

    TEXT = "text"
    WHOLE = "a whole number"
    NUMBER = "a number"
    FLAG = "true or false"
    WORDS = "a list of texts"
    PROGRAMS = "a list of programs: each a text, or a list of the words that a command begins with"


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
        return f"one of: {', '.join(self.choices)}" if self.choices else self.kind.value


# The comment above each table of the template.
TABLES = {
    "serve": "The server: `banksman serve`, and `banksman host`.",
    "run": "`banksman run`.",
}

_TOP = (
    ConfigKey(
        name="url",
        kind=ValueKind.TEXT,
        what="The server that verbs ask.",
        usual="the one that was started here; without one, a host inside of the verb",
        example="http://127.0.0.1:4380",
    ),
    ConfigKey(
        name="store",
        kind=ValueKind.TEXT,
        what='Where sessions are: "sqlite:PATH", "memory:" or "nats://HOST". A server\'s too, unless [serve] says.',
        usual="store.db in the state folder",
        example="sqlite:/var/lib/banksman/log.db",
    ),
    ConfigKey(
        name="format",
        kind=ValueKind.TEXT,
        what="How verbs say what they found.",
        default="text",
        choices=("text", "json", "quiet"),
    ),
    ConfigKey(
        name="agent",
        kind=ValueKind.TEXT,
        what="The agent where none is named. `banksman agents` lists them.",
        default="claude",
    ),
    ConfigKey(
        name="token",
        kind=ValueKind.TEXT,
        what="What a server elsewhere lets us in for.",
        usual="the server's own, from the state folder",
        is_secret=True,
        is_in_file=False,
    ),
)

_SERVE = (
    ConfigKey(name="serve.bind", kind=ValueKind.TEXT, what="The address to listen on.", default="127.0.0.1"),
    ConfigKey(name="serve.port", kind=ValueKind.WHOLE, what="The port; 0: any that is free.", default=4380),
    ConfigKey(
        name="serve.allow_remote",
        kind=ValueKind.FLAG,
        what="Allow an address that other machines can reach. Put TLS in front of it.",
        default=False,
    ),
    ConfigKey(
        name="serve.hosts",
        kind=ValueKind.WORDS,
        what="Names, besides the loopback's, under which a proxy shows this server.",
        default=[],
        example=["banksman.example.org"],
    ),
    ConfigKey(
        name="serve.store",
        kind=ValueKind.TEXT,
        what="Where the server keeps sessions, if elsewhere than `store` says.",
        usual="as `store`",
        example="sqlite:/var/lib/banksman/log.db",
    ),
    ConfigKey(
        name="serve.keep_bytes",
        kind=ValueKind.WHOLE,
        what="How many bytes of a session's events are kept.",
        usual="all",
        example=1 << 30,
    ),
    ConfigKey(
        name="serve.keep_seconds",
        kind=ValueKind.WHOLE,
        what="For how long they are kept.",
        usual="for ever",
        example=30 * 24 * 3600,
    ),
    ConfigKey(
        name="serve.token",
        kind=ValueKind.TEXT,
        what="The token itself, 8 characters or more. A file of its own is the better place.",
        usual="the one in token_file",
        example="…",
        is_secret=True,
    ),
    ConfigKey(
        name="serve.token_file",
        kind=ValueKind.TEXT,
        what="Where the token is; made at the first start, for this user only.",
        usual="token in the state folder",
        example="/etc/banksman/token",
    ),
    ConfigKey(
        name="serve.programs",
        kind=ValueKind.PROGRAMS,
        what="What callers may start: a program by name or path, or the beginning of a command.",
        usual="anything",
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
        what="The folders that callers may start something in.",
        usual="any",
        example=["/srv/work"],
    ),
    ConfigKey(
        name="serve.user_helper",
        kind=ValueKind.WORDS,
        what="The words by which a command of another user is started.",
        usual="none",
        example=["sudo", "-n"],
    ),
    ConfigKey(
        name="serve.processes_max",
        kind=ValueKind.WHOLE,
        what="How many agents' processes there may be at once.",
        usual="as many as are needed",
        example=8,
    ),
    ConfigKey(
        name="serve.secrets",
        kind=ValueKind.WORDS,
        what="What is never written to the store nor to the log lines.",
        default=[],
        example=["…"],
        is_secret=True,
    ),
    ConfigKey(
        name="serve.name",
        kind=ValueKind.TEXT,
        what="What this host is called among those that share a store (nats://…).",
        usual="the name of the machine",
        example="build-1",
    ),
    ConfigKey(
        name="serve.labels",
        kind=ValueKind.WORDS,
        what="What this host has that a session may need.",
        default=[],
        example=["gpu", "repo=x"],
    ),
    ConfigKey(
        name="serve.room",
        kind=ValueKind.WHOLE,
        what="How many sessions of a shared store this host takes.",
        usual="64 for `banksman host`; none for a server, which only asks the others",
        example=16,
    ),
    ConfigKey(
        name="serve.mirror_transcripts",
        kind=ValueKind.FLAG,
        what="Keep agents' transcripts, secrets in them too, in a shared store, for who takes their sessions over.",
        default=True,
    ),
    ConfigKey(name="serve.body_bytes_max", kind=ValueKind.WHOLE, what="The largest request.", default=32 << 20),
    ConfigKey(name="serve.streams_max", kind=ValueKind.WHOLE, what="Event streams of one client.", default=1024),
    ConfigKey(
        name="serve.heartbeat_seconds",
        kind=ValueKind.NUMBER,
        what="A stream says something at least this often.",
        default=15.0,
    ),
    ConfigKey(
        name="serve.stall_seconds",
        kind=ValueKind.NUMBER,
        what="A client that takes nothing for so long is cut off.",
        default=30.0,
    ),
    ConfigKey(
        name="serve.drain_seconds",
        kind=ValueKind.NUMBER,
        what="How long what runs may take to finish when the server is told to go.",
        default=60.0,
    ),
    ConfigKey(
        name="serve.log_format",
        kind=ValueKind.TEXT,
        what="How log lines are written.",
        default="text",
        choices=("text", "json"),
    ),
    ConfigKey(
        name="serve.log_level",
        kind=ValueKind.TEXT,
        what="What is worth a log line.",
        default="info",
        choices=("debug", "info", "warning", "error"),
    ),
)

_RUN = (
    ConfigKey(
        name="run.priority",
        kind=ValueKind.TEXT,
        what="How urgent it is: interactive, normal, background, or a number.",
        default="normal",
    ),
    ConfigKey(
        name="run.on_question",
        kind=ValueKind.TEXT,
        what="What becomes of a question of the agent's. ask: whoever is there is asked; fail: the turn is stopped.",
        default="ask",
        choices=("ask", "allow", "deny", "fail"),
    ),
)

KEYS: dict[str, ConfigKey] = {key.name: key for key in (*_TOP, *_SERVE, *_RUN)}


def nearest(word: str, known: Iterable[str]) -> str:
    """Return the known word with the most similar spelling, however different it is."""
    # Loaded only for a misspelt word.
    from difflib import get_close_matches  # noqa: PLC0415

    found = get_close_matches(word, sorted(known), 1, 0)
    assert found, "there is a nearest word whenever any is known"
    return found[0]


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
        shown = "what it is" if key.is_secret else f"{value!r:.60}"
    except ValueError:
        shown = "a number of so many digits"
    return UsageError(f"{where}: {key.name} cannot be {shown}", hint=key.expected)
