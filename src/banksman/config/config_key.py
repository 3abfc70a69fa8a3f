"""One setting: its name, the values that it accepts, and the check of a value.

`checked` accepts a value from TOML or from a flag. `of_text` accepts the text of a variable. Their
errors name the place of the value and the values that the key accepts. They never show a secret.
`keys.py` has all settings.
"""

from __future__ import annotations

import enum
import math
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
