"""Read the frames of a log whose dialect is not known, or not the same everywhere.

The frames of each dialect are distinguishable (`dialect_of`):

- Claude frames have a `type`.
- Codex frames have a `method` or an `id`, and no version.
- ACP frames have the version of JSON-RPC.

So a log can be read in two cases:

- The profile of the session's agent is missing on this machine: it was removed, or never existed
  here. `UNKNOWN` reads the log. Banksman cannot talk to this agent.
- The session fell back to another agent, so its log has several dialects. `MixedReader` reads each
  frame in the dialect of the first agent, and a frame that is nothing to it in its own dialect. It
  needs to know neither the agents nor the place of a change.
"""

from __future__ import annotations

import functools
from typing import Any

import msgspec

from banksman.core.dialects.acp import Acp
from banksman.core.dialects.claude import CLAUDE, Claude
from banksman.core.dialects.codex import CODEX
from banksman.core.dialects.dialect import Dialect, Projector, Transcript
from banksman.core.wire.partial_json import UNDECODABLE


class _Look(msgspec.Struct, gc=False):
    jsonrpc: Any = msgspec.UNSET
    type: Any = msgspec.UNSET


_decode = msgspec.json.Decoder(_Look).decode
_ACP = Acp()


def dialect_of(line: bytes) -> Dialect:
    """Return the dialect of a frame.

    The default is Claude, which ignores a frame that it does not know.
    """
    if line.startswith(b'{"type":'):
        return CLAUDE  # Every token takes this path.
    try:
        look = _decode(line)
    except UNDECODABLE:
        return CLAUDE
    if look.jsonrpc is not msgspec.UNSET:
        return _ACP
    return CODEX if look.type is msgspec.UNSET else CLAUDE


class _Each:
    """Projector and transcript for the frames of one turn, with a delegate per dialect found."""

    def __init__(self) -> None:
        self._projectors: dict[str, Projector] = {}
        self._transcripts: dict[str, Transcript] = {}

    def project(self, line: bytes) -> list[dict[str, Any]]:
        dialect = dialect_of(line)
        if dialect.name not in self._projectors:
            self._projectors[dialect.name] = dialect.projector()
        return self._projectors[dialect.name].project(line)

    def add(self, line: bytes) -> None:
        dialect = dialect_of(line)
        if dialect.name not in self._transcripts:
            self._transcripts[dialect.name] = dialect.transcript()
        self._transcripts[dialect.name].add(line)

    def text(self) -> str | None:
        texts = (transcript.text() for transcript in self._transcripts.values())
        return next((text for text in texts if text is not None), None)


class Unknown(Claude):
    """Dialect that only reads. No process speaks it, so its writing half is irrelevant."""

    __slots__ = ()

    def project(self, line: bytes) -> list[dict[str, Any]]:
        return dialect_of(line).project(line)

    def partial(self, line: bytes) -> list[dict[str, Any]]:
        return dialect_of(line).partial(line)

    def projector(self) -> Projector:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _Each()

    def transcript(self) -> Transcript:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _Each()


UNKNOWN = Unknown()


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
