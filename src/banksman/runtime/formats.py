"""Formats of what a host hands over: the next host must have the same ones."""

from __future__ import annotations

from banksman.commands import command_state
from banksman.core.session import history, live_state
from banksman.process.keeper import messages


def formats() -> dict[str, str]:
    """Return the formats of this version.

    `wire`: messages of the keepers. `command`, `session`: records of what is handed over.
    `snapshot`: snapshots of sessions in the store.
    """
    return {
        "wire": messages.WIRE.decode(),
        "command": command_state.WORD.decode().strip(),
        "session": str(live_state.VERSION),
        "snapshot": str(history.VERSION),
    }
