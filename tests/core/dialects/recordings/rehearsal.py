"""Drive the session state machine with a recording as its agent, without an event loop.

The rehearsal asks the session for every frame that the recorder sent, and the session must send the same:

- A prompt becomes an ask. A prompt that was sent during a turn is steered into that turn.
- An interrupt of a turn becomes an interrupt of the ask.
- An answer becomes an answer.

The agent's output comes in pieces, as a `Cut` makes them, and never before the frame that it answers. The log commits
immediately, and so does the pipe.

Time is the recording's. It stands still while the agent speaks. Otherwise a timer could fire between two pieces of one
cut and not of another, and the result would depend on the cut. If the session is not ready to send a prompt when the
recorder sent it, timers fire until it is.
"""

from __future__ import annotations

import json
from collections import deque
from itertools import groupby
from typing import Any

from tests.core.dialects.recordings import corpus
from tests.core.dialects.recordings.corpus import Cut, Entry

from banksman.core.dialects.claude import CLAUDE
from banksman.core.dialects.dialect import Decision
from banksman.core.process_facts import (
    Exited,
    FrameWritten,
    ProcessGone,
    Started,
    Stderr,
)
from banksman.core.session import event as kinds
from banksman.core.session.ask_queue import NORMAL
from banksman.core.session.effects import (
    Append,
    CancelTimer,
    Effect,
    Finish,
    Reject,
    Resolve,
    StartProcess,
    StartTimer,
    WriteFrame,
)
from banksman.core.session.event import Event
from banksman.core.session.facts import (
    Asked,
    CloseAsked,
    Committed,
    Fact,
    FramesRead,
    InterruptAsked,
    ProcessReported,
    QuestionAnswered,
    Subject,
    TimerFired,
)
from banksman.core.session.outcome import Outcome
from banksman.core.session.session_config import Config
from banksman.core.session.state import ProcessPhase, PromptNaming, Session
from banksman.core.session.step import step
from banksman.core.session.turn import Ask
from banksman.core.wire.framing import Framing, MixedChunk

# The number of the recorded process. A later process of the session never starts.
RECORDED = 1
# A prompt that starts the process of a recording without prompts.
UNSENT: dict[str, Any] = {"type": "user", "message": {"role": "user", "content": "never sent"}}


class Rehearsal:
    """One recording, played to its end, and the session closed. The attributes hold the results."""

    def __init__(self, name: str, cut: Cut) -> None:
        self.entries: list[kinds.Entry] = []
        self.outcomes: dict[str, Outcome] = {}
        # The conversation that each process had to resume.
        self.starts: list[str | None] = []
        # Every line of the agent.
        self.said: list[bytes] = []
        # Every frame that was written to the recorded process.
        self.written: list[bytes] = []
        self.is_finished = False
        self.state = _opened(name)
        self._at = 0.0
        self._cut = cut
        self._framing = Framing()
        self._facts: deque[Fact] = deque()
        self._timers: dict[Subject, float] = {}
        # Recorded names of the session's requests, each with the session's name; both as they are in a frame.
        self._names: dict[bytes, bytes] = {}
        self._stderr = ""
        self._prompts = [frame for frame in corpus.frames(name, "in") if frame["type"] == "user"]
        self._asked = 0
        self._sent = 0
        # A session starts its process for an ask, so the first ask comes before any entry.
        self._ask(self._prompts[0] if self._prompts else UNSENT)
        for is_said, entries in groupby(_told(name), lambda entry: entry.kind == "out"):
            if is_said:
                self._hear(list(entries))
            else:
                for entry in entries:
                    self._pass(entry.at)
                    self._play(entry)
        self._end()

    @property
    def events(self) -> list[Event]:
        """The log as a reader gets it."""
        return [Event("rehearsed", 1, seq, 0.0, *entry) for seq, entry in enumerate(self.entries, 1)]

    # -- the recording -----------------------------------------------------------------------------------------------
    def _play(self, entry: Entry) -> None:
        match entry:
            case Entry(kind="in", value={"type": "user"} as frame):
                if self._sent > 0:
                    self._ask(frame)
                self._sent += 1
                self._pass_until_sent(frame)
            case Entry(kind="in", value={"type": "control_request", "request": {"subtype": "initialize"}} as frame):
                self._is_named(frame)
            case Entry(kind="in", value={"type": "control_request", "request": {"subtype": "interrupt"}} as frame):
                written = len(self.written)
                if self.state.turn is not None:
                    self._tell(InterruptAsked(self._at, self.state.turn.id, frame["request_id"]))
                self._is_named(frame, written)
            case Entry(kind="in", value={"type": "control_response", "response": response}):
                waiting = self.state.questions
                asked = [question.id for question in waiting if question.asked.request == response["request_id"]]
                for id in asked:
                    self._tell(QuestionAnswered(self._at, id, _decided(response["response"])))
            case Entry(kind="err", value=str(text)):
                self._stderr += text
            case Entry(kind="ev", value="stdout EOF"):
                self._read(self._framing.end())
            case Entry(kind="ev", value=str(text)) if text.startswith("exit "):
                code = int(text.removeprefix("exit "))
                self._tell(
                    ProcessReported(self._at, RECORDED, Exited(None, -code, self._at))
                    if code < 0
                    else ProcessReported(self._at, RECORDED, Exited(code, None, self._at))
                )
            case _:
                pass  # The session neither does nor sees this.

    def _ask(self, frame: dict[str, Any]) -> None:
        self._asked += 1
        ref = frame.get("uuid") or f"{self._asked:08}-0000-4000-8000-000000000000"
        is_open = self.state.turn is not None and self.state.turn.is_open
        on_busy = "steer" if is_open else "enqueue"
        prompt = frame["message"]["content"]
        self._tell(Asked(self._at, Ask(id=f"{self._asked}", ref=ref, prompt=prompt, priority=NORMAL, on_busy=on_busy)))

    def _pass_until_sent(self, frame: dict[str, Any]) -> None:
        """Advance time until the session has sent this prompt."""
        while (sent := json.loads(self.written[-1])).get("message") != frame["message"]:
            if not self._timers and self.state.queue and self.state.process.naming is not PromptNaming.PRESENT:
                return  # The agent does not name prompts: the session waits for the end of the turn.
            assert self._timers, f"the session does not send {frame['message']['content']!r}: {self.state}"
            self._fire_next()
        assert frame.get("uuid") in (sent["uuid"], None)

    def _is_named(self, frame: dict[str, Any], since: int = 0) -> None:
        """Map the recorded name of this request to the name that the session used, for the agent's answer.

        An interrupt after the end of its turn has no counterpart: the agent's answer then answers no request.
        """
        for data in self.written[since:]:
            sent = json.loads(data)
            if sent.get("request", {}).get("subtype") == frame["request"]["subtype"]:
                self._names[corpus.line(frame["request_id"])] = corpus.line(sent["request_id"])

    def _hear(self, entries: list[Entry]) -> None:
        self._pass(entries[0].at)
        data = b"".join(corpus.line(entry.value) + b"\n" for entry in entries)
        for theirs, ours in self._names.items():
            data = data.replace(theirs, ours)
        self.said += data.splitlines()
        for piece in self._cut(data):
            self._read(self._framing.feed(piece))

    def _read(self, lines: list[bytes] | MixedChunk) -> None:
        assert not isinstance(lines, MixedChunk)
        if lines:
            heard = [(index, CLAUDE.read(line)) for index, line in enumerate(lines)]
            meanings = [(index, meaning) for index, meaning in heard if meaning is not None]
            self._tell(FramesRead(self._at, RECORDED, lines, meanings))

    def _end(self) -> None:
        """End the process, with or without a recorded exit, and then close the session."""
        assert self._framing.held_bytes == 0
        self._tell(ProcessReported(self._at, RECORDED, ProcessGone(stderr=Stderr(self._stderr))))
        self._tell(CloseAsked(self._at))
        if self.state.process.phase is not ProcessPhase.NONE:
            self._tell(ProcessReported(self._at, self.state.process.number, ProcessGone()))

    # -- time --------------------------------------------------------------------------------------------------------
    def _pass(self, at: float) -> None:
        while self._timers and min(self._timers.values()) <= at:
            self._fire_next()
        self._at = max(self._at, at)

    def _fire_next(self) -> None:
        subject = min(self._timers, key=lambda subject: self._timers[subject])
        self._at = max(self._at, self._timers.pop(subject))
        self._tell(TimerFired(self._at, subject))

    # -- facts and effects -------------------------------------------------------------------------------------------
    def _tell(self, fact: Fact) -> None:
        self._facts.append(fact)
        while self._facts:
            self.state, effects = step(self.state, self._facts.popleft())
            for effect in effects:
                self._perform(effect)

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Append(entries=entries):
                self.entries += entries
                self._facts.append(Committed(self._at, len(self.entries)))
            case WriteFrame(process=process, data=data):
                assert process == RECORDED
                self.written.append(data)
                self._facts.append(ProcessReported(self._at, process, FrameWritten()))
            case StartProcess(process=process, conversation=conversation):
                self.starts.append(conversation)
                if process == RECORDED:
                    self._facts.append(ProcessReported(self._at, process, Started(1, self._at)))
            case StartTimer(at=at, subject=subject):
                self._timers[subject] = at
            case CancelTimer(subject=subject):
                self._timers.pop(subject, None)
            case Resolve(turn=turn, outcome=outcome):
                assert turn not in self.outcomes, f"{turn} has two outcomes"
                self.outcomes[turn] = outcome
            case Reject(turn=turn, error=error):
                raise AssertionError(f"{turn} was not accepted: {error}")
            case Finish():
                self.is_finished = True
            case _:
                pass  # The effect informs a caller, or stops the process, which the recording does anyway.


def _opened(name: str) -> Session:
    """A session at the moment when the recorded process was started."""
    argv: list[str] = next(entry.value for entry in corpus.entries(name) if entry.kind == "argv")
    resumed = [word.removeprefix("--resume=") for word in argv if word.startswith("--resume=")]
    return Session(config=Config(dialect=CLAUDE), conversation=resumed[0] if resumed else None)


def _decided(response: dict[str, Any]) -> Decision:
    """Convert a recorded answer to a decision. An answer that the agent could not read is a denial.

    An answer that also interrupts the turn is a plain denial here. Otherwise the session would send an interrupt, for
    which the recording has no answer.
    """
    return Decision(
        allows=response.get("behavior") == "allow",
        message=response.get("message"),
        updated_input=response.get("updatedInput"),
    )


def _told(name: str) -> list[Entry]:
    """Entries that belong to the conversation, so that observations do not split the agent's output."""
    return [
        entry
        for entry in corpus.entries(name)
        if entry.kind in ("in", "out", "err") or (entry.kind == "ev" and entry.value != "WAIT TIMEOUT")
    ]
