"""Host processes without a port, and front ends before them, on real NATS nodes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests.cluster.leases import LEASE_SECONDS, end_lease
from tests.server.kit import AT_THE_END_SECONDS, Served, terminate

from banksman.testing.nats_servers import Servers

SECONDS_MAX = 60.0


class Hosted:
    """`banksman host` as a user starts it."""

    def __init__(self, folder: Path, store: str, name: str, *labels: str, room: int = 8, **settings: Any) -> None:
        folder.mkdir(exist_ok=True)
        self.name = name
        self.log = folder / "log.txt"
        config = folder / "config.toml"
        lines = (f"{key} = {json.dumps(value)}\n" for key, value in settings.items())
        config.write_text("[serve]\n" + "".join(lines), encoding="utf-8")
        words = ["host", "--store", store, "--name", name, "--room", str(room), "--config", str(config)]
        words += [word for label in labels for word in ("--label", label)]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "banksman", *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, "XDG_STATE_HOME": str(folder / "state")},
            )

    def wait_ready(self) -> None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert self.name in line, (line, self.log.read_text(encoding="utf-8"))

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(SECONDS_MAX)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self, patience: float = 2.0) -> int:
        """Shut down in order. `patience`: seconds that running turns get."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            terminate(self.process, patience)
        try:
            return self.process.wait(SECONDS_MAX)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise
        finally:
            assert self.process.stdout is not None
            self.process.stdout.close()


class Fleet:
    """Front ends and hosts on one store."""

    def __init__(self, folder: Path, store: str, stack: ExitStack) -> None:
        self.folder = folder
        self.store = store
        self._stack = stack

    def front(self, name: str = "front", **settings: Any) -> Served:
        return self._stack.enter_context(Served(self.folder / name, store=self.store, name=name, **settings))

    def host(self, name: str, *labels: str, room: int = 8, **settings: Any) -> Hosted:
        host = Hosted(self.folder / name, self.store, name, *labels, room=room, **settings)
        self._stack.callback(host.end, AT_THE_END_SECONDS)
        host.wait_ready()
        return host

    def lose(self, host: Hosted, front: Served) -> None:
        """Kill the host and end its lease."""
        (id,) = (each["id"] for each in front.get("/v1/hosts")["hosts"] if each["name"] == host.name)
        host.kill()
        asyncio.run(end_lease(self.store, id))


@contextmanager
def fleet(folder: Path, servers: Servers, prefix: str, *, lease: float = LEASE_SECONDS) -> Generator[Fleet]:
    with ExitStack() as stack:
        yield Fleet(folder, servers.store(prefix, lease=lease), stack)


def until(look: Callable[[], Any], what: str) -> Any:
    """Poll with one deadline, because other processes send no event for their knowledge."""
    end = time.monotonic() + SECONDS_MAX
    while not (found := look()):
        assert time.monotonic() < end, f"not in time: {what}"
        time.sleep(0.02)
    return found
