"""Find out whether the package can print a text that a page quotes.

The texts of the package are its string constants, without docstrings. A template such as
`f"cannot read {path}: {reason}"` or `"%s failed"` is a text with gaps. A quote may have gaps too, written as `…`.
A quote is known if one of these is true:

- A text of the package matches the quote: each gap of the text stands for any characters.
- The quote matches a text of the package: each `…` stands for any characters, also for gaps.
- The quote has two parts, divided by a colon, a comma, a semicolon or a parenthesis, and both are known. Errors with a
  hint and log lines with a subject are composed in this way.

A text that is one gap matches everything. So a match counts only if most characters of the quote are fixed: they are in
the text, or they fill a gap of the text and are known themselves.
"""

from __future__ import annotations

import ast
import collections
import errno
import functools
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

SOURCES = Path(__file__).resolve().parents[2] / "src" / "banksman"
SOURCE_FILES = sorted(set(SOURCES.rglob("*.py")) - set((SOURCES / "testing").rglob("*.py")))
# The methods of a logger for warnings and errors.
LEVELS = ("warning", "error", "exception", "critical")
# A gap in a text of the package. No text has this character.
GAP = "\0"
# The part of the characters of a quote that must be fixed.
SHARE_MIN = 0.75
# The part of its words that a text must have to be compared. It is lower: a value may have several words.
WORDS_SHARE_MIN = 0.3
# An error or a log line is shorter. Longer texts are help texts and templates of files.
CHARACTERS_MAX = 500
PERCENT = re.compile(r"%(?:\(\w+\))?[-#0 +]*(?:\d+|\*)?(?:\.\d+)?[sdrfgxi]")
BRACES = re.compile(r"\{[^{}]*\}")
DIVIDERS = re.compile(r": |, |; | \(")
WORDS = re.compile(r"[\w'-]{2,}")
# Texts of the system and of SQLite that the package passes on.
FOREIGN = {
    *(os.strerror(number) for number in errno.errorcode),
    *("database is locked", "database or disk is full", "file is not a database"),
}


def _text(node: ast.expr) -> str | None:
    """Return the text of a string expression, with a gap for each part that varies. None if it is no string."""
    match node:
        case ast.Constant(value=str(value)):
            return value
        case ast.JoinedStr(values=values):
            return "".join(GAP if (part := _text(value)) is None else part for value in values)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            parts = _text(left), _text(right)
            return None if parts == (None, None) else "".join(GAP if part is None else part for part in parts)
        case _:
            return None


def _variants(text: str) -> set[str]:
    """Return the text, its lines, and both with gaps for the fields of `%` and `format`."""
    lines = {line.strip(" ,;") for line in text.splitlines()} | {text}
    if "%" not in text and "{" not in text:
        return lines
    return lines | {PERCENT.sub(GAP, line) for line in lines} | {BRACES.sub(GAP, line) for line in lines}


@functools.cache
def _texts_and_names() -> tuple[frozenset[str], frozenset[str]]:
    """Return the texts of the package, and the names: of classes, attributes, parameters, and all texts."""
    texts = set(FOREIGN)
    names: set[str] = set()
    for path in SOURCE_FILES:
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if isinstance(node, ast.expr) and id(node) not in docstrings and (text := _text(node)) is not None:
                if len(text) <= CHARACTERS_MAX:
                    texts.update(_variants(text))
                continue
            match node:
                case ast.ClassDef(name=name) | ast.Attribute(attr=name) | ast.Name(id=name) | ast.arg(arg=name):
                    names.add(name)
                case ast.keyword(arg=str(name)):
                    names.add(name)
                case _:
                    pass
    return frozenset(texts), frozenset(names | texts)


def _first_words(call: ast.Call, texts: dict[str, str]) -> str | None:
    """Return the first argument of a call as a text. A name stands for the text that the function gives it."""
    match call.args:
        case [ast.Name(id=name), *_]:
            return texts.get(name)
        case [first, *_]:
            return _text(first)
        case _:
            return None


def log_lines() -> Iterator[tuple[str, str | None]]:
    """Yield each call that logs a warning or an error: its place, and the first line of its text, with gaps.

    The text is None if it is neither a constant nor a variable of the function that has a constant value.
    """
    for path in SOURCE_FILES:
        source = path.read_text(encoding="utf-8")
        if "getLogger" not in source:
            continue
        tree = ast.parse(source)
        loggers = {
            target.id
            for node in tree.body
            if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("logging.getLogger(")
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for function in ast.walk(tree):
            if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            texts = {
                node.targets[0].id: text
                for node in ast.walk(function)
                if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
                if (text := _text(node.value)) is not None
            }
            for node in ast.walk(function):
                match node:
                    case ast.Call(func=ast.Attribute(value=ast.Name(id=logger), attr=level)) if (
                        logger in loggers and level in LEVELS
                    ):
                        text = _first_words(node, texts)
                        place = f"{path.relative_to(SOURCES)}:{node.lineno}"
                        yield place, None if text is None else PERCENT.sub(GAP, text.partition("\n")[0])
                    case _:
                        pass


def is_shown(line: str, quotes: Iterable[str]) -> bool:
    """Return whether one of the quotes is this log line, with `…` or a value in each gap."""
    pattern = _pattern(line, GAP)
    return any(pattern.fullmatch(quote) and line.count(GAP) >= quote.count("…") for quote in quotes)


@functools.cache
def _index() -> dict[str, list[str]]:
    """Return the texts by each of their words, so that a quote is compared with few of them."""
    found: dict[str, list[str]] = {}
    for text in _texts_and_names()[0]:
        for word in set(WORDS.findall(text)):
            found.setdefault(word, []).append(text)
    return found


def _candidates(quote: str) -> Iterator[str]:
    """Yield the texts that have several words of the quote."""
    words = set(WORDS.findall(quote))
    shared = collections.Counter(text for word in words for text in _index().get(word, ()))
    for text, number in shared.items():
        if number >= WORDS_SHARE_MIN * len(words):
            yield text


def _fixed(text: str) -> int:
    """Count the characters that are not a gap or a value: a number, or text in quotation marks."""
    return len(re.sub(rf"'[^']*'|[\d\s…{GAP}]", "", text))


@functools.cache
def _pattern(text: str, gap: str) -> re.Pattern[str]:
    return re.compile("(.*?)".join(map(re.escape, text.split(gap))), re.DOTALL)


def _is_text(quote: str) -> bool:
    for text in _candidates(quote):
        if match := _pattern(text, GAP).fullmatch(quote):
            filled = sum(_fixed(part) for part in match.groups() if _fixed(part) and is_known(part))
            if _fixed(text) + filled >= SHARE_MIN * _fixed(quote):
                return True
        if "…" in quote and _pattern(quote, "…").fullmatch(text):
            return True
    return False


def is_name(quote: str) -> bool:
    """Return whether the quote is a name of the package: an error, an event kind, a member, or `name=value` of one."""
    name, _, value = quote.partition("=")
    known = _texts_and_names()[1]
    return name in known and (value in known or value in ("", "…"))


@functools.cache
def is_known(quote: str) -> bool:
    """Return whether the package can print the quote."""
    quote = quote.strip()
    if not _fixed(quote) or is_name(quote) or _is_text(quote):
        return True
    for match in DIVIDERS.finditer(quote):
        left, right = quote[: match.start()], quote[match.end() :]
        if match[0] == " (":
            right = right.removesuffix(")")
        if is_known(left) and is_known(right):
            return True
    return False
