"""Scenes with real limits of control groups: `python cgroup_scenes.py` prints one line of JSON for each.

They need a cgroup v2 with the controllers memory, pids and cpu. `test_cgroups.py` runs them on this machine, or in a
kernel of its own (`tests/uml.py`). Everything is bounded: memory by `HOG_BYTES`, processes by `BOMB_PROCESSES_MAX`, and
time by the caller.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.sessions.crash_host import remote

from banksman import BanksmanError, Command, Host, Session, UsageError, execute
from banksman.process import cgroups
from banksman.testing import fake_agent

MEMORY_BYTES = 64 << 20
HOG_BYTES = 300 << 20
BOMB_PROCESSES_MAX = 200
SESSIONS = 10
ASKS = 10
QUICK = {"eof_grace": 0.1, "grace": 0.5, "linger": 0.05}
# `tail` keeps all of its input, because no line of it ends.
HOG = f"head -c {HOG_BYTES} /dev/zero | tail"
# Forks to its bound, or until the kernel refuses, again and again.
BOMB = f"""
import os, time
until = time.monotonic() + 60
forks = refused = 0
print("armed", flush=True)
while time.monotonic() < until:
    try:
        if forks - refused < {BOMB_PROCESSES_MAX}:
            forks += 1
            if os.fork() == 0:
                time.sleep(60)
                os._exit(0)
    except OSError:
        refused += 1
        if refused == 1:
            open("refused", "w").close()
        time.sleep(0.001)
"""
# The tool of an agent begins when this file is there.
TOOL = "while [ ! -e {go} ]; do sleep 0.05; done; {what}"


def agent(folder: Path, tool: str = "") -> list[str]:
    """Return the command of an agent with a tool of its own."""
    command = fake_agent.command(evidence=folder / "evidence")
    return ["sh", "-c", f'({tool}) & exec "$@"', "agent", *command] if tool else command


async def answer(session: Session, prompt: str = "one") -> str:
    outcome = await (await session.ask(prompt)).outcome()
    return str(outcome.kind)


def pages_swapped() -> int:
    """Return how many pages this machine has written to its swap."""
    (line,) = (line for line in Path("/proc/vmstat").read_text().splitlines() if line.startswith("pswpout "))
    return int(line.split()[1])


def groups() -> list[str]:
    return [name for name in os.listdir(cgroups.base_folder()) if name.startswith("banksman-tree-")]


# -- commands --------------------------------------------------------------------------------------------------------
async def command_over_its_memory() -> Any:
    done = await execute(["sh", "-c", f"sleep 60 & {HOG}; echo not reached"], limits={"memory_bytes": MEMORY_BYTES})
    return {"ended": done.ended, "signal": done.signal, "stdout": done.stdout.text, "groups": groups()}


async def command_at_its_number_of_processes() -> Any:
    # Each of ten lives at the same time as the others, if the kernel allows it.
    script = "for i in 1 2 3 4 5 6 7 8 9 10; do (sleep 60) & done; echo all"
    done = await execute(["sh", "-c", script], limits={"processes": 5}, timeout=20, linger=0.05)
    return {"stdout": done.stdout.text, "refused": "fork" in done.stderr.text, "swept": len(done.swept)}


async def files_of_a_group() -> Any:
    limits = {"memory_bytes": MEMORY_BYTES, "processes": 7, "cpus": 0.5}
    async with Host() as host:
        command = await host.start(["sleep", "60"], limits=limits)
        assert isinstance(command, Command)
        assert command.pid is not None
        usage = cgroups.usage(command.pid)
        assert usage is not None
        names = ("memory.max", "memory.swap.max", "memory.oom.group", "pids.max", "cpu.max")
        found = {name: Path(usage.path, name) for name in names}
        files = {name: path.read_text().strip() for name, path in found.items() if path.exists()}
        await command.stop()
        shown = (usage.memory_bytes_max, usage.processes_max, usage.cpus_max, usage.processes)
        measured = (usage.memory_bytes or 0) > 0 and usage.cpu_seconds is not None
        return {"files": files, "shown": shown, "measured": measured, "left": os.path.exists(usage.path)}


# -- sessions --------------------------------------------------------------------------------------------------------
async def one_of_ten_sessions_without_memory() -> Any:
    with TemporaryDirectory() as name:
        folder = Path(name)
        tool = TOOL.format(go=folder / "go", what=f"{HOG}; sleep 60")
        async with Host("memory:") as host:
            sessions: list[Session] = []
            for number in range(SESSIONS):
                place = folder / str(number)
                place.mkdir()
                command = agent(place, tool if number == 0 else "")
                how: dict[str, Any] = {"command": command, "cwd": str(place), "options": QUICK}
                sessions.append(await host.open("claude", **how, limits={"memory_bytes": MEMORY_BYTES}))
            first = [await answer(session) for session in sessions]
            swapped = pages_swapped()
            pids = [session.status().pids for session in sessions]
            running = [await session.ask("@@hang") for session in sessions[:1]]
            others = [await session.ask(f"@@touch {folder / 'asked'}\n@@hang") for session in sessions[1:2]]
            (folder / "go").touch()
            lost = await running[0].outcome()
            # One of the others is in the middle of a turn meanwhile.
            await others[0].interrupt()
            after = [await answer(session) for session in sessions[1:]]
            events = [event async for event in sessions[0].events(0, waits=False)]
            exits = [event.body for event in events if event.kind == "process.exited"]
            same = [session.status().pids for session in sessions[1:]] == pids[1:]
            swapped = pages_swapped() - swapped
            again = await answer(sessions[0], "are you back?")
        kind = getattr(lost.error, "kind", None)
        told = {"kind": lost.kind, "error": kind, "text": str(lost.error), "exits": exits}
        return {
            "first": first,
            "lost": told,
            "after": after,
            "same": same,
            "has_swap": len(Path("/proc/swaps").read_text().splitlines()) > 1,
            "swapped": swapped,
            "again": again,
            "left": groups(),
        }


async def fork_bomb_beside_asks() -> Any:
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "bomb.py").write_text(BOMB)
        bomb = f"cd {folder}; exec {sys.executable} -S bomb.py"
        command = agent(folder, TOOL.format(go=folder / "go", what=bomb))
        async with Host("memory:") as host:
            how: dict[str, Any] = {"cwd": name, "options": QUICK, "limits": {"processes": 40}}
            bad = await host.open("claude", command=command, **how)
            good = await host.open("claude", command=agent(folder), **how)
            await answer(bad)
            await answer(good)
            before = await latencies(good)
            (folder / "go").touch()
            while not (folder / "refused").exists():  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            usage = cgroups.usage(bad.status().pids[0])
            during = await latencies(good)
            still = (folder / "refused").exists() and bad.status().pids != ()
            await bad.close()
            after = await latencies(good)
            return {
                **{"before": before, "during": during, "after": after, "still": still},
                **{"processes": usage and (usage.processes, usage.processes_max), "left": len(groups())},
            }


async def latencies(session: Session) -> list[float]:
    """Ask one after the other. An ask without an answer is the end of the scene."""
    found: list[float] = []
    for _ in range(ASKS):
        began = time.monotonic()
        assert await answer(session) == "done"
        found.append(round(time.monotonic() - began, 4))
    return found


# -- the next host ---------------------------------------------------------------------------------------------------
async def agent_without_memory_at_the_next_host() -> Any:
    """The first host has handed the agent over, or was killed. Then the agent runs out of memory.

    After the hand-over that is at the next host, and after the kill before the next host comes.
    """
    return {way: await lost_at_next_host(way) for way in ("handed over", "crashed")}


async def lost_at_next_host(way: str) -> Any:
    with TemporaryDirectory() as name:
        folder, store = Path(name), Path(name, "store.db")
        os.environ["XDG_STATE_HOME"] = str(folder / "state")
        go, reached = folder / "go", folder / "reached"
        how: dict[str, Any] = {"cwd": name, "options": QUICK, "limits": {"memory_bytes": MEMORY_BYTES}}
        async with AsyncExitStack() as hosts:
            host = await hosts.enter_async_context(remote(store, "first", "crash", 100.0))
            session = await host.open(command=agent(folder, TOOL.format(go=go, what=HOG)), **how)
            turn = await host.ask(session, f"@@touch {reached}\n@@hang")
            while not reached.exists():  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            # The host has noted that the prompt is written.
            await host.ping()
            (group,) = groups()
            if way == "handed over":
                await host.call("hand_over", hold_seconds=100.0)
                await host.leave()
            else:
                host.kill()
                go.touch()
                # The keeper removes the group with its tree.
                while Path(cgroups.base_folder(), group).exists():  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            following = await hosts.enter_async_context(remote(store, "next", "crash", 100.0))
            taken = await following.call("take_up")
            go.touch()
            await following.call("result", session=session, turn=turn)
            await following.leave()
        async with Host(f"sqlite:{store}") as reader:
            found = reader.session(session)
            outcome = await (await found.turn(turn)).outcome()
            bodies = [(event.kind, event.body) async for event in found.events(0, waits=False)]
        exits = [body for kind, body in bodies if kind == "process.exited"]
        told = {"kind": outcome.kind, "error": getattr(outcome.error, "kind", None), "exits": exits}
        adopted = [kind for kind, _body in bodies].count("process.adopted")
        return {**told, "taken": taken == [session], "adopted": adopted, "left": groups()}


# -- places ----------------------------------------------------------------------------------------------------------
async def place_of_a_service() -> Any:
    """A host that is a process of a service's group cannot limit. A host one level deeper can."""
    service = Path(cgroups.base_folder(), "service")
    found: dict[str, Any] = {}
    for name in (".", cgroups.HOST):
        (service / name).mkdir(parents=True, exist_ok=True)
        Path(cgroups.base_folder(), "cgroup.subtree_control").write_text("+memory +pids +cpu")
        found[name] = await in_group(service / name)
    (service / cgroups.HOST).rmdir()
    service.rmdir()
    return found


async def in_group(group: Path) -> Any:
    script = f"""
import asyncio
open({str(group / "cgroup.procs")!r}, "w").write("0")
from banksman import UsageError, execute
try:
    done = asyncio.run(execute(["sh", "-c", "grep ^0: /proc/self/cgroup"], limits={{"memory_bytes": {MEMORY_BYTES}}}))
    print(done.ended, done.stdout.text.strip())
except UsageError as exc:
    print(exc)
"""
    done = await execute([sys.executable, "-c", script])
    return done.stdout.text.strip() or done.stderr.text[-500:]


SCENES: dict[str, Callable[[], Coroutine[Any, Any, Any]]] = {
    scene.__name__: scene
    for scene in (
        *(command_over_its_memory, command_at_its_number_of_processes, files_of_a_group),
        *(one_of_ten_sessions_without_memory, fork_bomb_beside_asks, agent_without_memory_at_the_next_host),
        place_of_a_service,
    )
}


def main(names: list[str]) -> None:
    for name in names or SCENES:
        began = time.monotonic()
        try:
            seen: Any = asyncio.run(SCENES[name]())
        except (BanksmanError, AssertionError, UsageError, OSError) as exc:
            seen = {"failed": repr(exc)}
        print(
            "SCENE",
            json.dumps({"scene": name, "seconds": round(time.monotonic() - began, 1), "seen": seen}),
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1:])
