"""The agent that replays a recording: it repeats the recorded output to a host that uses other names."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
from tests.core.dialects.recordings import corpus
from tests.sessions.helpers import QUICK

from banksman import Event, Session, Turn
from banksman.core.session import event as kinds
from banksman.core.session.outcome import Outcome
from banksman.runtime.base_host import Host
from banksman.store.bundle import bundle
from banksman.store.memory import MemoryLog
from banksman.testing import fake_agent
from banksman.testing.fake_agent import replay

MAIN = Path(fake_agent.__file__).parent / "__main__.py"
SECONDS_MAX = 20

Frame = dict[str, Any]


def player(path: Path) -> list[str]:
    return [sys.executable, "-I", "-S", str(MAIN), "--replay", str(path)]


def played(path: Path, told: Sequence[Frame] | bytes) -> tuple[list[Frame], int, bytes]:
    """Send all frames together, close stdin, and return the agent's frames, its exit code and its stderr."""
    data = told if isinstance(told, bytes) else b"".join(json.dumps(frame).encode() + b"\n" for frame in told)
    done = subprocess.run(player(path), input=data, capture_output=True, timeout=SECONDS_MAX, check=False)
    return [json.loads(line) for line in done.stdout.splitlines()], done.returncode, done.stderr


def recorded(path: Path, *steps: tuple[str, Any]) -> Path:
    lines = [json.dumps({"t": 0.0, "d": kind, "v": value}) for kind, value in steps]
    path.write_text("\n".join(lines) + "\n")
    return path


def request(subtype: str, name: str) -> Frame:
    return {"type": "control_request", "request_id": name, "request": {"subtype": subtype}}


def answered(name: str, **response: Any) -> Frame:
    return {"type": "control_response", "response": {"subtype": "success", "request_id": name, "response": response}}


def prompt(text: str, uuid: str) -> Frame:
    return {"type": "user", "message": {"role": "user", "content": text}, "uuid": uuid}


def said(word: str) -> Frame:
    return {"type": "system", "subtype": word}


# -- recordings ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", corpus.NAMES)
def test_replay_says_the_whole_recording_under_new_names(name: str) -> None:
    told = corpus.frames(name, "in")
    names = {frame["request_id"]: f"another-{n}" for n, frame in enumerate(told) if "request_id" in frame}
    uuids = {frame["uuid"]: f"another-uuid-{n}" for n, frame in enumerate(told) if "uuid" in frame}

    def renamed(frame: Frame) -> Frame:
        text = json.dumps(frame)
        for old, new in {**names, **uuids}.items():
            text = text.replace(json.dumps(old), json.dumps(new))
        return json.loads(text)

    frames, _, _ = played(corpus.FOLDER / f"{name}.jsonl", [renamed(frame) for frame in told])
    assert frames == [renamed(frame) for frame in corpus.frames(name, "out")]


def test_replay_says_a_frame_only_after_its_prompt(tmp_path: Path) -> None:
    steps = [
        ("out", said("a")),
        ("in", prompt("x", "1")),
        ("out", said("b")),
        ("in", prompt("y", "2")),
        ("out", said("c")),
    ]
    path = recorded(tmp_path / "file", *steps)
    assert played(path, [])[0] == [said("a")]
    assert played(path, [prompt("other", "7")])[0] == [said("a"), said("b")]
    assert played(path, [prompt("other", "7"), prompt("another", "8")])[0] == [said("a"), said("b"), said("c")]


def test_replay_matches_only_frames_of_the_same_kind(tmp_path: Path) -> None:
    path = recorded(
        tmp_path / "file",
        ("in", request("set_model", "r1")),
        ("out", answered("r1", model="m")),
        ("in", prompt("x", "u1")),
        ("out", {**said("init"), "user_message_uuids": ["u1"]}),
        ("in", answered("q2")),
        ("out", said("middle")),
        ("in", answered("q1")),
        ("out", said("end")),
    )
    # In another order, as far as possible: each step waits for its own input.
    told = [prompt("x", "v1"), answered("q1"), request("set_model", "s1")]
    assert played(path, told)[0] == [answered("s1", model="m"), {**said("init"), "user_message_uuids": ["v1"]}]
    assert played(path, [*told, answered("q2")])[0][-1] == said("end")


def test_replay_does_not_mix_up_swapped_uuids(tmp_path: Path) -> None:
    path = recorded(
        tmp_path / "file",
        ("in", prompt("x", "u1")),
        ("in", prompt("y", "u2")),
        ("out", {**said("init"), "user_message_uuids": ["u1", "u2"]}),
    )
    assert played(path, [prompt("x", "u2"), prompt("y", "u1")])[0][0]["user_message_uuids"] == ["u2", "u1"]


def test_replay_answers_a_request_that_was_never_recorded(tmp_path: Path) -> None:
    path = recorded(tmp_path / "file", ("in", prompt("x", "u1")), ("out", said("end")))
    assert played(path, [request("initialize", "i"), prompt("x", "v1")])[0] == [answered("i"), said("end")]
    assert played(path, [prompt("x", "v1"), request("interrupt", "i")])[0] == [said("end"), answered("i")]


def test_replay_skips_a_repeated_interrupt(tmp_path: Path) -> None:
    path = recorded(
        tmp_path / "file",
        ("in", prompt("x", "u1")),
        ("in", request("interrupt", "a")),
        ("out", answered("a")),
        ("in", request("interrupt", "b")),
        ("out", answered("b")),
        ("out", said("end")),
        ("in", prompt("y", "u2")),
        ("in", request("interrupt", "c")),
        ("out", answered("c")),
    )
    once = [prompt("x", "v1"), request("interrupt", "k"), prompt("y", "v2")]
    assert played(path, once)[0] == [answered("k"), said("end")]
    assert played(path, [*once, request("interrupt", "l")])[0] == [answered("k"), said("end"), answered("l")]


def test_replay_exits_like_a_process_that_died_by_itself(tmp_path: Path) -> None:
    path = recorded(tmp_path / "file", ("in", prompt("x", "u1")), ("err", "no more\n"), ("ev", "exit 3"))
    assert played(path, [prompt("x", "v1")]) == ([], 3, b"no more\n")
    assert played(path, []) == ([], 0, b"")


def test_replay_of_a_stopped_process_waits_to_be_stopped(tmp_path: Path) -> None:
    path = recorded(tmp_path / "file", ("in", prompt("x", "u1")), ("ev", "stdin closed"), ("ev", "exit 3"))
    assert played(path, [prompt("x", "v1")])[1] == 0


def test_replay_exits_64_on_a_prompt_too_many(tmp_path: Path) -> None:
    path = recorded(tmp_path / "file", ("in", prompt("x", "u1")), ("out", said("end")))
    frames, code, stderr = played(path, [prompt("x", "v1"), prompt("y", "v2")])
    assert (frames, code) == ([said("end")], 64)
    assert b"no more prompts" in stderr


@pytest.mark.parametrize(
    "text", ["", "{", "[]\n", '{"a":1}\n', '{"banksman":"bundle"}\n', '{"d":"out"}\n', '{"d":"tree","v":[]}\n']
)
def test_replay_exits_64_on_a_malformed_recording(text: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text(text)
    _, code, stderr = played(tmp_path / "file", [])
    assert code == 64
    assert b"cannot be played" in stderr


def test_replay_exits_1_on_a_line_that_is_no_frame(tmp_path: Path) -> None:
    path = recorded(tmp_path / "file", ("in", prompt("x", "u1")), ("out", said("end")))
    assert played(path, b"\n[]\n{\n")[1] == 1
    assert played(path, b"\n[]\n")[1] == 0


def test_replay_starts_without_slow_imports() -> None:
    """Like the fake agent: the test checks the imports, because a time would depend on the machine."""
    code = "import sys; from banksman.testing.fake_agent import replay; print(*sys.modules)"
    source = MAIN.parents[3]
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.append({str(source)!r}); {code}"],
        capture_output=True,
        check=True,
    )
    assert not {"msgspec", "asyncio", "typing", "dataclasses", "logging"} & {*done.stdout.decode().split()}


# -- bundles ---------------------------------------------------------------------------------------------------------
def happened(kind: str, turn: str | None = None, **body: Any) -> bytes:
    return json.dumps({"kind": kind, "turn": turn, "body": body}).encode()


EXITED = happened("process.exited", code=3, signal=None)
KILLED = happened("process.exited", code=None, signal=9)
STARTED = happened("turn.started", "t-1")
FAILED = happened("turn.ended", "t-1", outcome="failed", by="exit")
STOPPED = happened("turn.ended", "t-1", outcome="interrupted", by="ladder")
NEXT = happened("process.started", process=2)
CLOSED = happened("session.closed")


@pytest.mark.parametrize(
    ("lines", "dies"),
    [
        pytest.param([STARTED, EXITED, FAILED, CLOSED], True, id="in a turn"),
        pytest.param([STARTED, KILLED, FAILED, CLOSED], False, id="in a turn, by a signal"),
        pytest.param([STARTED, EXITED, STOPPED, CLOSED], False, id="in a turn that was stopped"),
        pytest.param([STARTED, EXITED, NEXT, FAILED], False, id="in a turn that failed with the next process"),
        pytest.param([STARTED, FAILED, EXITED, NEXT, CLOSED], True, id="with nothing open"),
        pytest.param([EXITED, CLOSED], False, id="when the session was closed"),
        pytest.param([EXITED, happened("session.left")], False, id="when the session left its host"),
        pytest.param([happened("process.retired"), EXITED, NEXT], False, id="when it was let go"),
        pytest.param([], False, id="not yet"),
    ],
)
def test_replay_of_a_bundle_exits_only_if_its_process_did(lines: list[bytes], dies: bool) -> None:
    spoke = json.dumps({"kind": "update", "turn": None, "frame": "{}"}).encode()
    lives = replay.read([b'{"banksman":"bundle"}', happened("process.started", process=1), spoke, *lines])
    assert lives == [[("say", b"{}"), *([("exit", 3)] if dies else [])]]


# -- bundles of sessions ---------------------------------------------------------------------------------------------
class Told:
    """A session with its log, asked one prompt after the other."""

    def __init__(self, log: MemoryLog, session: Session) -> None:
        self.log = log
        self.session = session
        self.outcomes: list[Outcome] = []

    async def ask(self, text: str) -> None:
        self.outcomes.append(await (await self.session.ask(text)).outcome())

    async def ask_and_answer(self, text: str) -> None:
        after = self.log.head(self.session.id).seq
        turn = await self.session.ask(text)
        asked = await self.until(kinds.QUESTION_ASKED, after)
        await self.session.answer(asked.body["question"], "allow")
        self.outcomes.append(await turn.outcome())

    async def interrupt(self, text: str, last: str) -> None:
        after = self.log.head(self.session.id).seq
        turn: Turn = await self.session.ask(text)
        async for event in self.session.events(after, waits=True):
            if event.kind == kinds.UPDATE and last.encode() in event.data:
                break
        await turn.interrupt()
        self.outcomes.append(await turn.outcome())

    async def until(self, kind: str, after: int) -> Event:
        async for event in self.session.events(after, waits=True):
            if event.kind == kind:
                return event
        raise AssertionError("the session was closed before that")

    async def events(self) -> list[Event]:
        return [event async for event in self.session.events(0, waits=False)]

    async def shown(self) -> list[Any]:
        """The events that a reader sees: every update, and the kind of every other event."""
        seen = [event for event in await self.events() if event.kind != kinds.SENT]
        return [
            event.body["updates"] if event.kind == kinds.UPDATE else event.kind
            for event in seen
            # The place of an answer between the frames depends on the host.
            if event.kind not in (kinds.QUESTION_ASKED, kinds.QUESTION_ANSWERED)
        ]


async def told(command: list[str], path: Path | None, talk: Any, **how: Any) -> tuple[list[Outcome], list[Any]]:
    """Have this talk with an agent, and write a bundle of it."""
    log: list[MemoryLog] = []

    def store() -> MemoryLog:
        log.append(MemoryLog())
        return log[0]

    host: AbstractAsyncContextManager[Any] = Host(store)
    async with host as owner:
        session = await owner.open("claude", command=command, options=QUICK)
        told = Told(log[0], session)
        await talk(told)
        await session.close()
        if path is not None:
            await bundle(log[0], session.id, path, **how)
        return told.outcomes, await told.shown()


async def plain(told: Told) -> None:
    await told.ask("hello")
    await told.ask("@@think hmm\n@@stream 30 0\n@@say bye")
    await told.ask("@@failure it went wrong")


async def asked(told: Told) -> None:
    await told.ask_and_answer('@@ask Bash {"command":"ls"}\n@@say after')
    await told.ask("more")


async def interrupted(told: Told) -> None:
    await told.interrupt("@@stream 3 0\n@@say waiting\n@@hang", "waiting")
    await told.ask("more")


async def died(told: Told) -> None:
    await told.ask("hello")
    await told.ask("@@say last words\n@@exit 3")
    # Its memory is lost with it: the next process cannot resume, and the process after that begins a new conversation.
    await told.ask("again")
    await told.ask("and again")


@pytest.mark.parametrize("text", [True, False], ids=["whole", "without text"])
@pytest.mark.parametrize("talk", [plain, asked, interrupted, died])
async def test_replay_of_a_bundle_gives_the_same_outcomes(talk: Any, text: bool, tmp_path: Path) -> None:
    outcomes, shown = await told(fake_agent.command(), tmp_path / "bundle", talk, text=text)
    # The text that the talk waits for is masked, too.
    talk = _masked_talk if talk is interrupted and not text else talk
    again, shown_again = await told(player(tmp_path / "bundle"), tmp_path / "second", talk, text=text)
    assert [outcome.kind for outcome in again] == [outcome.kind for outcome in outcomes]
    assert [len(outcome.text or "") for outcome in again] == [len(outcome.text or "") for outcome in outcomes]
    if text:
        assert [outcome.text for outcome in again] == [outcome.text for outcome in outcomes]
        assert shown_again == shown
    else:
        assert [type(item) for item in shown_again] == [type(item) for item in shown]


async def _masked_talk(told: Told) -> None:
    await told.interrupt("whatever", '"text":"xxxxxxx"')
    await told.ask("more")


async def test_replay_of_a_replayed_bundle_is_the_same_talk(tmp_path: Path) -> None:
    """So a bundle can be replayed any number of times."""
    await told(fake_agent.command(), tmp_path / "first", died)
    await told(player(tmp_path / "first"), tmp_path / "second", died)
    first, second = [replay.read((tmp_path / name).read_bytes().split(b"\n")) for name in ("first", "second")]
    assert [[verb for verb, _ in life] for life in second] == [[verb for verb, _ in life] for life in first]
