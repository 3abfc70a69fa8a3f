"""Formats of what a host hands over: the next host must have the same ones."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from banksman.commands import command_state
from banksman.core.session import history, live_state
from banksman.process.keeper import messages

# Beside the names of classes, which begin with a capital letter.
_RECORDS = "records"


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


def names() -> dict[str, list[str]]:
    """Return the names in the records of sessions that are handed over, and their formats."""
    # The imports take milliseconds, and only an upgrade needs them.
    from banksman.core.session import state_names  # noqa: PLC0415

    return {**state_names.names(_in_records()), _RECORDS: _records()}


def misfit(theirs: Mapping[str, Collection[str]]) -> str:
    """Say why this version cannot read records with these names; empty if it can."""
    from banksman.core.session import state_names  # noqa: PLC0415

    known = _records()
    for word in theirs.get(_RECORDS, ()):
        if word not in known:
            return f"records in the format {word!r:.100} are unknown in this version"
    rest = {name: members for name, members in theirs.items() if name != _RECORDS}
    return state_names.misfit(rest, _in_records())


def _records() -> list[str]:
    from banksman.sessions import crash_record, held_session  # noqa: PLC0415

    return [held_session.FORMAT, crash_record.FORMAT]


def _in_records() -> list[type]:
    from banksman.core.dialects.acp.conversation import AcpProtocolState  # noqa: PLC0415
    from banksman.core.dialects.codex.conversation import CodexProtocolState  # noqa: PLC0415
    from banksman.core.dialects.dialect import StatelessProtocol  # noqa: PLC0415
    from banksman.core.session.ask_queue import Priority  # noqa: PLC0415
    from banksman.core.session.state import Session  # noqa: PLC0415
    from banksman.sessions import crash_record, held_session  # noqa: PLC0415

    # The type of a priority is int, because any int is valid. But a named one has its name.
    states = [Session, Priority, StatelessProtocol, CodexProtocolState, AcpProtocolState]
    return [*states, held_session.HeldSession, crash_record.Header, crash_record.Row]
