"""A host in numbers, at a moment: what is in its hands, and what went through them. Looking changes nothing.

Sessions that are open here are looked at one by one. Of the others only who has how many: a store may have a hundred
thousand of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from banksman.errors import StoreError
from banksman.run.commands.running import State
from banksman.run.host import Host

if TYPE_CHECKING:
    from banksman.run.sessions.registry import Sessions
    from banksman.store.log import Owner


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """`phases`: sessions by phase; without those that are not open here if `is_listed` is False, for then the store
    could not be read. `clocks`: of the running clocks of each name, the fewest seconds that are left.

    What follows only grows: `counters` and `turns`, of sessions (see `Totals`); `store`, of the log (see
    `Log.counters`); `commands_ended`, by how; `swept`, `survivors` and `output_dropped`, of commands and agents.
    """

    phases: Mapping[str, int] = field(default_factory=dict[str, int])
    is_listed: bool = True
    asks: int = 0
    questions: int = 0
    waiting_for_place: int = 0
    clocks: Mapping[str, float] = field(default_factory=dict[str, float])
    commands: Mapping[str, int] = field(default_factory=dict[str, int])
    counters: Mapping[str, int] = field(default_factory=dict[str, int])
    turns: Mapping[str, int] = field(default_factory=dict[str, int])
    store: Mapping[str, float] = field(default_factory=dict[str, float])
    commands_ended: Mapping[str, int] = field(default_factory=dict[str, int])
    swept: int = 0
    survivors: int = 0
    output_dropped: int = 0


def take(host: Host) -> Tally:
    """Opens nothing: of a host whose store was not needed yet there are no sessions to count."""
    shelf = host._shelf  # pyright: ignore[reportPrivateUsage]
    sessions = host._sessions  # pyright: ignore[reportPrivateUsage]
    commands = Counter({state.value: 0 for state in State})
    commands.update(command.state.value for command in shelf.all())
    tally = Tally(
        commands=commands,
        commands_ended=dict(shelf.ended),
        swept=shelf.swept,
        survivors=shelf.survivors,
        output_dropped=shelf.output_dropped,
    )
    return tally if sessions is None else _with_sessions(tally, sessions)


def _with_sessions(tally: Tally, sessions: Sessions) -> Tally:
    here = {session.id: session.status() for session in sessions.ours() if not session.is_closed}
    phases = Counter(status.phase for status in here.values())
    try:
        _add_others(phases, sessions.store.owned())
        is_listed = True
    except StoreError:
        is_listed = False
    clocks: dict[str, float] = {}
    for clock in (clock for status in here.values() for clock in status.clocks if clock.is_running):
        clocks[clock.name] = min(clock.left, clocks.get(clock.name, clock.left))
    counters = sessions.totals.counters()
    return replace(
        tally,
        phases=phases,
        is_listed=is_listed,
        asks=sum(len(status.queue) for status in here.values()),
        questions=sum(len(status.questions) for status in here.values()),
        waiting_for_place=sum(status.waits_for_place for status in here.values()),
        clocks=clocks,
        counters=counters,
        turns=sessions.totals.turns(),
        store=sessions.store.counters(),
        swept=tally.swept + counters["swept"],
        survivors=tally.survivors + counters["survivors"],
    )


def _add_others(phases: Counter[str], owned: Sequence[tuple[Owner | None, int]]) -> None:
    """Those that are not open here, as `Session.status` says it of each."""
    others: Counter[str] = Counter()
    for owner, count in owned:
        if owner is None or owner.is_here:
            others["asleep"] += count
        else:
            others["elsewhere" if owner.is_alive else "lost"] += count
    # What is open here is ours in the store, and so is what we have let go of a moment ago. One that is fenced off is
    # another's there, and is counted as both.
    others["asleep"] -= phases.total() - phases["fenced"]
    phases.update(+others)
