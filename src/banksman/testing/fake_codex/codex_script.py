"""What a turn of the fake Codex can do: `DEEDS`, by the word that a line of its prompt begins with after `@@`."""

from __future__ import annotations

import json
import os
import subprocess

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from banksman.testing.fake_codex.codex_turn import FakeCodexTurn

# A tool's tree: a shell, a plain child, one with its own session, and one that ignores TERM. The shell writes all four
# pids before it says that it is ready.
TREE = """
echo $$ >> "$1"
sleep 60 & echo $! >> "$1"
setsid sleep 60 & echo $! >> "$1"
(trap '' TERM; exec sleep 60) & echo $! >> "$1"
touch "$1.ready"
wait
"""

DEEDS: dict[str, Callable[[FakeCodexTurn, str], None]] = {}


def _deed(deed: Callable[[FakeCodexTurn, str], None]) -> Callable[[FakeCodexTurn, str], None]:
    DEEDS[deed.__name__.removeprefix("_")] = deed
    return deed


@_deed
def _text(turn: FakeCodexTurn, rest: str) -> None:
    """WORDS: say them."""
    turn.say(rest)


@_deed
def _slow(turn: FakeCodexTurn, rest: str) -> None:
    """COUNT SECONDS: say so many words, with so long between them."""
    count, seconds = rest.split()
    turn.say(*(f"tick{number} " for number in range(int(count))), seconds=float(seconds))


@_deed
def _think(turn: FakeCodexTurn, rest: str) -> None:
    """WORDS: think them."""
    item = turn.start(type="reasoning", summary=[], content=[])
    turn.agent.notice("item/reasoning/summaryTextDelta", turnId=turn.id, itemId=item["id"], delta=rest, summaryIndex=0)
    turn.complete(item, summary=[rest])


@_deed
def _tool(turn: FakeCodexTurn, rest: str) -> None:
    """FILE: run a command that has children, tells their pids in that file, and never ends by itself. An interrupt
    leaves all of it running."""
    turn.start(type="commandExecution", command="a tree", cwd="/", status="inProgress")
    command = ["sh", "-c", TREE, "sh", rest]
    subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True)
    turn.wait(90)


@_deed
def _ran(turn: FakeCodexTurn, rest: str) -> None:
    """WORDS: a command that is over at once, with these as its output."""
    item = turn.start(type="commandExecution", command=f"echo {rest}", cwd="/", status="inProgress")
    turn.complete(item, status="completed", aggregatedOutput=f"{rest}\n", exitCode=0)


@_deed
def _permission(turn: FakeCodexTurn, rest: str) -> None:
    """COMMAND: ask for leave to run it, and say what was answered."""
    item = turn.start(type="commandExecution", command=rest, cwd="/", status="inProgress")
    decisions = ["accept", {"acceptWithExecpolicyAmendment": {"execpolicy_amendment": [rest]}}, "cancel"]
    params = {"itemId": item["id"], "command": rest, "cwd": "/", "availableDecisions": decisions}
    answer = turn.ask("item/commandExecution/requestApproval", params)
    decision = answer.get("result", {}).get("decision")
    turn.complete(item, status="declined" if decision in ("decline", "cancel", None) else "completed", exitCode=0)
    if decision == "cancel":
        turn.cancelled.set()
    turn.wait(0)
    turn.say(f"answered {json.dumps(decision)}")


@_deed
def _request(turn: FakeCodexTurn, rest: str) -> None:
    """METHOD JSON: ask the client anything, and say what was answered."""
    method, _, params = rest.partition(" ")
    answer = turn.ask(method, json.loads(params or "{}"))
    turn.say(f"answered {json.dumps(answer.get('result') if 'result' in answer else answer['error']['code'])}")


@_deed
def _hang(turn: FakeCodexTurn, rest: str) -> None:
    """Say nothing more until the turn is stopped."""
    turn.wait(90)


@_deed
def _error(turn: FakeCodexTurn, rest: str) -> None:
    """MESSAGE: something is retried, then the turn fails with this."""
    error = {"message": "once more", "codexErrorInfo": None}
    turn.agent.notice("error", turnId=turn.id, willRetry=True, error=error)
    turn.agent.notice("warning", message="this is none")
    turn.status, turn.error = "failed", {"message": rest, "codexErrorInfo": "other"}


@_deed
def _raw(turn: FakeCodexTurn, rest: str) -> None:
    """LINE: write it as it is."""
    turn.agent.write_raw(rest.encode() + b"\n")


@_deed
def _late_reply(turn: FakeCodexTurn, rest: str) -> None:
    """The prompt's request is answered when its turn is over."""


@_deed
def _huge_reply(turn: FakeCodexTurn, rest: str) -> None:
    """The prompt's request is answered by a line that is too long to keep, with the id at its end."""


@_deed
def _twice(turn: FakeCodexTurn, rest: str) -> None:
    """The prompt's request is answered again, now and when the turn is over."""
    turn.reply()
    turn.after.append(turn.reply)


@_deed
def _stray(turn: FakeCodexTurn, rest: str) -> None:
    """ID: an answer to a request that nobody made."""
    turn.agent.write({"id": json.loads(rest), "result": {"turn": {"id": "stray"}}})


@_deed
def _again(turn: FakeCodexTurn, rest: str) -> None:
    """When the turn is over, its boundary is said once more."""
    over = {"id": turn.id, "status": "failed"}
    turn.after.append(lambda: turn.agent.notice("turn/completed", turn=over))


@_deed
def _huge(turn: FakeCodexTurn, rest: str) -> None:
    """BYTES: an answer of so many, and so a boundary."""
    turn.say("x" * int(rest))


@_deed
def _deaf(turn: FakeCodexTurn, rest: str) -> None:
    """From now on no prompt can be added to the turn: they are refused as if it were over."""
    with turn.agent.lock:
        turn.takes_prompts = False


@_deed
def _own(turn: FakeCodexTurn, rest: str) -> None:
    """WORDS: when the turn is over, begin another one, which nobody asked for, and say them."""

    def begin() -> None:
        params = {"input": [{"type": "text", "text": f"@@text {rest}"}]}
        with turn.agent.lock:
            turn.agent.turn = other = type(turn)(turn.agent, None, params)
        other.begin()

    turn.after.append(begin)


@_deed
def _settings(turn: FakeCodexTurn, rest: str) -> None:
    """Say which model and policy the thread has."""
    turn.say(json.dumps(turn.agent.settings))


@_deed
def _touch(turn: FakeCodexTurn, rest: str) -> None:
    """FILE: make it, so that a test knows that we came so far."""
    with open(rest, "x", encoding="ascii"):
        pass


@_deed
def _await(turn: FakeCodexTurn, rest: str) -> None:
    """FILE: until it is there."""
    while not os.path.exists(rest):
        turn.wait(0.005)


@_deed
def _exit(turn: FakeCodexTurn, rest: str) -> None:
    """CODE: end the process."""
    os._exit(int(rest))
