"""Completion data of all verbs, read from their parsers: flags, flag values and positional words.

A few values that no parser knows are in tables here. The metavar of an argument gives its kind:
SESSION means a session in every verb.
"""

from __future__ import annotations

import argparse
import enum
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module

from banksman.cli import GROUPS
from banksman.cli.arguments import Parser


class WordKind(enum.Enum):
    """The source of completions for a word."""

    NOTHING = "nothing"  # Free text, or a number.
    WORDS = "words"
    FILES = "files"
    FOLDERS = "folders"
    COMMANDS = "commands"
    SESSIONS = "sessions"
    AGENTS = "agents"
    KEYS = "keys"


# Kinds whose values `banksman completion --list` looks up when the user presses Tab.
LISTED = (WordKind.SESSIONS, WordKind.AGENTS, WordKind.KEYS)


@dataclass(frozen=True, slots=True)
class Slot:
    """One positional word, or the value of a flag.

    `words`: the choices. `is_repeated`: all further words are of the same kind.
    """

    kind: WordKind
    words: tuple[str, ...] = ()
    is_repeated: bool = False


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag. `takes`: the kind of its value; None if it has no value."""

    names: tuple[str, ...]
    what: str
    takes: Slot | None


@dataclass(frozen=True, slots=True)
class CommandEntry:
    """One verb. `has_command`: the words after -- are a command."""

    name: str
    what: str
    flags: tuple[Flag, ...]
    slots: tuple[Slot, ...]
    has_command: bool


_BY_METAVAR = {
    "SESSION": WordKind.SESSIONS,
    "AGENT": WordKind.AGENTS,
    "FOLDER": WordKind.FOLDERS,
    "D": WordKind.FOLDERS,
    "PATH": WordKind.FILES,
    "FILE": WordKind.FILES,
    "COMMAND": WordKind.COMMANDS,
}
# Arguments whose metavar does not give the kind: by name in every verb, then by name in one verb.
_BY_DEST = {
    "priority": Slot(WordKind.WORDS, ("interactive", "normal", "background")),
    "on_busy": Slot(WordKind.WORDS, ("enqueue", "reject", "interrupt", "steer", "collect")),
}
_SPECIAL: dict[tuple[str, str], tuple[Slot, ...]] = {
    ("config", "key"): (Slot(WordKind.KEYS),),
    ("agents", "name"): (Slot(WordKind.AGENTS),),
    ("answer", "words"): (
        Slot(WordKind.SESSIONS),
        Slot(WordKind.WORDS, ("allow", "deny"), is_repeated=True),
    ),
}


def verbs() -> Iterator[CommandEntry]:
    """Yield the completion data of every verb."""
    for group in GROUPS.values():
        for name, what in group.items():
            parser: Parser = import_module(f"banksman.cli.commands.{name}").parser()
            yield described(name, what, parser)


def described(name: str, what: str, parser: Parser) -> CommandEntry:
    """Read the completion data of one verb from its parser."""
    flags: list[Flag] = []
    slots: list[Slot] = []
    for action in parser._actions:  # argparse has no public way to list them.
        if action.option_strings:
            takes = None if action.nargs == 0 else _slots(name, action)[0]
            flags.append(Flag(tuple(action.option_strings), _first_sentence(action.help), takes))
        else:
            slots += _slots(name, action)
    has_command = "-- COMMAND" in (parser.usage or "") or any(
        slot.kind is WordKind.COMMANDS for slot in slots
    )
    return CommandEntry(name, what, tuple(flags), tuple(slots), has_command=has_command)


def _slots(verb: str, action: argparse.Action) -> tuple[Slot, ...]:
    if (verb, action.dest) in _SPECIAL:
        return _SPECIAL[verb, action.dest]
    if action.dest in _BY_DEST:
        return (_BY_DEST[action.dest],)
    if action.choices is not None:
        return (Slot(WordKind.WORDS, tuple(map(str, action.choices))),)
    metavar = action.metavar if isinstance(action.metavar, str) else ""
    kind = _BY_METAVAR.get(metavar.partition(" ")[0], WordKind.NOTHING)
    return (Slot(kind, is_repeated=action.nargs in ("+", "*", argparse.REMAINDER)),)


def _first_sentence(text: str | None) -> str:
    """Shorten a help text: beside a flag there is room for a few words only."""
    return (text or "").partition(";")[0].partition("\n")[0].replace("%%", "%")
