"""The word that was meant. Something is always the nearest; whoever misspelt it sees at once whether it is right."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, cast

from banksman.config.keys import ConfigKey, ValueKind
from banksman.errors import UsageError


def nearest(word: str, known: Iterable[str]) -> str:
    # Loaded only when somebody has misspelt something.
    from difflib import get_close_matches  # noqa: PLC0415

    found = get_close_matches(word, sorted(known), 1, 0)
    assert found, "one of them is the nearest, however far"
    return found[0]


# Whether a value is what its key takes, and a value out of the text of a variable. Errors say what is expected, where
# it was found, and never what a secret is.

_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def checked(key: ConfigKey, value: Any, *, where: str) -> Any:
    """As the key takes it. `where`: what the error begins with."""
    if not _fits(key.kind, value) or (key.choices and value not in key.choices):
        raise wrong(key, value, where=where)
    return float(value) if key.kind is ValueKind.NUMBER else value


def of_text(key: ConfigKey, text: str, *, where: str) -> Any:
    """Of a variable: a list is one of TOML's, or words with commas between them."""
    match key.kind:
        case ValueKind.TEXT:
            value: Any = text
        case ValueKind.FLAG:
            word = text.strip().lower()
            if word not in (*_TRUE, *_FALSE):
                raise wrong(key, text, where=where)
            value = word in _TRUE
        case ValueKind.WHOLE | ValueKind.NUMBER:
            try:
                value = int(text) if key.kind is ValueKind.WHOLE else float(text)
            except ValueError:
                raise wrong(key, text, where=where) from None
        case ValueKind.WORDS | ValueKind.PROGRAMS:
            value = _list(key, text, where)
    return checked(key, value, where=where)


def wrong(key: ConfigKey, value: Any, *, where: str) -> UsageError:
    shown = "what it is" if key.is_secret else f"{value!r:.60}"
    return UsageError(f"{where}: {key.name} cannot be {shown}", hint=key.expected)


def _list(key: ConfigKey, text: str, where: str) -> Any:
    if not text.lstrip().startswith("["):
        return [word.strip() for word in text.split(",") if word.strip()]
    import tomllib  # noqa: PLC0415

    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        raise wrong(key, text, where=where) from None


def _fits(kind: ValueKind, value: Any) -> bool:
    match kind:
        case ValueKind.TEXT:
            return isinstance(value, str)
        case ValueKind.FLAG:
            return isinstance(value, bool)
        case ValueKind.WHOLE:
            return _is_number(value) and isinstance(value, int)
        case ValueKind.NUMBER:
            # Every wait has an end, so infinity is none of them.
            return _is_number(value) and math.isfinite(value)
        case ValueKind.WORDS:
            return _are_words(value)
        case ValueKind.PROGRAMS:
            return isinstance(value, list) and all(
                isinstance(item, str) or _are_words(item) for item in cast("list[Any]", value)
            )


def _is_number(value: Any) -> bool:
    """True is one to Python, and to nobody else."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _are_words(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in cast("list[Any]", value))
