"""Scripted Codex app-server: a real process that speaks its JSON-RPC on stdio for tests.

    command = fake_codex.command(evidence=folder, memory=other)
    session = await host.open("codex", command=command)
    turn = await session.ask("@@slow 3 0.01\\n@@touch /tmp/…/reached\\n@@hang")

The prompt is the script of its turn: each line that starts with `@@` is one step. `VERBS` in
codex_agent.py lists the verbs, and the first docstring line of each verb describes it. The agent
echoes a prompt without steps.

Its request ids count from 0, so they overlap with the ids of the client. The processes of a tool
continue to run after an interrupt, as with the real agent.

`Evidence` of `fake_agent` reads the files that the processes leave.
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
    """Return the command line that starts a fake Codex agent.

    `evidence`: folder where each process records its input. `memory`: folder that keeps threads,
    for resume and fork.
    """
    return start_words(__file__, evidence=evidence, memory=memory)
