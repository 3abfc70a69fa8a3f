"""The fake Codex as a process: what it reads, and how it answers."""

from __future__ import annotations

import json

from banksman.testing import fake_rpc
from banksman.testing.fake_codex.codex_turn import FakeCodexThread
from banksman.testing.fake_process import FakeRecord, found, kept, new_id

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

INVALID_REQUEST = -32600


class FakeCodexAgent(FakeCodexThread):
    """One process with one thread of conversation."""

    def fail(self, id: Any, message: str, code: int = INVALID_REQUEST) -> None:
        self.write({"error": {"code": code, "message": message}, "id": id})

    def understand(self, line: bytes) -> None:
        message = json.loads(line)
        method, id = message.get("method"), message.get("id")
        params: dict[str, Any] = message.get("params") or {}
        match method:
            case None:
                self.take_answer(message)
            case "initialized":
                pass
            case "initialize":
                self.write({"id": id, "result": {"userAgent": "fake", "platformFamily": "unix"}})
            case "thread/start" | "thread/resume" | "thread/fork":
                self._open(id, method, params)
            case "turn/start":
                self._start(id, params)
            case "turn/steer":
                self._steer(id, params)
            case "turn/interrupt":
                self._interrupt(id, params)
            case _:
                self.fail(id, f"Invalid request: unknown variant `{method}`")

    def _open(self, id: Any, method: str, params: dict[str, Any]) -> None:
        self.settings = {name: params[name] for name in ("model", "approvalPolicy") if name in params}
        old = params.get("threadId")
        lines: list[tuple[str, str]] | None = []
        if old is not None:
            lines = found(self.memory, old)
            if lines is None:
                self.fail(id, f"no rollout found for thread id {old}")
                return
        self.thread = old if method == "thread/resume" and old is not None else new_id()
        if method == "thread/fork":
            for role, text in lines:
                kept(self.memory, self.thread, role, text)
        self.write({"id": id, "result": {"thread": {"id": self.thread, "turns": lines}}})
        self.notice("thread/started", thread={"id": self.thread})

    # ── Turns ──

    def _start(self, id: Any, params: dict[str, Any]) -> None:
        self.settings |= {name: params[name] for name in ("model", "approvalPolicy") if name in params}
        if self.turn is not None:
            # The real one adds it to the turn that runs, and says so.
            self.turn.waiting.append(params)
            self.write({"id": id, "result": {"turn": {"id": self.turn.id, "status": "inProgress"}}})
        else:
            self.begin(id, params)

    def _steer(self, id: Any, params: dict[str, Any]) -> None:
        if self.turn is None or not self.turn.takes_prompts:
            self.fail(id, "no active turn to steer")
        elif self.turn.id != params["expectedTurnId"]:
            self.fail(id, f"expected active turn id `{params['expectedTurnId']}` but found `{self.turn.id}`")
        else:
            self.turn.waiting.append(params)
            self.write({"id": id, "result": {"turnId": self.turn.id}})

    def _interrupt(self, id: Any, params: dict[str, Any]) -> None:
        if self.turn is None:
            self.fail(id, "no active turn to interrupt")
        elif self.turn.id != params["turnId"]:
            self.fail(id, f"expected active turn id {params['turnId']} but found {self.turn.id}")
        else:
            self.turn.interrupts.append(id)
            self.turn.cut(self)


def main(argv: Sequence[str]) -> None:
    def make(words: dict[str, str], record: FakeRecord) -> FakeCodexAgent:
        return FakeCodexAgent(record, words.get("--fake-memory"))

    fake_rpc.run("fake_codex", argv, make)
