"""A scripted ACP agent: a real process that speaks the protocol on stdio, as well or as badly as a test tells it.

    command = fake_acp.command(evidence=folder, memory=other, after_cancel="end_turn")
    session = await host.open("custom", command=command)
    turn = await session.ask("@@slow 3 0.01\\n@@touch /tmp/…/reached\\n@@hang")

What a turn does stands in its prompt, a line each: the words are `VERBS` in acp_turn.py, each with a line that says
what it means. A prompt without any is said back. What the process is like, whatever it is asked, is in `Character`.

`Evidence` of `fake_agent` reads what the processes left.
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
    """The words that start one. `evidence`: a folder where each process leaves what it was given. `memory`: a folder
    that keeps conversations. The rest is what it is like: see `Character`. A word that is not there is a `TypeError`.
    """
    Character(**character)
    return start_words(__file__, f"--fake-character={json.dumps(character)}", evidence=evidence, memory=memory)


@dataclass(frozen=True)
class Character:
    """The default is an agent that does what the protocol says, and can do all of it."""

    version: int = 1
    # What it can.
    loads: bool = True
    resumes: bool = False
    forks: bool = False
    takes: tuple[str, ...] = ("image", "audio", "embeddedContext")
    # What it offers to choose, and how: "modes" (and models), "options", or nothing.
    offers: str = "modes"
    # It wants a login first.
    wants_login: bool = False
    # Of the history that it replays, all but the first line comes after the answer to `session/load`.
    replays_late: bool = False
    # How it says that it does not know a conversation.
    unknown_code: int = -32602
    # Its ids are words.
    has_string_ids: bool = False
    # How it answers a prompt that was cancelled: "cancelled", "end_turn", "error", or "nothing".
    after_cancel: str = "cancelled"
    # What a tool has started goes on after a cancel.
    leaves_tools: bool = False
    # Each turn's last text comes after the answer to its prompt.
    talks_late: bool = False
    # The end of its stdin is nothing to it.
    ignores_eof: bool = False
    # It writes this line before anything else.
    says_first: str = ""

    def capabilities(self) -> dict[str, Any]:
        sessions = {name: dict[str, Any]() for name, can in (("resume", self.resumes), ("fork", self.forks)) if can}
        return {
            "loadSession": self.loads,
            "promptCapabilities": {name: name in self.takes for name in ("image", "audio", "embeddedContext")},
            "mcpCapabilities": {"http": True, "sse": False},
            "sessionCapabilities": sessions,
        }

    def offered(self, mode: str, model: str) -> dict[str, Any]:
        """What can be set in a conversation in which these are."""
        match self.offers:
            case "modes":
                return {
                    "modes": {"currentModeId": mode, "availableModes": [{"id": id, "name": id} for id in MODES]},
                    "models": {
                        "currentModelId": model,
                        "availableModels": [{"modelId": id, "name": id} for id in MODELS],
                    },
                }
            case "options":
                return {"configOptions": [_option("mode", mode, MODES), _option("model", model, MODELS)]}
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
