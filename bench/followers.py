"""Cheap clients of a server: one process with one connection per path, which only counts events.

    python -I -S followers.py PORT TOKEN PATH…

The process prints `live` when every connection has read the existing events. Then it accepts
commands on stdin, one per line:

- `until N`: wait until each connection has received N events since its start. The answer is the
  number of events and bytes of all connections since the last answer, and the p50, p99 and maximum
  of the age of the events. The age is known for events that contain `tick=` and the time of their
  write. All processes of a machine have the same monotonic clock.
- `stop`: stop reading. The connections stay open.
"""

import json
import re
import resource
import select
import socket
import sys
import time
from array import array
from typing import Any

EVENT = b"\nid: "
EDGE = len(EVENT) - 1
TICK = re.compile(rb"tick=(\d{20})")
LIVE = b"event: stream.live"
RECEIVED_BYTES_MAX = 256 << 10


class Follower:
    """One connection. It also counts an event whose mark is split between two reads."""

    def __init__(self, port: int, token: str, path: str) -> None:
        self.peer = socket.create_connection(("127.0.0.1", port), 60)
        head = (
            f"Host: 127.0.0.1:{port}\r\nAuthorization: Bearer {token}\r\n"
            "Accept: text/event-stream\r\n"
        )
        self.peer.sendall(f"GET {path} HTTP/1.1\r\n{head}\r\n".encode())
        self.events = 0
        self.edge = b""

    def read_until_live(self) -> None:
        end = b""
        while LIVE not in end:
            end = end[-len(LIVE) :] + self.read()
        self.peer.setblocking(False)

    def read(self) -> bytes:
        data = self.peer.recv(RECEIVED_BYTES_MAX)
        assert data, "the server has ended the stream"
        self.events += data.count(EVENT) + (self.edge + data[:EDGE]).count(EVENT)
        self.edge = data[-EDGE:]
        return data

    def on_readable(self, ages: "array[float]") -> int:
        data = self.read()
        now = time.monotonic_ns()
        for found in TICK.finditer(data):
            ages.append(now - int(found[1]))
        return len(data)


def reached(followers: "list[Follower]", events: int) -> bool:
    return all(follower.events >= events for follower in followers)


def told(events: int, size: int, ages: "array[float]") -> str:
    ordered = sorted(ages)
    last = len(ordered) - 1
    latencies = [
        ordered[round(last * part)] / 1e9 if ordered else None for part in (0.5, 0.99, 1.0)
    ]
    return json.dumps([events, size, *latencies])


def main() -> None:
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    port, token, *paths = sys.argv[1:]
    followers = [Follower(int(port), token, path) for path in paths]
    poll: Any = select.epoll()
    by_fd = {follower.peer.fileno(): follower for follower in followers}
    for fd, follower in by_fd.items():
        follower.read_until_live()
        poll.register(fd, select.EPOLLIN)
    poll.register(0, select.EPOLLIN)
    print("live", flush=True)
    ages = array("d")
    size = before = 0
    wanted: int | None = None
    while True:
        for fd, _ in poll.poll():
            if fd != 0:
                size += by_fd[fd].on_readable(ages)
                continue
            word, _, number = sys.stdin.readline().strip().partition(" ")
            if word == "until":
                wanted = int(number)
            elif word == "stop":
                for each in by_fd:
                    poll.unregister(each)
                print("stopped", flush=True)
            else:
                return
        if wanted is not None and reached(followers, wanted):
            events = sum(follower.events for follower in followers)
            print(told(events - before, size, ages), flush=True)
            before, size, wanted, ages = events, 0, None, array("d")


main()
