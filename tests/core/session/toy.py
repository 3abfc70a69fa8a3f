"""Toy dialect, and a model of an agent that speaks it: small enough to try everything that the agent could do.

A frame is a few words. Frames to the agent: `H request` (handshake), `P ref` (a prompt), `I request` (interrupt),
`S request` (a setting), `A request` and `R request` (a question answered, refused). For frames from the agent, see
`ToyDialect.read`. The text of a boundary is the name of the prompt that it ends, with a `!` if the turn was aborted. So
a test sees when an answer reaches the wrong ask.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from banksman.core.dialects.dialect import (
    PLAIN,
    Decision,
    Projector,
    Prompt,
    ProtocolState,
    Setup,
    StatelessProtocol,
    Transcript,
    Verdict,
)
from banksman.core.dialects.meaning import (
    BackgroundTask,
    LimitsReported,
    LimitWindow,
    Meaning,
    Noise,
    PromptSettled,
    PromptTaken,
    ProviderFailure,
    Replied,
    Requested,
    RequestPurpose,
    Retrying,
    TasksChanged,
    ToolBegan,
    TurnOpened,
    TurnOver,
    UsageReported,
)
from banksman.core.dialects.tokens import Tokens
from banksman.errors import ErrorKind

OWN = "own"
LIMITED = ProviderFailure(ErrorKind.USAGE_LIMIT, limited_until=9.0)
THROTTLED = ProviderFailure(ErrorKind.RATE_LIMITED, retry_after=1.0)


@functools.cache
def _meaning(line: bytes) -> Meaning | None:
    word, *rest = line.decode().split()
    match word:
        case "ok":
            return Replied(rest[0])
        case "taken":
            return PromptTaken(rest[0])
        case "began":
            return TurnOpened(refs=tuple(rest))
        case "init":
            return TurnOpened(refs=tuple(rest), can_interrupt=True, conversation="talk")
        case "own":
            return TurnOpened(origin="task", can_interrupt=True)
        case "over" | "error":
            text, *refs = rest
            return TurnOver(tuple(refs), text=text, is_aborted=text.endswith("!"), is_error=word == "error")
        case "ownover":
            return TurnOver(origin="task", text=rest[0])
        case "settled" | "cancelled":
            return PromptSettled(rest[0], is_cancelled=word == "cancelled")
        case "tasks":
            return TasksChanged(tuple(BackgroundTask(name) for name in rest))
        case "used":
            return UsageReported(rest[0], Tokens(int(rest[1])))
        case "ask":
            return Requested(rest[0], RequestPurpose.PERMISSION, "can_use_tool", "saw")
        case "limit":
            return LimitsReported((LimitWindow("hours", 1.0, 9.0, is_exhausted=True),))
        case "later":
            return LimitsReported((LimitWindow("hours", 1.0, 20.0, is_exhausted=True),))
        case "limited" | "throttled":
            text, *refs = rest
            failure = LIMITED if word == "limited" else THROTTLED
            return TurnOver(tuple(refs), text=text, is_error=True, failure=failure)
        case "tool":
            return ToolBegan(("t",))
        case "free":
            return LimitsReported((LimitWindow("hours", 0.0, 9.0),))
        case "retry":
            return Retrying(1, "overloaded", delay=1.0)
        case "text":
            return None
        case _:
            return Noise()


class ToyDialect:
    name: str = "toy"

    def __init__(self, *, acknowledges_interrupts: bool = True) -> None:
        self.acknowledges_interrupts: bool = acknowledges_interrupts
        self.can_steer: bool = True
        self.takes_input: bool = True

    def read(self, line: bytes) -> Meaning | None:
        return _meaning(line)

    def read_head(self, head: bytes, tail: bytes = b"") -> Meaning | None:
        return _meaning(head)

    def partial(self, line: bytes) -> list[dict[str, Any]]:
        return []

    def begin(self, setup: Setup) -> ProtocolState:
        return StatelessProtocol(self, setup)

    def handshake(self, request: str, setup: Setup = PLAIN) -> bytes:
        return f"H {request}\n".encode()

    def prompt(self, ref: str, prompt: Prompt) -> bytes:
        return f"P {ref}\n".encode()

    def interrupt(self, request: str) -> bytes:
        return f"I {request}\n".encode()

    def setting(self, request: str, name: str, value: str) -> bytes:
        return f"S {request}\n".encode()

    def answer(self, asked: Requested, decision: Decision) -> bytes:
        return f"A {asked.request}\n".encode()

    def rule(self, asked: Requested, verdict: Verdict | None) -> bytes:
        return f"A {asked.request}\n".encode()

    def respond(self, asked: Requested, response: Mapping[str, Any]) -> bytes:
        return f"A {asked.request}\n".encode()

    def refuse(self, request: str, error: str) -> bytes:
        return f"R {request}\n".encode()

    def may_show_output(self, line: bytes) -> bool:
        return False

    def project(self, line: bytes) -> list[dict[str, Any]]:
        return []

    def projector(self) -> Projector:
        return self

    def transcript(self) -> Transcript:
        raise NotImplementedError

    def has_forgotten(self, stderr: str) -> bool:
        return "forgotten" in stderr


class Manners(NamedTuple):
    """Behaviour of an agent.

    - `names`: it says which prompt it works on.
    - `begins`: it says so before its init, too.
    - `announces`: it says that a turn opens.
    - `ends`: the ways in which it may end a turn. Each is a sequence of boundary ("over") and settlement ("settled"),
      with a "+" between frames that it sends together.
    - `labels`: it marks its agent-initiated turns.
    """

    names: bool = True
    begins: bool = False
    announces: bool = True
    ends: tuple[str, ...] = ("over+settled",)
    labels: bool = False
    merges: bool = False
    errs: bool = False


POLITE = Manners()


class Agent(msgspec.Struct, frozen=True):
    """The true state of the agent, which the session can only infer."""

    # Frames that were written and not read; prompts that were read and not begun; prompts in progress.
    inbox: tuple[bytes, ...] = ()
    waiting: tuple[str, ...] = ()
    current: tuple[str, ...] = ()
    can_abort: bool = False
    is_aborting: bool = False
    # Lines that the agent will send next, and the last boundary that it sent.
    owed: tuple[bytes, ...] = ()
    said: bytes = b""
    has_question: bool = False
    has_task: bool = False

    def is_idle(self, *, acknowledges: bool) -> bool:
        """Whether a prompt written now opens a turn, and no interrupt that would be acknowledged is on its way."""
        kinds = b"PI" if acknowledges else b"P"
        is_unread = any(frame[0] in kinds for frame in self.inbox)
        is_ending = any(line.startswith(b"over") for line in self.owed)
        return not self.current and not self.waiting and not is_ending and not is_unread


class Said(NamedTuple):
    """One move of the agent: its lines (maybe none), the budget that it costs, and the state after it."""

    lines: tuple[bytes, ...]
    agent: Agent
    cost: str = ""
    # The interrupt that took effect, and the prompts that it hit.
    struck: tuple[str, tuple[str, ...]] | None = None


def moves(agent: Agent, manners: Manners, budget: Mapping[str, int]) -> Iterator[Said]:
    """Everything that the agent could do now."""
    if agent.inbox:
        yield from _read(agent, manners, budget)
    if agent.owed:
        line, *rest = agent.owed
        yield Said((line,), replace(agent, owed=tuple(rest)))
        return
    if agent.current:
        yield from _work(agent, manners, budget)
    else:
        yield from _begin(agent, manners, budget)
    if agent.said and budget.get("stray"):
        yield Said((agent.said,), agent, "stray")
    if budget.get("limit"):
        yield Said((b"limit",), agent, "limit")
        yield Said((b"free",), agent, "limit")
        yield Said((b"retry",), agent, "limit")
    if budget.get("limited"):
        yield Said((b"limit",), agent, "limited")
        yield Said((b"later",), agent, "limited")
        yield Said((b"free",), agent, "limited")
    if agent.has_task:
        yield Said((b"tasks",), replace(agent, has_task=False))
    elif budget.get("task"):
        yield Said((b"tasks t1",), replace(agent, has_task=True), "task")


def _read(agent: Agent, manners: Manners, budget: Mapping[str, int]) -> Iterator[Said]:
    frame, *rest = agent.inbox
    agent = replace(agent, inbox=tuple(rest))
    kind, name = frame.decode().split()
    match kind:
        case "P":
            lines = (f"taken {name}".encode(),) if manners.names else ()
            if not manners.announces and not agent.current:
                yield Said(lines, replace(agent, current=(name,), can_abort=True))
                return
            yield Said(lines, replace(agent, waiting=(*agent.waiting, name)))
        case "I":
            # An interrupt before the agent can take it is acknowledged and has no other effect.
            is_hit = agent.can_abort and not agent.is_aborting
            hit = replace(agent, is_aborting=True) if is_hit else agent
            struck = (name, agent.current) if is_hit else None
            yield Said((f"ok {name}".encode(),), hit, "", struck)
            if budget.get("unacknowledged"):
                yield Said((), hit, "unacknowledged", struck)
        case "H":
            yield Said((f"ok {name}".encode(),), agent)
        case "S":
            yield Said((f"ok {name}".encode(),), agent)
            if budget.get("unanswered"):
                yield Said((), agent, "unanswered")
        case _:
            yield Said((), replace(agent, has_question=False))


def _begin(agent: Agent, manners: Manners, budget: Mapping[str, int]) -> Iterator[Said]:
    if agent.waiting:
        count = len(agent.waiting) if manners.merges else 1
        refs = agent.waiting[:count]
        begun = replace(agent, current=refs, waiting=agent.waiting[count:])
        if manners.begins:
            yield Said((b"began " + " ".join(refs).encode(),), begun)
        else:
            yield from _announce(begun, manners)
    if budget.get("own"):
        line = b"own" if manners.labels else b"init"
        yield Said((line,), replace(agent, current=(OWN,), can_abort=True), "own")


def _announce(agent: Agent, manners: Manners) -> Iterator[Said]:
    refs = agent.current if manners.names else ()
    lines = (" ".join(("init", *refs)).encode(),) if manners.announces else ()
    yield Said(lines, replace(agent, can_abort=True))


def _work(agent: Agent, manners: Manners, budget: Mapping[str, int]) -> Iterator[Said]:
    if not agent.can_abort:
        yield from _announce(agent, manners)
        return
    over = replace(agent, current=(), can_abort=False, is_aborting=False, has_question=False)
    if agent.current == (OWN,):
        aborted = "!" if agent.is_aborting else ""
        yield Said((f"ownover {OWN}".encode() if manners.labels else f"over {OWN}{aborted}".encode(),), over)
        if agent.waiting and budget.get("merge"):
            # The agent took the prompt into its own turn.
            ref = agent.waiting[0]
            merged = replace(over, waiting=agent.waiting[1:])
            yield Said((f"over {ref}{aborted} {ref}".encode(), f"settled {ref}".encode()), merged, "merge")
        return
    yield from _end(agent, over, manners, budget)
    if not agent.has_question and not agent.is_aborting and budget.get("question"):
        yield Said((b"ask q1",), replace(agent, has_question=True), "question")
    if budget.get("tool"):
        yield Said((b"tool",), agent, "tool")
    if budget.get("use"):
        # Each report is about another model call.
        yield Said((f"used c{budget['use']} 5".encode(),), agent, "use")


def _end(agent: Agent, over: Agent, manners: Manners, budget: Mapping[str, int]) -> Iterator[Said]:
    refs = agent.current
    text = refs[0] + ("!" if agent.is_aborting else "")
    named = (text, *refs) if manners.names else (text,)
    words: dict[str, tuple[bytes, ...]] = {"over": (" ".join(("over", *named)).encode(),)}
    words["settled"] = tuple(f"{'cancelled' if agent.is_aborting else 'settled'} {ref}".encode() for ref in refs)
    for end in manners.ends:
        breaths = [tuple(line for word in breath.split("+") for line in words[word]) for breath in end.split(",")]
        owed = tuple(line for breath in breaths[1:] for line in breath)
        yield Said(breaths[0], replace(over, owed=owed, said=words["over"][0]))
    if budget.get("missing"):
        yield Said(words["settled"] if manners.names else (), over, "missing")
    if manners.errs and not agent.is_aborting:
        yield Said((" ".join(("error", f"{refs[0]}?", *named[1:])).encode(),), over)
    if budget.get("limited") and not agent.is_aborting:
        for word in ("limited", "throttled"):
            boundary = " ".join((word, f"{refs[0]}?", *named[1:])).encode()
            yield Said((boundary, *words["settled"]), over, "limited")
