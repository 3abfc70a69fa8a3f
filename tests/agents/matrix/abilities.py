"""Abilities that an agent reports at its start, in a few words each, for the conformance page.

The words are the same in every run.
"""

from __future__ import annotations

import re
from typing import Any

Told = dict[str, Any]

# Abilities in the order of the page's columns.
NAMES = ("version", "protocol", "history", "prompts", "MCP servers", "modes", "models")
UNTOLD = "not reported"


def of_claude(init: Told) -> dict[str, str]:
    """Return the abilities in the first frame of a turn."""
    return {
        "version": str(init["claude_code_version"]),
        "protocol": "stream-json",
        "history": UNTOLD,
        "prompts": UNTOLD,
        "MCP servers": UNTOLD,
        "modes": UNTOLD,
        "models": UNTOLD,
    }


def of_codex(told: Told, started: Told) -> dict[str, str]:
    """Return the abilities in the answers to `initialize` and `thread/start`."""
    version = re.search(r"/(\d+\.\d+\.\d+)", told["userAgent"])
    assert version is not None
    return {
        "version": version[1],
        "protocol": "app-server",
        "history": UNTOLD,
        "prompts": UNTOLD,
        "MCP servers": UNTOLD,
        "modes": f"approval policy, here `{started['approvalPolicy']}`",
        "models": UNTOLD,
    }


def of_acp(told: Told, session: Told) -> dict[str, str]:
    """Return the abilities in the answers to `initialize` and `session/new`."""
    can = told["agentCapabilities"]
    history = [*(["load"] if can.get("loadSession") else []), *sorted(can.get("sessionCapabilities", {}))]
    servers = ["stdio", *(name for name, is_so in sorted(can.get("mcpCapabilities", {}).items()) if is_so)]
    prompts = ["text", *(name for name, is_so in sorted(can.get("promptCapabilities", {}).items()) if is_so)]
    return {
        "version": str(told["agentInfo"]["version"]),
        "protocol": f"ACP {told['protocolVersion']}",
        "history": _words(history),
        "prompts": _words(prompts),
        "MCP servers": _words(servers),
        "modes": _words([mode["id"] for mode in session.get("modes", {}).get("availableModes", ())])
        if "modes" in session
        else _words(_options(session, "mode")),
        "models": _count(session.get("models", {}).get("availableModels") or _options(session, "model")),
    }


def _options(session: Told, category: str) -> list[str]:
    """Return the values that a setting of the session can take."""
    options = session.get("configOptions") or ()
    return [each["value"] for option in options if option.get("category") == category for each in option["options"]]


def _words(words: list[str]) -> str:
    return ", ".join(words) or "none"


def _count(models: list[Any]) -> str:
    # Only their number: the names change from month to month, and with the account.
    return f"{len(models)} offered" if models else "none offered"
