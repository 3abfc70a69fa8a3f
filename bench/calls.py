"""Count the calls that the server makes for a lone event, and for an ask over HTTP.

    python -m bench.calls [SHOWN]

Unlike CPU time, these counts do not depend on what else the machine does. `cProfile` counts the
calls of Python functions and of C functions in the event loop's thread, which does nearly all of
the work:

- an event: one session with one client, 50 events a second. So nearly every event has a read, a
  commit, a page and a write to itself. Then 10 sessions, which share some of the commits.
- an ask: a turn without output, from the POST to the answer of the GET that waits for its outcome.

`reads`: how often the server read a pipe for an event. Below 1 the machine was so busy that agents
wrote several events before the server read them, and all counts are lower.

SHOWN: how many functions of each list are printed, those with the most calls first.
"""

from __future__ import annotations

import cProfile
import json
import os
import signal
import sys
import tempfile
from pathlib import Path
from types import CodeType
from typing import Any

from bench import serving

START, DUMP = signal.SIGRTMIN + 3, signal.SIGRTMIN + 4
EVENTS, RATE = 250, 50
READ = "PipeReader._read"
ASKS = 50


def serve() -> None:
    """Run the server with a profile that signals start and end."""
    from banksman.cli import main

    profile = cProfile.Profile()

    def on_start(*_: object) -> None:
        profile.clear()
        profile.enable()

    def on_dump(*_: object) -> None:
        profile.disable()
        entries: Any = profile.getstats()
        found = [(_name(each.code), isinstance(each.code, str), each.callcount) for each in entries]
        Path(os.environ["PROFILE_OUT"]).write_text(json.dumps(found), encoding="utf-8")

    signal.signal(START, on_start)
    signal.signal(DUMP, on_dump)
    sys.exit(main())


def _name(code: CodeType | str) -> str:
    if isinstance(code, str):
        return code
    path = code.co_filename.rpartition("/src/")[2].rpartition("/lib/")[2]
    return f"{path}:{code.co_firstlineno} {code.co_qualname}"


class Counted:
    """A server whose calls are counted while a block runs."""

    def __init__(self, server: serving.Server, out: Path) -> None:
        self._server = server
        self._out = out

    def start(self) -> None:
        self._server.process.send_signal(START)
        self._server.request("GET", "/v1/sessions?limit=1")  # The signal has arrived before it.

    def show(self, name: str, units: int, shown: int) -> None:
        self._server.process.send_signal(DUMP)
        self._server.request("GET", "/v1/sessions?limit=1")
        found: list[tuple[str, bool, int]] = json.loads(self._out.read_text(encoding="utf-8"))
        ours = sum(count for _name, is_c, count in found if not is_c) / units
        theirs = sum(count for _name, is_c, count in found if is_c) / units
        reads = sum(count for name, _is_c, count in found if name.endswith(READ)) / units
        print(f"{name}: {ours:.1f} Python calls + {theirs:.1f} calls of C, {reads:.2f} reads")
        for function, _is_c, count in sorted(found, key=lambda each: -each[2])[:shown]:
            print(f"  {count / units:8.2f}  {function}")


def events(counted: Counted, server: serving.Server, sessions: list[str], shown: int) -> None:
    with serving.followed(server, sessions) as followers:
        turns = [server.ask(session, f"ticks {EVENTS + 2 * RATE} {RATE}") for session in sessions]
        followers.until(RATE)
        counted.start()
        heard = followers.until(RATE + EVENTS)
        counted.show(f"an event, {len(sessions)} sessions", heard.events, shown)
        for session, turn in zip(sessions, turns, strict=True):
            server.wait_done(session, turn)


def asks(counted: Counted, server: serving.Server, session: str, shown: int) -> None:
    counted.start()
    for _ in range(ASKS):
        server.wait_done(session, server.ask(session, "hello"))
    counted.show("an ask", ASKS, shown)


def main(shown: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "calls.json")
        os.environ["PROFILE_OUT"] = str(out)
        with serving.served(module="bench.calls") as server:
            counted = Counted(server, out)
            sessions = [server.open() for _ in range(10)]
            events(counted, server, sessions[:1], shown)
            events(counted, server, sessions, shown)
            asks(counted, server, sessions[0], shown)


if __name__ == "__main__":
    if "serve" in sys.argv[1:]:
        serve()
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
