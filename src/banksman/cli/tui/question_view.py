"""A question of the agent's: its subject in full, a title, and the keys that answer it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from banksman.cli.output.approval import TITLE_CHARACTERS_MAX, Asked, subject_of, title_of

OPTIONS_MAX = 9


@dataclass(frozen=True, slots=True)
class KeyChoice:
    """`key`: the letter for it, if it has one; its number always is. `body`: the answer; None: the turn is stopped."""

    name: str
    key: str
    body: Mapping[str, Any] | None = field(default_factory=dict[str, Any])


_ALLOW = KeyChoice("allow", "a", {"decision": "allow"})
_DENY = KeyChoice("deny", "d", {"decision": "deny"})
_INTERRUPT = KeyChoice("interrupt", "i", None)


@dataclass(frozen=True, slots=True)
class QuestionView:
    """`subject`: what is to be approved, as lines to be shown above the title; empty: the title says all."""

    id: str
    turn: str | None
    title: str
    choices: tuple[KeyChoice, ...]
    subject: tuple[str, ...] = ()

    def line(self) -> str:
        return f"{self.title} {self.keys()}"

    def keys(self) -> str:
        return " / ".join(_shown(number, choice) for number, choice in enumerate(self.choices, 1))

    def chosen(self, key: str) -> KeyChoice | None:
        """By a letter or a number; None: that key says nothing here."""
        if len(key) != 1:
            return None
        if key.isascii() and key.isdigit():
            number = int(key)
            return self.choices[number - 1] if 1 <= number <= len(self.choices) else None
        return next((choice for choice in self.choices if choice.key == key.lower()), None)


def question_of(asked: Asked, turn: str | None) -> QuestionView:
    """Of the body of a `question.asked`, or of a question that is open."""
    id = str(asked.get("question") or asked.get("id"))
    if asked.get("wants") == "elicitation":
        # What is wanted is a form, and a key fills in none.
        said = _mapping(asked.get("details")).get("message") or asked.get("tool") or "something is to be filled in"
        title = f"{_cut(said)} — fill it in on the page, or"
        return QuestionView(id, turn, title, (KeyChoice("decline", "d", {"decision": "deny"}), _INTERRUPT))
    return QuestionView(id, turn, f"{title_of(asked)} — allow?", (*_offered(asked), _INTERRUPT), subject_of(asked))


def _offered(asked: Asked) -> tuple[KeyChoice, ...]:
    """The agent's own options, if it has any. The first that allows is `a`, and the first that does not is `d`."""
    options = _mapping(asked.get("details")).get("options")
    found: list[KeyChoice] = []
    letters = {"allow": "a", "reject": "d"}
    for option in map(_mapping, cast("list[Any]", options) if isinstance(options, list) else []):
        id, name, kind = (option.get(member) for member in ("optionId", "name", "kind"))
        if isinstance(id, str) and isinstance(name, str) and len(found) < OPTIONS_MAX - 1:
            found.append(KeyChoice(_cut(name, 60), letters.pop(str(kind).partition("_")[0], ""), {"decision": id}))
    return tuple(found) or (_ALLOW, _DENY)


def _shown(number: int, choice: KeyChoice) -> str:
    if choice.key and choice.name.lower().startswith(choice.key):
        return f"[{choice.name[0]}]{choice.name[1:]}"
    return f"[{choice.key or number}] {choice.name}"


def _mapping(value: Any) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _cut(text: Any, characters: int = TITLE_CHARACTERS_MAX) -> str:
    text = str(text)
    return text if len(text) <= characters else text[: characters - 1] + "…"
