"""Script engine of the fake agents: step grammar, verb tables, and the verbs that all share.

A step is one line, `VERB ARGUMENTS`. The lines of a prompt that begin with `@@` are steps. A
dialect may name points of a turn; its steps may then be `at POINT VERB ARGUMENTS`.

Each dialect has a `VerbTable`, which parses its steps. A verb is a function of a turn and a step. A
verb that waits is a generator of `Wait` objects. The agent reads and answers during the wait, and
an interrupted turn ends inside the wait. The kinds of the arguments declare how they are parsed:

    COUNT BYTES SECONDS CODE SIGNAL POINT    checked
    one|another                              one of these words
    STEPS                                    steps, separated by `;;`
    LINE                                     the unchanged rest of the line, perhaps empty
    any other                                a word, or for the last argument the stripped rest

Brackets mark an optional argument. Agents import this module when they start, so it imports no
module that is slow to load.
"""

from __future__ import annotations

import os
import stat

from banksman.testing.fake_process import NEVER, AgentLoop, Wait, pause

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any, Protocol, TypeAlias, TypeVar

    from banksman.testing.fake_process import Act, FakeRecord

    class ScriptTurn(Protocol):
        """The part of a turn that the shared verbs use."""

        @property
        def agent(self) -> ScriptAgent: ...
        def say(self, text: str) -> None: ...

    # Each dialect passes its turn class as the first argument.
    Perform: TypeAlias = Callable[[Any, "ScriptStep"], "Act | None"]
    PerformT = TypeVar("PerformT", bound=Perform)

# Every amount in a script has a bound: a mistake in a test must not fill the machine.
COUNT_MAX = 1_000_000
BYTES_MAX = 64 * 1024 * 1024
SECONDS_MAX = 120.0
MARK = "@@"
NESTED = ";;"
LINE = "LINE"


class ScriptError(ValueError):
    """Invalid script: unknown verb, point or section, or arguments that do not fit."""


class ScriptVerb:
    """One verb of a script language."""

    __slots__ = ("arguments", "doc", "is_setting", "name", "perform")

    def __init__(self, name: str, arguments: str, perform: Perform, is_setting: bool) -> None:
        self.name = name
        self.arguments = arguments
        self.doc = (perform.__doc__ or "").partition("\n")[0]
        self.perform = perform
        self.is_setting = is_setting

    @property
    def choices(self) -> tuple[str, ...]:
        """The words that the first argument accepts, if it accepts only a fixed set."""
        first = self.arguments.partition(" ")[0]
        return tuple(first.split("|")) if "|" in first else ()

    def __repr__(self) -> str:
        return f"{self.name} {self.arguments}".rstrip()


class ScriptStep:
    """A parsed verb with checked arguments, its place in the script, and its point in the turn."""

    __slots__ = ("nested", "point", "text", "verb", "where", "words")

    def __init__(
        self,
        point: str,
        verb: ScriptVerb,
        words: list[str],
        *,
        nested: list[ScriptStep],
        text: str,
        where: str,
    ) -> None:
        self.point = point
        self.verb = verb
        self.words = words
        self.nested = nested
        self.text = text
        self.where = where

    def word(self, index: int, default: str = "") -> str:
        return self.words[index] if index < len(self.words) else default

    def integer(self, index: int) -> int:
        return int(self.words[index])

    def seconds(self, index: int, default: float = 0.0) -> float:
        return float(self.words[index]) if index < len(self.words) else default

    def __repr__(self) -> str:
        return f"{self.where}: {self.text}"


class VerbTable(dict[str, ScriptVerb]):
    """Verbs of one dialect by name, and the points of its turns by name with their meaning."""

    def __init__(self, points: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self.points: Mapping[str, str] = points or {}

    def add(self, name: str, arguments: str, perform: Perform, *, is_setting: bool = False) -> None:
        """Register a verb. A setting is performed before its turn begins."""
        assert name not in self
        self[name] = ScriptVerb(name, arguments, perform, is_setting)

    def verb(
        self, name: str, arguments: str = "", *, is_setting: bool = False
    ) -> Callable[[PerformT], PerformT]:
        """Register the decorated function as a verb."""

        def enter(perform: PerformT) -> PerformT:
            self.add(name, arguments, perform, is_setting=is_setting)
            return perform

        return enter

    def directives(self, prompt: str) -> tuple[str, list[ScriptStep]]:
        """Split a prompt into its text without the `@@` lines and the steps of these lines."""
        lines = prompt.split("\n")
        steps = [
            self.parse(line.removeprefix(MARK), f"{MARK}{index}")
            for index, line in enumerate(lines)
            if line.startswith(MARK)
        ]
        return "\n".join(line for line in lines if not line.startswith(MARK)).strip(), steps

    def parse(self, text: str, where: str = "") -> ScriptStep:
        """Parse one step.

        Any error in it raises `ScriptError` here, and not when the turn reaches the step.
        """
        rest, point = text.lstrip(), ""
        if self.points and rest.startswith("at "):
            point, _, rest = rest[3:].lstrip().partition(" ")
            if point not in self.points:
                raise ScriptError(
                    f"{where}: no point {point!r} in {text!r}; there are {', '.join(self.points)}"
                )
        name, _, rest = rest.partition(" ")
        found = self.get(name.rstrip())
        if found is None:
            raise ScriptError(
                f"{where}: no verb {name!r} in {text!r}; there are {', '.join(sorted(self))}"
            )
        if found.arguments == LINE:
            return ScriptStep(point, found, [rest], nested=[], text=text, where=where)
        words, nested = self._arguments(found, rest.rstrip(), text, where)
        return ScriptStep(point, found, words, nested=nested, text=text, where=where)

    def _arguments(
        self, verb: ScriptVerb, rest: str, text: str, where: str
    ) -> tuple[list[str], list[ScriptStep]]:
        words: list[str] = []
        kinds = verb.arguments.split()
        for index, kind in enumerate(kinds):
            rest = rest.strip(" ")
            if not rest:
                if not kind.startswith("["):
                    raise ScriptError(f"{where}: {text!r} lacks {kind}; it is {verb!r}")
                break
            if kind == "STEPS":
                inner = [part for part in rest.split(NESTED) if part.strip()]
                return words, [
                    self.parse(part, f"{where}{NESTED}{number}")
                    for number, part in enumerate(inner)
                ]
            is_last = index == len(kinds) - 1
            word, _, rest = (rest, "", "") if is_last else rest.partition(" ")
            fault = self._fault(kind.strip("[]"), word)
            if fault:
                raise ScriptError(f"{where}: {word!r} of {text!r} is {fault}; it is {verb!r}")
            words.append(word)
        if rest.strip():
            raise ScriptError(f"{where}: {rest!r} of {text!r} is too much; it is {verb!r}")
        return words, []

    def _fault(self, kind: str, word: str) -> str:
        """Describe the error in an argument of this kind; empty if the argument is valid."""
        if "|" in kind:
            return "" if word in kind.split("|") else f"none of {kind}"
        if kind == "POINT":
            return "" if word in self.points else "no point"
        most = {"COUNT": COUNT_MAX, "BYTES": BYTES_MAX, "CODE": 255, "SIGNAL": 64}.get(kind)
        if most is not None:
            return "" if word.isdigit() and int(word) <= most else f"no whole number up to {most}"
        if kind == "SECONDS":
            try:
                return (
                    ""
                    if 0 <= float(word) <= SECONDS_MAX
                    else f"not within 0 and {SECONDS_MAX:g} seconds"
                )
            except ValueError:
                return "no number"
        return ""


class ScriptAgent(AgentLoop):
    """An agent loop that performs script steps."""

    def __init__(self, record: FakeRecord) -> None:
        super().__init__()
        self.record = record

    def perform(self, step: ScriptStep, turn: ScriptTurn) -> Act:
        """Record one step, then perform it.

        The record comes first because the step may end the process.
        """
        self.record.step(step.where, step.verb.name, step.text)
        act = step.verb.perform(turn, step)
        yield from self.room() if act is None else act


# ── Verbs that all dialects share; each dialect registers them under its own names ──


def say(turn: ScriptTurn, step: ScriptStep) -> None:
    """Say this text; in Claude's dialect the last text of the turn is its result."""
    turn.say(step.word(0))


def raw(turn: ScriptTurn, step: ScriptStep) -> None:
    """Write this text as a line of output."""
    turn.agent.out.put(step.word(0).encode() + b"\n")


def hang(_turn: ScriptTurn, _step: ScriptStep) -> Act:
    """Do nothing until an interrupt."""
    while True:
        yield NEVER


def pause_for(_turn: ScriptTurn, step: ScriptStep) -> Act:
    """Do nothing for SECONDS; prefer a handshake through a path where possible."""
    yield pause(step.seconds(0))


def wait_path(_turn: ScriptTurn, step: ScriptStep) -> Act:
    """Wait until PATH exists; if it is a fifo, wait until a process writes to it or closes it."""
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


def touch(turn: ScriptTurn, step: ScriptStep) -> Act:
    """Create PATH after all output is written; if it is a fifo, write a line to its reader."""
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
    """Open a fifo for writing; the open fails while the fifo has no reader."""
    try:
        opened.append(os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    except OSError:
        return False
    return True


def leave(turn: ScriptTurn, step: ScriptStep) -> Act:
    """Exit with CODE after all output is written."""
    yield from turn.agent.leave(step.integer(0))
