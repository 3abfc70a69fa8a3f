"""Choose the script step that a request plays, and play it onto the reply.

An agent sends the whole conversation with each call. It contains the last text of the user, among
texts that the user did not write: tool results, reminders, the working directory, notes about an
interrupt. Their position (see each API) and their framing identify them. If one message has several
texts of the user, the last of these counts, even if an earlier text has a script. After an
interrupt, the old prompt may precede the new one.

The server keeps only one kind of state about played steps: how often a failure with TIMES has
happened. It counts per prompt, not per session.

A directive means the same in a streamed and in a whole answer. Only the time of sending differs: a
stream begins with the first output, and a whole answer is sent at the end.
"""

from __future__ import annotations

import collections
import hashlib
import math
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, ParamSpec

from banksman.testing.fake_model import directives
from banksman.testing.fake_model.apis import Api, Entry, ModelCall, ModelEvent, Who
from banksman.testing.fake_model.http1 import HttpRefusal, HttpReply, ModelConnection

Words = ParamSpec("Words")

# Longer than any test, but finite.
HANG_SECONDS_MAX = 3_600.0
# A file has no event for its creation.
LOOK_SECONDS = 0.01
BIG_DELTA_BYTES = 4_096
# Lines of realistic length for the text of a model.
BIG_LINE = "x" * 63 + "\n"
# A text framed by one tag, as in "<system-reminder>…</system-reminder>" and
# "<environment_context>…".
FRAMED = re.compile(r"\s*<([a-z_-]+)>.*</\1>\s*", re.DOTALL)
# Beginnings of texts that the agent wrote in the name of the user.
AGENTS_WORDS = (
    "[Request interrupted by user",
    "[structured-output-enforce]",
    "# AGENTS.md instructions",
)
# Number of counters for directives with TIMES. The oldest is dropped first, and its directive would
# fail again.
PROMPTS_MAX = 10_000
# Length of the window that the fake reports: five hours, the shorter window of both providers.
WINDOW_MINUTES = 300
LIMITED = (
    directives.HttpError,
    directives.Overflow,
    directives.Throttle,
    directives.AccountLimit,
    directives.SseError,
    directives.Drop,
)


# ── Choice of the step ──


@dataclass(frozen=True, slots=True)
class ModelPrompt:
    """The last text of the user, or "", and the number of model calls that have answered it."""

    text: str
    calls_before: int


def last_prompt(entries: Sequence[Entry]) -> ModelPrompt:
    """Search backwards for the last text of the user."""
    calls, who_after = 0, None
    for entry in reversed(entries):
        if entry.who is Who.MODEL:
            # Adjacent model messages are pieces of the answer to one call.
            calls += who_after is not Who.MODEL
        else:
            text = _said(entry)
            if text is not None:
                return ModelPrompt(text, calls)
        who_after = entry.who
    return ModelPrompt("", calls)


def _said(entry: Entry) -> str | None:
    """Return the last text of the user in a message.

    None: the message has only texts of the agent and tool results.
    """
    for text in reversed(entry.texts):
        # A script comes from the user wherever it stands. Plain words come from the user only in
        # messages where the agent adds none.
        if directives.has_directive(text) or (
            entry.who is Who.USER and not entry.has_result and not _is_agents(text)
        ):
            return text
    return None


def _is_agents(text: str) -> bool:
    words = text.strip()
    return not words or words.startswith(AGENTS_WORDS) or FRAMED.fullmatch(text) is not None


class Chooser:
    """Chooses the step for a conversation and counts limited failures. Thread-safe."""

    def __init__(self) -> None:
        # Protects the counts; held for arithmetic only.
        self._lock = threading.Lock()
        # Keyed by the hash of the prompt and the index of the directive in the prompt.
        self._counts: collections.OrderedDict[tuple[bytes, int], int] = collections.OrderedDict()

    def choose(self, conversation: Sequence[Entry]) -> directives.Step:
        """Return the step for this conversation; () if no step is left. Raises BadDirective."""
        said = last_prompt(conversation)
        steps = directives.parse(said.text)
        # Stripped, because an agent adds a newline when it sends the same prompt again before
        # another.
        digest = hashlib.sha256(said.text.strip().encode("utf-8", "surrogatepass")).digest()
        with self._lock:
            live = self._live(steps, digest)
            if said.calls_before >= len(live):
                return ()
            step = live[said.calls_before]
            self._count(step, digest)
        return tuple(directive for _, directive in step)

    def _live(
        self, steps: tuple[directives.Step, ...], digest: bytes
    ) -> list[list[tuple[int, directives.Directive]]]:
        """Drop the failures that have happened often enough, and the steps that become empty."""
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
                # The first failure ends the reply, so the failures after it did not happen.
                return


# ── Reply ──


class Broken(Exception):
    """The connection cannot carry more data: the script broke it, or a hang reached its limit."""

    def __init__(self, outcome: str) -> None:
        super().__init__(outcome)
        self.outcome = outcome


class StepPlayer:
    """Plays one step onto one reply."""

    def __init__(
        self, connection: ModelConnection, reply: HttpReply, api: Api, call: ModelCall
    ) -> None:
        self._connection = connection
        self._reply = reply
        self._api = api
        self._message = api.begin(call)
        self._is_streamed = api.is_streamed(call)

    def play(self, step: directives.Step) -> str:
        """Play a step and return the outcome.

        Raises `HttpRefusal` before any output, `Broken` after it, and the exceptions of the
        connection.
        """
        for directive in step:
            outcome = self._perform(directive)
            if outcome is not None:
                return outcome
        # The step has only pauses, or there is no step. A message without content is not a valid
        # answer.
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
            case (
                directives.Sleep()
                | directives.WaitForFile()
                | directives.Hang()
                | directives.Stall()
            ):
                self._pause(directive)
            case directives.HttpError(status=status):
                raise HttpRefusal(status, f"scripted: {directive.line}")
            case directives.Overflow():
                kind, message = self._api.overflow
                raise HttpRefusal(400, message, kind=kind)
            case directives.Throttle(seconds=seconds):
                fields = {"Retry-After": str(seconds)}
                raise HttpRefusal(429, f"scripted: {directive.line}", headers=fields)
            case directives.AccountLimit(seconds=seconds):
                self._refuse_account(directive.line, seconds)
            case directives.AccountUsed(percent=percent, seconds=seconds):
                self._reply.fields |= limit_headers(
                    self._api.name, used_percent=percent, resets_at=_wall_clock(seconds)
                )
            case directives.SseError():
                return self._sse_error(directive)
            case directives.Drop():
                self._drop()
        return None

    def _pause(self, pause: directives.Pause) -> None:
        match pause:
            case directives.Sleep(seconds=seconds):
                self._connection.wait(seconds)
            case directives.WaitForFile(path=path):
                self._wait(Path(path))
            case directives.Hang():
                self._hang()
            case directives.Stall():
                self._start()
                self._hang()

    def _refuse_account(self, line: str, seconds: int) -> NoReturn:
        name, resets_at = self._api.name, _wall_clock(seconds)
        raise HttpRefusal(
            429,
            f"scripted: {line}",
            headers={
                "Retry-After": str(seconds),
                **limit_headers(name, used_percent=100, resets_at=resets_at),
            },
            fields=limit_error_fields(name, resets_at=resets_at),
        )

    def _start(self) -> None:
        if self._is_streamed and not self._reply.is_begun:
            self._reply.begin_stream()
            self._send(self._message.start())

    def _say(
        self, say: Callable[Words, list[ModelEvent]], *words: Words.args, **more: Words.kwargs
    ) -> None:
        # The start comes before `say` creates its events, because the events may be numbered.
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

    def _wait(self, path: Path) -> None:
        until = time.monotonic() + HANG_SECONDS_MAX
        while not path.exists():
            if time.monotonic() > until:
                raise Broken("hung_up")
            self._connection.wait(LOOK_SECONDS)

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


def _wall_clock(seconds: int) -> int:
    return math.ceil(time.time()) + seconds


def _big(size_bytes: int) -> Iterator[str]:
    whole = BIG_LINE * (BIG_DELTA_BYTES // len(BIG_LINE))
    for at in range(0, size_bytes, BIG_DELTA_BYTES):
        yield whole[: size_bytes - at]


# ── Usage windows of an account ──
# Only the APIs of Claude Code and Codex have such windows. Another API answers a used up account
# like a short throttle, with `Retry-After`.


def limit_headers(api: str, *, used_percent: float, resets_at: int) -> dict[str, str]:
    """Return the headers of an answer to an account with this use of its window."""
    assert used_percent >= 0
    if api == "anthropic":
        status = "rejected" if used_percent >= 100 else "allowed"
        prefix = "anthropic-ratelimit-unified"
        return {
            f"{prefix}-status": status,
            f"{prefix}-reset": str(resets_at),
            f"{prefix}-representative-claim": "five_hour",
            f"{prefix}-5h-status": status,
            f"{prefix}-5h-reset": str(resets_at),
            f"{prefix}-5h-utilization": f"{used_percent / 100:g}",
        }
    if api == "responses":
        return {
            "x-codex-primary-used-percent": f"{used_percent:g}",
            "x-codex-primary-window-minutes": str(WINDOW_MINUTES),
            "x-codex-primary-reset-at": str(resets_at),
        }
    return {}


def limit_error_fields(api: str, *, resets_at: int) -> dict[str, Any]:
    """Return the fields of the error for an account whose window is used up."""
    if api != "responses":
        return {}
    return {"type": "usage_limit_reached", "plan_type": "pro", "resets_at": resets_at}
