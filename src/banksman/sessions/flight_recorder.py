"""The flight recorder: the last facts of a session, and the state before the first of them, so that they can be
replayed in a unit test.

A fact that goes wrong is the last one in it. Frames are cut, because what they mean was read from them already and is
kept beside them.
"""

from __future__ import annotations

from msgspec.structs import replace

from banksman.core.session.facts import Asked, Fact, FramesRead
from banksman.core.session.state import Session

# At least so many facts are kept, at most twice as many.
FACTS_MIN = 64
# What is kept of the frames of one fact: to follow a trace, a flood of text is not needed.
LINES_MAX = 16
LINE_BYTES_MAX = 256


class Recorder:
    def __init__(self) -> None:
        self._before: tuple[Session, list[Fact]] | None = None
        self._now: tuple[Session, list[Fact]] | None = None

    def note(self, state: Session, fact: Fact) -> None:
        """`state` is the one that the fact is about to be taken in."""
        if self._now is None or len(self._now[1]) >= FACTS_MIN:
            self._before, self._now = self._now, (state, [])
        self._now[1].append(_cut(fact))

    def flight(self) -> tuple[Session, list[Fact]] | None:
        """Where it starts, and what happened since. None: nothing has."""
        if self._before is None or self._now is None:
            return self._now
        return self._before[0], [*self._before[1], *self._now[1]]

    def __str__(self) -> str:
        flight = self.flight()
        return "nothing" if flight is None else "\n".join(f"  {fact}" for fact in flight[1])


def _cut(fact: Fact) -> Fact:
    if isinstance(fact, Asked):
        # What was asked is for the agent; the machine only needs to know that it was.
        return replace(fact, ask=replace(fact.ask, prompt=str(fact.ask.prompt)[:LINE_BYTES_MAX]))
    if not isinstance(fact, FramesRead):
        return fact
    if len(fact.lines) <= LINES_MAX:
        return replace(fact, lines=[line[:LINE_BYTES_MAX] for line in fact.lines])
    # The index of a meaning must still be that of its line, so what is left out is left empty.
    meant = {index for index, _ in fact.meanings}
    lines = [line[:LINE_BYTES_MAX] if i in meant else b"" for i, line in enumerate(fact.lines)]
    return replace(fact, lines=lines) if meant else replace(fact, lines=[b""] * len(fact.lines))
