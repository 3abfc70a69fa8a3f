"""A scripted agent that misbehaves: a real process that speaks Claude's stream-json, and does what a test tells it.

    command = fake_agent.command({"prompt 1": ["say hello", "at result exit 3"]}, evidence=folder, memory=other)
    session = await host.open("claude", command=command)
    turn = await session.ask("@@stream 3 0.01\\n@@touch /tmp/…/reached\\n@@hang")

What a script looks like is in `script.py`; the words it may use are `VERBS` and `POINTS`, each with a line that says
what it means. A word that is not there ends the agent with code 64, loudly. `Evidence` reads what the processes left.
"""

from __future__ import annotations

import json

from banksman.testing.fake_agent.claude_turn import POINTS, Script, sections_of
from banksman.testing.fake_agent.verbs import VERBS
from banksman.testing.fake_process import start_words
from banksman.testing.fake_script import ScriptError

TYPE_CHECKING = False
if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    from banksman.testing.fake_agent.evidence import Evidence, unused_verbs
    from banksman.testing.fake_agent.evidence import ProcessEvidence as Process

__all__ = ["POINTS", "VERBS", "Evidence", "Process", "ScriptError", "command", "unused_verbs"]


def command(
    script: Mapping[str, Sequence[str]] | Sequence[str] = (),
    *,
    evidence: str | os.PathLike[str] | None = None,
    memory: str | os.PathLike[str] | None = None,
    remembers_at_home: bool = False,
) -> list[str]:
    """The words that start a fake agent with this script; what is added to them is recorded, and ignored.

    `evidence`: a folder where each process leaves what it was given. `memory`: a folder that keeps conversations, for
    `--resume` to find and `--fork-session` to copy. `remembers_at_home`: they are kept where Claude keeps them, in the
    home of whoever starts it. Raises `ScriptError` if the script cannot be meant.
    """
    Script(script)
    words = start_words(__file__, f"--fake-script={json.dumps(sections_of(script))}", evidence=evidence, memory=memory)
    return [*words, "--fake-memory=~"] if remembers_at_home and memory is None else words


# Loaded when first used: the agent imports this package at its start, and needs none of it.
_LAZY = {"Evidence": "Evidence", "Process": "ProcessEvidence", "unused_verbs": "unused_verbs"}


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from banksman.testing.fake_agent import evidence  # noqa: PLC0415

    return getattr(evidence, _LAZY[name])
