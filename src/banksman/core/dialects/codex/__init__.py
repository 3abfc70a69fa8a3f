"""Codex: its app-server, a JSON-RPC of threads, turns and items.

What a line says by itself is read in reader.py; what it means with all that was said before, and what we say, is
in conversation.py; questions and answers are in client_requests.py; how its frames look to a reader is in
updates.py.
"""

from __future__ import annotations

from typing import Any

from banksman.core.dialects.codex import reader, updates
from banksman.core.dialects.codex.conversation import CodexProtocolState
from banksman.core.dialects.dialect import ProtocolState, Setup, StatelessDialect


class Codex(StatelessDialect):
    """The dialect. It has no state: one instance, `CODEX`, serves every session."""

    __slots__ = ()

    name: str = "codex"
    acknowledges_interrupts: bool = True
    can_steer: bool = True
    takes_input: bool = False

    def __repr__(self) -> str:
        return "<Codex dialect>"

    # No method of ours between a token and its meaning: this is the path of each.
    read = staticmethod(reader.read)
    read_head = staticmethod(reader.read_head)

    def begin(self, setup: Setup) -> ProtocolState:
        return CodexProtocolState(setup)

    def project(self, line: bytes) -> list[dict[str, Any]]:
        """A frame as ACP session updates; the rules are in updates.py. Never raises."""
        return updates.project(line)

    def partial(self, line: bytes) -> list[dict[str, Any]]:
        """What a delta says, if the frame is one. Never raises."""
        return updates.partial(line)

    def projector(self) -> updates.CodexProjector:
        """The same for the frames of a turn in order, text as it comes."""
        return updates.CodexProjector()

    def transcript(self) -> updates.CodexTranscript:
        """What the agent says in the frames of a turn, the unfinished sentence included."""
        return updates.CodexTranscript()


CODEX = Codex()
