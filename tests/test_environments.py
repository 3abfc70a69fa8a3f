"""Variables with secrets that a child gets, for every way to start one.

An agent, its hooks and its terminals get the keys that its profile names, and no other. What a caller starts has the
caller's environment, unless the caller is a client of the server: see docs/security.md#environment-variables.
`tests/sessions/test_containment.py` has the restarts and take-overs of every profile.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.cli.acp.acp_client import Editor
from tests.cluster import conftest as cluster
from tests.server.kit import TOKEN, Served
from tests.sessions.helpers import QUICK
from tests.sessions.test_containment import FOREIGN, KEYS, VALUE, die, secrets_below
from tests.thorough import thorough

import banksman
import banksman.asyncio
import banksman.threads
from banksman import Host, Kind
from banksman.acp import spawn_stdio_transport
from banksman.claude_sdk.supervised_process import open_process
from banksman.core.session import event as kinds
from banksman.server.ops import server_hand_over
from banksman.sessions import known_agents
from banksman.testing import fake_acp, fake_agent, fake_codex
from banksman.testing.fake_agent import Evidence
from banksman.testing.nats_servers import Servers

nats_one = cluster.nats_one
prefix = cluster.prefix

SOURCE = Path(banksman.__file__).parent
# Calls that start a process, or that decide what it is started with.
CALLS = {
    *(
        "execute",
        "prepare",
        "launch_of",
        "GuardSettings",
        "create_subprocess_exec",
        "create_subprocess_shell",
        "Popen",
        "system",
    ),
    *("subprocess.run", "check_call", "check_output", "posix_spawn", "posix_spawnp", "fork", "forkpty"),
    *("execl", "execle", "execlp", "execlpe", "execv", "execve", "execvp", "execvpe"),
}
MODULES = ("os", "syscalls", "subprocess", "asyncio", "launch", "pty")
# Each function of the source that does so, with the tests of this module.
COMMANDS = "test_command_has_the_environment_of_its_caller"
TERMINAL = "test_terminal_has_the_secrets_of_the_profile"
SCRUBBED = "test_command_has_no_secret_with_the_scrub"
HOOKS = "test_hook_has_the_secrets_of_the_profile"
PLACES = {
    "acp.py spawn_stdio_transport": "test_agent_of_a_drop_in_has_the_variables_of_its_package",
    "asyncio/popen_keywords.py launch_of": COMMANDS,
    "asyncio/process.py _create": COMMANDS,
    "claude_sdk/supervised_process.py check_launch": "test_agent_of_a_drop_in_has_the_variables_of_its_package",
    "cli/commands/exec.py _order": "test_program_of_a_shell_has_its_environment",
    "cli/commands/guard.py _settings": "test_program_of_a_shell_has_its_environment",
    "commands/command_starter.py CommandStarter.start": SCRUBBED,
    "commands/options.py launch_of": SCRUBBED,
    "commands/output_watch.py MatcherProcess.__init__": "test_no_helper_has_a_secret",
    "runtime/execute.py execute": SCRUBBED,
    "sessions/session_spec.py SessionSpec._prepare": "test_agent_of_a_server_has_the_secrets_of_its_profile",
    "sessions/session_spec.py SessionSpec.hook_launch": HOOKS,
    "sessions/workspace/terminals.py Terminals._prepared": TERMINAL,
    "cli/commands/agents.py _version": "test_program_that_a_verb_looks_at_has_no_secret",
    "cli/doctor/machine.py trial": "test_program_that_a_verb_looks_at_has_no_secret",
    "server/ops/server_hand_over.py kill_mode": "test_service_manager_is_asked_without_secrets",
    # Banksman itself: the doctor of a bug report, and the next version of the server.
    "server/api/export_routes.py _doctor": "",
    "server/ops/upgrade.py ServerUpgrade.check": "",
    "server/ops/upgrade.py ServerUpgrade.become": "",
    # They carry out what the functions above have decided.
    "guard/start.py start_keeper": "",
    "process/keeper/spawn.py spawn": "",
    "process/keeper/spawn.py _fork_exec": "",
    "process/keeper/spawn.py _become": "",
    "process/keeper/zygote.py Zygote._fork": "",
    "process/portable.py _spawn": "",
    # Helpers. The one that signals for another user has a fixed environment, and `ps` is that of macOS.
    "process/zygote_client.py _start": "test_no_helper_has_a_secret",
    "process/keeper/sweep.py Helper._run": "",
    "process/portable.py _ps": "",
}
SHOW = ["sh", "-c", "cat /proc/$$/environ"]


@pytest.fixture(autouse=True)
def secrets(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Variables of this process that hold secrets, and of every server and program that a test starts."""
    names = {*FOREIGN, *KEYS}
    for name in names:
        monkeypatch.setenv(name, f"{VALUE}{name}")
    return names


def secrets_in(environment: str) -> set[str]:
    """Return the secrets in an environment, by their values: the names may be others."""
    return {*re.findall(f"{VALUE}([A-Z_]+)", environment)}


def kept(agent: str) -> set[str]:
    return set(known_agents.load(agent).keep)


def fake(agent: str, folder: Path) -> list[str]:
    """Return a fake agent in the dialect of this agent."""
    fakes = {"claude": fake_agent.command, "codex": fake_codex.command}
    make: Any = fakes.get(known_agents.load(agent).dialect.name, fake_acp.command)
    return make(evidence=folder / agent, memory=folder / f"{agent}-memory")


def secrets_of(agent: str, folder: Path) -> list[set[str]]:
    """Return the secrets that each process of a fake agent has had."""
    return [{*process.env} & {*FOREIGN, *KEYS} for process in Evidence(folder / agent).processes]


# -- the places ------------------------------------------------------------------------------------------------------
def test_every_place_that_starts_a_process_is_known() -> None:
    found: set[str] = set()
    for path in SOURCE.rglob("*.py"):
        place, text = path.relative_to(SOURCE), path.read_text()
        # The check of the calls in the prepared order, and the fakes.
        # Those of the store are of SQL.
        is_other = place.parts[0] in ("testing", "demo", "store") or place == Path("process/launch.py")
        if not is_other and any(f"{call}(" in text for call in CALLS):
            found |= {f"{place} {function}" for function in starts(ast.parse(text))}
    assert found == PLACES.keys()
    assert {name for name in PLACES.values() if name} <= globals().keys()


def starts(node: ast.AST, function: str = "") -> set[str]:
    """Return the functions that make such a call."""
    found: set[str] = set()
    for child in ast.iter_child_nodes(node):
        is_scope = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        inner = f"{function}.{child.name}".strip(".") if is_scope else function
        if isinstance(child, ast.Call) and is_start(ast.unparse(child.func)):
            found.add(inner)
        found |= starts(child, inner)
    return found


def is_start(called: str) -> bool:
    module, _, name = called.rpartition(".")
    # The fork of a session is none of a process.
    return called in CALLS or (module in MODULES and name in CALLS)


# -- commands --------------------------------------------------------------------------------------------------------
async def by_execute(scrub: tuple[str, ...] = ()) -> str:
    return (await banksman.execute(SHOW, scrub=scrub)).stdout.text


async def by_start(scrub: tuple[str, ...] = ()) -> str:
    async with Host("memory:") as host:
        command = await host.start(SHOW, scrub=scrub)
        return (await command.wait()).stdout.text


async def by_threads(scrub: tuple[str, ...] = ()) -> str:
    return banksman.threads.execute(SHOW, scrub=scrub).stdout.text


async def by_threads_host(scrub: tuple[str, ...] = ()) -> str:
    with banksman.threads.Host("memory:") as host:
        return host.start(SHOW, scrub=scrub).wait().stdout.text


async def by_asyncio() -> str:
    process = await banksman.asyncio.create_subprocess_exec(*SHOW, stdout=banksman.asyncio.PIPE)
    return (await process.communicate())[0].decode()


async def by_asyncio_shell() -> str:
    process = await banksman.asyncio.create_subprocess_shell(SHOW[-1], stdout=banksman.asyncio.PIPE)
    return (await process.communicate())[0].decode()


@pytest.mark.parametrize("start", [by_execute, by_start, by_threads, by_threads_host])
async def test_command_has_no_secret_with_the_scrub(start: Callable[..., Awaitable[str]]) -> None:
    environment = await start(scrub=("secrets", "banksman"))
    assert "PATH=" in environment
    assert secrets_in(environment) == set()


@pytest.mark.parametrize(
    "start", [by_execute, by_start, by_threads, by_threads_host, by_asyncio, by_asyncio_shell], ids=lambda f: f.__name__
)
async def test_command_has_the_environment_of_its_caller(
    start: Callable[..., Awaitable[str]], secrets: set[str]
) -> None:
    assert secrets_in(await start()) == secrets


async def test_agent_of_a_drop_in_has_the_variables_of_its_package() -> None:
    """Those that the package passes on: `acp` a few by name, `claude-agent-sdk` its own choice."""
    async with spawn_stdio_transport(*SHOW) as (reader, _writer, _process):
        environment = (await reader.read()).decode()
        assert "PATH=" in environment
        assert secrets_in(environment) == set()
    process = await open_process(SHOW, cwd=None, env={"GIVEN": "1"}, user=None)
    assert process.stdout is not None
    environment = b"".join([data async for data in process.stdout]).decode()
    await process.wait()
    assert "GIVEN=1" in environment
    assert secrets_in(environment) == set()


@pytest.mark.parametrize("verb", ["exec", "guard"])
def test_program_of_a_shell_has_its_environment(verb: str, secrets: set[str]) -> None:
    assert secrets_in(cli(verb, "--", *SHOW)) == secrets


def cli(*words: str, **variables: str) -> str:
    return run_cli(words, variables)


def run_cli(words: Sequence[str], variables: Mapping[str, str], codes: Collection[int] = (0,)) -> str:
    argv = [sys.executable, "-m", "banksman", *words]
    env = {**os.environ, "PYTHONPATH": str(SOURCE.parent), **variables}
    done = subprocess.run(argv, capture_output=True, text=True, env=env, timeout=60, check=False)
    assert done.returncode in codes, done.stderr
    return done.stdout


@pytest.mark.parametrize(("verb", "program"), [("agents --versions", "claude"), ("doctor", "sh")])
def test_program_that_a_verb_looks_at_has_no_secret(tmp_path: Path, verb: str, program: str) -> None:
    """Neither the user's, nor those in Banksman's own variables, which have names of their own."""
    note, real = tmp_path / "note", shutil.which("sh")
    (tmp_path / "bin").mkdir()
    file = tmp_path / "bin" / program
    file.write_text(f'#!{real}\ncat /proc/$$/environ > "{note}"\nexec {real} "$@"\n')
    file.chmod(0o755)
    variables = {name: str(tmp_path / name) for name in ("XDG_STATE_HOME", "XDG_CONFIG_HOME")}
    variables["PATH"] = f"{file.parent}:{os.environ['PATH']}"
    variables["BANKSMAN_STORE"] = f"sqlite:{tmp_path}/{VALUE}STORE"
    run_cli(verb.split(), variables, codes=(0, 1))
    assert note.exists()
    assert secrets_in(note.read_text()) == set()


async def test_service_manager_is_asked_without_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    note = tmp_path / "note"
    file = tmp_path / "systemctl"
    file.write_text(f'#!/bin/sh\ncat /proc/$$/environ > "{note}"\necho mixed\n')
    file.chmod(0o755)
    (tmp_path / "cgroup").write_text("0::/system.slice/house.service\n")
    monkeypatch.setattr(server_hand_over, "CGROUP", tmp_path / "cgroup")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SYSTEMD_EXEC_PID", str(os.getpid()))
    assert await server_hand_over.kill_mode() == "mixed"
    assert secrets_in(note.read_text()) == set()


async def test_no_helper_has_a_secret() -> None:
    """The zygote, its keepers, and the process that searches the output of a command."""
    async with Host("memory:") as host:
        command = await host.start(["sh", "-c", "echo said; sleep 1000"], grace=0.1, scrub=("secrets", "banksman"))
        await command.watch("said")
        found = secrets_below()
        await command.stop()
    assert len(found) >= 5
    assert {pid: names for pid, names in found.items() if names} == {}


# -- agents of the library -------------------------------------------------------------------------------------------
async def test_hook_has_the_secrets_of_the_profile(tmp_path: Path) -> None:
    note = ["sh", "-c", 'cat /proc/$$/environ > "$0"']
    hooks: Any = {name: [*note, str(tmp_path / name)] for name in ("on_open", "on_close")}
    async with Host("memory:") as host:
        session = await host.open("claude", command=fake("claude", tmp_path), cwd=tmp_path, options=QUICK, **hooks)
        await session.close()
    for name in hooks:
        assert secrets_in((tmp_path / name).read_text()) == kept("claude")


async def test_fork_and_fall_back_have_the_secrets_of_their_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The keys are those of the agent that runs, and not those of the first one."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    agents = tmp_path / "banksman" / "agents"
    agents.mkdir(parents=True)
    (agents / "first.toml").write_text('extends = "claude"\ncommand = ["/no/such/agent"]\n')
    (agents / "spare.toml").write_text(f'extends = "codex"\ncommand = {json.dumps(fake("codex", tmp_path))}\n')
    async with Host("memory:") as host:
        session = await host.open("first", cwd=tmp_path, fallback=["spare"], options=QUICK)
        assert (await (await session.ask("one")).outcome()).kind is Kind.DONE
        assert secrets_of("codex", tmp_path) == [kept("codex")]
        session = await host.open("claude", command=fake("claude", tmp_path), cwd=tmp_path, options=QUICK)
        await (await session.ask("one")).outcome()
        fork = await host.fork(session)
        assert (await (await fork.ask("two")).outcome()).kind is Kind.DONE
        assert secrets_of("claude", tmp_path) == [kept("claude")] * 2


@thorough
async def test_agent_that_was_handed_over_has_the_secrets_of_its_profile(tmp_path: Path) -> None:
    """The next host has its process, and starts the one after it."""
    store, go = f"sqlite:{tmp_path / 'log.db'}", tmp_path / "go"
    async with Host(store) as host:
        session = await host.open("claude", command=fake("claude", tmp_path), cwd=tmp_path, options=QUICK)
        turn = await session.ask(f"@@say begun\n@@wait {go}")
        async for event in session.events(0, waits=True):
            if event.kind == kinds.UPDATE and b"begun" in event.data:
                break
        await host.drain(hand_over=True)
    async with Host(store) as host:
        session = await host.take_over(session.id)
        go.touch()
        assert (await (await session.turn(turn.id)).outcome()).kind is Kind.DONE
        await die(session)
        await (await session.ask("two")).outcome()
    assert secrets_of("claude", tmp_path) == [kept("claude")] * 2


async def test_terminal_has_the_secrets_of_the_profile(tmp_path: Path) -> None:
    async with Host("memory:") as host:
        session = await host.open("gemini", command=fake("gemini", tmp_path), cwd=tmp_path, options=QUICK)
        outcome = await (await session.ask("@@terminal env")).outcome()
        assert secrets_in(str(outcome.text)) == kept("gemini")


@thorough
async def test_agent_on_a_cluster_has_the_secrets_of_its_profile(
    tmp_path: Path, nats_one: Servers, prefix: str
) -> None:
    async with Host(nats_one.store(prefix)) as host:
        session = await host.open("claude", command=fake("claude", tmp_path), cwd=tmp_path, options=QUICK)
        await (await session.ask("one")).outcome()
        assert secrets_of("claude", tmp_path) == [kept("claude")]


# -- agents and commands of a server ---------------------------------------------------------------------------------
@thorough
def test_agent_of_a_server_has_the_secrets_of_its_profile(tmp_path: Path) -> None:
    """For every profile: at the start, in the next host after a crash, and after the death of the agent there."""
    with Served(tmp_path / "server", survive="crash") as served:
        sessions = {
            agent: served.post("/v1/sessions", {"agent": agent, "command": fake(agent, tmp_path)})["id"]
            for agent in known_agents.packaged()
        }
        for session in sessions.values():
            assert served.outcome(session, served.ask(session, "one"))["kind"] == "done"
        pids = {session: pids_of(served, session) for session in sessions.values()}
        served.kill()
        served.start()
        for session, before in pids.items():
            assert served.outcome(session, served.ask(session, "two"))["kind"] == "done"
            # The same process, which the next host has taken up.
            assert pids_of(served, session) == before
            os.kill(before[0], signal.SIGKILL)
            assert served.outcome(session, served.ask(session, "three"))["kind"] in ("done", "unknown", "failed")
            assert served.outcome(session, served.ask(session, "four"))["kind"] == "done"
            assert pids_of(served, session) != before
    for agent in sessions:
        found = secrets_of(agent, tmp_path)
        assert len(found) >= 2
        assert all(names == kept(agent) for names in found), agent


def pids_of(served: Served, session: str) -> list[int]:
    return served.get(f"/v1/sessions/{session}/why")["pids"]


@thorough
def test_verbs_start_agents_with_the_secrets_of_the_profile(tmp_path: Path) -> None:
    """By a server, and by a host inside of the program."""
    with Served(tmp_path / "server") as served:
        environment = {"BANKSMAN_TOKEN": TOKEN, "BANKSMAN_URL": served.url}
        cli("run", "claude", "one", "--cwd", str(tmp_path), "--", *fake("claude", tmp_path), **environment)
        cli("open", "codex", "--name", "n", "--", *fake("codex", tmp_path), **environment)
        cli("ask", "n", "one", **environment)
        cli("ask", "m", "one", "--open", "qwen", "--", *fake("qwen", tmp_path), **environment)
    state = {"XDG_STATE_HOME": str(tmp_path / "state"), "XDG_CONFIG_HOME": str(tmp_path / "config")}
    cli("run", "gemini", "one", "--store", f"sqlite:{tmp_path / 'own.db'}", "--", *fake("gemini", tmp_path), **state)
    for agent in ("claude", "codex", "gemini", "qwen"):
        assert secrets_of(agent, tmp_path) == [kept(agent)], agent


@thorough
@pytest.mark.parametrize("is_served", [True, False])
def test_agent_of_an_editor_has_the_secrets_of_its_profile(tmp_path: Path, is_served: bool) -> None:
    """By a server, and by a host inside of `banksman acp`."""
    with ExitStack() as stack:
        served = stack.enter_context(Served(tmp_path / "server")) if is_served else None
        command = fake("kimi", tmp_path)
        editor = stack.enter_context(
            Editor(tmp_path / "editor", served=served, words=["--agent", "kimi"], command=command)
        )
        editor.prompt(editor.new(), "one")
    assert secrets_of("kimi", tmp_path) == [kept("kimi")]


@thorough
def test_command_of_a_client_has_no_secret_of_the_server(tmp_path: Path) -> None:
    with Served(tmp_path / "server") as served:
        for more in ({}, {"pty": True}, {"env": {"OWN_API_KEY": "own"}}):
            id = served.post("/v1/commands", {"argv": ["env"], **more})["id"]
            served.get(f"/v1/commands/{id}?wait=30")
            said = served.get(f"/v1/commands/{id}/output")["text"]
            assert "PATH=" in said
            assert secrets_in(said) == set()
