"""Split the CLI's stdout into messages, with a limit on the length of a message.

The SDK ends the session at a line of more than 1 MiB. Here a line may have 32 MiB. A longer line is
written to a file, and a placeholder takes its place:

    {"type": "system", "subtype": "banksman_oversize", "bytes": …, "file": …, "head": …}

The SDK must act on some messages (results, control messages, transcripts). A placeholder would let
it wait forever, so a line of that kind that is too long raises, and the error names the file.
"""

# The SDK has no public names for these parts. installation.py checks that they are the known ones.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from claude_agent_sdk._errors import CLIJSONDecodeError
from claude_agent_sdk._internal.transport import subprocess_cli

from banksman.core.wire.framing import FRAME_BYTES_MAX, Framing, MixedChunk, OversizePart
from banksman.sessions.diagnostics import Counters
from banksman.sessions.frame_reader import OversizeFrames

# The type of a message is its first key in every version of the CLI.
_TYPE = re.compile(r'\s*\{\s*"type"\s*:\s*"(\w+)"')
_INFORMING = frozenset(("assistant", "user", "system", "stream_event"))


class MessageReader:
    """Reader of one CLI's stdout.

    `length_max`: the caller's limit, in characters as in the SDK. A longer line raises, as the SDK
    promises for `max_buffer_size`. None: see the module.

    The files of long lines are deleted with this object.
    """

    def __init__(self, length_max: int | None) -> None:
        assert length_max is None or length_max >= 0
        self._length_max = length_max
        # UTF-8 has at most four bytes per character. So a line that is oversize for the framer is
        # too long in characters too, and `_checked` counts the characters of all other lines.
        self._framing = Framing(
            frame_bytes_max=FRAME_BYTES_MAX if length_max is None else max(1, 4 * length_max)
        )
        self._oversize = OversizeFrames()
        self._counters = Counters()

    def feed(self, data: bytes) -> Iterator[dict[str, Any]]:
        """Yield the messages that these bytes complete. Raises `CLIJSONDecodeError`.

        The messages before a line that is too long are yielded before the error.
        """
        for item in self._checked(self._framing.feed(data)):
            message = self._message(item)
            if message is not None:
                yield message

    def end(self) -> Iterator[dict[str, Any]]:
        """Yield the last message if its newline is missing. Half a message is dropped."""
        for item in self._checked(self._framing.end()):
            try:
                message = self._message(item)
            except CLIJSONDecodeError as exc:
                subprocess_cli.logger.debug("dropping half a message at the end of stdout: %s", exc)
                continue
            if message is not None:
                yield message

    def _checked(self, chunk: list[bytes] | MixedChunk) -> Iterator[str | OversizePart]:
        """Yield the decoded lines and the oversize parts. Raises at a line over the limit."""
        limit = self._length_max
        for framed in chunk.items if isinstance(chunk, MixedChunk) else chunk:
            item = framed.decode("utf-8", "replace") if isinstance(framed, bytes) else framed
            if limit is not None and (not isinstance(item, str) or len(item) > limit):
                message = f"JSON message exceeded maximum buffer size of {limit} bytes"
                raise CLIJSONDecodeError(message, ValueError(f"the line exceeds limit {limit}"))
            yield item

    def _message(self, item: str | OversizePart) -> dict[str, Any] | None:
        if isinstance(item, str):
            return subprocess_cli._parse_stdout_line(item)
        return self._spill(item)

    def _spill(self, item: OversizePart) -> dict[str, Any] | None:
        notes = self._oversize.spill(item, self._counters)
        if not notes:
            return None
        placeholder: dict[str, Any] = json.loads(notes[0])
        kind = _TYPE.match(placeholder["head"])
        if kind is None or kind[1] not in _INFORMING:
            message = f"message of {placeholder['bytes']} bytes is in {placeholder['file']}"
            raise CLIJSONDecodeError(message, ValueError("the message is too long to be parsed"))
        return {**placeholder, "type": "system", "subtype": "banksman_oversize"}
