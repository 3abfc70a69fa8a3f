"""The verbs that run a server start without the code of its clients."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("verb", ["serve", "host"])
def test_verb_that_runs_a_server_imports_no_client(verb: str) -> None:
    code = f"import sys, banksman.cli.commands.{verb}; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "banksman.cli.server_flags" in found
    assert not [name for name in found if name.startswith("banksman.cli.client") or name == "http.client"]
