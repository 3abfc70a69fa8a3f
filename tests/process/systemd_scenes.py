"""Scenes under a real systemd: `python systemd_scenes.py` prints one line of JSON.

It must be a service of systemd with a delegated group, one level deeper. `test_systemd.py` runs it in a kernel of its
own (`tests/uml.py`).
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.process.cgroup_scenes import HOG, MEMORY_BYTES, QUICK
from tests.process.helpers import REPOSITORY, alive, wait_until
from tests.sessions.test_containment_kill import HOST, TOOL

from banksman import Host, execute
from banksman.process import cgroups
from banksman.testing import fake_agent

SCOPE = ["systemd-run", "--scope", "--quiet"]
DELEGATED = """
from banksman.process import cgroups
print(cgroups.is_undelegated(cgroups.base_folder()))
"""


async def delegation() -> Any:
    """What the host finds in its own group, and in scopes with and without a delegation."""
    found: dict[str, Any] = {"why_not": cgroups.why_not(), "service": cgroups.is_undelegated(cgroups.base_folder())}
    for name, words in (("scope", SCOPE), ("delegated scope", [*SCOPE, "-p", "Delegate=yes"])):
        done = await execute([*words, sys.executable, "-c", DELEGATED])
        found[name] = done.stdout.text.strip() or done.stderr.text
    return found


async def command_over_its_memory() -> Any:
    done = await execute(["sh", "-c", f"{HOG}; echo not reached"], limits={"memory_bytes": MEMORY_BYTES})
    return {"ended": done.ended, "stdout": done.stdout.text}


def groups_of(marker: str) -> list[str]:
    """Return the last part of the group of each process with the marker."""
    lines = [Path(f"/proc/{pid}/cgroup").read_text().strip() for pid in alive(marker)]
    return [line.rpartition(".")[2] for line in lines]


async def agent_in_a_scope() -> Any:
    """The prefix is systemd-run. The session is closed, or its host is killed."""
    found: dict[str, Any] = {}
    with TemporaryDirectory() as name:
        how: dict[str, Any] = {"cwd": name, "options": QUICK, "wrap": SCOPE}
        for end in ("close", "death of the host"):
            marker = f"marked-{os.urandom(8).hex()}"
            command = ["sh", "-c", TOOL, marker, *fake_agent.command(evidence=Path(name, marker))]
            if end == "close":
                async with Host("memory:") as host:
                    session = await host.open("claude", command=command, **how)
                    outcome = await (await session.ask("one")).outcome()
                    wait_until(lambda marker=marker: len(alive(marker)) >= 3, "the start of the tool")
                    found[end] = [outcome.kind, sorted({*groups_of(marker)})]
                    await session.close()
            else:
                argv = [sys.executable, "-c", HOST, json.dumps({**how, "command": command})]
                with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
                    assert process.stdout is not None
                    found[end] = [process.stdout.readline().strip()]
                    wait_until(lambda marker=marker: len(alive(marker)) >= 4, "the start of the tool")
                    process.kill()
                    process.wait()
                    wait_until(lambda marker=marker: not alive(marker), "the end of the tree")
            found[end].append(len(alive(marker)))
    return found


# The units of `deploy/`, without what needs a user, a network or folders of an installation.
LEFT_OUT = (
    "User",
    "Wants",
    "StateDirectory",
    "StateDirectoryMode",
    "WorkingDirectory",
    "ReadWritePaths",
    "ProtectHome",
)
UNITS = Path("/run/systemd/system")
STATE = Path("/tmp/server")


def install_units() -> None:
    (STATE / "work").mkdir(parents=True)
    settings = STATE / "config.toml"
    settings.write_text('[serve]\ncallers_choose = ["limits"]\n')
    changed = {
        "ExecStart": f"{sys.executable} -m banksman serve --config {settings}",
        "Environment": f"XDG_STATE_HOME={STATE} HOME={STATE} PYTHONDONTWRITEBYTECODE=1 PYTHONPATH={REPOSITORY}/src",
        "StandardOutput": f"append:{STATE}/log",
        "ReadWritePaths": "/tmp",
    }
    for name in ("banksman.service", "banksman.socket"):
        lines: list[str] = []
        for line in (REPOSITORY / "deploy" / "systemd" / name).read_text().splitlines():
            if line.partition("=")[0] not in {*LEFT_OUT, *changed}:
                lines.append(line.replace(" network-online.target", ""))
            if line == "[Unit]":
                lines.append("DefaultDependencies=no")
            if line == "[Service]":
                lines += [f"{key}={value}" for key, value in changed.items()]
        (UNITS / name).write_text("\n".join(lines))


async def restart_of_the_server() -> Any:
    """`systemctl restart` in the middle of a turn, with the units of `deploy/`.

    The agent has a group with a limit if systemd knows `DelegateSubgroup=`, which is so since 254.
    """
    install_units()
    go = STATE / "go"

    async def run(*words: str) -> str:
        env = {"XDG_STATE_HOME": str(STATE), "HOME": str(STATE)}
        done = await execute(list(words), env=env, cwd=STATE / "work", timeout=90)
        assert done.code == 0, (words, done.stdout.text, done.stderr.text, log())
        return done.stdout.text

    def log() -> str:
        return (STATE / "log").read_text() if (STATE / "log").exists() else ""

    async def why() -> Any:
        return json.loads(await run(*banksman, "why", "n", "--json"))

    banksman = [sys.executable, "-m", "banksman"]
    version = int((await run("systemctl", "--version")).split()[1])
    limit = ["--limit", f"memory_bytes={MEMORY_BYTES}"] if version >= 254 else []
    await run("systemctl", "daemon-reload")
    await run("systemctl", "start", "banksman.socket", "banksman.service")
    await run(*banksman, "open", "claude", "--name", "n", *limit, "--", *fake_agent.command())
    turn = (await run(*banksman, "ask", "n", f"@@say begun\n@@wait {go}\n@@say done", "--no-wait")).strip()
    while "begun" not in await run(*banksman, "log", "n"):
        pass
    before, main_pid = await why(), await run("systemctl", "show", "-p", "MainPID", "banksman")
    await run("systemctl", "restart", "banksman")
    after = await why()
    go.touch()
    while (ended := json.loads(await run(*banksman, "why", "n", "--json")))["holder"] is not None:
        pass
    said = await run(*banksman, "log", "n")
    groups = [each["containment"]["cgroup"] is not None for each in (before, after, ended)]
    found = {
        "is another server": main_pid != await run("systemctl", "show", "-p", "MainPID", "banksman"),
        "is the same agent": before["pids"] == after["pids"] == ended["pids"] != [],
        "phases": [before["phase"], after["phase"]],
        "is done": f"turn.ended {turn}  outcome=done" in said,
        "has its group": groups == [version >= 254] * 3,
    }
    await run(*banksman, "close", "n")
    await run("systemctl", "stop", "banksman.socket", "banksman.service")
    return found


async def main() -> None:
    scenes = (delegation, command_over_its_memory, agent_in_a_scope, restart_of_the_server)
    seen = {scene.__name__: await scene() for scene in scenes}
    print("\nSCENE", json.dumps(seen), flush=True)


if __name__ == "__main__":
    os.environ["XDG_STATE_HOME"] = "/tmp/state"
    asyncio.run(main())
