"""Which step of a script a request plays, and how the step is played onto the reply.

An agent sends the whole conversation with each call. What the user said last is in it, among things that the user did
not say: results of tools, reminders, where the agent works, that a turn was interrupted. Those are told by where they
stand (see each API) and by how they are framed. Of several texts in one message the last one counts that is the user's,
and not the last that has a script: after an interrupt the old prompt may stand before the new one.

The only thing the server remembers of what it played is how often a failure happened that is to happen only so often.
That count is of a prompt, not of a session.

Streamed or whole, the same directives mean the same. What differs is only when bytes go out: a stream begins with the
first thing that is said; a whole answer leaves at the end.
"""

from __future__ import annotations

import collections
import hashlib
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ParamSpec

from banksman.testing.fake_model import directives
from banksman.testing.fake_model.apis import Api, Entry, ModelCall, ModelEvent, Who
from banksman.testing.fake_model.http1 import HttpRefusal, HttpReply, ModelConnection

Words = ParamSpec("Words")

# Longer than any test, and still an end.
HANG_SECONDS_MAX = 3_600.0
BIG_DELTA_BYTES = 4_096
# Lines, as a model's text has them.
BIG_LINE = "x" * 63 + "\n"
# A text that is framed by one tag, as in "<system-reminder>…</system-reminder>" and "<environment_context>…".
FRAMED = re.compile(r"\s*<([a-z_-]+)>.*</\1>\s*", re.DOTALL)
# How texts begin that the agent wrote in the user's name.
AGENTS_WORDS = ("[Request interrupted by user", "[structured-output-enforce]", "# AGENTS.md instructions")
# Prompts with a TIMES in them that are remembered; the oldest is forgotten first, and would fail anew.
PROMPTS_MAX = 10_000
LIMITED = (directives.HttpError, directives.Overflow, directives.SseError, directives.Drop)


# ── Which step ──


@dataclass(frozen=True, slots=True)
class ModelPrompt:
    """What the user said last, or "" for nothing, and how many model calls have answered it already."""

    text: str
    calls_before: int


def last_prompt(entries: Sequence[Entry]) -> ModelPrompt:
    """Look from the end for the last thing that the user said."""
    calls, who_after = 0, None
    for entry in reversed(entries):
        if entry.who is Who.MODEL:
            # Neighbours are one call's answer, cut in pieces.
            calls += who_after is not Who.MODEL
        else:
            text = _said(entry)
            if text is not None:
                return ModelPrompt(text, calls)
        who_after = entry.who
    return ModelPrompt("", calls)


def _said(entry: Entry) -> str | None:
    """What the user said in a message; None if it has only what the agent said and tools gave."""
    for text in reversed(entry.texts):
        # A script is the user's wherever it stands. Plain words are theirs only where the agent adds none of its own.
        if directives.has_directive(text) or (entry.who is Who.USER and not entry.has_result and not _is_agents(text)):
            return text
    return None


def _is_agents(text: str) -> bool:
    words = text.strip()
    return not words or words.startswith(AGENTS_WORDS) or FRAMED.fullmatch(text) is not None


class Chooser:
    """Safe from any thread."""

    def __init__(self) -> None:
        # Protects the counts; held for arithmetic only.
        self._lock = threading.Lock()
        # By a prompt's hash and the place of the directive among all of the prompt's.
        self._counts: collections.OrderedDict[tuple[bytes, int], int] = collections.OrderedDict()

    def choose(self, conversation: Sequence[Entry]) -> directives.Step:
        """The step for this conversation; () where there is none. Raises BadDirective."""
        said = last_prompt(conversation)
        steps = directives.parse(said.text)
        # Stripped, for an agent adds a newline when it sends the same prompt again before another.
        digest = hashlib.sha256(said.text.strip().encode("utf-8", "surrogatepass")).digest()
        with self._lock:
            live = self._live(steps, digest)
            if said.calls_before >= len(live):
                return ()
            step = live[said.calls_before]
            self._count(step, digest)
        return tuple(directive for _, directive in step)

    def _live(self, steps: tuple[directives.Step, ...], digest: bytes) -> list[list[tuple[int, directives.Directive]]]:
        """The steps without the failures that have happened often enough, and without steps that had nothing else."""
        live: list[list[tuple[int, directives.Directive]]] = []
        place = 0
        for step in steps:
            kept: list[tuple[int, directives.Directive]] = []
            for directive in step:
                times = directive.times if isinstance(directive, LIMITED) else None
                if times is None or self._counts.get((digest, place), 0) < times:
                    kept.append((place, directive))
                place += 1
            if kept:
                live.append(kept)
        return live

    def _count(self, step: list[tuple[int, directives.Directive]], digest: bytes) -> None:
        for place, directive in step:
            if isinstance(directive, LIMITED):
                if directive.times is not None:
                    key = (digest, place)
                    self._counts[key] = self._counts.get(key, 0) + 1
                    if len(self._counts) > PROMPTS_MAX:
                        self._counts.popitem(last=False)
                # The first one ends the reply; those after it did not happen.
                return


# ── The reply ──


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

    def play(self, step: directives.Step) -> str:
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

    def _perform(self, directive: directives.Directive) -> str | None:
        match directive:
            case directives.Text(words=words):
                self._say(self._message.text, words)
            case directives.Think(words=words):
                self._say(self._message.think, words)
            case directives.ToolCall(name=name, arguments=arguments):
                self._say(self._message.tool, name, arguments)
            case directives.Slow():
                self._slow(directive)
            case directives.Big(size_bytes=size_bytes):
                for words in _big(size_bytes):
                    self._say(self._message.text, words)
            case directives.Sleep(seconds=seconds):
                self._connection.wait(seconds)
            case directives.Hang():
                self._hang()
            case directives.Stall():
                self._start()
                self._hang()
            case directives.HttpError(status=status):
                raise HttpRefusal(status, f"scripted: {directive.line}")
            case directives.Overflow():
                kind, message = self._api.overflow
                raise HttpRefusal(400, message, kind=kind)
            case directives.SseError():
                return self._sse_error(directive)
            case directives.Drop():
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

    def _slow(self, slow: directives.Slow) -> None:
        for number in range(1, slow.count + 1):
            if number > 1:
                self._connection.wait(slow.seconds)
            self._say(self._message.text, f"tick{number} " if slow.words is None else slow.words)

    def _hang(self) -> None:
        self._connection.wait(HANG_SECONDS_MAX)
        raise Broken("hung_up")

    def _sse_error(self, error: directives.SseError) -> str:
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
