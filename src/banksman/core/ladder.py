"""The stop ladder: how anything is ended, as data and one pure function.

It owns the decision which rung is next and when. It performs nothing: `step(state, fact)` answers with effects, and
time arrives on the facts. Interrupts, timeouts, eviction, the host's close and a command's own exit all walk this one
ladder; they differ only in where they enter it.

    RUNNING ──StopAsked──► EOF ──► TERM ──► KILL ──► KEEPER
       │                    │        │       ▲ │       │
       │                    └────┬───┘       │ └───┬───┘
       │                   LeaderExited      │  TreeGone
       │                         ▼           │     ▼
       └─LeaderExited─► LINGER ─► REST ──────┘   DRAIN ──► OVER
                           └───────┴──TreeGone─────▲

- EOF (agents only): stdin is closed; reading goes on, so that a child blocked on a full pipe can move.
- TERM: to the leader's group, so that it can clean up in its own order. `grace` is counted once, from here.
- REST: the leader is gone; TERM to what is left of the tree, inside the same grace.
- LINGER: the leader left of its own accord; the rest may finish what it is writing (`cmd > >(tee log)`).
- KILL: the tree is frozen and killed. The keeper reports the tree gone, or who is left; if it does not report in time
  the keeper itself is wedged and gets killed (KEEPER), and the zygote finishes its work.
- DRAIN: the tree is gone; what is still in the pipes is read, for a bounded time.

Each timer names the phase it was started in. One that fires in another phase is stale, and ignored.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

# The keeper reports within this time of being told to kill, whatever happens (its own bound is 5 s); it is wedged else.
KILL_REPORT_SECONDS_MAX = 7.0


class Phase(enum.Enum):
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


# -- facts -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class StopAsked:
    """Somebody wants it ended. `at_once` skips to KILL."""

    at: float
    at_once: bool = False


@dataclass(frozen=True, slots=True)
class LeaderExited:
    at: float


@dataclass(frozen=True, slots=True)
class OutputClosed:
    """Every pipe we read was read to its end."""

    at: float


@dataclass(frozen=True, slots=True)
class TreeGone:
    """The keeper proved the tree empty, or reported who could not be ended."""

    at: float


@dataclass(frozen=True, slots=True)
class TimerFired:
    at: float
    phase: Phase


Fact = StopAsked | LeaderExited | OutputClosed | TreeGone | TimerFired


# -- effects ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class CloseStdin:
    pass


@dataclass(frozen=True, slots=True)
class TermGroup:
    """TERM and CONT to the leader's group. The keeper goes on alone after `seconds`."""

    seconds: float


@dataclass(frozen=True, slots=True)
class TermRest:
    """TERM and CONT to each living descendant."""

    seconds: float


@dataclass(frozen=True, slots=True)
class KillTree:
    pass


@dataclass(frozen=True, slots=True)
class KillKeeper:
    """The keeper does not answer; the zygote ends what it kept."""


@dataclass(frozen=True, slots=True)
class CloseOutput:
    """Give the read ends up, whoever still holds the other side."""


@dataclass(frozen=True, slots=True)
class StartTimer:
    at: float
    phase: Phase


@dataclass(frozen=True, slots=True)
class Settle:
    """It is over. `drained` is False if somebody still held a pipe."""

    drained: bool


Effect = CloseStdin | TermGroup | TermRest | KillTree | KillKeeper | CloseOutput | StartTimer | Settle


# -- the machine -----------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Ladder:
    timings: Timings
    phase: Phase = Phase.RUNNING
    is_output_closed: bool = False
    # When the grace that began with the first TERM ends. TERM to the rest does not begin another.
    kill_at: float | None = None


def step(ladder: Ladder, fact: Fact) -> tuple[Ladder, list[Effect]]:
    """Total: every fact in every phase has an answer, and a stale one answers nothing."""
    if ladder.phase is Phase.OVER:
        return ladder, []
    match fact:
        case StopAsked():
            return _on_stop(ladder, fact)
        case LeaderExited():
            return _on_exit(ladder, fact.at)
        case OutputClosed():
            return _on_output_closed(replace(ladder, is_output_closed=True))
        case TreeGone():
            return _on_tree_gone(ladder, fact.at)
        case TimerFired():
            if fact.phase is not ladder.phase:
                return ladder, []
            return _on_timer(ladder, fact.at)


def _on_stop(ladder: Ladder, fact: StopAsked) -> tuple[Ladder, list[Effect]]:
    if ladder.phase in (Phase.KILL, Phase.KEEPER, Phase.DRAIN):
        return ladder, []
    if fact.at_once:
        return _kill(ladder, fact.at)
    match ladder.phase:
        case Phase.RUNNING if ladder.timings.eof is not None:
            timer = StartTimer(fact.at + ladder.timings.eof, Phase.EOF)
            return replace(ladder, phase=Phase.EOF), [CloseStdin(), timer]
        case Phase.RUNNING:
            return _term(ladder, fact.at)
        case Phase.LINGER:
            return _rest(ladder, fact.at)
        case _:
            return ladder, []  # Being stopped already.


def _on_exit(ladder: Ladder, at: float) -> tuple[Ladder, list[Effect]]:
    match ladder.phase:
        case Phase.RUNNING:
            lingering = replace(ladder, phase=Phase.LINGER)
            return lingering, [StartTimer(at + ladder.timings.linger, Phase.LINGER)]
        case Phase.EOF | Phase.TERM:
            return _rest(ladder, at)
        case _:
            return ladder, []


def _on_output_closed(ladder: Ladder) -> tuple[Ladder, list[Effect]]:
    if ladder.phase is Phase.DRAIN:
        return replace(ladder, phase=Phase.OVER), [Settle(drained=True)]
    return ladder, []


def _on_tree_gone(ladder: Ladder, at: float) -> tuple[Ladder, list[Effect]]:
    if ladder.phase is Phase.DRAIN:
        return ladder, []
    if ladder.is_output_closed:
        return replace(ladder, phase=Phase.OVER), [Settle(drained=True)]
    return replace(ladder, phase=Phase.DRAIN), [StartTimer(at + ladder.timings.drain, Phase.DRAIN)]


def _on_timer(ladder: Ladder, at: float) -> tuple[Ladder, list[Effect]]:
    match ladder.phase:
        case Phase.EOF:
            return _term(ladder, at)
        case Phase.LINGER:
            return _rest(ladder, at)
        case Phase.TERM | Phase.REST:
            return _kill(ladder, at)
        case Phase.KILL:
            timer = StartTimer(at + KILL_REPORT_SECONDS_MAX, Phase.KEEPER)
            return replace(ladder, phase=Phase.KEEPER), [KillKeeper(), timer]
        case _:
            # DRAIN: somebody outside the tree holds a pipe. KEEPER: neither keeper nor zygote reports any more.
            return replace(ladder, phase=Phase.OVER), [CloseOutput(), Settle(drained=ladder.is_output_closed)]


def _term(ladder: Ladder, at: float) -> tuple[Ladder, list[Effect]]:
    kill_at = at + ladder.timings.grace
    termed = replace(ladder, phase=Phase.TERM, kill_at=kill_at)
    return termed, [TermGroup(ladder.timings.grace), StartTimer(kill_at, Phase.TERM)]


def _rest(ladder: Ladder, at: float) -> tuple[Ladder, list[Effect]]:
    kill_at = at + ladder.timings.grace if ladder.kill_at is None else ladder.kill_at
    resting = replace(ladder, phase=Phase.REST, kill_at=kill_at)
    return resting, [TermRest(max(0.0, kill_at - at)), StartTimer(kill_at, Phase.REST)]


def _kill(ladder: Ladder, at: float) -> tuple[Ladder, list[Effect]]:
    killing = replace(ladder, phase=Phase.KILL)
    return killing, [KillTree(), StartTimer(at + KILL_REPORT_SECONDS_MAX, Phase.KILL)]
