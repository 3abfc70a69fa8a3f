"""The verbs by which the fake agent misbehaves: on the wire, and as a process. Importing this makes the table whole."""

from __future__ import annotations

import os
import signal
import time

from banksman.testing.fake_agent.claude_turn import FakeClaudeTurn
from banksman.testing.fake_agent.loop import NEVER, Wait
from banksman.testing.fake_agent.script import VERBS, ScriptError, ScriptStep, verb
from banksman.testing.fake_agent.verbs import exists, room

TYPE_CHECKING = False
if TYPE_CHECKING:
    from banksman.testing.fake_agent.loop import Act

__all__ = ["VERBS"]

HOLD_SECONDS_MAX = 120


# ── On the wire ──


@verb("junk", "text|blank|unknown|not_utf8|not_object")
def junk(turn: FakeClaudeTurn, step: ScriptStep) -> Act:
    """A line that is no frame of the dialect."""
    lines = {
        "text": b"Info: this is not for you\n",
        "blank": b"\n  \n\r\n",
        "unknown": b'{"type":"keep_alive"}\n{"type":"from_the_future","result":"no","is_error":false}\n{"no":"type"}\n',
        "not_utf8": b"\xff\xfe\x80 neither text nor JSON\n",
        "not_object": b'[1,2]\n42\nnull\n"text"\n',
    }
    turn.agent.out.put(lines[step.word(0)])
    yield from room(turn)


@verb("raw", "TEXT")
def raw(turn: FakeClaudeTurn, step: ScriptStep) -> Act:
    """This text as a line."""
    turn.agent.out.put(step.word(0).encode() + b"\n")
    yield from room(turn)


@verb("half", "TEXT")
def half(turn: FakeClaudeTurn, step: ScriptStep) -> Act:
    """The first half of an assistant frame; whatever is said next is in the same line."""
    before = len(turn.agent.out.buffer)
    turn.say(step.word(0))
    buffer = turn.agent.out.buffer
    del buffer[before + (len(buffer) - before) // 2 :]
    yield from room(turn)


@verb("flood", "COUNT BYTES")
def flood(turn: FakeClaudeTurn, step: ScriptStep) -> Act:
    """So many deltas with so many bytes of text each, as fast as they are read."""
    turn.stream_begin()
    event = {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "x" * step.integer(1)}}
    for _ in range(step.integer(0)):
        turn.stream_event(event)
        yield from room(turn)
    turn.stream_end("end_turn")


@verb("huge", "BYTES")
def huge(turn: FakeClaudeTurn, step: ScriptStep) -> Act:
    """One assistant frame with so many bytes of text, which is not the result."""
    turn.assistant({"type": "text", "text": "x" * step.integer(0)})
    yield from room(turn)


@verb("split", "BYTES [SECONDS]")
def split(turn: FakeClaudeTurn, step: ScriptStep) -> Act:
    """From now on write so many bytes at once, and each so long after the last."""
    if not 0 < step.integer(0) <= 4096:
        raise ScriptError(f"{step!r}: pieces are of 1 to 4096 bytes")
    turn.agent.out.piece_bytes, turn.agent.out.pause_seconds = step.integer(0), step.seconds(1)
    yield from room(turn)


@verb("stderr", "TEXT")
def stderr(turn: FakeClaudeTurn, step: ScriptStep) -> Act:
    """A line on stderr."""
    turn.agent.err.put(step.word(0).encode() + b"\n")
    yield from room(turn)


@verb("stderr_flood", "BYTES")
def stderr_flood(turn: FakeClaudeTurn, step: ScriptStep) -> Act:
    """So many bytes on stderr, in lines of 100, as fast as they are read."""
    left = step.integer(0)
    while left > 0:
        turn.agent.err.put((b"e" * 99 + b"\n")[-left:])
        left -= 100
        yield from room(turn)


# ── As a process ──


@verb("ignore", "term|int|eof")
def ignore(turn: FakeClaudeTurn, step: ScriptStep) -> Act:
    """Take no notice of this; with eof ignored only the alarm is left."""
    if step.word(0) == "term":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    turn.agent.ignored.add(step.word(0))
    yield from room(turn)


@verb("stop_reading", "[PATH]")
def stop_reading(turn: FakeClaudeTurn, step: ScriptStep) -> Act:
    """Read nothing more from stdin, or nothing until the path exists."""
    agent = turn.agent
    agent.is_reading = False

    def act() -> Act:
        yield from exists(step.word(0))
        agent.is_reading = True

    if step.word(0):
        agent.spawn(act())
    yield from room(turn)


@verb("read_slowly", "BYTES SECONDS")
def read_slowly(turn: FakeClaudeTurn, step: ScriptStep) -> Act:
    """From now on read so many bytes at once, and each so long after the last."""
    turn.agent.read_bytes, turn.agent.read_seconds = max(1, step.integer(0)), step.seconds(1)
    yield from room(turn)


@verb("close_stdin")
def close_stdin(turn: FakeClaudeTurn, step: ScriptStep) -> Act:
    """Close our end of stdin and go on: whoever writes there has a broken pipe."""
    turn.agent.is_reading = turn.agent.has_stdin = False
    os.close(0)
    yield from room(turn)


@verb("close_stdout")
def close_stdout(turn: FakeClaudeTurn, step: ScriptStep) -> Act:
    """Close stdout when all said before is written, and go on."""
    yield turn.agent.drained()
    turn.agent.out.close()


@verb("hold", "SECONDS [setsid|child]")
def hold(turn: FakeClaudeTurn, step: ScriptStep) -> Act:
    """Fork a child that keeps stdout and stderr open for so long, in a session of its own if asked."""
    yield turn.agent.drained()
    ready, done = os.pipe()
    pid = os.fork()
    if pid == 0:
        # The child must do nothing of ours: it never leaves this block.
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
    # The next step may be our exit, and a test then looks for a holder that is where it was asked to be.
    yield Wait(fd=ready)
    os.close(ready)


@verb("exit", "CODE")
def leave(turn: FakeClaudeTurn, step: ScriptStep) -> Act:
    """End with this code, when all said before is written."""
    yield from turn.agent.leave(step.integer(0))


@verb("kill", "SIGNAL")
def kill(turn: FakeClaudeTurn, step: ScriptStep) -> Act:
    """End by this signal, when all said before is written."""
    yield turn.agent.drained()
    os.kill(os.getpid(), step.integer(0))
    yield NEVER
