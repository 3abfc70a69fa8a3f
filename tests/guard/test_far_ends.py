"""No process of an agent behind ssh or `docker exec` is left if a guard begins its command there.

The agent has a tool in a session of its own that ignores TERM and HUP. Without a guard, the tool survives.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.guard import far_end
from tests.process import other_user
from tests.process.helpers import NOBODY, alive, wait_until
from tests.sessions.helpers import QUICK
from tests.sessions.test_containment_kill import HOST, TOOL

from banksman import Host, Kind, Session
from banksman.sessions.command_prefix import SANDBOXES
from banksman.testing import fake_agent
from banksman.testing.fake_agent import Evidence

pytestmark = pytest.mark.thorough

GUARD = "banksman guard --grace 0.5 --"
SSH = ("ssh", "far", "cd {cwd} && exec GUARD {command}")
NOBODY_THERE = "ssh as nobody"
WORDS = {
    "ssh": SSH,
    NOBODY_THERE: SSH,
    "docker": ("docker", "exec", "-i", "--workdir", "{cwd}", "{box}", "GUARD"),
}


def works(name: str) -> bool:
    if name != "docker":
        return shutil.which("sshd") is not None and (name == "ssh" or not other_user.why_not())
    tried = subprocess.run([*SANDBOXES["unshare"], "true"], capture_output=True, check=False)
    return tried.returncode == 0


class Far:
    """A far end, the prefixes that reach it, and a folder there."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.folder = folder
        self.uid = NOBODY if name == NOBODY_THERE else os.geteuid()
        self.box = str(folder / "far") if name == "docker" else "far"

    def wrap(self, *, is_guarded: bool) -> list[str]:
        words: list[str] = []
        for word in WORDS[self.name]:
            whole = word.replace("{box}", self.box)
            if whole == "GUARD":
                words += [f"{far_end.BIN}/banksman", *GUARD.split()[1:]] if is_guarded else []
            else:
                words.append(whole.replace("GUARD ", f"{GUARD} " if is_guarded else ""))
        return words

    def how(self, marker: str, wrap: Any, cwd: Path | None = None) -> dict[str, Any]:
        """Return how the agent is opened."""
        command = ["sh", "-c", TOOL, marker, *fake_agent.command(evidence=self.folder / marker)]
        command = other_user.reachable(command, self.folder) if self.name == NOBODY_THERE else command
        cwd = cwd or self.folder
        return {"command": command, "cwd": str(cwd), "wrap": wrap, "options": {**QUICK, "grace": 0.5}}


@pytest.fixture(params=WORDS)
def far(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[Far]:
    name: str = request.param
    if not works(name):
        pytest.skip(f"{name} does not work here")
    with ExitStack() as stack:
        if name == NOBODY_THERE:
            folder = stack.enter_context(other_user.folder())
            programs = stack.enter_context(far_end.sshd(folder, is_for_nobody=True))
        else:
            # The path of a socket is short.
            folder = tmp_path / "f"
            folder.mkdir()
            run = far_end.sshd if name == "ssh" else far_end.container
            programs = stack.enter_context(run(folder))
        monkeypatch.setenv("PATH", f"{programs}:{far_end.BIN}:{os.environ['PATH']}")
        yield Far(name, folder)


@pytest.fixture(autouse=True)
def leaves_nothing(marker: str) -> Generator[None]:
    """End what a control has left. Only this test has the marker."""
    yield
    for pid in alive(marker):
        # The tool leads a group, and not all of it has the marker.
        (os.killpg if os.getpgid(pid) == pid else os.kill)(pid, signal.SIGKILL)
    wait_until(lambda: not alive(marker), "the end of the remains")


async def kill_agent(session: Session) -> None:
    """Kill the near end, and wait until the session has seen the end of its tree."""
    os.kill(session.status().pids[0], signal.SIGKILL)
    async for event in session.events(0, waits=True):
        if event.kind == "process.exited":
            return


@pytest.mark.parametrize("is_guarded", [True, False], ids=["guarded", "control"])
@pytest.mark.parametrize("end", ["close", "death"])
async def test_end_of_an_agent_leaves_no_process_at_a_guarded_far_end(
    marker: str, far: Far, end: str, is_guarded: bool
) -> None:
    async with Host("memory:") as host:
        session = await host.open("claude", **far.how(marker, far.wrap(is_guarded=is_guarded)))
        outcome = await (await session.ask("one")).outcome()
        assert outcome.kind is Kind.DONE, outcome.error
        wait_until(lambda: len(alive(marker)) >= 4, "the start of the tool")
        assert far.uid in {os.stat(f"/proc/{pid}").st_uid for pid in alive(marker)}
        if end == "death":
            await kill_agent(session)
        await session.close()
        if is_guarded:
            wait_until(lambda: not alive(marker), "the end of the far tree")
        else:
            # Its TERM, its HUP and its end of input have come, and the tool has ignored them.
            assert alive(marker)


@pytest.mark.parametrize(
    "is_guarded", [pytest.param(True, id="guarded"), pytest.param(False, id="control", marks=pytest.mark.thorough)]
)
def test_death_of_the_host_leaves_no_process_at_a_guarded_far_end(marker: str, far: Far, is_guarded: bool) -> None:
    wanted = far.how(marker, far.wrap(is_guarded=is_guarded))
    with subprocess.Popen([sys.executable, "-c", HOST, json.dumps(wanted)], stdout=subprocess.PIPE) as host:
        assert host.stdout is not None
        assert host.stdout.readline() == b"ready\n"
        near = len(alive(marker))
        host.kill()
        host.wait()
        if is_guarded:
            wait_until(lambda: not alive(marker), "the end of the far tree")
        else:
            wait_until(lambda: len(alive(marker)) < near, "the end of the near tree")
            assert alive(marker)


@pytest.mark.parametrize("wrap", [["ssh", "far"], ["ssh", "far", "exec {command}"], "ssh:far"])
async def test_words_of_an_agent_stay_words_behind_ssh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrap: Any
) -> None:
    """A caller of a server chooses the system prompt. It must not run at the far end."""
    if not works("ssh"):
        pytest.skip("there is no sshd")
    mark = tmp_path / "mark"
    prompt = f'It\'s "odd" $(touch {mark}); touch {mark} `touch {mark}` *\n&& touch {mark}'
    with far_end.sshd(tmp_path) as programs:
        monkeypatch.setenv("PATH", f"{programs}:{far_end.BIN}:{os.environ['PATH']}")
        command = fake_agent.command(evidence=tmp_path / "evidence")
        how: dict[str, Any] = {"command": command, "cwd": str(tmp_path), "options": QUICK}
        async with Host("memory:") as host:
            session = await host.open("claude", wrap=wrap, system_prompt=prompt, **how)
            outcome = await (await session.ask("one")).outcome()
            assert outcome.kind is Kind.DONE, outcome.error
    assert f"--append-system-prompt={prompt}" in Evidence(tmp_path / "evidence").processes[-1].argv
    assert not mark.exists()


async def test_named_prefix_guards_its_far_end(marker: str, far: Far) -> None:
    folder = far.folder / "a folder"
    folder.mkdir()
    async with Host("memory:") as host:
        session = await host.open("claude", **far.how(marker, f"{far.name.split()[0]}:{far.box}", folder))
        outcome = await (await session.ask("one")).outcome()
        assert outcome.kind is Kind.DONE, outcome.error
        # The agent works in the folder, and a guard is above it.
        found = [Path(f"/proc/{pid}/cwd").resolve() for pid in alive(marker)]
        assert folder in found
        await session.close()
        wait_until(lambda: not alive(marker), "the end of the far tree")
