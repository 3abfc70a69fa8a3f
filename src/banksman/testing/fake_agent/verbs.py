"""Script verbs of the fake Claude: output, boundaries, waits, and misbehaviour.

Importing this module completes `VERBS`. `fake_script` has the verbs that all dialects share.
"""

from __future__ import annotations

import json
import os
import signal
import time

from banksman.testing import fake_script
from banksman.testing.fake_agent import frames
from banksman.testing.fake_agent.claude_turn import (
    VERBS,
    FakeClaudeTurn,
    FakeQuestion,
    FakeSettings,
    Plan,
)
from banksman.testing.fake_process import NEVER, CutShort, Wait, pause
from banksman.testing.fake_script import ScriptError, ScriptStep, exists

TYPE_CHECKING = False
if TYPE_CHECKING:
    from banksman.testing.fake_agent.frames import Frame
    from banksman.testing.fake_process import Act

__all__ = ["VERBS"]

HOLD_SECONDS_MAX = 120

VERBS.add("say", "TEXT", fake_script.say)
VERBS.add("raw", "TEXT", fake_script.raw)
VERBS.add("hang", "", fake_script.hang)
VERBS.add("pause", "SECONDS", fake_script.pause_for)
VERBS.add("wait", "PATH", fake_script.wait_path)
VERBS.add("touch", "PATH", fake_script.touch)
VERBS.add("exit", "CODE", fake_script.leave)


def _arguments(text: str) -> Frame:
    try:
        value: object = json.loads(text or "{}")
    except ValueError as error:
        raise ScriptError(f"no JSON: {text!r}") from error
    return value  # pyright: ignore[reportReturnType]


# ── Output ──


@VERBS.verb("think", "TEXT")
def think(turn: FakeClaudeTurn, step: ScriptStep) -> None:
    """Write a thinking_tokens frame and an assistant frame with a thinking block."""
    turn.emit(frames.thinking_tokens())
    turn.assistant({"type": "thinking", "thinking": step.word(0), "signature": "ZmFrZQ=="})


@VERBS.verb("used", "COUNT COUNT")
def used(turn: FakeClaudeTurn, step: ScriptStep) -> None:
    """Report the input and output tokens of a model call; the boundary has the sum."""
    turn.used(step.integer(0), step.integer(1))


@VERBS.verb("stream", "COUNT SECONDS [TEXT]")
def stream(turn: FakeClaudeTurn, step: ScriptStep) -> Act:
    """Write COUNT stream_event deltas, SECONDS apart, then the assistant frame."""
    turn.stream_begin()
    for number in range(step.integer(0)):
        if number and step.seconds(1):
            yield pause(step.seconds(1))
        turn.stream_chunk(f"{step.word(2, 'tick')}{number} ")
        yield from turn.agent.room()
    turn.say(turn.streamed)
    turn.stream_end("end_turn")


@VERBS.verb("speak", "SECONDS TEXT")
def speak(turn: FakeClaudeTurn, step: ScriptStep) -> Act:
    """Stream TEXT word by word as stream_event deltas, SECONDS apart, then the assistant frame."""
    turn.stream_begin()
    for number, word in enumerate(_words(step.word(1))):
        if number and step.seconds(0):
            yield pause(step.seconds(0))
        turn.stream_chunk(word)
        yield from turn.agent.room()
    turn.say(turn.streamed)
    turn.stream_end("end_turn")


def _words(text: str) -> list[str]:
    """Split a text into words with their leading space; joined, they give the text."""
    first, *rest = text.split(" ")
    return [first, *(f" {word}" for word in rest)]


@VERBS.verb("thinking", "COUNT SECONDS")
def thinking(turn: FakeClaudeTurn, step: ScriptStep) -> Act:
    """Write COUNT stream_event deltas of thinking, SECONDS apart, and no assistant frame."""
    turn.stream_begin()
    for number in range(step.integer(0)):
        if number and step.seconds(1):
            yield pause(step.seconds(1))
        turn.think_chunk(f"hm{number} ")
        yield from turn.agent.room()
    turn.stream_end("end_turn")


@VERBS.verb("tool_use", "NAME [JSON]")
def tool_use(turn: FakeClaudeTurn, step: ScriptStep) -> None:
    """Write an assistant frame that calls a tool; the tool runs until `tool_result`."""
    turn.tool_use(step.word(0), _arguments(step.word(1)))


@VERBS.verb("tool_result", "[TEXT]")
def tool_result(turn: FakeClaudeTurn, step: ScriptStep) -> None:
    """Write the user frame with the result of the running tool."""
    turn.tool_result(step.word(0))


@VERBS.verb("tasks", "[TEXT]")
def tasks(turn: FakeClaudeTurn, step: ScriptStep) -> None:
    """Report the background tasks that run now, by their ids; without ids, that none runs."""
    turn.agent.write(frames.background_tasks(step.word(0).split()))


@VERBS.verb("recall")
def recall(turn: FakeClaudeTurn, step: ScriptStep) -> None:
    """Say all prompts of the conversation that began a turn, as a JSON list."""
    turn.say(json.dumps(turn.agent.memory.prompts))


@VERBS.verb("ask", "NAME [JSON]")
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
            turn.denials.append(
                {"tool_name": name, "tool_use_id": turn.tool_use_id, "tool_input": arguments}
            )
            turn.tool_result(str(message), is_error=True)
        case None:
            turn.tool_result(
                "Tool permission request failed: AbortError: stream closed", is_error=True
            )
        case _:
            turn.tool_result(
                "The canUseTool callback returned an invalid permission result", is_error=True
            )


@VERBS.verb("ask_withdrawn", "NAME PATH")
def ask_withdrawn(turn: FakeClaudeTurn, step: ScriptStep) -> Act:
    """Ask for a permission, and withdraw the question when PATH exists."""
    question = _question(turn, step.word(0), {})
    yield from exists(step.word(1))
    turn.agent.write({"type": "control_cancel_request", "request_id": question.id})
    _settled(turn, question)
    turn.tool_result("withdrawn", is_error=True)


@VERBS.verb("request", "JSON")
def request(turn: FakeClaudeTurn, step: ScriptStep) -> Act:
    """Send a control request with this body (hook, elicitation, …); wait for the answer."""
    question = _requested(turn, _arguments(step.word(0)))
    yield Wait(when=lambda: question.answer is not None or turn.agent.eof_at is not None)
    _settled(turn, question)


@VERBS.verb("request_withdrawn", "PATH JSON")
def request_withdrawn(turn: FakeClaudeTurn, step: ScriptStep) -> Act:
    """Send a control request with this body, and withdraw it when PATH exists."""
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


# ── End of a turn ──


@VERBS.verb("result", "TEXT")
def result(turn: FakeClaudeTurn, step: ScriptStep) -> Act:
    """Write the boundary now; a second `result` writes a second boundary."""
    yield from turn.succeed(step.word(0))


@VERBS.verb("boundary", "JSON")
def boundary(turn: FakeClaudeTurn, step: ScriptStep) -> Act:
    """Write the boundary with these members replaced: structured_output, cost, and so on."""
    yield from turn.succeed(turn.answer, members=_arguments(step.word(0)))


@VERBS.verb("error", "TEXT")
def error(turn: FakeClaudeTurn, step: ScriptStep) -> Act:
    """Write the boundary of a failed model call: subtype success with is_error."""
    yield from turn.succeed(step.word(0), api_error_status=400)


@VERBS.verb("failure", "TEXT")
def failure(turn: FakeClaudeTurn, step: ScriptStep) -> Act:
    """Write the boundary error_during_execution, with errors and without a text."""
    yield from turn.fail(step.word(0))


@VERBS.verb("huge_tool_result", "BYTES")
def huge_tool_result(turn: FakeClaudeTurn, step: ScriptStep) -> None:
    """Write the user frame with the result of the running tool, with a text of BYTES bytes."""
    turn.tool_result("x" * step.integer(0))


@VERBS.verb("huge_result", "BYTES")
def huge_result(turn: FakeClaudeTurn, step: ScriptStep) -> Act:
    """Write the boundary with a text of BYTES bytes."""
    yield from turn.succeed("x" * step.integer(0))


@VERBS.verb("lifecycle", "queued|started|completed|cancelled")
def lifecycle(turn: FakeClaudeTurn, step: ScriptStep) -> None:
    """Write a command_lifecycle frame for each prompt of the turn now."""
    turn.lifecycle(step.word(0))


@VERBS.verb("detach")
def detach(turn: FakeClaudeTurn, step: ScriptStep) -> None:
    """End the turn here without a boundary; perform its remaining steps beside the next turns."""
    rest, turn.remaining = turn.remaining, []
    turn.settings.omitted.update(("result", "completed"))

    def act() -> Act:
        for later in rest:
            yield from turn.agent.perform(later, turn)

    turn.agent.spawn(act())


@VERBS.verb(
    "omit",
    "init|lifecycle|completed|result|uuids|initialize|set_model|set_permission_mode",
    is_setting=True,
)
def omit(turn: FakeClaudeTurn, step: ScriptStep) -> None:
    """Never write this, in this turn or in this process."""
    turn.settings.omitted.add(step.word(0))


@VERBS.verb("refuse", "initialize|set_model|set_permission_mode", is_setting=True)
def refuse(turn: FakeClaudeTurn, step: ScriptStep) -> None:
    """Answer this request with an error, in this turn or in this process."""
    turn.settings.refused.add(step.word(0))


@VERBS.verb(
    "on_interrupt",
    "boundary|unacked|late_ack|ack_only|ignored|ignored_early|finished|unanswered",
    is_setting=True,
)
def on_interrupt(turn: FakeClaudeTurn, step: ScriptStep) -> None:
    """Set the effect of an interrupt: ack and boundary, no ack, late ack, no boundary, …."""
    turn.settings.on_interrupt = step.word(0)


@VERBS.verb("own", "task-notification|auto-continuation|none STEPS")
def own(turn: FakeClaudeTurn, step: ScriptStep) -> Act:
    """Open a turn without a prompt, with this origin and STEPS, once no other turn is open."""
    agent = turn.agent
    if agent.turn is turn:
        raise ScriptError(f"{step!r}: no turn can be opened inside another")
    yield Wait(when=lambda: agent.turn is None)
    settings = FakeSettings([agent.process.settings])
    mine = FakeClaudeTurn(agent, Plan(step.nested), settings, origin=step.word(0))
    for setting in mine.plan.settings:
        yield from agent.perform(setting, mine)
    yield from mine.run()


# ── Waits ──


@VERBS.verb("await", "POINT")
def await_point(turn: FakeClaudeTurn, step: ScriptStep) -> Act:
    """Wait until any turn passes this point; the next step is performed at that point."""
    yield Wait(point=step.word(0))


# ── Wire format ──


@VERBS.verb("junk", "text|blank|unknown|not_utf8|not_object")
def junk(turn: FakeClaudeTurn, step: ScriptStep) -> None:
    """Write a line that is no frame of the dialect."""
    lines = {
        "text": b"Info: this is not for you\n",
        "blank": b"\n  \n\r\n",
        "unknown": (
            b'{"type":"keep_alive"}\n'
            b'{"type":"from_the_future","result":"no","is_error":false}\n'
            b'{"no":"type"}\n'
        ),
        "not_utf8": b"\xff\xfe\x80 neither text nor JSON\n",
        "not_object": b'[1,2]\n42\nnull\n"text"\n',
    }
    turn.agent.out.put(lines[step.word(0)])


@VERBS.verb("half", "TEXT")
def half(turn: FakeClaudeTurn, step: ScriptStep) -> None:
    """Write the first half of an assistant frame; the next output continues the same line."""
    before = len(turn.agent.out.buffer)
    turn.say(step.word(0))
    buffer = turn.agent.out.buffer
    del buffer[before + (len(buffer) - before) // 2 :]


@VERBS.verb("flood", "COUNT BYTES")
def flood(turn: FakeClaudeTurn, step: ScriptStep) -> Act:
    """Write COUNT deltas with BYTES bytes of text each, as fast as the host reads them."""
    turn.stream_begin()
    event = {
        "type": "content_block_delta",
        "index": 0,
        "delta": {"type": "text_delta", "text": "x" * step.integer(1)},
    }
    for _ in range(step.integer(0)):
        turn.stream_event(event)
        yield from turn.agent.room()
    turn.stream_end("end_turn")


@VERBS.verb("huge", "BYTES")
def huge(turn: FakeClaudeTurn, step: ScriptStep) -> None:
    """Write one assistant frame with BYTES bytes of text, which is not the result."""
    turn.assistant({"type": "text", "text": "x" * step.integer(0)})


@VERBS.verb("split", "BYTES [SECONDS]")
def split(turn: FakeClaudeTurn, step: ScriptStep) -> None:
    """From now on write at most BYTES bytes in one call, SECONDS apart."""
    if not 0 < step.integer(0) <= 4096:
        raise ScriptError(f"{step!r}: pieces are of 1 to 4096 bytes")
    turn.agent.out.piece_bytes, turn.agent.out.pause_seconds = step.integer(0), step.seconds(1)


@VERBS.verb("stderr", "TEXT")
def stderr(turn: FakeClaudeTurn, step: ScriptStep) -> None:
    """Write a line to stderr."""
    turn.agent.err.put(step.word(0).encode() + b"\n")


@VERBS.verb("stderr_flood", "BYTES")
def stderr_flood(turn: FakeClaudeTurn, step: ScriptStep) -> Act:
    """Write BYTES bytes to stderr in lines of 100, as fast as the host reads them."""
    left = step.integer(0)
    while left > 0:
        turn.agent.err.put((b"e" * 99 + b"\n")[-left:])
        left -= 100
        yield from turn.agent.room()


# ── Process behaviour ──


@VERBS.verb("ignore", "term|int|eof")
def ignore(turn: FakeClaudeTurn, step: ScriptStep) -> None:
    """Ignore this signal or the end of stdin; with eof ignored only the alarm ends the process."""
    if step.word(0) == "term":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    turn.agent.ignored.add(step.word(0))


@VERBS.verb("stop_reading", "[PATH]")
def stop_reading(turn: FakeClaudeTurn, step: ScriptStep) -> None:
    """Stop reading stdin, until PATH exists if given."""
    agent = turn.agent
    agent.is_reading = False

    def act() -> Act:
        yield from exists(step.word(0))
        agent.is_reading = True

    if step.word(0):
        agent.spawn(act())


@VERBS.verb("read_slowly", "BYTES SECONDS")
def read_slowly(turn: FakeClaudeTurn, step: ScriptStep) -> None:
    """From now on read at most BYTES bytes in one call, SECONDS apart."""
    turn.agent.read_bytes, turn.agent.read_seconds = max(1, step.integer(0)), step.seconds(1)


@VERBS.verb("close_stdin")
def close_stdin(turn: FakeClaudeTurn, step: ScriptStep) -> None:
    """Close stdin and continue; the host gets EPIPE when it writes."""
    turn.agent.is_reading = turn.agent.has_stdin = False
    os.close(0)


@VERBS.verb("close_stdout")
def close_stdout(turn: FakeClaudeTurn, step: ScriptStep) -> Act:
    """Close stdout after all output is written, and continue."""
    yield turn.agent.drained()
    turn.agent.out.close()


@VERBS.verb("hold", "SECONDS [setsid|child]")
def hold(turn: FakeClaudeTurn, step: ScriptStep) -> Act:
    """Fork a child that holds stdout and stderr open for SECONDS; `setsid`: in a new session."""
    yield turn.agent.drained()
    ready, done = os.pipe()
    pid = os.fork()
    if pid == 0:
        # The child is a copy of the agent and must run none of its code, so it never leaves this
        # block.
        try:
            if step.word(1) == "setsid":
                os.setsid()
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, signal.SIG_DFL)
            signal.alarm(HOLD_SECONDS_MAX)
            if turn.agent.has_stdin:
                os.close(0)
            os.close(done)
            time.sleep(step.seconds(0))
        finally:
            os._exit(0)
    turn.agent.record.holder(pid)
    os.close(done)
    # The next step may end this process, and a test then looks for the holder. So wait until the
    # holder is in its final session: it closes its end of the pipe after that.
    yield Wait(fd=ready)
    os.close(ready)


@VERBS.verb("kill", "SIGNAL")
def kill(turn: FakeClaudeTurn, step: ScriptStep) -> Act:
    """End by this signal, after all output is written."""
    yield turn.agent.drained()
    os.kill(os.getpid(), step.integer(0))
    yield NEVER
