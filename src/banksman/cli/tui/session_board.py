"""Full-screen table of all sessions for `banksman top`, with keys to attach and to interrupt.

An event marks its session, and marked sessions are fetched again. Busy sessions are also polled,
because no event reports their memory. `session_table.py` fetches and formats the rows.

The terminal is restored on every exit: by a key, a signal, an exception, or while the process is
suspended.
"""

from __future__ import annotations

import signal
import sys
import time
from typing import Any

from banksman.cli import INTERRUPTED, OK
from banksman.cli.client.client import Client
from banksman.cli.output import as_line, cut, padded, size_of, stdout_style, wrapped, write_terminal
from banksman.cli.server_command import interrupt_turn, receipt_in_words
from banksman.cli.tui import session_table
from banksman.cli.tui.event_loop import (
    CallDone,
    Connected,
    EventReceived,
    FeedEnded,
    ScreenLoop,
    Signalled,
    Thing,
    Typed,
    news,
    suspend,
)
from banksman.cli.tui.keyboard import Keyboard, KeyPress
from banksman.cli.tui.session_table import BUSY, SessionRow, SessionRows
from banksman.errors import BanksmanError

# Shortest interval between two refreshes and between two draws, however many events arrive.
REFRESH_SECONDS = 0.5
# Durations on the screen change without an event.
REDRAW_SECONDS = 1.0
# Above this number of changed sessions, one request for all is cheaper.
SOME_MAX = 20
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
_HELP = (
    "j, k, arrows   select a session",
    "g, G           select the first, the last session",
    "Enter          attach to the session; Ctrl-D returns",
    "i              interrupt its running turn (asks first)",
    "q, Ctrl-C      quit",
    "",
    (
        "asks: a question waits for an answer. "
        "wedged: no sign of life for too long, or the agent does not start."
    ),
    "DOES: the running turn. FOR: its duration. LAST: time since the last event.",
    (
        "Columns that do not fit are hidden, in this order: "
        "PIDS, MEMORY, AGENT, LAST, COST, HOST, QUEUE, DOES, ASKS, FOR."
    ),
)


class SessionBoard:
    """Table of all sessions. Runs in the thread of the loop, which is the main thread."""

    def __init__(
        self,
        loop: ScreenLoop,
        client: Client,
        survey: SessionRows,
        rows: dict[str, SessionRow],
        keyboard: Keyboard,
        *,
        interval: float,
    ) -> None:
        self._loop = loop
        self._client = client
        self._survey = survey
        self._rows = rows
        self._keyboard = keyboard
        self._interval = interval
        self._selected: str | None = None
        # Sessions to fetch again: these, or all. One fetch runs at a time.
        self._dirty: set[str] = set()
        self._is_all_dirty = False
        self._is_looking = False
        self._looked_at = time.monotonic()
        self._is_lost = False
        self._note = ""
        self._to_stop: SessionRow | None = None
        self._shows_help = False
        self._code: int | None = None
        self._style = stdout_style()
        self._drawn_at = 0.0

    def run(self) -> int:
        """Show the table until the user leaves. Return the exit code."""
        loop = self._loop
        loop.catch(signal.SIGINT, signal.SIGTSTP, signal.SIGWINCH, signal.SIGTERM, signal.SIGHUP)
        try:
            self._enter()
            loop.follow(
                lambda: news(
                    self._client,
                    on_lost=lambda: loop.post(Connected(is_there=False)),
                    on_back=lambda: loop.post(Connected(is_there=True)),
                )
            )
            self._draw()
            while self._code is None:
                things = loop.things(self._wait_seconds())
                for thing in things:
                    self._take(thing)
                self._look()
                is_key = any(isinstance(thing, Typed | Signalled | CallDone) for thing in things)
                if is_key or time.monotonic() - self._drawn_at >= REFRESH_SECONDS:
                    self._draw()
            return self._code
        finally:
            self._leave()

    def _enter(self) -> None:
        write_terminal(_ENTER)
        self._loop.listen(self._keyboard)

    def _leave(self) -> None:
        self._loop.stop_listening()
        write_terminal(_LEAVE)

    # -- fetching ---------------------------------------------------------------------------------
    def _wait_seconds(self) -> float:
        if self._is_looking or not (self._dirty or self._is_all_dirty):
            return REDRAW_SECONDS
        return max(0.0, min(REDRAW_SECONDS, self._looked_at + REFRESH_SECONDS - time.monotonic()))

    def _look(self) -> None:
        since = time.monotonic() - self._looked_at
        if self._is_looking or self._is_lost or since < REFRESH_SECONDS:
            return
        if since >= self._interval:
            # No event reports memory, and this stream carries no frames of the agents.
            self._dirty |= {row.id for row in self._rows.values() if row.state in BUSY}
        if not self._dirty and not self._is_all_dirty:
            return
        ids, is_all = sorted(self._dirty), self._is_all_dirty or len(self._dirty) > SOME_MAX
        self._dirty, self._is_all_dirty, self._is_looking = set(), False, True
        self._looked_at = time.monotonic()
        survey = self._survey
        self._loop.send(
            "all" if is_all else "some", survey.all if is_all else lambda: survey.some(ids)
        )

    def _seen(self, errand: str, result: Any, error: BanksmanError | None) -> None:
        self._is_looking = False
        self._looked_at = time.monotonic()
        if error is not None:
            # `Connected` reports the lost connection. When it is back, everything is fetched.
            self._is_all_dirty = True
        elif errand == "all":
            self._rows = result
        else:
            merged = {**self._rows, **result}
            self._rows = {id: row for id, row in merged.items() if row is not None}

    @property
    def _ordered(self) -> list[SessionRow]:
        return sorted(self._rows.values(), key=lambda row: row.rank)

    # -- input from the loop ----------------------------------------------------------------------
    def _take(self, thing: Thing) -> None:
        match thing:
            case EventReceived(event):
                self._dirty.add(event["session"])
            case Connected(is_there):
                self._is_lost = not is_there
                self._is_all_dirty = self._is_all_dirty or is_there
            case FeedEnded(error):
                raise error
            case CallDone(errand, result, error) if errand in ("all", "some"):
                self._seen(errand, result, error)
            case CallDone("interrupt", result, error):
                self._note = (
                    receipt_in_words(result) if error is None else f"cannot stop the turn: {error}"
                )
            case Typed(key):
                self._key(key)
            case Signalled(signal.SIGINT):
                self._code = INTERRUPTED
            case Signalled(signal.SIGTSTP):
                self._suspend()
            case Signalled(signal.SIGWINCH):
                # The table is redrawn after every signal.
                pass
            case Signalled(number):
                raise SystemExit(128 + number)
            case _:
                pass

    def _key(self, key: str) -> None:
        self._note = ""
        if self._to_stop is not None:
            row, self._to_stop = self._to_stop, None
            if key in ("y", "Y") and row.turn is not None:
                self._note = f"stopping {row.name}"
                self._loop.send("interrupt", lambda: interrupt_turn(self._client, row.id, row.turn))
            return
        if self._shows_help:
            self._shows_help = False
            return
        match str(key):
            case "q" | "escape":
                self._code = OK
            case "j" | "down":
                self._move(1)
            case "k" | "up":
                self._move(-1)
            case "g" | "home":
                self._move(-len(self._rows))
            case "G" | "end":
                self._move(len(self._rows))
            case "?":
                self._shows_help = True
            case "i":
                self._ask_to_stop()
            case "enter" if isinstance(key, KeyPress):
                self._attach()
            case _:
                pass

    def _move(self, by: int) -> None:
        ids = [row.id for row in self._ordered]
        if ids:
            # Nothing is selected at first. The first step selects the first or the last row.
            place = (
                ids.index(self._selected) + by
                if self._selected in ids
                else (0 if by > 0 else len(ids) - 1)
            )
            self._selected = ids[min(max(place, 0), len(ids) - 1)]

    def _ask_to_stop(self) -> None:
        row = self._rows.get(self._selected or "")
        if row is None:
            self._note = "select a session first: j or k"
        elif row.turn is None:
            self._note = f"no turn is running in {row.name}"
        else:
            self._to_stop = row

    def _attach(self) -> None:
        row = self._rows.get(self._selected or "")
        if row is None:
            self._note = "select a session first: j or k"
            return
        from banksman.cli.commands.attach import attach_to  # noqa: PLC0415

        self._leave()
        try:
            attach_to(self._client, row.id, self._keyboard)
        except BanksmanError as exc:
            self._note = str(exc)
        finally:
            self._enter()
            self._is_all_dirty = True

    def _suspend(self) -> None:
        self._leave()
        suspend()
        self._enter()

    # -- drawing ----------------------------------------------------------------------------------
    def _draw(self) -> None:
        columns, height = size_of(sys.stdout)
        rows = self._ordered
        if self._selected not in self._rows:
            self._selected = None
        top = f"banksman top · {session_table.summary(rows)} · {time.strftime('%H:%M:%S')}"
        if self._is_lost:
            top = "connection lost, trying again"
        look = self._style.red if self._is_lost else self._style.dim
        lines = [
            look(padded(cut(top, columns), columns)),
            *self._middle(rows, columns, max(0, height - 2)),
        ]
        bottom = padded(cut(as_line(self._bottom()), columns), columns)
        lines = [
            *lines[: height - 1],
            self._style.yellow(bottom) if self._to_stop else self._style.dim(bottom),
        ]
        # The drawing has as many lines as the screen, each of full width. Nothing must be cleared
        # first, so nothing flickers.
        write_terminal("\x1b[?7l\x1b[H" + "\r\n".join(lines) + "\x1b[?7h")
        self._drawn_at = time.monotonic()

    def _middle(self, rows: list[SessionRow], columns: int, height: int) -> list[str]:
        blank = " " * columns
        if self._shows_help:
            drawn = [
                padded(row, columns)
                for line in _HELP
                for row in wrapped(line, columns, indent="  ")
            ]
        elif not rows:
            drawn = [padded(cut("no sessions yet", columns), columns)]
        else:
            head, *all_lines = session_table.lines(
                rows, columns, time.time(), style=self._style, selected=self._selected
            )
            room = max(1, height - 1)
            place = next((at for at, row in enumerate(rows) if row.id == self._selected), 0)
            # The selected row is always visible.
            first = min(max(0, place - room // 2), max(0, len(rows) - room))
            drawn = [head, *all_lines[first : first + room]]
        return [*drawn, *([blank] * height)][:height]

    def _bottom(self) -> str:
        if self._to_stop is not None:
            return f"interrupt {self._to_stop.name}? y / n"
        return self._note or "q quits · j/k select · Enter attaches · i interrupts · ? help"
