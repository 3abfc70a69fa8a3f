"""A scripted Codex app-server: a real process that speaks its JSON-RPC on stdio, and does what a test tells it.

    command = fake_codex.command(evidence=folder, memory=other)
    session = await host.open("codex", command=command)
    turn = await session.ask("@@slow 3 0.01\\n@@touch /tmp/…/reached\\n@@hang")

What a turn does stands in its prompt, a line each: the words are `VERBS` in codex_agent.py, each with a line that says
what it means. A prompt without any is said back. Its requests count from 0, so their ids are those of the client's own.
What a tool has started goes on after an interrupt, as with the real one.

`Evidence` of `fake_agent` reads what the processes left.
"""

from __future__ import annotations

from banksman.testing.fake_process import start_words

TYPE_CHECKING = False
if TYPE_CHECKING:
    import os

__all__ = ["command"]


def command(
    *, evidence: str | os.PathLike[str] | None = None, memory: str | os.PathLike[str] | None = None
) -> list[str]:
    """The words that start one. `evidence`: a folder where each process leaves what it was given. `memory`: a folder
    that keeps threads, to be resumed and forked."""
    return start_words(__file__, evidence=evidence, memory=memory)
