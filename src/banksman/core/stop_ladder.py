"""The stop ladder: how anything is ended, as data and one pure function.

It owns the decision which rung is next and when. It performs nothing: `step(state, fact)` answers with effects, and
time arrives on the facts. Interrupts, timeouts, eviction, the host's close and a command's own exit all walk this one
ladder; they differ only in where they enter it.

    RUNNING ──StopAsked──► EOF ──► TERM ──► KILL ──► KEEPER
       │                    │        │       ▲ │       │
       │                    └────┬───┘       │ └───┬───┘
       │                      Exited         │ TreeEnded
       │                         ▼           │     ▼
       └──Exited──► LINGER ───► REST ────────┘   DRAIN ──► OVER
                       └─────────┴──TreeEnded──────▲

- EOF (agents only): stdin is closed; reading goes on, so that a child blocked on a full pipe can move.
- TERM: to the leader's group, so that it can clean up in its own order. `grace` is counted once, from here. With a
  terminal, a leader that ignores TERM (an interactive shell) gets HUP too.
- REST: the leader is gone; TERM to what is left of the tree, inside the same grace.
- LINGER: the leader left of its own accord; the rest may finish what it is writing (`cmd > >(tee log)`).
- KILL: the tree is frozen and killed. The keeper reports the tree gone, or who is left; if it does not report in time
  the keeper itself is wedged and gets killed (KEEPER), and the zygote finishes its work.
- DRAIN: the tree is gone; what is still in the pipes is read, for a bounded time.

A stop may be bound (`kill_by`): the waits of EOF and TERM are then shortened, each by its share, so that KILL comes by
that time whatever they are set to. One that is under way is only ever shortened.

Each timer names the phase it was started in. One that fires in another phase is stale, and ignored. A phase that is
shortened has two: the earlier ends it, and the later is stale.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

from banksman.core.process_facts import Exited, TreeEnded

# The keeper reports within this time of being told to kill, whatever happens (its own bound is 5 s); it is wedged else.
KILL_REPORT_SECONDS_MAX = 7.0
# The zygote reports within this time of being told to kill a keeper that is wedged: its sweep has the same bound.
TAKE_OVER_SECONDS_MAX = 7.0


class LadderPhase(enum.Enum):
    RUNNING = "running"
    EOF = "eof"
    TERM = "term"
    LINGER = "linger"
    REST = "rest"
    KILL = "kill"
    KEEPER = "keeper"
    DRAIN = "drain"
    OVER = "over"


@dataclass(frozen=True, slots=True)
class Timings:
    """The waits between the rungs, in seconds. `eof` None: there is no EOF rung, the ladder starts at TERM."""

    grace: float = 5.0
    linger: float = 0.3
    drain: float = 2.0
    eof: float | None = None

    @property
    def seconds_max(self) -> float:
        """All of them, one after the other, where each rung is taken: what is not over by then is stuck."""
        reports = KILL_REPORT_SECONDS_MAX + TAKE_OVER_SECONDS_MAX
        return (self.eof or 0.0) + self.linger + self.grace + reports + self.drain


# -- facts -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class StopAsked:
    """Somebody wants it ended. `at_once` skips to KILL; by `kill_by` that must have come, at the latest."""

    at: float
    at_once: bool = False
    kill_by: float | None = None


@dataclass(frozen=True, slots=True)
class OutputClosed:
    """Every pipe we read was read to its end."""

    at: float


@dataclass(frozen=True, slots=True)
class LadderTimerFired:
    """What was asked for by `StartLadderTimer` is due."""

    at: float
    phase: LadderPhase


Fact = StopAsked | Exited | OutputClosed | TreeEnded | LadderTimerFired


# -- effects ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class CloseStdin:
    """The end of its input: the first rung of who listens to that."""


@dataclass(frozen=True, slots=True)
class TermGroup:
    """TERM and CONT to the leader's group, and HUP to a shell. The keeper goes on alone after `seconds`."""

    seconds: float


@dataclass(frozen=True, slots=True)
class TermRest:
    """TERM and CONT to each living descendant."""

    seconds: float


@dataclass(frozen=True, slots=True)
class KillTree:
    """Everything that is left, frozen first."""


@dataclass(frozen=True, slots=True)
class KillKeeper:
    """The keeper does not answer; the zygote ends what it kept."""


@dataclass(frozen=True, slots=True)
class Hurry:
    """The keeper goes on alone at these times, whatever else it was told: TERM, and KILL."""

    term_at: float
    kill_at: float


@dataclass(frozen=True, slots=True)
class CloseOutput:
    """Give the read ends up, whoever still holds the other side."""


@dataclass(frozen=True, slots=True)
class StartLadderTimer:
    """Say so when it is due."""

    at: float
    phase: LadderPhase


@dataclass(frozen=True, slots=True)
class Settle:
    """It is over. `drained` is False if somebody still held a pipe."""

    drained: bool


Effect = CloseStdin | TermGroup | TermRest | KillTree | KillKeeper | Hurry | CloseOutput | StartLadderTimer | Settle


# -- the machine -----------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Ladder:
    """Where the stopping of one command stands."""

    timings: Timings
    phase: LadderPhase = LadderPhase.RUNNING
    is_output_closed: bool = False
    # When the grace that began with the first TERM ends. TERM to the rest does not begin another.
    kill_at: float | None = None
    # When the wait after the end of its stdin is over; and by when KILL must have come, if somebody has said so.
    term_at: float | None = None
    kill_by: float | None = None

    def bound(self, at: float) -> float:
        """The same time, or the one by which KILL must have come."""
        return at if self.kill_by is None else min(at, self.kill_by)


def step(ladder: Ladder, fact: Fact) -> tuple[Ladder, list[Effect]]:
    """Total: every fact in every phase has an answer, and a stale one answers nothing."""
    if ladder.phase is LadderPhase.OVER:
        return ladder, []
    match fact:
        case StopAsked():
            return _on_stop(ladder, fact)
        case Exited():
            return _on_exit(ladder, fact.at)
        case OutputClosed():
            return _on_output_closed(replace(ladder, is_output_closed=True))
        case TreeEnded():
            return _on_tree_ended(ladder, fact.at)
        case LadderTimerFired():
            if fact.phase is not ladder.phase:
                return ladder, []
            return _on_timer(ladder, fact.at)


def _on_stop(ladder: Ladder, fact: StopAsked) -> tuple[Ladder, list[Effect]]:
    if ladder.phase in (LadderPhase.KILL, LadderPhase.KEEPER, LadderPhase.DRAIN):
        return ladder, []
    if fact.at_once:
        return _kill(ladder, fact.at)
    if fact.kill_by is None or ladder.bound(fact.kill_by) == ladder.kill_by:
        return _stop(ladder, fact.at)
    ladder, effects = _shorten(*_stop(replace(ladder, kill_by=fact.kill_by), fact.at), fact.at, fact.kill_by)
    return ladder, [*effects, Hurry(fact.kill_by if ladder.term_at is None else ladder.term_at, fact.kill_by)]


def _stop(ladder: Ladder, at: float) -> tuple[Ladder, list[Effect]]:
    match ladder.phase:
        case LadderPhase.RUNNING if ladder.timings.eof is not None:
            term_at = at + ladder.timings.eof
            return replace(ladder, phase=LadderPhase.EOF, term_at=term_at), [
                CloseStdin(),
                StartLadderTimer(term_at, LadderPhase.EOF),
            ]
        case LadderPhase.RUNNING:
            return _term(ladder, at)
        case LadderPhase.LINGER:
            return _rest(ladder, at)
        case _:
            return ladder, []  # Being stopped already.


def _shorten(ladder: Ladder, effects: list[Effect], at: float, kill_by: float) -> tuple[Ladder, list[Effect]]:
    """What has been begun, before or just now, fits into the time that is left."""
    if ladder.phase is LadderPhase.EOF:
        assert ladder.term_at is not None
        wait, left = max(0.0, ladder.term_at - at), max(0.0, kill_by - at)
        needed = wait + ladder.timings.grace
        if needed > left:
            term_at = at + left * (wait / needed)
            return replace(ladder, term_at=term_at), [*effects, StartLadderTimer(term_at, LadderPhase.EOF)]
    elif ladder.phase in (LadderPhase.TERM, LadderPhase.REST):
        assert ladder.kill_at is not None
        if kill_by < ladder.kill_at:
            return replace(ladder, kill_at=kill_by), [*effects, StartLadderTimer(kill_by, ladder.phase)]
    return ladder, effects


def _on_exit(ladder: Ladder, at: float) -> tuple[Ladder, list[Effect]]:
    match ladder.phase:
        case LadderPhase.RUNNING:
            lingering = replace(ladder, phase=LadderPhase.LINGER)
            return lingering, [StartLadderTimer(at + ladder.timings.linger, LadderPhase.LINGER)]
        case LadderPhase.EOF | LadderPhase.TERM:
            return _rest(ladder, at)
        case _:
            return ladder, []


def _on_output_closed(ladder: Ladder) -> tuple[Ladder, list[Effect]]:
    if ladder.phase is LadderPhase.DRAIN:
        return replace(ladder, phase=LadderPhase.OVER), [Settle(drained=True)]
    return ladder, []


def _on_tree_ended(ladder: Ladder, at: float) -> tuple[Ladder, list[Effect]]:
    if ladder.phase is LadderPhase.DRAIN:
        return ladder, []
    if ladder.is_output_closed:
        return replace(ladder, phase=LadderPhase.OVER), [Settle(drained=True)]
    return replace(ladder, phase=LadderPhase.DRAIN), [StartLadderTimer(at + ladder.timings.drain, LadderPhase.DRAIN)]


def _on_timer(ladder: Ladder, at: float) -> tuple[Ladder, list[Effect]]:
    match ladder.phase:
        case LadderPhase.EOF:
            return _term(ladder, at)
        case LadderPhase.LINGER:
            return _rest(ladder, at)
        case LadderPhase.TERM | LadderPhase.REST:
            return _kill(ladder, at)
        case LadderPhase.KILL:
            timer = StartLadderTimer(at + TAKE_OVER_SECONDS_MAX, LadderPhase.KEEPER)
            return replace(ladder, phase=LadderPhase.KEEPER), [KillKeeper(), timer]
        case _:
            # DRAIN: somebody outside the tree holds a pipe. KEEPER: neither keeper nor zygote reports any more.
            return replace(ladder, phase=LadderPhase.OVER), [CloseOutput(), Settle(drained=ladder.is_output_closed)]


def _term(ladder: Ladder, at: float) -> tuple[Ladder, list[Effect]]:
    kill_at = ladder.bound(at + ladder.timings.grace)
    termed = replace(ladder, phase=LadderPhase.TERM, kill_at=kill_at)
    return termed, [TermGroup(max(0.0, kill_at - at)), StartLadderTimer(kill_at, LadderPhase.TERM)]


def _rest(ladder: Ladder, at: float) -> tuple[Ladder, list[Effect]]:
    kill_at = ladder.bound(at + ladder.timings.grace if ladder.kill_at is None else ladder.kill_at)
    resting = replace(ladder, phase=LadderPhase.REST, kill_at=kill_at)
    return resting, [TermRest(max(0.0, kill_at - at)), StartLadderTimer(kill_at, LadderPhase.REST)]


def _kill(ladder: Ladder, at: float) -> tuple[Ladder, list[Effect]]:
    killing = replace(ladder, phase=LadderPhase.KILL)
    return killing, [KillTree(), StartLadderTimer(at + KILL_REPORT_SECONDS_MAX, LadderPhase.KILL)]
