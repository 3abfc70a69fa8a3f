"""Simulated agent of `world`: a small in-memory model of Claude's stream-json.

The agent has no event loop. `hear(line)` takes a line of input, and `act()` returns the next
action: a line of output, a pause or an exit. The simulated process decides when to call `act()` and
delivers the output.
"""

from __future__ import annotations

import enum
import json
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Frame = dict[str, Any]


class WorldStage(enum.Enum):
    """Progress of a turn, named after its last frame.

    `Play.exits_after` may end the process right after any of these.
    """

    READ = enum.auto()
    QUEUED = enum.auto()
    STARTED = enum.auto()
    INIT = enum.auto()
    SAID = enum.auto()
    ASKED = enum.auto()
    ACKED = enum.auto()
    RESULT = enum.auto()
    COMPLETED = enum.auto()


class Ack(enum.Enum):
    """When the agent acks an interrupt: before the boundary (correct), after it, or never."""

    BEFORE = enum.auto()
    AFTER = enum.auto()
    NEVER = enum.auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Play:
    """How the agent answers one prompt.

    Seconds are virtual. 0 means without a delay, in the order that the loop chooses.

    - `says`: texts of assistant frames before the result.
    - `tool`: the agent asks for permission to use this tool and waits for the answer.
    - `hangs`: the turn ends only when it is interrupted.
    - `boundaries`: how often the agent writes the result. `again_seconds`: delay between two
      results.
    - `result_seconds`: delay before the result. `abort_seconds`: delay before the result of an
      interrupted turn.
    - `is_deaf`: the agent acks an interrupt and continues the turn.
    - `exits_after`: the process exits at this stage, with `code`.
    - `error`: the turn fails with this text.
    """

    says: tuple[str, ...] = ()
    text: str | None = None
    tool: str | None = None
    hangs: bool = False
    result_seconds: float = 0.0
    abort_seconds: float = 0.0
    boundaries: int = 1
    again_seconds: float = 0.0
    is_completed: bool = True
    ack: Ack = Ack.BEFORE
    ack_seconds: float = 0.0
    is_deaf: bool = False
    error: str | None = None
    exits_after: WorldStage | None = None
    code: int = 1


@dataclass(frozen=True, slots=True)
class Pause:
    """The agent does nothing for this time."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Exit:
    """The process exits."""

    code: int


Act = bytes | Pause | Exit


class _Mark(enum.Enum):
    # The agent waits for an interrupt, or for the answer to its question.
    WAIT = enum.auto()
    # Ends one piece of output of a terse agent.
    CUT = enum.auto()


_WAIT, _CUT = _Mark.WAIT, _Mark.CUT
_Script = Iterator[Act | _Mark]


@dataclass(slots=True)
class Prompt:
    """A prompt that the agent has read. `is_settled`: its turn has written a boundary."""

    ref: str
    text: str
    is_settled: bool = False


class WorldAgent:
    """Simulated agent.

    `handshake_seconds`: delay of the handshake; None: the agent never answers it. `owns`: turns
    that the agent starts without a prompt, keyed by the number of turns that ended before. Key 0
    starts a turn as soon as the agent is ready. `names`: whether frames name the prompt they belong
    to; older agents do not. `is_terse`: the agent writes all frames before the result as one piece
    of output, and the result with all later frames as another.
    """

    def __init__(
        self,
        plays: Mapping[str, Play],
        *,
        conversation: str,
        handshake_seconds: float | None = 0.0,
        owns: Mapping[int, Play] | None = None,
        names: bool = True,
        is_terse: bool = False,
    ) -> None:
        self._plays = plays
        self._is_terse = is_terse
        self._conversation = conversation
        self._handshake_seconds = handshake_seconds
        self._owns = dict(owns or {})
        self._names = names
        # All prompts and interrupts in order. Each interrupt comes with the prompts of the turn
        # that was open when it arrived.
        self.prompts: list[Prompt] = []
        self.interrupts: list[tuple[str, tuple[str, ...]]] = []
        self.answers: list[Frame] = []
        self.violations: list[str] = []
        self.allows_steering = False
        self._waiting: deque[Prompt] = deque()
        self._urgent: deque[Act] = deque()
        self._script: _Script | None = None
        self._open: tuple[Prompt, ...] = ()
        self._play = Play()
        self._is_interruptible = False
        self._is_waiting = False
        self._question: str | None = None
        self._questions = 0
        self._turns = 0
        self._is_ready = False

    @property
    def is_working(self) -> bool:
        return self._script is not None

    # ── Input ──
    def hear(self, line: bytes) -> None:
        frame: Frame = json.loads(line)
        match frame["type"]:
            case "user":
                self._on_prompt(frame)
            case "control_request" if frame["request"]["subtype"] == "initialize":
                self._on_handshake(frame["request_id"])
            case "control_request":
                assert frame["request"]["subtype"] == "interrupt", frame
                self._on_interrupt(frame["request_id"])
            case "control_response":
                self._on_answer(frame["response"])
            case _:
                self.violations.append(f"not a frame for an agent: {frame}")

    def _on_handshake(self, request: str) -> None:
        if self._handshake_seconds is None:
            return
        if self._handshake_seconds:
            self._urgent.append(Pause(self._handshake_seconds))
        self._urgent.append(_line(_reply(request)))
        self._is_ready = True

    def _on_prompt(self, frame: Frame) -> None:
        if not self._is_ready:
            self.violations.append("a prompt before the handshake was answered")
        open_ones = [prompt.text for prompt in self.prompts if not prompt.is_settled]
        if open_ones and not self.allows_steering:
            self.violations.append(
                f"G1: prompt {frame['message']['content']!r} while {open_ones} are open"
            )
        prompt = Prompt(frame["uuid"], frame["message"]["content"])
        self.prompts.append(prompt)
        self._waiting.append(prompt)
        play = self._play_of(prompt)
        if play.exits_after is WorldStage.READ:
            self._urgent.append(Exit(play.code))
        if self._names and (not self._is_terse or self.is_working):
            self._urgent.append(_line(_lifecycle(prompt.ref, "queued")))
        if play.exits_after is WorldStage.QUEUED:
            self._urgent.append(Exit(play.code))

    def _on_interrupt(self, request: str) -> None:
        self.interrupts.append((request, tuple(prompt.ref for prompt in self._open)))
        play = self._play
        ack: list[Act] = [] if play.ack is Ack.NEVER else [_line(_reply(request))]
        if ack and play.ack_seconds:
            ack.insert(0, Pause(play.ack_seconds))
        if not self._is_interruptible or play.is_deaf:
            # An agent acks an interrupt before its init frame and continues. An idle agent has
            # nothing to stop.
            self._urgent += ack
            return
        self._is_interruptible = False
        self._is_waiting = False
        self._question = None
        self._script = self._breaths(self._abort(ack))

    def _on_answer(self, response: Frame) -> None:
        self.answers.append(response)
        if response["request_id"] == self._question:
            self._question = None
            self._is_waiting = False

    # ── Actions ──
    def act(self) -> Act | None:
        """Return the next action; None: the agent does nothing until it reads another line."""
        while True:
            if self._urgent:
                return self._urgent.popleft()
            if self._is_waiting:
                return None
            if self._script is None and not self._begin():
                return None
            assert self._script is not None
            for act in self._script:
                if act is _WAIT:
                    self._is_waiting = True
                    return None
                assert act is not _CUT
                return act
            self._end()

    def _begin(self) -> bool:
        own = self._owns.pop(self._turns, None) if self._is_ready else None
        if own is not None:
            self._play = own
            self._script = self._breaths(self._perform(own, (), "task-notification"))
            return True
        if not self._waiting:
            return False
        # The agent merges all waiting prompts into one turn.
        self._open = tuple(self._waiting)
        self._waiting.clear()
        self._play = self._play_of(self._open[0])
        self._script = self._breaths(self._perform(self._play, self._open, None))
        return True

    def _breaths(self, script: _Script) -> _Script:
        """Yield the script; for a terse agent, join consecutive lines into one piece of output."""
        breath = b""
        for act in script:
            if isinstance(act, bytes) and self._is_terse:
                breath += act
                continue
            if breath:
                yield breath
                breath = b""
            if act is not _CUT:
                yield act
        if breath:
            yield breath

    def _end(self) -> None:
        self._script = None
        self._open = ()
        self._play = Play()
        self._is_interruptible = False
        self._turns += 1

    def _play_of(self, prompt: Prompt) -> Play:
        return self._plays.get(prompt.text) or self._plays.get("") or Play()

    def _perform(self, play: Play, prompts: tuple[Prompt, ...], origin: str | None) -> _Script:
        exits = [Exit(play.code)]
        for prompt in prompts:
            if self._names:
                yield _line(_lifecycle(prompt.ref, "started"))
        yield from exits if play.exits_after is WorldStage.STARTED else ()
        init = {"type": "system", "subtype": "init", "session_id": self._conversation}
        self._is_interruptible = True
        yield _line(self._named(init, prompts))
        yield from exits if play.exits_after is WorldStage.INIT else ()
        for text in play.says:
            yield _line(_assistant(text))
        yield from exits if play.exits_after is WorldStage.SAID else ()
        if play.tool is not None:
            self._questions += 1
            self._question = f"question-{self._questions}"
            yield _line(_can_use_tool(self._question, play.tool))
            yield from exits if play.exits_after is WorldStage.ASKED else ()
            if self._is_asking():
                yield _WAIT
        while play.hangs:
            yield _WAIT
        if play.result_seconds:
            yield Pause(play.result_seconds)
        yield _CUT
        self._is_interruptible = False
        text = (
            play.text if play.text is not None else answer_to(*(prompt.text for prompt in prompts))
        )
        yield from self._finish(play, prompts, _result(text, play.error), origin, "completed")

    def _is_asking(self) -> bool:
        return self._question is not None

    def _abort(self, ack: list[Act]) -> _Script:
        play, prompts = self._play, self._open
        if play.ack is Ack.BEFORE:
            yield from ack
            yield _CUT
            yield from [Exit(play.code)] if play.exits_after is WorldStage.ACKED else ()
        if play.abort_seconds:
            yield Pause(play.abort_seconds)
        result = {"type": "result", "subtype": "error_during_execution", "is_error": True}
        yield from self._finish(
            play, prompts, {**result, "terminal_reason": "aborted_streaming"}, None, "cancelled"
        )
        if play.ack is Ack.AFTER:
            yield from ack

    def _finish(
        self, play: Play, prompts: tuple[Prompt, ...], result: Frame, origin: str | None, state: str
    ) -> _Script:
        exits = [Exit(play.code)]
        frame = self._named({**result, "session_id": self._conversation}, prompts)
        if origin is not None:
            frame["origin"] = {"kind": origin}
        for count in range(play.boundaries):
            if count:
                yield Pause(play.again_seconds) if play.again_seconds else _CUT
            self._settle(prompts)
            yield _line(frame)
        yield from exits if play.exits_after is WorldStage.RESULT else ()
        for prompt in prompts:
            if self._names and play.is_completed:
                self._settle((prompt,))
                yield _line(_lifecycle(prompt.ref, state))
        yield from exits if play.exits_after is WorldStage.COMPLETED else ()

    def _settle(self, prompts: tuple[Prompt, ...]) -> None:
        for prompt in prompts:
            prompt.is_settled = True

    def _named(self, frame: Frame, prompts: tuple[Prompt, ...]) -> Frame:
        return (
            {**frame, "user_message_uuids": [p.ref for p in prompts]}
            if self._names and prompts
            else frame
        )


def answer_to(*prompts: str) -> str:
    """Return the default answer of the agent to these prompts."""
    return f"answer to {' and '.join(prompts)}" if prompts else "of my own accord"


def _line(frame: Frame) -> bytes:
    return json.dumps(frame).encode() + b"\n"


def _reply(request: str) -> Frame:
    return {
        "type": "control_response",
        "response": {"subtype": "success", "request_id": request, "response": {}},
    }


def _lifecycle(ref: str, state: str) -> Frame:
    return {"type": "command_lifecycle", "command_uuid": ref, "state": state}


def _assistant(text: str) -> Frame:
    message = {"id": "m", "role": "assistant", "content": [{"type": "text", "text": text}]}
    return {"type": "assistant", "message": message}


def _can_use_tool(request: str, tool: str) -> Frame:
    body = {"subtype": "can_use_tool", "tool_name": tool, "input": {"command": "true"}}
    return {"type": "control_request", "request_id": request, "request": body}


def _result(text: str, error: str | None) -> Frame:
    if error is not None:
        return {
            "type": "result",
            "subtype": "error_during_execution",
            "is_error": True,
            "errors": [error],
        }
    return {
        "type": "result",
        "subtype": "success",
        "is_error": False,
        "result": text,
        "terminal_reason": "completed",
    }
