"""The fake Codex as a process: what it reads, how it answers, and its turns.

`VERBS`: what the `@@` lines of a prompt may ask for.
"""

from __future__ import annotations

import itertools
import json

from banksman.testing import fake_rpc, fake_script
from banksman.testing.fake_process import (
    CutShort,
    FakeRecord,
    Wait,
    append_conversation,
    new_id,
    pause,
    read_conversation,
)
from banksman.testing.fake_rpc import RpcAgent, RpcTurn, spawn_tree
from banksman.testing.fake_script import ScriptStep, VerbTable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from banksman.testing.fake_process import Act
    from banksman.testing.fake_rpc import Answering

# What a call of the model uses.
TOKENS = 15
INVALID_REQUEST = -32600


class FakeCodexAgent(RpcAgent):
    """One process with one thread of conversation."""

    def __init__(self, record: FakeRecord, memory: str | None) -> None:
        super().__init__(record, memory)
        self.thread = ""
        self.settings: dict[str, Any] = {}
        self.turn: FakeCodexTurn | None = None
        self.tokens = 0

    def notice(self, method: str, **params: Any) -> None:
        self.write({"method": method, "params": {"threadId": self.thread, **params}})

    def begin(self, request: Any, params: dict[str, Any]) -> None:
        """Begin a turn. `request`: what is owed for it; None: nobody asked for it."""
        self.turn = FakeCodexTurn(self, request, params)
        self.spawn(self.turn.run())

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
            lines = read_conversation(self.memory, old)
            if lines is None:
                self.fail(id, f"no rollout found for thread id {old}")
                return
        self.thread = old if method == "thread/resume" and old is not None else new_id()
        if method == "thread/fork":
            for role, text in lines:
                append_conversation(self.memory, self.thread, role, text)
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


class FakeCodexTurn(RpcTurn):
    """Work on one prompt, and on those that are added while it lasts."""

    def __init__(self, agent: FakeCodexAgent, request: Any, params: dict[str, Any]) -> None:
        super().__init__()
        self.agent = agent
        self.id = new_id()
        self.request = request
        self.waiting = [params]
        self.takes_prompts = True
        self.interrupts: list[Any] = []
        self.status = "completed"
        self.error: dict[str, Any] | None = None
        self.said: list[dict[str, Any]] = []
        self.open_requests: list[int | str] = []
        self._numbers = itertools.count(1)

    # ── The turn ──

    def run(self) -> Act:
        self.task = self.agent.current
        # These decide how the turn opens, so they are looked for before it does.
        _, steps = VERBS.directives(_text(self.waiting[0]))
        names = {step.verb.name for step in steps}
        is_late = "late_reply" in names
        if not is_late:
            self.reply(is_huge="huge_reply" in names)
        self.agent.notice("thread/status/changed", status={"type": "active", "activeFlags": []})
        self.agent.notice("turn/started", turn={"id": self.id, "items": [], "status": "inProgress"})
        try:
            while self.waiting:
                yield from self._work(self.waiting.pop(0))
        except CutShort:
            self.status = "interrupted"
        self.agent.turn = None
        self._finish()
        if is_late:
            self.reply()
        for act in self.after:
            act()

    def _work(self, params: dict[str, Any]) -> Act:
        item = {"type": "userMessage", "clientId": params.get("clientUserMessageId"), "content": params["input"]}
        self.complete(self.start(**item))
        text = _text(params)
        append_conversation(self.agent.memory, self.agent.thread, "user", text)
        _, steps = VERBS.directives(text)
        if not steps:
            self.say(f"you said: {text}")
        for step in steps:
            yield from self.agent.perform(step, self)
        self._count()

    def _finish(self) -> None:
        for id in self.interrupts:
            self.agent.write({"id": id, "result": {}})
        self.agent.notice("thread/status/changed", status={"type": "idle"})
        items = self.said[-1:] if self.status == "completed" else []
        turn = {"id": self.id, "items": items, "status": self.status, "error": self.error}
        self.agent.notice("turn/completed", turn=turn)
        for id in self.open_requests:
            self.agent.notice("serverRequest/resolved", requestId=id)

    def reply(self, *, is_huge: bool = False) -> None:
        """To the prompt that opened it."""
        if self.request is None:
            return
        turn = {"id": self.id, "status": "inProgress"}
        if is_huge:
            # Nothing of it is where it could be kept, but for the id, which comes last.
            result = json.dumps({"filler": "x" * (4 << 20), "turn": turn})
            self.agent.out.put(f'{{"result":{result},"id":{json.dumps(self.request)}}}\n'.encode())
        else:
            self.agent.write({"id": self.request, "result": {"turn": turn}})

    # ── What it says ──

    def start(self, **item: Any) -> dict[str, Any]:
        item = {"id": f"item-{self.id[:8]}-{next(self._numbers)}", **item}
        self.agent.notice("item/started", turnId=self.id, item=item)
        return item

    def complete(self, item: dict[str, Any], **changes: Any) -> None:
        self.agent.notice("item/completed", turnId=self.id, item={**item, **changes})

    def say(self, text: str) -> None:
        item = self.start(type="agentMessage", text="")
        self.delta(item, text)
        self.complete_message(item, text)

    def delta(self, item: dict[str, Any], words: str) -> None:
        self.agent.notice("item/agentMessage/delta", turnId=self.id, itemId=item["id"], delta=words)

    def complete_message(self, item: dict[str, Any], text: str) -> None:
        self.said.append({**item, "text": text})
        self.complete(item, text=text)
        append_conversation(self.agent.memory, self.agent.thread, "agent", text)

    def _count(self) -> None:
        self.agent.tokens += TOKENS
        usage = {"total": {"totalTokens": self.agent.tokens}, "last": {"totalTokens": TOKENS}}
        self.agent.notice("thread/tokenUsage/updated", turnId=self.id, tokenUsage={**usage, "modelContextWindow": 1000})

    def ask(self, method: str, params: dict[str, Any]) -> Answering:
        """Ask the client, and wait for its answer. A turn that is stopped waits no more."""
        request = self.agent.request(method, {"threadId": self.agent.thread, "turnId": self.id, **params})
        self.open_requests.append(request.id)
        yield Wait(when=lambda: request.answer is not None)
        assert request.answer is not None
        self.open_requests.remove(request.id)
        self.agent.notice("serverRequest/resolved", requestId=request.id)
        return request.answer


def _text(params: dict[str, Any]) -> str:
    return "\n".join(part.get("text", f"[{part['type']}]") for part in params["input"])


VERBS = VerbTable()
VERBS.add("text", "LINE", fake_script.say)
VERBS.add("raw", "LINE", fake_script.raw)
VERBS.add("hang", "", fake_script.hang)
VERBS.add("touch", "PATH", fake_script.touch)
VERBS.add("await", "PATH", fake_script.wait_path)
VERBS.add("exit", "CODE", fake_script.leave)


@VERBS.verb("slow", "COUNT SECONDS")
def slow(turn: FakeCodexTurn, step: ScriptStep) -> Act:
    """Say so many words, with so long between them. If the turn is stopped, the message is never complete."""
    item = turn.start(type="agentMessage", text="")
    words = [f"tick{number} " for number in range(step.integer(0))]
    for word in words:
        turn.delta(item, word)
        yield pause(step.seconds(1))
    turn.complete_message(item, "".join(words))


@VERBS.verb("tool", "PATH")
def tool(turn: FakeCodexTurn, step: ScriptStep) -> Act:
    """Run a command that has children, tells their pids in that file, and never ends by itself.

    An interrupt leaves all of it running.
    """
    turn.start(type="commandExecution", command="a tree", cwd="/", status="inProgress")
    spawn_tree(step.word(0))
    yield pause(90)


@VERBS.verb("permission", "LINE")
def permission(turn: FakeCodexTurn, step: ScriptStep) -> Act:
    """COMMAND: ask for leave to run it, and say what was answered."""
    command = step.word(0)
    item = turn.start(type="commandExecution", command=command, cwd="/", status="inProgress")
    decisions = ["accept", {"acceptWithExecpolicyAmendment": {"execpolicy_amendment": [command]}}, "cancel"]
    params = {"itemId": item["id"], "command": command, "cwd": "/", "availableDecisions": decisions}
    answer = yield from turn.ask("item/commandExecution/requestApproval", params)
    decision = answer.get("result", {}).get("decision")
    turn.complete(item, status="declined" if decision in ("decline", "cancel", None) else "completed", exitCode=0)
    if decision == "cancel":
        raise CutShort("cancelled")
    turn.say(f"answered {json.dumps(decision)}")


@VERBS.verb("request", "METHOD [JSON]")
def request(turn: FakeCodexTurn, step: ScriptStep) -> Act:
    """Ask the client anything, and say what was answered."""
    answer = yield from turn.ask(step.word(0), json.loads(step.word(1, "{}")))
    turn.say(f"answered {json.dumps(answer.get('result') if 'result' in answer else answer['error']['code'])}")


@VERBS.verb("think", "LINE")
def think(turn: FakeCodexTurn, step: ScriptStep) -> None:
    """WORDS: think them."""
    words = step.word(0)
    item = turn.start(type="reasoning", summary=[], content=[])
    turn.agent.notice("item/reasoning/summaryTextDelta", turnId=turn.id, itemId=item["id"], delta=words, summaryIndex=0)
    turn.complete(item, summary=[words])


@VERBS.verb("ran", "LINE")
def ran(turn: FakeCodexTurn, step: ScriptStep) -> None:
    """WORDS: a command that is over at once, with these as its output."""
    words = step.word(0)
    item = turn.start(type="commandExecution", command=f"echo {words}", cwd="/", status="inProgress")
    turn.complete(item, status="completed", aggregatedOutput=f"{words}\n", exitCode=0)


@VERBS.verb("error", "LINE")
def error(turn: FakeCodexTurn, step: ScriptStep) -> None:
    """MESSAGE: something is retried, then the turn fails with this."""
    error = {"message": "once more", "codexErrorInfo": None}
    turn.agent.notice("error", turnId=turn.id, willRetry=True, error=error)
    turn.agent.notice("warning", message="this is none")
    turn.status, turn.error = "failed", {"message": step.word(0), "codexErrorInfo": "other"}


@VERBS.verb("late_reply")
def late_reply(turn: FakeCodexTurn, step: ScriptStep) -> None:
    """The prompt's request is answered when its turn is over."""


@VERBS.verb("huge_reply")
def huge_reply(turn: FakeCodexTurn, step: ScriptStep) -> None:
    """The prompt's request is answered by a line that is too long to keep, with the id at its end."""


@VERBS.verb("twice")
def twice(turn: FakeCodexTurn, step: ScriptStep) -> None:
    """The prompt's request is answered again, now and when the turn is over."""
    turn.reply()
    turn.after.append(turn.reply)


@VERBS.verb("stray", "LINE")
def stray(turn: FakeCodexTurn, step: ScriptStep) -> None:
    """ID: an answer to a request that nobody made."""
    turn.agent.write({"id": json.loads(step.word(0)), "result": {"turn": {"id": "stray"}}})


@VERBS.verb("again")
def again(turn: FakeCodexTurn, step: ScriptStep) -> None:
    """When the turn is over, its boundary is said once more."""
    over = {"id": turn.id, "status": "failed"}
    turn.after.append(lambda: turn.agent.notice("turn/completed", turn=over))


@VERBS.verb("huge", "BYTES")
def huge(turn: FakeCodexTurn, step: ScriptStep) -> None:
    """An answer of so many bytes, and so a boundary."""
    turn.say("x" * step.integer(0))


@VERBS.verb("deaf")
def deaf(turn: FakeCodexTurn, step: ScriptStep) -> None:
    """From now on no prompt can be added to the turn: they are refused as if it were over."""
    turn.takes_prompts = False


@VERBS.verb("own", "LINE")
def own(turn: FakeCodexTurn, step: ScriptStep) -> None:
    """WORDS: when the turn is over, begin another one, which nobody asked for, and say them."""
    params = {"input": [{"type": "text", "text": f"@@text {step.word(0)}"}]}
    turn.after.append(lambda: turn.agent.begin(None, params))


@VERBS.verb("settings")
def settings(turn: FakeCodexTurn, step: ScriptStep) -> None:
    """Say which model and policy the thread has."""
    turn.say(json.dumps(turn.agent.settings))


def main(argv: Sequence[str]) -> None:
    def make(words: dict[str, str], record: FakeRecord) -> FakeCodexAgent:
        return FakeCodexAgent(record, words.get("--fake-memory"))

    fake_rpc.run("fake_codex", argv, make)
