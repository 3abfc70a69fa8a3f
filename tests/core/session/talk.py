"""Drive a session by hand: appends commit and frames are written immediately, and time advances on request."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace
from tests.core.session import toy

from banksman.core.dialects.dialect import PLAIN, Decision, Setup, Verdict
from banksman.core.dialects.meaning import Meaning, Requested, TurnOver
from banksman.core.process_facts import (
    Exited,
    FrameWritten,
    ProcessGone,
    Started,
    Stderr,
)
from banksman.core.session import event as kinds
from banksman.core.session.effects import Append, CancelTimer, Effect, Resolve, StartProcess, StartTimer, WriteFrame
from banksman.core.session.facts import (
    Asked,
    Committed,
    Fact,
    FramesRead,
    ProcessReported,
    Subject,
    Timer,
    TimerFired,
)
from banksman.core.session.outcome import Kind, Outcome
from banksman.core.session.plain_frames import count_frames, label_of
from banksman.core.session.session_config import Config
from banksman.core.session.state import ProcessPhase, Session
from banksman.core.session.step import step
from banksman.core.session.turn import Ask


class Telling(toy.ToyDialect):
    """The toy dialect, with frames that show their content."""

    def handshake(self, request: str, setup: Setup = PLAIN) -> bytes:
        return f"H {request} {[hook.id for hook in setup.hooks]} {list(setup.servers)} {setup.schema}\n".encode()

    def setting(self, request: str, name: str, value: str) -> bytes:
        return f"S {request} {name}={value}\n".encode()

    def answer(self, asked: Requested, decision: Decision) -> bytes:
        word = "allow" if decision.allows else "deny"
        return f"A {asked.request} {word}{' and stop' if decision.interrupts else ''}: {decision.message}\n".encode()

    def rule(self, asked: Requested, verdict: Verdict | None) -> bytes:
        return f"V {asked.request} {verdict}\n".encode()

    def respond(self, asked: Requested, response: Mapping[str, Any]) -> bytes:
        return f"C {asked.request} {dict(response)}\n".encode()

    def refuse(self, request: str, error: str) -> bytes:
        return f"R {request} {error}\n".encode()


CONFIG = Config(dialect=toy.ToyDialect())
TELLING = Config(dialect=Telling())
E = TypeVar("E", bound=Effect)
# Maximum of facts that follow from one fact: commits and written frames.
FACTS_MAX = 1000


def counts_plain_frames(state: Session, at: float) -> bool:
    """Return whether frames that the driver counts without a step are those that a step only counts."""
    plain = FramesRead(at, state.process.number, (b"plain",), ())
    label = label_of(state)
    if label is None:
        return True
    # The driver does not hear a process that was replaced.
    is_heard = label.process == plain.process
    return is_heard and step(state, plain) == (
        count_frames(state, 1, at),
        [Append(tuple(label.entries(plain.lines)))],
    )


class Talk:
    def __init__(self, config: Config = CONFIG, state: Session | None = None) -> None:
        self.state = Session(config=config) if state is None else state
        self.effects: list[Effect] = []
        self.at: float = 0.0
        self.epoch = 0
        self.timers: dict[Subject, float] = {}
        # If true, appends wait for `commit` instead of becoming durable immediately.
        self.is_log_slow = False
        # If true, frames stay unwritten until the test reports them as written.
        self.is_pipe_full = False

    def tell(self, fact: Fact) -> list[Effect]:
        told = [fact]
        effects: list[Effect] = []
        for _ in range(FACTS_MAX):
            if not told:
                break
            self.state, done = step(self.state, told.pop(0))
            assert counts_plain_frames(self.state, self.at)
            effects += done
            if not self.is_log_slow and any(isinstance(effect, Append) for effect in done):
                told.append(Committed(self.at, self.state.head))
            if not self.is_pipe_full:
                told += [ProcessReported(self.at, e.process, FrameWritten()) for e in done if isinstance(e, WriteFrame)]
            for effect in done:
                if isinstance(effect, StartTimer):
                    self.timers[effect.subject] = effect.at
                elif isinstance(effect, CancelTimer):
                    self.timers.pop(effect.subject, None)
        assert not told, "it never comes to rest"
        self.effects += effects
        return effects

    def commit(self) -> list[Effect]:
        return self.tell(Committed(self.at, self.state.head))

    # -- callers -----------------------------------------------------------------------------------------------------
    def ask(self, ask: Ask) -> list[Effect]:
        return self.tell(Asked(self.at, replace(ask, at=self.at)))

    # -- the agent ---------------------------------------------------------------------------------------------------
    def hear(self, *lines: bytes) -> list[Effect]:
        read = self.state.config.dialect.read
        meanings = [(i, meaning) for i, line in enumerate(lines) if (meaning := read(line)) is not None]
        return self.tell(FramesRead(self.at, self.state.process.number, lines, meanings))

    def mean(self, *meanings: Meaning) -> list[Effect]:
        """Let the agent send one line for each meaning."""
        return self.tell(
            FramesRead(self.at, self.state.process.number, (b"?",) * len(meanings), [*enumerate(meanings)])
        )

    def begin(self) -> None:
        """Start the requested process, and complete its handshake."""
        number = self.state.process.number
        self.epoch += 1
        self.tell(ProcessReported(self.at, number, Started(77, self.at), epoch=self.epoch))
        self.hear(f"ok handshake-{number}".encode())

    def opens(self, ref: str) -> list[Effect]:
        return self.hear(b"taken " + ref.encode(), b"init " + ref.encode())

    def over(self, ref: str, **how: Any) -> list[Effect]:
        """Play a whole turn. `how`: further fields of its boundary."""
        refs = ref.encode()
        effects = self.opens(ref)
        if how:
            how.setdefault("text", ref)
            effects += self.mean(TurnOver((ref,), **how))
        else:
            effects += self.hear(b"over " + refs + b" " + refs)
        return effects + self.hear(b"settled " + refs)

    def die(self, *, code: int | None = None, signal: int | None = None, stderr: str = "") -> list[Effect]:
        """End the process: by an exit code, or by the ladder's signal."""
        number = self.state.process.number
        exited = self.tell(ProcessReported(self.at, number, Exited(code, signal, self.at)))
        return exited + self.tell(ProcessReported(self.at, number, ProcessGone(stderr=Stderr(stderr))))

    def serve(self, ask: Ask, **how: Any) -> list[Effect]:
        """Ask, start a process if one is needed, and let the agent answer."""
        effects = self.ask(ask)
        if self.state.process.phase is ProcessPhase.STARTING:
            self.begin()
        return effects + self.over(ask.ref, **how)

    # -- time --------------------------------------------------------------------------------------------------------
    def wait(self, seconds: float) -> list[Effect]:
        """Advance the time, and fire each timer when it is due."""
        effects: list[Effect] = []
        end = self.at + seconds
        while self.timers:
            subject = min(self.timers, key=lambda subject: self.timers[subject])
            at = self.timers[subject]
            if at > end:
                break
            self.at = max(self.at, at)
            effects += self.fire(subject)
        self.at = end
        return effects

    def fire(self, subject: Subject) -> list[Effect]:
        self.timers.pop(subject, None)
        return self.tell(TimerFired(self.at, subject))

    def named(self, request: str = "q") -> str:
        """Return the session's id for the latest question with this request id."""
        return [body["question"] for body in self.logged(kinds.QUESTION_ASKED) if body["request"] == request][-1]

    def waits_for(self, timer: Timer) -> list[str]:
        """Return the subjects of the running timers of this kind."""
        return [name for kind, name in self.timers if kind is timer]

    # -- results -----------------------------------------------------------------------------------------------------
    def logged(self, kind: str) -> list[dict[str, Any]]:
        entries = [entry for append in of(Append, self.effects) for entry in append.entries]
        return [msgspec.json.decode(data) for _, name, data in entries if name == kind]

    @property
    def starts(self) -> list[StartProcess]:
        return of(StartProcess, self.effects)

    @property
    def outcomes(self) -> dict[str, Outcome]:
        resolved = of(Resolve, self.effects)
        found = {effect.turn: effect.outcome for effect in resolved}
        assert len(found) == len(resolved), "an ask has two outcomes"
        return found

    @property
    def kinds(self) -> dict[str, Kind]:
        return {turn: outcome.kind for turn, outcome in self.outcomes.items()}


def of(kind: type[E], effects: Iterable[Effect]) -> list[E]:
    return [effect for effect in effects if isinstance(effect, kind)]


def sent(effects: Iterable[Effect]) -> list[bytes]:
    return [effect.data for effect in of(WriteFrame, effects)]
