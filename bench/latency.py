"""Age of an event at a client: from the agent's write, through the disk, to the client's read.

A hundred clients receive 100 events a second each, one by one. They follow one session, ten
sessions, or a hundred different sessions. Every session has an agent process. The agents share the
machine with the server and the clients: with a hundred sessions, the server reads 10,000 events a
second from a hundred pipes, and writes them.

The control, for one session and for a hundred, is an asyncio server without agents and disk. It
writes as many bytes as often to as many sockets. `per event` is the CPU time of the server for each
event that a client receives.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from bench.measure import goal, span
from bench.serving import Heard, Server, bare, fed, followed, served

CLIENTS = 100
RATE = 100
SECONDS = 5
P99_SECONDS_MAX = 0.050


class Taken(NamedTuple):
    heard: Heard
    cpu_seconds: float
    seconds: float


def ours(server: Server, sessions: Sequence[str]) -> Taken:
    """Measure the server. All sessions have the same rate and the same number of clients."""
    with followed(server, [sessions[n % len(sessions)] for n in range(CLIENTS)]) as followers:
        cpu, began = server.cpu_seconds(), time.monotonic()
        turns = [server.ask(session, f"ticks {SECONDS * RATE} {RATE}") for session in sessions]
        for session, turn in zip(sessions, turns, strict=True):
            server.wait_done(session, turn)
        heard = followers.until_told(server)
        return Taken(heard, server.cpu_seconds() - cpu, time.monotonic() - began)


def control(shape: str, size: int) -> Taken:
    with (
        bare(shape, str(RATE), str(size), str(CLIENTS)) as server,
        fed(server, CLIENTS) as followers,
    ):
        cpu, began = server.cpu_seconds(), time.monotonic()
        heard = followers.until(SECONDS * RATE)
        return Taken(heard, server.cpu_seconds() - cpu, time.monotonic() - began)


def show(name: str, taken: Taken) -> None:
    heard = taken.heard
    print(
        f"  {name:32} {span(heard.p50):>10} {span(heard.p99):>10} {span(heard.max):>10} "
        f"{heard.events / taken.seconds:9,.0f} {taken.cpu_seconds / taken.seconds:7.0%} "
        f"{taken.cpu_seconds / heard.events * 1e6:7.1f} µs",
        flush=True,
    )


def main() -> None:
    print(f"{CLIENTS} clients, {RATE} events a second each, for {SECONDS} s")
    print(
        f"  {'':32} {'p50':>10} {'p99':>10} {'max':>10} "
        f"{'events/s':>9} {'CPU':>7} {'per event':>10}"
    )
    met: dict[str, float] = {}
    for count, shape in ((1, "one"), (10, None), (CLIENTS, "each")):
        name = f"{count} session{'s' if count > 1 else ''}"
        with served() as server:
            taken = ours(server, [server.open() for _ in range(count)])
        show(name, taken)
        if shape is not None:
            show("  control", control(shape, taken.heard.bytes // taken.heard.events))
        met[name] = taken.heard.p99
    for name, p99 in met.items():
        goal(f"p99 under {span(P99_SECONDS_MAX)} with {name}", span(p99), p99 < P99_SECONDS_MAX)


if __name__ == "__main__":
    main()
