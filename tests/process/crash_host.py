"""Hosts that are killed at each of their system calls: `python crash_host.py FOLDER MARKER MODE FIRST STEP AGAIN`.

A host starts a child that survives it, commits the child's output to SQLite, and answers the child's questions. For
each number N from FIRST on, in steps, a fresh host is killed with SIGKILL right before its N-th call. The calls are
those of `banksman.process.syscalls` and the statements of the log. A successor continues with what the log says. AGAIN:
the successor is killed too, at call AGAIN, and another one follows.

The program prints one line of JSON for each case. The last case is the one that the host survived, because it makes
fewer calls. MODE is empty, or `clock`, or a planted bug. With `clock` another process kills the host, after N
milliseconds, so that it also dies inside of its calls. A planted bug ends the program with the first case that shows
it; see `plant`.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sqlite3
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from banksman.core.process_facts import BytesRead, Exited, ProcessFact, Started, Stream, StreamEnded, TreeEnded
from banksman.errors import BanksmanError, MachineError
from banksman.folders import held_folder
from banksman.process import fault_plan, input_mark, spool, syscalls
from banksman.process.adoption import AdoptedProcess, claim
from banksman.process.launch import prepare
from banksman.process.process import ChildProcess
from banksman.process.tree_hand_over import Survival
from banksman.process.zygote_client import spawner

QUESTIONS = 6
PLANTED = ("early_settle", "early_commit", "early_clear", "plain_read")
SECRET = bytes(range(32))
HOLD_SECONDS = 100.0
# A frame that the child never gets leaves host and child waiting. Only a planted bug does that.
STUCK_SECONDS = 3.0
LIFE_SECONDS_MAX = 100
EXIT_CODE = 7

CHILD = """
import os, random, signal, sys
signal.alarm(120)
for number in range(QUESTIONS):
    pieces = random.Random(number)
    for _ in range(12):
        # Many lines are equal, so that content does not tell where in the stream a byte is.
        os.write(1, b"same\\n" * pieces.choice((1, 3, 200)))
    os.write(2, b"note\\n")
    os.write(1, b"question %d?\\n" % number)
    line = b""
    while not line.endswith(b"\\n"):
        byte = os.read(0, 1)
        if not byte:
            os._exit(9)
        line += byte
    os.write(1, b"heard " + line)
os.write(1, b"bye\\n")
os._exit(EXIT_CODE)
"""


def answer(number: int) -> bytes:
    # Longer than a pipe takes at once would be a different test: the child reads byte by byte.
    return b"answer %d " % number + b"a" * 40 + b"\n"


def expected() -> dict[str, bytes]:
    out, err = b"", b""
    for number in range(QUESTIONS):
        pieces = random.Random(number)
        out += b"".join(b"same\n" * pieces.choice((1, 3, 200)) for _ in range(12))
        out += b"question %d?\nheard " % number + answer(number)
        err += b"note\n"
    return {"stdout": out + b"bye\n", "stderr": err}


# -- calls that kill ---------------------------------------------------------------------------------------------------
class Killer:
    """Count the calls of this process, and end it right before one of them."""

    def __init__(self, at: int, note: Path) -> None:
        self.at = at
        self.seen = 0
        self._note = note

    def point(self, name: str) -> None:
        self.seen += 1
        if self.seen == self.at:
            self._note.write_text(name)
            os.kill(os.getpid(), signal.SIGKILL)

    def follow(self) -> None:
        for name in fault_plan.CALLS:
            setattr(syscalls, name, self._counted(name, getattr(syscalls, name)))

    def _counted(self, name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            self.point(name)
            return plain(*arguments, **options)

        return counted


# -- the log -----------------------------------------------------------------------------------------------------------
class Log:
    """What is durable: the place of the child, its output, the questions that were answered, and its exit."""

    def __init__(self, path: Path, killer: Killer) -> None:
        self._killer = killer
        self._db = sqlite3.connect(path, isolation_level=None)
        self._db.execute("PRAGMA synchronous = OFF")
        for table in (
            "output (stream TEXT, at INTEGER, data BLOB)",
            "offsets (stream TEXT PRIMARY KEY, value INTEGER)",
            "facts (name TEXT PRIMARY KEY, value TEXT)",
        ):
            self._db.execute(f"CREATE TABLE IF NOT EXISTS {table}")

    def commit(self, *statements: tuple[str, tuple[Any, ...]]) -> None:
        self._killer.point("begin")
        self._db.execute("BEGIN")
        for statement in statements:
            self._killer.point("statement")
            self._db.execute(*statement)
        self._killer.point("commit")
        self._db.execute("COMMIT")

    def note(self, name: str, value: object) -> None:
        self.commit(("INSERT OR REPLACE INTO facts VALUES (?, ?)", (name, str(value))))

    def fact(self, name: str) -> str:
        row = self._db.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
        return row[0] if row else ""

    def offset(self, stream: Stream) -> int:
        row = self._db.execute("SELECT value FROM offsets WHERE stream = ?", (stream.value,)).fetchone()
        return row[0] if row else 0

    def append(self, stream: Stream, at: int, data: bytes) -> None:
        row = ("INSERT INTO output VALUES (?, ?, ?)", (stream.value, at, data))
        offset = ("INSERT OR REPLACE INTO offsets VALUES (?, ?)", (stream.value, at + len(data)))
        if MODE == "early_commit":
            self.commit(offset)
            self.commit(row)
        else:
            self.commit(row, offset)

    def output(self, stream: Stream) -> tuple[bytes, bool]:
        """Return the whole output, and whether it is dense."""
        rows = self._db.execute(
            "SELECT at, data FROM output WHERE stream = ? ORDER BY rowid", (stream.value,)
        ).fetchall()
        whole, is_dense = b"", True
        for at, data in rows:
            is_dense = is_dense and at == len(whole)
            whole += data
        return whole, is_dense


# -- a host ------------------------------------------------------------------------------------------------------------
class Driver:
    """Reads the child, commits, settles, and answers. The same for the first host and for its successors."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._loop = asyncio.get_running_loop()
        self.process: ChildProcess | AdoptedProcess | None = None
        self.offsets = {stream: log.offset(stream) for stream in Stream}
        self._heard = b""
        self._pieces: list[BytesRead] = []
        self._open = set(Stream)
        self._exit: int | None = None
        self._is_tree_gone = False
        self._is_due = False
        self.started, self.done = asyncio.Event(), asyncio.Event()

    def on_fact(self, fact: ProcessFact) -> None:
        if isinstance(fact, Started):
            self.started.set()
        elif isinstance(fact, BytesRead):
            self._pieces.append(fact)
        elif isinstance(fact, StreamEnded):
            assert fact.is_whole
            self._open.discard(fact.stream)
        elif isinstance(fact, Exited):
            self._exit = fact.code
        elif isinstance(fact, TreeEnded):
            self._is_tree_gone = True
        if not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        self._is_due = False
        assert self.process is not None
        pieces, self._pieces = self._pieces, []
        for piece in pieces:
            at = self.offsets[piece.stream]
            self.offsets[piece.stream] = end = at + len(piece.data)
            if MODE == "early_settle":
                self.process.settle(piece.stream, end)
            self._log.append(piece.stream, at, piece.data)
            if MODE != "early_settle":
                self.process.settle(piece.stream, end)
            if piece.stream is Stream.STDOUT:
                self._heard += piece.data
        self.answer()
        if self._is_tree_gone and not self._open and not self._pieces:
            self._log.note("exit", self._exit)
            self.process.close()
            self.done.set()

    def answer(self) -> None:
        """Answer the last question, once: the log says so before the first byte is written."""
        asked = self._heard.count(b"?\n")
        if asked > int(self._log.fact("answered") or 0):
            self._log.note("answered", asked)
            self.write(asked - 1)

    def write(self, number: int) -> None:
        assert self.process is not None
        assert self.process.stdin is not None
        self.process.stdin.put(answer(number))

    def recall(self) -> None:
        self._heard = self._log.output(Stream.STDOUT)[0]


async def first(log: Log) -> None:
    driver = Driver(log)
    code = CHILD.replace("QUESTIONS", str(QUESTIONS)).replace("EXIT_CODE", str(EXIT_CODE))
    argv = [sys.executable, "-X", MARKER, "-I", "-S", "-c", code]
    driver.process = ChildProcess(
        prepare(argv),
        stdin="pipe",
        grace=0.2,
        linger=0.2,
        deadline=None,
        on_fact=driver.on_fact,
        survival=Survival(HOLD_SECONDS, SECRET),
    )
    await driver.started.wait()
    assert driver.process.place is not None
    log.note("place", await driver.process.place)
    await driver.done.wait()


async def successor(log: Log) -> str:
    if log.fact("exit"):
        return "was over"
    # The folder belongs to this case. A store would have told its secret before the start.
    names = [log.fact("place")] if log.fact("place") else os.listdir(held_folder()) if held_folder().exists() else []
    if not names:
        return "ended with its host"
    try:
        claimed = await claim(names[0], SECRET, argv=(b"child",))
    except BanksmanError as exc:
        return f"ended with its host: {type(exc).__name__}"
    state = claimed.input_state()
    if state is None or state.is_writing:
        claimed.close()
        return "unknown" if state is not None else "no stdin"
    driver = Driver(log)
    driver.recall()
    try:
        driver.process = AdoptedProcess(claimed, on_fact=driver.on_fact, offsets=dict(driver.offsets))
    except MachineError:
        return "output is gone"
    # Said to be written, and not written.
    if state.finished < int(log.fact("answered") or 0):
        driver.write(state.finished)
    driver.answer()
    try:
        await asyncio.wait_for(driver.done.wait(), STUCK_SECONDS if MODE in PLANTED else LIFE_SECONDS_MAX)
    except TimeoutError:
        driver.process.close()
        return "stuck"
    return "continued"


def plant(name: str) -> None:
    """Plant a bug. `early_settle` and `early_commit` are in the code above."""
    if name == "early_clear":

        def begin(writer: Any, _writing: object) -> None:
            writer.mark.note(writer.mark.state.finished + 1, is_writing=False)

        def finish(_writer: object) -> None: ...

        input_mark.MarkedWriter._begin = begin  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
        input_mark.MarkedWriter._finish = finish  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
    if name == "plain_read":

        def read_and_write(pipe: int, file: int, size: int) -> int:
            return syscalls.write(file, syscalls.read(pipe, size))

        syscalls.splice = read_and_write


# -- cases -------------------------------------------------------------------------------------------------------------
def in_a_fork(act: Callable[[], None], kill_after: float | None = None) -> int:
    """Run this in a forked process, and return its wait status. `kill_after`: seconds of life."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        try:
            signal.alarm(LIFE_SECONDS_MAX)
            act()
            # As a program ends. Not `sys.exit`: the loop below belongs to the parent.
            spawner.end()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if kill_after is not None:
        # Not a wait for anything: the moment is the input of this case.
        time.sleep(kill_after)
        os.kill(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1]


def run_case(folder: Path, number: int, again: int) -> dict[str, Any]:
    os.environ["XDG_STATE_HOME"] = str(folder)
    folder.mkdir()
    path, note = folder / "log", folder / "call"

    def host(at: int, *, is_first: bool) -> None:
        killer = Killer(at, note)
        log = Log(path, killer)
        plant(MODE)
        spool.FREE_BYTES, spool.SPOOL_BYTES_MAX = 300, 2000
        killer.follow()
        if is_first:
            asyncio.run(first(log))
        else:
            log.note("ending", asyncio.run(successor(log)))

    if MODE == "clock":
        statuses = [in_a_fork(lambda: host(0, is_first=True), number / 1000)]
    else:
        statuses = [in_a_fork(lambda: host(number, is_first=True))]
    seen: dict[str, Any] = {"case": number, "ending": "not killed", "call": ""}
    if statuses[0]:
        seen["call"] = note.read_text() if note.exists() else ""
        if again:
            statuses.append(in_a_fork(lambda: host(again, is_first=False)))
        if statuses[-1]:
            statuses.append(in_a_fork(lambda: host(0, is_first=False)))
    log = Log(path, Killer(0, note))
    if statuses[0]:
        seen["ending"] = log.fact("ending")
    seen |= {"statuses": statuses, "exit": log.fact("exit"), "place": log.fact("place")}
    for stream in Stream:
        whole, is_dense = log.output(stream)
        wanted = expected()[stream.value]
        seen[stream.value] = {"is_dense": is_dense and wanted.startswith(whole), "is_whole": whole == wanted}
    seen["is_right"] = is_right(seen)
    return seen


def is_right(seen: dict[str, Any]) -> bool:
    """Check that the log is byte for byte what one uninterrupted host has, as far as it goes, and goes far enough."""
    streams = [seen[stream.value] for stream in Stream]
    # Each host was killed, except the last one.
    if seen["statuses"][-1] != 0 or not all(stream["is_dense"] for stream in streams):
        return False
    match seen["ending"]:
        case "not killed" | "continued" | "was over":
            return seen["exit"] == str(EXIT_CODE) and all(stream["is_whole"] for stream in streams)
        case "unknown":
            return True
        case ending:
            # The keeper did not have what it needs yet, and the log does not say that it has.
            return ending.startswith("ended with its host") and not seen["place"]


def main(folder: Path, numbers: range, again: int) -> None:
    for number in numbers:
        seen = run_case(folder / str(number), number, again)
        print(json.dumps(seen), flush=True)
        is_last = seen["ending"] == "not killed" and MODE != "clock"
        if is_last or (MODE in PLANTED and not seen["is_right"]):
            break


if __name__ == "__main__":
    FOLDER, MARKER, MODE, FIRST, STEP, AGAIN = sys.argv[1:]
    last = 500 if MODE == "clock" else 100_000
    main(Path(FOLDER), range(int(FIRST), last, int(STEP)), int(AGAIN))
