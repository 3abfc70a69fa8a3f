"""Rival for the agents that speak JSON-RPC: the first version that a programmer writes.

It is tests/agents/plain.py with numbered calls.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, ClassVar

from tests.agents.matrix.abilities import of_acp, of_codex
from tests.agents.matrix.place import Place
from tests.agents.plain import PlainProcess

Message = dict[str, Any]
# Decides from the text of a request whether a command may run.
Judge = Callable[[str], bool]


def always(_: str) -> bool:
    return True


class Rpc(PlainProcess):
    """An agent that speaks JSON-RPC. Subclasses know the methods."""

    # Codex omits the `jsonrpc` member and accepts none.
    ENVELOPE: ClassVar[Message] = {"jsonrpc": "2.0"}

    def __init__(self, place: Place, judge: Judge = always) -> None:
        self.place = place
        self._judge = judge
        # `_stdin` protects it.
        self._calls = 0
        super().__init__(place.command(), cwd=place.work, env=place.env())

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

    def _write(self, message: Message) -> None:
        super()._write({**self.ENVELOPE, **message})

    # -- receiving ---------------------------------------------------------------------------------------------------
    def reply(self, number: int) -> Message:
        return self.wait(lambda message: message.get("id") == number and "method" not in message, "a reply")

    def heard(self, text: str) -> None:
        self.wait(lambda message: "method" in message and text in json.dumps(message), f"{text!r}")

    def _hear(self, message: Message) -> None:
        super()._hear(message)
        if "method" in message and "id" in message:
            try:
                self.send({"id": message["id"], **self.answer_to(message)})
            except BrokenPipeError:
                pass  # The agent was killed while it asked.

    def answer_to(self, question: Message) -> Message:
        raise NotImplementedError

    def is_allowed(self, question: Message) -> bool:
        return self._judge(json.dumps(question["params"]))


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
