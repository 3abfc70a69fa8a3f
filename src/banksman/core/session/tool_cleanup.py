"""What an interrupted turn leaves running, and its end.

Many an agent answers an interrupt and lets the command go on that its tool had started. Whoever said stop meant that
too. So after a turn that was stopped, everything is looked for that the agent has started since the turn's prompt was
written, and, if the session wants that, ended: the agent itself stays, and so does what it had running before, its
servers and the tasks of earlier turns. The next prompt waits for it, so that what is found is certainly not its own.

A turn that came to its end by itself is not swept after: what it left running, it was to leave running.
"""

from __future__ import annotations

from banksman.core.process_facts import SweepEnded
from banksman.core.session import event as kinds
from banksman.core.session.effects import EndTerminals, SweepTools
from banksman.core.session.facts import TerminalsEnded, Timer
from banksman.core.session.state import ProcessPhase
from banksman.core.session.transition import Transition
from banksman.core.session.turn import Turn
from banksman.errors import AgentError

# Far beyond what it takes to end a tree; past it the process itself is ended, and with it everything.
SWEEP_SECONDS_MAX = 10.0
# One that is under way, and one after it: the agent may open a turn of its own in between, which is stopped as well.
SWEEPS_MAX = 2


def after(work: Transition, turn: Turn) -> None:
    """A turn was stopped, and has come to its boundary."""
    config, process = work.state.config, work.state.process
    if not config.leaves_tools or process.phase is not ProcessPhase.READY:
        return
    if len(process.sweeps) < SWEEPS_MAX:  # Else the one that waits will find this one's as well: it began earlier.
        work.set_process(sweeps=(*process.sweeps, (turn.id, turn.began_at)))
    if not process.sweeps:
        _begin(work)


def _begin(work: Transition) -> None:
    process = work.state.process
    _, since = process.sweeps[0]
    work.do(SweepTools(process.number, since, work.state.config.after_interrupt == "sweep"))
    work.start_timer(SWEEP_SECONDS_MAX, Timer.SWEEP, str(process.number))


def swept(work: Transition, fact: SweepEnded) -> None:
    process = work.state.process
    if not process.sweeps:
        return
    (turn, _), *others = process.sweeps
    work.cancel_timer(Timer.SWEEP, str(process.number))
    work.set_process(sweeps=tuple(others))
    _tell(work, turn, fact)
    if others and process.phase is ProcessPhase.READY:
        _begin(work)


def _tell(work: Transition, turn: str, fact: SweepEnded | TerminalsEnded) -> None:
    """Not as a part of the turn, which may have had its last event; but it says after which."""
    commands, left = (fact.commands, ()) if isinstance(fact, TerminalsEnded) else (fact.swept, fact.survivors)
    found = [{"pid": swept.pid, "command": swept.command} for swept in commands]
    survivors = [{"pid": survivor.pid, "command": survivor.command, "why": survivor.why} for survivor in left]
    if not found and not survivors:
        return
    if work.state.config.after_interrupt == "sweep":
        told = {"swept": found, "survivors": survivors, "drained": True, "by": "interrupt", "after": turn}
        work.log(None, kinds.PROCESS_SWEPT, process=work.state.process.number, **told)
    else:
        work.log(None, kinds.PROCESS_LEFT, process=work.state.process.number, left=[*found, *survivors], after=turn)


def end_terminals(work: Transition, turn: Turn) -> None:
    """A turn is told to stop. What it has had us run is no part of the agent's tree: no sweep of that would find it."""
    config = work.state.config
    if config.serves_terminals:
        ends = config.after_interrupt == "sweep"
        work.do(EndTerminals(work.state.process.number, turn.id, turn.began_at, ends))


def terminals_ended(work: Transition, fact: TerminalsEnded) -> None:
    _tell(work, fact.turn, fact)


def expire(work: Transition, subject: str) -> None:
    process = work.state.process
    if process.sweeps and subject == str(process.number):
        work.stop_process(AgentError(f"what an interrupted turn left was not ended within {SWEEP_SECONDS_MAX:g} s"))
