"""Environment, arguments and files that make each real agent use the fake model only.

Pure functions: text in, text out. `FakeModel.env` writes the files. Verified to be sufficient, each
in a network namespace with only loopback: Claude Code 2.1.325, Codex 0.166.0, Zed's codex-acp
0.16.0, Gemini CLI 0.61.0, opencode 1.18.33.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

KEY = "fake-key"
PATH = "/usr/local/bin:/usr/bin:/bin"
# A model name that both Codex and codex-acp know. For an unknown name they report in each turn that
# they do not know it, and one of them reports it as its answer.
CODEX_MODEL = "gpt-5.5"
GEMINI_MODEL = "gemini-2.5-flash"


@dataclass(frozen=True, slots=True)
class AgentSetup:
    """Environment variables, final arguments, and files by their paths in the home folder."""

    variables: Mapping[str, str]
    arguments: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict[str, str])


def setup(agent: str, url: str, home: Path) -> AgentSetup:
    """Return the setup of an agent. Raises ValueError for an unknown agent."""
    try:
        make = SETUPS[agent]
    except KeyError:
        raise ValueError(
            f"{agent!r}: it is not known what this agent needs; known are {', '.join(SETUPS)}"
        ) from None
    made = make(url, home)
    temporary = home / "tmp"
    common = {"HOME": str(home), "TMPDIR": str(temporary), "PATH": PATH}
    return AgentSetup({**made.variables, **common}, made.arguments, made.files)


def _claude(url: str, home: Path) -> AgentSetup:
    return AgentSetup(
        {
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_API_KEY": KEY,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_TELEMETRY": "1",
            "DISABLE_AUTOUPDATER": "1",
            "DISABLE_ERROR_REPORTING": "1",
            # Without this variable, the agent refuses to skip permissions when run as root, as in a
            # container.
            "IS_SANDBOX": "1",
            "CLAUDE_CODE_TMPDIR": str(home / "tmp"),
        }
    )


def _codex(url: str, home: Path) -> AgentSetup:
    settings = {
        "model": CODEX_MODEL,
        "model_provider": "fake",
        "model_providers.fake.name": "fake",
        "model_providers.fake.base_url": f"{url}/v1",
        "model_providers.fake.env_key": "FAKE_MODEL_KEY",
        "model_providers.fake.wire_api": "responses",
        "analytics.enabled": False,
        "check_for_update_on_startup": False,
    }
    # A value is TOML. JSON strings and booleans are valid TOML.
    words = [
        word for name, value in settings.items() for word in ("-c", f"{name}={json.dumps(value)}")
    ]
    # The agent creates its files, but the folder must exist.
    return AgentSetup(
        {"CODEX_HOME": str(home / ".codex"), "FAKE_MODEL_KEY": KEY},
        tuple(words),
        {".codex/.keep": ""},
    )


def _gemini(url: str, _: Path) -> AgentSetup:
    settings: dict[str, Any] = {
        "security": {"auth": {"selectedType": "gemini-api-key"}},
        "general": {"enableAutoUpdate": False, "enableAutoUpdateNotification": False},
        "privacy": {"usageStatisticsEnabled": False},
        "telemetry": {"enabled": False},
        # A script repeats the same text, which the agent would take for a malfunction of the model.
        "model": {"disableLoopDetection": True},
    }
    variables = {
        "GEMINI_API_KEY": KEY,
        "GOOGLE_GEMINI_BASE_URL": url,
        # Without this variable, the agent starts itself a second time, with more memory.
        "GEMINI_CLI_NO_RELAUNCH": "true",
    }
    return AgentSetup(
        variables, ("--model", GEMINI_MODEL), {".gemini/settings.json": json.dumps(settings)}
    )


def _opencode(url: str, _: Path) -> AgentSetup:
    model = {"name": "fake", "tool_call": True, "limit": {"context": 200_000, "output": 32_000}}
    provider = {
        "npm": "@ai-sdk/openai-compatible",  # Part of the program, so nothing is downloaded.
        "name": "fake",
        "options": {"baseURL": f"{url}/v1", "apiKey": KEY},
        "models": {"fake": model},
    }
    settings: dict[str, Any] = {
        "model": "fake/fake",
        "small_model": "fake/fake",
        "provider": {"fake": provider},
        "autoupdate": False,
        "share": "disabled",
        # By default the agent asks for no permission.
        "permission": {"bash": "ask"},
    }
    variables = {
        "OPENCODE_DISABLE_AUTOUPDATE": "1",
        "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
        "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
        # Ignores configurations in the working directory and all folders above it, which must not
        # affect the test.
        "OPENCODE_DISABLE_PROJECT_CONFIG": "1",
    }
    return AgentSetup(variables, (), {".config/opencode/opencode.json": json.dumps(settings)})


SETUPS: dict[str, Callable[[str, Path], AgentSetup]] = {
    "claude": _claude,
    "codex": _codex,
    "codex-acp": _codex,
    "gemini": _gemini,
    "opencode": _opencode,
}
