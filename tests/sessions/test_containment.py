"""What an agent may use: its environment, its user, its limits and its prefix, for every process of a session."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.sessions.helpers import QUICK
from tests.thorough import one_in

from banksman import Event, Host, Kind, Session, UsageError, execute
from banksman.core.session import event as kinds
from banksman.errors import ProgramNotFound
from banksman.server.api.session_routes import processes_below
from banksman.sessions import containment, known_agents
from banksman.sessions.command_prefix import SANDBOXES
from banksman.testing import fake_acp, fake_agent, fake_codex
from banksman.testing.fake_agent import Evidence

# Variables that no profile names, and those that some profile names.
FOREIGN = ("AWS_SECRET_ACCESS_KEY", "DATABASE_URL", "HOUSE_PASSWORD", "SSH_AUTH_SOCK", "BANKSMAN_TOKEN")
KEYS = sorted({name for agent in known_agents.packaged() for name in known_agents.load(agent).keep})
VALUE = "value-of-"

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")


class Scene:
    """A store, and fake agents that have a tool of their own."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.store = f"sqlite:{folder / 'log.db'}"
        monkeypatch.setenv("XDG_CONFIG_HOME", str(folder / "config"))

    def fake(self, agent: str) -> list[str]:
        """The command of a fake agent in the dialect of this agent."""
        fakes = {"claude": fake_agent.command, "codex": fake_codex.command}
        make: Any = fakes.get(known_agents.load(agent).dialect.name, fake_acp.command)
        arguments = {"evidence": self.folder / agent, "memory": self.folder / f"{agent}-memory"}
        return make(**arguments)

    def with_tool(self, agent: str) -> list[str]:
        """The same, with another process that the agent has started."""
        return ["sh", "-c", 'sleep 1000 & exec "$@"', "agent", *self.fake(agent)]

    def profile(self, name: str, text: str) -> None:
        agents = self.folder / "config" / "banksman" / "agents"
        agents.mkdir(parents=True, exist_ok=True)
        (agents / f"{name}.toml").write_text(text)

    async def open(self, host: Host, agent: str = "claude", **how: Any) -> Session:
        how = {"command": self.fake(agent), "options": QUICK, "cwd": str(self.folder), "name": "s", **how}
        return await host.open(agent, **how)

    def argv(self, agent: str = "claude") -> list[str]:
        """The words of the agent's last process."""
        return Evidence(self.folder / agent).processes[-1].argv


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(tmp_path, monkeypatch)


@pytest.fixture
def secrets(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Variables of this process that hold secrets."""
    names = [*FOREIGN, *KEYS]
    for name in names:
        monkeypatch.setenv(name, f"{VALUE}{name}")
    return names


async def answer(session: Session, prompt: str = "one") -> str | None:
    outcome = await (await session.ask(prompt)).outcome()
    assert outcome.kind is Kind.DONE, outcome.error
    return outcome.text


async def events_of(session: Session) -> list[Event]:
    return [event async for event in session.events(0, waits=False)]


async def die(session: Session) -> None:
    """Kill the agent, and wait until the session knows it."""
    seen = len(await events_of(session))
    os.kill(session.status().pids[0], signal.SIGKILL)
    async for event in session.events(seen, waits=True):
        if event.kind == kinds.PROCESS_EXITED:
            return


def tree() -> list[int]:
    """Every process below this one: helpers, agents and their tools."""
    parents: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            try:
                stat = Path(f"/proc/{entry}/stat").read_bytes()
            except OSError:
                continue
            parents[int(entry)] = int(stat[stat.rindex(b")") + 2 :].split()[1])
    found = [os.getpid()]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found[1:]


def secrets_below() -> dict[int, set[str]]:
    """The secrets in the environment of every process below this one."""
    found: dict[int, set[str]] = {}
    for pid in tree():
        try:
            data = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
        except OSError:
            continue  # It has ended.
        found[pid] = {part.split("\0")[0] for part in data.split(VALUE)[1:]}
    return found


def assert_secrets(pids: Sequence[int], wanted: set[str], *, at_least: int) -> None:
    """Check the environments of an agent's processes, and that no other process has a secret."""
    found = secrets_below()
    its = [process.pid for process in processes_below(pids)]
    assert len(its) >= at_least
    assert {pid: found.get(pid) for pid in its} == dict.fromkeys(its, wanted)
    assert not any(found[pid] for pid in found if pid not in its)


# -- the environment -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("agent", one_in(4, known_agents.packaged()))
async def test_secret_is_in_no_process_unless_the_profile_names_it(
    scene: Scene, secrets: list[str], agent: str
) -> None:
    """At the first start, after a crash, after a reopen, and in another host that takes the session over."""
    wanted = set(known_agents.load(agent).keep)
    assert wanted < set(secrets)
    command = scene.with_tool(agent)
    async with Host(scene.store) as host:
        session = await scene.open(host, agent, command=command)
        await answer(session)
        assert_secrets(session.status().pids, wanted, at_least=2)
        await die(session)
        await answer(session)
        assert_secrets(session.status().pids, wanted, at_least=2)
        await scene.open(host, agent, command=command, env={"OTHER": "1"})
        await answer(session)
        assert_secrets(session.status().pids, wanted, at_least=2)
        await scene.open(host, agent, command=command)
    async with Host(scene.store) as host:
        session = host.session("s")
        await answer(session)
        assert_secrets(session.status().pids, wanted, at_least=2)


async def test_terminal_of_an_agent_has_its_environment(scene: Scene, secrets: list[str]) -> None:
    async with Host(scene.store) as host:
        session = await scene.open(host, "gemini")
        said = await answer(session, "@@terminal env")
        assert {name for name in secrets if f"{name}={VALUE}" in str(said)} == set(known_agents.load("gemini").keep)


async def test_command_has_no_secret_with_the_scrub(secrets: list[str]) -> None:
    async with Host() as host:
        command = await host.start(["sleep", "1000"], scrub=("secrets", "banksman"))
        await command.wait_started()
        assert command.pid is not None
        assert_secrets([command.pid], set(), at_least=1)
        await command.stop()
    done = await execute(["env"], scrub=("secrets", "banksman"))
    assert "PATH=" in done.stdout.text
    assert VALUE not in done.stdout.text


async def test_scrub_of_a_caller_replaces_that_of_the_profile(scene: Scene, secrets: list[str]) -> None:
    kept = set(known_agents.load("claude").keep)
    async with Host(scene.store) as host:
        session = await scene.open(host, scrub=())
        await answer(session)
        assert_secrets(session.status().pids, set(secrets) - {"BANKSMAN_TOKEN"}, at_least=1)
        await scene.open(host, scrub=["secrets", "ANTHROPIC_API_KEY"])
        await answer(session)
        assert_secrets(session.status().pids, kept - {"ANTHROPIC_API_KEY"}, at_least=1)


@pytest.mark.parametrize("agent", ["claude", "custom"])
async def test_error_names_the_variable_that_the_agent_did_not_get(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, agent: str
) -> None:
    monkeypatch.setenv("HOUSE_API_KEY", "x")
    monkeypatch.setenv("OTHER_API_KEY", "x")
    async with Host(scene.store) as host:
        command = ["sh", "-c", 'echo "set HOUSE_API_KEY" >&2; exit 3']
        session = await scene.open(host, agent, command=command)
        error = (await (await session.ask("one")).outcome()).error
        assert "set HOUSE_API_KEY; the agent did not get HOUSE_API_KEY of this host" in str(error)
        assert "pass it in env=, or name it in `keep`" in str(error)
        # With the variable, the agent has another reason.
        await scene.open(host, agent, command=command, env={"HOUSE_API_KEY": "x"})
        error = (await (await session.ask("one")).outcome()).error
        assert "set HOUSE_API_KEY" in str(error)
        assert "did not get" not in str(error)


async def test_error_of_ssh_names_the_variable_that_its_prefix_did_not_get(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ssh says only that it has no key."""
    monkeypatch.setenv("SSH_AUTH_SOCK", "/run/keys")
    monkeypatch.setenv("HOUSE_API_KEY", "x")
    refused = ["sh", "-c", "echo 'me@far: Permission denied (publickey,password).' >&2; exit 255"]
    async with Host(scene.store) as host:
        session = await scene.open(host, wrap=refused)
        error = (await (await session.ask("one")).outcome()).error
        assert "the agent did not get SSH_AUTH_SOCK of this host" in str(error)
        await scene.open(host, env={"SSH_AUTH_SOCK": "/run/keys"})
        error = (await (await session.ask("one")).outcome()).error
        assert "publickey" in str(error)
        assert "did not get" not in str(error)


async def test_login_error_names_the_variables_that_the_agent_did_not_get(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOUSE_API_KEY", "x")
    monkeypatch.setenv("GEMINI_API_KEY", "x")
    async with Host(scene.store) as host:
        session = await scene.open(host, "gemini")
        for prompt, is_named in (("@@error -32000 log in first", True), ("@@error -32603 broken", False)):
            error = (await (await session.ask(prompt)).outcome()).error
            assert ("HOUSE_API_KEY" in str(error)) is is_named
            assert "GEMINI_API_KEY" not in str(error)


# -- the prefix ------------------------------------------------------------------------------------------------------
MARK = ["env", "WRAPPED={session}:{cwd}"]


def wrapped(session: Session) -> str | None:
    """The mark that the prefix left in the environment of the agent's process."""
    data = Path(f"/proc/{session.status().pids[0]}/environ").read_bytes().decode()
    return next((part.partition("=")[2] for part in data.split("\0") if part.startswith("WRAPPED=")), None)


async def test_prefix_gets_the_session_and_its_folder_and_the_log_keeps_it(scene: Scene) -> None:
    async with Host(scene.store) as host:
        session = await scene.open(host, wrap=MARK)
        await answer(session)
        assert wrapped(session) == f"{session.id}:{scene.folder}"
        (opened,) = [event.body for event in await events_of(session) if event.kind == kinds.SESSION_OPENED]
        assert opened["containment"] == {"wrap": MARK}


async def test_prefix_with_command_gets_the_quoted_command_as_one_word(scene: Scene) -> None:
    async with Host(scene.store) as host:
        session = await scene.open(host, wrap=["sh", "-c", "WRAPPED=yes exec {command}"], system_prompt="two 'words'")
        await answer(session)
        assert wrapped(session) == "yes"
        assert "--append-system-prompt=two 'words'" in scene.argv()


async def test_folder_called_like_a_placeholder_stays_as_it_is(scene: Scene) -> None:
    folder = scene.folder / "{session}"
    folder.mkdir()
    async with Host(scene.store) as host:
        session = await scene.open(host, wrap=["env", "WRAPPED={cwd}"], cwd=folder)
        await answer(session)
        assert wrapped(session) == str(folder)


async def test_containment_survives_a_crash_a_reopen_and_a_take_over(scene: Scene) -> None:
    async with Host(scene.store) as host:
        session = await scene.open(host, wrap=MARK, limits={"nofile": 200})
        await answer(session)
        await die(session)
        await answer(session)
        assert wrapped(session)
        # Another variable needs another process. The containment is not stated again.
        await scene.open(host, env={"OTHER": "1"})
        await answer(session)
        assert wrapped(session)
        await scene.open(host)  # The log keeps no variables, and a take-over needs the whole spec.
    async with Host(scene.store) as host:
        session = host.session("s")
        await answer(session)
        assert wrapped(session)
        assert limit_of(session, "Max open files") == ["200", "200"]
    async with Host(scene.store) as host:
        session = await scene.open(host)
        await answer(session)
        assert wrapped(session)
        assert limit_of(session, "Max open files") == ["200", "200"]


async def test_empty_prefix_ends_the_prefix_of_a_session(scene: Scene) -> None:
    async with Host(scene.store) as host:
        session = await scene.open(host, wrap=MARK)
        await answer(session)
        await scene.open(host, wrap=[])
        await answer(session)
        assert wrapped(session) is None
        await scene.open(host)
        await answer(session)
        assert wrapped(session) is None


async def test_fall_back_has_the_containment_of_the_session(scene: Scene) -> None:
    """The first agent is not installed, so the second one serves from the start."""
    scene.profile("codex", f'extends = "codex"\ncommand = {json.dumps(scene.fake("codex"))}')
    async with Host(scene.store) as host:
        scene.profile("claude", 'extends = "claude"\ncommand = ["/no/such/agent"]\n[containment]\nlimits.nofile = 200')
        session = await scene.open(host, command=None, fallback=["codex"])
        await answer(session)
        assert session.status().agent == "codex"
        assert limit_of(session, "Max open files") == ["200", "200"]


def limit_of(session: Session, name: str) -> list[str]:
    """The soft and the hard limit of the agent's process."""
    text = Path(f"/proc/{session.status().pids[0]}/limits").read_text()
    return next(line for line in text.splitlines() if line.startswith(name))[len(name) :].split()[:2]


async def test_profile_contains_its_agent_unless_the_caller_says_otherwise(scene: Scene) -> None:
    scene.profile(
        "house", 'extends = "claude"\n[containment]\nlimits = { nofile = [100, 200] }\nwrap = ["env", "WRAPPED=1"]'
    )
    async with Host(scene.store) as host:
        session = await scene.open(host, "house")
        await answer(session)
        assert wrapped(session) == "1"
        assert limit_of(session, "Max open files") == ["100", "200"]
        await scene.open(host, "house", wrap=MARK)
        await answer(session)
        assert wrapped(session) == f"{session.id}:{scene.folder}"
        assert limit_of(session, "Max open files") == ["100", "200"]


@pytest.mark.parametrize("sandbox", SANDBOXES)
async def test_sandbox_hides_the_processes_outside(scene: Scene, sandbox: str) -> None:
    program = SANDBOXES[sandbox][0]
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")
    scene.profile("house", f'extends = "claude"\n[containment]\nsandbox = "{sandbox}"')
    async with Host(scene.store) as host:
        session = await scene.open(host, "house")
        assert await answer(session) == "one"
        inner = [process.pid for process in processes_below(session.status().pids)]
        assert os.readlink(f"/proc/{inner[-1]}/ns/pid") != os.readlink("/proc/self/ns/pid")
        assert Path(f"/proc/{inner[-1]}/cwd").readlink() == scene.folder
        (opened,) = [event.body for event in await events_of(session) if event.kind == kinds.SESSION_OPENED]
        assert opened["containment"] == {"wrap": sandbox}
        await session.close()
        assert not [pid for pid in inner if Path(f"/proc/{pid}").exists()]


@pytest.mark.parametrize("user", [None, pytest.param("nobody", marks=needs_root)])
@pytest.mark.parametrize("sandbox", SANDBOXES)
async def test_agent_in_a_sandbox_cannot_undo_its_mounts(
    scene: Scene, tmp_path: Path, sandbox: str, user: str | None
) -> None:
    """It has no capabilities, also if it is root, and a namespace of its own gives it none over these mounts."""
    if shutil.which(SANDBOXES[sandbox][0]) is None:
        pytest.skip(f"{sandbox} is not installed")
    seen = f'[ -e "$0" ] && echo wrote; [ -e /proc/{os.getpid()} ] && echo seen; true'
    # Under unshare every file stays as writable as before.
    writes = 'mount -o remount,bind,rw / && touch "$0";' if sandbox == "bwrap" else ""
    tries = f"{writes} umount /proc; {seen}"
    script = f"""
        grep -E '^Cap(Prm|Eff|Amb)' /proc/self/status | tr -d '0[:space:]'
        {{ sh -c '{tries}' "$0"; unshare --user --mount sh -c '{tries}' "$0"; }} 2>/dev/null
        echo .
    """
    work = tmp_path / "work"
    work.mkdir()
    async with Host(scene.store) as host:
        command = ["sh", "-c", f"exec 3>&2; ({script}) >&3; exit 3", str(tmp_path / "outside")]
        session = await scene.open(host, command=command, cwd="/var/tmp" if user else work, wrap=sandbox, user=user)
        outcome = await (await session.ask("one")).outcome()
    assert outcome.kind is Kind.FAILED
    assert "(CapPrm:CapEff:CapAmb:.)" in str(outcome.error)
    assert not (tmp_path / "outside").exists()


async def test_bwrap_leaves_only_the_folder_of_the_session_writable(scene: Scene) -> None:
    if shutil.which("bwrap") is None:
        pytest.skip("bwrap is not installed")
    work = scene.folder / "work"
    work.mkdir()
    script = "echo x > inside; echo x > ../outside; [ -w /proc/sys/kernel/core_pattern ] && echo x > kernel; exit 3"
    async with Host(scene.store) as host:
        session = await scene.open(host, command=["sh", "-c", script], cwd=work, wrap="bwrap")
        assert (await (await session.ask("one")).outcome()).kind is Kind.FAILED
    assert (work / "inside").exists()
    assert not (work / "kernel").exists()
    assert not (scene.folder / "outside").exists()


@pytest.mark.parametrize("how", [{"wrap": ["env"]}, pytest.param({"user": 65534}, marks=needs_root)])
async def test_host_does_no_work_for_an_agent_outside_of_its_containment(scene: Scene, how: dict[str, Any]) -> None:
    """The host would read files and run commands as its own user, and without the prefix."""
    command = ["sh", "-c", "read -r line; exit 3"] if "user" in how else scene.fake("gemini")
    async with Host(scene.store) as host:
        session = await scene.open(host, "gemini", command=command, cwd="/", **how)
        outcome = await (await session.ask("@@terminal env")).outcome()
        assert "PATH=" not in str(outcome.text)
        frames = [event.frame or b"" for event in await events_of(session) if b'"initialize"' in (event.frame or b"")]
        assert json.loads(frames[0])["params"]["clientCapabilities"]["terminal"] is False
        assert json.loads(frames[0])["params"]["clientCapabilities"]["fs"] == {
            "readTextFile": False,
            "writeTextFile": False,
        }


@needs_root
async def test_agent_runs_as_another_user(scene: Scene) -> None:
    """With its home, its groups, and the file of its MCP servers."""
    nobody = pwd.getpwuid(65534)
    servers = 'for word; do case $word in --mcp-config=*) cat "${word#*=}" >&2;; esac; done'
    script = f'id -u >&2; echo "$HOME" >&2; {servers}; exit 3'
    server = {"name": "house", "command": "house-server"}
    async with Host(scene.store) as host:
        command = ["sh", "-c", script, "agent"]
        session = await scene.open(host, command=command, cwd="/", user=nobody.pw_name, mcp_servers=[server])
        outcome = await (await session.ask("one")).outcome()
        assert outcome.kind is Kind.FAILED
        for word in ("65534", nobody.pw_dir, "house-server"):
            assert word in str(outcome.error)


async def test_limits_hold_for_the_terminals_of_an_agent(scene: Scene) -> None:
    async with Host(scene.store) as host:
        session = await scene.open(host, "gemini", limits={"nofile": 200})
        assert "200" in str(await answer(session, '@@terminal sh -c "ulimit -n"'))


# -- errors ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"wrap": "no-such"}, "there is no sandbox 'no-such'"),
        ({"wrap": ["a\0b"]}, "wrap cannot hold"),
        ({"wrap": [1]}, "wrap cannot hold 1"),
        ({"wrap": ["\udc80"]}, "wrap cannot hold"),
        ({"wrap": {"a": "b"}}, "wrap cannot be"),
        ({"wrap": ["x"] * 257}, "wrap cannot have 257 words"),
        ({"limits": {"no": 1}}, "there is no limit 'no'"),
        ({"limits": [1]}, "limits cannot be"),
        ({"scrub": "secrets"}, "scrub cannot be"),
        ({"scrub": [""]}, "scrub cannot hold ''"),
        ({"scrub": ["A=B"]}, "scrub cannot hold 'A=B'"),
        ({"scrub": ["FOO*"]}, r"scrub cannot hold 'FOO\*'"),
        ({"scrub": ["secrets,nesting"]}, "scrub cannot hold 'secrets,nesting'"),
        ({"scrub": ["secrets "]}, "scrub cannot hold 'secrets '"),
        ({"user": "no-such-user"}, "there is no user"),
    ],
)
async def test_open_refuses_a_containment_that_cannot_be(scene: Scene, how: dict[str, Any], says: str) -> None:
    async with Host(scene.store) as host:
        with pytest.raises(UsageError, match=says):
            await scene.open(host, **how)


ABOVE_ALL = int(Path("/proc/sys/fs/nr_open").read_text()) + 1


@pytest.mark.parametrize("limit", [{"nofile": -1}, {"nofile": ABOVE_ALL}, {"nofile": (100, 1 << 40)}])
async def test_open_refuses_a_limit_that_the_kernel_refuses_to_everybody(scene: Scene, limit: dict[str, Any]) -> None:
    async with Host(scene.store) as host:
        with pytest.raises(UsageError, match="cannot set the limit nofile to") as caught:
            await scene.open(host, limits=limit)
        assert "pass at most" in str(caught.value.hint)
        assert host.sessions() == []


@needs_root
@pytest.mark.parametrize("has_right", [False, True])
def test_open_refuses_exactly_the_limits_that_the_kernel_refuses(scene: Scene, has_right: bool) -> None:
    """Each limit is tried on the process itself, too, in a program with the capabilities and in one without."""
    program = """
import asyncio, json, os, resource, sys
sys.path[:0] = json.loads(sys.argv[1])
from banksman import Host, UsageError
from banksman.testing import fake_agent

resource.setrlimit(resource.RLIMIT_CORE, (5, 10))
LIMITS = [{"core": 11}, {"core": 10}, {"core": (1, -1)}, {"nice": -1}, {"nice": 0}]
LIMITS += [{"oom_score_adj": -1000}, {"oom_score_adj": 900}]

def can(limit):
    if (pid := os.fork()) == 0:
        try:
            (name, value), = limit.items()
            if name == "core":
                resource.setrlimit(resource.RLIMIT_CORE, value if isinstance(value, tuple) else (value, value))
            elif name == "nice":
                os.setpriority(os.PRIO_PROCESS, 0, value)
            else:
                with open("/proc/self/oom_score_adj", "w") as file:
                    file.write(str(value))
        except (OSError, ValueError):
            os._exit(1)
        os._exit(0)
    return os.waitpid(pid, 0)[1] == 0

async def main():
    async with Host("memory:") as host:
        for limit in LIMITS:
            try:
                await host.open("claude", command=fake_agent.command(), limits=limit)
                found = True
            except UsageError as exc:
                assert "cannot set the limit " in str(exc), exc
                found = False
            assert found == can(limit), (limit, found)
asyncio.run(main())
print("agree")
"""
    drops = [] if has_right else ["setpriv", "--bounding-set=-sys_resource,-sys_nice", "--"]
    argv = [*drops, sys.executable, "-c", program, json.dumps(sys.path)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "agree\n", done.stderr


@pytest.mark.parametrize("limit", ["memory_bytes=67108864", "swap_bytes=0", "processes=20", "cpus=0.5", "cgroup=1"])
async def test_open_refuses_the_limit_of_a_tree_that_its_prefix_moves_elsewhere(scene: Scene, limit: str) -> None:
    """systemd-run moves the agent to a group of systemd, so the limit would limit nothing."""
    scope = ["nice", "/usr/bin/systemd-run", "--scope"]
    scene.profile("house", f'extends = "claude"\n[containment]\nwrap = {json.dumps(scope)}')
    limits = containment.parse_limits([limit], "limit")
    says = f"cannot set the limits {limit.partition('=')[0]}: systemd-run moves the agent"
    async with Host(scene.store) as host:
        with pytest.raises(UsageError, match=says) as caught:
            await scene.open(host, "house", limits=limits)
        assert "MemoryMax" in str(caught.value.hint)
        assert host.sessions() == []
    # Limits of each process hold there, too.
    containment.checked(wrap=scope, limits={"nofile": 100}).check_limits()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("user = true", "containment: user cannot be True"),
        ('sandbox = "no-such"', "containment: there is no sandbox 'no-such'"),
        ('sandbox = "bwrap"\nwrap = ["env"]', "leave out wrap or sandbox"),
        ('wrap = "bwrap"', "containment.wrap cannot be"),
        ('on_open = "mkdir"', "containment.on_open cannot be"),
        ("limits = 5", "limits cannot be 5"),
        ('wrap = ["systemd-run"]\nlimits = { cpus = 1 }', "containment: cannot set the limits cpus: systemd-run moves"),
        ("scrub = []", "there is no key containment.scrub"),
    ],
)
def test_profile_refuses_a_containment_that_cannot_be(scene: Scene, text: str, says: str) -> None:
    scene.profile("house", f'extends = "claude"\n[containment]\n{text}')
    with pytest.raises(UsageError, match=says):
        known_agents.load("house")


@pytest.mark.parametrize("key", ["scrub", "keep"])
@pytest.mark.parametrize("name", ["AWS_*", "secrets,nesting", "secrets ", "A=b"])
def test_profile_refuses_what_is_no_name_of_a_variable(scene: Scene, key: str, name: str) -> None:
    scene.profile("house", f'extends = "claude"\n[env]\n{key} = ["{name}"]')
    with pytest.raises(UsageError, match=rf"env\.{key}") as caught:
        known_agents.load("house")
    assert "there are no patterns" in str(caught.value.hint)


@pytest.mark.parametrize("part", ["wrap", "on_open", "on_close"])
@pytest.mark.parametrize(
    "words",
    [
        ["sh", "-c", "mkdir -p {cwd}"],
        ["sh", "-c", 'cd "{cwd}"; exec "$@"', "sh"],
        ["sh", "-xec", "A={cwd}"],
        ["sh", "-c", 'cd "{cwd}" && {command}'],
        ["env", "-S", "mkdir {cwd}"],
        ["/usr/bin/ssh", "far", "mkdir", "{cwd}"],
    ],
)
async def test_folder_cannot_become_the_text_of_a_program(scene: Scene, part: str, words: list[str]) -> None:
    how: dict[str, Any] = {part: words}
    async with Host(scene.store) as host:
        for name in ("a$(touch mark)", "a;touch mark", "a b", "a'b", 'a"b', "a`b`", "a\nb", "$HOME"):
            folder = scene.folder / name
            folder.mkdir(exist_ok=True)
            with pytest.raises(UsageError, match=rf"{part} has \{{cwd\}} in the text of a program"):
                await scene.open(host, cwd=folder, **how)
        assert host.sessions() == []
        containment.checked(**how).check_folder("/srv/plain-folder_1.x")
    assert not [*scene.folder.rglob("mark")]


async def test_folder_of_any_name_can_be_a_word_of_a_prefix_and_of_a_hook(scene: Scene) -> None:
    folder = scene.folder / "a $(touch mark)'b"
    note = 'printf "%s|%s|%s" "$1" "$BANKSMAN_CWD" "$BANKSMAN_SESSION" > "$0"'
    wrap = ["sh", "-c", 'shift; exec "$@"', "sh", "--place={cwd}"]
    async with Host(scene.store) as host:
        on_open = ["sh", "-c", f'mkdir -p "$1"; {note}', str(scene.folder / "note"), "{cwd}"]
        session = await scene.open(host, cwd=folder, wrap=[*wrap[:4], "{cwd}"], on_open=on_open)
        assert await answer(session) == "one"
        assert (scene.folder / "note").read_text() == f"{folder}|{folder}|{session.id}"
    assert not [*scene.folder.rglob("mark")]


def test_record_with_a_scrub_that_is_no_name_can_be_read() -> None:
    found = containment.from_record({"containment": {"scrub": ["FOO*", "", "BAR"]}})
    assert found.scrub == ("BAR",)


async def test_missing_program_of_a_prefix_is_named(scene: Scene) -> None:
    async with Host(scene.store) as host:
        with pytest.raises(ProgramNotFound, match="no-such-sandbox"):
            await scene.open(host, wrap=["no-such-sandbox"])


async def test_missing_agent_in_a_sandbox_is_found_at_the_open(scene: Scene) -> None:
    async with Host(scene.store) as host:
        with pytest.raises(ProgramNotFound, match="no-such-agent"):
            await scene.open(host, command=["no-such-agent"], wrap="unshare")


async def test_hand_over_keeps_the_containment(scene: Scene, tmp_path: Path) -> None:
    """The next host has the same process, and later processes have its containment."""
    go = tmp_path / "go"
    async with Host(scene.store) as host:
        session = await scene.open(host, wrap=MARK, limits={"nofile": [200, 200]})
        turn = await session.ask(f"@@say begun\n@@wait {go}\n@@say done")
        async for event in session.events(0, waits=True):
            if event.kind == kinds.UPDATE and b"begun" in event.data:
                break
        pid = session.status().pids[0]
        await host.drain(hand_over=True)
    async with Host(scene.store) as host:
        session = await host.take_over(session.id)
        assert session.status().pids == (pid,)
        go.touch()
        assert (await (await session.turn(turn.id)).outcome()).kind is Kind.DONE
        await die(session)
        await answer(session)
        assert wrapped(session) == f"{session.id}:{scene.folder}"
        assert limit_of(session, "Max open files") == ["200", "200"]
