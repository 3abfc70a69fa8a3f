"""The fake Claude agent as a plain process: its frames compared with those of the real agent, and each script verb.

`claude_frames.json` holds recordings of Claude Code 2.1.325: the order of its frames in some turns, as labels, and the
keys of each kind of frame. The fake may omit keys, and must not have others.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import pytest

from banksman.testing import fake_agent
from banksman.testing.fake_agent import Evidence, Process, ScriptError

HERE = Path(__file__).resolve().parent
RECORDED: dict[str, dict[str, list[str]]] = json.loads((HERE / "claude_frames.json").read_text())
SECONDS_MAX = 20.0
PARTIAL = "--include-partial-messages"

Frame = dict[str, Any]


class Driven:
    """A fake agent and the test's ends of its pipes. All waits share the one deadline of the test."""

    def __init__(
        self,
        script: Mapping[str, Sequence[str]] | Sequence[str] = (),
        *flags: str,
        evidence: Path | None = None,
        memory: Path | None = None,
        in_packets: bool = False,
    ) -> None:
        """`in_packets`: one read returns the bytes of one write, however late it comes."""
        words = [*fake_agent.command(script, evidence=evidence, memory=memory), *flags]
        read_end, write_end = os.pipe2(os.O_CLOEXEC | (os.O_DIRECT if in_packets else 0))
        self.process = subprocess.Popen(words, stdin=-1, stdout=write_end, stderr=-1, bufsize=0)
        os.close(write_end)
        self.process.stdout = os.fdopen(read_end, "rb", buffering=0)
        self.deadline = time.monotonic() + SECONDS_MAX
        self.buffer = b""
        self.errors = b""
        self.count = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()

    # ── To the agent ──

    def write(self, data: bytes) -> None:
        assert self.process.stdin is not None
        view = memoryview(data)
        while view:
            view = view[self.process.stdin.write(view) :]

    def send(self, *frames: Frame) -> None:
        self.write(b"".join(json.dumps(frame).encode() + b"\n" for frame in frames))

    def initialize(self) -> Frame:
        self.send(request("initialize", "i"))
        return self.until("answer success")[-1]

    def ask(self, text: str) -> str:
        """Send a prompt and return its uuid; the uuids end in 1, 2, 3…"""
        self.count += 1
        frame = user(text, self.count)
        self.send(frame)
        return frame["uuid"]

    def turn(self, text: str) -> list[str]:
        """Ask, and return the labels of all frames until the turn is complete."""
        self.ask(text)
        return labels(self.until(f"completed {self.count}"))

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()

    # ── From the agent ──

    def lines(self) -> Iterator[bytes]:
        """Yield each line as it comes, and unterminated text at the end as the last line."""
        while True:
            line, newline, rest = self.buffer.partition(b"\n")
            if newline:
                self.buffer = rest
                yield line
            elif data := self.some():
                self.buffer += data
            else:
                self.buffer = b""
                if line:
                    yield line
                return

    def some(self) -> bytes:
        """Return the next bytes of stdout, empty at its end, and collect stderr meanwhile."""
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        out, err = self.process.stdout.fileno(), self.process.stderr.fileno()
        watched = [out, err]
        while True:
            left = self.deadline - time.monotonic()
            assert left > 0, f"nothing more came; stderr: {self.errors[-1000:]!r}"
            readable, _, _ = select.select(watched, [], [], left)
            if err in readable:
                data = os.read(err, 65536)
                self.errors += data
                if not data:
                    watched.remove(err)
            if out in readable:
                return os.read(out, 65536)

    def is_quiet(self) -> bool:
        """Whether no output comes and both pipes stay open. Silence has no event, so this waits a short time."""
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        return select.select([self.process.stdout, self.process.stderr], [], [], 0.05)[0] == []

    def frames(self) -> Iterator[Frame]:
        return (json.loads(line) for line in self.lines())

    def until(self, wanted: str) -> list[Frame]:
        """Return the frames up to the first with this label."""
        found: list[Frame] = []
        for frame in self.frames():
            found.append(frame)
            if label(frame) == wanted:
                return found
        raise AssertionError(f"no {wanted!r} in {labels(found)}; stderr: {self.errors!r}")

    def rest(self) -> list[Frame]:
        """Return all frames up to the end of stdout."""
        return [*self.frames()]

    def ended(self) -> int:
        """Return the exit code, and collect the rest of stderr."""
        code = self.process.wait(max(0.0, self.deadline - time.monotonic()))
        assert self.process.stderr is not None
        self.errors += self.process.stderr.read()
        return code


def user(text: str, number: int) -> Frame:
    uuid = f"aaaaaaaa-0000-4000-8000-00000000000{number}"
    return {"type": "user", "message": {"role": "user", "content": text}, "parent_tool_use_id": None, "uuid": uuid}


def request(subtype: str, id: str = "r", **more: object) -> Frame:
    return {"type": "control_request", "request_id": id, "request": {"subtype": subtype, **more}}


def answer(question: Frame, **response: object) -> Frame:
    success = {"subtype": "success", "request_id": question["request_id"], "response": response}
    return {"type": "control_response", "response": success}


def label(frame: Frame) -> str:
    """Label of a frame: a word or two, with the last digit of each prompt that it answers."""
    uuids = "".join(uuid[-1] for uuid in frame.get("user_message_uuids", []))
    match frame:
        case {"type": "command_lifecycle"}:
            text = f"{frame['state']} {frame['command_uuid'][-1]}"
        case {"type": "system"}:
            text = f"{frame['subtype']} {uuids}"
        case {"type": "stream_event"}:
            text = frame["event"]["type"]
        case {"type": "assistant", "message": {"content": [block]}}:
            text = f"assistant {block['type']}"
        case {"type": "user", "message": {"content": [block]}}:
            text = f"user {block['type']}"
        case {"type": "user"}:
            text = "user replay"
        case {"type": "result"}:
            text = f"result {frame['subtype']} {uuids}"
        case {"type": "control_response"}:
            text = f"answer {frame['response']['subtype']}"
        case {"type": "control_request"}:
            text = f"request {frame['request']['subtype']}"
        case _:
            text = str(frame.get("type"))
    return text.strip()


def labels(frames: Sequence[Frame]) -> list[str]:
    """Labels of frames; deltas in a row give only one."""
    found = [label(frame) for frame in frames]
    pairs = zip(["", *found], found, strict=False)
    return [now for before, now in pairs if not before == now == "content_block_delta"]


def spoken(frames: Sequence[Frame]) -> list[str]:
    """The texts of the assistant frames."""
    blocks = [frame["message"]["content"][0] for frame in frames if frame["type"] == "assistant"]
    return [block["text"] for block in blocks if block["type"] == "text"]


def results(frames: Sequence[Frame]) -> list[str | None]:
    return [frame.get("result") for frame in frames if frame["type"] == "result"]


def wait_for(path: Path) -> None:
    """Wait until the agent has touched a path."""
    deadline = time.monotonic() + SECONDS_MAX
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.001)  # A new file sends no notification, so this polls.


def unknown_keys(frame: Frame) -> set[str]:
    """The keys of a frame that the recorded frames of its kind do not have."""
    name = label(frame)
    kind = "lifecycle" if frame["type"] == "command_lifecycle" else name
    if frame["type"] in ("system", "result"):
        kind = frame["subtype"] if frame["type"] == "system" else f"result {frame['subtype']}"
    if frame["type"] == "assistant":
        kind = "assistant"
    found = set(frame) - set(RECORDED["keys"][kind])
    for part in ("response", "request"):
        if part in frame:
            found |= set(frame[part]) - set(RECORDED["keys"][f"{kind} {part}"])
    if frame["type"] == "assistant":
        found |= set(frame["message"]) - set(RECORDED["keys"]["message"])
    return found


# ── Same as the real agent ──


def test_fake_agent_answers_initialize_with_the_recorded_keys() -> None:
    with Driven() as agent:
        frame = agent.initialize()
        assert set(frame["response"]["response"]) <= set(RECORDED["keys"]["initialized"])
        assert frame["response"]["response"]["pid"] == agent.process.pid


def test_fake_agent_sends_the_recorded_frames_in_order() -> None:
    with Driven((), PARTIAL, "--replay-user-messages") as agent:
        agent.turn("first")
        assert agent.turn("@@stream 3 0") == RECORDED["orders"]["plain"]


def test_fake_agent_sends_no_key_the_real_agent_lacks() -> None:
    prompts = ["@@think hm\n@@stream 2 0\n@@tool_use Bash {}\n@@tool_result fine", "@@failure bad", "@@error worse"]
    with Driven((), PARTIAL, "--replay-user-messages") as agent:
        frames = [agent.initialize()]
        for number, prompt in enumerate(prompts, 1):
            agent.ask(prompt)
            frames += agent.until(f"completed {number}")
        agent.ask("@@ask Bash {}")
        frames += agent.until("request can_use_tool")
        agent.send(request("interrupt"), request("nonsense"))
        frames += agent.until("cancelled 4")
    found = {label(frame): unknown for frame in frames if (unknown := unknown_keys(frame))}
    assert not found
    assert {"assistant thinking", "user tool_result", "control_cancel_request"} <= set(labels(frames))


def test_fake_agent_merges_prompts_sent_while_busy_into_one_turn() -> None:
    with Driven((), PARTIAL) as agent:
        agent.ask("@@stream 2 0\n@@await queued\n@@await queued")
        agent.ask("@@stream 1 0 second")
        agent.ask("third")
        frames = agent.until("completed 3")
        seen = labels(frames)
        assert seen[seen.index("queued 2") : seen.index("result success 1")] == ["queued 2", "queued 3"]
        # The fake sends one assistant frame for each prompt. The real agent gives both prompts to one model call.
        expected = RECORDED["orders"]["merged"]
        assert [name for name in seen[seen.index("completed 1") :] if name in expected] == [
            *expected[: expected.index("result success 23")],
            *["assistant text", *expected[expected.index("result success 23") :]],
        ]
        assert frames[-3]["user_message_uuid"].endswith("3")
        assert results(frames) == ["tick0 tick1 ", "third"]


def test_fake_agent_acks_an_interrupt_then_starts_the_queued_prompt() -> None:
    with Driven((), PARTIAL) as agent:
        for _ in range(3):
            agent.turn("before")
        agent.ask("@@stream 1000 0.01")
        agent.until("content_block_delta")
        queued = agent.ask("@@stream 1 0")
        agent.until("queued 5")
        agent.send(request("interrupt"))
        frames = agent.until("completed 5")
        seen = [*frames]
        while label(seen[0]) == "content_block_delta":
            del seen[0]
        assert labels(seen) == RECORDED["orders"]["interrupted"]
        assert seen[0]["response"]["response"] == {"still_queued": [queued]}
        (aborted,) = [frame for frame in seen if label(frame) == "result error_during_execution 4"]
        assert aborted["is_error"] is True
        assert aborted["terminal_reason"] == "aborted_streaming"
        assert "result" not in aborted


def test_fake_agent_interrupt_can_drop_queued_prompts() -> None:
    with Driven() as agent:
        agent.ask("@@hang")
        agent.ask("never")
        agent.until("queued 2")
        agent.send(request("interrupt", cancel_queued=True))
        frames = agent.until("cancelled 1")
        assert frames[0]["response"]["response"] == {"still_queued": []}
        assert labels(frames)[1] == "cancelled 2"


def test_fake_agent_only_acks_an_interrupt_when_idle() -> None:
    with Driven() as agent:
        agent.turn("x")
        agent.send(request("interrupt"))
        agent.close()
        assert labels(agent.rest()) == ["answer success"]


def test_fake_agent_interrupt_during_a_tool_is_reported_as_such() -> None:
    with Driven() as agent:
        agent.ask("@@tool_use Bash {}\n@@hang")
        agent.until("assistant tool_use")
        agent.send(request("interrupt"))
        frames = agent.until("cancelled 1")
        assert labels(frames)[1:] == ["user tool_result", "user text", "result error_during_execution 1", "cancelled 1"]
        assert frames[-2]["terminal_reason"] == "aborted_tools"


def test_fake_agent_answers_control_requests_during_a_turn() -> None:
    with Driven() as agent:
        agent.ask("@@hang")
        agent.until("init 1")
        asked = [request("set_model", model="m"), request("set_permission_mode", mode="plan"), request("mcp_status")]
        agent.send(*asked, request("nonsense"))
        *good, bad = agent.until("answer error")
        assert [frame["response"]["response"] for frame in good] == [
            {"model": "m"},
            {"mode": "plan"},
            {"mcpServers": []},
        ]
        assert bad["response"]["error"] == "Unsupported control request subtype: nonsense"


def test_fake_agent_finishes_the_turn_at_the_end_of_stdin_then_exits() -> None:
    with Driven() as agent:
        agent.ask("@@stream 3 0.01")
        agent.write(json.dumps(user("unterminated", 2)).encode())
        agent.close()
        assert results(agent.rest()) == ["tick0 tick1 tick2 ", "unterminated"]
        assert agent.ended() == 0


def test_fake_agent_speak_streams_words_then_the_whole() -> None:
    with Driven((), PARTIAL) as agent:
        agent.ask("@@speak 0 one  two three")
        agent.close()
        frames = agent.rest()
        deltas = [frame["event"].get("delta", {}) for frame in frames if frame["type"] == "stream_event"]
        assert [delta["text"] for delta in deltas if "text" in delta] == ["one", " ", " two", " three"]
        assert results(frames) == ["one  two three"]


@pytest.mark.parametrize("line", [b"no json\n", b'{"type":"user"}\n'])
def test_fake_agent_dies_of_the_lines_the_real_agent_dies_of(line: bytes) -> None:
    with Driven() as agent:
        agent.write(line)
        assert agent.ended() == 1
        assert agent.errors


def test_fake_agent_ignores_the_lines_the_real_agent_ignores() -> None:
    with Driven() as agent:
        agent.write(b'\n  \r\n[1,2]\n{"type":"later"}\n')
        content = [{"type": "text", "text": "blocks"}, {"type": "image"}]
        agent.send({"type": "user", "message": {"role": "user", "content": content}})
        agent.close()
        frames = agent.rest()
        # A prompt without a uuid has no lifecycle frames.
        assert labels(frames) == ["init", "assistant text", "result success"]
        assert results(frames) == ["blocks"]


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 0), (signal.SIGKILL, -9)]
)
def test_fake_agent_ends_by_signals_like_the_real_agent(number: signal.Signals, code: int) -> None:
    with Driven() as agent:
        agent.ask("@@hang")
        agent.until("init 1")
        agent.process.send_signal(number)
        said = labels(agent.rest())
        assert agent.ended() == code
        assert ("result error_during_execution 1" in said) == (number == signal.SIGINT)


# ── The conversation ──


def test_fake_agent_resumed_knows_the_prompts_of_a_killed_process(tmp_path: Path) -> None:
    id = "33333333-3333-4333-8333-333333333333"
    with Driven((), f"--session-id={id}", memory=tmp_path) as agent:
        agent.turn("remember 42")
        agent.ask("@@kill 9")
        assert agent.rest()[-1]["session_id"] == id
        assert agent.ended() == -9
    with Driven((), f"--resume={id}", memory=tmp_path) as agent:
        agent.ask("@@recall")
        frames = agent.until("completed 1")
        assert json.loads(str(results(frames)[0])) == ["remember 42", "@@kill 9", "@@recall"]
        assert frames[-1]["session_id"] == id


def test_fake_agent_resuming_an_unknown_conversation_exits_1(tmp_path: Path) -> None:
    id = "44444444-4444-4444-8444-444444444444"
    with Driven((), "--resume", id, memory=tmp_path) as agent:
        (frame,) = agent.rest()
        assert [label(frame)] == RECORDED["orders"]["resume unknown"]
        assert frame["is_error"] is True
        assert frame["num_turns"] == 0
        assert agent.ended() == 1
        assert agent.errors.decode().strip() == f"No conversation found with session ID: {id}" == frame["errors"][0]


def test_fake_agent_fork_keeps_the_memory_and_leaves_the_original(tmp_path: Path) -> None:
    with Driven((), "--session-id=x", memory=tmp_path) as agent:
        agent.turn("both")
    with Driven((), "--resume=x", "--fork-session", memory=tmp_path) as agent:
        agent.ask("@@recall")
        frames = agent.until("completed 1")
        assert json.loads(str(results(frames)[0])) == ["both", "@@recall"]
        forked = frames[-1]["session_id"]
        assert forked != "x"
    for id, known in (("x", ["both"]), (forked, ["both", "@@recall"])):
        with Driven((), f"--resume={id}", memory=tmp_path) as agent:
            agent.ask("@@recall")
            assert json.loads(str(results(agent.until("completed 1"))[0])) == [*known, "@@recall"]


def test_fake_agent_fork_of_an_unknown_conversation_exits_1(tmp_path: Path) -> None:
    with Driven((), "--resume=none", "--fork-session", memory=tmp_path) as agent:
        assert labels(agent.rest()) == RECORDED["orders"]["resume unknown"]
        assert agent.ended() == 1


def test_fake_agent_refuses_a_session_id_in_use(tmp_path: Path) -> None:
    for code in (0, 1):
        with Driven((), "--session-id", "known", memory=tmp_path) as agent:
            agent.close()
            assert agent.rest() == []
            assert agent.ended() == code
    assert b"already in use" in agent.errors


def test_fake_agent_counts_processes_and_prompts_per_conversation(tmp_path: Path) -> None:
    script = {
        "process 1": ["stderr one"],
        "process 2": ["stderr two"],
        "prompt 1": ["exit 3"],
        "prompt 2": ["say from the second"],
        "prompt by its text": ["say by text"],
        "prompt": ["say any"],
    }
    with Driven(script, "--session-id=x", memory=tmp_path, evidence=tmp_path / "evidence") as agent:
        agent.ask("dies")
        assert agent.ended() == 3
        assert agent.errors == b"one\n"
    with Driven(script, "--resume=x", memory=tmp_path, evidence=tmp_path / "evidence") as agent:
        for text in ("again", "by its text", "other"):
            agent.ask(text)
        agent.close()
        assert results(agent.rest()) == ["from the second", "by text", "any"]
        assert agent.ended() == 0
        assert agent.errors == b"two\n"
    assert Evidence(tmp_path / "evidence").unused(script) == []


# ── Ends of turns ──


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("@@result a\n@@result b", ["result success 1", "result success 1", "completed 1"]),
        ("@@say a\n@@lifecycle completed\n@@result late", ["assistant text", "completed 1", "result success 1"]),
        ("@@say a\n@@omit completed", ["assistant text", "result success 1"]),
        ("@@say a\n@@omit result", ["assistant text", "completed 1"]),
        ("@@say a\n@@lifecycle cancelled", ["assistant text", "cancelled 1", "result success 1"]),
        ("@@say a\n@@lifecycle started\n@@lifecycle queued", ["assistant text", "started 1", "queued 1"]),
    ],
)
def test_fake_agent_sends_boundaries_and_lifecycle_as_scripted(text: str, expected: list[str]) -> None:
    with Driven() as agent:
        agent.ask(text)
        agent.close()
        assert labels(agent.rest())[3:][: len(expected)] == expected


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("omit lifecycle", ["init 1", "assistant text", "result success 1"]),
        ("omit init", ["queued 1", "started 1", "assistant text", "result success 1", "completed 1"]),
        ("omit uuids", ["queued 1", "started 1", "init", "assistant text", "result success", "completed 1"]),
    ],
)
def test_fake_agent_omits_frames_like_an_old_agent(setting: str, expected: list[str]) -> None:
    for script, prompt in (([setting], "x"), ([], f"x\n@@{setting}")):
        with Driven(script) as agent:
            agent.ask(prompt)
            agent.close()
            assert labels(agent.rest()) == expected


@pytest.mark.parametrize(
    ("point", "expected"),
    [
        ("read", ["completed 1", "result success 1", "queued 2", "started 2", "init 2"]),
        ("queued", ["completed 1", "queued 2", "result success 1", "started 2", "init 2"]),
        ("init", ["completed 1", "queued 2", "started 2", "init 2", "result success 1"]),
    ],
)
def test_fake_agent_sends_a_second_boundary_at_a_scripted_point(point: str, expected: list[str]) -> None:
    with Driven() as agent:
        agent.turn(f"@@result a\n@@lifecycle completed\n@@detach\n@@await {point}\n@@result again")
        agent.ask("next")
        frames = agent.until("completed 2")
        assert ["completed 1", *labels(frames)][: len(expected)] == expected
        assert results(frames)[0] == "again"


def test_fake_agent_boundary_can_wait_for_the_next_prompt() -> None:
    with Driven() as agent:
        agent.ask("@@say a\n@@await read\n@@result a")
        agent.until("assistant text")
        agent.ask("next")
        seen = labels(agent.until("completed 2"))
        assert seen[:3] == ["result success 1", "queued 2", "completed 1"] or seen[:2] == [
            "result success 1",
            "completed 1",
        ]


def test_fake_agent_sends_errors_in_both_shapes() -> None:
    with Driven() as agent:
        agent.ask("@@error API Error: 400")
        agent.ask("@@failure broken")
        first, second = [frame for frame in agent.until("completed 2") if frame["type"] == "result"]
        assert (first["subtype"], first["is_error"], first["terminal_reason"]) == ("success", True, "api_error")
        assert (first["result"], first["api_error_status"]) == ("API Error: 400", 400)
        assert (second["subtype"], second["is_error"], second["errors"]) == ("error_during_execution", True, ["broken"])


# ── Interrupts ──


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("on_interrupt boundary", ["answer success", "user text", "result error_during_execution 1", "cancelled 1"]),
        ("on_interrupt unacked", ["user text", "result error_during_execution 1", "cancelled 1"]),
        ("on_interrupt late_ack", ["user text", "result error_during_execution 1", "cancelled 1", "answer success"]),
        ("on_interrupt finished", ["result success 1", "completed 1", "answer success"]),
        (
            "on_interrupt ignored_early",
            ["answer success", "user text", "result error_during_execution 1", "cancelled 1"],
        ),
    ],
)
def test_fake_agent_handles_an_interrupt_as_scripted(how: str, expected: list[str]) -> None:
    with Driven() as agent:
        agent.ask(f"@@{how}\n@@hang")
        agent.until("init 1")
        agent.send(request("interrupt"))
        agent.close()
        assert labels(agent.rest()) == expected


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("on_interrupt ack_only", ["answer success"]),
        ("on_interrupt ignored", ["answer success"]),
        ("on_interrupt unanswered", []),
    ],
)
def test_fake_agent_interrupt_can_end_nothing(how: str, expected: list[str], tmp_path: Path) -> None:
    go = tmp_path / "go"
    with Driven([how]) as agent:
        agent.ask(f"@@wait {go}\n@@say went on")
        agent.until("init 1")
        # The answer to a second request shows that the first was handled.
        agent.send(request("interrupt"), request("nonsense"))
        *seen, _ = agent.until("answer error")
        assert labels(seen) == expected
        go.touch()
        agent.send(request("nonsense"))
        if how == "on_interrupt ack_only":
            assert labels(agent.until("answer error")) == ["answer error"]
        else:
            assert spoken(agent.until("completed 1")) == ["went on"]


def test_fake_agent_interrupt_before_init_is_honoured_or_ignored_as_scripted(tmp_path: Path) -> None:
    go = tmp_path / "go"
    with Driven() as agent:
        agent.ask("@@at started hang")
        agent.until("started 1")
        agent.send(request("interrupt"))
        assert labels(agent.until("cancelled 1"))[0] == "answer success"
        agent.ask(f"@@on_interrupt ignored_early\n@@at started wait {go}")
        agent.until("started 2")
        agent.send(request("interrupt"))
        agent.until("answer success")
        go.touch()
        assert labels(agent.until("completed 2"))[-2] == "result success 2"


# ── Agent-initiated turns ──


@pytest.mark.parametrize(
    ("step", "origin", "expected"),
    [
        (
            *("at read own task-notification ;; say mine", {"kind": "task-notification"}),
            ["init", "assistant text", "result success", "queued 1", "started 1", "init 1"],
        ),
        (
            *("at read own auto-continuation ;; say mine", {"kind": "auto-continuation"}),
            ["init", "assistant text", "result success", "queued 1", "started 1", "init 1"],
        ),
        (
            *("at queued own none ;; say mine", None),
            ["queued 1", "init", "assistant text", "result success", "started 1", "init 1"],
        ),
    ],
)
def test_fake_agent_opens_an_own_turn_when_a_prompt_comes(step: str, origin: Frame | None, expected: list[str]) -> None:
    with Driven() as agent:
        agent.ask(f"@@{step}")
        frames = agent.until("completed 1")
        assert labels(frames)[: len(expected)] == expected
        (mine, _) = [frame for frame in frames if frame["type"] == "result"]
        assert mine.get("origin") == origin


def test_fake_agent_opens_an_own_turn_when_idle_and_can_be_interrupted(tmp_path: Path) -> None:
    go = tmp_path / "go"
    script = [f"at idle wait {go}", "at idle own none ;; say mine ;; hang", "own task-notification ;; say early"]
    with Driven(script) as agent:
        assert labels(agent.until("result success")) == ["init", "assistant text", "result success"]
        agent.initialize()
        agent.turn("asked")
        go.touch()
        agent.until("assistant text")
        agent.ask("waits for it")
        agent.until("queued 2")
        agent.send(request("interrupt"))
        assert labels(agent.until("started 2"))[-2] == "result error_during_execution"
        agent.until("completed 2")


def test_fake_agent_opens_no_turn_inside_another() -> None:
    with Driven() as agent:
        agent.ask("@@own none ;; say mine")
        assert agent.ended() == 64


# ── Questions ──


@pytest.mark.parametrize(
    ("order", "response"),
    [
        ("permission allowed", {"behavior": "allow", "updatedInput": {}}),
        ("permission denied", {"behavior": "deny", "message": "no thanks"}),
        ("permission denied", {"foo": 1}),
        ("permission denied and interrupted", {"behavior": "deny", "message": "stop", "interrupt": True}),
        ("permission overtaken", None),
    ],
)
def test_fake_agent_asks_for_permission_as_recorded(order: str, response: Frame | None) -> None:
    with Driven() as agent:
        agent.send({**user('@@ask Bash {"command":"x"}\n@@say done', 1), "uuid": None})
        asked = agent.until("request can_use_tool")
        assert asked[-1]["request"]["tool_use_id"] == asked[-2]["message"]["content"][0]["id"]
        agent.send(request("interrupt") if response is None else answer(asked[-1], **response))
        agent.close()
        rest = agent.rest()
        assert labels([*asked, *rest]) == RECORDED["orders"][order]
        denied = response is not None and "message" in response and "interrupt" not in response
        assert len(rest[-1]["permission_denials"]) == denied


def test_fake_agent_question_ends_with_stdin_or_is_withdrawn(tmp_path: Path) -> None:
    go = tmp_path / "go"
    with Driven() as agent:
        agent.ask(f"@@ask_withdrawn Bash {go}")
        agent.until("request can_use_tool")
        go.touch()
        assert labels(agent.until("completed 1"))[:2] == ["control_cancel_request", "user tool_result"]
        agent.ask("@@ask Bash")
        question = agent.until("request can_use_tool")[-1]
        agent.send({"type": "control_cancel_request", "request_id": question["request_id"]})
        agent.until("completed 2")
        agent.ask("@@ask Bash")
        agent.until("request can_use_tool")
        agent.close()
        assert "stream closed" in agent.rest()[0]["message"]["content"][0]["content"]
        assert agent.ended() == 0


def test_fake_agent_makes_any_request_and_waits_for_its_answer(tmp_path: Path) -> None:
    go = tmp_path / "go"
    hook = '{"subtype":"hook_callback","callback_id":"hook-1","input":{"tool_name":"Bash"}}'
    with Driven([f"at initialize request {hook}"]) as agent:
        agent.send(request("initialize", "i"))
        # The handshake waits for the answer, as in the real agent with an MCP server in the host.
        asked = agent.until("request hook_callback")[-1]
        assert asked["request"] == json.loads(hook)
        assert agent.is_quiet()
        agent.send(answer(asked))
        assert labels(agent.until("answer success")) == ["answer success"]
        agent.ask(f"@@request_withdrawn {go} {hook}\n@@request {hook}\n@@say went on")
        withdrawn = agent.until("request hook_callback")[-1]
        go.touch()
        rest = agent.until("request hook_callback")
        assert rest[0] == {"type": "control_cancel_request", "request_id": withdrawn["request_id"]}
        agent.close()
        assert results(agent.rest()) == ["went on"]


def test_fake_agent_takes_refuses_or_ignores_settings() -> None:
    with Driven(["omit set_permission_mode"]) as agent:
        agent.initialize()
        agent.send(request("set_permission_mode", "a", mode="plan"), request("set_model", "b", model="other"))
        (taken,) = agent.until("answer success")
        assert taken["response"] == {"subtype": "success", "request_id": "b", "response": {"model": "other"}}
        agent.ask("@@omit set_model\n@@refuse set_permission_mode\n@@refuse set_model\n@@ask Bash")
        question = agent.until("request can_use_tool")[-1]
        agent.send(request("set_permission_mode", "c"), request("set_model", "d"), answer(question, behavior="deny"))
        assert "answer error" not in labels(agent.until("completed 1"))
    with Driven(["refuse set_permission_mode", "refuse set_model", "refuse initialize"]) as agent:
        for subtype in ("set_permission_mode", "set_model", "initialize"):
            agent.send(request(subtype, subtype))
            assert agent.until("answer error")[-1]["response"]["request_id"] == subtype


def test_fake_agent_boundary_has_the_scripted_members() -> None:
    with Driven() as agent:
        agent.ask('@@say text\n@@boundary {"structured_output":{"a":1},"total_cost_usd":0.5}')
        result = next(frame for frame in agent.until("completed 1") if frame["type"] == "result")
        assert (result["structured_output"], result["total_cost_usd"]) == ({"a": 1}, 0.5)
        assert (result["subtype"], result["result"], result["user_message_uuids"][0][-1]) == ("success", "text", "1")


def test_fake_agent_thinking_says_nothing_else() -> None:
    with Driven() as agent:
        agent.ask("@@thinking 3 0.001")
        said = agent.until("completed 1")
        deltas = [frame["event"]["delta"] for frame in said if label(frame) == "content_block_delta"]
        assert [delta["type"] for delta in deltas] == ["thinking_delta"] * 3
        assert not [frame for frame in said if frame["type"] == "assistant"]


# ── Handshakes ──


def test_fake_agent_touches_and_waits_for_files_and_fifos(tmp_path: Path) -> None:
    reached, go, told, tell = (tmp_path / name for name in ("reached", "go", "told", "tell"))
    os.mkfifo(told)
    os.mkfifo(tell)
    with Driven() as agent:
        agent.ask(f"@@say a\n@@touch {reached}\n@@wait {go}\n@@touch {told}\n@@wait {tell}\n@@pause 0.01\n@@say b")
        wait_for(reached)
        agent.until("assistant text")
        go.touch()
        assert told.read_text() == "\n"
        tell.write_text("x")
        assert spoken(agent.until("completed 1")) == ["b"]


# ── Bad output ──


def test_fake_agent_writes_junk_unchanged() -> None:
    kinds = ("text", "blank", "unknown", "not_utf8", "not_object")
    with Driven() as agent:
        agent.ask("@@junk text\n@@junk blank\n@@junk unknown\n@@junk not_utf8\n@@junk not_object\n@@raw {half")
        agent.close()
        lines = [*agent.lines()]
        assert b"Info: this is not for you" in lines
        assert b"" in lines
        assert b'{"type":"keep_alive"}' in lines
        assert b"[1,2]" in lines
        assert b"{half" in lines
        assert len([line for line in lines if line.startswith(b"\xff")]) == 1
        assert len(kinds) == len(fake_agent.VERBS["junk"].choices)


def test_fake_agent_splits_frames_into_pieces() -> None:
    with Driven(["split 7 0.0005"], in_packets=True) as agent:
        agent.send(request("mcp_status"))
        agent.close()
        pieces = [*iter(agent.some, b"")]
        assert json.loads(b"".join(pieces))["type"] == "control_response"
        assert {len(piece) for piece in pieces[:-1]} == {7}


def test_fake_agent_floods_have_the_scripted_size() -> None:
    with Driven() as agent:
        agent.ask("@@flood 300 10000\n@@huge 3000000\n@@huge_result 2000000")
        frames = agent.until("completed 1")
        deltas = [frame for frame in frames if label(frame) == "content_block_delta"]
        assert [len(frame["event"]["delta"]["text"]) for frame in deltas] == [10000] * 300
        assert [len(text) for text in spoken(frames)] == [3_000_000]
        assert [len(str(text)) for text in results(frames)] == [2_000_000]


def test_fake_agent_reads_on_while_its_flood_is_unread() -> None:
    with Driven() as agent:
        agent.ask("@@flood 1000000 10000")
        agent.until("init 1")
        # More than a pipe holds: this write returns only if the agent reads its stdin.
        agent.write(b"\n" * 300_000)
        agent.send(request("interrupt"))
        assert labels(agent.until("cancelled 1"))[-2] == "result error_during_execution 1"


def test_fake_agent_writes_text_and_flood_to_stderr() -> None:
    with Driven() as agent:
        agent.ask("@@stderr a word\n@@stderr_flood 300050")
        agent.close()
        assert results(agent.rest()) == [""]
        assert agent.ended() == 0
        first, _, flood = agent.errors.partition(b"\n")
        assert first == b"a word"
        assert len(flood) == 300_050


# ── Misbehaviour ──


def test_fake_agent_can_leave_initialize_unanswered_or_late(tmp_path: Path) -> None:
    with Driven(["omit initialize"]) as agent:
        agent.send(request("initialize"), request("mcp_status"))
        agent.close()
        assert agent.rest()[0]["response"]["response"] == {"mcpServers": []}
    go = tmp_path / "go"
    with Driven([f"at initialize wait {go}"]) as agent:
        agent.send(request("initialize"), request("nonsense"))
        assert labels(agent.until("answer error")) == ["answer error"]
        go.touch()
        agent.until("answer success")


@pytest.mark.parametrize(("word", "number"), [("ignore term", signal.SIGTERM), ("ignore int", signal.SIGINT)])
def test_fake_agent_can_ignore_signals(word: str, number: signal.Signals) -> None:
    with Driven() as agent:
        agent.turn(f"@@{word}")
        agent.process.send_signal(number)
        agent.turn("still there")


def test_fake_agent_can_ignore_the_end_of_stdin() -> None:
    with Driven(["ignore eof"]) as agent:
        agent.ask("x")
        agent.until("completed 1")
        agent.close()
        assert agent.is_quiet()
        agent.process.send_signal(signal.SIGTERM)
        assert agent.ended() == 143


def test_fake_agent_stops_reading_until_released(tmp_path: Path) -> None:
    go = tmp_path / "go"
    with Driven([f"stop_reading {go}"], evidence=tmp_path / "evidence") as agent:
        assert agent.process.stdin is not None
        os.set_blocking(agent.process.stdin.fileno(), False)
        written = 0
        while count := agent.process.stdin.write(b"\n" * 4096):
            written += count
        go.touch()
        os.set_blocking(agent.process.stdin.fileno(), True)
        agent.turn("x")
        (process,) = Evidence(tmp_path / "evidence").processes
        assert process.stdin[:written] == b"\n" * written


def test_fake_agent_can_read_slowly() -> None:
    with Driven(["read_slowly 50 0.0001"]) as agent:
        assert agent.turn("x" * 1000)[-1] == "completed 1"


def test_fake_agent_continues_after_closing_stdin(tmp_path: Path) -> None:
    go = tmp_path / "go"
    with Driven() as agent:
        agent.ask(f"@@close_stdin\n@@say deaf\n@@wait {go}\n@@exit 4")
        agent.until("assistant text")
        with pytest.raises(BrokenPipeError):
            agent.send(request("interrupt"))
        go.touch()
        assert agent.ended() == 4


def test_fake_agent_continues_after_closing_stdout(tmp_path: Path) -> None:
    done = tmp_path / "done"
    with Driven() as agent:
        agent.ask(f"@@say last\n@@close_stdout\n@@touch {done}")
        assert spoken(agent.rest()) == ["last"]
        wait_for(done)
        assert agent.process.poll() is None


@pytest.mark.parametrize("how", ["hold 60 child", "hold 60 setsid"])
def test_fake_agent_child_holds_stdout_after_its_exit(how: str, tmp_path: Path) -> None:
    with Driven(evidence=tmp_path) as agent:
        agent.ask(f"@@{how}\n@@exit 0")
        assert agent.process.wait(SECONDS_MAX) == 0
        (holder,) = Evidence(tmp_path).processes[0].holders
        try:
            assert (os.getsid(holder) == os.getsid(0)) == (how == "hold 60 child")
            agent.until("init 1")
            assert agent.is_quiet()
        finally:
            os.kill(holder, signal.SIGTERM)
        assert agent.rest() == []


@pytest.mark.parametrize(
    ("text", "last", "code"),
    [
        ("@@at read exit 3", None, 3),
        ("@@at queued exit 3", "queued 1", 3),
        ("@@at started kill 9", "started 1", -9),
        ("@@stream 2 0\n@@kill 9", "message_stop", -9),
        ("@@at result exit 3", "result success 1", 3),
        ("@@at completed exit 3", "completed 1", 3),
        ("@@at idle kill 15", "completed 1", 143),
    ],
)
def test_fake_agent_dies_at_a_scripted_point(text: str, last: str | None, code: int) -> None:
    with Driven() as agent:
        agent.ask(text)
        frames = agent.rest()
        assert (label(frames[-1]) if frames else None) == last
        assert agent.ended() == code


@pytest.mark.parametrize(("point", "expected"), [("interrupt", []), ("acked", ["answer success"])])
def test_fake_agent_dies_around_an_ack(point: str, expected: list[str]) -> None:
    with Driven([f"at {point} exit 5"]) as agent:
        agent.ask("@@hang")
        agent.until("init 1")
        agent.send(request("interrupt"))
        assert labels(agent.rest()) == expected
        assert agent.ended() == 5


def test_fake_agent_dies_at_start_or_at_the_end_of_stdin() -> None:
    with Driven(["at eof exit 6"]) as agent:
        agent.close()
        assert agent.ended() == 6
    with Driven(["at start exit 7"]) as agent:
        assert agent.ended() == 7


def test_fake_agent_dies_halfway_through_a_frame() -> None:
    with Driven() as agent:
        agent.ask("@@half whole\n@@exit 0")
        *_, cut = agent.lines()
        assert cut.startswith(b'{"type":"assistant"')
        with pytest.raises(ValueError, match=r"Unterminated|Expecting"):
            json.loads(cut)


# ── Scripts and evidence ──


@pytest.mark.parametrize(
    "script",
    [
        ["shout hello"],
        ["at noon say hello"],
        ["say"],
        ["exit now"],
        ["exit 256"],
        ["omit nothing"],
        ["pause 121"],
        ["huge 99999999999"],
        ["recall too much"],
        ["own none ;; shout"],
        {"process one": []},
        {"turn 1": ["say x"]},
        "say hello",
    ],
)
def test_fake_agent_refuses_an_impossible_script(script: Any) -> None:
    with pytest.raises(ScriptError):
        fake_agent.command(script)


def test_fake_agent_exits_loudly_on_an_unknown_verb() -> None:
    with Driven() as agent:
        agent.ask("@@shout hello")
        assert agent.ended() == 64
        assert b"no verb 'shout'" in agent.errors
    words = [*fake_agent.command()[:-1], '--fake-script={"process": ["shout"]}']
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=SECONDS_MAX)
    assert done.returncode == 64
    assert b"no verb 'shout'" in done.stderr


def test_fake_agent_evidence_holds_stdin_to_the_byte(tmp_path: Path) -> None:
    script = {"prompt 1": ["say a", "at acked say never"], "prompt 2": ["say b"]}
    sent: list[bytes] = []
    for text in ("one", "zwei é"):
        with Driven(script, "--model=x", "--resume", "none", evidence=tmp_path) as agent:
            assert agent.ended() == 1
        with Driven(script, "--model=x", evidence=tmp_path) as agent:
            sent.append(json.dumps(user(text, 1), ensure_ascii=False).encode() + b"\n\n")
            agent.write(sent[-1])
            agent.until("completed 1")
            agent.write(b'{"type":"cu')
            agent.close()
            agent.ended()
            sent[-1] += b'{"type":"cu'
    _, first, _, second = Evidence(tmp_path).processes
    assert [first.stdin, second.stdin] == sent
    assert first.frames[0]["message"]["content"] == "one"
    assert first.argv[-1] == "--model=x"
    assert "PATH" in first.env
    assert first.steps == [("prompt 1#0", "say", "say a")]
    assert [step.text for step in Evidence(tmp_path).unused(script)] == ["at acked say never", "say b"]
    assert isinstance(first, Process)


def test_fake_agent_runs_as_a_module() -> None:
    words = [fake_agent.command()[0], "-m", "banksman.testing.fake_agent", "--input-format", "stream-json"]
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=SECONDS_MAX)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_fake_agent_starts_without_slow_imports() -> None:
    """A slow import would cost its time in each of a hundred tests."""
    words = fake_agent.command()
    words[3:3] = ["-X", "importtime"]
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, check=True, timeout=SECONDS_MAX)
    modules = {line.rpartition("|")[2].strip() for line in done.stderr.decode().splitlines()}
    ours = {name for name in modules if name.startswith("banksman")}
    assert {name for name in ours if not name.startswith("banksman.testing.fake_agent")} == {
        "banksman",
        "banksman.runtime",
        "banksman.runtime.shutdown",
        "banksman.testing",
        "banksman.testing.fake_process",
        "banksman.testing.fake_script",
    }
    assert not modules & {"ast", "asyncio", "dataclasses", "inspect", "msgspec", "pathlib", "site", "typing"}


@pytest.mark.thorough
def test_fake_agent_verbs_are_all_used_by_tests() -> None:
    assert not fake_agent.unused_verbs(HERE.parent.rglob("*.py"))


def test_unused_verbs_finds_a_verb_without_a_use(tmp_path: Path) -> None:
    source = tmp_path / "test_some.py"
    source.write_text('"""\nsay a docstring\n"""\nSTEPS = ["at init omit init", f"exit {3}", "@@own none ;; recall"]\n')
    unused = fake_agent.unused_verbs([source])
    assert "say" in unused
    assert "omit result" in unused
    assert not unused & {"omit init", "exit", "own none", "recall"}


def test_fake_agent_verbs_and_points_are_all_described() -> None:
    assert all(verb.doc.endswith((".", "…")) for verb in fake_agent.VERBS.values())
    assert all(fake_agent.POINTS.values())
