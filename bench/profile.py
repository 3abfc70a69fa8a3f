"""Where the CPU time of lone events goes in the server: a profile by stages.

    python -m bench.profile [SESSIONS]

The agents and clients are those of `bench.trickle`. A timer of CPU time interrupts the server every
2 ms, and the stack of each of its threads is counted for the stage of its innermost known frame. A
thread that waits, for the lock of the interpreter too, is not counted. The profile itself makes an
event dearer by a few percent.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading
from collections import Counter
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
WAITS = ("queue.py", "threading.py")


def stage(thread: str, frame: FrameType | None) -> str | None:
    """Return the stage of a stack; None if its thread waits."""
    while frame is not None:
        file = frame.f_code.co_filename
        if thread != "MainThread":
            is_waiting = file.endswith(WAITS) or frame.f_code.co_name == "_take"
            return None if is_waiting or "banksman/store" not in file else WRITER
        for part, name in STAGES:
            if part in file:
                return name
        frame = frame.f_back
    return "other"


def serve() -> None:
    """Run the server with a sampler that signals start and end."""
    from banksman.cli import main

    found: Counter[str] = Counter()
    names = {threading.main_thread().ident: "MainThread"}

    def on_time(_: int, innermost: FrameType | None) -> None:
        for ident, frame in sys._current_frames().items():
            thread = names.get(ident, "thread")
            name = stage(thread, innermost if thread == "MainThread" else frame)
            if name is not None:
                found[name] += 1

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
        found: dict[str, int] = json.loads(out.read_text(encoding="utf-8"))
    each, total = result.cpu_seconds_each * 1e6, sum(found.values())
    print(f"{sessions} sessions: {each:.0f} µs of CPU for an event, {total:,} samples")
    for name, count in sorted(found.items(), key=lambda pair: -pair[1]):
        print(f"  {name:44} {count / total:6.1%} {each * count / total:7.1f} µs")


if __name__ == "__main__":
    if "serve" in sys.argv[1:]:
        serve()
    measure(int(sys.argv[1]) if len(sys.argv) > 1 else 100)
