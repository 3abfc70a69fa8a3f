"""Statistics of a host at one moment, and the health check of its store.

`take` reads the current sessions and commands, and the counters. It changes and opens nothing. Open
sessions of this host are examined one by one. For the others only the number per owner is read,
because a store may have a hundred thousand sessions. `has_working_store` may open the store.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from banksman.commands.running_command import State
from banksman.errors import BanksmanError, StoreError
from banksman.histogram import Histogram
from banksman.runtime.base_host import Host
from banksman.sessions.diagnostics import BOUNDS, TurnTimes
from banksman.store.log_values import COMMIT_BOUNDS

if TYPE_CHECKING:
    from banksman.core.session.budget import CapUse
    from banksman.core.session.usage import Usage
    from banksman.sessions.registry import SessionRegistry
    from banksman.sessions.status import Status
    from banksman.store.log_values import Owner


# Phases of sessions that are open on this host, and of the others. Each has an entry in the
# statistics, even if its count is 0.
PHASES = (
    *(
        "idle",
        "backing_off",
        "starting",
        "running",
        "interrupting",
        "stopping",
        "draining",
        "closing",
    ),
    *("leaving", "handing", "parting", "failed", "fenced"),
)
OTHER_PHASES = ("asleep", "elsewhere", "lost")
# Pause between two attempts to open a store on behalf of a health check. Any client may trigger a
# health check, and an attempt may block the loop for some seconds.
OPEN_AGAIN_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CgroupSums:
    """Sums over the control groups of the sessions of a host."""

    groups: int = 0
    memory_bytes: int = 0
    processes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HostStats:
    """Numbers of one host.

    `phases`: sessions by phase. If `is_listed` is False, the store could not be read, and only
    sessions open on this host are counted. `clocks`: for each name of a running clock, the fewest
    seconds left. `limited_until`: for each agent with a limited account, when its last limit ends.
    `over_budget`: sessions that a budget holds back. `budgets`: the shared caps of today.
    `cgroups`: sessions whose agent has a control group, and the sums of their usage.

    These values only grow:
    - `counters` and `turns`, of sessions (see `CountTotals`).
    - `store`, of the log (see `Log.counters`), and the durations of its commits.
    - `takeovers`: the durations of the take-overs of sessions of other hosts.
    - `commands_ended`, by reason.
    - `usage`, by agent.
    - `swept`, `survivors` and `output_dropped`, of commands and agents.
    """

    phases: Mapping[str, int] = field(default_factory=lambda: dict.fromkeys(PHASES, 0))
    is_listed: bool = True
    asks: int = 0
    questions: int = 0
    waiting_for_place: int = 0
    clocks: Mapping[str, float] = field(default_factory=dict[str, float])
    commands: Mapping[str, int] = field(default_factory=dict[str, int])
    counters: Mapping[str, int] = field(default_factory=dict[str, int])
    turns: Mapping[str, int] = field(default_factory=dict[str, int])
    times: TurnTimes = field(default_factory=TurnTimes)
    store: Mapping[str, float] = field(default_factory=dict[str, float])
    commit_times: Histogram = field(default_factory=partial(Histogram, COMMIT_BOUNDS))
    takeovers: Histogram = field(default_factory=partial(Histogram, BOUNDS))
    commands_ended: Mapping[str, int] = field(default_factory=dict[str, int])
    swept: int = 0
    survivors: int = 0
    output_dropped: int = 0
    usage: Mapping[str, Usage] = field(default_factory=dict[str, "Usage"])
    limited: int = 0
    limited_until: Mapping[str, float] = field(default_factory=dict[str, float])
    waiting_for_limit: int = 0
    over_budget: int = 0
    budgets: Sequence[CapUse] = ()
    cgroups: CgroupSums = CgroupSums()


def take(host: Host) -> HostStats:
    """Collect the statistics.

    Opens nothing: a host that has not needed its store yet has no sessions to count.
    """
    command_registry = host._command_registry  # pyright: ignore[reportPrivateUsage]
    sessions = host._sessions  # pyright: ignore[reportPrivateUsage]
    commands = Counter({state.value: 0 for state in State})
    commands.update(command.state.value for command in command_registry.all())
    stats = HostStats(
        commands=commands,
        commands_ended=dict(command_registry.ended),
        swept=command_registry.swept,
        survivors=command_registry.survivors,
        output_dropped=command_registry.output_dropped,
    )
    return stats if sessions is None else _with_sessions(stats, sessions)


def has_working_store(host: Host) -> bool:
    """Whether the store works: it is open or can be opened, readable, and still in its place.

    It must also have taken the last append of every session that is open on this host. The check
    costs one lookup, whatever the number of sessions. It writes nothing except what opening the
    store writes.
    """
    if host._sessions is None and not _may_try(host):  # pyright: ignore[reportPrivateUsage]
        return host._open_failed_at is None  # pyright: ignore[reportPrivateUsage]
    try:
        sessions = host._own_sessions()  # pyright: ignore[reportPrivateUsage]
        sessions.store.check()
    except BanksmanError:
        return False
    return not any(session.has_broken_log for session in sessions.ours())


def _may_try(host: Host) -> bool:
    """Whether to attempt to open a store that is not open."""
    if host._open_store is None or host._is_closing:  # pyright: ignore[reportPrivateUsage]
        return False
    failed_at = host._open_failed_at  # pyright: ignore[reportPrivateUsage]
    return failed_at is None or time.monotonic() - failed_at >= OPEN_AGAIN_SECONDS


def _with_sessions(stats: HostStats, sessions: SessionRegistry) -> HostStats:
    here = {session.id: session.status() for session in sessions.ours() if not session.is_closed}
    phases = Counter(dict.fromkeys(PHASES, 0))
    phases.update(status.phase for status in here.values())
    try:
        _add_others(phases, sessions.store.owned())
        is_listed = True
    except StoreError:
        is_listed = False
    clocks: dict[str, float] = {}
    for clock in (clock for status in here.values() for clock in status.clocks if clock.is_running):
        clocks[clock.name] = min(clock.left, clocks.get(clock.name, clock.left))
    limited: dict[str, float] = {}
    for status in here.values():
        if status.limited_until is not None:
            limited[status.agent] = max(status.limited_until, limited.get(status.agent, 0.0))
    counters = sessions.totals.counters()
    return replace(
        stats,
        phases=phases,
        is_listed=is_listed,
        asks=sum(len(status.queue) for status in here.values()),
        questions=sum(len(status.questions) for status in here.values()),
        waiting_for_place=sum(status.waits_for_place for status in here.values()),
        clocks=clocks,
        counters=counters,
        turns=sessions.totals.turns(),
        times=sessions.totals.times(),
        usage=sessions.totals.usage(),
        store=sessions.store.counters(),
        commit_times=sessions.store.commit_times,
        takeovers=sessions.totals.takeovers,
        swept=stats.swept + counters["swept"],
        survivors=stats.survivors + counters["survivors"],
        limited=sum(status.limited_until is not None for status in here.values()),
        limited_until=limited,
        waiting_for_limit=sum(status.waits_for_limit for status in here.values()),
        over_budget=sum(any(use.is_reached for use in status.budget) for status in here.values()),
        budgets=() if sessions.budgets is None else sessions.budgets.uses(),
        cgroups=_cgroups(here.values()),
    )


def _cgroups(here: Iterable[Status]) -> CgroupSums:
    contained = (status.containment for status in here)
    groups = [each.cgroup for each in contained if each is not None and each.cgroup is not None]
    return CgroupSums(
        groups=len(groups),
        memory_bytes=sum(each.memory_bytes or 0 for each in groups),
        processes=sum(each.processes or 0 for each in groups),
    )


def _add_others(phases: Counter[str], owned: Sequence[tuple[Owner | None, int]]) -> None:
    """Count the sessions that are not open on this host, by the phases of `Session.status`."""
    others = Counter(dict.fromkeys(OTHER_PHASES, 0))
    for owner, count in owned:
        if owner is None or owner.is_here:
            others["asleep"] += count
        else:
            others["elsewhere" if owner.is_alive else "lost"] += count
    # In the store, sessions that are open here count as owned by this host, and so do sessions
    # released a moment ago. So the open sessions are subtracted. A fenced session belongs to
    # another host in the store, and is counted in both places.
    others["asleep"] -= phases.total() - phases["fenced"]
    phases.update({phase: max(0, count) for phase, count in others.items()})
