"""Terminals: commands that an agent delegates to its client, with the end of their output.

**Ownership.** `Terminals` owns a terminal from the request until its process tree is proven gone.
The agent may release it earlier (`release`). A terminal ends with its interrupted turn, with the
agent's process and with the session. It also ends if its request is cancelled before the agent gets
its id.

**Working folder.** A terminal runs in a folder inside the root. The process enters the folder that
is held open, by `/proc/self/fd`, so the path is not resolved a second time. (Without `/proc` it is
resolved again, and the folder could be swapped in between.) The command itself is not confined. It
is a program of the user, like the agent.

**Program or shell line.** ACP has a program and its arguments. Many agents send a whole shell line
as the program and no arguments, because the first editor that served them ran everything in a
shell. So a command without arguments that cannot be a program's name is passed to a shell.
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

# Excess output is removed rarely. Otherwise a command that writes single bytes would copy the whole
# buffer for each byte.
_SLACK_BYTES = 64 << 10
_CONTINUATION = re.compile(rb"[\x80-\xbf]*")
_decoder = codecs.getincrementaldecoder("utf-8")
# Limit on terminals that run or were not released. Beyond the limit the oldest ended terminal is
# forgotten. If all of them run, a new terminal is refused.
TERMINALS_MAX = 32
# Time from TERM to KILL. Shorter than for the user's commands: an interrupted turn must leave
# nothing running after two seconds, and an agent that kills a command waits for the answer.
GRACE_SECONDS = 1.0
_PLAIN_WORD = re.compile(r"[\w@%+=:,./-]+")


class Tail:
    """The end of a terminal's output as text: at most `bytes_max` bytes of UTF-8.

    Both streams are merged in the order of arrival. They are two pipes, so simultaneous writes to
    both may change places. Each stream has its own decoder, so no character is split. Bytes that
    are not UTF-8 become U+FFFD.
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
        """Flush the decoders at the end of the output. An incomplete character becomes U+FFFD."""
        for decoder in self._decoders.values():
            self._keep(decoder.decode(b"", final=True))
            decoder.reset()

    def _keep(self, text: str) -> None:
        self._kept += text.encode()
        if len(self._kept) > self._bytes_max + _SLACK_BYTES:
            self._cut()

    def _cut(self) -> None:
        """Remove the excess at the beginning, at a character boundary."""
        excess = len(self._kept) - self._bytes_max
        if excess > 0:
            torn = _CONTINUATION.match(self._kept, excess)
            assert torn is not None
            end = torn.end()
            del torn  # The match exports the buffer, and an exported bytearray cannot be resized.
            del self._kept[:end]
            self._is_cut = True

    def text(self) -> tuple[str, bool]:
        """Return the kept text, and whether earlier output was removed."""
        self._cut()
        return self._kept.decode(), self._is_cut


# Starts a command. A host's `launch` would fit, but a draining host accepts no new command, and the
# last turn of a draining session may still need a terminal.
Start = Callable[[Launch, Options], Command]


def start_command(launch: Launch, options: Options, lease: LeasePage | None = None) -> Command:
    """Start a command that only its terminal knows.

    `lease`: the lease page of its session.
    """
    return Command(launch, options, id=os.urandom(6).hex(), on_end=lambda _: None, lease=lease)


class TerminalEnvironment(Struct, frozen=True):
    """Environment and limits of a terminal, equal to those of the agent's process."""

    env: Mapping[str, str] | None = None
    inherits: bool = True
    scrub: Iterable[str] = ()
    keep: Iterable[str] = ()
    limits: Mapping[str, Any] | None = None


class TerminalOrder(Struct, frozen=True):
    """Request of the agent for a command."""

    command: str
    args: list[str]
    env: dict[str, str]
    cwd: str
    output_bytes_max: int | None


class Terminal(Struct, frozen=True):
    """Started command with the end of its output."""

    command: Command
    tail: Tail

    def output(self) -> dict[str, Any]:
        if self.command.is_over:
            self.tail.finish()
        output, is_cut = self.tail.text()
        told: dict[str, Any] = {"output": output, "truncated": is_cut}
        return {**told, "exitStatus": self.exit_status()} if self.command.is_over else told

    def exit_status(self) -> dict[str, Any]:
        """Return the exit status of an ended command.

        Without a code and a signal, the way in which it ended could not be observed.
        """
        finished = self.command.finished
        if finished is None:
            return {"exitCode": None, "signal": None}
        return {"exitCode": finished.code, "signal": _signal_name(finished.signal)}


class Terminals:
    """Terminals of one agent process."""

    def __init__(self, start: Start, surroundings: TerminalEnvironment) -> None:
        self._start = start
        self._surroundings = surroundings
        self._terminals: dict[str, Terminal] = {}
        # Commands that may still run, including released terminals, with the time of their start.
        self._commands: list[tuple[float, Command]] = []
        self._is_over = False
        # Number of calls that stopped terminals. A request from before the last of these calls must
        # not start a command after it.
        self.generation = 0

    def __repr__(self) -> str:
        return f"<Terminals {', '.join(self._terminals) or 'none'}>"

    # -- a single terminal ------------------------------------------------------------------------
    async def create(
        self, order: TerminalOrder, find_folder: Callable[[], Awaitable[Folder]], generation: int
    ) -> str:
        """Start a command in the found folder and return the terminal's id.

        A cancelled call ends the command. `generation`: the generation at the time of the request.
        """
        folder = await find_folder()
        try:
            # Checked after the only await before the start. A turn that was interrupted during the
            # wait must not start a command.
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
        """Wait until the whole process tree has ended and its output is complete.

        Also works for a terminal that is released meanwhile.
        """
        terminal = self._find(id)
        await terminal.command.wait()
        return terminal.exit_status()

    async def kill(self, id: str) -> None:
        """Stop a command, and return when nothing of its process tree is left.

        Its output stays available.
        """
        await _stop(self._find(id).command)

    async def release(self, id: str) -> None:
        """Stop a command like `kill`, and forget the terminal immediately."""
        command = self._find(id).command
        del self._terminals[id]
        await _stop(command)

    def _find(self, id: str) -> Terminal:
        terminal = self._terminals.get(id)
        if terminal is None:
            hint = "it was released, ended long ago, or never existed"
            raise NotFound(f"there is no terminal {id[:60]!r}", hint=hint)
        return terminal

    def _make_room(self) -> None:
        self._commands = [(at, command) for at, command in self._commands if not command.is_over]
        if len(self._commands) >= TERMINALS_MAX:
            hint = "kill or release some, and wait until they have ended"
            message = f"cannot start another terminal: {TERMINALS_MAX} are running"
            raise Refused(message, hint=hint)
        if len(self._terminals) >= TERMINALS_MAX:
            # An agent that never releases a terminal must not run out of them. Fewer than
            # `TERMINALS_MAX` commands run, so at least one of these terminals has ended.
            del self._terminals[
                next(id for id, terminal in self._terminals.items() if terminal.command.is_over)
            ]

    def _running(self) -> list[Command]:
        return [command for _, command in self._commands if not command.is_over]

    def _launch(self, order: TerminalOrder, folder: Folder) -> tuple[str, Terminal]:
        wanted = OUTPUT_BYTES_MAX if order.output_bytes_max is None else order.output_bytes_max
        tail = Tail(min(wanted, OUTPUT_BYTES_MAX))
        # Only the tail keeps the output, within the limit that the agent requested.
        options = Options(
            grace=GRACE_SECONDS, output_bytes_max=0, spill_bytes_max=0, on_output=tail.add
        )
        terminal = Terminal(self._start(self._prepare(order, folder), options), tail)
        # Random, so that the id of another session's terminal is not valid here.
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
            # Most shell lines are written for bash, so bash is tried first.
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
            keep=self._surroundings.keep,
            limits_wanted=self._surroundings.limits,
            is_agents=True,
        )
        return replace(launch, path=_seen_from(os.fsencode(held), launch))

    # -- all terminals ----------------------------------------------------------------------------
    @property
    def is_running(self) -> bool:
        return bool(self._running())

    @property
    def are_used(self) -> bool:
        return bool(self._terminals) or self.is_running

    def stop(self, since: float, *, ends: bool) -> tuple[Swept, ...]:
        """Stop the commands that started since `since`, by the ladder, and return them.

        Their output stays available. `ends`: False only returns the running commands.
        """
        running = [command for at, command in self._commands if at >= since and not command.is_over]
        if ends:
            self.generation += 1
            for command in running:
                command.stop_nowait()
        return tuple(Swept(command.pid or 0, " ".join(command.argv)) for command in running)

    def end(self, kill_by: float | None = None) -> None:
        """Stop all commands and refuse new ones.

        `kill_by`: see `Command.stop_nowait`.
        """
        self._is_over = True
        self.stop(0.0, ends=True)
        for command in () if kill_by is None else self._running():
            command.stop_nowait(kill_by=kill_by)
        self._terminals.clear()

    async def wait_ended(self) -> None:
        """Wait until no process of any terminal is left.

        The ladder guarantees that the wait ends.
        """
        for command in self._running():
            with contextlib.suppress(BanksmanError):
                await command.wait()

    def abandon(self) -> None:
        """Drop the terminals because the event loop is closed. See `Command.abandon`."""
        for command in self._running():
            command.abandon()


async def _stop(command: Command) -> None:
    # The command failed with an internal error, and it is over in any case.
    with contextlib.suppress(BanksmanError):
        finished = await command.stop()
        if finished.survivors:
            left = ", ".join(f"{survivor.pid} ({survivor.why})" for survivor in finished.survivors)
            log.warning("terminal command ended, but some of its processes survived: %s", left)


def _seen_from(held: bytes, launch: Launch) -> bytes:
    """Return the program's path as seen from its process.

    That process already works in the folder and does not have the fd of this process.
    """
    word = launch.argv[0]
    if b"/" in word:
        return word
    return (
        b"./" + launch.path[len(held) + 1 :] if launch.path.startswith(held + b"/") else launch.path
    )


def _signal_name(number: int | None) -> str | None:
    if number is None:
        return None
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIG{number}"
