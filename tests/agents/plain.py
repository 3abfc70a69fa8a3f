"""Rivals: the first version that a programmer writes. `PlainProcess` is for all agents, `PlainAgent` for Claude Code.

It is `subprocess.Popen` in a new session, a thread that reads lines, hand-written frames, and `killpg(SIGKILL)` at the
end. It is not written to fail: it answers questions, matches results and has deadlines. Its gap is in the design: the
agent's tools run in other sessions, which `killpg` does not reach.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from tests.agents.ground import WAIT_SECONDS_MAX, Ground, wait

Frame = dict[str, Any]
Judge = Callable[[str], "str | None"]

STREAM_JSON = (
    *("--print", "--input-format", "stream-json", "--output-format", "stream-json", "--verbose"),
    *("--include-partial-messages", "--permission-prompt-tool", "stdio"),
)


def always(_: str) -> str:
    return "allow"


class PlainProcess:
    """One process of an agent, and every message that it has sent. Subclasses know the protocol."""

    def __init__(self, command: Sequence[str], *, cwd: Path, env: Mapping[str, str]) -> None:
        self.messages: list[Frame] = []
        self._is_over = False
        # Protects `messages` and `_is_over`, which the reader writes. The holder calls nothing.
        self._news = threading.Condition()
        # Protects stdin: the reader answers questions while a step asks. The holder only writes.
        self._stdin = threading.Lock()
        self.process = subprocess.Popen(
            command,
            cwd=cwd,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    # -- sending -----------------------------------------------------------------------------------------------------
    def send(self, message: Frame) -> None:
        with self._stdin:
            self._write(message)

    def _write(self, message: Frame) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message).encode() + b"\n")
        self.process.stdin.flush()

    # -- receiving ---------------------------------------------------------------------------------------------------
    def wait(self, is_wanted: Callable[[Frame], bool], what: str, after: int = 0) -> Frame:
        """Block until a message satisfies `is_wanted`, and return it."""
        end = time.monotonic() + WAIT_SECONDS_MAX
        with self._news:
            while True:
                for message in self.messages[after:]:
                    if is_wanted(message):
                        return message
                after = len(self.messages)
                assert not self._is_over, f"the agent ended before {what}"
                assert self._news.wait(end - time.monotonic()), f"waited {WAIT_SECONDS_MAX:g} s for {what}"

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._hear(json.loads(line))
        with self._news:
            self._is_over = True
            self._news.notify_all()

    def _hear(self, message: Frame) -> None:
        """Note a message, and answer it if it is a question."""
        with self._news:
            self.messages.append(message)
            self._news.notify_all()

    # -- ending ------------------------------------------------------------------------------------------------------
    def kill(self) -> None:
        """Kill the process group: the first attempt of most programmers, and often believed to be complete."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # A step has killed it and waited for it.
        self.process.wait(WAIT_SECONDS_MAX)

    def close(self) -> None:
        """Close the pipes, after every process of the agent is gone.

        A survivor may hold the other end, and then the reader would block.
        """
        self._reader.join(WAIT_SECONDS_MAX)
        assert not self._reader.is_alive(), "somebody still holds the agent's stdout"
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except BrokenPipeError:
                pass  # The buffer still held bytes to write.


class PlainAgent(PlainProcess):
    """Claude Code."""

    def __init__(
        self, ground: Ground, *, command: Sequence[str] = (), resume: str | None = None, judge: Judge = always
    ) -> None:
        self._judge = judge
        # `_news` protects it too.
        self.questions: list[Frame] = []
        resumed = [f"--resume={resume}"] if resume else []
        command = [*(command or [ground.claude]), *STREAM_JSON, *resumed]
        super().__init__(command, cwd=ground.work, env=ground.env())

    # -- sending -----------------------------------------------------------------------------------------------------
    def ask(self, prompt: str) -> str:
        """Send a prompt, and return the id under which the agent reports on it."""
        ref = str(uuid.uuid4())
        message = {"role": "user", "content": prompt}
        self.send({"type": "user", "message": message, "parent_tool_use_id": None, "session_id": "", "uuid": ref})
        return ref

    def interrupt(self) -> None:
        """Send an interrupt, and wait for its acknowledgement."""
        request = str(uuid.uuid4())
        self.send({"type": "control_request", "request_id": request, "request": {"subtype": "interrupt"}})
        self.wait(
            lambda frame: frame["type"] == "control_response" and frame["response"]["request_id"] == request,
            "the acknowledgement of an interrupt",
        )

    # -- receiving ---------------------------------------------------------------------------------------------------
    def result(self, ref: str) -> Frame:
        """Return the result that names a prompt. Several prompts may share a result."""
        return self.wait(lambda frame: frame["type"] == "result" and ref in refs(frame), "a result")

    def answer(self, prompt: str) -> Frame:
        return self.result(self.ask(prompt))

    def heard(self, text: str) -> None:
        self.wait(lambda frame: frame["type"] == "stream_event" and text in json.dumps(frame), f"{text!r}")

    def wait_question(self) -> None:
        """Wait for a question that the judge has no answer to."""
        self.wait(lambda frame: frame["type"] == "control_request" and frame in self.questions, "a question")

    def results(self) -> list[Frame]:
        with self._news:
            return [frame for frame in self.messages if frame["type"] == "result"]

    @property
    def conversation(self) -> str:
        return str(self.results()[-1]["session_id"])

    def _hear(self, message: Frame) -> None:
        decision = None
        if message["type"] == "control_request":
            decision = self._judge(message["request"]["input"]["command"])
            if decision is None:
                with self._news:
                    self.questions.append(message)
        super()._hear(message)
        if decision is not None:
            self._answer(message, decision)

    def _answer(self, question: Frame, decision: str) -> None:
        given: Frame = {"behavior": decision}
        given |= {"updatedInput": question["request"]["input"]} if decision == "allow" else {"message": "denied"}
        response = {"subtype": "success", "request_id": question["request_id"], "response": given}
        try:
            self.send({"type": "control_response", "response": response})
        except BrokenPipeError:
            pass  # The agent was killed while it asked.


class Rival(Protocol):
    """An agent that is started and ended by plain means, whichever protocol it speaks."""

    def ask(self, prompt: str) -> str: ...
    def kill(self) -> None: ...
    def close(self) -> None: ...


GroundT = TypeVar("GroundT", bound=Ground)
RivalT = TypeVar("RivalT", bound=Rival)


class PlainCase(Generic[GroundT, RivalT]):
    """One step on the rival. It records every agent that it started, and kills their groups."""

    def __init__(self, ground: GroundT) -> None:
        self.ground = ground
        self._rivals: list[RivalT] = []

    def keep(self, rival: RivalT) -> RivalT:
        self._rivals.append(rival)
        return rival

    def wait_tool(self, name: str = "tool") -> None:
        wait(lambda: self.ground.is_tool_up(name), f"the tool {name!r}")
        self.ground.check_tool(name)

    def in_tool(self, rival: RivalT, name: str) -> str:
        """Start a turn that runs a tool in the foreground, and return the reference of its prompt."""
        ref = rival.ask(f"{self.ground.tool(name, is_background=False)}\n@@text after it")
        self.wait_tool(name)
        return ref

    def kill(self) -> None:
        for rival in self._rivals:
            rival.kill()

    def close(self) -> None:
        for rival in self._rivals:
            rival.close()


def refs(result: Frame) -> list[str]:
    """Return the prompts that a result names."""
    return result.get("user_message_uuids") or [result.get("user_message_uuid") or ""]


def begin_by_its_own_cli(ground: Ground) -> str:
    """Begin a conversation by the agent's own CLI, as in a terminal, and return its id."""
    done = subprocess.run(
        [ground.claude, "--print", "--output-format=json", "@@text begun by hand"],
        cwd=ground.work,
        env=ground.env(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=WAIT_SECONDS_MAX,
        check=True,
    )
    result: Frame = json.loads(done.stdout)
    assert result["result"] == "begun by hand"
    return str(result["session_id"])
