"""Scripted agent that misbehaves on demand: a real process that speaks Claude's stream-json.

    script = {"prompt 1": ["say hello", "at result exit 3"]}
    command = fake_agent.command(script, evidence=folder, memory=other)
    session = await host.open("claude", command=command)
    turn = await session.ask("@@stream 3 0.01\\n@@touch /tmp/…/reached\\n@@hang")

`claude_turn.py` describes the form of a script. A script uses the verbs in `VERBS` and the points
in `POINTS`; each has a line that describes it. An unknown word ends the agent with code 64 and a
message on stderr. `Evidence` reads the files that the processes leave.
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
    """Return the command line that starts a fake agent with this script.

    The agent records further arguments and otherwise ignores them. `evidence`: folder where each
    process records its input. `memory`: folder that keeps conversations, for `--resume` to find and
    `--fork-session` to copy. `remembers_at_home`: keep the conversations where Claude keeps them,
    in the home folder of the user that starts the agent. Raises `ScriptError` if the script is
    invalid.
    """
    Script(script)
    words = start_words(
        __file__,
        f"--fake-script={json.dumps(sections_of(script))}",
        evidence=evidence,
        memory=memory,
    )
    return [*words, "--fake-memory=~"] if remembers_at_home and memory is None else words


# Imported on first use: the agent imports this package when it starts and needs none of these
# names.
_LAZY = {"Evidence": "Evidence", "Process": "ProcessEvidence", "unused_verbs": "unused_verbs"}


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from banksman.testing.fake_agent import evidence  # noqa: PLC0415

    return getattr(evidence, _LAZY[name])
