"""A turn of the fake Codex: how it opens, what it says in items, and how it ends."""

from __future__ import annotations

import itertools
import json
import os
import queue
import sys
import threading
import uuid

from banksman.testing.fake_acp.kept_conversation import kept
from banksman.testing.fake_codex.codex_script import DEEDS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from banksman.testing.fake_codex.codex_agent import FakeCodexAgent

EXIT_USAGE = 64
# What a call of the model uses.
TOKENS = 15


class Cancelled(Exception):
    """The turn is to stop."""


class FakeCodexTurn:
    """Work on one prompt, and on those that are added while it lasts. `request`: what is owed for it; None: nobody
    asked for it."""

    def __init__(self, agent: FakeCodexAgent, request: Any, params: dict[str, Any]) -> None:
        self.agent = agent
        self.id = str(uuid.uuid4())
        self.request = request
        self.waiting = [params]
        self.takes_prompts = True
        self.cancelled = threading.Event()
        self.interrupts: list[Any] = []
        self.status = "completed"
        self.error: dict[str, Any] | None = None
        self.said: list[dict[str, Any]] = []
        self.after: list[Callable[[], None]] = []
        self.open_requests: list[int] = []
        self._numbers = itertools.count(1)

    # -- the turn ------------------------------------------------------------------------------------------------------
    def begin(self) -> None:
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        try:
            self._perform()
        except BrokenPipeError:
            os._exit(0)
        except Exception as exc:
            print(f"fake_codex: {exc!r}", file=sys.stderr, flush=True)
            os._exit(EXIT_USAGE)

    def _perform(self) -> None:
        lines = _lines(self.waiting[0])
        # These decide how the turn opens, so they are looked for before it does.
        is_late = "@@late_reply" in lines
        if not is_late:
            self.reply(is_huge="@@huge_reply" in lines)
        self.agent.notice("thread/status/changed", status={"type": "active", "activeFlags": []})
        self.agent.notice("turn/started", turn={"id": self.id, "items": [], "status": "inProgress"})
        try:
            while (params := self._next()) is not None:
                self._work(params)
        except Cancelled:
            self.status = "interrupted"
        with self.agent.lock:
            self.agent.turn = None
        self._finish()
        if is_late:
            self.reply()
        for deed in self.after:
            deed()

    def _next(self) -> dict[str, Any] | None:
        with self.agent.lock:
            if self.waiting:
                return self.waiting.pop(0)
            self.agent.turn = None
            return None

    def _work(self, params: dict[str, Any]) -> None:
        item = {"type": "userMessage", "clientId": params.get("clientUserMessageId"), "content": params["input"]}
        self.complete(self.start(**item))
        text = "\n".join(part.get("text", f"[{part['type']}]") for part in params["input"])
        kept(self.agent.memory, self.agent.thread, "user", text)
        lines = [line for line in text.split("\n") if line.startswith("@@")]
        if not lines:
            self.say(f"you said: {text}")
        for line in lines:
            word, _, rest = line.removeprefix("@@").partition(" ")
            DEEDS[word](self, rest)
        self.wait(0)
        self._count()

    def _finish(self) -> None:
        for id in self.interrupts:
            self.agent.write({"id": id, "result": {}})
        self.agent.notice("thread/status/changed", status={"type": "idle"})
        items = self.said[-1:] if self.status == "completed" else []
        turn = {"id": self.id, "items": items, "status": self.status, "error": self.error}
        self.agent.notice("turn/completed", turn=turn)
        for number in self.open_requests:
            self.agent.notice("serverRequest/resolved", requestId=number)

    def reply(self, *, is_huge: bool = False) -> None:
        """To the prompt that opened it."""
        if self.request is None:
            return
        turn = {"id": self.id, "status": "inProgress"}
        if is_huge:
            # Nothing of it is where it could be kept, but for the id, which comes last.
            result = json.dumps({"filler": "x" * (4 << 20), "turn": turn})
            self.agent.write_raw(f'{{"result":{result},"id":{json.dumps(self.request)}}}\n'.encode())
        else:
            self.agent.write({"id": self.request, "result": {"turn": turn}})

    # -- what it says --------------------------------------------------------------------------------------------------
    def start(self, **item: Any) -> dict[str, Any]:
        item = {"id": f"item-{self.id[:8]}-{next(self._numbers)}", **item}
        self.agent.notice("item/started", turnId=self.id, item=item)
        return item

    def complete(self, item: dict[str, Any], **changes: Any) -> None:
        self.agent.notice("item/completed", turnId=self.id, item={**item, **changes})

    def say(self, *words: str, seconds: float = 0) -> None:
        """One message, a word after the other. If the turn is stopped, it is never complete."""
        item = self.start(type="agentMessage", text="")
        for word in words:
            self.agent.notice("item/agentMessage/delta", turnId=self.id, itemId=item["id"], delta=word)
            self.wait(seconds)
        text = "".join(words)
        self.said.append({**item, "text": text})
        self.complete(item, text=text)
        kept(self.agent.memory, self.agent.thread, "agent", text)

    def _count(self) -> None:
        self.agent.tokens += TOKENS
        usage = {"total": {"totalTokens": self.agent.tokens}, "last": {"totalTokens": TOKENS}}
        self.agent.notice("thread/tokenUsage/updated", turnId=self.id, tokenUsage={**usage, "modelContextWindow": 1000})

    def wait(self, seconds: float) -> None:
        if self.cancelled.wait(seconds):
            raise Cancelled

    def ask(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        """Ask the client, and wait for what it answers. A turn that is stopped waits no more."""
        number, answer = self.agent.begin(method, {"turnId": self.id, **params})
        self.open_requests.append(number)
        while True:
            self.wait(0)
            try:
                answered = answer.get(timeout=0.01)
            except queue.Empty:
                continue
            self.open_requests.remove(number)
            self.agent.notice("serverRequest/resolved", requestId=number)
            return answered


def _lines(params: dict[str, Any]) -> list[str]:
    return [line for part in params["input"] for line in part.get("text", "").split("\n")]
