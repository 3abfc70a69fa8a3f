"""Demonstrations with a scripted agent, `make run` and `make tour`: no API key, no network.

This file has the command line of the scripted agent. The demonstrations are in `server.py` and
`tour.py`. Only `make tour AGENT=NAME` starts a real agent, at the user's cost.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import banksman


def fake_agent(script: Mapping[str, Sequence[str]], memory: Path | None = None) -> list[str]:
    """Return the argv that starts the scripted agent. `memory`: the folder of its conversations."""
    main = Path(banksman.__file__).parent / "testing" / "fake_agent" / "__main__.py"
    words = [sys.executable, "-I", "-S", str(main), f"--fake-script={json.dumps(script)}"]
    return words if memory is None else [*words, f"--fake-memory={memory}"]
