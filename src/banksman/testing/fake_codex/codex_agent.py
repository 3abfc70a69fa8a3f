"""Process of the fake Codex agent: request dispatch, turns, and the script verbs.

`VERBS` lists the verbs that the `@@` lines of a prompt may use.
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
from banksman.testing.fake_rpc import RpcAgent, RpcTurn, shell, spawn_tree
from banksman.testing.fake_script import ScriptStep, VerbTable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from banksman.testing.fake_process import Act
    from banksman.testing.fake_rpc import Answering

# Tokens that one model call uses.
TOKENS = 15
INVALID_REQUEST = -32600


class FakeCodexAgent(RpcAgent):
    """Process of the fake Codex agent, with one thread."""

    def __init__(self, record: FakeRecord, memory: str | None) -> None:
        super().__init__(record, memory)
        self.thread = ""
        self.settings: dict[str, Any] = {}
        self.turn: FakeCodexTurn | None = None
        self.tokens = 0

    def notice(self, method: str, **params: Any) -> None:
        self.write({"method": method, "params": {"threadId": self.thread, **params}})

    def begin(self, request: Any, params: dict[str, Any]) -> None:
        """Begin a turn.

        `request`: id of the request to answer; None for a turn that no client asked for.
        """
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
        self.settings = {
            name: params[name] for name in ("model", "approvalPolicy") if name in params
        }
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
        self.settings |= {
            name: params[name] for name in ("model", "approvalPolicy") if name in params
        }
        if self.turn is not None:
            # The real agent adds the prompt to the running turn, and its answer names that turn.
            self.turn.waiting.append(params)
            self.write({"id": id, "result": {"turn": {"id": self.turn.id, "status": "inProgress"}}})
        else:
            self.begin(id, params)

    def _steer(self, id: Any, params: dict[str, Any]) -> None:
        if self.turn is None or not self.turn.takes_prompts:
            self.fail(id, "no active turn to steer")
        elif self.turn.id != params["expectedTurnId"]:
            self.fail(
                id,
                f"expected active turn id `{params['expectedTurnId']}` but found `{self.turn.id}`",
            )
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
    """One turn: its first prompt, and the prompts that are added while it runs."""

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

    # ── Turn ──

    def run(self) -> Act:
        self.task = self.agent.current
        # These verbs decide how the turn opens, so the turn looks for them first.
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
        item = {
            "type": "userMessage",
            "clientId": params.get("clientUserMessageId"),
            "content": params["input"],
        }
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
        """Answer the `turn/start` request that opened the turn."""
        if self.request is None:
            return
        turn = {"id": self.id, "status": "inProgress"}
        if is_huge:
            # The line is too long for the host to keep; only the id, which comes last, can be
            # found.
            result = json.dumps({"filler": "x" * (4 << 20), "turn": turn})
            self.agent.out.put(f'{{"result":{result},"id":{json.dumps(self.request)}}}\n'.encode())
        else:
            self.agent.write({"id": self.request, "result": {"turn": turn}})

    # ── Output ──

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
        self.agent.notice(
            "thread/tokenUsage/updated",
            turnId=self.id,
            tokenUsage={**usage, "modelContextWindow": 1000},
        )

    def ask(self, method: str, params: dict[str, Any]) -> Answering:
        """Send a request to the client and wait for its answer; an interrupt ends the wait."""
        request = self.agent.request(
            method, {"threadId": self.agent.thread, "turnId": self.id, **params}
        )
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
VERBS.add("wait", "PATH", fake_script.wait_path)
VERBS.add("await", "PATH", fake_script.wait_path)
VERBS.add("exit", "CODE", fake_script.leave)


@VERBS.verb("slow", "COUNT SECONDS")
def slow(turn: FakeCodexTurn, step: ScriptStep) -> Act:
    """Say COUNT words, SECONDS apart; an interrupt leaves the message incomplete."""
    item = turn.start(type="agentMessage", text="")
    words = [f"tick{number} " for number in range(step.integer(0))]
    for word in words:
        turn.delta(item, word)
        yield pause(step.seconds(1))
    turn.complete_message(item, "".join(words))


@VERBS.verb("tool", "PATH")
def tool(turn: FakeCodexTurn, step: ScriptStep) -> Act:
    """Run a command with children that write their pids to PATH and run until they are killed.

    An interrupt leaves all of these processes running.
    """
    turn.start(type="commandExecution", command="a tree", cwd="/", status="inProgress")
    spawn_tree(step.word(0))
    yield pause(90)


@VERBS.verb("run", "LINE")
def run(turn: FakeCodexTurn, step: ScriptStep) -> Act:
    """COMMAND: run it in a shell, and report it as a command that ends with it."""
    command = step.word(0)
    item = turn.start(type="commandExecution", command=command, cwd="/", status="inProgress")
    code = yield from shell(command)
    turn.complete(item, status="failed" if code else "completed", exitCode=code)


@VERBS.verb("permission", "LINE")
def permission(turn: FakeCodexTurn, step: ScriptStep) -> Act:
    """COMMAND: request approval to run it, and say the answer."""
    command = step.word(0)
    item = turn.start(type="commandExecution", command=command, cwd="/", status="inProgress")
    decisions = [
        "accept",
        {"acceptWithExecpolicyAmendment": {"execpolicy_amendment": [command]}},
        "cancel",
    ]
    params = {"itemId": item["id"], "command": command, "cwd": "/", "availableDecisions": decisions}
    answer = yield from turn.ask("item/commandExecution/requestApproval", params)
    decision = answer.get("result", {}).get("decision")
    turn.complete(
        item,
        status="declined" if decision in ("decline", "cancel", None) else "completed",
        exitCode=0,
    )
    if decision == "cancel":
        raise CutShort("cancelled")
    turn.say(f"answered {json.dumps(decision)}")


@VERBS.verb("request", "METHOD [JSON]")
def request(turn: FakeCodexTurn, step: ScriptStep) -> Act:
    """Send the client a request with any METHOD, and say the answer."""
    answer = yield from turn.ask(step.word(0), json.loads(step.word(1, "{}")))
    turn.say(
        "answered "
        f"{json.dumps(answer.get('result') if 'result' in answer else answer['error']['code'])}"
    )


@VERBS.verb("think", "LINE")
def think(turn: FakeCodexTurn, step: ScriptStep) -> None:
    """LINE: send it as reasoning."""
    words = step.word(0)
    item = turn.start(type="reasoning", summary=[], content=[])
    turn.agent.notice(
        "item/reasoning/summaryTextDelta",
        turnId=turn.id,
        itemId=item["id"],
        delta=words,
        summaryIndex=0,
    )
    turn.complete(item, summary=[words])


@VERBS.verb("ran", "LINE")
def ran(turn: FakeCodexTurn, step: ScriptStep) -> None:
    """LINE: report a command that completes immediately, with this text as its output."""
    words = step.word(0)
    item = turn.start(
        type="commandExecution", command=f"echo {words}", cwd="/", status="inProgress"
    )
    turn.complete(item, status="completed", aggregatedOutput=f"{words}\n", exitCode=0)


@VERBS.verb("error", "LINE")
def error(turn: FakeCodexTurn, step: ScriptStep) -> None:
    """MESSAGE: report a retry, then fail the turn with this message."""
    error = {"message": "once more", "codexErrorInfo": None}
    turn.agent.notice("error", turnId=turn.id, willRetry=True, error=error)
    turn.agent.notice("warning", message="this is none")
    turn.status, turn.error = "failed", {"message": step.word(0), "codexErrorInfo": "other"}


@VERBS.verb("failure", "JSON")
def failure(turn: FakeCodexTurn, step: ScriptStep) -> None:
    """Fail the turn with this error object: message, codexErrorInfo, and so on."""
    turn.status, turn.error = "failed", json.loads(step.word(0))


@VERBS.verb("late_reply")
def late_reply(turn: FakeCodexTurn, step: ScriptStep) -> None:
    """Answer the request of the prompt after the turn is over."""


@VERBS.verb("huge_reply")
def huge_reply(turn: FakeCodexTurn, step: ScriptStep) -> None:
    """Answer the request of the prompt with a line too long to keep, with the id at its end."""


@VERBS.verb("twice")
def twice(turn: FakeCodexTurn, step: ScriptStep) -> None:
    """Answer the request of the prompt a second time, and again after the turn is over."""
    turn.reply()
    turn.after.append(turn.reply)


@VERBS.verb("stray", "LINE")
def stray(turn: FakeCodexTurn, step: ScriptStep) -> None:
    """ID: answer a request that the client never sent."""
    turn.agent.write({"id": json.loads(step.word(0)), "result": {"turn": {"id": "stray"}}})


@VERBS.verb("again")
def again(turn: FakeCodexTurn, step: ScriptStep) -> None:
    """Write a second boundary after the turn is over."""
    over = {"id": turn.id, "status": "failed"}
    turn.after.append(lambda: turn.agent.notice("turn/completed", turn=over))


@VERBS.verb("huge", "BYTES")
def huge(turn: FakeCodexTurn, step: ScriptStep) -> None:
    """Say a text of BYTES bytes, which the boundary repeats."""
    turn.say("x" * step.integer(0))


@VERBS.verb("deaf")
def deaf(turn: FakeCodexTurn, step: ScriptStep) -> None:
    """From now on refuse added prompts, as if the turn were over."""
    turn.takes_prompts = False


@VERBS.verb("own", "LINE")
def own(turn: FakeCodexTurn, step: ScriptStep) -> None:
    """LINE: after this turn, begin a turn that no client asked for, and say the text in it."""
    params = {"input": [{"type": "text", "text": f"@@text {step.word(0)}"}]}
    turn.after.append(lambda: turn.agent.begin(None, params))


@VERBS.verb("settings")
def settings(turn: FakeCodexTurn, step: ScriptStep) -> None:
    """Say the model and the approval policy of the thread."""
    turn.say(json.dumps(turn.agent.settings))


def main(argv: Sequence[str]) -> None:
    def make(words: dict[str, str], record: FakeRecord) -> FakeCodexAgent:
        return FakeCodexAgent(record, words.get("--fake-memory"))

    fake_rpc.run("fake_codex", argv, make)
