"""Plays one step onto one reply, and says how that went.

Streamed or whole, the same directives mean the same. What differs is only when bytes go out: a stream begins with the
first thing that is said; a whole answer leaves at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import ParamSpec

from banksman.testing.fake_model import script
from banksman.testing.fake_model.apis.api import Api, ModelCall, ModelEvent
from banksman.testing.fake_model.http1 import HttpRefusal, HttpReply
from banksman.testing.fake_model.wire import ModelConnection

Words = ParamSpec("Words")

# Longer than any test, and still an end.
HANG_SECONDS_MAX = 3_600.0
BIG_DELTA_BYTES = 4_096
# Lines, as a model's text has them.
BIG_LINE = "x" * 63 + "\n"


class Broken(Exception):
    """The connection can carry nothing more, as the script or the limit of a hang wanted it."""

    def __init__(self, outcome: str) -> None:
        super().__init__(outcome)
        self.outcome = outcome


class StepPlayer:
    """One reply while it is played."""

    def __init__(self, connection: ModelConnection, reply: HttpReply, api: Api, call: ModelCall) -> None:
        self._connection = connection
        self._reply = reply
        self._api = api
        self._message = api.begin(call)
        self._is_streamed = api.is_streamed(call)

    def play(self, step: script.Step) -> str:
        """The outcome. Raises Refusal before anything was sent, Broken after, and what the connection raises."""
        for directive in step:
            outcome = self._perform(directive)
            if outcome is not None:
                return outcome
        # Nothing but pauses, or no step at all. A message without content is no answer.
        if self._message.is_empty:
            self._say(self._message.text, "ok")
        self._say(self._message.finish)
        if self._is_streamed:
            self._reply.end_stream()
        else:
            self._reply.send(200, self._message.whole())
        return "done"

    def _perform(self, directive: script.Directive) -> str | None:
        match directive:
            case script.Text(words=words):
                self._say(self._message.text, words)
            case script.Think(words=words):
                self._say(self._message.think, words)
            case script.Tool(name=name, arguments=arguments):
                self._say(self._message.tool, name, arguments)
            case script.Slow():
                self._slow(directive)
            case script.Big(size_bytes=size_bytes):
                for words in _big(size_bytes):
                    self._say(self._message.text, words)
            case script.Sleep(seconds=seconds):
                self._connection.wait(seconds)
            case script.Hang():
                self._hang()
            case script.Stall():
                self._start()
                self._hang()
            case script.HttpError(status=status):
                raise HttpRefusal(status, f"scripted: {directive.line}")
            case script.Overflow():
                kind, message = self._api.overflow
                raise HttpRefusal(400, message, kind=kind)
            case script.SseError():
                return self._sse_error(directive)
            case script.Drop():
                self._drop()
        return None

    def _start(self) -> None:
        if self._is_streamed and not self._reply.is_begun:
            self._reply.begin_stream()
            self._send(self._message.start())

    def _say(self, say: Callable[Words, list[ModelEvent]], *words: Words.args, **more: Words.kwargs) -> None:
        # Before it is said: events may be counted.
        self._start()
        self._send(say(*words, **more))

    def _send(self, events: list[ModelEvent]) -> None:
        if self._is_streamed and events:
            self._reply.send_events(events)

    def _slow(self, slow: script.Slow) -> None:
        for number in range(1, slow.count + 1):
            if number > 1:
                self._connection.wait(slow.seconds)
            self._say(self._message.text, f"tick{number} " if slow.words is None else slow.words)

    def _hang(self) -> None:
        self._connection.wait(HANG_SECONDS_MAX)
        raise Broken("hung_up")

    def _sse_error(self, error: script.SseError) -> str:
        message = f"scripted: {error.line}"
        if not self._is_streamed:
            raise HttpRefusal(self._api.status_of(error.kind), message, kind=error.kind)
        self._say(self._message.fail, error.kind, message)
        self._reply.end_stream()
        return f"sse_{error.kind}"

    def _drop(self) -> None:
        if self._is_streamed:
            self._start()
        else:
            self._message.finish()
            self._reply.send_part(self._message.whole())
        raise Broken("dropped")


def _big(size_bytes: int) -> Iterator[str]:
    whole = BIG_LINE * (BIG_DELTA_BYTES // len(BIG_LINE))
    for at in range(0, size_bytes, BIG_DELTA_BYTES):
        yield whole[: size_bytes - at]
