"""Prometheus metrics of the server, collected on request.

Each number is an attribute of the object that it describes, and costs nothing until a scrape.

No label is an id: the number of lines is the same for one session and for a thousand. A metric that
ends in `_total` never decreases while the server lives, even when sessions are closed and deleted
(`sessions/diagnostics.py`).
"""

from __future__ import annotations

import itertools
import platform
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from banksman import __version__
from banksman.histogram import Histogram
from banksman.runtime.base_host import Host
from banksman.runtime.host_stats import HostStats, take
from banksman.server.ops.webhooks import TargetCounts
from banksman.server.streams.follower import StreamCounts

TOKEN_KINDS = ("input", "output", "cache_read", "cache_write")
# The format that every version of Prometheus reads, and that keeps metric names unchanged.
CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4


def render(
    host: Host,
    counts: StreamCounts,
    webhooks: Mapping[str, TargetCounts] | None = None,
    rate_limited: int = 0,
    unready: Mapping[str, bool] | None = None,
) -> bytes:
    """Render all metrics as of now. Call it in the host's event loop.

    `rate_limited`: requests that were refused because their token has sent too many. `unready`:
    whether each condition holds that makes the server unready.
    """
    registry = CollectorRegistry()
    registry.register(_Collector(take(host), counts, webhooks or {}, rate_limited, unready or {}))
    ProcessCollector(registry=registry)
    return generate_latest(registry)


class _Collector(Collector):
    def __init__(
        self,
        stats: HostStats,
        counts: StreamCounts,
        webhooks: Mapping[str, TargetCounts],
        rate_limited: int,
        unready: Mapping[str, bool],
    ) -> None:
        self._stats = stats
        self._counts = counts
        self._webhooks = webhooks
        self._rate_limited = rate_limited
        self._unready = unready

    def describe(self) -> list[Metric]:
        """Describe nothing: otherwise the registry would run `collect` to learn the names."""
        return []

    def collect(self) -> Iterator[Metric]:
        yield _build()
        yield _gauges(
            "banksman_unready",
            "1 for each reason why /readyz answers 503; all are 0 if the server is ready",
            "reason",
            self._unready,
        )
        yield from _sessions(self._stats)
        yield from _usage(self._stats)
        yield from _traffic(self._stats)
        yield from _store(self._stats)
        yield from _streams(self._counts)
        yield from _targets(self._webhooks)
        yield CounterMetricFamily(
            "banksman_rate_limited_requests",
            "Requests that were refused because their token has sent too many",
            value=self._rate_limited,
        )
        yield from _processes(self._stats)


def _build() -> Metric:
    family = GaugeMetricFamily(
        "banksman_build_info",
        "Always 1; the labels are the versions of Banksman and Python",
        labels=("version", "python"),
    )
    family.add_metric((__version__, platform.python_version()), 1)
    return family


def _sessions(stats: HostStats) -> Iterator[Metric]:
    yield _gauges(
        "banksman_sessions",
        "Sessions of the store by phase; asleep, elsewhere and lost: not open in this server",
        "phase",
        stats.phases,
    )
    yield GaugeMetricFamily(
        "banksman_store_listed",
        "1 if the store could list its sessions, else 0",
        value=int(stats.is_listed),
    )
    yield GaugeMetricFamily(
        "banksman_queue_asks", "Asks that wait for their turn", value=stats.asks
    )
    yield GaugeMetricFamily(
        "banksman_questions", "Questions of agents that wait for an answer", value=stats.questions
    )
    yield GaugeMetricFamily(
        "banksman_waiting_for_place",
        "Sessions that wait for a free place in the process pool",
        value=stats.waiting_for_place,
    )
    yield GaugeMetricFamily(
        "banksman_limited_sessions",
        "Sessions whose agent's account has reached a usage limit",
        value=stats.limited,
    )
    yield _gauges(
        "banksman_limited_until_seconds",
        "When the last usage limit of an agent's account ends, in seconds since 1970",
        "agent",
        stats.limited_until,
    )
    yield GaugeMetricFamily(
        "banksman_waiting_for_limit",
        "Sessions whose asks wait for the end of a usage limit",
        value=stats.waiting_for_limit,
    )
    yield _gauges(
        "banksman_clock_seconds_left",
        "Seconds left of the running watchdog closest to its end, by name",
        "clock",
        stats.clocks,
    )
    yield _counters("banksman_turns", "Asks that ended, by their outcome", "outcome", stats.turns)
    yield _histogram(
        "banksman_turn_seconds", "Seconds from the start of a turn to its end", stats.times.turn
    )
    yield _histogram(
        "banksman_queue_seconds",
        "Seconds from the acceptance of an ask to the start of its turn",
        stats.times.queue,
    )
    yield _histogram(
        "banksman_first_token_seconds",
        "Seconds from the start of a turn to the first output of the agent",
        stats.times.first_token,
    )
    yield _histogram(
        "banksman_stop_seconds",
        "Seconds from the interrupt of a turn to its end",
        stats.times.stop,
    )


def _usage(stats: HostStats) -> Iterator[Metric]:
    tokens = CounterMetricFamily(
        "banksman_tokens", "Tokens that agents reported, by kind", labels=("agent", "kind")
    )
    cost = CounterMetricFamily(
        "banksman_cost_usd", "Cost in US dollars, as agents estimate it", labels=("agent",)
    )
    seconds = CounterMetricFamily(
        "banksman_working_seconds",
        "Seconds in which a turn was open and did not wait for an answer",
        labels=("agent",),
    )
    for agent, usage in sorted(stats.usage.items()):
        for kind in TOKEN_KINDS:
            tokens.add_metric((agent, kind), getattr(usage.tokens, kind))
        if usage.usd is not None:
            cost.add_metric((agent,), usage.usd)
        seconds.add_metric((agent,), usage.working_seconds)
    yield from (tokens, cost, seconds)
    yield from _budgets(stats)


def _budgets(stats: HostStats) -> Iterator[Metric]:
    yield GaugeMetricFamily(
        "banksman_cgroups",
        "Sessions whose agent has a control group",
        value=stats.cgroups.groups,
    )
    yield GaugeMetricFamily(
        "banksman_cgroup_memory_bytes",
        "Memory in use in these control groups",
        value=stats.cgroups.memory_bytes,
    )
    yield GaugeMetricFamily(
        "banksman_cgroup_processes",
        "Processes and threads in these control groups",
        value=stats.cgroups.processes,
    )
    yield GaugeMetricFamily(
        "banksman_over_budget_sessions",
        "Sessions that send no turn because a budget is used up",
        value=stats.over_budget,
    )
    labels = ("scope", "caller", "unit")
    caps = GaugeMetricFamily("banksman_budget_cap", "Caps of the host and callers", labels=labels)
    used = GaugeMetricFamily("banksman_budget_used", "Use of these caps today", labels=labels)
    over = GaugeMetricFamily("banksman_budget_over", "1 if the cap is reached", labels=labels)
    for use in stats.budgets:
        name = (use.scope, use.caller or "", use.unit)
        caps.add_metric(name, use.cap)
        used.add_metric(name, use.used)
        over.add_metric(name, int(use.is_reached))
    yield from (caps, used, over)


def _traffic(stats: HostStats) -> Iterator[Metric]:
    counted = stats.counters
    ways = ("in", "out")
    for name, what in (("frames", "Frames"), ("bytes", "Bytes")):
        yield _counters(
            f"banksman_{name}",
            f"{what} from agents (in) and to them (out)",
            "direction",
            {way: counted.get(f"{name}_{way}", 0) for way in ways},
        )
    yield CounterMetricFamily(
        "banksman_noise_lines",
        "Lines from agents that are not frames",
        value=counted.get("noise", 0),
    )
    yield CounterMetricFamily(
        "banksman_spilled_frames",
        "Frames that were too large to keep",
        value=counted.get("spilled", 0),
    )
    yield _counters(
        "banksman_dropped_bytes",
        "Dropped bytes: of frames that were too large, and of command output beyond its limit",
        "what",
        {"frames": counted.get("dropped", 0), "output": stats.output_dropped},
    )


def _store(stats: HostStats) -> Iterator[Metric]:
    written = stats.store
    yield CounterMetricFamily(
        "banksman_commits", "Commits of the store", value=written.get("commits", 0)
    )
    yield CounterMetricFamily(
        "banksman_events", "Events that were appended", value=written.get("events", 0)
    )
    yield CounterMetricFamily(
        "banksman_store_bytes",
        "Bytes of events and snapshots that were appended",
        value=written.get("bytes", 0),
    )
    yield CounterMetricFamily(
        "banksman_commit_failures", "Commits that failed", value=written.get("failures", 0)
    )
    yield _histogram(
        "banksman_commit_seconds", "Duration of commits in seconds", stats.commit_times
    )
    yield _histogram(
        "banksman_takeover_seconds",
        "Seconds from the claim of a session of another host to its readiness here",
        stats.takeovers,
    )


def _streams(counts: StreamCounts) -> Iterator[Metric]:
    yield _gauges(
        "banksman_followers",
        "Open event streams, of one session or of many",
        "kind",
        counts.followers,
    )
    yield CounterMetricFamily(
        "banksman_stream_events", "Events that were written to streams", value=counts.events
    )
    yield CounterMetricFamily(
        "banksman_stream_bytes", "Bytes that were written to streams", value=counts.bytes
    )
    yield CounterMetricFamily(
        "banksman_streams_cut",
        "Streams that were closed because their client did not read them",
        value=counts.cut,
    )
    yield CounterMetricFamily(
        "banksman_stream_gaps",
        "Gaps reported to followers because retention had deleted the events",
        value=counts.gaps,
    )


def _targets(webhooks: Mapping[str, TargetCounts]) -> Iterator[Metric]:
    yield _counters(
        "banksman_webhook_deliveries",
        "Events that receivers of webhooks accepted",
        "target",
        {label: counts.delivered for label, counts in webhooks.items()},
    )
    yield _counters(
        "banksman_webhook_failures",
        "Attempts to deliver an event that failed; each is repeated",
        "target",
        {label: counts.failed for label, counts in webhooks.items()},
    )
    yield _counters(
        "banksman_webhook_gaps",
        "Sessions whose events retention removed before they were sent",
        "target",
        {label: counts.gaps for label, counts in webhooks.items()},
    )
    yield _gauges(
        "banksman_webhook_lag_seconds",
        "Age of the oldest event that a receiver has not accepted; 0 if there is none",
        "target",
        {label: counts.lag_seconds for label, counts in webhooks.items()},
    )


def _processes(stats: HostStats) -> Iterator[Metric]:
    yield _gauges(
        "banksman_commands",
        "Commands by state; ended: those that are still kept",
        "state",
        stats.commands,
    )
    yield _counters(
        "banksman_commands_ended", "Commands that ended, by reason", "ended", stats.commands_ended
    )
    yield CounterMetricFamily(
        "banksman_agent_processes",
        "Agent processes that were started",
        value=stats.counters.get("processes", 0),
    )
    yield CounterMetricFamily(
        "banksman_swept",
        "Leftover processes of commands and agents that were ended",
        value=stats.swept,
    )
    yield CounterMetricFamily(
        "banksman_survivors", "Processes that could not be ended", value=stats.survivors
    )


def _gauges(name: str, help: str, label: str, values: Mapping[str, float]) -> Metric:  # noqa: A002
    family = GaugeMetricFamily(name, help, labels=(label,))
    for key in sorted(values):
        family.add_metric((key,), values[key])
    return family


def _histogram(name: str, help: str, histogram: Histogram) -> Metric:  # noqa: A002
    counts = itertools.accumulate(histogram.counts)
    bounds = (*map(str, histogram.bounds), "+Inf")
    return HistogramMetricFamily(
        name, help, buckets=list(zip(bounds, counts, strict=True)), sum_value=histogram.seconds
    )


def _counters(name: str, help: str, label: str, values: Mapping[str, float]) -> Metric:  # noqa: A002
    family = CounterMetricFamily(name, help, labels=(label,))
    for key in sorted(values):
        family.add_metric((key,), values[key])
    return family
