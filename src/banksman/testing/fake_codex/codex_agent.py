"""The fake Codex as a process: what it reads, and how it answers.

The main thread reads; a turn runs in a thread of its own, so that an interrupt, an answer or another prompt is read
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
import uuid

from banksman.testing.fake_acp.kept_conversation import found, kept
from banksman.testing.fake_agent.record import FakeRecord
from banksman.testing.fake_codex.codex_turn import FakeCodexTurn

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

LIFE_SECONDS_MAX = 120
READ_BYTES_MAX = 65536
EXIT_USAGE = 64
INVALID_REQUEST = -32600


class FakeCodexAgent:
    """One process with one thread of conversation. `lock` is for which turn runs, and for what waits in it; a message
    is one line, whoever writes it, and has a lock of its own."""

    def __init__(self, record: FakeRecord, memory: str | None) -> None:
        self.record = record
        self.memory = memory
        self.thread = ""
        self.settings: dict[str, Any] = {}
        self.turn: FakeCodexTurn | None = None
        self.lock = threading.Lock()
        self.tokens = 0
        self._numbers = itertools.count()
        self._answers: dict[int, queue.SimpleQueue[dict[str, Any]]] = {}
        self._writing = threading.Lock()

    # -- what is written ----------------------------------------------------------------------------------------------
    def write(self, message: dict[str, Any]) -> None:
        self.write_raw(json.dumps(message, separators=(",", ":")).encode() + b"\n")

    def write_raw(self, data: bytes) -> None:
        with self._writing:
            while data:
                data = data[os.write(1, data) :]

    def notice(self, method: str, **params: Any) -> None:
        self.write({"method": method, "params": {"threadId": self.thread, **params}})

    def fail(self, id: Any, message: str, code: int = INVALID_REQUEST) -> None:
        self.write({"error": {"code": code, "message": message}, "id": id})

    def begin(self, method: str, params: dict[str, Any]) -> tuple[int, queue.SimpleQueue[dict[str, Any]]]:
        """Ask the client; the answer, the whole message, will be in the queue."""
        number = next(self._numbers)
        answer = self._answers[number] = queue.SimpleQueue()
        self.write({"method": method, "id": number, "params": {"threadId": self.thread, **params}})
        return number, answer

    # -- what is read -------------------------------------------------------------------------------------------------
    def run(self) -> None:
        rest = b""
        while data := os.read(0, READ_BYTES_MAX):
            self.record.stdin(data)
            *lines, rest = (rest + data).split(b"\n")
            for line in filter(None, lines):
                self._understand(json.loads(line))
        os._exit(0)

    def _understand(self, message: dict[str, Any]) -> None:
        method, id = message.get("method"), message.get("id")
        params: dict[str, Any] = message.get("params") or {}
        match method:
            case None:
                answer = self._answers.pop(id, None) if isinstance(id, int) else None
                if answer is not None:
                    answer.put(message)
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
        self.thread = old if method == "thread/resume" and old is not None else str(uuid.uuid4())
        if method == "thread/fork":
            for role, text in lines:
                kept(self.memory, self.thread, role, text)
        self.write({"id": id, "result": {"thread": {"id": self.thread, "turns": lines}}})
        self.notice("thread/started", thread={"id": self.thread})

    # -- turns --------------------------------------------------------------------------------------------------------
    def _start(self, id: Any, params: dict[str, Any]) -> None:
        self.settings |= {name: params[name] for name in ("model", "approvalPolicy") if name in params}
        with self.lock:
            turn = self.turn
            if turn is not None:
                # The real one adds it to the turn that runs, and says so.
                turn.waiting.append(params)
                self.write({"id": id, "result": {"turn": {"id": turn.id, "status": "inProgress"}}})
                return
            self.turn = turn = FakeCodexTurn(self, id, params)
        turn.begin()

    def _steer(self, id: Any, params: dict[str, Any]) -> None:
        with self.lock:
            if self.turn is None or not self.turn.takes_prompts:
                self.fail(id, "no active turn to steer")
            elif self.turn.id != params["expectedTurnId"]:
                self.fail(id, f"expected active turn id `{params['expectedTurnId']}` but found `{self.turn.id}`")
            else:
                self.turn.waiting.append(params)
                self.write({"id": id, "result": {"turnId": self.turn.id}})

    def _interrupt(self, id: Any, params: dict[str, Any]) -> None:
        with self.lock:
            if self.turn is None:
                self.fail(id, "no active turn to interrupt")
            elif self.turn.id != params["turnId"]:
                self.fail(id, f"expected active turn id {params['turnId']} but found {self.turn.id}")
            else:
                self.turn.interrupts.append(id)
                self.turn.cancelled.set()


def main(argv: Sequence[str]) -> None:
    signal.alarm(LIFE_SECONDS_MAX)
    words = dict(word.split("=", 1) for word in argv if word.startswith("--fake-"))
    try:
        FakeCodexAgent(FakeRecord(words.get("--fake-evidence"), argv), words.get("--fake-memory")).run()
    except BrokenPipeError:
        os._exit(0)
    except Exception as exc:
        print(f"fake_codex: {exc!r}", file=sys.stderr, flush=True)
        os._exit(EXIT_USAGE)
