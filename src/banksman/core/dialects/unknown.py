"""Read-only dialect for sessions whose agent profile is missing on this machine.

The profile was removed, or never existed here. Banksman cannot talk to this agent, but it can read
the log, because the frames of each dialect are distinguishable:

- Claude frames have a `type`.
- Codex frames have a `method` or an `id`, and no version.
- ACP frames have the version of JSON-RPC.
"""

from __future__ import annotations

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
