"""Chooses the step that a request plays, and counts the failures that are to happen only so often.

That count is the only thing the server remembers of what it played, and it is of a prompt, not of a session.
"""

from __future__ import annotations

import collections
import hashlib
import threading
from collections.abc import Sequence

from banksman.testing.fake_model import prompt, script
from banksman.testing.fake_model.apis.api import Entry

# Prompts with a TIMES in them that are remembered; the oldest is forgotten first, and would fail anew.
PROMPTS_MAX = 10_000
LIMITED = (script.HttpError, script.Overflow, script.SseError, script.Drop)


class Chooser:
    """Safe from any thread."""

    def __init__(self) -> None:
        # Protects the counts; held for arithmetic only.
        self._lock = threading.Lock()
        # By a prompt's hash and the place of the directive among all of the prompt's.
        self._counts: collections.OrderedDict[tuple[bytes, int], int] = collections.OrderedDict()

    def choose(self, conversation: Sequence[Entry]) -> script.Step:
        """The step for this conversation; () where there is none. Raises BadDirective."""
        said = prompt.find(conversation)
        steps = script.parse(said.text)
        # Stripped, for an agent adds a newline when it sends the same prompt again before another.
        digest = hashlib.sha256(said.text.strip().encode("utf-8", "surrogatepass")).digest()
        with self._lock:
            live = self._live(steps, digest)
            if said.calls_before >= len(live):
                return ()
            step = live[said.calls_before]
            self._count(step, digest)
        return tuple(directive for _, directive in step)

    def _live(self, steps: tuple[script.Step, ...], digest: bytes) -> list[list[tuple[int, script.Directive]]]:
        """The steps without the failures that have happened often enough, and without steps that had nothing else."""
        live: list[list[tuple[int, script.Directive]]] = []
        place = 0
        for step in steps:
            kept: list[tuple[int, script.Directive]] = []
            for directive in step:
                times = directive.times if isinstance(directive, LIMITED) else None
                if times is None or self._counts.get((digest, place), 0) < times:
                    kept.append((place, directive))
                place += 1
            if kept:
                live.append(kept)
        return live

    def _count(self, step: list[tuple[int, script.Directive]], digest: bytes) -> None:
        for place, directive in step:
            if isinstance(directive, LIMITED):
                if directive.times is not None:
                    key = (digest, place)
                    self._counts[key] = self._counts.get(key, 0) + 1
                    if len(self._counts) > PROMPTS_MAX:
                        self._counts.popitem(last=False)
                # The first one ends the reply; those after it did not happen.
                return
