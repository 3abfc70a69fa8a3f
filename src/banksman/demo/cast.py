"""The scripted agents of the demonstration: what each says, and how it behaves. Real processes, each with its dialect.

Prompts are answered by their text, so that a prompt that comes again (a chore that had given way) is answered the same,
and so is one that whoever looks at the demonstration repeats.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import banksman

# A word each so many seconds: as fast as one reads.
PACE = 0.06

_OLD = "import os, sys, json\n\n\ndef load(path):\n    return json.load(open(path))\n"
_NEW = (
    "import json\nfrom pathlib import Path\n\n\n"
    "def load(path: Path) -> object:\n    return json.loads(path.read_text())\n"
)
_PLAN = ("Find the unused imports", "Remove them, file by file", "Run the tests")


def _todo(done: int) -> str:
    states = ["completed"] * done + ["in_progress"] + ["pending"] * len(_PLAN)
    todos = [{"content": text, "status": state} for text, state in zip(_PLAN, states, strict=False)]
    return f"tool_use TodoWrite {json.dumps({'todos': todos})}"


_FOUND = "src/app/load.py:1: import os, sys, json\nsrc/app/main.py:3: import re\ntests/test_load.py:2: import time"
_EDIT = {"file_path": "src/app/load.py", "old_string": _OLD, "new_string": _NEW}

FIX_CI: Mapping[str, Sequence[str]] = {
    "prompt Tidy up the imports.": [
        "think Which imports are unused? A search tells; then one file after the other, and the tests at the end.",
        _todo(0),
        "tool_result",
        f"tool_use Grep {json.dumps({'pattern': '^import', 'path': 'src'})}",
        f"tool_result {_FOUND}",
        _todo(1),
        "tool_result",
        f"speak {PACE} Three files import what they do not use. I begin with `src/app/load.py`: `os` and `sys` are "
        "used nowhere, and the file that `open` returns is never closed, so I take `Path.read_text` instead.",
        f"tool_use Edit {json.dumps(_EDIT)}",
        "tool_result The file src/app/load.py has been updated.",
        f"speak {PACE} The other two are one line each:\n\n| file | unused |\n|---|---|\n| `src/app/main.py` | `re` |\n"
        "| `tests/test_load.py` | `time` |\n\nBoth are removed. **Nothing else was touched.**",
        _todo(3),
        "tool_result",
    ],
    "prompt Is main green?": [
        f"speak {PACE} Not quite: `test_load` fails since this morning, because the file is still open when the folder "
        "is removed. The chore that I gave way for repairs exactly that.",
    ],
    "prompt Run the tests.": [
        f"speak {PACE} For that I need your permission:",
        'ask Bash {"command": "make test", "description": "Run every test"}',
        f"speak {PACE} All green: 214 passed in 9.8 s.",
    ],
}

TRANSLATE: Mapping[str, Sequence[str]] = {
    "prompt": ["stream 2000 0.2 page "],
}

# Takes no notice of an interrupt, nor of TERM: what is left is the end of the ladder.
STUBBORN: Mapping[str, Sequence[str]] = {
    "process": ["ignore term"],
    "prompt Count to a million.": ["on_interrupt ignored", "stream 2000 0.1"],
}


def command(script: Mapping[str, Sequence[str]], memory: Path) -> list[str]:
    """`memory`: the folder of its conversations, so that one that had to be killed is gone on with."""
    memory.mkdir(parents=True, exist_ok=True)
    agent = Path(banksman.__file__).parent / "testing" / "fake_agent" / "__main__.py"
    return [sys.executable, "-I", "-S", str(agent), f"--fake-script={json.dumps(script)}", f"--fake-memory={memory}"]
