"""Hand the background commands of a host over to the next host, and take them over there.

Each command is given to its keeper (`process/tree_hand_over.py`), and the rest of its state becomes
a private file beside the socket of its hold (`command_state.py`, `process/hold_record.py`). The
next host of the same scope finds the files, claims the processes, and continues the commands under
their ids. Nothing is read twice and nothing is skipped: the record has the output that the old host
has read, and the pipes have the rest.

A command stays on its host, and ends with it, in these cases:

- A callback or a pull reader of that host's process takes its output.
- It has exited, or is being stopped.
- A write to its stdin does not end within `WRITE_SECONDS_MAX`: half a write has no second writer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Iterable
from typing import Protocol

from banksman.commands import command_state
from banksman.commands.command import Command
from banksman.commands.command_state import CommandState
from banksman.errors import BanksmanError, NotFound, Refused
from banksman.process import hold_record
from banksman.process.adoption import Claimed, claim

log = logging.getLogger("banksman")

# How long a hand-over waits for a command that does not read its stdin.
WRITE_SECONDS_MAX = 1.0


class Registry(Protocol):
    """The part of `CommandRegistry` that a hand-over needs."""

    def background(self) -> Iterable[Command]: ...
    def owes_report_of(self, command: Command) -> bool: ...


async def give_all(registry: Registry, hold_seconds: float, scope: str) -> int:
    """Hand over each background command that can be. Return the number of those that stay."""
    commands = list(registry.background())
    gave = (
        _give(command, hold_seconds, scope, owes_report=registry.owes_report_of(command))
        for command in commands
    )
    return (await asyncio.gather(*gave)).count(False)


async def _give(command: Command, hold_seconds: float, scope: str, *, owes_report: bool) -> bool:
    """Hand one command over, and return whether that succeeded."""
    try:
        if command.needs_this_process:
            message = "a callback or a reader of this process takes its output"
            raise Refused(f"cannot hand over command {command.id}: {message}")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WRITE_SECONDS_MAX):
                await command.wait_written()
        secret = os.urandom(32)
        # Nothing is read between the two: reading stops before this task waits.
        record = command_state.encode(command.state_for(scope, secret, owes_report=owes_report))
        await command.hand_over_nowait(hold_seconds, secret, record)
    except BanksmanError as exc:
        log.warning("command not handed over, it ends with this host: %s", exc)
        return False
    return True


async def claim_all(scope: str) -> AsyncIterator[tuple[CommandState, Claimed]]:
    """Claim the commands that a host of this scope has handed over."""
    for name, line in hold_record.first_lines(command_state.ANY_WORD):
        if not command_state.is_command(line):
            continue  # The record of a session may be large.
        try:
            state = command_state.decode(hold_record.read(name))
            if state is None or state.scope != scope:
                continue
            argv = tuple(word.encode("utf-8", "replace") for word in state.argv)
            claimed = await claim(name, state.secret, argv=argv)
        except NotFound:
            continue  # Another host has it, or the hold is over. `hold_record.sweep` cleans up.
        except BanksmanError as exc:
            log.error("cannot take over a command (hold=%s): %s", name, exc)
            continue
        hold_record.remove(name)
        yield state, claimed
