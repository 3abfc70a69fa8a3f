"""Cost of the server: a real server on SQLite, and clients in another process that only count.

An event is an agent message of about 400 bytes, which the server projects for its clients. The
benchmark measures:

- CPU per event, from the agent's pipe to the disk and to no client, one client and a hundred. It is
  the CPU of the server process alone, including the writer thread. The agent writes all events in
  one burst. The minimum of three rounds counts.
- Memory of 1,000 clients that follow a quiet session, and the idle CPU.
- Clients that have stopped reading: CPU, memory, and the latency of the clients that do read.
"""

from __future__ import annotations

import time
from contextlib import ExitStack

from bench.measure import goal, span
from bench.serving import Followers, Server, followed, served

EVENTS = 20_000
ROUNDS = 3
CLIENTS = 100

IDLE = 1_000
IDLE_SECONDS = 3.0
IDLE_CPU_MAX = 0.01

STOPPED = 10
TICKS = 200
RATE = 100
# More than the noise between two runs of the same work.
STOPPED_RATIO_MAX = 1.15
# Limit for a client that has stopped reading: a page of events, and the part of it in the buffer of
# the connection.
STOPPED_BYTES_MAX = 1 << 20


def cpu_seconds(server: Server, session: str, prompt: str, followers: Followers | None) -> float:
    """Return the CPU seconds of the server until all followers have received all events."""
    began = server.cpu_seconds()
    server.wait_done(session, server.ask(session, prompt))
    if followers is not None:
        followers.until_told(server)
    return server.cpu_seconds() - began


def cpu_per_event(server: Server, session: str, clients: int) -> float:
    with ExitStack() as stack:
        followers = stack.enter_context(followed(server, [session] * clients)) if clients else None
        return (
            min(cpu_seconds(server, session, f"says {EVENTS}", followers) for _ in range(ROUNDS))
            / EVENTS
        )


def by_clients() -> None:
    print(f"CPU of the server per event, {EVENTS:,} events in a burst, minimum of {ROUNDS}")
    with served() as server:
        session = server.open()
        cpu_per_event(server, session, 1)
        taken = {clients: cpu_per_event(server, session, clients) for clients in (0, 1, CLIENTS)}
    for clients, seconds in taken.items():
        print(
            f"  pipe → durable → {clients:3} clients {seconds * 1e6:24.1f} µs "
            f"{seconds / taken[0]:8.2f} × no client"
        )
    each = (taken[CLIENTS] - taken[1]) / (CLIENTS - 1)
    print(f"  per further client {each * 1e6:31.2f} µs {each / taken[0]:8.3f}")


def idle() -> None:
    with served() as server:
        session = server.open()
        with followed(server, [session]):
            before = server.memory_bytes()
        with followed(server, [session] * IDLE):
            grown = server.memory_bytes() - before
            began = server.cpu_seconds()
            time.sleep(IDLE_SECONDS)
            share = (server.cpu_seconds() - began) / IDLE_SECONDS
    print(f"{IDLE:,} clients that follow a quiet session")
    print(
        f"  memory (PSS) of the server: {before / 1e6:.1f} MB without them, "
        f"{grown / 1e6:.1f} MB more with them"
    )
    print(f"  per client {grown / IDLE / 1e3:.1f} kB")
    goal(f"under {IDLE_CPU_MAX:.0%} of a core while idle", f"{share:.2%}", share < IDLE_CPU_MAX)


def stopped() -> None:
    """Measure the same work with and without stalled clients, in turns.

    Each case has a separate server, because the stalled clients stay connected.
    """
    with ExitStack() as stack:
        servers = {count: stack.enter_context(served()) for count in (0, STOPPED)}
        sessions = {count: server.open() for count, server in servers.items()}
        readers: dict[int, Followers] = {}
        cpu: dict[int, list[float]] = {0: [], STOPPED: []}
        p99: dict[int, list[float]] = {0: [], STOPPED: []}
        for count, server in servers.items():
            session = sessions[count]
            readers[count] = stack.enter_context(followed(server, [session] * STOPPED))
            cpu_seconds(server, session, f"says {EVENTS}", readers[count])
            if count:
                stack.enter_context(followed(server, [session] * count)).stop_reading()
        before = {count: server.memory_bytes() for count, server in servers.items()}
        for _ in range(ROUNDS):
            for count, server in servers.items():
                session = sessions[count]
                cpu[count].append(cpu_seconds(server, session, f"says {EVENTS}", readers[count]))
                server.wait_done(session, server.ask(session, f"ticks {TICKS} {RATE}"))
                p99[count].append(readers[count].until_told(server).p99)
        grown = {count: server.memory_bytes() - before[count] for count, server in servers.items()}
    print(f"{STOPPED} reading clients, with 0 or {STOPPED} stalled clients beside them")
    for count in (0, STOPPED):
        each = min(cpu[count]) / EVENTS * 1e6
        print(
            f"  {count:2} stalled: {each:6.1f} µs per event; "
            f"p99 of the readers {span(min(p99[count]))} at {RATE}/s; "
            f"memory growth {grown[count] / 1e6:.1f} MB"
        )
    ratio = min(cpu[STOPPED]) / min(cpu[0])
    goal("a stalled client costs no CPU", f"{ratio:.2f} times", ratio <= STOPPED_RATIO_MAX)
    held = (grown[STOPPED] - grown[0]) / STOPPED
    goal("a stalled client holds under 1 MB", f"{held / 1e6:.2f} MB", held <= STOPPED_BYTES_MAX)


def main() -> None:
    by_clients()
    idle()
    stopped()


if __name__ == "__main__":
    main()
