"""World of the storm: NATS nodes, hosts, front ends and agents, all real processes on this machine.

Every process of a host has the *life* of that host in its environment (`CHAOS_LIFE=PREFIX-a.3`: host a, started for the
third time). Every agent has the folder of its session in its command line. By these two marks the world finds a process
in /proc, whatever its parent is.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from http import HTTPStatus
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from tests.chaos.cluster import marked
from tests.cluster.shared import some_prefix
from tests.server.kit import Served

from banksman.testing import fake_agent
from banksman.testing.fake_agent import Evidence
from banksman.testing.nats_servers import NotStarted, Servers

START_SECONDS_MAX = 60.0
END_SECONDS_MAX = 60.0
LOOK_AGAIN_SECONDS = 0.02
RESTARTS_MAX = 2
ROOM = 64
# Time that a service manager waits before it restarts a program that could not start.
RESTART_SECONDS = 0.2
# Time that a client waits after a retryable refusal.
RETRY_SECONDS = 0.1


class Found(NamedTuple):
    """A live process.

    `session`: the number of the session, if the process is an agent.
    """

    pid: int
    life: str
    session: int | None
    name: str


class Host:
    """`banksman host` as a user starts it, over many lives. Its state folder and its journal survive."""

    def __init__(self, folder: Path, store: str, name: str, prefix: str) -> None:
        folder.mkdir(parents=True)
        self.folder, self.store, self.name = folder, store, name
        self._prefix = prefix
        self.log = folder / "log.txt"
        self.lives = 0
        self.process: subprocess.Popen[str] | None = None
        self.stopped_at: float | None = None

    def __repr__(self) -> str:
        return f"<Host {self.life} {'stopped' if self.stopped_at else 'up' if self.process else 'down'}>"

    @property
    def life(self) -> str:
        return f"{self._prefix}-{self.name}.{self.lives}"

    @property
    def is_up(self) -> bool:
        return self.process is not None and self.stopped_at is None

    def start(self) -> None:
        """Start the process. It is ready when `wait_ready` returns; without a majority of nodes it is not."""
        assert self.process is None
        self.lives += 1
        words = ["host", "--store", self.store, "--name", self.name, "--room", str(ROOM)]
        config = self.folder / "config.toml"
        config.write_text('[serve]\ntoken = "a-token-of-the-tests"\n', encoding="utf-8")
        with self.log.open("ab") as log:
            log.write(f"---- {self.life} at {time.monotonic():.2f}\n".encode())
            log.flush()
            self.process = subprocess.Popen(
                [sys.executable, "-m", "banksman", *words, "--config", str(config)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, "XDG_STATE_HOME": str(self.folder / "state"), "CHAOS_LIFE": self.life},
            )

    def wait_ready(self) -> None:
        """Wait until the host is ready, and restart it as a service manager does.

        A host that cannot reach the servers exits with 1, "may do so later".
        """
        end = time.monotonic() + START_SECONDS_MAX
        while True:
            assert self.process is not None
            assert self.process.stdout is not None
            line = self.process.stdout.readline()
            if self.name in line:
                return
            code = self.process.wait(END_SECONDS_MAX)
            said = self.log.read_text(encoding="utf-8").rpartition("---- ")[2]
            assert code == 1, f"{self.life} exited with {code}: {said}"
            assert "Traceback" not in said, f"{self.life} has a bug: {said}"
            assert time.monotonic() < end, f"{self.life} does not start: {said}"
            self._reap()
            time.sleep(RESTART_SECONDS)
            self.start()

    def check_lives(self) -> None:
        """Fail if the host has exited without a kill of the test."""
        if self.process is not None and (code := self.process.poll()) is not None:
            raise AssertionError(f"{self.life} exited with {code}: {self.log.read_text(encoding='utf-8')[-2000:]}")

    def kill(self) -> float:
        """Kill the process and return the time of the signal. The process is dead when this returns."""
        assert self.process is not None
        self.check_lives()
        at = time.monotonic()
        self.process.kill()
        self._reap()
        return at

    def stop(self) -> None:
        assert self.process is not None
        self.check_lives()
        self.process.send_signal(signal.SIGSTOP)
        self.stopped_at = time.monotonic()

    def cont(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)
        self.stopped_at = None

    def end(self) -> None:
        """Kill the host. No process may be left after this end, as after every other."""
        if self.process is not None:
            self.process.kill()
            self._reap()

    def _reap(self) -> None:
        assert self.process is not None
        assert self.process.stdout is not None
        self.process.wait(END_SECONDS_MAX)
        self.process.stdout.close()
        self.process, self.stopped_at = None, None


class World:
    """All processes of the storm, up for as long as the `with`.

    `sessions`: numbers. `ids`: the ids of the same sessions at the front ends.
    """

    def __init__(self, folder: Path, *, sessions: int, hosts: int = 3, lease: float) -> None:
        self.folder = folder
        self.lease = lease
        self.sessions = range(sessions)
        self.ids: list[str] = []
        self.prefix = some_prefix()
        self._names = [chr(ord("a") + number) for number in range(hosts)]
        self.servers = Servers(3)
        self.hosts: dict[str, Host] = {}
        self.fronts: list[Served] = []
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with self._stack:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._stack.enter_context(self.servers)
            self._stack.callback(self._wait_gone)
            store = self.servers.store(self.prefix, lease=self.lease)
            for name in self._names:
                host = self.hosts[name] = Host(self.folder / name, store, name, self.prefix)
                self._stack.callback(host.end)
                host.start()
                if len(self.hosts) == 1:
                    host.wait_ready()  # The first host makes the streams.
            self.fronts = [self._front(store, f"front{number}") for number in range(2)]
            with ThreadPoolExecutor() as pool:
                list(pool.map(Served.start, self.fronts))
            for name in self._names[1:]:
                self.hosts[name].wait_ready()
            self._stack = self._stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _wait_gone(self) -> None:
        until(lambda: not self.processes(), END_SECONDS_MAX, "the hosts are dead, and all that they started")

    def _front(self, store: str, name: str) -> Served:
        front = Served(self.folder / name, store=store, name=name, heartbeat_seconds=0.5, stall_seconds=10.0)
        self._stack.callback(lambda: front.process is not None and front.kill())
        return front

    # -- sessions ------------------------------------------------------------------------------------------------------
    def command(self, session: int) -> list[str]:
        """Return the command of an agent that remembers its conversation, so that the next process can resume it."""
        folder = self.agent_folder(session)
        folder.mkdir(parents=True, exist_ok=True)
        agent = fake_agent.command(evidence=folder / "evidence", memory=folder / "memory")
        return [sys.executable, "-I", "-S", marked.__file__, str(folder), *agent]

    def open_all(self) -> None:
        """Open each session, and retry until a host has taken it.

        In a cluster that just starts, no host may take one for a moment.
        """
        with ThreadPoolExecutor(8) as pool:
            self.ids = list(pool.map(self._open, self.sessions))

    def _open(self, session: int) -> str:
        body = {"command": self.command(session), "name": f"s{session}", "cwd": str(self.folder)}
        headers = {"Idempotency-Key": f"open-{session}"}
        front = self.fronts[session % len(self.fronts)]
        end = time.monotonic() + START_SECONDS_MAX
        while (answer := front.request("POST", "/v1/sessions", body, headers=headers)).status not in (200, 201):
            assert answer.status in (503, 504), answer
            assert time.monotonic() < end, answer
            time.sleep(RETRY_SECONDS)
        return answer.json["id"]

    def agent_folder(self, session: int) -> Path:
        return self.folder / "agents" / str(session)

    def evidence(self, session: int) -> Evidence:
        return Evidence(self.agent_folder(session) / "evidence")

    def overlaps(self) -> list[dict[str, Any]]:
        """Return the agents that started while another agent of their session lived, as the kernel lock shows."""
        lines: list[str] = []
        for session in self.sessions:
            file = self.agent_folder(session) / "overlaps"
            lines += file.read_text().splitlines() if file.exists() else []
        return [json.loads(line) for line in lines]

    # -- processes -----------------------------------------------------------------------------------------------------
    def processes(self) -> list[Found]:
        """Return the live processes of this world's hosts, without front ends and nodes. Zombies do not count."""
        return [each for each in _found(f"{self.folder}/agents/") if each.life.startswith(f"{self.prefix}-")]

    def agents_of(self, life: str) -> list[Found]:
        return [found for found in self.processes() if found.life == life and found.session is not None]

    def wait_nodes_ready(self) -> list[int]:
        """Wait until the nodes are ready; return those that needed another restart.

        Occasionally a killed node comes back with a stream that it does not serve ("monitor goroutine not running"). It
        stays so until it is restarted, as this function does.
        """
        again: list[int] = []
        for _ in range(RESTARTS_MAX):
            try:
                self.servers.wait_ready()
                return again
            except NotStarted:
                for node, monitor in enumerate(self.servers.monitors()):
                    if not _is_healthy(monitor):
                        self.servers.kill(node)
                        self.servers.restart(node)
                        again.append(node)
        self.servers.wait_ready()
        return again

    def wait_all_up(self) -> None:
        """Continue every stopped node and host, and start every dead one."""
        for node in range(self.servers.nodes):
            if self.servers.pid(node) is None:
                self.servers.restart(node)
            else:
                self.servers.cont(node)
        self.wait_nodes_ready()
        for host in self.hosts.values():
            if host.stopped_at is not None:
                host.cont()
            if host.process is None:
                host.start()
                host.wait_ready()


def _is_healthy(monitor: str) -> bool:
    try:
        with urllib.request.urlopen(f"{monitor}/healthz", timeout=5.0) as answer:
            return answer.status == HTTPStatus.OK
    except OSError:
        return False


def _found(agents: str) -> Iterator[Found]:
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            environ = Path(f"/proc/{entry}/environ").read_bytes().split(b"\0")
            words = Path(f"/proc/{entry}/cmdline").read_bytes().decode(errors="replace").split("\0")
            name, _, rest = Path(f"/proc/{entry}/stat").read_text().partition(" (")[2].rpartition(") ")
        except OSError:
            continue  # It has just exited, or belongs to another user.
        life = next((each[11:].decode() for each in environ if each.startswith(b"CHAOS_LIFE=")), None)
        if life is None or rest.startswith("Z"):
            continue
        session = next((_number(word, agents) for word in words if agents in word), None)
        yield Found(int(entry), life, session, name)


def _number(word: str, agents: str) -> int:
    return int(word.partition(agents)[2].partition("/")[0])


def until(look: Callable[[], Any], seconds: float, what: str) -> Any:
    """Poll with one deadline, because other processes send no event for their state."""
    end = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < end, f"not within {seconds:g} s: {what}"
        time.sleep(LOOK_AGAIN_SECONDS)
    return found
