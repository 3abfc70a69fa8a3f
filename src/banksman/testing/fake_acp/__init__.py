"""Scripted ACP agent: a real process that speaks ACP on stdio, correctly or not, as a test asks.

    command = fake_acp.command(evidence=folder, memory=other, after_cancel="end_turn")
    session = await host.open("custom", command=command)
    turn = await session.ask("@@slow 3 0.01\\n@@touch /tmp/…/reached\\n@@hang")

The prompt is the script of its turn: each line that starts with `@@` is one step. `VERBS` in
acp_turn.py lists the verbs, and the first docstring line of each verb describes it. The agent
echoes a prompt without steps. `Character` holds the behaviour that does not depend on the prompt.

`Evidence` of `fake_agent` reads the files that the processes leave.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from banksman.testing.fake_process import start_words

if TYPE_CHECKING:
    import os

__all__ = ["Character", "command"]


def command(
    *,
    evidence: str | os.PathLike[str] | None = None,
    memory: str | os.PathLike[str] | None = None,
    **character: Any,
) -> list[str]:
    """Return the command line that starts a fake ACP agent.

    `evidence`: folder where each process records its input. `memory`: folder that keeps
    conversations. The other keywords are the fields of `Character`; an unknown keyword raises
    `TypeError`.
    """
    Character(**character)
    return start_words(
        __file__, f"--fake-character={json.dumps(character)}", evidence=evidence, memory=memory
    )


@dataclass(frozen=True)
class Character:
    """Behaviour of a fake ACP agent; the default implements all of the protocol correctly."""

    version: int = 1
    # Capabilities that the agent announces.
    loads: bool = True
    resumes: bool = False
    forks: bool = False
    takes: tuple[str, ...] = ("image", "audio", "embeddedContext")
    # How the agent offers its settings: "modes" (modes and models), "options" (config options), or
    # any other value for no settings.
    offers: str = "modes"
    # The agent refuses to open a conversation before `authenticate`.
    wants_login: bool = False
    # The agent sends the first replayed line before the answer to `session/load`, the rest after
    # it.
    replays_late: bool = False
    # Error code for an unknown conversation.
    unknown_code: int = -32602
    # Request ids of the agent are strings.
    has_string_ids: bool = False
    # How the agent answers a cancelled prompt: "cancelled", "end_turn", "error", or "nothing".
    after_cancel: str = "cancelled"
    # The processes of a tool continue to run after a cancel.
    leaves_tools: bool = False
    # The agent sends the last text of each turn after the answer to the prompt.
    talks_late: bool = False
    # The agent continues to run after its stdin ends.
    ignores_eof: bool = False
    # Line that the agent writes before any other output.
    says_first: str = ""

    def capabilities(self) -> dict[str, Any]:
        sessions = {
            name: dict[str, Any]()
            for name, can in (("resume", self.resumes), ("fork", self.forks))
            if can
        }
        return {
            "loadSession": self.loads,
            "promptCapabilities": {
                name: name in self.takes for name in ("image", "audio", "embeddedContext")
            },
            "mcpCapabilities": {"http": True, "sse": False},
            "sessionCapabilities": sessions,
        }

    def offered(self, mode: str, model: str) -> dict[str, Any]:
        """Return the settings that a conversation offers, with the current `mode` and `model`."""
        match self.offers:
            case "modes":
                return {
                    "modes": {
                        "currentModeId": mode,
                        "availableModes": [{"id": id, "name": id} for id in MODES],
                    },
                    "models": {
                        "currentModelId": model,
                        "availableModels": [{"modelId": id, "name": id} for id in MODELS],
                    },
                }
            case "options":
                return {
                    "configOptions": [_option("mode", mode, MODES), _option("model", model, MODELS)]
                }
            case _:
                return {}


MODES = ("ask", "code")
MODELS = ("small", "big")


def _option(name: str, current: str, values: tuple[str, ...]) -> dict[str, Any]:
    options = [{"value": value, "name": value} for value in values]
    return {
        "id": f"the-{name}",
        "name": name,
        "category": name,
        "type": "select",
        "currentValue": current,
        "options": options,
    }
