"""Agents that speak ACP, the Agent Client Protocol: most of them, over stdio, as JSON-RPC.

What a line says by itself is read in reader.py; what it takes a memory to understand, and all that is said to the
agent, is in conversation.py, in the words of protocol_v1.py, writer.py and client_requests.py; how its frames look to a
reader is in updates.py, and is what they are. Here is what holds them together.

There is one version of the protocol that agents speak. Another would have words of its own, beside those of
protocol_v1.py, and be chosen where the agent answers `initialize`.
"""

from __future__ import annotations

from typing import Any

from banksman.core.dialects.acp import reader, updates
from banksman.core.dialects.acp.conversation import AcpProtocolState
from banksman.core.dialects.dialect import ProtocolState, Quirks, Setup, StatelessDialect

# An agent that does what the protocol says.
ORDINARY = Quirks()


class Acp(StatelessDialect):
    """The dialect, as one program speaks it. It has no state but what is known about that program."""

    __slots__ = ("quirks",)

    name: str = "acp"
    # A cancel is a notice. Only the end of the turn answers it.
    acknowledges_interrupts: bool = False
    # What is sent while a turn is open is another turn, or the end of the first, or never answered: agents differ.
    can_steer: bool = False
    takes_input: bool = False

    # No method of ours between a token and its meaning: this is the path of each.
    read = staticmethod(reader.read)
    read_head = staticmethod(reader.read_head)

    def __init__(self, quirks: Quirks = ORDINARY) -> None:
        self.quirks = quirks

    def __repr__(self) -> str:
        return "<ACP dialect>"

    def begin(self, setup: Setup) -> ProtocolState:
        return AcpProtocolState(setup, self.quirks)

    def project(self, line: bytes) -> list[dict[str, Any]]:
        """The frame's updates as they came. Never raises."""
        return updates.project(line)

    def partial(self, line: bytes) -> list[dict[str, Any]]:
        """Nothing: each chunk is said once, and `project` has it."""
        return []

    def projector(self) -> updates.AcpProjector:
        return updates.AcpProjector()

    def transcript(self) -> updates.AcpTranscript:
        """The last message in the frames of a turn."""
        return updates.AcpTranscript()


class CloseAcp(Acp):
    """The same, and what a turn says is remembered until its end."""

    __slots__ = ()

    read = staticmethod(reader.read_closely)


def acp(quirks: Quirks = ORDINARY) -> Acp:
    """For a program with these quirks: one that tells its failures as text has to be listened to closely."""
    return CloseAcp(quirks) if quirks.error_texts or quirks.silence_is_error else Acp(quirks)
