"""How old an event is when a client has it: from the agent's write, through the disk, to the client's read.

A hundred clients, each of which gets 100 events a second, one by one: they follow one session, or ten, or each its own.
Every session has an agent in a process of its own, and all of them share the machine with the server and the clients:
with a hundred, there are 10,000 events a second to be taken from as many pipes, and written. Beside the first and the
last, as the control, an asyncio server that writes as many bytes as often to as many sockets, and has neither agents
nor a disk. `for each` is the server's CPU for each event that a client got.
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
    """Every session says as much, and is followed by its part of the clients."""
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
        f"  {'':32} {'p50':>10} {'p99':>10} {'max':>10} {'events/s':>9} {'CPU':>7} {'for each':>10}"
    )
    met: dict[str, float] = {}
    for count, shape in ((1, "one"), (10, None), (CLIENTS, "each")):
        name = f"{count} session{'s' if count > 1 else ''}"
        with served() as server:
            taken = ours(server, [server.open() for _ in range(count)])
        show(f"they follow {name}", taken)
        if shape is not None:
            show("  the control", control(shape, taken.heard.bytes // taken.heard.events))
        met[name] = taken.heard.p99
    for name, p99 in met.items():
        goal(f"p99 under {span(P99_SECONDS_MAX)} with {name}", span(p99), p99 < P99_SECONDS_MAX)


if __name__ == "__main__":
    main()
