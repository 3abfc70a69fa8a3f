"""Rival for the agents that speak JSON-RPC: the first version that a programmer writes.

It is `subprocess.Popen` in a new session, a thread that reads lines, numbered calls, and `killpg(SIGKILL)` at the end.
tests/agents/plain.py is the same for Claude Code.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any, ClassVar

from tests.agents.ground import WAIT_SECONDS_MAX
from tests.agents.matrix.abilities import of_acp, of_codex
from tests.agents.matrix.place import Place

Message = dict[str, Any]
# Decides from the text of a request whether a command may run.
Judge = Callable[[str], bool]


def always(_: str) -> bool:
    return True


class Rpc:
    """One process of an agent, and every message that it has sent. Subclasses know the protocol."""

    # Codex omits the `jsonrpc` member and accepts none.
    ENVELOPE: ClassVar[Message] = {"jsonrpc": "2.0"}

    def __init__(self, place: Place, judge: Judge = always) -> None:
        self.place = place
        self._judge = judge
        self.messages: list[Message] = []
        self._is_over = False
        # Protects `messages` and `_is_over`, which the reader writes. The holder calls nothing.
        self._news = threading.Condition()
        # Protects stdin and the count of calls: the reader answers questions while a step asks. The holder only writes.
        self._stdin = threading.Lock()
        self._calls = 0
        self.process = subprocess.Popen(
            place.command(),
            cwd=place.work,
            env=place.env(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    # -- sending -----------------------------------------------------------------------------------------------------
    def begin(self, method: str, params: Message) -> int:
        """Send a call, and return its number."""
        with self._stdin:
            self._calls += 1
            self._write({"id": self._calls, "method": method, "params": params})
            return self._calls

    def call(self, method: str, params: Message) -> Message:
        """Send a call, and wait for its result."""
        reply = self.reply(self.begin(method, params))
        assert "result" in reply, f"{method}: {reply.get('error')}"
        return reply["result"]

    def send(self, message: Message) -> None:
        with self._stdin:
            self._write(message)

    def _write(self, message: Message) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({**self.ENVELOPE, **message}).encode() + b"\n")
        self.process.stdin.flush()

    # -- receiving ---------------------------------------------------------------------------------------------------
    def wait(self, is_wanted: Callable[[Message], bool], what: str) -> Message:
        """Block until a message satisfies `is_wanted`, and return it."""
        end = time.monotonic() + WAIT_SECONDS_MAX
        seen = 0
        with self._news:
            while True:
                for message in self.messages[seen:]:
                    if is_wanted(message):
                        return message
                seen = len(self.messages)
                assert not self._is_over, f"the agent ended before {what}"
                assert self._news.wait(end - time.monotonic()), f"waited {WAIT_SECONDS_MAX:g} s for {what}"

    def reply(self, number: int) -> Message:
        return self.wait(lambda message: message.get("id") == number and "method" not in message, "a reply")

    def heard(self, text: str) -> None:
        self.wait(lambda message: "method" in message and text in json.dumps(message), f"{text!r}")

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            message: Message = json.loads(line)
            with self._news:
                self.messages.append(message)
                self._news.notify_all()
            if "method" in message and "id" in message:
                try:
                    self.send({"id": message["id"], **self.answer_to(message)})
                except BrokenPipeError:
                    pass  # The agent was killed while it asked.
        with self._news:
            self._is_over = True
            self._news.notify_all()

    def answer_to(self, question: Message) -> Message:
        raise NotImplementedError

    def is_allowed(self, question: Message) -> bool:
        return self._judge(json.dumps(question["params"]))

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


REFUSED: Message = {"error": {"code": -32601, "message": "no such method"}}
CLIENT = {"name": "plain", "title": "plain", "version": "0"}


class AcpRival(Rpc):
    """An agent that speaks ACP."""

    def __init__(self, place: Place, judge: Judge = always, resume: str | None = None) -> None:
        super().__init__(place, judge)
        offered = {"fs": {"readTextFile": False, "writeTextFile": False}, "terminal": False}
        asked: Message = {"protocolVersion": 1, "clientCapabilities": offered, "clientInfo": CLIENT}
        self._told: Message = self.call("initialize", asked)
        folder: Message = {"cwd": str(place.work), "mcpServers": []}
        if resume is None:
            self._session: Message = self.call("session/new", folder)
            self.conversation = str(self._session["sessionId"])
        else:
            self._session = self.call("session/load", {**folder, "sessionId": resume})
            self.conversation = resume

    def abilities(self) -> dict[str, str]:
        return of_acp(self._told, self._session)

    def ask(self, prompt: str) -> str:
        """Send a prompt, and return a reference to it."""
        text = {"type": "text", "text": prompt}
        return str(self.begin("session/prompt", {"sessionId": self.conversation, "prompt": [text]}))

    def result(self, ref: str) -> str:
        """Return the end of the turn in the agent's words."""
        reply = self.reply(int(ref))
        return f"error {reply['error']['code']}" if "error" in reply else str(reply["result"]["stopReason"])

    def interrupt(self) -> None:
        self.send({"method": "session/cancel", "params": {"sessionId": self.conversation}})

    def answer_to(self, question: Message) -> Message:
        if question["method"] != "session/request_permission":
            return REFUSED
        wanted = "allow_once" if self.is_allowed(question) else "reject_once"
        options = question["params"]["options"]
        option = next(option["optionId"] for option in options if option["kind"] == wanted)
        return {"result": {"outcome": {"outcome": "selected", "optionId": option}}}


class CodexRival(Rpc):
    """Codex through its app-server."""

    ENVELOPE: ClassVar[Message] = {}

    def __init__(self, place: Place, judge: Judge = always, resume: str | None = None) -> None:
        super().__init__(place, judge)
        self._told: Message = self.call("initialize", {"clientInfo": CLIENT})
        self.send({"method": "initialized"})
        how: Message = {"cwd": str(place.work), "approvalPolicy": place.agent.permission_mode}
        how |= {"sandbox": "danger-full-access"}
        if resume is None:
            self._session: Message = self.call("thread/start", how)
        else:
            self._session = self.call("thread/resume", {**how, "threadId": resume})
        self.conversation = str(self._session["thread"]["id"])

    def abilities(self) -> dict[str, str]:
        return of_codex(self._told, self._session)

    def ask(self, prompt: str) -> str:
        """Send a prompt, and return a reference to it."""
        text = {"type": "text", "text": prompt}
        return str(self.begin("turn/start", {"threadId": self.conversation, "input": [text]}))

    def result(self, ref: str) -> str:
        """Return the end of the turn in the agent's words."""
        turn = self._turn(int(ref))
        ended = self.wait(
            lambda message: message.get("method") == "turn/completed" and message["params"]["turn"]["id"] == turn,
            "the end of a turn",
        )
        return str(ended["params"]["turn"]["status"])

    def interrupt(self) -> None:
        """Interrupt the turn of the last prompt."""
        turn = self._turn(self._calls)
        self.call("turn/interrupt", {"threadId": self.conversation, "turnId": turn})

    def _turn(self, number: int) -> str:
        return str(self.reply(number)["result"]["turn"]["id"])

    def answer_to(self, question: Message) -> Message:
        if not question["method"].endswith("/requestApproval"):
            return REFUSED
        return {"result": {"decision": "accept" if self.is_allowed(question) else "decline"}}
