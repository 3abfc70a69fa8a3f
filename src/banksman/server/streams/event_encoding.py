"""Events as bytes, for a reader: SSE or NDJSON. What is stored is already JSON, and goes out as it is."""

from __future__ import annotations

import base64
import enum
from typing import Any

import msgspec

from banksman import Event

RETRY_MILLISECONDS = 1000

_encoder = msgspec.json.Encoder()


class StreamForm(enum.Enum):
    SSE = "text/event-stream"
    NDJSON = "application/x-ndjson"


def encode(event: Event, *, raw: bool, partial: bool = False) -> bytes:
    """One event, as every reader sees it, whichever way it asks."""
    # Our own kinds are stored as the JSON that they are shown as.
    body: dict[str, Any] | msgspec.Raw = msgspec.Raw(event.data)
    if event.is_frame:
        body = event.body
        if partial and (said := event.partial):
            body["partial"] = said
    shown: dict[str, Any] = {
        "cursor": event.cursor,
        "session": event.session,
        "epoch": event.epoch,
        "seq": event.seq,
        "at": event.at,
        "turn": event.turn,
        "kind": event.kind,
        "body": body,
    }
    if raw and event.is_frame:
        try:
            shown["frame"] = event.data.decode()
        except UnicodeDecodeError:
            shown["frame"] = event.data.decode(errors="replace")
            shown["frame_base64"] = base64.b64encode(event.data)
    return _encoder.encode(shown)


def stored(form: StreamForm, id: str, data: bytes) -> bytes:
    """An event of the log, with the place right after it. JSON has no line end in it."""
    return b"id: %b\ndata: %b\n\n" % (id.encode(), data) if form is StreamForm.SSE else data + b"\n"


def placed(form: StreamForm, position: str, data: bytes) -> bytes:
    """An event among those of many sessions. NDJSON has no `id:`, and a cursor is of one session, so that the position
    is a member there: without it nobody could come back."""
    if form is StreamForm.NDJSON:
        assert data.startswith(b'{"')
        return b'{"position":"%b",%b\n' % (position.encode(), data[1:])
    return stored(form, position, data)


def made(form: StreamForm, kind: str, **more: object) -> bytes:
    """What is made for one reader. It has no place, so that nobody comes back to it."""
    data = _encoder.encode({"kind": kind, **more})
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), data) if form is StreamForm.SSE else data + b"\n"


def preamble(form: StreamForm) -> bytes:
    """The first bytes of a stream. `retry:` is a line of the first event and no block of its own: some clients deliver
    a block without `data:` as an event, and fail to decode it."""
    return b"retry: %d\n" % RETRY_MILLISECONDS if form is StreamForm.SSE else b""
