"""The fake ACP agent as a process: what it reads, and how it answers.

The main thread reads; each prompt runs in a thread of its own, so that a cancel, an answer or a second prompt is read
while it works. It ends by itself in any case: with its stdin, and by an alarm at the very last.
"""

from __future__ import annotations

import itertools
import json
import os
import queue
import signal
import sys
import threading

from banksman.testing.fake_acp.acp_script import FakeAcpTurn, TurnCancelled
from banksman.testing.fake_acp.character import Character
from banksman.testing.fake_acp.kept_conversation import FakeConversation, found, kept
from banksman.testing.fake_agent.record import FakeRecord

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

LIFE_SECONDS_MAX = 120
READ_BYTES_MAX = 65536
EXIT_USAGE = 64


class FakeAcpAgent:
    """One process. Only what is written has a lock: a message is one line, whoever writes it."""

    def __init__(self, character: Character, record: FakeRecord, memory: str | None) -> None:
        self.character = character
        self.record = record
        self.memory = memory
        self.conversations: dict[str, FakeConversation] = {}
        self.is_logged_in = not character.wants_login
        self._numbers = itertools.count()
        self._answers: dict[Any, queue.SimpleQueue[dict[str, Any]]] = {}
        self._writing = threading.Lock()

    # -- what is written ----------------------------------------------------------------------------------------------
    def write(self, message: dict[str, Any] | list[Any]) -> None:
        if isinstance(message, dict):
            message = {"jsonrpc": "2.0", **message}
        self.write_raw(json.dumps(message).encode() + b"\n")

    def write_raw(self, data: bytes) -> None:
        with self._writing:
            while data:
                data = data[os.write(1, data) :]

    def update(self, conversation: str, kind: str, /, **members: Any) -> None:
        update = {"sessionUpdate": kind, **members}
        self.write({"method": "session/update", "params": {"sessionId": conversation, "update": update}})

    def ask(self, method: str, params: dict[str, Any], turn: FakeAcpTurn | None = None) -> dict[str, Any]:
        """Ask the client, and wait for what it answers: the whole message. A turn that is cancelled waits no more, and
        withdraws what it asked."""
        number = next(self._numbers)
        id = f"request-{number}" if self.character.has_string_ids else number
        answer = self._answers[id] = queue.SimpleQueue()
        self.write({"id": id, "method": method, "params": params})
        while True:
            try:
                return answer.get(timeout=0.02)
            except queue.Empty:
                if turn is not None and turn.cancelled.is_set():
                    # The answer may be on its way: the client has to give one.
                    return answer.get(timeout=LIFE_SECONDS_MAX)

    # -- what is read -------------------------------------------------------------------------------------------------
    def run(self) -> None:
        rest = b""
        if self.character.says_first:
            self.write_raw(self.character.says_first.encode() + b"\n")
        while data := os.read(0, READ_BYTES_MAX):
            self.record.stdin(data)
            *lines, rest = (rest + data).split(b"\n")
            for line in filter(None, lines):
                self._understand(line)
        while self.character.ignores_eof:
            signal.pause()
        os._exit(0)

    def _understand(self, line: bytes) -> None:
        try:
            message = json.loads(line)
        except ValueError:
            self.write({"id": None, "error": {"code": -32700, "message": "Parse error"}})
            return
        if "method" not in message:
            answer = self._answers.pop(message.get("id"), None)
            if answer is not None:
                answer.put(message)
            return
        params: dict[str, Any] = message.get("params") or {}
        if "id" not in message:
            conversation = self.conversations.get(str(params.get("sessionId")))
            if message["method"] == "session/cancel" and conversation is not None:
                conversation.cancel()
            return
        method = message["method"]
        if method == "session/prompt":
            work = threading.Thread(target=self._turn, args=(message["id"], params), daemon=True)
            work.start()
            return
        try:
            result = self._answered(method, params)
        except FakeRefusal as refusal:
            self.write({"id": message["id"], "error": refusal.error})
            return
        self.write({"id": message["id"], "result": result})
        for conversation in self.conversations.values():
            conversation.finish_replay(self)

    def _answered(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        match method:
            case "initialize":
                return {
                    "protocolVersion": self.character.version,
                    "agentInfo": {"name": "fake-acp", "title": "Fake ACP", "version": "0"},
                    "agentCapabilities": self.character.capabilities(),
                    "authMethods": [{"id": "key", "name": "Use a key", "description": "Set FAKE_KEY"}],
                }
            case "authenticate":
                self.is_logged_in = True
                return {}
            case "session/new" | "session/load" | "session/resume" | "session/fork":
                return self._opened(method.removeprefix("session/"), params)
            case "session/set_mode" | "session/set_model" | "session/set_config_option":
                return self._set(method, params)
            case _:
                raise FakeRefusal(-32601, f"Method not found: {method}")

    def _opened(self, how: str, params: dict[str, Any]) -> dict[str, Any]:
        if not self.is_logged_in:
            raise FakeRefusal(-32000, "Authentication required")
        can = {"load": self.character.loads, "resume": self.character.resumes, "fork": self.character.forks}
        if not can.get(how, True):
            raise FakeRefusal(-32601, f"Method not found: session/{how}")
        lines: list[tuple[str, str]] = []
        if how != "new":
            known = found(self.memory, params["sessionId"])
            if known is None:
                raise FakeRefusal(
                    self.character.unknown_code, "Invalid params", f"Session not found: {params['sessionId']}"
                )
            lines = known
        conversation = FakeConversation(None if how in ("new", "fork") else params["sessionId"])
        self.conversations[conversation.id] = conversation
        if how == "fork":
            for role, text in lines:
                kept(self.memory, conversation.id, role, text)
        if how == "load":
            conversation.replay(self, lines, is_late=self.character.replays_late)
        return {"sessionId": conversation.id, **self.character.offered(conversation.mode, conversation.model)}

    def _set(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        conversation = self.conversations[params["sessionId"]]
        if method == "session/set_mode" or params.get("configId") == "the-mode":
            conversation.mode = params.get("modeId") or params["value"]
        else:
            conversation.model = params.get("modelId") or params["value"]
        return self.character.offered(conversation.mode, conversation.model)

    # -- turns --------------------------------------------------------------------------------------------------------
    def _turn(self, id: Any, params: dict[str, Any]) -> None:
        conversation = self.conversations.get(params["sessionId"])
        if conversation is None:
            error = {"code": self.character.unknown_code, "message": "Session not found"}
            self.write({"id": id, "error": error})
            return
        text = "\n".join(block.get("text", f"[{block['type']}]") for block in params["prompt"])
        kept(self.memory, conversation.id, "user", text)
        turn = FakeAcpTurn(self, conversation, id, conversation.began())
        try:
            turn.perform(text)
        except TurnCancelled:
            turn.stop()
        turn.finish()
        if turn.said:
            kept(self.memory, conversation.id, "agent", "".join(turn.said))


class FakeRefusal(Exception):
    """The answer is an error."""

    def __init__(self, code: int, message: str, data: Any = None) -> None:
        super().__init__(message)
        self.error = {"code": code, "message": message, **({} if data is None else {"data": data})}


def main(argv: Sequence[str]) -> None:
    signal.alarm(LIFE_SECONDS_MAX)
    words = dict(word.split("=", 1) for word in argv if word.startswith("--fake-"))
    given = json.loads(words.get("--fake-character", "{}"))
    record = FakeRecord(words.get("--fake-evidence"), argv)
    try:
        FakeAcpAgent(Character(**given), record, words.get("--fake-memory")).run()
    except BrokenPipeError:
        os._exit(0)
    except Exception as exc:
        print(f"fake_acp: {exc!r}", file=sys.stderr, flush=True)
        os._exit(EXIT_USAGE)
