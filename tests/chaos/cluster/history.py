"""Answers that clients received during a storm, recorded in order to judge it.

The clients that ask and follow write this history through the front ends, at the moment of each answer. The log is read
only afterwards, as a second witness. Every disagreement between the two is a finding, whichever side is right.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from banksman.testing.checks import View


class Accepted(NamedTuple):
    """Answer 202 to an ask."""

    at: float
    front: int
    turn: str


class Told(NamedTuple):
    """Outcome of an ask, as a front end reported it."""

    at: float
    front: int
    kind: str
    text: str | None


@dataclass(slots=True)
class Ask:
    """One ask over all its attempts.

    `word`: occurs in this ask's prompt and in no other prompt. `answer`: the text that the agent replies with.
    """

    session: int
    key: str
    word: str
    answer: str
    sent_at: float
    accepted: list[Accepted] = field(default_factory=list[Accepted])
    told: list[Told] = field(default_factory=list[Told])


@dataclass(slots=True)
class Reader:
    """A client that followed events, and everything that it received."""

    name: str
    view: View


class History:
    """Thread-safe record of the storm.

    Many threads write it. The lock protects the lists and the counters. The code that holds it calls nothing.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.began = time.monotonic()
        self.asks: list[Ask] = []
        # Refusals that clients received, by status and title.
        self.refused: Counter[str] = Counter()
        # Time and description of each disturbance of a host or node.
        self.deeds: list[tuple[float, str]] = []

    def sends(self, session: int, key: str, word: str, answer: str) -> Ask:
        ask = Ask(session, key, word, answer, time.monotonic())
        with self._lock:
            self.asks.append(ask)
        return ask

    def accepts(self, ask: Ask, front: int, turn: str) -> None:
        with self._lock:
            ask.accepted.append(Accepted(time.monotonic(), front, turn))

    def tells(self, ask: Ask, front: int, outcome: dict[str, Any]) -> None:
        with self._lock:
            ask.told.append(Told(time.monotonic(), front, outcome["kind"], outcome.get("text")))

    def refuses(self, what: str) -> None:
        with self._lock:
            self.refused[what] += 1

    def notes(self, deed: str) -> None:
        with self._lock:
            self.deeds.append((time.monotonic(), deed))

    def write(self, path: Path) -> None:
        """Write the history as lines of JSON, for the analysis of a failure. Times are seconds since the beginning."""
        lines: list[tuple[float, dict[str, Any]]] = [(at, {"deed": deed}) for at, deed in self.deeds]
        for ask in self.asks:
            lines.append((ask.sent_at, {"ask": ask.key, "session": ask.session, "word": ask.word}))
            lines += [(each.at, {"accepted": ask.key, **each._asdict()}) for each in ask.accepted]
            lines += [(each.at, {"told": ask.key, **each._asdict()}) for each in ask.told]
        with path.open("w", encoding="utf-8") as file:
            for at, line in sorted(lines, key=lambda each: each[0]):
                file.write(json.dumps({**line, "at": round(at - self.began, 3)}) + "\n")

    def summed_up(self) -> dict[str, Any]:
        """Return the counts of the history."""
        kinds = Counter(ask.told[-1].kind if ask.told else "not told" for ask in self.asks if ask.accepted)
        deeds = Counter(deed.rpartition(" ")[0] for _, deed in self.deeds)
        return {
            "asks": len(self.asks),
            "accepted": sum(bool(ask.accepted) for ask in self.asks),
            "outcomes": dict(kinds),
            "deeds": dict(deeds),
            "refused": dict(self.refused),
        }
