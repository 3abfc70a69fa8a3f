"""The verbs of the script language by which a turn says, ends and waits; `misdeeds` has the rest.

A verb is done by a generator that is given its turn and its step. It yields while it waits, so that the agent can read
and answer meanwhile; a turn that is interrupted ends inside that yield.
"""

from __future__ import annotations

import json
import os
import stat

from banksman.testing.fake_agent import frames
from banksman.testing.fake_agent.claude_turn import CutShort, FakeClaudeTurn, FakeQuestion, FakeSettings
from banksman.testing.fake_agent.loop import NEVER, Wait, pause
from banksman.testing.fake_agent.script import Plan, ScriptError, ScriptStep, verb

TYPE_CHECKING = False
if TYPE_CHECKING:
    from banksman.testing.fake_agent.frames import Frame
    from banksman.testing.fake_agent.loop import Act

# What a verb makes much of waits for the reader from here on.
AHEAD_BYTES_MAX = 256 * 1024


def room(turn: FakeClaudeTurn) -> Act:
    """Do not run ahead of the reader."""
    sinks = (turn.agent.out, turn.agent.err)
    if any(len(sink.buffer) > AHEAD_BYTES_MAX for sink in sinks):
        yield Wait(when=lambda: all(len(sink.buffer) <= AHEAD_BYTES_MAX for sink in sinks))


def _arguments(text: str) -> Frame:
    try:
        value: object = json.loads(text or "{}")
    except ValueError as error:
        raise ScriptError(f"no JSON: {text!r}") from error
    return value  # pyright: ignore[reportReturnType]


# ── Saying ──


@verb("say", "TEXT")
def say(turn: FakeClaudeTurn, step: ScriptStep) -> Act:
    """One assistant frame with this text; the last one said is the result."""
    turn.say(step.word(0))
    yield from room(turn)


@verb("think", "TEXT")
def think(turn: FakeClaudeTurn, step: ScriptStep) -> Act:
    """A thinking_tokens frame and an assistant frame with a thinking block."""
    turn.emit(frames.thinking_tokens())
    turn.assistant({"type": "thinking", "thinking": step.word(0), "signature": "ZmFrZQ=="})
    yield from room(turn)


@verb("stream", "COUNT SECONDS [TEXT]")
def stream(turn: FakeClaudeTurn, step: ScriptStep) -> Act:
    """So many stream_event deltas, each so long after the last, then the assistant frame."""
    turn.stream_begin()
    for number in range(step.integer(0)):
        if number and step.seconds(1):
            yield pause(step.seconds(1))
        turn.stream_chunk(f"{step.word(2, 'tick')}{number} ")
        yield from room(turn)
    turn.say(turn.streamed)
    turn.stream_end("end_turn")


@verb("speak", "SECONDS TEXT")
def speak(turn: FakeClaudeTurn, step: ScriptStep) -> Act:
    """This text word by word, a stream_event delta each and so long after the last, then the assistant frame."""
    turn.stream_begin()
    for number, word in enumerate(_words(step.word(1))):
        if number and step.seconds(0):
            yield pause(step.seconds(0))
        turn.stream_chunk(word)
        yield from room(turn)
    turn.say(turn.streamed)
    turn.stream_end("end_turn")


def _words(text: str) -> list[str]:
    """With the space before each, so that together they are the text."""
    first, *rest = text.split(" ")
    return [first, *(f" {word}" for word in rest)]


@verb("thinking", "COUNT SECONDS")
def thinking(turn: FakeClaudeTurn, step: ScriptStep) -> Act:
    """So many stream_event deltas of thinking, each so long after the last, and nothing else."""
    turn.stream_begin()
    for number in range(step.integer(0)):
        if number and step.seconds(1):
            yield pause(step.seconds(1))
        turn.think_chunk(f"hm{number} ")
        yield from room(turn)
    turn.stream_end("end_turn")


@verb("tool_use", "NAME [JSON]")
def tool_use(turn: FakeClaudeTurn, step: ScriptStep) -> Act:
    """An assistant frame that calls a tool; the tool runs until `tool_result`."""
    turn.tool_use(step.word(0), _arguments(step.word(1)))
    yield from room(turn)


@verb("tool_result", "[TEXT]")
def tool_result(turn: FakeClaudeTurn, step: ScriptStep) -> Act:
    """The user frame with the result of the tool that runs."""
    turn.tool_result(step.word(0))
    yield from room(turn)


@verb("recall")
def recall(turn: FakeClaudeTurn, step: ScriptStep) -> Act:
    """Say all prompts of the conversation that began a turn, as a JSON list."""
    turn.say(json.dumps(turn.agent.memory.prompts))
    yield from room(turn)


@verb("ask", "NAME [JSON]")
def ask(turn: FakeClaudeTurn, step: ScriptStep) -> Act:
    """Call a tool that needs a permission, and wait for the answer."""
    name, arguments = step.word(0), _arguments(step.word(1))
    question = _question(turn, name, arguments)
    yield Wait(when=lambda: question.answer is not None or turn.agent.eof_at is not None)
    _settled(turn, question)
    match question.answer:
        case {"behavior": "allow"}:
            turn.tool_result(f"({name} completed with no output)")
        case {"behavior": "deny", "interrupt": True}:
            raise CutShort("aborted")
        case {"behavior": "deny", "message": message}:
            turn.denials.append({"tool_name": name, "tool_use_id": turn.tool_use_id, "tool_input": arguments})
            turn.tool_result(str(message), is_error=True)
        case None:
            turn.tool_result("Tool permission request failed: AbortError: stream closed", is_error=True)
        case _:
            turn.tool_result("The canUseTool callback returned an invalid permission result", is_error=True)


@verb("ask_withdrawn", "NAME PATH")
def ask_withdrawn(turn: FakeClaudeTurn, step: ScriptStep) -> Act:
    """Ask for a permission, and withdraw the question when the path exists."""
    question = _question(turn, step.word(0), {})
    yield from exists(step.word(1))
    turn.agent.write({"type": "control_cancel_request", "request_id": question.id})
    _settled(turn, question)
    turn.tool_result("withdrawn", is_error=True)


@verb("request", "JSON")
def request(turn: FakeClaudeTurn, step: ScriptStep) -> Act:
    """A control request with this body (a hook, a tool's message, an elicitation), and wait for the answer."""
    question = _requested(turn, _arguments(step.word(0)))
    yield Wait(when=lambda: question.answer is not None or turn.agent.eof_at is not None)
    _settled(turn, question)


@verb("request_withdrawn", "PATH JSON")
def request_withdrawn(turn: FakeClaudeTurn, step: ScriptStep) -> Act:
    """A control request with this body, which is withdrawn when the path exists."""
    question = _requested(turn, _arguments(step.word(1)))
    yield from exists(step.word(0))
    turn.agent.write({"type": "control_cancel_request", "request_id": question.id})
    _settled(turn, question)


def _question(turn: FakeClaudeTurn, name: str, arguments: Frame) -> FakeQuestion:
    question = _opened(turn)
    turn.tool_use(name, arguments)
    turn.agent.write(frames.can_use_tool(question.id, turn.tool_use_id, name, arguments))
    return question


def _requested(turn: FakeClaudeTurn, body: Frame) -> FakeQuestion:
    question = _opened(turn)
    turn.agent.write(frames.control_request(question.id, body))
    return question


def _opened(turn: FakeClaudeTurn) -> FakeQuestion:
    question = FakeQuestion()
    turn.questions.append(question)
    turn.agent.questions[question.id] = question
    return question


def _settled(turn: FakeClaudeTurn, question: FakeQuestion) -> None:
    turn.questions.remove(question)
    del turn.agent.questions[question.id]


# ── Ending a turn ──


@verb("result", "TEXT")
def result(turn: FakeClaudeTurn, step: ScriptStep) -> Act:
    """The boundary, now; a second one is a second boundary."""
    yield from turn.succeed(step.word(0))


@verb("boundary", "JSON")
def boundary(turn: FakeClaudeTurn, step: ScriptStep) -> Act:
    """The boundary, with these members in place of its own: a structured_output, a cost, a way to fail, …"""
    yield from turn.succeed(turn.answer, members=_arguments(step.word(0)))


@verb("error", "TEXT")
def error(turn: FakeClaudeTurn, step: ScriptStep) -> Act:
    """The boundary after a failed model call: subtype success with is_error."""
    yield from turn.succeed(step.word(0), api_error_status=400)


@verb("failure", "TEXT")
def failure(turn: FakeClaudeTurn, step: ScriptStep) -> Act:
    """The boundary error_during_execution, with errors and without a text."""
    yield from turn.fail(step.word(0))


@verb("huge_tool_result", "BYTES")
def huge_tool_result(turn: FakeClaudeTurn, step: ScriptStep) -> Act:
    """The user frame with the result of the tool that runs, whose text alone has so many bytes."""
    turn.tool_result("x" * step.integer(0))
    yield from room(turn)


@verb("huge_result", "BYTES")
def huge_result(turn: FakeClaudeTurn, step: ScriptStep) -> Act:
    """The boundary, whose text alone has so many bytes."""
    yield from turn.succeed("x" * step.integer(0))


@verb("lifecycle", "queued|started|completed|cancelled")
def lifecycle(turn: FakeClaudeTurn, step: ScriptStep) -> Act:
    """A command_lifecycle frame for each prompt of the turn, now."""
    turn.lifecycle(step.word(0))
    yield from room(turn)


@verb("hang")
def hang(turn: FakeClaudeTurn, step: ScriptStep) -> Act:
    """Nothing more, until an interrupt."""
    while True:
        yield NEVER


@verb("detach")
def detach(turn: FakeClaudeTurn, step: ScriptStep) -> Act:
    """The turn is over here, unsaid; the steps that follow are done beside the next ones."""
    rest, turn.remaining = turn.remaining, []
    turn.settings.omitted.update(("result", "completed"))

    def act() -> Act:
        for later in rest:
            yield from turn.agent.perform(later, turn)

    turn.agent.spawn(act())
    yield from room(turn)


@verb(
    "omit",
    "init|lifecycle|completed|result|uuids|initialize|set_model|set_permission_mode",
    is_setting=True,
)
def omit(turn: FakeClaudeTurn, step: ScriptStep) -> Act:
    """Never write this: in this turn, or in this process."""
    turn.settings.omitted.add(step.word(0))
    yield from room(turn)


@verb("refuse", "initialize|set_model|set_permission_mode", is_setting=True)
def refuse(turn: FakeClaudeTurn, step: ScriptStep) -> Act:
    """Answer this request with an error: in this turn, or in this process."""
    turn.settings.refused.add(step.word(0))
    yield from room(turn)


@verb(
    "on_interrupt",
    "boundary|unacked|late_ack|ack_only|ignored|ignored_early|finished|unanswered",
    is_setting=True,
)
def on_interrupt(turn: FakeClaudeTurn, step: ScriptStep) -> Act:
    """What an interrupt does: ack and boundary; or without the ack, with it last, without the boundary, …"""
    turn.settings.on_interrupt = step.word(0)
    yield from room(turn)


@verb("own", "task-notification|auto-continuation|none STEPS")
def own(turn: FakeClaudeTurn, step: ScriptStep) -> Act:
    """A turn of the agent's own with these steps and this origin, as soon as no other is open."""
    agent = turn.agent
    if agent.turn is turn:
        raise ScriptError(f"{step!r}: no turn can be opened inside another")
    yield Wait(when=lambda: agent.turn is None)
    settings = FakeSettings([agent.process.settings])
    mine = FakeClaudeTurn(agent, Plan(step.nested), settings, origin=step.word(0))
    for setting in mine.plan.settings:
        yield from agent.perform(setting, mine)
    yield from mine.run()


# ── Waiting ──


@verb("wait", "PATH")
def wait(turn: FakeClaudeTurn, step: ScriptStep) -> Act:
    """Until the path exists; if it is a fifo, until somebody writes to it or closes it."""
    yield from exists(step.word(0))


def exists(path: str) -> Act:
    yield Wait(when=lambda: os.path.exists(path), is_polled=True)
    if stat.S_ISFIFO(os.stat(path).st_mode):
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            yield Wait(fd=fd)
            os.read(fd, 1)
        finally:
            os.close(fd)


@verb("touch", "PATH")
def touch(turn: FakeClaudeTurn, step: ScriptStep) -> Act:
    """Make a file, when all said before is written; if it is a fifo, write a line to who reads it."""
    yield turn.agent.drained()
    path = step.word(0)
    if os.path.exists(path) and stat.S_ISFIFO(os.stat(path).st_mode):
        opened: list[int] = []
        yield Wait(when=lambda: _opens(path, opened), is_polled=True)
        os.write(opened[0], b"\n")
        os.close(opened[0])
        return
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))


def _opens(path: str, opened: list[int]) -> bool:
    """Open a fifo to write, which is refused as long as nobody reads."""
    try:
        opened.append(os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    except OSError:
        return False
    return True


@verb("pause", "SECONDS")
def pause_for(turn: FakeClaudeTurn, step: ScriptStep) -> Act:
    """So long nothing; a handshake by `wait` is better wherever it can be had."""
    yield pause(step.seconds(0))


@verb("await", "POINT")
def await_point(turn: FakeClaudeTurn, step: ScriptStep) -> Act:
    """Until this point is next passed, by whichever turn; what follows happens at that point."""
    yield Wait(point=step.word(0))
