"""Codex dialect: its app-server, a JSON-RPC protocol of threads, turns and items.

- reader.py: the meaning of one line alone, and the data of a turn for its boundary.
- conversation.py: the state of the protocol, for lines that need memory and for all frames to the
  agent.
- writer.py: the parameters of the requests to the agent.
- client_requests.py: the agent's requests and their answers.
- updates.py: the frames as session updates.
"""

from __future__ import annotations

from typing import Any

from banksman.core.dialects.codex import reader, updates
from banksman.core.dialects.codex.conversation import CodexProtocolState
from banksman.core.dialects.dialect import ProtocolState, Setup, StatelessDialect


class Codex(StatelessDialect):
    """The Codex dialect. Stateless: one instance, `CODEX`, serves every session."""

    __slots__ = ()

    name: str = "codex"
    acknowledges_interrupts: bool = True
    can_steer: bool = True
    takes_input: bool = False

    def __repr__(self) -> str:
        return "<Codex dialect>"

    # Bound directly, without a wrapper method: every token takes this path.
    read = staticmethod(reader.read)
    read_head = staticmethod(reader.read_head)

    def begin(self, setup: Setup) -> ProtocolState:
        return CodexProtocolState(setup)

    def project(self, line: bytes) -> list[dict[str, Any]]:
        """Translate a frame to ACP session updates by the rules of updates.py. Never raises."""
        return updates.project(line)

    def partial(self, line: bytes) -> list[dict[str, Any]]:
        """Translate a delta; other frames give nothing. Never raises."""
        return updates.partial(line)

    def projector(self) -> updates.CodexProjector:
        """Return a projector for the frames of a turn in order. It emits text as it arrives."""
        return updates.CodexProjector()

    def transcript(self) -> updates.CodexTranscript:
        """Return a collector of the agent's text in a turn, including an unfinished message."""
        return updates.CodexTranscript()


CODEX = Codex()
