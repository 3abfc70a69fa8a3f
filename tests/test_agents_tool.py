"""tools/agents.py installs each agent once, completely, and for all checkouts.

The `npm` here is a script of the test. It downloads nothing and records its calls, because the registry and its hashes
are the responsibility of npm. The test runs the tool as a process, as make does.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.thorough import thorough

pytestmark = thorough

TOOL = Path(__file__).parent.parent / "tools" / "agents.py"
SECONDS_MAX = 60
# The script creates the files that the lock in its folder asks for, and records the call in a file. If a `gate` exists,
# the script waits until the gate opens.
NPM = """#!{python} -IS
import json, os, sys
place = {place!r}
assert sys.argv[1] == "ci" and "--ignore-scripts" in sys.argv, sys.argv
packages = json.load(open("package-lock.json"))["packages"]
assert json.load(open("package.json")) == packages.pop("")
with open(place + "/calls", "a") as calls:
    calls.write(" ".join(sorted(packages)) + chr(10))
if os.path.exists(place + "/gate"):
    open(place + "/gate").read()
if os.path.exists(place + "/broken"):
    sys.exit(1)
for package, pin in packages.items():
    assert pin["integrity"].startswith("sha512-") and set(pin) == {{"version", "integrity"}}
    for name in ("claude", "bin/codex-acp", "bin/opencode", "bundle/gemini.js", "dist/cli.js", "bin/node",
                 *("vendor/%s-unknown-linux-musl/bin/codex" % machine for machine in ("x86_64", "aarch64"))):
        path = package + "/" + name
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w") as file:
            file.write(pin["version"])
        os.chmod(path, 0o755)
"""


@dataclass(frozen=True, slots=True)
class Place:
    """Simulated machine for the tool: a PATH and a cache."""

    folder: Path

    def env(self, **more: str) -> dict[str, str]:
        return {"PATH": str(self.folder / "bin"), "XDG_CACHE_HOME": str(self.folder / "cache"), **more}

    def start(self, **more: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-IS", str(TOOL), "install"]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, env=self.env(**more), stdout=pipe, stderr=subprocess.STDOUT, text=True)

    def install(self, **more: str) -> tuple[int, str]:
        with self.start(**more) as process:
            said, _ = process.communicate(timeout=SECONDS_MAX)
        return process.returncode, said

    def links(self) -> Path:
        status, said = self.install()
        assert status == 0, said
        return Path(said.splitlines()[-1])

    @property
    def agents(self) -> Path:
        return self.folder / "cache" / "banksman" / "agents"

    def calls(self) -> int:
        """Return the number of npm calls."""
        path = self.folder / "calls"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def add(self, name: str, text: str) -> None:
        path = self.folder / "bin" / name
        path.write_text(text)
        path.chmod(0o755)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    made = Place(tmp_path)
    (tmp_path / "bin").mkdir()
    made.add("npm", NPM.format(python=sys.executable, place=str(tmp_path)))
    made.add("node", "#!/bin/sh\necho v22.1.0\n")
    return made


def test_agents_are_installed_once_and_outside_the_checkout(place: Place) -> None:
    links = place.links()
    assert links.parent == place.agents
    pinned = set(json.loads((TOOL.parent.parent / "requirements" / "agents.json").read_text()))
    names = {path.name for path in links.iterdir()}
    assert names
    assert names <= pinned
    assert place.calls() == len(names)
    assert all(os.access(link, os.X_OK) for link in links.iterdir())
    # The second run fetches nothing. The folder has one folder per agent, the folder of links and the lock.
    assert place.links() == links
    assert place.calls() == len(names)
    assert {path.name.partition("-")[0] for path in place.agents.iterdir()} == {
        ".lock",
        "links",
        *(name.partition("-")[0] for name in names),
    }


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["gone", "cut short", "no stamp", "bad stamp", "not executable"])
def test_broken_agent_install_is_noticed_and_repaired(place: Place, how: str) -> None:
    links = place.links()
    count = place.calls()
    program = (links / "claude").resolve()
    stamp = program.parents[3] / ".stamp.json"
    if how == "gone":
        program.unlink()
    elif how == "cut short":
        os.truncate(program, 1)
    elif how == "no stamp":
        stamp.unlink()
    elif how == "bad stamp":
        stamp.write_text("{")
    else:
        program.chmod(0o644)
    assert place.links() == links
    assert place.calls() == count + 1
    assert program.read_text() == "2.1.325"
    assert os.access(program, os.X_OK)
    place.links()
    assert not list(place.agents.glob(".unfinished-*"))


def test_broken_agent_links_are_repaired(place: Place) -> None:
    links = place.links()
    (links / "codex").unlink()
    (links / "codex").write_text("something else")
    assert place.links() == links
    assert (links / "codex").is_symlink()


def test_killed_agent_install_leaves_nothing_that_counts(place: Place) -> None:
    gate = place.folder / "gate"
    os.mkfifo(gate)
    with place.start() as process:
        # The open of a FIFO returns when the other end opens too. So npm is in the middle of the install here.
        fd = os.open(gate, os.O_WRONLY)
        process.send_signal(signal.SIGKILL)
        process.wait(SECONDS_MAX)
        (rest,) = place.agents.glob(".unfinished-*")
        gate.unlink()
        os.close(fd)
        assert process.stdout is not None
        process.stdout.read()  # Ends when npm, which holds the other end, has exited too.
    place.links()
    assert not rest.exists()


def test_concurrent_agent_installs_install_once(place: Place) -> None:
    gate = place.folder / "gate"
    os.mkfifo(gate)
    with place.start() as first:
        fd = os.open(gate, os.O_WRONLY)
        with place.start() as second:
            gate.unlink()
            os.close(fd)
            said = [process.communicate(timeout=SECONDS_MAX)[0] for process in (first, second)]
    assert (first.returncode, second.returncode) == (0, 0), said
    lines = [text.splitlines() for text in said]
    assert lines[0][-1] == lines[1][-1]
    assert place.calls() == len(list(Path(lines[0][-1]).iterdir()))


def test_failed_agent_fetch_is_reported_and_retried(place: Place) -> None:
    (place.folder / "broken").touch()
    status, said = place.install()
    assert status == 1
    assert ": npm ci ended with 1" in said
    (place.folder / "broken").unlink()
    place.links()


def test_agents_tool_ignores_a_relative_cache_path(place: Place) -> None:
    status, said = place.install(XDG_CACHE_HOME="cache", HOME=str(place.folder / "home"))
    assert status == 0, said
    assert Path(said.splitlines()[-1]).is_relative_to(place.folder / "home" / ".cache" / "banksman")


@pytest.mark.parametrize("node", [None, "#!/bin/sh\necho v18.20.0\n", "#!/bin/sh\nexit 1\n"])
def test_agents_tool_warns_of_missing_or_old_node_and_fails_in_ci(place: Place, node: str | None) -> None:
    place.links()
    (place.folder / "bin" / "node").unlink()
    if node is not None:
        place.add("node", node)
    status, said = place.install()
    assert status == 0
    assert "GEMINI NEEDS NODE.JS 20 OR NEWER" in said
    assert "ITS TESTS ARE SKIPPED" in said
    status, said = place.install(CI="true")
    assert status == 1
    assert "GEMINI NEEDS NODE.JS 20 OR NEWER" in said


def test_agents_tool_fails_without_npm_when_it_must_fetch(place: Place) -> None:
    (place.folder / "bin" / "npm").unlink()
    status, said = place.install()
    assert status == 1
    assert "npm is not on PATH" in said


def test_agent_pins_name_no_address() -> None:
    text = (TOOL.parent.parent / "requirements" / "agents.json").read_text()
    assert "://" not in text
    assert "resolved" not in text
