"""Where the CPU time of lone events goes in the server: a profile by stages.

    python -m bench.profile [SESSIONS]

The agents and clients are those of `bench.trickle`. A timer of CPU time interrupts the server every
2 ms. The CPU time of each of its threads since the last interrupt counts for the stage of the
thread's innermost known frame. So a thread that waits counts for nothing, whatever its stack is.
The profile itself makes an event dearer by a few percent.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path
from types import FrameType

from bench import serving, trickle

START, DUMP = signal.SIGRTMIN + 3, signal.SIGRTMIN + 4
INTERVAL_SECONDS = 0.002
WRITER = "write and commit, in the writer thread"
# The first match counts, from the innermost frame outwards.
STAGES = (
    ("banksman/process/", "read the pipe"),
    ("banksman/commands/", "read the pipe"),
    ("banksman/core/", "find lines, meanings and updates"),
    ("banksman/sessions/", "session: log the frame, note the commit"),
    ("banksman/dispatcher.py", "session: log the frame, note the commit"),
    ("banksman/store/", "log, in the event loop"),
    ("banksman/server/streams/", "make the page, push it"),
    ("banksman/server/http/", "write the socket"),
    ("asyncio/selector_events.py", "write the socket"),
    ("asyncio/", "event loop"),
    ("selectors.py", "event loop"),
)


def stage(frame: FrameType | None, *, is_main: bool) -> str:
    """Return the stage of a stack."""
    stages = STAGES if is_main else (("banksman/store/", WRITER),)
    while frame is not None:
        for part, name in stages:
            if part in frame.f_code.co_filename:
                return name
        frame = frame.f_back
    return "other"


def serve() -> None:
    """Run the server with a sampler that signals start and end."""
    from banksman.cli import main

    found: defaultdict[str, float] = defaultdict(float)
    counted: dict[int, float] = {}
    main_thread = threading.main_thread().ident

    def on_time(_: int, innermost: FrameType | None) -> None:
        for ident, frame in sys._current_frames().items():
            is_main = ident == main_thread
            spent = time.clock_gettime(time.pthread_getcpuclockid(ident))
            found[stage(innermost if is_main else frame, is_main=is_main)] += spent - counted.get(
                ident, spent
            )
            counted[ident] = spent

    def on_dump(*_: object) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)
        Path(os.environ["PROFILE_OUT"]).write_text(json.dumps(found), encoding="utf-8")

    def on_start(*_: object) -> None:
        signal.setitimer(signal.ITIMER_PROF, INTERVAL_SECONDS, INTERVAL_SECONDS)

    signal.signal(signal.SIGPROF, on_time)
    signal.signal(START, on_start)
    signal.signal(DUMP, on_dump)
    sys.exit(main())


def measure(sessions: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "profile.json")
        os.environ["PROFILE_OUT"] = str(out)
        with serving.served(module="bench.profile") as server:
            opened = [server.open() for _ in range(sessions)]
            server.process.send_signal(START)
            result = trickle.ours(server, opened, sessions)
            server.process.send_signal(DUMP)
            server.request("GET", "/v1/sessions?limit=1")
        found: dict[str, float] = json.loads(out.read_text(encoding="utf-8"))
    each, total = result.cpu_seconds_each * 1e6, sum(found.values())
    print(f"{sessions} sessions: {each:.0f} µs of CPU for an event, {total:.1f} s in all")
    for name, count in sorted(found.items(), key=lambda pair: -pair[1]):
        print(f"  {name:44} {count / total:6.1%} {each * count / total:7.1f} µs")


if __name__ == "__main__":
    if "serve" in sys.argv[1:]:
        serve()
    measure(int(sys.argv[1]) if len(sys.argv) > 1 else 100)
