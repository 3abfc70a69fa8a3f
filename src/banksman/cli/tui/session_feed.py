"""The events of a session for a loop: with what the model has said so far, and word of a connection that is lost."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

from banksman.cli.client.client import Client, NoServer, Problem
from banksman.cli.client.event_stream import READ_BYTES_MAX, SILENCE_SECONDS_MAX, Event, EventFollower, SseParser
from banksman.cli.tui.event_loop import Connected, ScreenLoop

PAUSE_SECONDS_MIN, PAUSE_SECONDS_MAX = 0.2, 3.0


def follow(
    loop: ScreenLoop, client: Client, session: str, *, after: str | None, is_partial: bool
) -> Callable[[], None]:
    """`is_partial`: pieces of what is being said come too, beside the whole. Call what is returned when nobody reads
    them any more: the connection is given up at the server's next sign of life, of which a quiet session has some, too.
    """
    left = threading.Event()
    follower = EventFollower(
        client,
        session,
        after=after,
        is_over=left.is_set,
        query={"partial": 1} if is_partial else None,
        on_lost=lambda _: loop.post(Connected(is_there=False)),
        on_back=lambda: loop.post(Connected(is_there=True)),
    )
    loop.follow(follower.events)
    return left.set


def news(client: Client, *, on_lost: Callable[[], None], on_back: Callable[[], None]) -> Iterator[Event]:
    """Our own events of every session from now on, for who looks again when something has happened. What happens while
    the connection is lost is not told: `on_back` says that all is to be looked at. It does not end by itself."""
    pause = PAUSE_SECONDS_MIN
    is_lost = False
    headers = {"Accept": "text/event-stream", "Cache-Control": "no-store"}
    while True:
        try:
            with client.stream(
                "/v1/events",
                query={"frames_of": "", "after": "now"},
                headers=headers,
                silence_seconds_max=SILENCE_SECONDS_MAX,
            ) as response:
                parser = SseParser()
                while data := response.read1(READ_BYTES_MAX):
                    if is_lost:
                        is_lost = False
                        on_back()
                    pause = PAUSE_SECONDS_MIN
                    for message in parser.feed(data):
                        event: Any = json.loads(message.data)
                        if isinstance(event, dict) and "session" in event:
                            yield cast("Event", event)
        except (NoServer, Problem, ValueError):
            pass  # It may be on its way back. What is shown says that it is not there.
        if not is_lost:
            is_lost = True
            on_lost()
        time.sleep(pause)
        pause = min(2 * pause, PAUSE_SECONDS_MAX)
