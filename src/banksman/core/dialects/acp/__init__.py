"""ACP dialect: agents that speak the Agent Client Protocol, JSON-RPC over stdio.

Most agents speak ACP. The modules:

- reader.py: the meaning of one line alone.
- conversation.py: the state of the protocol, for lines that need memory and for all frames to the
  agent. protocol_v1.py, writer.py and client_requests.py build its messages.
- updates.py: the frames as session updates, which ACP frames already are.

This module ties them together. Agents speak one version of the protocol. Another version would get
a module beside protocol_v1.py, chosen when the agent answers `initialize`.
"""

from __future__ import annotations

from typing import Any

from banksman.core.dialects.acp import reader, updates
from banksman.core.dialects.acp.conversation import AcpProtocolState
from banksman.core.dialects.dialect import ProtocolState, Quirks, Setup, StatelessDialect

# An agent without deviations from the protocol.
ORDINARY = Quirks()


class Acp(StatelessDialect):
    """The ACP dialect of one program. Its only state is the quirks of that program."""

    __slots__ = ("quirks",)

    name: str = "acp"
    # A cancel is a notification. Only the end of the turn answers it.
    acknowledges_interrupts: bool = False
    # Agents differ on a prompt sent during an open turn. Some start another turn, some end the open
    # turn, and some never answer.
    can_steer: bool = False
    takes_input: bool = False

    # Bound directly, without a wrapper method: every token takes this path.
    read = staticmethod(reader.read)
    read_head = staticmethod(reader.read_head)

    def __init__(self, quirks: Quirks = ORDINARY) -> None:
        self.quirks = quirks

    def __repr__(self) -> str:
        return "<Acp dialect>"

    def begin(self, setup: Setup) -> ProtocolState:
        return AcpProtocolState(setup, self.quirks)

    def project(self, line: bytes) -> list[dict[str, Any]]:
        """Return the updates of a frame unchanged. Never raises."""
        return updates.project(line)

    def partial(self, line: bytes) -> list[dict[str, Any]]:
        """Return nothing: ACP sends each chunk once, and `project` returns it."""
        return []

    def projector(self) -> updates.AcpProjector:
        return updates.AcpProjector()

    def transcript(self) -> updates.AcpTranscript:
        """Return a collector of the last message in the frames of a turn."""
        return updates.AcpTranscript()


class CloseAcp(Acp):
    """ACP dialect that remembers the messages of a turn until its end."""

    __slots__ = ()

    read = staticmethod(reader.read_closely)


def acp(quirks: Quirks = ORDINARY) -> Acp:
    """Return the dialect for a program with these quirks.

    A program that reports failures as text needs `CloseAcp`, which remembers the text of a turn.
    """
    return CloseAcp(quirks) if quirks.error_texts or quirks.silence_is_error else Acp(quirks)
