"""A planned restart of the server, with a real agent in the middle of its work.

Two sessions of one server do the same. The server is restarted in the middle of the first turn of the second one, and
afterwards both transcripts must be the same. tests/sessions/test_hand_over.py has every failure of a hand-over, with
the fake agents. This test adds the timing, the output and the tools of the real ones.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import signal
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path

import pytest
from tests.agents import count
from tests.agents.agents import RealAgent
from tests.agents.ground import wait
from tests.agents.matrix.place import Place, Places, making_places
from tests.server.api.test_session_routes import wait_for
from tests.server.kit import Served
from tests.server.ops.test_server_hand_over import end, processes, serving

from banksman import Event, Host
from banksman.core.session import event as kinds
from banksman.testing import checks

WAITING = 20
# Of two frames that differ.
SHOWN_BYTES_MAX = 300
# Of the same length, because the model counts the letters of paths as tokens.
WHOLE, CUT = "whole", "twice"
# A member of a JSON object with a plain value, and an id, by the pattern of its name.
MEMBER = rb'"%s": ?(?:"[^"]*"|[0-9.]+|null)'
ID = rb"\b%s[_-][0-9a-f]{16,32}"
# Parts of frames that differ from run to run, even without a restart. The test of the comparison shows that each is
# needed. A name stands for the same thing wherever it comes, so it becomes the number of that thing: ids, pids, and the
# folder of the session. Of a time, and of a count that depends on one, the type of the value remains.
IN_BOTH = {
    "uuid": rb"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f-]{22}",
    "message": ID % b"msg",
    "milliseconds": MEMBER % rb"\w*[Mm]s",
    "folder": rb"(?<=[/-])(?:whole|twice)(?=[/-])",
}
PARTS = {
    "claude": {
        **IN_BOTH,
        "tool": ID % b"toolu",
        "request": ID % b"req",
        "turn": ID % b"t",
        "timestamp": MEMBER % b"timestamp",
        "pid": MEMBER % b"pid",
        "socket": rb"cc-socks(?:-[0-9]+)?/[0-9]+",
    },
    "codex": {
        **IN_BOTH,
        "call": ID % b"call",
        "at": MEMBER % rb"\w*At",
        "process": MEMBER % b"processId",
        "tokens": MEMBER % rb"\w*[Tt]okens",
        "rollout": rb"rollout-[0-9a-fT-]+",
    },
}
VALUES = frozenset(("milliseconds", "timestamp", "at", "tokens"))
# Codex tells the model for how long a command ran, and the fake model counts the digits.
DIFFER_AT_TIMES = frozenset(("tokens",))
# Claude Code reports a command as a task when it has run for some seconds.
TASK = b'{"type":"system","subtype":"task_'
# The method of a frame of Codex, or that it answers one.
METHOD = re.compile(rb'{"(?:id|method)":(?:"[^"]*")?')
Restart = Callable[[], None]


@pytest.fixture
def place(real_agent: Callable[[str], RealAgent], tmp_path: Path) -> Generator[Places]:
    with making_places(tmp_path, real_agent) as places:
        yield places


@pytest.fixture
def served(tmp_path: Path) -> Generator[Served]:
    with serving(tmp_path / "server") as served:
        yield served


class Scene:
    """One session with a real agent, and the asks that wait behind its first turn."""

    def __init__(self, served: Served, place: Place, *, waiting: int = WAITING) -> None:
        """`waiting`: the number of asks that wait behind the first turn."""
        self.served = served
        self._waiting = waiting
        self.place = place
        self.id = ""
        self.turn = ""
        self.waiting: list[str] = []
        self.events: list[Event] = []

    def path(self, name: str) -> Path:
        return self.place.path(name)

    def begin(self, *lines: str, rule: str = "allow") -> None:
        # A session with `env=` is not handed over. So the command line has the whole environment of the agent.
        variables = [f"{name}={value}" for name, value in self.place.env().items()]
        opened = {
            "agent": self.place.agent.name,
            "command": ["/usr/bin/env", "-i", *variables, *self.place.command()],
            "cwd": str(self.place.work),
            "permission_mode": self.place.agent.permission_mode,
            "rules": {"*": rule},
            # A test stops the process of an agent that is being interrupted.
            "options": {"drain_seconds": 100.0},
        }
        self.id = self.served.post("/v1/sessions", opened)["id"]
        self.turn = self.served.ask(self.id, "\n".join(lines))
        self.waiting = [self.served.ask(self.id, f"@@text answer {number}") for number in range(self._waiting)]

    def pid(self) -> int:
        """Return the process of the agent. The tree begins with it."""
        return processes(self.served, self.id)[0]

    def wait_text(self, text: str) -> None:
        with self.served.stream(f"/v1/sessions/{self.id}/events?partial=true") as stream:
            for message in stream.messages():
                if message.id is not None and message.data["kind"] == kinds.UPDATE and text in json.dumps(message.data):
                    return
        raise AssertionError(f"the agent did not say {text!r}")

    def finish(self, kind: str = "done") -> None:
        """Check the outcomes, close the session, and check that it leaves no process."""
        ended = [self.served.outcome(self.id, turn) for turn in (self.turn, *self.waiting)]
        assert [each["kind"] for each in ended] == [kind, *["done"] * self._waiting], ended
        assert [each["text"] for each in ended[1:]] == [f"answer {number}" for number in range(self._waiting)]
        assert self.served.request("DELETE", f"/v1/sessions/{self.id}").status < 300
        assert not count.marked(self.place.mark)
        self.events = asyncio.run(self._read())

    async def _read(self) -> list[Event]:
        async with Host(self.served.settings["store"]) as host:
            return [event async for event in host.session(self.id).events(0, waits=False)]

    def check_processes(self, events: Sequence[Event], *, restarts: int) -> None:
        """Check that one process has served everything, and that its model was called for each ask once."""
        checks.log(events)
        checks.turns(events)
        found = [event.kind for event in events]
        assert found.count(kinds.PROCESS_STARTED) == 1
        assert found.count(kinds.PROCESS_ADOPTED) == restarts
        assert kinds.SESSION_RECOVERED not in found


class Mask:
    """Replace the parts of one log that differ from run to run."""

    def __init__(self, parts: Mapping[str, bytes]) -> None:
        named = (b"(?P<%s>%s)" % (name.encode(), part) for name, part in parts.items())
        self._variable = re.compile(b"|".join(named))
        self._numbers: dict[bytes, int] = {}

    def on(self, frame: bytes) -> bytes:
        return self._variable.sub(self._plain, frame)

    def _plain(self, match: re.Match[bytes]) -> bytes:
        name = match.lastgroup
        assert name is not None
        if name in VALUES:
            member, _, value = match[0].partition(b":")
            kind = {b'"': b"text", b"n": b"null"}.get(value.strip()[:1], b"number")
            return b"%s:%s" % (member, kind)
        return b"<%s %d>" % (name.encode(), self._numbers.setdefault(match[0], len(self._numbers)))


def spoken(events: Sequence[Event], parts: Mapping[str, bytes]) -> dict[bytes, list[bytes]]:
    """Return the frames in order, by their direction and, for Codex, by their method.

    Leaves out what differs from run to run: parts of frames, and whether a frame to the agent overtook one from it.
    Codex writes its notifications and its answers from several threads.
    """
    found: dict[bytes, list[bytes]] = {}
    for event in events:
        if event.kind in kinds.FRAMES and not event.data.startswith(TASK):
            method = METHOD.match(event.data)
            writer = event.kind.encode() + (method[0] if method else b"")
            found.setdefault(writer, []).append(event.data)
    mask = Mask(parts)
    return {writer: [mask.on(frame) for frame in found[writer]] for writer in sorted(found)}


def difference(one: Sequence[Event], other: Sequence[Event], parts: Mapping[str, bytes]) -> str:
    """Say where the frames of two logs first differ, without some parts. Empty: they are equal byte for byte."""
    ours, theirs = spoken(one, parts), spoken(other, parts)
    for writer in ours.keys() | theirs.keys():
        pairs = itertools.zip_longest(ours.get(writer, ()), theirs.get(writer, ()), fillvalue=b"")
        for number, pair in enumerate(pairs):
            if len(set(pair)) > 1:
                equal = sum(1 for _ in itertools.takewhile(lambda two: two[0] == two[1], zip(*pair, strict=False)))
                begin = max(0, equal - SHOWN_BYTES_MAX // 2)
                shown = [frame[begin : begin + SHOWN_BYTES_MAX] for frame in pair]
                return f"frame {number} of {writer!r}, from byte {begin}: {shown}"
    return ""


# -- moments of a restart --------------------------------------------------------------------------------------------
def in_a_stream(scene: Scene, restart: Restart) -> None:
    """The agent streams before the restart, while no server reads it, and after the restart."""
    go, end = scene.path("go"), scene.path("end")
    scene.begin("@@slow 20 0.02", f"@@wait {go}", "@@slow 20 0.02", f"@@wait {end}", "@@text that is all")
    scene.wait_text("tick20 ")
    go.touch()
    restart()
    end.touch()
    scene.finish()


def in_a_tool(scene: Scene, restart: Restart) -> None:
    go, reached = scene.path("go"), scene.path("reached")
    os.mkfifo(go)
    scene.begin(scene.place.agent.run(f"touch {reached}; read line < {go}"), "@@text after it")
    wait(reached.exists, "the tool")
    restart()
    go.write_text("now\n")
    scene.finish()


def in_a_question(scene: Scene, restart: Restart) -> None:
    scene.begin(scene.place.touch("made"), "@@text made it", rule="ask")
    asked = wait_for(scene.served, scene.id, kinds.QUESTION_ASKED, turn=scene.turn)["body"]["question"]
    restart()
    assert not scene.place.is_made("made")
    scene.served.post(f"/v1/sessions/{scene.id}/questions/{asked}", {"decision": "allow"})
    scene.finish()
    assert scene.place.is_made("made")


def in_an_interrupt(scene: Scene, restart: Restart) -> None:
    """The agent has the interrupt in its stdin, and reacts after the restart."""
    scene.begin("@@slow 5 0.02", "@@hang")
    scene.wait_text("tick5 ")
    pid = scene.pid()
    os.kill(pid, signal.SIGSTOP)
    try:
        path = f"/v1/sessions/{scene.id}/turns/{scene.turn}/interrupt"
        caller = threading.Thread(target=lambda: scene.served.request("POST", path))
        caller.start()
        wait_for(scene.served, scene.id, kinds.TURN_INTERRUPTED)
        restart()
    finally:
        os.kill(pid, signal.SIGCONT)
    caller.join()
    scene.finish("interrupted")


MOMENTS = (in_a_stream, in_a_tool, in_a_question, in_an_interrupt)


def frames(*said: bytes) -> list[Event]:
    return [Event("s", 1, seq, 0.0, None, kinds.UPDATE, data) for seq, data in enumerate(said, 1)]


@pytest.mark.parametrize(
    "other",
    [
        frames(b'{"id": "msg_%s", "ms": 2}' % (b"c" * 16), b'{"of": "msg_%s"}' % (b"d" * 16)),
        frames(b'{"id": "msg_%s", "ms": null}' % (b"c" * 16), b'{"of": "msg_%s"}' % (b"c" * 16)),
        frames(b'{"id": "msg_%s", "ms": 2}' % (b"c" * 16)),
    ],
    ids=["another id", "another type", "a frame less"],
)
def test_comparison_finds_difference_behind_a_mask(other: list[Event]) -> None:
    one = frames(b'{"id": "msg_%s", "ms": 1}' % (b"a" * 16), b'{"of": "msg_%s"}' % (b"a" * 16))
    same = frames(b'{"id": "msg_%s", "ms": 2}' % (b"c" * 16), b'{"of": "msg_%s"}' % (b"c" * 16))
    assert not difference(one, same, IN_BOTH)
    assert difference(one, other, IN_BOTH)


@pytest.mark.parametrize("agent", PARTS)
def test_comparison_leaves_out_only_what_differs_between_two_runs_without_a_restart(
    agent: str, real_agent: Callable[[str], RealAgent], tmp_path: Path, served: Served
) -> None:
    needed: dict[str, str] = {}
    for moment in MOMENTS:
        folder = tmp_path / moment.__name__
        folder.mkdir()
        with making_places(folder, real_agent) as place:
            one, other = (Scene(served, place(name, agent), waiting=2) for name in (WHOLE, CUT))
            moment(one, lambda: None)
            moment(other, lambda: None)
        assert not difference(one.events, other.events, PARTS[agent])
        for name in PARTS[agent].keys() - needed.keys():
            rest = {left: part for left, part in PARTS[agent].items() if left != name}
            if found := difference(one.events, other.events, rest):
                needed[name] = found
    assert needed.keys() | DIFFER_AT_TIMES >= PARTS[agent].keys()


@pytest.mark.parametrize("agent", PARTS)
@pytest.mark.parametrize("moment", MOMENTS)
def test_turn_goes_on_in_the_next_server_as_without_a_restart(
    agent: str, moment: Callable[[Scene, Restart], None], place: Places, served: Served
) -> None:
    whole, cut = (Scene(served, place(name, agent)) for name in (WHOLE, CUT))
    moment(whole, lambda: None)

    def restart() -> None:
        before = cut.pid()
        end(served)
        served.start()
        assert cut.pid() == before

    moment(cut, restart)
    whole.check_processes(whole.events, restarts=0)
    cut.check_processes(cut.events, restarts=1)
    assert not difference(whole.events, cut.events, PARTS[agent])
    assert len(cut.place.plays()) == len(whole.place.plays())
