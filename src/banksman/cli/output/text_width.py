"""How much room a text takes on a screen: letters are one column wide, many of Asia's and most pictures two, and marks
that sit on a letter none. Terminals disagree about a few: nothing that must not be torn may rest on this count.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from functools import lru_cache

# A word of so much is not left alone on the last row.
SHORT_COLUMNS_MAX = 2
_MARKS = ("Mn", "Me", "Cf")
# The later parts of a Korean syllable, which join the first.
_JOINED = range(0x1160, 0x1200)


@lru_cache(maxsize=4096)
def _columns(character: str) -> int:
    if unicodedata.category(character) in _MARKS or ord(character) in _JOINED:
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def width(text: str) -> int:
    """In columns. For text that is safe and on one line already."""
    return len(text) if text.isascii() else sum(map(_columns, text))


def cut(text: str, columns: int) -> str:
    """As much of it as there is room for; with a mark, if that is not all."""
    if width(text) <= columns:
        return text
    if columns < 1:
        return ""
    kept = next(rows(text, columns - 1), "")
    # A letter that is wider than all the room there is.
    return f"{kept}…" if width(kept) < columns else "…"


def padded(text: str, columns: int) -> str:
    return text + " " * (columns - width(text))


def rows(text: str, columns: int) -> Iterator[str]:
    """Cut wherever the room ends, as a terminal does it. A letter that is wider than a row has one of its own."""
    begin = used = 0
    for index, character in enumerate(text):
        size = _columns(character)
        if used + size > columns and index > begin:
            yield text[begin:index]
            begin, used = index, 0
        used += size
    if begin < len(text):
        yield text[begin:]


def wrapped(text: str, columns: int, *, indent: str = "") -> list[str]:
    """Cut between words; a word that is longer than a row, anywhere. What comes after the first row is indented."""
    found: list[str] = []
    line = ""
    words = text.lstrip(" ").split(" ")
    # What it begins with is meant.
    words[0] = text[: len(text) - len(text.lstrip(" "))] + words[0]
    for word in words:
        joined = f"{line} {word}" if line else f"{indent if found else ''}{word}"
        if width(joined) <= columns:
            line = joined
            continue
        if width(word) <= SHORT_COLUMNS_MAX and " " in line.strip():
            # `4 s`: a unit by itself says nothing.
            line, _, before = line.rpartition(" ")
            word = f"{before} {word}"  # noqa: PLW2901
        if line:
            found.append(line)
        *whole, line = list(rows(f"{indent if found else ''}{word}", max(columns, 1))) or [""]
        found += whole
    return [*found, line]
