"""Commands that an agent has its client run: its terminals. Each is a plain command, with a keeper and a ladder.

**Ownership.** `Terminals` owns a terminal from the request to the proof that nothing of its tree is left. The agent may
give it up (`release`). It ends with the turn that is interrupted, with the agent's process, and with the session. A
terminal whose request was withdrawn before the agent was told its id is ended too.

**Where it runs.** In a folder inside the root, in the very folder that is held open, by way of `/proc/self/fd`: its
path is not looked at a second time. (Without `/proc` it is, and the folder could be swapped in between.) The command
itself is not confined. It is a program of the user's, as the agent is.

**A program or a line.** ACP has a program and its words. Many agents send a whole line for a shell as the program, and
no words, because the first editor that served them ran everything by a shell. So a command without words that cannot
be the name of a program is given to a shell.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import logging
import os
import re
import signal
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from msgspec import Struct

from banksman.commands.command import Command
from banksman.commands.options import Options
from banksman.commands.output import OUTPUT_BYTES_MAX
from banksman.core.process_facts import Swept
from banksman.errors import BanksmanError, Closed, NotFound, ProgramNotFound, Refused
from banksman.process.launch import Launch, prepare
from banksman.process.lease_page import LeasePage
from banksman.sessions.workspace.safe_paths import Folder

log = logging.getLogger("banksman")

# What is cut off is cut off rarely: a command that writes single bytes would otherwise pay for each a copy of the rest.
_SLACK_BYTES = 64 << 10
_CONTINUATION = re.compile(rb"[\x80-\xbf]*")
_decoder = codecs.getincrementaldecoder("utf-8")


class Tail:
    """The last of a terminal's output, as text: at most `bytes_max` bytes of UTF-8.

    Both streams, in the order in which they come. They are two pipes, so what is written to both in the same moment may
    change places. Each stream is decoded by itself, so no character is torn. What is not UTF-8 is shown as U+FFFD.
    """

    def __init__(self, bytes_max: int) -> None:
        assert bytes_max >= 0
        self._bytes_max = bytes_max
        self._kept = bytearray()
        self._is_cut = False
        self._decoders = {stream: _decoder("replace") for stream in ("stdout", "stderr")}

    def add(self, stream: str, data: bytes) -> None:
        self._keep(self._decoders[stream].decode(data))

    def finish(self) -> None:
        """Nothing more will come: a character that was begun will not be ended."""
        for decoder in self._decoders.values():
            self._keep(decoder.decode(b"", final=True))
            decoder.reset()

    def _keep(self, text: str) -> None:
        self._kept += text.encode()
        if len(self._kept) > self._bytes_max + _SLACK_BYTES:
            self._cut()

    def _cut(self) -> None:
        """At the beginning, and between characters."""
        excess = len(self._kept) - self._bytes_max
        if excess > 0:
            torn = _CONTINUATION.match(self._kept, excess)
            assert torn is not None
            end = torn.end()
            del torn  # It holds on to the bytes, which could not be made shorter.
            del self._kept[:end]
            self._is_cut = True

    def text(self) -> tuple[str, bool]:
        """What is kept, and whether there was more before it."""
        self._cut()
        return self._kept.decode(), self._is_cut


# Those that run, or were not released by the agent. Beyond it the oldest that has ended is forgotten; if all run, the
# next one is refused.
TERMINALS_MAX = 32
# From TERM to KILL. Less than for a command of the user's own: a turn that was interrupted is to leave nothing behind
# after two seconds, and an agent that kills a command waits for the answer.
GRACE_SECONDS = 1.0

_PLAIN_WORD = re.compile(r"[\w@%+=:,./-]+")

# Starts a command. A host's `launch` is one; but a host that drains takes nothing new, and the turn that it lets finish
# may still need one.
Start = Callable[[Launch, Options], Command]


def start_command(launch: Launch, options: Options, lease: LeasePage | None = None) -> Command:
    """One that nobody but its terminal knows. `lease`: that of the session it is for."""
    return Command(launch, options, id=os.urandom(6).hex(), on_end=lambda _: None, lease=lease)


class TerminalEnvironment(Struct, frozen=True):
    """The environment of a terminal: as the agent's process has it."""

    env: Mapping[str, str] | None = None
    inherits: bool = True
    scrub: Iterable[str] = ()


class TerminalOrder(Struct, frozen=True):
    """What the agent wants to be run."""

    command: str
    args: list[str]
    env: dict[str, str]
    cwd: str
    output_bytes_max: int | None


class Terminal(Struct, frozen=True):
    command: Command
    tail: Tail

    def output(self) -> dict[str, Any]:
        if self.command.is_over:
            self.tail.finish()
        output, is_cut = self.tail.text()
        told: dict[str, Any] = {"output": output, "truncated": is_cut}
        return {**told, "exitStatus": self.exit_status()} if self.command.is_over else told

    def exit_status(self) -> dict[str, Any]:
        """Of one that is over. Neither a code nor a signal: nobody could see how it ended."""
        finished = self.command.finished
        if finished is None:
            return {"exitCode": None, "signal": None}
        return {"exitCode": finished.code, "signal": _signal_name(finished.signal)}


class Terminals:
    """Of one process of an agent."""

    def __init__(self, start: Start, surroundings: TerminalEnvironment) -> None:
        self._start = start
        self._surroundings = surroundings
        self._terminals: dict[str, Terminal] = {}
        # Every one that may still run, those that were released too, and when it was asked for.
        self._commands: list[tuple[float, Command]] = []
        self._is_over = False
        # How often all of them were ended: what was asked for before the last time is not started after it.
        self.generation = 0

    def __repr__(self) -> str:
        return f"<Terminals {', '.join(self._terminals) or 'none'}>"

    # -- one of them -------------------------------------------------------------------------------------------------
    async def create(self, order: TerminalOrder, find_folder: Callable[[], Awaitable[Folder]], generation: int) -> str:
        """Start it in the folder that is found for it; its id. Cancelled, it is ended. `generation`: when it was asked
        for."""
        folder = await find_folder()
        try:
            if self._is_over or generation != self.generation:
                raise Closed("the turn was stopped before the command was started")
            self._make_room()
            id, terminal = self._launch(order, folder)
        finally:
            folder.close()
        try:
            await terminal.command.wait_started()
        except BaseException:
            terminal.command.stop_nowait()
            self._terminals.pop(id, None)
            raise
        return id

    def output(self, id: str) -> dict[str, Any]:
        return self._find(id).output()

    async def wait_for_exit(self, id: str) -> dict[str, Any]:
        """Of its whole tree, and its output is all there. Also one that is released meanwhile."""
        terminal = self._find(id)
        await terminal.command.wait()
        return terminal.exit_status()

    async def kill(self, id: str) -> None:
        """Returns when nothing of it is left. Its output can still be asked for."""
        await _stop(self._find(id).command)

    async def release(self, id: str) -> None:
        """The same, and it is forgotten, at once."""
        command = self._find(id).command
        del self._terminals[id]
        await _stop(command)

    def _find(self, id: str) -> Terminal:
        terminal = self._terminals.get(id)
        if terminal is None:
            raise NotFound(f"there is no terminal {id[:60]!r}", hint="it was released, or ended long ago, or never was")
        return terminal

    def _make_room(self) -> None:
        self._commands = [(at, command) for at, command in self._commands if not command.is_over]
        if len(self._commands) >= TERMINALS_MAX:
            hint = "kill or release some, and wait until they have ended"
            raise Refused(f"{TERMINALS_MAX} terminals are running already", hint=hint)
        if len(self._terminals) >= TERMINALS_MAX:
            # An agent that never releases any must not run dry. They do not all run, so one of these has ended.
            del self._terminals[next(id for id, terminal in self._terminals.items() if terminal.command.is_over)]

    def _running(self) -> list[Command]:
        return [command for _, command in self._commands if not command.is_over]

    def _launch(self, order: TerminalOrder, folder: Folder) -> tuple[str, Terminal]:
        wanted = OUTPUT_BYTES_MAX if order.output_bytes_max is None else order.output_bytes_max
        tail = Tail(min(wanted, OUTPUT_BYTES_MAX))
        # Its output is kept by the tail alone, to the bound that the agent has given.
        options = Options(grace=GRACE_SECONDS, output_bytes_max=0, spill_bytes_max=0, on_output=tail.add)
        terminal = Terminal(self._start(self._prepare(order, folder), options), tail)
        # Not to be guessed: an id of another session's terminal means nothing here.
        id = f"t-{os.urandom(8).hex()}"
        self._terminals[id] = terminal
        self._commands.append((asyncio.get_running_loop().time(), terminal.command))
        return id, terminal

    def _prepare(self, order: TerminalOrder, folder: Folder) -> Launch:
        try:
            return self._prepared([order.command, *order.args], order, folder)
        except ProgramNotFound:
            if order.args or not order.command or _PLAIN_WORD.fullmatch(order.command):
                raise
        try:
            # The one that such lines are mostly written for, if there is one.
            return self._prepared(["bash", "-c", order.command], order, folder)
        except ProgramNotFound:
            return self._prepared(["/bin/sh", "-c", order.command], order, folder)

    def _prepared(self, argv: list[str], order: TerminalOrder, folder: Folder) -> Launch:
        held = f"/proc/self/fd/{folder.fd}" if sys.platform == "linux" else order.cwd
        launch = prepare(
            argv,
            cwd=held,
            env={**(self._surroundings.env or {}), **order.env},
            inherit_env=self._surroundings.inherits,
            scrub=self._surroundings.scrub,
            is_agents=True,
        )
        return replace(launch, path=_seen_from(os.fsencode(held), launch))

    # -- all of them -------------------------------------------------------------------------------------------------
    @property
    def is_running(self) -> bool:
        return bool(self._running())

    def stop(self, since: float, *, ends: bool) -> tuple[Swept, ...]:
        """End those that were begun since then, by the ladder, and tell which they are. What they have said can still
        be asked for."""
        running = [command for at, command in self._commands if at >= since and not command.is_over]
        if ends:
            self.generation += 1
            for command in running:
                command.stop_nowait()
        return tuple(Swept(command.pid or 0, " ".join(command.argv)) for command in running)

    def end(self, kill_by: float | None = None) -> None:
        """The same, and there will be no more. `kill_by`: see `Running.stop_nowait`."""
        self._is_over = True
        self.stop(0.0, ends=True)
        for command in () if kill_by is None else self._running():
            command.stop_nowait(kill_by=kill_by)
        self._terminals.clear()

    async def wait_ended(self) -> None:
        """Until nothing of any of them is left. The ladder is what makes that certain to come."""
        for command in self._running():
            with contextlib.suppress(BanksmanError):
                await command.wait()

    def abandon(self) -> None:
        """The loop is closed: see `Command.abandon`."""
        for command in self._running():
            command.abandon()


async def _stop(command: Command) -> None:
    with contextlib.suppress(BanksmanError):  # It has failed in a way of ours, and is over all the same.
        finished = await command.stop()
        if finished.survivors:
            left = ", ".join(f"{survivor.pid} ({survivor.why})" for survivor in finished.survivors)
            log.warning("! a terminal's command is over, and these are left of it: %s", left)


def _seen_from(held: bytes, launch: Launch) -> bytes:
    """The program as its process finds it, which is in the folder already and knows nothing of our fd."""
    word = launch.argv[0]
    if b"/" in word:
        return word
    return b"./" + launch.path[len(held) + 1 :] if launch.path.startswith(held + b"/") else launch.path


def _signal_name(number: int | None) -> str | None:
    if number is None:
        return None
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIG{number}"
