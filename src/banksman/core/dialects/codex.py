"""Codex: its app-server, a JSON-RPC of threads, turns and items.

What a line says by itself is read in codex_reading.py; what it means with all that was said before, and what we say, is
in codex_speech.py; questions and answers are in codex_asking.py; how its frames look to a reader is in
codex_updates.py.
"""

from __future__ import annotations

from typing import Any

from banksman.core.dialects import codex_reading, codex_updates
from banksman.core.dialects.codex_speech import CodexSpeech
from banksman.core.dialects.dialect import Setup, Speech
from banksman.core.dialects.in_words import InWords


class Codex(InWords):
    """The dialect. It has no state: one instance, `CODEX`, serves every session."""

    __slots__ = ()

    name: str = "codex"
    acknowledges_interrupts: bool = True
    can_steer: bool = True
    takes_input: bool = False

    def __repr__(self) -> str:
        return "<Codex dialect>"

    # No method of ours between a token and its meaning: this is the path of each.
    read = staticmethod(codex_reading.read)
    read_head = staticmethod(codex_reading.read_head)

    def begin(self, setup: Setup) -> Speech:
        return CodexSpeech(setup)

    def project(self, line: bytes) -> list[dict[str, Any]]:
        """A frame as ACP session updates; the rules are in codex_updates.py. Never raises."""
        return codex_updates.project(line)

    def partial(self, line: bytes) -> list[dict[str, Any]]:
        """What a delta says, if the frame is one. Never raises."""
        return codex_updates.partial(line)

    def projector(self) -> codex_updates.Projector:
        """The same for the frames of a turn in order, text as it comes."""
        return codex_updates.Projector()

    def transcript(self) -> codex_updates.Transcript:
        """What the agent says in the frames of a turn, the unfinished sentence included."""
        return codex_updates.Transcript()


CODEX = Codex()
