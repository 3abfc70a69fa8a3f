"""Wire format of events."""

from __future__ import annotations

import base64

import msgspec
import pytest

from banksman import Event
from banksman.server.streams.event_format import encode


@pytest.mark.parametrize("line", [b'{"type":"x"}', b'{"type":"\xff\x00"}'])
def test_raw_event_contains_the_whole_line(line: bytes) -> None:
    shown = msgspec.json.decode(encode(Event("s", 1, 1, 0.0, None, "update", line), raw=True))
    assert shown["frame"] == line.decode(errors="replace")
    if "frame_base64" in shown:
        assert base64.b64decode(shown["frame_base64"]) == line
    else:
        assert shown["frame"].encode() == line
