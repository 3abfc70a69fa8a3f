"""Start the services of `deploy/docker/compose.yaml` without containers, each at its own address of one namespace.

A program of `test_compose.py`. It runs in new namespaces: of the network, in which the names and ports of the services
are free, and of processes, which all end with it. Each service of Banksman is PID 1, as in a container. Only the
volumes are replaced. The program prints what it has seen as JSON.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import yaml

from banksman.testing import fake_agent
from banksman.testing.nats_servers import program

PASSWORD = "of-the-test"
SECONDS_MAX = 200.0
# The end of the whole program, for every wait.
DEADLINE = time.monotonic() + SECONDS_MAX


def interpolated(text: str) -> str:
    """Replace the variables of the file as compose does. An unknown one is an error."""
    found = re.sub(r"\$\{(\w+):\?[^}]*\}", lambda match: {"NATS_PASSWORD": PASSWORD}[match[1]], text)
    return found.replace("$$", "\0").replace("\0", "$")


def words_of(dockerfile: Path) -> tuple[list[str], list[str]]:
    """Return the first words of the image, and the command that checks its health."""
    lines = re.sub(r"\\\n\s*", "", dockerfile.read_text(encoding="utf-8")).splitlines()
    found = {name: words for name, _, words in (line.partition(" ") for line in lines)}
    return json.loads(found["ENTRYPOINT"]), json.loads(found["HEALTHCHECK"].removeprefix("CMD "))


class Services:
    def __init__(self, deploy: Path, folder: Path) -> None:
        self.folder = folder
        text = interpolated((deploy / "compose.yaml").read_text(encoding="utf-8"))
        self.services: dict[str, Any] = yaml.safe_load(text)["services"]
        self.deploy = deploy
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        first, health = words_of(deploy / "Dockerfile")
        assert first == ["banksman"]
        self.first = [sys.executable, "-m", "banksman"]
        self.health = [sys.executable, *health[1:]]

    def name_addresses(self) -> None:
        """Give each service a name at its own address."""
        lines = ["127.0.0.1 localhost"]
        lines += [f"127.0.0.{number} {name}" for number, name in enumerate(self.services, 2)]
        hosts = self.folder / "hosts"
        hosts.write_text("\n".join([*lines, ""]), encoding="utf-8")
        for argv in (["ip", "link", "set", "lo", "up"], ["mount", "--bind", str(hosts), "/etc/hosts"]):
            subprocess.run(argv, check=True)

    def start(self, name: str) -> None:
        service = self.services[name]
        own = self.folder / name
        places = {"/etc/nats/nats.conf": str(self.deploy / "nats.conf")}
        for volume in service["volumes"]:
            target = volume.split(":")[1]
            if target not in places:
                places[target] = str(own / target.strip("/"))
                Path(places[target]).mkdir(parents=True)
        words = [places.get(word, word) for word in map(str, service["command"])]
        env = {"PATH": os.environ["PATH"], "HOME": str(own), **service["environment"]}
        if name.startswith("nats"):
            argv = [program(), *words]
        else:
            env["XDG_STATE_HOME"] = places["/state"]
            argv = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", *self.first, *words]
        with (self.folder / f"{name}.log").open("wb") as log:
            self.running[name] = subprocess.Popen(
                argv, env=env, cwd=own, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def stop(self, name: str) -> int:
        """Send TERM to PID 1 of the service, and return its exit code."""
        process = self.running.pop(name)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text(encoding="ascii")
        os.kill(int(children), signal.SIGTERM)
        return process.wait(remaining())


def remaining() -> float:
    return max(0.1, DEADLINE - time.monotonic())


def get(url: str, token: str = "", body: Any = None) -> Any:
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, None if body is None else json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=remaining()) as answer:
        return json.loads(answer.read())


def until(url: str, token: str = "", names: frozenset[str] = frozenset()) -> Any:
    """Return the answer of a URL once it is a success and lists these hosts."""
    while True:
        try:
            found = get(url, token)
            if names <= {str(host.get("name")) for host in found.get("hosts", [])}:
                return found
        except OSError:
            pass
        assert time.monotonic() < DEADLINE, f"{url} does not answer as it should"
        time.sleep(0.05)


def main(deploy: Path, folder: Path) -> dict[str, Any]:
    services = Services(deploy, folder)
    services.name_addresses()
    nodes = [name for name in services.services if name.startswith("nats")]
    others = [name for name in services.services if name not in nodes]
    for name in nodes:
        services.start(name)
    for name in nodes:
        _, check = services.services[name]["healthcheck"]["test"]
        until(shlex.split(check)[-1].replace("$NATS_NAME", name))
    for name in others:
        services.start(name)
    front = "http://127.0.0.1:4380"
    until(f"{front}/readyz")
    token = (folder / "front" / "state" / "banksman" / "token").read_text(encoding="ascii").strip()
    hosts = until(f"{front}/v1/hosts", token, frozenset(("host-1", "host-2")))

    def asked() -> str:
        opened = get(f"{front}/v1/sessions", token, {"command": fake_agent.command({})})
        turns = f"{front}/v1/sessions/{opened['id']}/turns"
        turn = get(turns, token, {"prompt": "hello"})["turn"]
        return get(f"{turns}/{turn}?wait=60", token)["outcome"]["kind"]

    outcomes = [asked()]
    healthy = subprocess.run(services.health, check=False).returncode
    # The cluster works without any one of its nodes.
    services.running[nodes[0]].kill()
    services.running.pop(nodes[0]).wait(remaining())
    outcomes.append(asked())
    codes = {name: services.stop(name) for name in reversed(others)}
    return {
        "hosts": sorted(host["name"] for host in hosts["hosts"]),
        "outcomes": outcomes,
        "codes": codes,
        "health": healthy,
    }


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), Path(sys.argv[2]))))
