"""ACP conversation with a scripted agent, for the tests of the ACP dialect."""

from __future__ import annotations

import json
from typing import Any

from banksman.core.dialects.acp import acp
from banksman.core.dialects.dialect import ProtocolOutput, ProtocolState, Quirks, Setup
from banksman.core.dialects.meaning import Meaning, NeedsConversation, Replied, Requested, TurnOver

SESSION = "s-1"
CAPABLE: dict[str, Any] = {
    "loadSession": True,
    "promptCapabilities": {"image": True, "audio": True, "embeddedContext": True},
    "mcpCapabilities": {"http": True, "sse": True},
    "sessionCapabilities": {"resume": {}, "fork": {}, "systemPrompt": {}},
}
MODES = {"currentModeId": "ask", "availableModes": [{"id": "ask", "name": "Ask"}, {"id": "code", "name": "Code"}]}
MODELS = {"currentModelId": "small", "availableModels": [{"modelId": "small", "name": "S"}, {"modelId": "big"}]}


class Talk:
    """A conversation under test. `sent` holds each frame as the agent reads it, until a test takes it."""

    def __init__(self, setup: Setup | None = None, quirks: Quirks | None = None) -> None:
        self.dialect = acp(quirks or Quirks())
        self.protocol: ProtocolState = self.dialect.begin(setup or Setup(cwd="/srv/ws"))
        self.sent: list[dict[str, Any]] = []
        # Meanings of the answer to `initialize`.
        self.meanings: list[Meaning] = []

    def take(self, output: ProtocolOutput) -> list[Meaning]:
        self.protocol = output.protocol
        for frame in output.frames:
            assert frame.endswith(b"\n")
            assert frame.count(b"\n") == 1
            self.sent.append(json.loads(frame))
        return list(output.meanings)

    def hears(self, message: Any) -> list[Meaning]:
        """Read a line of the agent and return its meanings."""
        line = message if isinstance(message, bytes) else json.dumps(message).encode()
        meaning = self.dialect.read(line)
        if not isinstance(meaning, NeedsConversation):
            return [] if meaning is None else [meaning]
        return self.take(self.protocol.hear(meaning))

    def told(self) -> dict[str, Any]:
        """Return the only frame that was sent since the last look."""
        [frame] = self.sent
        self.sent.clear()
        return frame

    def replies(self, result: Any, id: Any = None) -> list[Meaning]:
        """Answer the last request as the agent."""
        id = self.told()["id"] if id is None else id
        return self.hears({"jsonrpc": "2.0", "id": id, "result": result})

    def fails(self, code: int, message: str = "no", data: Any = None) -> list[Meaning]:
        error = {"code": code, "message": message, **({} if data is None else {"data": data})}
        return self.hears({"jsonrpc": "2.0", "id": self.told()["id"], "error": error})

    def update(self, kind: str, session: str = SESSION, **members: Any) -> list[Meaning]:
        update = {"sessionUpdate": kind, **members}
        return self.hears({"method": "session/update", "params": {"sessionId": session, "update": update}})

    def says(self, text: str, **members: Any) -> list[Meaning]:
        return self.update("agent_message_chunk", content={"type": "text", "text": text}, **members)

    def prompts(self, prompt: Any = "hi", ref: str = "p1") -> dict[str, Any]:
        assert self.take(self.protocol.prompt(ref, prompt)) == []
        return self.told()

    def over(self, id: int | float | str, reason: str = "end_turn") -> TurnOver:
        [meaning] = self.replies({"stopReason": reason}, id)
        assert isinstance(meaning, TurnOver)
        return meaning


def begun(
    setup: Setup | None = None, *, can: dict[str, Any] | None = None, quirks: Quirks | None = None, **initialized: Any
) -> Talk:
    """Return a conversation after the answer to `initialize`; the next frame is in `sent`."""
    talk = Talk(setup, quirks)
    assert talk.take(talk.protocol.handshake("hand")) == []
    can = CAPABLE if can is None else can
    result = {"protocolVersion": 1, "agentInfo": {"name": "toy"}, "agentCapabilities": can, **initialized}
    talk.meanings = talk.replies(result)
    return talk


def ready(setup: Setup | None = None, *, quirks: Quirks | None = None, **opened: Any) -> Talk:
    talk = begun(setup, quirks=quirks)
    assert talk.replies({"sessionId": SESSION, **opened}) == [Replied("hand")]
    assert talk.protocol.conversation == SESSION
    return talk


def refused(meanings: list[Meaning]) -> str:
    [meaning] = meanings
    assert isinstance(meaning, Replied)
    assert meaning.request == "hand"
    assert meaning.error is not None
    return meaning.error


ALL = [
    {"optionId": "yes", "name": "Yes", "kind": "allow_once"},
    {"optionId": "ever", "name": "Always", "kind": "allow_always"},
    {"optionId": "no", "name": "No", "kind": "reject_once"},
    {"optionId": "never", "name": "Never", "kind": "reject_always"},
]


def permission(talk: Talk, id: Any = 0, options: Any = ALL, **tool: Any) -> Requested:
    call = {"toolCallId": "t", "kind": "execute", "title": "ls", "rawInput": {"command": "ls"}, **tool}
    params = {"sessionId": SESSION, "toolCall": call, "options": options}
    [asked] = talk.hears({"jsonrpc": "2.0", "id": id, "method": "session/request_permission", "params": params})
    assert isinstance(asked, Requested)
    return asked
