"""Frames too large to keep: each goes to a file, and a line that says so goes to the log in its place."""

from __future__ import annotations

import json
import logging

from banksman.commands.spill_file import Spill
from banksman.core.dialects.dialect import Dialect
from banksman.core.dialects.meaning import Meaning
from banksman.core.wire.framing import Mixed, OversizeBegan, OversizeEnded, OversizePiece
from banksman.sessions.counters import Counters

log = logging.getLogger("banksman")

# Of all such frames of one session. Past it their bytes are dropped and counted; a file is always a frame's beginning.
SPILLED_BYTES_MAX = 256 << 20
HEAD_SHOWN = 1024


class OversizeFrames:
    """The spilled frames of one session. Their files go with it."""

    def __init__(self) -> None:
        self._files: list[Spill] = []
        self._open: Spill | None = None
        self._left = SPILLED_BYTES_MAX

    def take(self, lines: Mixed, dialect: Dialect, counters: Counters) -> tuple[list[bytes], list[tuple[int, Meaning]]]:
        """The lines for the log, and what they mean. What a spilled one means is told by its two ends."""
        plain: list[bytes] = []
        meanings: list[tuple[int, Meaning]] = []
        for item in lines.items:
            match item:
                case bytes():
                    meaning = dialect.read(item)
                    plain.append(item)
                case OversizeBegan():
                    self._begin()
                    continue
                case OversizePiece(data=data):
                    self._add(data, counters)
                    continue
                case OversizeEnded(length=length, head=head, tail=tail):
                    counters.spilled += 1
                    meaning = dialect.read_head(head, tail)
                    plain.append(self._note(length, head))
            if meaning is not None:
                meanings.append((len(plain) - 1, meaning))
        return plain, meanings

    def close(self) -> None:
        for spill in (*self._files, *([self._open] if self._open else [])):
            spill.delete()
        self._files.clear()
        self._open = None

    def _begin(self) -> None:
        if not self._left:
            return
        try:
            self._open = Spill()
        except OSError as exc:
            log.warning("! a frame too large to keep cannot be spilled either: %s", exc)

    def _add(self, data: bytes, counters: Counters) -> None:
        kept = b"" if self._open is None else data[: self._left]
        counters.dropped += len(data) - len(kept)
        if self._open is None or not kept:
            return
        before = self._open.size
        try:
            self._open.add(kept)
            self._left -= len(kept)
        except OSError as exc:
            # A full disk must not end a session, and a file with a hole would be a lie.
            log.warning("! a frame too large to keep is no longer spilled: %s", exc)
            counters.dropped += before + len(kept)
            self._left += before
            self._open.delete()
            self._open = None

    def _note(self, length: int, head: bytes) -> bytes:
        spill, self._open = self._open, None
        if spill is not None:
            spill.close()
            self._files.append(spill)
        note = {
            "type": "banksman.spilled",
            "bytes": length,
            "kept": 0 if spill is None else spill.size,
            "file": None if spill is None else spill.path,
            "head": head[:HEAD_SHOWN].decode("utf-8", "replace"),
        }
        return json.dumps(note).encode()
