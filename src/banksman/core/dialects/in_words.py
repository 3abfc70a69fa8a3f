"""What dialects have in common whose agent is told everything in words: its command line has nothing to say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class InWords:
    __slots__ = ()

    def has_forgotten(self, stderr: str) -> bool:
        """It says so in words, and stays: see `Forgot`."""
        return False

    def mcp_file(self, servers: Sequence[Mapping[str, Any]]) -> str | None:
        """None: it is told its servers when its conversation begins."""
        return None

    def argv(
        self,
        command: Sequence[str],
        *,
        resume: str | None = None,
        forks: bool = False,
        mcp_config: str | None = None,
        model: str | None = None,
        permission_mode: str | None = None,
        system_prompt: str | None = None,
        args: Sequence[str] = (),
    ) -> list[str]:
        """The command, then `args`. All that was wished for is said over the wire."""
        return [*command, *args]
