"""`banksman acp`: ACP agent for an editor. The implementation is in `banksman.cli.acp`."""

from __future__ import annotations

from banksman.cli.acp.main import main, parser

__all__ = ["main", "parser"]
