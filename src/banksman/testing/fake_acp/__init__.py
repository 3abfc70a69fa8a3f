"""A scripted ACP agent: a real process that speaks the protocol on stdio, as well or as badly as a test tells it.

    command = fake_acp.command(evidence=folder, memory=other, after_cancel="end_turn")
    session = await host.open("custom", command=command)
    turn = await session.ask("@@slow 3 0.01\\n@@touch /tmp/…/reached\\n@@hang")

What a turn does stands in its prompt, a line each: the words are `DEEDS`, each with a line that says what it means. A
prompt without any is said back. What the process is like, whatever it is asked, is in `Character`.

`Evidence` of `fake_agent` reads what the processes left.
"""

from __future__ import annotations

import json
import os
import sys

from banksman.testing.fake_acp.character import Character

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["Character", "command"]


def command(
    *,
    evidence: str | os.PathLike[str] | None = None,
    memory: str | os.PathLike[str] | None = None,
    **character: Any,
) -> list[str]:
    """The words that start one. `evidence`: a folder where each process leaves what it was given. `memory`: a folder
    that keeps conversations. The rest is what it is like: see `Character`. A word that is not there is a `TypeError`.
    """
    Character(**character)
    words = [sys.executable, "-I", "-S", os.path.join(os.path.dirname(os.path.abspath(__file__)), "__main__.py")]
    words.append(f"--fake-character={json.dumps(character)}")
    if evidence is not None:
        words.append(f"--fake-evidence={os.path.abspath(evidence)}")
    if memory is not None:
        words.append(f"--fake-memory={os.path.abspath(memory)}")
    return words
