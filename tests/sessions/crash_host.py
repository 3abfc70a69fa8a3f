"""Host in a separate process that shares a store with the test and can be killed.

The program has one socket. Each line of JSON on it is a command, and the program answers with the result. It begins the
commands in order and runs them concurrently, so an ask or a close can be in progress when the kill comes. At the end of
the socket it closes its host and exits.

The test uses it through `Remote`. Its processes can be found: its `mark` is in its environment, which its agents and
their children inherit, and a word of the test is in the argv of the agents.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from banksman import BanksmanError, Host, Turn
from banksman.core.session.event import SESSION_HANDED_OVER
from banksman.process import hold_record
from banksman.process.kept_process import KeptProcess
from banksman.process.tree_hand_over import Survival
from banksman.sessions import held_session
from banksman.store.sqlite import SqliteLog
from banksman.testing import fake_agent

REPOSITORY = Path(__file__).resolve().parents[2]
TOOL = Path(__file__).resolve().parents[1] / "agents" / "tool.py"
MARK = "CRASH_TEST_MARK"
# No host outlives its test for long.
LIFE_SECONDS_MAX = 100
LINE_BYTES_MAX = 16 << 20


# Done when a keeper holds its tree after the death of this host.
PLACES: list[asyncio.Future[str]] = []
_survive = KeptProcess.survive


def note_place(process: KeptProcess, survival: Survival) -> asyncio.Future[str]:
    PLACES.append(_survive(process, survival))
    return PLACES[-1]


KeptProcess.survive = note_place  # pyright: ignore[reportAttributeAccessIssue]


# -- the program -----------------------------------------------------------------------------------------------------
class Program:
    def __init__(self, host: Host, writer: asyncio.StreamWriter) -> None:
        self.host = host
        self.writer = writer
        self.turns: dict[str, Turn] = {}

    async def do(self, number: int, what: str, words: dict[str, Any]) -> None:
        said: dict[str, Any]
        try:
            said = {"value": await getattr(self, what)(**words)}
        except BanksmanError as exc:
            said = {"error": type(exc).__name__, "text": str(exc)}
        self.writer.write(json.dumps({"number": number, **said}).encode() + b"\n")
        await self.writer.drain()

    async def ping(self) -> str:
        return "here"

    async def survive(self) -> None:
        """Wait until the death of this host no longer ends the processes that shall survive it."""
        if PLACES:
            await asyncio.wait(PLACES)

    async def open(self, how: dict[str, Any]) -> str:
        return (await self.host.open(how.pop("agent", "claude"), **how)).id

    async def ask(self, session: str, prompt: str, how: dict[str, Any]) -> str:
        turn = await self.host.session(session).ask(prompt, **how)
        self.turns[turn.id] = turn
        return turn.id

    async def outcome(self, turn: str) -> str:
        return (await self.turns[turn].outcome()).kind.value

    async def interrupt(self, turn: str) -> bool:
        return (await self.turns[turn].interrupt()).stopped

    async def close(self, session: str) -> None:
        await self.host.session(session).close()

    async def take_up(self) -> list[str]:
        """Take up the sessions that wait for a host, and return those that this host has now."""
        await self.host.take_up()
        return [session.id for session in self.host.our_sessions() if session.is_open]

    async def take_up_held(self) -> list[str]:
        """Take up the sessions whose process waits for a host, and return those that this host has now."""
        await self.host.take_up_held()
        return [session.id for session in self.host.our_sessions() if session.is_open]

    async def die_after_claim(self) -> None:
        """Take the sessions up, and die between the answer of a keeper and the first append."""
        held_session.Adopted.entries = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
        await self.host.take_up()

    async def fill_disk(self) -> None:
        """Let every write to an open record fail, as on a full disk."""
        full = os.open("/dev/full", os.O_WRONLY)
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # The fd of the listing.
                if os.readlink(f"/proc/self/fd/{name}").endswith(hold_record.SUFFIX):
                    os.dup2(full, int(name), inheritable=False)

    async def hand_over(self, hold_seconds: float) -> None:
        await self.host.drain(hand_over=True, hold_seconds=hold_seconds)

    async def hand_over_and_die(self, hold_seconds: float) -> None:
        """Hand the sessions over, and die when the first of them would log it."""
        append = SqliteLog.append

        def die(log: SqliteLog, *words: Any) -> None:
            if SESSION_HANDED_OVER in {kind for _, kind, _ in words[4]}:
                os.kill(os.getpid(), signal.SIGKILL)
            append(log, *words)

        SqliteLog.append = die  # pyright: ignore[reportAttributeAccessIssue]
        await self.hand_over(hold_seconds)

    async def hand_over_and_freeze(self, hold_seconds: float) -> None:
        """Hand the sessions over, and stop, as by SIGSTOP, when the first of them would log it."""
        append = SqliteLog.append

        def freeze(log: SqliteLog, *words: Any) -> None:
            if SESSION_HANDED_OVER in {kind for _, kind, _ in words[4]}:
                os.kill(os.getpid(), signal.SIGSTOP)
            append(log, *words)

        SqliteLog.append = freeze  # pyright: ignore[reportAttributeAccessIssue]
        await self.hand_over(hold_seconds)

    async def result(self, session: str, turn: str) -> list[str | None]:
        """Return the outcome of any turn, and its text."""
        outcome = await (await self.host.session(session).turn(turn)).outcome()
        return [outcome.kind.value, outcome.text]

    async def stop(self, session: str, turn: str) -> bool:
        return (await self.host.session(session).interrupt(turn)).stopped

    async def questions(self, session: str) -> list[str]:
        return [question.id for question in await self.host.session(session).open_questions()]

    async def answer(self, session: str, question: str) -> bool:
        return (await self.host.session(session).answer(question, "allow")).is_first


async def serve(control: socket.socket, store: str, survive: str, hold_seconds: float) -> None:
    reader, writer = await asyncio.open_connection(sock=control, limit=LINE_BYTES_MAX)
    async with Host(store, survive=survive or None, hold_seconds=hold_seconds) as host:
        program = Program(host, writer)
        writer.write(b'{"number": 0, "value": null}\n')
        tasks: set[asyncio.Task[None]] = set()
        while line := await reader.readline():
            told = json.loads(line)
            task = asyncio.create_task(program.do(told["number"], told["what"], told["words"]))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
    with suppress(OSError):  # The test may have closed the socket already.
        await asyncio.gather(*tasks)
    writer.close()


def main(fd: str, store: str, survive: str, hold_seconds: str) -> None:
    signal.alarm(LIFE_SECONDS_MAX)
    asyncio.run(serve(socket.socket(fileno=int(fd)), store, survive, float(hold_seconds)))


# -- the side of the test --------------------------------------------------------------------------------------------
class Died(Exception):
    """The host was killed before it answered."""


class Refusal(Exception):
    """Error that a host returned for a command."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


class Remote:
    """Host in another process. A command is sent even if its answer is not awaited."""

    def __init__(self, process: subprocess.Popen[bytes], writer: asyncio.StreamWriter) -> None:
        self.process = process
        self._writer = writer
        self._loop = asyncio.get_running_loop()
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self.ready = self._expect(0)

    @property
    def pid(self) -> int:
        return self.process.pid

    def _expect(self, number: int) -> asyncio.Future[Any]:
        answer = self._answers[number] = self._loop.create_future()
        # An answer that no caller awaits must not cause a warning.
        answer.add_done_callback(lambda done: done.cancelled() or done.exception())
        return answer

    def _tell(self, what: str, **words: Any) -> asyncio.Future[Any]:
        number = len(self._answers)
        self._writer.write(json.dumps({"number": number, "what": what, "words": words}).encode() + b"\n")
        return self._expect(number)

    def call(self, what: str, **words: Any) -> asyncio.Future[Any]:
        """Run a method of `Program`."""
        return self._tell(what, **words)

    def ping(self) -> asyncio.Future[Any]:
        """Return an answer that comes after all earlier commands have begun."""
        return self._tell("ping")

    def open(self, **how: Any) -> asyncio.Future[Any]:
        return self._tell("open", how=how)

    def ask(self, session: str, prompt: str, **how: Any) -> asyncio.Future[Any]:
        return self._tell("ask", session=session, prompt=prompt, how=how)

    def outcome(self, turn: str) -> asyncio.Future[Any]:
        return self._tell("outcome", turn=turn)

    def interrupt(self, turn: str) -> asyncio.Future[Any]:
        return self._tell("interrupt", turn=turn)

    def close(self, session: str) -> asyncio.Future[Any]:
        return self._tell("close", session=session)

    async def hear(self, reader: asyncio.StreamReader) -> None:
        """Read answers until the host is dead or has left."""
        with suppress(ConnectionResetError):
            while (line := await reader.readline()).endswith(b"\n"):
                said = json.loads(line)
                answer = self._answers[said["number"]]
                if "error" in said:
                    answer.set_exception(Refusal(said["error"], said["text"]))
                else:
                    answer.set_result(said["value"])
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(Died())

    def kill(self) -> None:
        """Kill the host, and return after its death."""
        self.process.kill()
        self.process.wait()

    async def leave(self) -> None:
        """Let the host close and exit."""
        self._writer.write_eof()
        await asyncio.to_thread(self.process.wait)
        assert self.process.returncode == 0


@asynccontextmanager
async def remote(store: Path | str, mark: str, survive: str = "", hold_seconds: float = 60.0) -> AsyncGenerator[Remote]:
    """Start such a host, and kill it at the end. `survive`, `hold_seconds`: see `banksman.Host`."""
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            words = [sys.executable, "-m", "tests.sessions.crash_host", str(theirs.fileno()), f"sqlite:{store}"]
            words += [survive, str(hold_seconds)]
            process = subprocess.Popen(
                words, cwd=REPOSITORY, env={**os.environ, MARK: mark}, pass_fds=(theirs.fileno(),)
            )
        reader, writer = await asyncio.open_connection(sock=ours, limit=LINE_BYTES_MAX)
        host = Remote(process, writer)
        hearing = asyncio.create_task(host.hear(reader))
        try:
            await host.ready
            yield host
        finally:
            host.kill()
            await hearing
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()


# -- agents and their remains ----------------------------------------------------------------------------------------
class Agents:
    """Fake agents with one memory and one folder of evidence, and a word in their argv."""

    def __init__(self, folder: Path, marker: str) -> None:
        self.folder = folder
        self.marker = marker
        self.evidence = fake_agent.Evidence(folder / "evidence")

    def command(self, generation: str = "", script: Sequence[str] = (), *, tool: bool = False) -> list[str]:
        """Return the command of an agent.

        `generation`: tells the agents of one host from those of another. `tool`: the agent has a plain child, a child
        in another session, and a child that ignores TERM.
        """
        word = f"{self.marker}{generation}"
        before = [sys.executable, "-I", "-S", str(TOOL), word, str(self.folder / f"tool{generation}")] if tool else []
        command = fake_agent.command(script, evidence=self.evidence.folder, memory=self.folder / "memory")
        return [*before, *command, word]

    def alive(self, generation: str = "") -> list[int]:
        """Return every process that has the word in its argv: agents, and their forks."""
        word = f"{self.marker}{generation}".encode()
        return [pid for pid, argv, _ in _processes() if word in argv]


def marked(mark: str) -> list[int]:
    """Return every live process that a host with this mark started: the host, its agents, their children."""
    wanted = f"{MARK}={mark}".encode()
    return [pid for pid, _, environment in _processes() if wanted in environment.split(b"\0")]


def keepers(host: int) -> list[int]:
    """Return the zygote and the keepers of a host. They do not have its environment, but its pid in their argv."""
    return [pid for pid, argv, _ in _processes() if b"keeper/__main__.py\0" in argv and b"\0%d\0" % host in argv]


def _processes() -> list[tuple[int, bytes, bytes]]:
    found: list[tuple[int, bytes, bytes]] = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            with suppress(OSError):  # The process ended during the scan.
                argv, environment = Path(f"/proc/{entry}/cmdline").read_bytes(), b""
                with suppress(OSError):  # A zombie has no environment, and that of a keeper is not readable.
                    environment = Path(f"/proc/{entry}/environ").read_bytes()
                found.append((int(entry), argv, environment))
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
