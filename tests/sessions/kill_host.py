"""Hosts that are killed at their system calls: `python -m tests.sessions.kill_host FOLDER MARKER MODE FIRST STEP`.

A host with survive="crash" serves two asks: one with a stream, half lines and a question that a rule answers, and one
behind it. First a host that is not killed counts its calls, and shows what a whole log has. Then, for each number N
from FIRST on, in steps, a fresh host is killed with SIGKILL right before its N-th call, and a successor takes the
session up.
The calls are those of `banksman.process.syscalls`, the statements of the store, and the renames of the record.

With MODE `any`, the calls are all system calls of the kernel, of all threads of the host: see `kill_at_any_call.py`.
With MODE `hand_over` and `hand_over_surviving`, the host hands the session over in the middle of the first ask, and is
killed at a call of that. Only in the second one does the process survive the host before that. With MODE `successor`,
that host is always killed in the middle of the first ask, and the successor at one of its calls. A third host follows.

The program prints one line of JSON for each case, with its `ending`. MODE is empty, one of these, or a planted bug: see
`plant`. A planted bug ends the program with the first case that shows it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import mmap
import os
import signal
import sqlite3
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.sessions import kill_at_any_call
from tests.sessions.crash_host import Agents
from tests.sessions.helpers import QUICK, exists
from tests.sessions.test_hand_over import HOLD_SECONDS, spoken

from banksman import BanksmanError, Event, Host, NotFound, Turn
from banksman.core.session import event as kinds
from banksman.process import fault_plan, input_mark, spool, syscalls
from banksman.process.zygote_client import spawner
from banksman.sessions.crash_journal import CrashJournal
from banksman.store.sqlite import open_file
from banksman.testing import checks

ANY = "any"
HAND_OVER, SURVIVING, SUCCESSOR = "hand_over", "hand_over_surviving", "successor"
PLANTED = ("early_settle", "late_record", "early_write")
PROMPT = "@@stream 6 0 tick\n@@half two\n@@ask Bash\n@@stream 6 0 tock\n@@say three"
PAUSED = "@@stream 6 0 tick\n@@half two\n@@touch {at}/reached\n@@wait {at}/go\n@@stream 6 0 tock\n@@say three"
BEHIND = "@@say behind"
OPTIONS = {**QUICK, "question_seconds": 60.0}
LIFE_SECONDS_MAX = 100
STUCK_SECONDS = 30.0


# -- calls that kill -------------------------------------------------------------------------------------------------
class Killer:
    """Count the calls of this process, and end it right before one of them.

    `is_writing`: a frame for the agent may be on its way, so its fate cannot be known.
    """

    def __init__(self, at: int, note: Path) -> None:
        self.at = at
        self.seen = 0
        self.is_writing = False
        self.counts = True
        self._note = note
        # Shared with the tracer.
        self._shared = mmap.mmap(-1, 1)

    @property
    def may_be_writing(self) -> bool:
        return bool(self._shared[0])

    def mark_writes(self) -> None:
        """Mark the time from right before the note of a write to right after the note of its end."""
        note = input_mark.InputMark.note

        def noted(mark: input_mark.InputMark, finished: int, *, is_writing: bool) -> None:
            self._shared[0] |= is_writing
            note(mark, finished, is_writing=is_writing)
            self._shared[0] = is_writing

        input_mark.InputMark.note = noted  # pyright: ignore[reportAttributeAccessIssue]

    def point(self, name: str) -> None:
        self.seen += self.counts
        if self.counts and self.seen == self.at:
            self._note.write_text(json.dumps([name, self.is_writing]))
            os.kill(os.getpid(), signal.SIGKILL)

    def follow(self) -> None:
        for name in fault_plan.CALLS:
            setattr(syscalls, name, self._counted(name, getattr(syscalls, name)))
        rename = os.rename
        os.rename = self._counted("rename", rename)
        connect, note = sqlite3.connect, input_mark.InputMark.note

        def connected(*arguments: Any, **options: Any) -> sqlite3.Connection:
            connection = connect(*arguments, **options)
            connection.set_trace_callback(lambda _statement: self.point("statement"))
            return connection

        def noted(mark: input_mark.InputMark, finished: int, *, is_writing: bool) -> None:
            note(mark, finished, is_writing=is_writing)
            self.is_writing = is_writing

        open_file.sqlite3.connect = connected
        input_mark.InputMark.note = noted  # pyright: ignore[reportAttributeAccessIssue]

    def _counted(self, name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            self.point(name)
            return plain(*arguments, **options)

        return counted


def plant(name: str) -> None:
    """Plant a bug: settle output before its commit, record after the append, or write before the commit."""
    journal: Any = CrashJournal
    if name == "early_settle":
        read = journal.on_read

        def nothing(_self: Any) -> None: ...

        def settles(self: Any, data: bytes) -> None:
            read(self, data)
            self._agent.settle(self.offset)

        journal.on_read = settles
        journal._settle = nothing
    if name == "late_record":
        take = journal.note

        def late(self: Any, _head: int | None = None) -> None:
            asyncio.get_running_loop().call_later(0.02, take, self)

        journal.note = late
    if name == "early_write":

        def write(self: Any, data: bytes) -> None:
            self._agent.write(data)

        journal.write = write


# -- hosts -----------------------------------------------------------------------------------------------------------
async def first(folder: Path, agents: Agents) -> None:
    async with Host(f"sqlite:{folder}/store.db", survive="crash") as host:
        session = await host.open(
            "claude", name="it", command=agents.command(), options=OPTIONS, rules={"Bash": "allow"}
        )
        turns: list[Turn] = [await session.ask(PROMPT), await session.ask(BEHIND)]
        for turn in turns:
            await turn.outcome()
        await session.close()


async def leaving(folder: Path, agents: Agents, killer: Killer, mode: str) -> None:
    survive = None if mode == HAND_OVER else "crash"
    async with Host(f"sqlite:{folder}/store.db", survive=survive) as host:
        session = await host.open("claude", name="it", command=agents.command(), options=OPTIONS)
        for prompt in (PAUSED.format(at=folder), BEHIND):
            await session.ask(prompt)
        await exists(folder / "reached")
        if mode == SUCCESSOR:
            # After that, the host has noted that the prompt is written.
            async for event in session.events(0, waits=True):
                if b"tick5" in event.data:
                    break
            os.kill(os.getpid(), signal.SIGKILL)
        killer.counts = True
        await host.drain(hand_over=True, hold_seconds=HOLD_SECONDS)


async def successor(folder: Path, result: Path) -> None:
    async with Host(f"sqlite:{folder}/store.db", survive="crash") as host:
        await host.take_up()
        try:
            session = host.session("it")
        except NotFound:
            result.write_text(json.dumps({"turns": []}))
            return
        events = [event async for event in session.events(0, waits=False)]
        turns = [event.turn for event in events if event.kind == kinds.TURN_QUEUED]
        outcomes = [await (await session.turn(turn)).outcome() for turn in turns if turn is not None]
        if session.is_open:
            await session.close()
        events = [event async for event in session.events(0, waits=False)]
        said = {"turns": [[outcome.kind.value, outcome.text] for outcome in outcomes], **looked_at(events)}
    result.write_text(json.dumps(said))


def looked_at(events: list[Event]) -> dict[str, Any]:
    checks.log(events)
    checks.turns(events)
    counted = [event.kind for event in events]
    return {
        "adopted": counted.count(kinds.PROCESS_ADOPTED),
        "started": counted.count(kinds.PROCESS_STARTED),
        "spoken": [[kind, data.decode("latin-1")] for kind, data in spoken(events)],
    }


def ended(act: Callable[[], None]) -> Callable[[], None]:
    """Return a function that does this, and ends what it has started."""

    def acted() -> None:
        act()
        spawner.end()

    return acted


def in_a_fork(act: Callable[[], None]) -> int:
    """Run this in a forked process, and return its wait status."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        try:
            signal.alarm(LIFE_SECONDS_MAX)
            ended(act)()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitpid(pid, 0)[1]


# -- cases -----------------------------------------------------------------------------------------------------------
def run_case(folder: Path, marker: str, mode: str, number: int) -> dict[str, Any]:
    """Run one case. `number` 0: the host is not killed."""
    os.environ["XDG_STATE_HOME"] = str(folder)
    folder.mkdir()
    # Another word than in the argv of this program.
    agents = Agents(folder, f"{marker}-agents")
    note, count, result = folder / "call", folder / "count", folder / "result"

    killer = Killer(number, note)

    def host() -> None:
        plant(mode)
        # Every read empties the spool, so that no byte is kept by chance.
        spool.FREE_BYTES = 1
        if mode == ANY:
            killer.mark_writes()
        else:
            killer.follow()
        if mode in (HAND_OVER, SURVIVING, SUCCESSOR):
            killer.counts = False
            asyncio.run(leaving(folder, agents, killer, mode))
        else:
            asyncio.run(first(folder, agents))
        count.write_text(str(killer.seen))

    def after() -> None:
        spool.FREE_BYTES = 1
        (folder / "go").touch()
        logging.basicConfig(filename=folder / "log", level=logging.WARNING)
        try:
            asyncio.run(asyncio.wait_for(successor(folder, result), STUCK_SECONDS))
        except (BanksmanError, TimeoutError) as exc:
            result.write_text(json.dumps({"turns": [], "error": repr(exc)}))

    def killed_successor() -> None:
        killer.follow()
        after()
        count.write_text(str(killer.seen))

    seen: dict[str, Any] = {"case": number, "call": "", "is_writing": False, "calls": 0}
    if mode == ANY:
        status, seen["calls"], seen["call"] = kill_at_any_call.run(ended(host), number, seconds=LIFE_SECONDS_MAX)
        seen["is_writing"] = killer.may_be_writing
    else:
        status = in_a_fork(host)
    if mode == SUCCESSOR:
        in_a_fork(killed_successor)
        result.unlink(missing_ok=True)
    seen["statuses"] = [status, in_a_fork(after)]
    if note.exists():
        seen["call"], seen["is_writing"] = json.loads(note.read_text())
    if count.exists() and mode != ANY:
        seen["calls"] = int(count.read_text())
    seen["left"] = len(agents.alive())
    seen |= json.loads(result.read_text()) if result.exists() else {"turns": []}
    seen["spoken"] = [[kind, data.replace(str(folder), "")] for kind, data in seen.get("spoken", ())]
    seen["processes"] = len(agents.evidence.processes)
    seen["log"] = (folder / "log").read_text() if (folder / "log").exists() else ""
    return seen


def ending(seen: dict[str, Any], whole: list[Any], mode: str) -> str:
    """Name how a case has ended; `wrong: …` if it must not end so."""
    turns = seen["turns"]
    if seen["statuses"][1] or "error" in seen or seen["left"]:
        return "wrong: the successor failed, or left a process"
    if not turns:
        return "nothing accepted"
    said = [["done", "three"], ["done", "behind"]][: len(turns)]
    if turns == said:
        # The successor had to start the process again, because no prompt was sent to the first one. That one may have
        # ended before it said that it was there, or before its start was in the log.
        if seen["processes"] == 2 or (seen["processes"], seen["started"]) == (1, 2):
            return "began again"
        if seen["processes"] != 1:
            return "wrong: too many processes"
        if len(turns) == 2 and seen["spoken"] != whole:
            return "wrong: the log is not that of one host"
        return "continued" if seen["adopted"] else "one host had the process"
    if [kind for kind, _ in turns].count("unknown") != 1:
        return "wrong: an ask has failed"
    if mode == HAND_OVER and not seen["adopted"]:
        return "the process ended with its host"
    return "unknown" if seen["is_writing"] else "wrong: unknown without a write in flight"


def main(folder: Path, marker: str, mode: str, begin: int, step: int) -> None:
    whole = run_case(folder / "0", marker, "" if mode in PLANTED else mode, 0)
    assert whole["turns"] == [["done", "three"], ["done", "behind"]], whole
    for number in range(begin, whole["calls"], step):
        seen = run_case(folder / str(number), marker, mode, number)
        seen["ending"] = ending(seen, whole["spoken"], mode)
        seen["calls"] = whole["calls"]
        for name in ("spoken", "statuses"):
            seen.pop(name, None)
        print(json.dumps(seen), flush=True)
        if mode in PLANTED and seen["ending"].startswith("wrong"):
            break


if __name__ == "__main__":
    FOLDER, MARKER, MODE, FIRST, STEP = sys.argv[1:]
    main(Path(FOLDER), MARKER, MODE, int(FIRST), int(STEP))
