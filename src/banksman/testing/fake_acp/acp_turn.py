"""One turn of the fake ACP agent, and `VERBS`, the script verbs that a prompt may use."""

from __future__ import annotations

import json
import os
import shlex
import signal
import time

from banksman.testing import fake_script
from banksman.testing.fake_process import CutShort, FakeRecord, Wait, append_conversation, pause
from banksman.testing.fake_rpc import RpcAgent, RpcTurn, shell, spawn_tree
from banksman.testing.fake_script import ScriptError, ScriptStep, VerbTable

TYPE_CHECKING = False
if TYPE_CHECKING:
    import subprocess
    from typing import Any

    from banksman.testing.fake_acp import Character
    from banksman.testing.fake_process import Act
    from banksman.testing.fake_rpc import Answering

OPTIONS = [
    {"optionId": "allow", "name": "Allow", "kind": "allow_once"},
    {"optionId": "always", "name": "Always", "kind": "allow_always"},
    {"optionId": "reject", "name": "Reject", "kind": "reject_once"},
]


class FakeAcpWriter(RpcAgent):
    """The part of the agent process that a turn uses: its character and its output."""

    def __init__(self, character: Character, record: FakeRecord, memory: str | None) -> None:
        super().__init__(record, memory)
        self.character = character
        self.ignores_eof = character.ignores_eof

    def write(self, message: dict[str, Any]) -> None:
        self.out.put(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")

    def update(self, conversation: str, kind: str, /, **members: Any) -> None:
        update = {"sessionUpdate": kind, **members}
        self.write(
            {"method": "session/update", "params": {"sessionId": conversation, "update": update}}
        )


class FakeConversation:
    """State of one conversation: its id, mode and model."""

    def __init__(self, id: str) -> None:
        self.id = id
        self.mode, self.model = "ask", "small"


class FakeAcpTurn(RpcTurn):
    """One prompt and the task that performs its script."""

    def __init__(self, agent: FakeAcpWriter, conversation: FakeConversation, id: Any) -> None:
        super().__init__()
        self.agent = agent
        self.conversation = conversation
        self.id = id
        self.said: list[str] = []
        self.reason = "end_turn"
        self.error: dict[str, Any] | None = None
        # Lines that the turn writes instead of the answer to the prompt.
        self.instead: list[bytes] | None = None
        self.tools = 0
        self.pids: str | None = None

    # ── Turn ──

    def run(self, prompt: str) -> Act:
        self.task = self.agent.current
        try:
            yield from self._content(prompt)
        except CutShort:
            yield from self.stop()
        except ScriptError as error:
            self.error = {"code": -32603, "message": f"fake_acp: {error}"}
        self.finish()
        if self.said:
            append_conversation(
                self.agent.memory, self.conversation.id, "agent", "".join(self.said)
            )

    def _content(self, prompt: str) -> Act:
        _, steps = VERBS.directives(prompt)
        if not steps:
            self.say(f"you said: {prompt}")
        for step in steps:
            yield from self.agent.perform(step, self)

    def stop(self) -> Act:
        """End the turn after a cancel, as the character says."""
        self.reason = "cancelled"
        if self.pids is not None and not self.agent.character.leaves_tools:
            ready = f"{self.pids}.ready"
            yield Wait(at=time.monotonic() + 5, when=lambda: os.path.exists(ready), is_polled=True)
            with open(self.pids, encoding="ascii") as file:
                pids = [int(line) for line in file.read().split()]
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            self.pids = None
        match self.agent.character.after_cancel:
            case "end_turn":
                self.reason = "end_turn"
            case "error":
                self.error = {"code": -32603, "message": "aborted"}
            case "nothing":
                self.instead = []
            case _:
                pass

    def finish(self) -> None:
        if self.instead is not None:
            for line in self.instead:
                self.agent.out.put(line)
        elif self.error is not None:
            self.agent.write({"id": self.id, "error": self.error})
        else:
            late = [self.said.pop()] if self.agent.character.talks_late and self.said else []
            usage = {"inputTokens": 3, "outputTokens": 4, "totalTokens": 7}
            self.agent.write({"id": self.id, "result": {"stopReason": self.reason, "usage": usage}})
            for text in late:
                self._chunk(text)
        for act in self.after:
            act()

    # ── Output ──

    def say(self, text: str) -> None:
        self.said.append(text)
        if not self.agent.character.talks_late:
            self._chunk(text)

    def _chunk(self, text: str) -> None:
        self.update("agent_message_chunk", content={"type": "text", "text": text})

    def update(self, kind: str, /, **members: Any) -> None:
        self.agent.update(self.conversation.id, kind, **members)

    def ask(self, method: str, params: dict[str, Any]) -> Answering:
        """Send a request to the client and wait for its answer.

        A cancelled turn waits too: the client has to answer every request, even after a cancel.
        """
        prefix = "request-" if self.agent.character.has_string_ids else ""
        request = self.agent.request(
            method, {"sessionId": self.conversation.id, **params}, prefix=prefix
        )
        answered = Wait(when=lambda: request.answer is not None)
        try:
            yield answered
        except CutShort:
            yield answered
            raise
        assert request.answer is not None
        return request.answer


VERBS = VerbTable()
VERBS.add("text", "LINE", fake_script.say)
VERBS.add("raw", "LINE", fake_script.raw)
VERBS.add("hang", "", fake_script.hang)
VERBS.add("touch", "PATH", fake_script.touch)
VERBS.add("wait", "PATH", fake_script.wait_path)
VERBS.add("await", "PATH", fake_script.wait_path)
VERBS.add("exit", "CODE", fake_script.leave)


@VERBS.verb("slow", "COUNT SECONDS")
def slow(turn: FakeAcpTurn, step: ScriptStep) -> Act:
    """Say COUNT words, with SECONDS between them."""
    for number in range(step.integer(0)):
        turn.say(f"tick{number} ")
        yield pause(step.seconds(1))


@VERBS.verb("think", "LINE")
def think(turn: FakeAcpTurn, step: ScriptStep) -> None:
    """LINE: send it as a thought."""
    turn.update("agent_thought_chunk", content={"type": "text", "text": step.word(0)})


@VERBS.verb("plan", "LINE")
def plan(turn: FakeAcpTurn, step: ScriptStep) -> None:
    """LINE: send a plan with this one entry."""
    turn.update(
        "plan", entries=[{"content": step.word(0), "priority": "medium", "status": "pending"}]
    )


@VERBS.verb("update", "LINE")
def update(turn: FakeAcpTurn, step: ScriptStep) -> None:
    """JSON: send it as a session update."""
    update = json.loads(step.word(0))
    turn.update(update.pop("sessionUpdate"), **update)


@VERBS.verb("tool", "PATH")
def tool(turn: FakeAcpTurn, step: ScriptStep) -> Act:
    """Run a tool whose processes write their pids to PATH and run until they are killed."""
    turn.tools += 1
    call = f"call-{turn.id}-{turn.tools}"
    turn.update("tool_call", toolCallId=call, title="a tree", kind="execute", status="in_progress")
    turn.pids = step.word(0)
    process = spawn_tree(turn.pids)
    try:
        yield pause(60)
        yield from _ended(process)
    except CutShort:
        turn.update("tool_call_update", toolCallId=call, status="failed")
        yield from turn.stop()
        if turn.agent.character.leaves_tools:
            # The tool is left running, so the turn answers its prompt before the tool ends.
            turn.finish()
            turn.instead = []
        yield from _ended(process)
        raise


def _ended(process: subprocess.Popen[bytes]) -> Act:
    fd = os.pidfd_open(process.pid)
    try:
        yield Wait(fd=fd)
    finally:
        os.close(fd)
    process.wait()


@VERBS.verb("ran", "LINE")
def ran(turn: FakeAcpTurn, step: ScriptStep) -> None:
    """LINE: report a tool call that completes immediately, with this text as its output."""
    words = step.word(0)
    turn.tools += 1
    call = f"call-{turn.id}-{turn.tools}"
    turn.update("tool_call", toolCallId=call, title=words, kind="execute", status="pending")
    content = [{"type": "content", "content": {"type": "text", "text": words}}]
    turn.update("tool_call_update", toolCallId=call, status="completed", content=content)


@VERBS.verb("run", "LINE")
def run(turn: FakeAcpTurn, step: ScriptStep) -> Act:
    """COMMAND: run it in a shell, and report it as a tool call that ends with it."""
    command = step.word(0)
    turn.tools += 1
    call = f"call-{turn.id}-{turn.tools}"
    turn.update("tool_call", toolCallId=call, title=command, kind="execute", status="in_progress")
    code = yield from shell(command)
    turn.update("tool_call_update", toolCallId=call, status="failed" if code else "completed")


@VERBS.verb("permission", "LINE")
def permission(turn: FakeAcpTurn, step: ScriptStep) -> Act:
    """COMMAND: request permission to run it, and say the answer."""
    command = step.word(0)
    call = {
        "toolCallId": f"asked-{turn.id}",
        "title": command,
        "kind": "execute",
        "rawInput": {"command": command},
    }
    answer = yield from turn.ask(
        "session/request_permission", {"toolCall": call, "options": OPTIONS}
    )
    turn.say(f"answered {json.dumps(answer.get('result') or answer.get('error'))}")


@VERBS.verb("request", "METHOD [JSON]")
def request(turn: FakeAcpTurn, step: ScriptStep) -> Act:
    """Send the client a request with any METHOD, and say the answer."""
    answer = yield from turn.ask(step.word(0), json.loads(step.word(1, "{}")))
    turn.say(
        "answered "
        f"{json.dumps(answer.get('result') if 'result' in answer else answer['error']['message'])}"
    )


@VERBS.verb("terminal", "LINE")
def terminal(turn: FakeAcpTurn, step: ScriptStep) -> Act:
    """COMMAND: run it in a terminal of the client; say its output and its exit code."""
    program, *args = shlex.split(step.word(0))
    created = yield from turn.ask("terminal/create", {"command": program, "args": args})
    if "error" in created:
        turn.say(f"refused {created['error']['message']}")
        return
    terminal = {"terminalId": created["result"]["terminalId"]}
    ended = yield from turn.ask("terminal/wait_for_exit", terminal)
    wrote = yield from turn.ask("terminal/output", terminal)
    yield from turn.ask("terminal/release", terminal)
    turn.say(f"wrote {wrote['result']['output']!r} ended {ended['result'].get('exitCode')}")


@VERBS.verb("never")
def never(turn: FakeAcpTurn, step: ScriptStep) -> None:
    """Never answer this prompt, cancelled or not."""
    turn.instead = []


@VERBS.verb("silence")
def silence(turn: FakeAcpTurn, step: ScriptStep) -> None:
    """Do nothing; the turn ends without text."""


@VERBS.verb("stop", "LINE")
def stop(turn: FakeAcpTurn, step: ScriptStep) -> None:
    """REASON: set the stop reason of the turn."""
    turn.reason = step.word(0)


@VERBS.verb("error", "LINE")
def error(turn: FakeAcpTurn, step: ScriptStep) -> None:
    """CODE MESSAGE: answer the prompt with an error."""
    code, _, message = step.word(0).partition(" ")
    turn.error = {"code": int(code), "message": message}


@VERBS.verb("late", "LINE")
def late(turn: FakeAcpTurn, step: ScriptStep) -> None:
    """LINE: say it after the answer to the prompt."""
    turn.after.append(
        lambda: turn.update("agent_message_chunk", content={"type": "text", "text": step.word(0)})
    )


@VERBS.verb("twice")
def twice(turn: FakeAcpTurn, step: ScriptStep) -> None:
    """Answer the prompt a second time."""
    turn.after.append(
        lambda: turn.agent.write({"id": turn.id, "result": {"stopReason": "end_turn"}})
    )


@VERBS.verb("stray", "LINE")
def stray(turn: FakeAcpTurn, step: ScriptStep) -> None:
    """ID: answer a request that the client never sent, or sent long ago."""
    turn.agent.write({"id": json.loads(step.word(0)), "result": {"stopReason": "end_turn"}})


@VERBS.verb("huge", "BYTES")
def huge(turn: FakeAcpTurn, step: ScriptStep) -> None:
    """Answer with a filler of BYTES; the id is the last member of the message."""
    filler = b"x" * step.integer(0)
    line = b'{"jsonrpc":"2.0","result":{"_meta":{"filler":"%s"},"stopReason":"end_turn"},"id":%d}\n'
    turn.instead = [line % (filler, turn.id)]


@VERBS.verb("mode", "LINE")
def mode(turn: FakeAcpTurn, step: ScriptStep) -> None:
    """MODE: change the mode without a request from the client."""
    mode = step.word(0)
    turn.conversation.mode = mode
    turn.update("current_mode_update", currentModeId=mode)


@VERBS.verb("status")
def status(turn: FakeAcpTurn, step: ScriptStep) -> None:
    """Say the mode and the model of this conversation."""
    turn.say(f"{turn.conversation.mode} {turn.conversation.model}")
