"""Describe a question of the agent in full, with the keys that answer it. Pure.

`title_of`, `subject_of` and `block_rows` make safe text, also for `answer` and `why`.
`QuestionView` maps a key to the body of the answer. `screen.py` draws the question. `attached.py`
and `turn_view.py` read the keys and send the answer.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from banksman.cli.output import as_line, as_text, rows

# The subject of an approval, in full. Pure.
#
# The tool decides which members of its input it reads, so every member is shown: a command padded
# with blanks, code beside a harmless description, the new text of a file. Members that usually
# decide what runs come first. The agent's words about the call (description, title, reason) come
# last and are marked as such.
#
# Every line is safe for a terminal. Long runs of blanks and empty lines could push the rest out of
# sight, so each run is replaced by its length.

Asked = Mapping[str, Any]

# A subject of one line up to this length is part of the title.
TITLE_CHARACTERS_MAX = 200
# Longer runs of blanks, within a line or before it, are replaced by their length. Code is seldom
# indented deeper.
BLANKS_MAX, INDENT_MAX = 8, 64
EMPTY_LINES_MAX = 2
# Deeper levels are shown as JSON.
DEPTH_MAX = 6

_FIRST = ("command", "code", "script", "file_path", "path", "url", "query", "pattern", "prompt")
_WORDS = ("description", "title", "reason", "decision_reason")
# Details that are not shown: ids and options for programs. All other details of the agent are
# shown.
_NOT_SHOWN = (
    *(
        "options",
        "permission_suggestions",
        "availableDecisions",
        "proposedExecpolicyAmendment",
        "commandActions",
    ),
    *("toolCallId", "tool_use_id", "agent_id", "status", "_meta", "display_name"),
    *("itemId", "threadId", "turnId", "callId", "conversationId", "approvalId", "startedAtMs"),
)
# The braille blank (U+2800) looks like a space.
_BLANKS = re.compile(rf"[\s\u2800]{{{BLANKS_MAX + 1},}}")

_AGENT = "the agent says: "
OPTIONS_MAX = 9


def title_of(asked: Asked) -> str:
    """Return the tool, with the subject if that is one short line."""
    return _titled(asked, _subject(asked))


def subject_of(asked: Asked) -> tuple[str, ...]:
    """Return the lines to approve; empty if the title contains everything."""
    subject = _subject(asked)
    return () if _is_short(subject) else tuple(f"{name}{line}" for name, line in subject)


def block_rows(lines: Iterable[str], columns: int | None = None) -> Iterator[str]:
    """Yield the lines with a mark in front that their text cannot imitate, split at the width."""
    for line in map(as_line, lines):
        if columns is None:
            yield f"│ {line}"
            continue
        # Terminals disagree about the width of non-ASCII letters, and some cut a row that is too
        # wide. Half the width is safe.
        room = columns - 2 if line.isascii() else (columns - 2) // 2
        for number, row in enumerate(rows(line, max(room, 1)) if line else ("",)):
            yield f"{'┊' if number else '│'} {row}"


# A label and the text behind it.
_Line = tuple[str, str]


def _is_short(subject: list[_Line]) -> bool:
    return not subject or (
        len(subject) == 1
        and subject[0][0] != _AGENT
        and len("".join(subject[0])) <= TITLE_CHARACTERS_MAX
    )


def _titled(asked: Asked, subject: list[_Line]) -> str:
    tool = as_line(
        asked.get("tool") or asked.get("wants") or "", characters_max=TITLE_CHARACTERS_MAX
    )
    if not subject:
        return tool
    if _is_short(subject):
        label, text = subject[0]
        return f"{tool}: {text}" if label.removesuffix(": ") in _FIRST else f"{tool}: {label}{text}"
    return f"{tool} ({len(subject)} line{'s' if len(subject) > 1 else ''} above)"


def _subject(asked: Asked) -> list[_Line]:
    given, details = _mapping(asked.get("input")), _mapping(asked.get("details"))
    if asked.get("wants") == "elicitation":
        # A form is filled in elsewhere, and a key approves nothing.
        return []
    first = [name for name in _FIRST if name in given]
    rest = [name for name in given if name not in first and not _is_words(name, given[name])]
    found = [line for name in (*first, *rest) for line in _member(name, given[name])]
    for name, value in details.items():
        if (
            name not in _NOT_SHOWN
            and not _is_words(name, value)
            and value not in (None, "", [], {})
        ):
            found += _member(name, value)
    words = [
        each[name]
        for each in (given, details)
        for name in _WORDS
        if _is_words(name, each.get(name))
    ]
    known = {
        value for name, value in given.items() if isinstance(value, str) and name not in _WORDS
    }
    for text in dict.fromkeys(words):
        # A title that only repeats the command adds nothing.
        if text not in known:
            first_line, *more = _lines(text)
            found += [(_AGENT, first_line), *((" " * len(_AGENT), line) for line in more)]
    return found


def _is_words(name: str, value: Any) -> bool:
    return name in _WORDS and isinstance(value, str) and value != ""


def _member(name: str, value: Any, depth: int = 0) -> list[_Line]:
    indent, label = "  " * depth, as_line(name)
    if (
        name == "command"
        and isinstance(value, list)
        and all(isinstance(word, str) for word in cast("list[Any]", value))
    ):
        value = shlex.join(cast("list[str]", value))
    if isinstance(value, str):
        lines = _lines(value) if value else ['""']
        if len(lines) == 1:
            return [(f"{indent}{label}: ", lines[0])]
        return [(f"{indent}{label}:", ""), *((f"{indent}  ", line) for line in lines)]
    inside: dict[str, Any] = _mapping(value)
    if isinstance(value, list) and any(
        isinstance(each, dict | list) for each in cast("list[Any]", value)
    ):
        inside = {f"{name}[{number}]": each for number, each in enumerate(cast("list[Any]", value))}
    if not inside or depth >= DEPTH_MAX:
        return [(f"{indent}{label}: ", _collapsed(as_line(json.dumps(value, ensure_ascii=False))))]
    return [
        (f"{indent}{label}:", ""),
        *(line for each in inside for line in _member(each, inside[each], depth + 1)),
    ]


def _lines(text: str) -> list[str]:
    """Split text into safe lines in which nothing is hidden."""
    found: list[str] = []
    empty = 0
    for line in (*as_text(text).expandtabs().rstrip("\n").split("\n"), None):
        if line is not None and not line.replace("\u2800", "").strip():
            empty += 1
            continue
        found += [""] * empty if empty <= EMPTY_LINES_MAX else [f"[{empty} empty lines]"]
        empty = 0
        if line is not None:
            found.append(_collapsed(line))
    return found or [""]


def _collapsed(line: str) -> str:
    def counted(run: re.Match[str]) -> str:
        is_indent = run.start() == 0 and len(run[0]) <= INDENT_MAX
        return run[0] if is_indent else f" [{len(run[0])} blanks] "

    return _BLANKS.sub(counted, line)


def _mapping(value: Any) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


@dataclass(frozen=True, slots=True)
class KeyChoice:
    """One possible answer.

    `key`: its letter, if it has one; its number always works. `body`: the answer to send; None
    interrupts the turn.
    """

    name: str
    key: str
    body: Mapping[str, Any] | None = field(default_factory=dict[str, Any])


_ALLOW = KeyChoice("allow", "a", {"decision": "allow"})
_DENY = KeyChoice("deny", "d", {"decision": "deny"})
_INTERRUPT = KeyChoice("interrupt", "i", None)


@dataclass(frozen=True, slots=True)
class QuestionView:
    """A question with its choices.

    `subject`: lines to show above the title; empty if the title contains everything.
    """

    id: str
    turn: str | None
    title: str
    choices: tuple[KeyChoice, ...]
    subject: tuple[str, ...] = ()

    def line(self) -> str:
        """Return the title with the keys."""
        return f"{self.title} {self.keys()}"

    def keys(self) -> str:
        """Return the choices with their keys."""
        return " / ".join(_shown(number, choice) for number, choice in enumerate(self.choices, 1))

    def chosen(self, key: str) -> KeyChoice | None:
        """Return the choice for a letter or a number; None for another key."""
        if len(key) != 1:
            return None
        if key.isascii() and key.isdigit():
            number = int(key)
            return self.choices[number - 1] if 1 <= number <= len(self.choices) else None
        return next((choice for choice in self.choices if choice.key == key.lower()), None)


def question_of(asked: Asked, turn: str | None) -> QuestionView:
    """Build the view from the body of a `question.asked`, or from a listed open question."""
    id = str(asked.get("question") or asked.get("id"))
    if asked.get("wants") == "elicitation":
        # The agent wants a form, which a key cannot fill in.
        said = (
            _mapping(asked.get("details")).get("message")
            or asked.get("tool")
            or "the agent requests input"
        )
        title = f"{_cut(said)} — fill it in on the page, or"
        return QuestionView(
            id, turn, title, (KeyChoice("decline", "d", {"decision": "deny"}), _INTERRUPT)
        )
    return QuestionView(
        id, turn, f"{title_of(asked)} — allow?", (*_offered(asked), _INTERRUPT), subject_of(asked)
    )


def _offered(asked: Asked) -> tuple[KeyChoice, ...]:
    """Return the agent's options, or allow and deny if it gives none.

    The first option that allows gets the key `a`, the first that rejects the key `d`.
    """
    options = _mapping(asked.get("details")).get("options")
    found: list[KeyChoice] = []
    letters = {"allow": "a", "reject": "d"}
    for option in map(_mapping, cast("list[Any]", options) if isinstance(options, list) else []):
        id, name, kind = (option.get(member) for member in ("optionId", "name", "kind"))
        if isinstance(id, str) and isinstance(name, str) and len(found) < OPTIONS_MAX - 1:
            found.append(
                KeyChoice(
                    _cut(name, 60), letters.pop(str(kind).partition("_")[0], ""), {"decision": id}
                )
            )
    return tuple(found) or (_ALLOW, _DENY)


def _shown(number: int, choice: KeyChoice) -> str:
    if choice.key and choice.name.lower().startswith(choice.key):
        return f"[{choice.name[0]}]{choice.name[1:]}"
    return f"[{choice.key or number}] {choice.name}"


def _cut(text: Any, characters: int = TITLE_CHARACTERS_MAX) -> str:
    text = str(text)
    return text if len(text) <= characters else text[: characters - 1] + "…"
