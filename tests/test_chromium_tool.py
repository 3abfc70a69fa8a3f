"""tools/chromium.py finds a browser, installs it where it may, and otherwise reports loudly that it is missing.

The `apt-get` here is a script of the test, and the only program on PATH. The test runs the tool as a process, as make
does.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.thorough import thorough

pytestmark = thorough

TOOL = Path(__file__).parent.parent / "tools" / "chromium.py"
SECONDS_MAX = 60
# Behaves as in a fresh container: an install fails before the package lists are fetched.
APT = """#!{python} -IS
import os, sys
place = {place!r}
with open(place + "/calls", "a") as calls:
    calls.write(" ".join(sys.argv[1:]) + chr(10))
if sys.argv[1] == "update":
    open(place + "/lists", "w").close()
elif not os.path.exists(place + "/lists") or os.path.exists(place + "/broken"):
    print("E: Unable to locate package chromium")
    sys.exit(100)
else:
    os.close(os.open(place + "/chromium", os.O_CREAT | os.O_WRONLY, 0o755))
"""


def run(path: Path, *words: str, tool: Path = TOOL, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-Es", str(tool), *words],
        env={"PATH": str(path), **env},
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )


def apt(place: Path) -> None:
    (place / "apt-get").write_text(APT.format(python=sys.executable, place=str(place)))
    (place / "apt-get").chmod(0o755)


@pytest.mark.parametrize("name", ["chromium", "chromium-browser", "google-chrome"])
def test_chromium_tool_finds_an_installed_browser(tmp_path: Path, name: str) -> None:
    program = tmp_path / name
    program.touch(0o755)
    done = run(tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{program}\n", "")


def test_chromium_tool_takes_only_the_named_browser(tmp_path: Path) -> None:
    (tmp_path / "chromium").touch(0o755)
    mine = tmp_path / "mine"
    mine.touch(0o755)
    assert run(tmp_path, CHROMIUM=str(mine)).stdout == f"{mine}\n"
    apt(tmp_path)
    done = run(tmp_path, CHROMIUM=str(tmp_path / "nowhere"))
    assert done.stdout == ""
    assert "nowhere" in done.stderr
    assert not (tmp_path / "calls").exists()


def test_chromium_tool_warns_of_a_missing_browser_and_fails_in_ci(tmp_path: Path) -> None:
    by_hand, in_ci = run(tmp_path), run(tmp_path, CI="true")
    assert (by_hand.returncode, in_ci.returncode) == (0, 1)
    for done in (by_hand, in_ci):
        assert done.stdout == ""
        assert "NO CHROMIUM" in done.stderr
        assert "apt-get install chromium" in done.stderr


def test_chromium_tool_installs_only_as_root_and_updates_lists_only_if_needed(tmp_path: Path) -> None:
    apt(tmp_path)
    done = run(tmp_path)
    if os.geteuid() != 0:
        assert "not root" in done.stderr
        assert not (tmp_path / "calls").exists()
        return
    assert (done.returncode, done.stdout) == (0, f"{tmp_path / 'chromium'}\n")
    assert [line.split()[0] for line in (tmp_path / "calls").read_text().splitlines()] == [
        "install",
        "update",
        "install",
    ]
    os.unlink(tmp_path / "chromium")
    os.unlink(tmp_path / "calls")
    assert run(tmp_path).returncode == 0
    assert [line.split()[0] for line in (tmp_path / "calls").read_text().splitlines()] == ["install"]


def test_chromium_tool_passes_on_errors_of_apt(tmp_path: Path) -> None:
    apt(tmp_path)
    (tmp_path / "broken").touch()
    done = run(tmp_path, CI="true")
    assert done.returncode == 1
    assert ("Unable to locate package chromium" in done.stderr) is (os.geteuid() == 0)


def test_debian_tool_finds_and_misses_other_programs(tmp_path: Path) -> None:
    tool = TOOL.with_name("debian.py")
    (tmp_path / "fish").touch(0o755)
    done = run(tmp_path, "fish", tool=tool)
    assert (done.returncode, done.stderr) == (0, "")
    done = run(tmp_path, "fish", "zsh", tool=tool)
    assert done.returncode == 0
    assert "NO ZSH" in done.stderr
    assert "FISH" not in done.stderr
    assert run(tmp_path, "zsh", tool=tool, CI="true").returncode == 1
