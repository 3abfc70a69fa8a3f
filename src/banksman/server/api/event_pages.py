"""Pages of a session's log: what follows a cursor, or what is right before one; with the agent's frames, or without.

Each event is shown as a stream would show it: one way of showing, and no second. A page without frames may have to look
through very many to find a few, so it is read in slices, between which the loop is everybody's, and what is not wanted
is passed over by its kind alone, before anything of it is decoded.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import msgspec

from banksman import Event
from banksman.server.streams.event_encoding import encode
from banksman.sessions.session import Session
from banksman.store.log import READ_EVENTS_MAX

# A page ends before the event that exceeds it, whatever `limit` says: the next one begins there.
PAGE_BYTES_MAX = 4 << 20
SLICE_EVENTS_MAX = 250


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What a reader of a page asks for."""

    limit: int
    raw: bool = False
    partial: bool = False
    frames: bool = True

    def shown(self, event: Event) -> msgspec.Raw | None:
        """None: it is passed over."""
        if event.is_frame and not self.frames:
            return None
        return msgspec.Raw(encode(event, raw=self.raw, partial=self.partial))


async def after(session: Session, cursor: str | None, wanted: Wanted) -> dict[str, Any]:
    """`next` is behind all that was looked at: who comes back does not look through it again."""
    events: list[msgspec.Raw] = []
    size = 0
    gap: tuple[int, int] | None = None
    place = cursor
    is_full = False
    while not is_full:
        page = await session.page(place, limit=wanted.limit if wanted.frames else READ_EVENTS_MAX)
        gap = gap or page.gap
        for event in page.events:
            if (shown := wanted.shown(event)) is not None:
                size += len(memoryview(shown))
                if events and size > PAGE_BYTES_MAX:
                    is_full = True
                    break
                events.append(shown)
            place = event.cursor
            if len(events) == wanted.limit:
                is_full = True
                break
        is_full = is_full or wanted.frames or not page.events
    return {
        "events": events,
        "next": place,
        "head": await session.head(),
        **({} if gap is None else {"gap": {"first": gap[0], "last": gap[1]}}),
    }


async def before(session: Session, cursor: str, wanted: Wanted) -> dict[str, Any]:
    """The last ones before a cursor, oldest first. What does not fit is left out at the old end. `next` leads forward,
    as ever; backward it goes on before the first that is shown."""
    events: deque[msgspec.Raw] = deque()
    size = 0
    place: str | int = cursor
    last: str | None = None
    is_full = False
    while not is_full:
        # What is shown is read no further back than this: if it is long, most of it would be read for nothing.
        left = min(wanted.limit - len(events), SLICE_EVENTS_MAX) if wanted.frames else READ_EVENTS_MAX
        found = await session.page_before(place, limit=left)
        for event in reversed(found):
            place = event.seq
            if (shown := wanted.shown(event)) is not None:
                size += len(memoryview(shown))
                if events and size > PAGE_BYTES_MAX:
                    is_full = True
                    break
                events.appendleft(shown)
                last = last or event.cursor
            if len(events) == wanted.limit:
                is_full = True
                break
        is_full = is_full or not found
    kept = await session.page(None, limit=1)
    return {
        "events": list(events),
        "next": last,
        "head": await session.head(),
        "first": kept.events[0].cursor if kept.events else None,
    }
