"""Read the frames of a log that may have several dialects, because its session fell back.

The dialect of the session's first agent reads each frame first. A frame that is nothing to it is
read by the dialect that the frame itself shows (`unknown.py`). The frames of the dialects are
distinguishable, so a reader needs to know neither the agents of the session nor the place of a
change.
"""

from __future__ import annotations

import functools
from typing import Any

from banksman.core.dialects.dialect import Dialect, Projector, Transcript
from banksman.core.dialects.unknown import UNKNOWN, dialect_of

# Each agent's profile has one dialect, and users have few agents.
READERS_MAX = 64


class MixedReader:
    """Projections and transcripts of the frames of one session."""

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect

    def project(self, line: bytes) -> list[dict[str, Any]]:
        """Translate a frame to ACP session updates. Never raises."""
        found = self._dialect.project(line)
        return found or (UNKNOWN.project(line) if self._is_other(line) else [])

    def partial(self, line: bytes) -> list[dict[str, Any]]:
        """Translate a frame that holds part of an unfinished text. Never raises."""
        found = self._dialect.partial(line)
        return found or (UNKNOWN.partial(line) if self._is_other(line) else [])

    def projector(self) -> Projector:
        """Return a new projector for the frames of one turn from its beginning."""
        return _TurnReader(self._dialect)

    def transcript(self) -> Transcript:
        """Return a new transcript for the frames of one turn."""
        return _TurnReader(self._dialect)

    def _is_other(self, line: bytes) -> bool:
        return dialect_of(line).name != self._dialect.name


@functools.lru_cache(maxsize=READERS_MAX)
def reader_of(dialect: Dialect) -> MixedReader:
    """Return the reader of a dialect, always the same: events with equal readers are equal."""
    return MixedReader(dialect)


class _TurnReader:
    """Projector and transcript of one turn. One agent serves a turn, so one of the two has all."""

    def __init__(self, dialect: Dialect) -> None:
        self._name = dialect.name
        self._projector, self._transcript = dialect.projector(), dialect.transcript()
        self._others, self._other_texts = UNKNOWN.projector(), UNKNOWN.transcript()

    def project(self, line: bytes) -> list[dict[str, Any]]:
        found = self._projector.project(line)
        return found or (self._others.project(line) if self._is_other(line) else [])

    def add(self, line: bytes) -> None:
        self._transcript.add(line)
        if self._is_other(line):
            self._other_texts.add(line)

    def text(self) -> str | None:
        text = self._transcript.text()
        return self._other_texts.text() if text is None else text

    def _is_other(self, line: bytes) -> bool:
        return dialect_of(line).name != self._name
