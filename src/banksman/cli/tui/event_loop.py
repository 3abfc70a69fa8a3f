"""Event loop of the terminal screens: one thread gets events, replies, keys, signals and ticks.

`ScreenLoop` is the loop. `follow` delivers the events of one session to it. `news` yields the
events of all sessions.

Each request to the server runs in a separate thread and posts its result. Keys and Ctrl-C are
therefore handled meanwhile, and the clock on the screen runs. These threads are daemons: a thread
that hangs in a request cannot keep the program from exiting.

Events are bounded: the reader of a stream waits while the screen is too far behind.
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

from banksman.cli.client.client import Client
from banksman.cli.client.event_stream import (
    READ_BYTES_MAX,
    SILENCE_SECONDS_MAX,
    Event,
    EventFollower,
    SseParser,
)
from banksman.cli.client.exchange import NoServer, RequestRefused
from banksman.cli.tui.keyboard import Decoder, Keyboard
from banksman.errors import BanksmanError

EVENTS_AHEAD_MAX = 2000
# The other bytes of an escape sequence follow the Escape within this time, or not at all.
ESCAPE_SECONDS = 0.05
TYPED_BYTES_MAX = 65536


def suspend() -> None:
    """Stop this process as SIGTSTP does by default. Return after SIGCONT."""
    before = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
    # The process stops inside this call.
    signal.raise_signal(signal.SIGTSTP)
    signal.signal(signal.SIGTSTP, before)


@dataclass(frozen=True, slots=True)
class EventReceived:
    """A stream delivered an event."""

    event: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Connected:
    """The connection of the stream came back or was lost."""

    is_there: bool


@dataclass(frozen=True, slots=True)
class FeedEnded:
    """The stream ended and will not be retried."""

    error: BaseException


@dataclass(frozen=True, slots=True)
class CallDone:
    """A call started by `send` returned a result or failed."""

    errand: str
    result: Any = None
    error: BanksmanError | None = None


@dataclass(frozen=True, slots=True)
class Typed:
    """The user pressed a key."""

    key: str


@dataclass(frozen=True, slots=True)
class Signalled:
    """A signal arrived."""

    number: int


@dataclass(frozen=True, slots=True)
class Tick:
    """The time that the caller wanted to wait has passed."""


Thing = EventReceived | Connected | FeedEnded | CallDone | Typed | Signalled | Tick


class ScreenLoop:
    """Loop of the thread that owns the screen. Enter it in the main thread.

    Signals passed to `catch` arrive as `Signalled`. The previous handlers are restored on exit.
    """

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
        # Protects the wake-up fd, which must not be written to after it was closed and perhaps
        # reused. No function is called while it is held. Reentrant, because a signal handler may
        # run while the same thread holds it.
        self._waking = threading.RLock()

    def __enter__(self) -> Self:
        self._selector.register(self._wakes, selectors.EVENT_READ)
        # A signal must end the wait. Without the wake-up fd its handler would run, and the select
        # would resume.
        self._wake_before = signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        return self

    def __exit__(self, *exc_info: object) -> None:
        signal.set_wakeup_fd(self._wake_before)
        for number, before in self._handlers.items():
            signal.signal(number, before)
        # Wake follower threads that wait for room. They see `_is_left` and return.
        self._is_left = True
        self._room.release(EVENTS_AHEAD_MAX)
        self._selector.close()
        with self._waking:
            self._is_closed = True
            os.close(self._wake)
            os.close(self._wakes)

    # -- input ------------------------------------------------------------------------------------
    def catch(self, *numbers: int) -> None:
        """Deliver these signals as `Signalled`.

        A signal that was ignored at the start stays ignored: that is how a shell keeps Ctrl-C from
        its background jobs.
        """
        for number in numbers:
            self.handle(number, self._on_signal)

    def handle(self, number: int, handler: Callable[[int, FrameType | None], None]) -> None:
        """Install a signal handler until the loop is left, unless the signal is ignored."""
        before = signal.getsignal(number)
        if before is signal.SIG_IGN:
            return
        self._handlers.setdefault(number, before)
        signal.signal(number, handler)

    def listen(self, keyboard: Keyboard) -> None:
        """Enter the keyboard and deliver its keys."""
        keyboard.enter()
        if self._keyboard is None:
            self._keyboard = keyboard
            self._selector.register(keyboard.fd, selectors.EVENT_READ)

    def stop_listening(self) -> None:
        """Leave the keyboard and stop delivering keys."""
        if self._keyboard is not None:
            self._selector.unregister(self._keyboard.fd)
            self._keyboard.leave()
            self._keyboard = None
            self._decoder = Decoder()

    def post(self, thing: Thing) -> None:
        """Queue something for the loop. May be called from any thread and from a signal handler."""
        self._posted.append(thing)
        # A full pipe already wakes the loop.
        with self._waking, contextlib.suppress(BlockingIOError):
            if not self._is_closed:
                os.write(self._wake, b"\0")

    # -- work in other threads --------------------------------------------------------------------
    def send(self, errand: str, call: Callable[[], Any]) -> None:
        """Run a call in a thread and deliver its result as `CallDone`."""

        def run() -> None:
            try:
                self.post(CallDone(errand, call()))
            except BanksmanError as exc:
                self.post(CallDone(errand, error=exc))

        threading.Thread(target=run, name=f"banksman-{errand}", daemon=True).start()

    def follow(self, events: Callable[[], Iterator[dict[str, Any]]]) -> None:
        """Iterate in a thread and deliver events as `EventReceived`.

        Posts `FeedEnded` at the end.
        """

        def run() -> None:
            try:
                for event in events():
                    self._room.acquire()
                    if self._is_left:
                        return
                    self.post(EventReceived(event))
                self.post(FeedEnded(AssertionError("a stream has no end")))
            except BaseException as exc:
                # The main thread must learn of every failure, including bugs.
                self.post(FeedEnded(exc))

        threading.Thread(target=run, name="banksman-follow", daemon=True).start()

    # -- wait -------------------------------------------------------------------------------------
    def things(self, seconds: float | None) -> list[Thing]:
        """Return everything that has arrived; else wait for the next input, or a `Tick`.

        Never empty.
        """
        deadline = None if seconds is None else time.monotonic() + seconds
        # Check the keyboard even if events are waiting: a busy agent must not delay the user's
        # keys.
        if ready := self._selector.select(0):
            self._take_ready(ready)
        while not self._posted:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if self._decoder.is_waiting:
                left = min(ESCAPE_SECONDS, ESCAPE_SECONDS if left is None else left)
            ready = self._selector.select(left)
            self._take_ready(ready)
            if (
                not ready
                and not self._posted
                and deadline is not None
                and time.monotonic() >= deadline
            ):
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
            # The terminal is gone. Treat this like a hangup: the user cannot type anything.
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
    """Follow a session's events in the loop.

    `is_partial`: also deliver pieces of unfinished text. Call the returned function to stop. The
    connection then ends at the server's next sign of life, and a quiet session has heartbeats.
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


def news(
    client: Client, *, on_lost: Callable[[], None], on_back: Callable[[], None]
) -> Iterator[Event]:
    """Yield new events of all sessions, without agent frames. Never ends.

    The events tell the reader what to fetch again. Events during a lost connection are missed, so
    the reader must fetch everything at `on_back`.
    """
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
        except (NoServer, RequestRefused, ValueError):
            # The server may be restarting. The screen shows that the connection is lost.
            pass
        if not is_lost:
            is_lost = True
            on_lost()
        time.sleep(pause)
        pause = min(2 * pause, PAUSE_SECONDS_MAX)
