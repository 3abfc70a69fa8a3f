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

    `bytes_max`: the caller's limit. A longer line raises, as the SDK promises for
    `max_buffer_size`. None: see the module.

    The files of long lines are deleted with this object.
    """

    def __init__(self, bytes_max: int | None) -> None:
        assert bytes_max is None or bytes_max >= 0
        self._bytes_max = bytes_max
        self._framing = Framing(
            frame_bytes_max=FRAME_BYTES_MAX if bytes_max is None else max(1, bytes_max)
        )
        self._oversize = OversizeFrames()
        self._counters = Counters()

    def feed(self, data: bytes) -> Iterator[dict[str, Any]]:
        """Yield the messages that these bytes complete. Raises `CLIJSONDecodeError`."""
        chunk = self._framing.feed(data)
        if self._bytes_max is not None and self._framing.oversize:
            self._refuse(self._bytes_max)
        yield from self._messages(chunk)

    def end(self) -> Iterator[dict[str, Any]]:
        """Yield the last message if its newline is missing. Half a message is dropped."""
        try:
            yield from self._messages(self._framing.end())
        except CLIJSONDecodeError as exc:
            subprocess_cli.logger.debug("dropping half a message at the end of stdout: %s", exc)

    def _messages(self, chunk: list[bytes] | MixedChunk) -> Iterator[dict[str, Any]]:
        for item in chunk.items if isinstance(chunk, MixedChunk) else chunk:
            message = self._parse(item) if isinstance(item, bytes) else self._spill(item)
            if message is not None:
                yield message

    def _parse(self, line: bytes) -> dict[str, Any] | None:
        return subprocess_cli._parse_stdout_line(line.decode("utf-8", "replace"))

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

    def _refuse(self, limit: int) -> None:
        message = f"JSON message exceeded maximum buffer size of {limit} bytes"
        raise CLIJSONDecodeError(message, ValueError(f"the line exceeds limit {limit}"))
