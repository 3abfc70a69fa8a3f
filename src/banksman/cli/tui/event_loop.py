"""One thread owns the screen, and everything comes to it: events, answers, keys, signals and the time.

Whatever waits for the server does so in a thread of its own and posts what it got, so that keys and Ctrl-C are heard
and the time is shown meanwhile. Those threads are daemons: one that hangs in a request keeps nobody from leaving.

Events are bounded: the reader of a stream waits when the screen is that far behind.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import selectors
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any, Self, cast

from banksman.cli.client.client import Client, NoServer, Problem
from banksman.cli.client.event_stream import READ_BYTES_MAX, SILENCE_SECONDS_MAX, Event, EventFollower, SseParser
from banksman.cli.tui.keyboard import Decoder, Keyboard
from banksman.errors import BanksmanError

EVENTS_AHEAD_MAX = 2000
# After an Escape a key's other bytes come at once, or not at all.
ESCAPE_SECONDS = 0.05
TYPED_BYTES_MAX = 65536


@dataclass(frozen=True, slots=True)
class EventReceived:
    """An event of a stream."""

    event: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Connected:
    """The stream is there again, or is not."""

    is_there: bool


@dataclass(frozen=True, slots=True)
class FeedEnded:
    """It will not come back by itself."""

    error: BaseException


@dataclass(frozen=True, slots=True)
class CallDone:
    """An errand came back, with what it got or with why not."""

    errand: str
    result: Any = None
    error: BanksmanError | None = None


@dataclass(frozen=True, slots=True)
class Typed:
    key: str


@dataclass(frozen=True, slots=True)
class Signalled:
    number: int


@dataclass(frozen=True, slots=True)
class Tick:
    """As much time has passed as the caller wanted to wait."""


Thing = EventReceived | Connected | FeedEnded | CallDone | Typed | Signalled | Tick


class ScreenLoop:
    """Enter it in the main thread. `catch` what is to come as a `Signalled`; handlers are put back when it is left."""

    def __init__(self) -> None:
        self._posted: collections.deque[Thing] = collections.deque()
        self._room = threading.Semaphore(EVENTS_AHEAD_MAX)
        self._is_left = self._is_closed = False
        self._selector = selectors.DefaultSelector()
        self._keyboard: Keyboard | None = None
        self._decoder = Decoder()
        self._handlers: dict[int, Any] = {}
        self._wakes, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._wake_before = -1
        # Protects the fd of the wake-up, which must not be written to when it is somebody else's. Nothing is called
        # while it is held. A handler may come while its thread has it, so that it can be taken again.
        self._waking = threading.RLock()

    def __enter__(self) -> Self:
        self._selector.register(self._wakes, selectors.EVENT_READ)
        # A signal that comes while we wait ends the wait; else its handler would be called and the wait go on.
        self._wake_before = signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        return self

    def __exit__(self, *exc_info: object) -> None:
        signal.set_wakeup_fd(self._wake_before)
        for number, before in self._handlers.items():
            signal.signal(number, before)
        self._is_left = True
        self._room.release(EVENTS_AHEAD_MAX)
        self._selector.close()
        with self._waking:
            self._is_closed = True
            os.close(self._wake)
            os.close(self._wakes)

    # -- what comes ------------------------------------------------------------------------------------------------
    def catch(self, *numbers: int) -> None:
        """As `Signalled`, unless they were ignored when we were started: that is how a shell keeps its Ctrl-C from what
        runs in the background."""
        for number in numbers:
            self.handle(number, self._on_signal)

    def handle(self, number: int, handler: Callable[[int, FrameType | None], None]) -> None:
        before = signal.getsignal(number)
        if before is signal.SIG_IGN:
            return
        self._handlers.setdefault(number, before)
        signal.signal(number, handler)

    def listen(self, keyboard: Keyboard) -> None:
        keyboard.enter()
        if self._keyboard is None:
            self._keyboard = keyboard
            self._selector.register(keyboard.fd, selectors.EVENT_READ)

    def stop_listening(self) -> None:
        if self._keyboard is not None:
            self._selector.unregister(self._keyboard.fd)
            self._keyboard.leave()
            self._keyboard = None
            self._decoder = Decoder()

    def post(self, thing: Thing) -> None:
        """From any thread, and from a signal handler."""
        self._posted.append(thing)
        # A pipe that is full wakes as well as one that is not.
        with self._waking, contextlib.suppress(BlockingIOError):
            if not self._is_closed:
                os.write(self._wake, b"\0")

    # -- what is done elsewhere --------------------------------------------------------------------------------------
    def send(self, errand: str, call: Callable[[], Any]) -> None:
        """In a thread of its own; comes back as `CallDone`."""

        def run() -> None:
            try:
                self.post(CallDone(errand, call()))
            except BanksmanError as exc:
                self.post(CallDone(errand, error=exc))

        threading.Thread(target=run, name=f"banksman-{errand}", daemon=True).start()

    def follow(self, events: Callable[[], Iterator[dict[str, Any]]]) -> None:
        """Events as `EventReceived`, and `FeedEnded` when they end by themselves."""

        def run() -> None:
            try:
                for event in events():
                    self._room.acquire()
                    if self._is_left:
                        return
                    self.post(EventReceived(event))
                self.post(FeedEnded(AssertionError("a stream has no end")))
            except BaseException as exc:
                # Told to the thread that can do something about it, a bug too.
                self.post(FeedEnded(exc))

        threading.Thread(target=run, name="banksman-follow", daemon=True).start()

    # -- the wait ----------------------------------------------------------------------------------------------------
    def things(self, seconds: float | None) -> list[Thing]:
        """What has come by now; else what comes next, or a `Tick` after so long. Never empty."""
        deadline = None if seconds is None else time.monotonic() + seconds
        # Also where there is enough to show already: who types is not to wait until an agent is silent.
        if ready := self._selector.select(0):
            self._take_ready(ready)
        while not self._posted:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if self._decoder.is_waiting:
                left = min(ESCAPE_SECONDS, ESCAPE_SECONDS if left is None else left)
            ready = self._selector.select(left)
            self._take_ready(ready)
            if not ready and not self._posted and deadline is not None and time.monotonic() >= deadline:
                return [Tick()]
        found: list[Thing] = []
        while self._posted:
            thing = self._posted.popleft()
            if isinstance(thing, EventReceived):
                self._room.release()
            found.append(thing)
            if len(found) >= EVENTS_AHEAD_MAX:
                break
        return found

    def _take_ready(self, ready: list[tuple[selectors.SelectorKey, int]]) -> None:
        if not ready:
            self._posted.extend(Typed(key) for key in self._decoder.flush())
        for key, _ in ready:
            if key.fd == self._wakes:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wakes, TYPED_BYTES_MAX)
            else:
                self._read_keys(key.fd)

    def _read_keys(self, fd: int) -> None:
        try:
            data = os.read(fd, TYPED_BYTES_MAX)
        except OSError:
            data = b""
        if not data:
            # The terminal is gone. Somebody who could type no more is as good as one who leaves.
            self.stop_listening()
            self.post(Signalled(signal.SIGHUP))
            return
        self._posted.extend(Typed(key) for key in self._decoder.feed(data))

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.post(Signalled(number))


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
