"""Process of the fake ACP agent: dispatches incoming JSON-RPC messages and answers them.

It answers all requests except prompts. `acp_turn.py` performs a prompt, and `fake_rpc.py` has the
loop.
"""

from __future__ import annotations

import json

from banksman.testing import fake_rpc
from banksman.testing.fake_acp import Character
from banksman.testing.fake_acp.acp_turn import FakeAcpTurn, FakeAcpWriter, FakeConversation
from banksman.testing.fake_process import FakeRecord, append_conversation, new_id, read_conversation

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any


class FakeAcpAgent(FakeAcpWriter):
    """Fake ACP agent process with any number of conversations."""

    def __init__(self, character: Character, record: FakeRecord, memory: str | None) -> None:
        super().__init__(character, record, memory)
        self.conversations: dict[str, FakeConversation] = {}
        # The last turn of each conversation. `session/cancel` names only the conversation, so it
        # cancels this turn.
        self.turns: dict[str, FakeAcpTurn] = {}
        self.is_logged_in = not character.wants_login
        self._late_replay: list[tuple[str, str]] = []
        if character.says_first:
            self.out.put(character.says_first.encode() + b"\n")

    def understand(self, line: bytes) -> None:
        try:
            message = json.loads(line)
        except ValueError:
            self.write({"id": None, "error": {"code": -32700, "message": "Parse error"}})
            return
        if "method" not in message:
            self.take_answer(message)
            return
        method, id = message["method"], message.get("id")
        params: dict[str, Any] = message.get("params") or {}
        if "id" not in message:
            turn = self.turns.get(str(params.get("sessionId")))
            if method == "session/cancel" and turn is not None:
                turn.cut(self)
        elif method == "session/prompt":
            self._prompt(id, params)
        else:
            self._answer(id, method, params)

    def _prompt(self, id: Any, params: dict[str, Any]) -> None:
        conversation = self.conversations.get(params["sessionId"])
        if conversation is None:
            error = {"code": self.character.unknown_code, "message": "Session not found"}
            self.write({"id": id, "error": error})
            return
        text = "\n".join(block.get("text", f"[{block['type']}]") for block in params["prompt"])
        append_conversation(self.memory, conversation.id, "user", text)
        turn = self.turns[conversation.id] = FakeAcpTurn(self, conversation, id)
        self.spawn(turn.run(text))

    def _answer(self, id: Any, method: str, params: dict[str, Any]) -> None:
        try:
            result = self._answered(method, params)
        except FakeRefusal as refusal:
            self.write({"id": id, "error": refusal.error})
            return
        self.write({"id": id, "result": result})
        if self._late_replay:
            self._replay(params["sessionId"], self._late_replay)
            self._late_replay = []

    def _answered(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        match method:
            case "initialize":
                return {
                    "protocolVersion": self.character.version,
                    "agentInfo": {"name": "fake-acp", "title": "Fake ACP", "version": "0"},
                    "agentCapabilities": self.character.capabilities(),
                    "authMethods": [
                        {"id": "key", "name": "Use a key", "description": "Set FAKE_KEY"}
                    ],
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
        can = {
            "load": self.character.loads,
            "resume": self.character.resumes,
            "fork": self.character.forks,
        }
        if not can.get(how, True):
            raise FakeRefusal(-32601, f"Method not found: session/{how}")
        lines: list[tuple[str, str]] = []
        if how != "new":
            known = read_conversation(self.memory, params["sessionId"])
            if known is None:
                raise FakeRefusal(
                    self.character.unknown_code,
                    "Invalid params",
                    f"Session not found: {params['sessionId']}",
                )
            lines = known
        id = f"fake-{new_id()}" if how in ("new", "fork") else params["sessionId"]
        conversation = self.conversations[id] = FakeConversation(id)
        if how == "fork":
            for role, text in lines:
                append_conversation(self.memory, conversation.id, role, text)
        if how == "load":
            # Replay the whole history before the answer, or only its first line and the rest after
            # it.
            self._replay(id, lines[:1] if self.character.replays_late else lines)
            self._late_replay = lines[1:] if self.character.replays_late else []
        return {
            "sessionId": conversation.id,
            **self.character.offered(conversation.mode, conversation.model),
        }

    def _replay(self, conversation: str, lines: list[tuple[str, str]]) -> None:
        """Send the stored messages of a conversation as session updates."""
        for role, text in lines:
            kind = "user_message_chunk" if role == "user" else "agent_message_chunk"
            self.update(conversation, kind, content={"type": "text", "text": text})

    def _set(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        conversation = self.conversations[params["sessionId"]]
        if method == "session/set_mode" or params.get("configId") == "the-mode":
            conversation.mode = params.get("modeId") or params["value"]
        else:
            conversation.model = params.get("modelId") or params["value"]
        return self.character.offered(conversation.mode, conversation.model)


class FakeRefusal(Exception):
    """Error answer to a request."""

    def __init__(self, code: int, message: str, data: Any = None) -> None:
        super().__init__(message)
        self.error = {"code": code, "message": message, **({} if data is None else {"data": data})}


def main(argv: Sequence[str]) -> None:
    def make(words: dict[str, str], record: FakeRecord) -> FakeAcpAgent:
        character = Character(**json.loads(words.get("--fake-character", "{}")))
        return FakeAcpAgent(character, record, words.get("--fake-memory"))

    fake_rpc.run("fake_acp", argv, make)
