"""What must be true of every session, checked on what it left behind: the log, the bytes its processes were given, the
outcomes its callers got. Each raises AssertionError with the place where it is not.

    events = [event async for event in session.follow()]        # of a session that is closed
    checks.log(events)
    checks.turns(events)
    checks.stdin(events, [process.stdin for process in Evidence(folder).processes])

They know nothing of how it came about: any script, any schedule, any agent that speaks Claude's dialect may be checked.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from banksman.core import event as kinds
from banksman.core.event import Event
from banksman.core.outcome import Outcome

Frame = dict[str, Any]


# -- the log ---------------------------------------------------------------------------------------------------------
def log(events: Sequence[Event]) -> None:
    """A whole log as a reader sees it: one session, dense from 1, epochs that only rise."""
    for place, event in enumerate(events, 1):
        assert event.seq == place, f"event {place} has seq {event.seq}"
        assert event.session == events[0].session
    for before, after in pairwise(events):
        assert before.epoch <= after.epoch, f"the epoch falls at {after.cursor}"


def readers_agree(*readers: Sequence[Event]) -> None:
    """Any two readers agree on what both have read, wherever each began and ended (G8)."""
    known: dict[int, Event] = {}
    for events in readers:
        for before, after in pairwise(events):
            assert after.seq == before.seq + 1, f"a reader was given {after.seq} after {before.seq}"
        for event in events:
            assert known.setdefault(event.seq, event) == event, f"two readers differ at {event.cursor}"


# -- turns and outcomes ----------------------------------------------------------------------------------------------
def turns(events: Sequence[Event], *, is_over: bool = True) -> None:
    """At most one turn of ours is open, and one of the agent's own (G1); each that was queued or began ends once (G2);
    nothing belongs to a turn that has ended (G4). `is_over`: none may still be open."""
    queued: set[str] = set()
    ended: set[str] = set()
    running: dict[str, set[str]] = {"ours": set(), "own": set()}
    for event in events:
        turn = event.turn
        if turn is None:
            continue
        assert turn not in ended, f"{event.cursor} ({event.kind}) belongs to {turn}, which has ended"
        match event.kind:
            case kinds.TURN_QUEUED:
                assert turn not in queued, f"{turn} was queued twice"
                queued.add(turn)
            case kinds.TURN_STARTED:
                _start(event, queued, running)
            case kinds.TURN_REQUEUED:
                running["ours"].clear()
            case kinds.TURN_ENDED:
                ended.add(turn)
                for names in running.values():
                    names.discard(turn)
            case _:
                pass
    if is_over:
        assert queued <= ended, f"without an end: {queued - ended}"
        assert not running["own"], f"without an end: {running['own']}"


def _start(event: Event, queued: Collection[str], running: Mapping[str, set[str]]) -> None:
    assert event.turn is not None
    if "origin" in event.body:
        assert not running["own"], f"{event.cursor}: {event.turn} begins while {running['own']} runs"
        running["own"].add(event.turn)
        return
    assert event.turn in queued, f"{event.cursor}: {event.turn} was never queued"
    # A prompt that was added to the open turn begins with it, and so do those that were collected.
    together = {event.turn, *(event.body.get("joined") or ())}
    if event.body.get("into") is None:
        others = running["ours"] - together
        assert not others, f"{event.cursor}: {event.turn} begins while {others} runs"
    running["ours"].update(together)


def outcomes(events: Sequence[Event], given: Mapping[str, Outcome]) -> None:
    """What callers were told, by turn, is what the log says (G2)."""
    logged = {event.turn: event.body["outcome"] for event in events if event.kind == kinds.TURN_ENDED}
    for turn, outcome in given.items():
        assert logged.get(turn) == outcome.kind, f"{turn}: told {outcome.kind}, logged {logged.get(turn)}"
        assert outcome.durable


def attribution(events: Sequence[Event], answers: Mapping[str, str | None] | None = None) -> None:
    """What names a prompt belongs to that prompt's turn (G4), or is late: that turn has ended, or had its boundary.

    `answers`: the text of each outcome by a word that only its own prompt had the agent say; no text may have another's
    word.
    """
    owners: dict[str, set[str]] = {}
    ended: set[str | None] = set()
    bounded: set[str] = set()
    for event in events:
        if event.kind == kinds.TURN_ENDED:
            ended.add(event.turn)
        elif event.kind == kinds.TURN_QUEUED and event.turn is not None:
            owners.setdefault(_stem(event.body["ref"]), set()).add(event.turn)
        elif event.kind == kinds.TURN_STARTED and event.turn is not None:
            _share(event, owners)
        elif event.kind == kinds.UPDATE:
            for ref in _refs(event.data):
                turns_of = owners.get(_stem(ref), set[str]()) - ended
                is_late = not turns_of or ref in bounded
                assert is_late or event.turn in turns_of, f"{event.cursor} names a prompt of {turns_of}"
                if json.loads(event.data).get("type") == "result":
                    bounded.add(ref)
    for word, text in (answers or {}).items():
        for other in answers or {}:
            assert other == word or other not in (text or ""), f"the answer of {word} has {other}"


def _share(event: Event, owners: Mapping[str, set[str]]) -> None:
    """Asks that share a turn share what is said in it."""
    others = [*(event.body.get("joined") or ()), event.body.get("into")]
    for turns_of in owners.values():
        if event.turn in turns_of or turns_of & set(others):
            turns_of.update((event.turn or "", *(other for other in others if other)))


def _stem(ref: str) -> str:
    # Another attempt has another name, but for its end.
    return ref[:-4]


def _refs(line: bytes) -> list[str]:
    if b"user_message_uuids" not in line:
        return []
    try:
        names: Any = json.loads(line).get("user_message_uuids")
    except ValueError:
        return []
    return [str(name) for name in names or ()]


# -- the bytes an agent was given ------------------------------------------------------------------------------------
def frames(data: bytes, *, may_be_cut: bool = False) -> list[Frame]:
    """The whole frames that these bytes are. `may_be_cut`: the last may lack its end, as when its reader died."""
    *lines, rest = data.split(b"\n")
    assert may_be_cut or not rest, f"cut: {rest[:80]!r}"
    found = [json.loads(line) for line in lines]
    for frame in found:
        assert isinstance(frame, dict), f"not a frame: {frame!r:.80}"
    return found


def prompts(data: bytes, *, may_be_cut: bool = False) -> list[Any]:
    """The contents of the prompts among these bytes, in order."""
    return [frame["message"]["content"] for frame in frames(data, may_be_cut=may_be_cut) if frame.get("type") == "user"]


def stdin(events: Sequence[Event], given: Sequence[bytes]) -> None:
    """What each process was given is what the log says was sent to it, byte for byte and in that order (G3).

    It may have got less than was meant for it, because it died or did not read; it cannot have got anything else. And
    prompts come in the order in which they were granted.
    """
    sent: list[list[bytes]] = []
    granted: list[str] = []
    prompted: list[str] = []
    refs: dict[str | None, str] = {}
    for event in events:
        if event.kind == kinds.PROCESS_STARTED:
            sent.append([])
        elif event.kind == kinds.SENT:
            sent[-1].append(event.data + b"\n")
            frame = json.loads(event.data)
            if frame.get("type") == "user":
                prompted.append(_stem(frame["uuid"]))
        elif event.kind == kinds.TURN_QUEUED:
            refs[event.turn] = _stem(event.body["ref"])
        elif event.kind == kinds.TURN_STARTED and "origin" not in event.body:
            granted.append(refs[event.turn])
    # One that was stopped as it started may be missing on either side: then it was given nothing.
    streams = iter([b"".join(frames) for frames in sent])
    for number, data in enumerate(given):
        frames(data, may_be_cut=True)
        if data:
            seen = list[bytes]()
            is_sent = any(seen.append(whole) or whole.startswith(data) for whole in streams)
            nearest = max(seen, key=lambda whole: _common(whole, data), default=b"")
            assert is_sent, f"process {number + 1} was given what was not sent: {_difference(nearest, data)}"
    _in_order(prompted, granted)


def _common(one: bytes, other: bytes) -> int:
    """How many bytes they begin with alike."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _in_order(prompted: Sequence[str], granted: Sequence[str]) -> None:
    """A grant may be taken back before its prompt is sent; but no prompt is without its grant, and none overtakes."""
    rest = iter(granted)
    for ref in prompted:
        assert ref in rest, f"the prompt {ref} was sent out of the order of grants"


def _difference(whole: bytes, data: bytes) -> str:
    place = _common(whole, data)
    return f"at byte {place} {data[place : place + 60]!r} instead of {whole[place : place + 60]!r}"


# -- what is left ----------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Things:
    """The fds, threads, tasks and children that this process has."""

    fds: frozenset[str]
    threads: frozenset[int]
    tasks: frozenset[int]
    children: frozenset[int]

    @classmethod
    def now(cls) -> Things:
        """Inside a running loop, its tasks too."""
        try:
            tasks = asyncio.all_tasks()
        except RuntimeError:
            tasks = set[asyncio.Task[Any]]()
        return cls(
            fds=frozenset(_fds()),
            threads=frozenset(thread.ident or 0 for thread in threading.enumerate()),
            tasks=frozenset(map(id, tasks)),
            children=frozenset(_children()),
        )

    def beyond(self, before: Things) -> list[str]:
        """What there is more than before, in words."""
        more = {
            "fd": self.fds - before.fds,
            "thread": self.threads - before.threads,
            "task": self.tasks - before.tasks,
            "child": self.children - before.children,
        }
        return [f"{what} {name}" for what, names in more.items() for name in sorted(map(str, names))]


def _fds() -> Iterable[str]:
    for name in os.listdir("/proc/self/fd"):
        try:
            yield f"{name}: {os.readlink(f'/proc/self/fd/{name}')}"
        except OSError:
            continue  # The one that listed the folder.


def _children() -> Iterable[int]:
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/children", encoding="ascii") as file:
                yield from map(int, file.read().split())
        except OSError:
            continue  # That thread has ended.
