"""Wire format of events: JSON for pages and streams, framed as SSE or NDJSON in streams.

Every event except a frame is stored as JSON, and its body is sent as it is stored. The body of a
frame is the frame as ACP updates. Marks such as `stream.live` are made here, too. `follower.py`
sends the bytes.
"""

from __future__ import annotations

import enum
from typing import Any

import msgspec

from banksman import Event

# The delay that an SSE client waits before it reconnects.
RETRY_MILLISECONDS = 1000

_encoder = msgspec.json.Encoder()


class StreamForm(enum.Enum):
    """Format of a stream, by its media type."""

    SSE = "text/event-stream"
    NDJSON = "application/x-ndjson"


def encode(event: Event, *, raw: bool, partial: bool = False, cursor: str | None = None) -> bytes:
    """Encode one event as JSON, the same for pages and all streams.

    `cursor`: that of the event, if the caller has made it already.
    """
    # Events other than frames are stored as the JSON that readers get.
    body: dict[str, Any] | msgspec.Raw
    if is_frame := event.is_frame:
        body = event.body
        if partial and (said := event.partial):
            body["partial"] = said
    else:
        body = msgspec.Raw(event.data)
    shown: dict[str, Any] = {
        "cursor": event.cursor if cursor is None else cursor,
        "session": event.session,
        "epoch": event.epoch,
        "seq": event.seq,
        "at": event.at,
        "turn": event.turn,
        "kind": event.kind,
        "body": body,
    }
    if raw and is_frame:
        try:
            shown["frame"] = event.data.decode()
        except UnicodeDecodeError:
            shown["frame"] = event.data.decode(errors="replace")
            # The encoder writes bytes as base64.
            shown["frame_base64"] = event.data
    return _encoder.encode(shown)


def stored(form: StreamForm, id: str, data: bytes) -> bytes:
    """Format an event of the log, with the place after it as the id. JSON contains no line end."""
    return b"id: %b\ndata: %b\n\n" % (id.encode(), data) if form is StreamForm.SSE else data + b"\n"


def placed(form: StreamForm, position: str, data: bytes) -> bytes:
    """Format an event of a stream of many sessions, with its position.

    NDJSON has no `id:`, and a cursor belongs to one session. So the position becomes a member of
    the event there: without it a client could not resume.
    """
    if form is StreamForm.NDJSON:
        assert data.startswith(b'{"')
        return b'{"position":"%b",%b\n' % (position.encode(), data[1:])
    return stored(form, position, data)


def made(form: StreamForm, kind: str, **more: object) -> bytes:
    """Format a mark for one follower. It has no id, so that no client resumes at it."""
    data = _encoder.encode({"kind": kind, **more})
    return (
        b"event: %b\ndata: %b\n\n" % (kind.encode(), data)
        if form is StreamForm.SSE
        else data + b"\n"
    )


def preamble(form: StreamForm) -> bytes:
    """Return the first bytes of a stream.

    `retry:` is a line of the first event and not a separate block: some clients deliver a block
    without `data:` as an event, and fail to decode it.
    """
    return b"retry: %d\n" % RETRY_MILLISECONDS if form is StreamForm.SSE else b""
