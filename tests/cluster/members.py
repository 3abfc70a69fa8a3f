"""Hosts that are members of a cluster, in the test's own loop or in a process that can be killed and stopped.

They run a small application in place of the server's: each request and each answer is a line of JSON. As a program,
this module prints the id of its host when it is up, and ends with its stdin. The line `drain` on stdin drains the host
first.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.cluster.leases import LEASE_SECONDS, end_lease
from tests.cluster.lines import SECONDS_MAX

from banksman import BanksmanError, Host
from banksman.cluster.host import Member
from banksman.cluster.interfaces import Cluster
from banksman.errors import NoOwner, Unreachable
from banksman.testing import fake_agent
from banksman.testing.nats_servers import Servers

REPOSITORY = Path(__file__).resolve().parents[2]
LIFE_SECONDS_MAX = 100
# A busy machine may cost a host a short lease while it opens a session.
PLACES_MAX = 5
QUICK = {"eof_grace": 0.1, "grace": 1.0, "linger": 0.05}


class Application:
    """Handler of the requests that other hosts send."""

    def __init__(self, host: Host, name: str) -> None:
        self.host = host
        self.name = name
        self.asked: list[dict[str, Any]] = []

    async def __call__(self, data: bytes) -> bytes:
        question = json.loads(data)
        self.asked.append(question)
        try:
            said = await getattr(self, question.pop("do"))(**question)
        except BanksmanError as exc:
            said = {"error": type(exc).__name__, "text": str(exc)}
        return json.dumps({"host": self.name, **said}).encode()

    async def open(self, session: str, how: dict[str, Any]) -> dict[str, Any]:
        return {"session": (await self.host.open("claude", id=session, **how)).id}

    async def ask(self, session: str, prompt: str, key: str) -> dict[str, Any]:
        turn = await self.host.session(session).ask(prompt, key=key)
        return {"turn": turn.id, "outcome": (await turn.outcome()).kind.value}

    async def put(self, session: str, prompt: str) -> dict[str, Any]:
        return {"turn": (await self.host.session(session).ask(prompt)).id}

    async def close(self, session: str) -> dict[str, Any]:
        await self.host.session(session).close()
        return {}

    async def who(self) -> dict[str, Any]:
        return {}


class Here:
    """A member in this loop."""

    def __init__(self, host: Host, cluster: Cluster, member: Member, application: Application) -> None:
        self.host = host
        self.cluster = cluster
        self.member = member
        self.application = application

    async def place(self, folder: Path, need: Sequence[str] = (), **how: Any) -> tuple[str, str]:
        """Place a session with a fake agent; return its id and the name of the host that took it."""
        how = {"cwd": str(folder), "command": command(folder), "options": QUICK, **how}
        tries = 0
        while True:
            tries += 1
            session = f"s-{uuid.uuid4().hex[:12]}"
            request = json.dumps({"do": "open", "session": session, "how": how}).encode()
            answer = json.loads(await self.cluster.placement.place(session, need, request, timeout=SECONDS_MAX))
            if answer.get("error") != "NotOwner" or tries == PLACES_MAX:
                assert answer.get("session") == session, answer
                return session, answer["host"]

    async def ask(self, session: str, **question: Any) -> dict[str, Any]:
        """Send a question until the current owner, or the host that takes the session over, answers it."""
        data = json.dumps({"session": session, **question}).encode()
        async with asyncio.timeout(SECONDS_MAX):
            while True:
                try:
                    answer = json.loads(await self.cluster.bus.ask_owner(session, data, timeout=SECONDS_MAX))
                    if answer.get("error") not in ("NotOwner", "Moving", "Closed"):
                        return answer
                except (NoOwner, Unreachable):
                    pass
                await asyncio.sleep(0.02)  # No event announces the next owner.


def command(folder: Path) -> list[str]:
    return fake_agent.command((), evidence=folder / "evidence", memory=folder / "memory")


@asynccontextmanager
async def here(url: str, name: str, *, secrets: Sequence[str] = (), **how: Any) -> AsyncGenerator[Here]:
    async with Host(url, secrets=secrets) as host:
        await host.ready()
        cluster = host.cluster
        assert cluster is not None
        application = Application(host, name)
        async with Member(host, cluster, name=name, application=application, **how) as member:
            yield Here(host, cluster, member, application)


class There:
    """A member in another process."""

    def __init__(self, process: subprocess.Popen[bytes], url: str) -> None:
        self.process = process
        self.url = url
        self.id = ""

    async def read(self) -> str:
        assert self.process.stdout is not None
        line = await asyncio.to_thread(self.process.stdout.readline)
        assert line, "it died before it said anything"
        return line.decode().strip()

    def tell(self, word: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(word.encode() + b"\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    async def lose(self) -> None:
        """Kill the process and end its lease."""
        self.kill()
        await end_lease(self.url, self.id)


@asynccontextmanager
async def there(
    url: str, name: str, *, room: int, labels: Sequence[str] = (), home: Path | None = None, mirrors: bool = True
) -> AsyncGenerator[There]:
    """Start a member in another process.

    `home`: a separate home folder, as on another machine.
    """
    words = [sys.executable, "-m", "tests.cluster.members", url, name, str(room), str(int(mirrors)), *labels]
    env = {**os.environ, **({} if home is None else {"HOME": str(home)})}
    with subprocess.Popen(words, cwd=REPOSITORY, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        host = There(process, url)
        try:
            host.id = await host.read()
            yield host
        finally:
            host.kill()


async def serve(url: str, name: str, room: int, mirrors: bool, labels: Sequence[str]) -> None:
    async with here(url, name, room=room, labels=labels, mirrors_transcripts=mirrors) as member:
        print(member.cluster.hosts.id, flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            if line == "drain\n":
                await member.member.drain()
                print("drained", flush=True)


def store(servers: Servers, prefix: str, lease: float = LEASE_SECONDS) -> str:
    return servers.store(prefix, lease=lease)


if __name__ == "__main__":
    signal.alarm(LIFE_SECONDS_MAX)
    _, where, who, how_many, copies, *words = sys.argv
    asyncio.run(serve(where, who, int(how_many), copies == "1", words))
