"""What a fake ACP agent is like: how it opens conversations, what it offers, and what it gets wrong each time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


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
