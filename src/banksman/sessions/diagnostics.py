"""Session diagnostics: counters, turn durations, usage and a recorder of the last facts.

A session has `Counters`, `TurnTimes`, a `UsageCount` and a `Recorder`. `CountTotals` sums the
counters, times and usage of all sessions of a host. `runtime/host_stats.py` reports the sums.

Each session has its own counters, and they vanish with the session. A sum that an operator follows
for days must not fall because of that. So when a session ends here, its counters are added to the
totals of all ended sessions. While the session lives nothing is summed, and counting a frame costs
one addition.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from msgspec.structs import replace

from banksman.core.dialects.dialect import Dialect
from banksman.core.session.event import (
    TURN_ENDED,
    TURN_INTERRUPTED,
    TURN_QUEUED,
    TURN_REQUEUED,
    TURN_STARTED,
    UPDATE,
    Entry,
)
from banksman.core.session.facts import Asked, Fact, FramesRead
from banksman.core.session.outcome import Kind
from banksman.core.session.state import Session
from banksman.core.session.usage import NO_USAGE, Addition, Usage
from banksman.histogram import Histogram

# -- times ----------------------------------------------------------------------------------------
# Upper bounds in seconds. The range is wide because an agent answers in a second or works for an
# hour.
BOUNDS = (0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0, 7200.0)
_MARKS = frozenset((TURN_QUEUED, TURN_STARTED, TURN_INTERRUPTED, TURN_REQUEUED, TURN_ENDED))
# The session updates that are output of the model.
_OUTPUT = frozenset(("agent_message_chunk", "agent_thought_chunk", "tool_call"))
# Limit on the frames of a turn that are searched for its first output. Agents send a few others
# before it. A flood of frames without output must not cost a search of each.
SILENT_FRAMES_MAX = 256
# -- the flight recorder ---------------------------------------------------------------------------
# The recorder keeps at least this many facts and at most twice as many.
FACTS_MIN = 64
# Limits on the frames of one recorded fact. A trace stays readable without a flood of text.
LINES_MAX = 16
LINE_BYTES_MAX = 256


@dataclass(slots=True)
class Counters:
    """Traffic of one session in both directions since it was opened.

    `noise`: lines that were not frames. `spilled`: frames too large for the log. `dropped`: bytes
    that were lost, of such frames and of floods. `swept`: processes that were ended together with
    the agent's process. `survivors`: processes that could not be ended.
    """

    frames_in: int = 0
    bytes_in: int = 0
    frames_out: int = 0
    bytes_out: int = 0
    noise: int = 0
    spilled: int = 0
    dropped: int = 0
    processes: int = 0
    swept: int = 0
    survivors: int = 0


class TurnTimes:
    """Times of the turns of one session or of several sessions together.

    `queue`: from acceptance to the first start. `first_token`: from the first start to the first
    output: text, thinking or a tool. `turn`: from the first start to the end. A turn that was
    started again counts once. `stop`: from an interrupt to the end of the turn, or to its return to
    the queue.

    The times come from the events that are written to the log. An ask that was queued under another
    host is not measured, because the clocks of two hosts differ.
    """

    __slots__ = (
        *("queue", "first_token", "turn", "stop"),
        *("_queued", "_started", "_silent", "_interrupted"),
    )

    def __init__(self) -> None:
        self.queue = Histogram(BOUNDS)
        self.first_token = Histogram(BOUNDS)
        self.turn = Histogram(BOUNDS)
        self.stop = Histogram(BOUNDS)
        self._queued: dict[str, float] = {}
        self._started: dict[str, float] = {}
        # Started turns without output, and the number of frames that were searched for it.
        self._silent: dict[str, int] = {}
        self._interrupted: dict[str, float] = {}

    @property
    def awaits_output(self) -> bool:
        """Whether a frame of the agent may be the first output of a turn."""
        return bool(self._silent)

    def note(self, entries: Sequence[Entry], now: float, dialect: Dialect) -> None:
        for turn, kind, data in entries:
            if turn is None:
                continue
            if kind == UPDATE:
                if turn in self._silent:
                    self._note_frame(turn, data, now, dialect)
            elif kind in _MARKS:
                self._note_mark(turn, kind, now)

    def _note_mark(self, turn: str, kind: str, now: float) -> None:
        if kind == TURN_QUEUED:
            self._queued[turn] = now
        elif kind == TURN_STARTED and turn in self._queued:
            self.queue.add(now - self._queued.pop(turn))
            self._started[turn] = now
            self._silent[turn] = 0
        elif kind == TURN_INTERRUPTED:
            self._interrupted.setdefault(turn, now)
        elif kind in (TURN_ENDED, TURN_REQUEUED):
            self._silent.pop(turn, None)
            if turn in self._interrupted:
                self.stop.add(now - self._interrupted.pop(turn))
            if kind == TURN_ENDED:
                self._queued.pop(turn, None)
                if turn in self._started:
                    self.turn.add(now - self._started.pop(turn))

    def _note_frame(self, turn: str, line: bytes, now: float, dialect: Dialect) -> None:
        if dialect.may_show_output(line):
            updates = (*dialect.project(line), *dialect.partial(line))
            if any(update.get("sessionUpdate") in _OUTPUT for update in updates):
                self.first_token.add(now - self._started[turn])
                del self._silent[turn]
                return
        self._silent[turn] += 1
        if self._silent[turn] == SILENT_FRAMES_MAX:
            del self._silent[turn]

    def update(self, other: TurnTimes) -> None:
        self.queue.update(other.queue)
        self.first_token.update(other.first_token)
        self.turn.update(other.turn)
        self.stop.update(other.stop)


# -- usage -----------------------------------------------------------------------------------------
class UsageCount:
    """Usage of one session that was written to the log, by agent. None: its first agent.

    `highest`: the sums, which never fall. An event may correct an earlier one downwards.
    """

    __slots__ = ("_sums", "highest")

    def __init__(self) -> None:
        self._sums: dict[str | None, Usage] = {}
        self.highest: dict[str | None, Usage] = {}

    def note(self, additions: Iterable[Addition]) -> None:
        """Add what the events of an append add."""
        for _, agent, added in additions:
            total = self._sums[agent] = self._sums.get(agent, NO_USAGE).plus(added)
            self.highest[agent] = self.highest.get(agent, NO_USAGE).most(total)


# -- all sessions of a host ----------------------------------------------------------------------
class SessionCounts(NamedTuple):
    """Counters of one session.

    `outcomes`: the number of ended asks by the kind of their outcome.
    """

    counters: Counters
    outcomes: Counter[str]
    turn_times: TurnTimes
    usage: UsageCount
    agent: str = ""


class CountTotals:
    """Sums over all sessions of a host, open and ended.

    Belongs to one event loop. No sum ever decreases.
    """

    def __init__(self) -> None:
        self._open: dict[asyncio.Future[None], SessionCounts] = {}
        self._counters: Counter[str] = Counter(dict.fromkeys(Counters.__slots__, 0))
        self._turns: Counter[str] = Counter({kind.value: 0 for kind in Kind})
        self._times = TurnTimes()
        # From the claim of a session of another host to its readiness here.
        self.takeovers = Histogram(BOUNDS)
        self._usage: dict[str, Usage] = {}

    def follow(self, finished: asyncio.Future[None], counted: SessionCounts) -> None:
        """Include a session in the sums.

        An open session is read on demand. When `finished` is done, its final counters stay in the
        totals.
        """
        self._open[finished] = counted
        finished.add_done_callback(self._end)

    def _end(self, finished: asyncio.Future[None]) -> None:
        counted = self._open.pop(finished)
        self._counters.update(_by_name(counted.counters))
        self._turns.update(counted.outcomes)
        self._times.update(counted.turn_times)
        _add_usage(self._usage, counted)

    def counters(self) -> Mapping[str, int]:
        """Return the sums of all fields of `Counters`."""
        total = self._counters.copy()
        for counted in self._open.values():
            total.update(_by_name(counted.counters))
        return total

    def turns(self) -> Mapping[str, int]:
        """Return the number of ended asks by the kind of their outcome."""
        total = self._turns.copy()
        for counted in self._open.values():
            total.update(counted.outcomes)
        return total

    def usage(self) -> Mapping[str, Usage]:
        """Return the usage by agent."""
        total = dict(self._usage)
        for counted in self._open.values():
            _add_usage(total, counted)
        return total

    def times(self) -> TurnTimes:
        """Return the times of the turns of all sessions."""
        total = TurnTimes()
        for times in (self._times, *(counted.turn_times for counted in self._open.values())):
            total.update(times)
        return total


def _add_usage(total: dict[str, Usage], counted: SessionCounts) -> None:
    # An agent without usage counts as 0 from the first session on.
    total.setdefault(counted.agent, NO_USAGE)
    for agent, usage in counted.usage.highest.items():
        name = agent or counted.agent
        total[name] = total.get(name, NO_USAGE).plus(usage)


def _by_name(counters: Counters) -> dict[str, int]:
    return {name: getattr(counters, name) for name in counters.__slots__}


class Recorder:
    """Flight recorder: the last facts of a session and the state before the first of them.

    A unit test can replay the record. A fact whose processing fails is the last fact of the record.
    Frames are truncated, because their meanings are kept beside them.
    """

    def __init__(self) -> None:
        self._before: tuple[Session, list[Fact]] | None = None
        self._now: tuple[Session, list[Fact]] | None = None

    def note(self, state: Session, fact: Fact) -> None:
        """Record a fact before it is processed.

        `state`: the state that the fact is about to be applied to.
        """
        if self._now is None or len(self._now[1]) >= FACTS_MIN:
            self._before, self._now = self._now, (state, [])
        self._now[1].append(_cut(fact))

    def flight(self) -> tuple[Session, list[Fact]] | None:
        """Return the initial state and the facts since then; None if no fact was recorded."""
        if self._before is None or self._now is None:
            return self._now
        return self._before[0], [*self._before[1], *self._now[1]]

    def __str__(self) -> str:
        flight = self.flight()
        return "nothing" if flight is None else "\n".join(f"  {fact}" for fact in flight[1])


def _cut(fact: Fact) -> Fact:
    if isinstance(fact, Asked):
        # The prompt matters only to the agent. The state machine only sees that an ask exists.
        return replace(fact, ask=replace(fact.ask, prompt=str(fact.ask.prompt)[:LINE_BYTES_MAX]))
    if not isinstance(fact, FramesRead):
        return fact
    if len(fact.lines) <= LINES_MAX:
        return replace(fact, lines=[line[:LINE_BYTES_MAX] for line in fact.lines])
    # A meaning refers to its line by index, so the index must stay valid. Omitted lines become
    # empty lines.
    lines = [b""] * len(fact.lines)
    for index, _ in fact.meanings:
        lines[index] = fact.lines[index][:LINE_BYTES_MAX]
    return replace(fact, lines=lines)
