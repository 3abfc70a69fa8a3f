"""`banksman acp`: it is a whole program, and has a folder of its own."""

from __future__ import annotations

from banksman.cli.acp.main import main, parser

__all__ = ["main", "parser"]
