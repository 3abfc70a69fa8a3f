"""Sweep after an interrupt: end the processes that a stopped turn's tools left running.

This module decides when a sweep begins, and logs its result. The agent's keeper finds and ends the
processes. Terminals, the commands that the host runs for the agent, are ended separately.

Many agents answer an interrupt but let the command of their tool continue. A caller that stops a
turn means that command too. So after a stopped turn, a sweep finds every process that the agent
started since the prompt was written. If the session's policy says so, the sweep ends them. The
agent itself stays, and so do the processes from before: its servers, and the tasks of earlier
turns. The next prompt waits for the sweep, so that the sweep cannot find processes of the next
turn.

A turn that ended normally is not followed by a sweep: it left its processes running on purpose.
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

# Far longer than a sweep needs. After that, the agent's process is stopped, with its whole tree.
SWEEP_SECONDS_MAX = 10.0
# The running sweep, and one more: the agent may open its own turn in between, which is stopped too.
SWEEPS_MAX = 2


def after(work: Transition, turn: Turn) -> None:
    """Schedule a sweep after a stopped turn that has reached its boundary."""
    config, process = work.state.config, work.state.process
    if not config.leaves_tools or process.phase is not ProcessPhase.READY:
        return
    # Otherwise the waiting sweep covers this turn as well: its start is earlier.
    if len(process.sweeps) < SWEEPS_MAX:
        work.set_process(sweeps=(*process.sweeps, (turn.id, turn.began_at)))
    if not process.sweeps:
        _begin(work)


def _begin(work: Transition) -> None:
    process = work.state.process
    _, since = process.sweeps[0]
    work.do(SweepTools(process.number, since, work.state.config.after_interrupt == "sweep"))
    work.start_timer(SWEEP_SECONDS_MAX, Timer.SWEEP, str(process.number))


def swept(work: Transition, fact: SweepEnded) -> None:
    """Log the result of a sweep, and begin the next one."""
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
    """Log the result outside of the turn, whose log may be complete. `after` names the turn."""
    commands, left = (
        (fact.commands, ()) if isinstance(fact, TerminalsEnded) else (fact.swept, fact.survivors)
    )
    found = [{"pid": swept.pid, "command": swept.command} for swept in commands]
    survivors = [
        {"pid": survivor.pid, "command": survivor.command, "why": survivor.why} for survivor in left
    ]
    if not found and not survivors:
        return
    if work.state.config.after_interrupt == "sweep":
        told = {
            "swept": found,
            "survivors": survivors,
            "drained": True,
            "by": "interrupt",
            "after": turn,
        }
        work.log(None, kinds.PROCESS_SWEPT, process=work.state.process.number, **told)
    else:
        work.log(
            None,
            kinds.PROCESS_LEFT,
            process=work.state.process.number,
            left=[*found, *survivors],
            after=turn,
        )


def end_terminals(work: Transition, turn: Turn) -> None:
    """End the commands that a stopped turn made the host run.

    They are not in the agent's process tree, so no sweep would find them.
    """
    config = work.state.config
    if config.serves_terminals:
        ends = config.after_interrupt == "sweep"
        work.do(EndTerminals(work.state.process.number, turn.id, turn.began_at, ends))


def terminals_ended(work: Transition, fact: TerminalsEnded) -> None:
    """Log the commands that were ended with a turn."""
    _tell(work, fact.turn, fact)


def expire(work: Transition, subject: str) -> None:
    """Stop the process if a sweep takes too long."""
    process = work.state.process
    if process.sweeps and subject == str(process.number):
        message = f"the tools of an interrupted turn did not end within {SWEEP_SECONDS_MAX:g} s"
        work.stop_process(AgentError(message))
