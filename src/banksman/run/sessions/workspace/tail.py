"""The last of a terminal's output, as text: what an agent is shown of a command.

Both streams in the order in which they come. They are two pipes, so what is written to both in the same moment may
change places; nothing is lost by it, and no character is torn: each stream is decoded by itself, and what is kept is
whole characters only. What is not UTF-8 is shown as U+FFFD.
"""

from __future__ import annotations

import codecs
import re

# What is cut off is cut off rarely: a command that writes single bytes would otherwise pay for each a copy of the rest.
_SLACK_BYTES = 64 << 10
_CONTINUATION = re.compile(rb"[\x80-\xbf]*")
_decoder = codecs.getincrementaldecoder("utf-8")


class Tail:
    """At most `bytes_max` bytes of UTF-8."""

    def __init__(self, bytes_max: int) -> None:
        assert bytes_max >= 0
        self._bytes_max = bytes_max
        self._kept = bytearray()
        self._is_cut = False
        self._decoders = {stream: _decoder("replace") for stream in ("stdout", "stderr")}

    def add(self, stream: str, data: bytes) -> None:
        self._keep(self._decoders[stream].decode(data))

    def finish(self) -> None:
        """Nothing more will come: a character that was begun will not be ended."""
        for decoder in self._decoders.values():
            self._keep(decoder.decode(b"", final=True))
            decoder.reset()

    def _keep(self, text: str) -> None:
        self._kept += text.encode()
        if len(self._kept) > self._bytes_max + _SLACK_BYTES:
            self._cut()

    def _cut(self) -> None:
        """At the beginning, and between characters."""
        excess = len(self._kept) - self._bytes_max
        if excess > 0:
            torn = _CONTINUATION.match(self._kept, excess)
            assert torn is not None
            end = torn.end()
            del torn  # It holds on to the bytes, which could not be made shorter.
            del self._kept[:end]
            self._is_cut = True

    def text(self) -> tuple[str, bool]:
        """What is kept, and whether there was more before it."""
        self._cut()
        return self._kept.decode(), self._is_cut
