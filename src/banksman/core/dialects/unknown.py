"""The frames of an agent of which nothing is known any more: its profile is gone, or was never on this machine.

Nobody can speak with it, but what was said can be read: each dialect's frames look like no other's. Claude's have a
`type`, Codex's a `method` or an `id` and no version, ACP's have the version of JSON-RPC.
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
    """Whose frame it is; of one that is nobody's, Claude's, which makes nothing of it."""
    try:
        look = _decode(line)
    except UNDECODABLE:
        return CLAUDE
    if look.jsonrpc is not msgspec.UNSET:
        return _ACP
    return CODEX if look.type is msgspec.UNSET else CLAUDE


class _Each:
    """What was made for each dialect that was met, for the frames of one turn."""

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
    """To read with. It is spoken with nobody, so that how it would speak does not matter."""

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
