"""What a turn of the fake ACP agent can do: `DEEDS`, by the word that a line of its prompt begins with after `@@`."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    import threading
    from collections.abc import Callable
    from typing import Any

    from banksman.testing.fake_acp.acp_agent import FakeAcpAgent
    from banksman.testing.fake_acp.kept_conversation import FakeConversation

# A tool's tree: a plain child, one with a session of its own, and one that TERM does not end. Their pids are told,
# and its own.
TREE = """
echo $$ >> "$1"
sleep 60 & echo $! >> "$1"
setsid sleep 60 & echo $! >> "$1"
(trap '' TERM; exec sleep 60) & echo $! >> "$1"
touch "$1.ready"
wait
"""
OPTIONS = [
    {"optionId": "allow", "name": "Allow", "kind": "allow_once"},
    {"optionId": "always", "name": "Always", "kind": "allow_always"},
    {"optionId": "reject", "name": "Reject", "kind": "reject_once"},
]


class TurnCancelled(Exception):
    """The turn is to stop."""


class FakeAcpTurn:
    """One prompt being worked on."""

    def __init__(
        self, agent: FakeAcpAgent, conversation: FakeConversation, id: Any, cancelled: threading.Event
    ) -> None:
        self.agent = agent
        self.conversation = conversation
        self.id = id
        self.cancelled = cancelled
        self.said: list[str] = []
        self.reason = "end_turn"
        self.error: dict[str, Any] | None = None
        # Lines that are written instead of the answer, and after it.
        self.instead: list[bytes] | None = None
        self.after: list[Callable[[], None]] = []
        self.tools = 0
        self.pids: str | None = None

    # -- the turn ------------------------------------------------------------------------------------------------------
    def perform(self, prompt: str) -> None:
        lines = [line for line in prompt.split("\n") if line.startswith("@@")]
        if not lines:
            self.say(f"you said: {prompt}")
        for line in lines:
            word, _, rest = line.removeprefix("@@").partition(" ")
            if word not in DEEDS:
                self.error = {"code": -32603, "message": f"fake_acp knows no {word!r}"}
                return
            DEEDS[word](self, rest)

    def stop(self) -> None:
        """It was cancelled."""
        self.reason = "cancelled"
        if self.pids is not None and not self.agent.character.leaves_tools:
            for pid in _pids(self.pids):
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
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
                self.agent.write_raw(line)
        elif self.error is not None:
            self.agent.write({"id": self.id, "error": self.error})
        else:
            late = [self.said.pop()] if self.agent.character.talks_late and self.said else []
            usage = {"inputTokens": 3, "outputTokens": 4, "totalTokens": 7}
            self.agent.write({"id": self.id, "result": {"stopReason": self.reason, "usage": usage}})
            for text in late:
                self._chunk(text)
        for deed in self.after:
            deed()

    # -- what it says --------------------------------------------------------------------------------------------------
    def say(self, text: str) -> None:
        self.said.append(text)
        if not self.agent.character.talks_late:
            self._chunk(text)

    def _chunk(self, text: str) -> None:
        self.update("agent_message_chunk", content={"type": "text", "text": text})

    def update(self, kind: str, /, **members: Any) -> None:
        self.agent.update(self.conversation.id, kind, **members)

    def wait(self, seconds: float) -> None:
        if self.cancelled.wait(seconds):
            raise TurnCancelled

    def ask(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        answer = self.agent.ask(method, {"sessionId": self.conversation.id, **params}, self)
        if self.cancelled.is_set():
            raise TurnCancelled
        return answer


DEEDS: dict[str, Callable[[FakeAcpTurn, str], None]] = {}


def _deed(deed: Callable[[FakeAcpTurn, str], None]) -> Callable[[FakeAcpTurn, str], None]:
    DEEDS[deed.__name__.removeprefix("_")] = deed
    return deed


# -- the deeds ---------------------------------------------------------------------------------------------------------
@_deed
def _text(turn: FakeAcpTurn, rest: str) -> None:
    """WORDS: say them."""
    turn.say(rest)


@_deed
def _slow(turn: FakeAcpTurn, rest: str) -> None:
    """COUNT SECONDS: say so many words, with so long between them."""
    count, seconds = rest.split()
    for number in range(int(count)):
        turn.say(f"tick{number} ")
        turn.wait(float(seconds))


@_deed
def _think(turn: FakeAcpTurn, rest: str) -> None:
    """WORDS: think them."""
    turn.update("agent_thought_chunk", content={"type": "text", "text": rest})


@_deed
def _plan(turn: FakeAcpTurn, rest: str) -> None:
    """WORDS: make a plan of one entry."""
    turn.update("plan", entries=[{"content": rest, "priority": "medium", "status": "pending"}])


@_deed
def _update(turn: FakeAcpTurn, rest: str) -> None:
    """JSON: any update."""
    update = json.loads(rest)
    turn.update(update.pop("sessionUpdate"), **update)


@_deed
def _tool(turn: FakeAcpTurn, rest: str) -> None:
    """FILE: run a tool that has children, tells their pids in that file, and never ends by itself."""
    turn.tools += 1
    call = f"call-{turn.id}-{turn.tools}"
    turn.update("tool_call", toolCallId=call, title="a tree", kind="execute", status="in_progress")
    turn.pids = rest
    command = ["sh", "-c", TREE, "sh", rest]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True):
        try:
            turn.wait(60)
        except TurnCancelled:
            turn.update("tool_call_update", toolCallId=call, status="failed")
            turn.stop()
            if turn.agent.character.leaves_tools:
                # Its end is not waited for: it is left.
                turn.finish()
                turn.instead = []
            raise


@_deed
def _ran(turn: FakeAcpTurn, rest: str) -> None:
    """WORDS: a tool that is over at once, with these as its output."""
    turn.tools += 1
    call = f"call-{turn.id}-{turn.tools}"
    turn.update("tool_call", toolCallId=call, title=rest, kind="execute", status="pending")
    content = [{"type": "content", "content": {"type": "text", "text": rest}}]
    turn.update("tool_call_update", toolCallId=call, status="completed", content=content)


@_deed
def _permission(turn: FakeAcpTurn, rest: str) -> None:
    """COMMAND: ask for leave to run it, and say what was answered."""
    call = {"toolCallId": f"asked-{turn.id}", "title": rest, "kind": "execute", "rawInput": {"command": rest}}
    answer = turn.ask("session/request_permission", {"toolCall": call, "options": OPTIONS})
    turn.say(f"answered {json.dumps(answer.get('result') or answer.get('error'))}")


@_deed
def _request(turn: FakeAcpTurn, rest: str) -> None:
    """METHOD JSON: ask the client anything, and say what was answered."""
    method, _, params = rest.partition(" ")
    answer = turn.ask(method, json.loads(params or "{}"))
    turn.say(f"answered {json.dumps(answer.get('result') if 'result' in answer else answer['error']['message'])}")


@_deed
def _terminal(turn: FakeAcpTurn, rest: str) -> None:
    """COMMAND: run it in a terminal of the client's, and say what it wrote and how it ended."""
    program, *args = shlex.split(rest)
    created = turn.ask("terminal/create", {"command": program, "args": args})
    if "error" in created:
        turn.say(f"refused {created['error']['message']}")
        return
    terminal = {"terminalId": created["result"]["terminalId"]}
    ended = turn.ask("terminal/wait_for_exit", terminal)
    wrote = turn.ask("terminal/output", terminal)
    turn.ask("terminal/release", terminal)
    turn.say(f"wrote {wrote['result']['output']!r} ended {ended['result'].get('exitCode')}")


@_deed
def _hang(turn: FakeAcpTurn, rest: str) -> None:
    """Say nothing more until the turn is cancelled."""
    turn.wait(90)


@_deed
def _never(turn: FakeAcpTurn, rest: str) -> None:
    """This prompt has no answer, cancelled or not."""
    turn.instead = []


@_deed
def _silence(turn: FakeAcpTurn, rest: str) -> None:
    """Nothing: the turn ends without a word."""


@_deed
def _stop(turn: FakeAcpTurn, rest: str) -> None:
    """REASON: how the turn ends."""
    turn.reason = rest


@_deed
def _error(turn: FakeAcpTurn, rest: str) -> None:
    """CODE MESSAGE: the prompt is answered with an error."""
    code, _, message = rest.partition(" ")
    turn.error = {"code": int(code), "message": message}


@_deed
def _raw(turn: FakeAcpTurn, rest: str) -> None:
    """LINE: write it as it is."""
    turn.agent.write_raw(rest.encode() + b"\n")


@_deed
def _late(turn: FakeAcpTurn, rest: str) -> None:
    """WORDS: say them after the answer to the prompt."""
    turn.after.append(lambda: turn.update("agent_message_chunk", content={"type": "text", "text": rest}))


@_deed
def _twice(turn: FakeAcpTurn, rest: str) -> None:
    """The prompt is answered a second time."""
    turn.after.append(lambda: turn.agent.write({"id": turn.id, "result": {"stopReason": "end_turn"}}))


@_deed
def _stray(turn: FakeAcpTurn, rest: str) -> None:
    """ID: an answer to a request that nobody made, or made long ago."""
    turn.agent.write({"id": json.loads(rest), "result": {"stopReason": "end_turn"}})


@_deed
def _huge(turn: FakeAcpTurn, rest: str) -> None:
    """BYTES: the answer is so long, and its id comes last."""
    filler = b"x" * int(rest)
    line = b'{"jsonrpc":"2.0","result":{"_meta":{"filler":"%s"},"stopReason":"end_turn"},"id":%d}\n'
    turn.instead = [line % (filler, turn.id)]


@_deed
def _touch(turn: FakeAcpTurn, rest: str) -> None:
    """FILE: make it, so that a test knows that we came so far."""
    with open(rest, "x", encoding="ascii"):
        pass


@_deed
def _await(turn: FakeAcpTurn, rest: str) -> None:
    """FILE: until it is there."""
    while not os.path.exists(rest):
        turn.wait(0.005)


@_deed
def _mode(turn: FakeAcpTurn, rest: str) -> None:
    """MODE: change it by itself."""
    turn.conversation.mode = rest
    turn.update("current_mode_update", currentModeId=rest)


@_deed
def _status(turn: FakeAcpTurn, rest: str) -> None:
    """Say which mode and model this conversation has."""
    turn.say(f"{turn.conversation.mode} {turn.conversation.model}")


@_deed
def _exit(turn: FakeAcpTurn, rest: str) -> None:
    """CODE: end the process."""
    os._exit(int(rest))


def _pids(path: str) -> list[int]:
    deadline = time.monotonic() + 5
    while not os.path.exists(f"{path}.ready") and time.monotonic() < deadline:
        time.sleep(0.005)
    with open(path, encoding="ascii") as file:
        return [int(line) for line in file.read().split()]
