"""Stop ladder: the one way to end a process tree, as data and a pure step function.

This module decides which rung is next and when. It performs nothing: `step(state, fact)` returns
effects, and time arrives with the facts. `commands/running_command.py` performs the effects, and
the keeper, the parent process of the tree, sends the signals. Interrupts, timeouts, eviction, the
host's close and a command's own exit all use this one ladder. They differ only in the phase where
they enter it.

    RUNNING ──StopAsked──► EOF ──► TERM ──► KILL ──► KEEPER
       │                    │        │       ▲ │       │
       │                    └────┬───┘       │ └───┬───┘
       │                      Exited         │ TreeEnded
       │                         ▼           │     ▼
       └──Exited──► LINGER ───► REST ────────┘   DRAIN ──► OVER
                       └─────────┴──TreeEnded──────▲

- EOF (agents only): stdin is closed. Reading continues, so that a child blocked on a full pipe can
  move. A child that does not react to the end of its input gets TERM early (InputEndIgnored).
- TERM: sent to the leader's group, so that the leader can clean up in its own order. `grace` counts
  once, from here. On a terminal, a leader that ignores TERM (an interactive shell) also gets HUP.
- REST: the leader is gone. The rest of the tree gets TERM, inside the same grace.
- LINGER: the leader exited unprompted. The rest of the tree may finish its writing (`cmd > >(tee
  log)`).
- KILL: the tree is frozen and killed. The keeper reports that the tree is gone, or which processes
  are left. If the keeper does not report in time, it is stuck itself and gets killed (KEEPER). The
  zygote then finishes its work.
- DRAIN: the tree is gone. The bytes left in the pipes are read, for a bounded time.

A stop may have a deadline (`kill_by`). The waits of EOF and TERM then shrink in proportion, so that
KILL comes by that time whatever their settings are. A later stop can only shorten the current one.

Each timer names the phase that started it. A timer that fires in another phase is stale and
ignored. A shortened phase has two timers: the earlier one ends the phase, and the later one is
stale.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

from banksman.core.process_facts import Exited, TreeEnded

# The keeper reports within this time after a kill command, whatever happens: its own bound is 5 s.
# A keeper that does not report is stuck.
KILL_REPORT_SECONDS_MAX = 7.0
# The zygote reports within this time after the command to kill a stuck keeper. Its sweep has the
# same bound.
TAKE_OVER_SECONDS_MAX = 7.0
# A process that reacts to the end of its stdin writes less than this before it exits: what a full
# pipe held (1 MiB at most), and its last messages. A process that writes more is busy with
# something else. It gets TERM, and still has the grace to finish.
EOF_OUTPUT_BYTES_MAX = 4 << 20


class LadderPhase(enum.Enum):
    """Phase of the ladder; see the module docstring."""

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
    """The waits between the rungs, in seconds.

    `eof` None: the ladder has no EOF rung and starts at TERM.
    """

    grace: float = 5.0
    linger: float = 0.3
    drain: float = 2.0
    eof: float | None = None

    @property
    def seconds_max(self) -> float:
        """The sum of all waits, with every rung taken. A ladder that takes longer is stuck."""
        reports = KILL_REPORT_SECONDS_MAX + TAKE_OVER_SECONDS_MAX
        return (self.eof or 0.0) + self.linger + self.grace + reports + self.drain


# -- facts ---------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class StopAsked:
    """A caller wants the process ended.

    `at_once` skips to KILL. `kill_by`: the latest time for KILL.
    """

    at: float
    at_once: bool = False
    kill_by: float | None = None


@dataclass(frozen=True, slots=True)
class OutputClosed:
    """Every output pipe was read to its end."""

    at: float


@dataclass(frozen=True, slots=True)
class InputEndIgnored:
    """The process does not react to the end of its stdin.

    Either no process of it waits for input (process/eof_reaction.py), or it has written more than
    `EOF_OUTPUT_BYTES_MAX` since.
    """

    at: float


@dataclass(frozen=True, slots=True)
class LadderTimerFired:
    """A timer that `StartLadderTimer` set is due."""

    at: float
    phase: LadderPhase


Fact = StopAsked | Exited | OutputClosed | TreeEnded | InputEndIgnored | LadderTimerFired


# -- effects -------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class CloseStdin:
    """Close the process's stdin: the first rung for agents, which exit at the end of input."""


@dataclass(frozen=True, slots=True)
class TermGroup:
    """Send TERM and CONT to the leader's group, and HUP to a shell.

    The keeper continues without the host after `seconds`.
    """

    seconds: float


@dataclass(frozen=True, slots=True)
class TermRest:
    """Send TERM and CONT to each living descendant."""

    seconds: float


@dataclass(frozen=True, slots=True)
class KillTree:
    """Freeze and kill every process that is left in the tree."""


@dataclass(frozen=True, slots=True)
class KillKeeper:
    """Kill the keeper, which does not answer; the zygote ends the keeper's tree."""


@dataclass(frozen=True, slots=True)
class Hurry:
    """Give the keeper deadlines for TERM and KILL, at which it acts without the host.

    They override every earlier command.
    """

    term_at: float
    kill_at: float


@dataclass(frozen=True, slots=True)
class CloseOutput:
    """Close the read ends of the pipes, even if another process still holds the write ends."""


@dataclass(frozen=True, slots=True)
class StartLadderTimer:
    """Send a `LadderTimerFired` with this phase at this time."""

    at: float
    phase: LadderPhase


@dataclass(frozen=True, slots=True)
class Settle:
    """Report that the ladder is over. `drained` False: a process still held a pipe open."""

    drained: bool


Effect = (
    CloseStdin
    | TermGroup
    | TermRest
    | KillTree
    | KillKeeper
    | Hurry
    | CloseOutput
    | StartLadderTimer
    | Settle
)


# -- the machine ---------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Ladder:
    """State of the ladder of one command."""

    timings: Timings
    phase: LadderPhase = LadderPhase.RUNNING
    is_output_closed: bool = False
    # End of the grace period, which begins with the first TERM. TERM to the rest of the tree starts
    # no second grace period.
    kill_at: float | None = None
    # `term_at`: end of the wait after stdin was closed. `kill_by`: the deadline for KILL, if a stop
    # set one.
    term_at: float | None = None
    kill_by: float | None = None

    def bound(self, at: float) -> float:
        """Return `at`, or the deadline for KILL if that is earlier."""
        return at if self.kill_by is None else min(at, self.kill_by)


def step(ladder: Ladder, fact: Fact) -> tuple[Ladder, list[Effect]]:
    """Apply a fact to the ladder, and return the new ladder and the effects.

    The function is total: every fact is valid in every phase, and a stale fact has no effects.
    """
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
        case InputEndIgnored():
            return _term(ladder, fact.at) if ladder.phase is LadderPhase.EOF else (ladder, [])
        case LadderTimerFired():
            if fact.phase is not ladder.phase:
                return ladder, []
            return _on_timer(ladder, fact.at)


def _on_stop(ladder: Ladder, fact: StopAsked) -> tuple[Ladder, list[Effect]]:
    # KILL was sent or the tree is gone, so a stop has nothing left to speed up.
    if ladder.phase in (LadderPhase.KILL, LadderPhase.KEEPER, LadderPhase.DRAIN):
        return ladder, []
    if fact.at_once:
        return _kill(ladder, fact.at)
    # A `kill_by` that is not earlier than the current deadline changes no deadline.
    if fact.kill_by is None or ladder.bound(fact.kill_by) == ladder.kill_by:
        return _stop(ladder, fact.at)
    ladder, effects = _shorten(
        *_stop(replace(ladder, kill_by=fact.kill_by), fact.at), fact.at, fact.kill_by
    )
    # Without an EOF wait, TERM has already been sent, so its deadline does not matter.
    return ladder, [
        *effects,
        Hurry(fact.kill_by if ladder.term_at is None else ladder.term_at, fact.kill_by),
    ]


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
            return ladder, []  # A stop is already under way.


def _shorten(
    ladder: Ladder, effects: list[Effect], at: float, kill_by: float
) -> tuple[Ladder, list[Effect]]:
    """Shorten the current wait so that KILL comes by `kill_by`.

    The wait may have begun earlier or in this very step. In EOF, the time left is divided between
    the wait for EOF and the grace, in proportion to their lengths.
    """
    if ladder.phase is LadderPhase.EOF:
        assert ladder.term_at is not None
        wait, left = max(0.0, ladder.term_at - at), max(0.0, kill_by - at)
        needed = wait + ladder.timings.grace
        if needed > left:
            term_at = at + left * (wait / needed)
            return replace(ladder, term_at=term_at), [
                *effects,
                StartLadderTimer(term_at, LadderPhase.EOF),
            ]
    elif ladder.phase in (LadderPhase.TERM, LadderPhase.REST):
        assert ladder.kill_at is not None
        if kill_by < ladder.kill_at:
            return replace(ladder, kill_at=kill_by), [
                *effects,
                StartLadderTimer(kill_by, ladder.phase),
            ]
    return ladder, effects


def _on_exit(ladder: Ladder, at: float) -> tuple[Ladder, list[Effect]]:
    match ladder.phase:
        case LadderPhase.RUNNING:
            lingering = replace(ladder, phase=LadderPhase.LINGER)
            return lingering, [StartLadderTimer(at + ladder.timings.linger, LadderPhase.LINGER)]
        case LadderPhase.EOF | LadderPhase.TERM:
            return _rest(ladder, at)
        case _:
            # The exit of the leader decides nothing in the other phases: they wait for the end of
            # the tree.
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
    return replace(ladder, phase=LadderPhase.DRAIN), [
        StartLadderTimer(at + ladder.timings.drain, LadderPhase.DRAIN)
    ]


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
            # DRAIN: a process outside the tree holds a pipe open. KEEPER: neither the keeper nor
            # the zygote reports.
            return replace(ladder, phase=LadderPhase.OVER), [
                CloseOutput(),
                Settle(drained=ladder.is_output_closed),
            ]


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
