"""Lone events: agents that write one line now and then, streamed to clients through the disk.

In each line of the table, every agent writes 100 lines a second for 5 s. The numbers are those of
three seconds of the stream: from the moment when each client has a second of it. So they contain
neither the asks of Banksman, nor the starts of the agents, which belong to the control only. An
event's age is the time from the agent's write to the client's read. `each` is the CPU time of the
server for one event that one client received.

The control is an asyncio server that starts the same agents and passes each line on to the same
clients (`bare_server.py`). It reads pipes and writes sockets, which no server of agents can avoid.
It stores nothing, decodes nothing, and ends no process tree. Two peers do the same with the
libraries that a program would use instead: `asyncio.subprocess` and claude-agent-sdk. Agents,
clients and server share the machine in all cases.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from bench.measure import goal, span
from bench.serving import Followers, Heard, Server, bare, fed, followed, served

RATE = 100
SECONDS = 5
# The measured part of the stream.
FIRST_SECOND, LAST_SECOND = 1, 4
ASKS_AT_ONCE = 20
# Sessions, and the clients that follow them in equal parts.
SHAPES = ((100, 100), (10, 10), (1, 100))
PEERS = {"asyncio": "asyncio.subprocess", "sdk": "claude-agent-sdk"}
P99_SECONDS_MAX = 0.050
EVENTS_PER_SECOND_MIN = 9_500
TIMES_CONTROL_MAX = 3.0


class Result(NamedTuple):
    heard: Heard
    cpu_seconds: float
    seconds: float

    @property
    def events_per_second(self) -> float:
        return self.heard.events / self.seconds

    @property
    def cpu_seconds_each(self) -> float:
        return self.cpu_seconds / self.heard.events


def ours(server: Server, sessions: Sequence[str], clients: int) -> Result:
    with followed(server, [sessions[n % len(sessions)] for n in range(clients)]) as followers:
        prompt = f"ticks {SECONDS * RATE} {RATE}"
        with ThreadPoolExecutor(ASKS_AT_ONCE) as pool:
            turns = [*pool.map(lambda session: server.ask(session, prompt), sessions)]
        result = stream(server, followers)
        for session, turn in zip(sessions, turns, strict=True):
            server.wait_done(session, turn)
        return result


def control(agents: int, clients: int, reader: str = "pipes") -> Result:
    words = (reader, str(RATE), str(SECONDS * RATE), str(clients), str(agents))
    with bare(*words) as server, fed(server, clients) as followers:
        result = stream(server, followers)
        followers.until(SECONDS * RATE)
        return result


def stream(server: Server, followers: Followers) -> Result:
    """Measure a part of the stream, in which every agent writes."""
    followers.until(FIRST_SECOND * RATE)
    cpu, began = server.cpu_seconds(), time.monotonic()
    heard = followers.until(LAST_SECOND * RATE)
    return Result(heard, server.cpu_seconds() - cpu, time.monotonic() - began)


def show(name: str, result: Result) -> None:
    heard = result.heard
    print(
        f"  {name:32} {span(heard.p50):>10} {span(heard.p99):>10} {span(heard.max):>10} "
        f"{result.events_per_second:9,.0f} {result.cpu_seconds / result.seconds:7.0%} "
        f"{result.cpu_seconds_each * 1e6:7.1f} µs",
        flush=True,
    )


def main() -> None:
    print(f"agents that write {RATE} lines a second for {SECONDS} s")
    print(f"  {'':32} {'p50':>10} {'p99':>10} {'max':>10} {'events/s':>9} {'CPU':>7} {'each':>10}")
    pairs: list[tuple[str, Result, Result]] = []
    for sessions, clients in SHAPES:
        name = f"{sessions} session{'s' if sessions > 1 else ''}, {clients} clients"
        with served() as server:
            result = ours(server, [server.open() for _ in range(sessions)], clients)
        show(name, result)
        bare_result = control(sessions, clients)
        show("  control", bare_result)
        pairs.append((name, result, bare_result))
        if sessions == max(shape[0] for shape in SHAPES):
            for reader, shown in PEERS.items():
                show(f"  {shown}", control(sessions, clients, reader))
    for name, result, bare_result in pairs:
        p99 = result.heard.p99
        goal(f"p99 under {span(P99_SECONDS_MAX)}, {name}", span(p99), p99 < P99_SECONDS_MAX)
        times = result.cpu_seconds_each / bare_result.cpu_seconds_each
        text = f"CPU of an event at most {TIMES_CONTROL_MAX:g} times the control's, {name}"
        goal(text, f"{times:.1f} times", times <= TIMES_CONTROL_MAX)
    name, result, bare_result = pairs[0]
    count = result.events_per_second
    is_met = count >= EVENTS_PER_SECOND_MIN
    text = f"{count:,.0f}, control {bare_result.events_per_second:,.0f}"
    goal(f"at least {EVENTS_PER_SECOND_MIN:,} events/s, {name}", text, is_met)


if __name__ == "__main__":
    main()
