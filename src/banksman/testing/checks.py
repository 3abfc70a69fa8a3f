"""Checks of session invariants: in logs, outcomes, agent input and client streams; and of leaks.

Each check raises AssertionError and names the place of the violation. `Things` is different: it
lists the fds, threads, tasks and children that a test has leaked.

    events = [event async for event in session.follow()]        # of a session that is closed
    checks.log(events)
    checks.turns(events)
    checks.stdin(events, [process.stdin for process in Evidence(folder).processes])

The checks do not depend on the script, the schedule or the agent, as long as the agent speaks
Claude's dialect. `joined`, `joined_many` and `views_agree` check the streams that a client of a
server received, over any number of connections. They do not depend on how the client reads.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import Any, NamedTuple

from banksman.core.session import event as kinds
from banksman.core.session.event import Event
from banksman.core.session.outcome import Outcome, outcome_of
from banksman.errors import ErrorKind

Frame = dict[str, Any]


# ── Log ──
def log(events: Sequence[Event]) -> None:
    """Check a whole log: one session, seqs dense from 1, epochs that never fall."""
    for place, event in enumerate(events, 1):
        assert event.seq == place, f"event {place} has seq {event.seq}"
        assert event.session == events[0].session
    for before, after in pairwise(events):
        assert before.epoch <= after.epoch, f"the epoch falls at {after.cursor}"


def readers_agree(*readers: Sequence[Event]) -> None:
    """Check that any two readers agree on the events both have read, wherever they started (G8)."""
    known: dict[int, Event] = {}
    for events in readers:
        for before, after in pairwise(events):
            assert after.seq == before.seq + 1, f"a reader was given {after.seq} after {before.seq}"
        for event in events:
            assert known.setdefault(event.seq, event) == event, (
                f"two readers differ at {event.cursor}"
            )


# ── Turns and outcomes ──
def turns(events: Sequence[Event], *, is_over: bool = True) -> None:
    """Check the life cycle of turns.

    - At most one prompted turn is open, and at most one turn that the agent started (G1).
    - Each turn that was queued or began ends exactly once (G2).
    - No event belongs to a turn that has ended (G4).

    `is_over`: no turn may still be open.
    """
    queued: set[str] = set()
    ended: set[str] = set()
    running: dict[str, set[str]] = {"ours": set(), "own": set()}
    for event in events:
        turn = event.turn
        if turn is None:
            continue
        assert turn not in ended, (
            f"{event.cursor} ({event.kind}) belongs to {turn}, which has ended"
        )
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
        assert not running["own"], (
            f"{event.cursor}: {event.turn} begins while {running['own']} runs"
        )
        running["own"].add(event.turn)
        return
    assert event.turn in queued, f"{event.cursor}: {event.turn} was never queued"
    # A prompt added to the open turn begins with that turn, and so do collected prompts.
    together = {event.turn, *(event.body.get("joined") or ())}
    if event.body.get("into") is None:
        others = running["ours"] - together
        assert not others, f"{event.cursor}: {event.turn} begins while {others} runs"
    running["ours"].update(together)


def outcomes(events: Sequence[Event], given: Mapping[str, Outcome]) -> None:
    """Check that the outcomes given to callers, by turn, are those in the log (G2)."""
    logged = {
        event.turn: _ending(outcome_of(event.body))
        for event in events
        if event.kind == kinds.TURN_ENDED
    }
    for turn, outcome in given.items():
        assert logged.get(turn) == _ending(outcome), (
            f"{turn}: told {_ending(outcome)}, logged {logged.get(turn)}"
        )
        assert outcome.durable


def _ending(outcome: Outcome) -> tuple[object, ...]:
    """Return the members of an outcome that a log without secrets has unchanged."""
    failure = outcome.failure or {"kind": ErrorKind.OTHER}
    names = ("kind", "status", "retry_after", "limited_until")
    return outcome.kind, outcome.used_tools, *(failure.get(name) for name in names)


def attribution(events: Sequence[Event], answers: Mapping[str, str | None] | None = None) -> None:
    """Check that each frame that names a prompt belongs to the turn of that prompt (G4).

    A late frame is exempt: its turn has ended or had its boundary.

    `answers`: the text of each outcome, keyed by a word that only its own prompt made the agent
    say. No text may contain the word of another prompt.
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
                assert is_late or event.turn in turns_of, (
                    f"{event.cursor} names a prompt of {turns_of}"
                )
                if json.loads(event.data).get("type") == "result":
                    bounded.add(ref)
    for word, text in (answers or {}).items():
        for other in answers or {}:
            assert other == word or other not in (text or ""), f"the answer of {word} has {other}"


def _share(event: Event, owners: Mapping[str, set[str]]) -> None:
    """Asks that share a turn share the frames of the turn."""
    others = [*(event.body.get("joined") or ()), event.body.get("into")]
    for turns_of in owners.values():
        if event.turn in turns_of or turns_of & set(others):
            turns_of.update((event.turn or "", *(other for other in others if other)))


def _stem(ref: str) -> str:
    # Attempts of one prompt have refs that differ only in their last four characters.
    return ref[:-4]


def _refs(line: bytes) -> list[str]:
    if b"user_message_uuids" not in line:
        return []
    try:
        names: Any = json.loads(line).get("user_message_uuids")
    except ValueError:
        return []
    return [str(name) for name in names or ()]


# ── Input of the agents ──
def frames(data: bytes, *, may_be_cut: bool = False) -> list[Frame]:
    """Parse complete frames. `may_be_cut`: the last may be incomplete, as when its reader died."""
    *lines, rest = data.split(b"\n")
    assert may_be_cut or not rest, f"cut: {rest[:80]!r}"
    found = [json.loads(line) for line in lines]
    for frame in found:
        assert isinstance(frame, dict), f"not a frame: {frame!r:.80}"
    return found


def prompts(data: bytes, *, may_be_cut: bool = False) -> list[Any]:
    """Return the contents of the prompts among these bytes, in order."""
    return [
        frame["message"]["content"]
        for frame in frames(data, may_be_cut=may_be_cut)
        if frame.get("type") == "user"
    ]


def stdin(events: Sequence[Event], given: Sequence[bytes]) -> None:
    """Check that each process received exactly the bytes that the log says were sent to it (G3).

    A process may have received less, because it died or did not read. It cannot have received other
    bytes. Prompts come in the order of their grants.
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
    # A process that was stopped during its start may be missing on either side. It received
    # nothing.
    streams = iter([b"".join(frames) for frames in sent])
    for number, data in enumerate(given):
        frames(data, may_be_cut=True)
        if data:
            seen = list[bytes]()
            is_sent = any(seen.append(whole) or whole.startswith(data) for whole in streams)
            nearest = max(seen, key=lambda whole: _common(whole, data), default=b"")
            assert is_sent, (
                f"process {number + 1} was given what was not sent: {_difference(nearest, data)}"
            )
    _in_order(prompted, granted)


def _common(one: bytes, other: bytes) -> int:
    """Return the length of the common prefix."""
    return next(
        (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )


def _in_order(prompted: Sequence[str], granted: Sequence[str]) -> None:
    """Check the order of prompts.

    A grant may be withdrawn before its prompt is sent. But every prompt has its grant, and no
    prompt overtakes another.
    """
    rest = iter(granted)
    for ref in prompted:
        assert ref in rest, f"the prompt {ref} was sent out of the order of grants"


def _difference(whole: bytes, data: bytes) -> str:
    place = _common(whole, data)
    return f"at byte {place} {data[place : place + 60]!r} instead of {whole[place : place + 60]!r}"


# ── Streams of clients ──
class Message(NamedTuple):
    """One complete message of a stream, as a client received it.

    `event`: its event name, if it has one. `data`: the received bytes. NDJSON has no fields for
    `id` and `event`; the client takes them from the content of the line.
    """

    id: str | None
    event: str | None
    data: bytes


class Visit(NamedTuple):
    """One connection: its starting cursor or position, and the messages until it was cut off."""

    after: str | None
    messages: Sequence[Message]


@dataclass(frozen=True, slots=True)
class View:
    """Events that one client has seen over all its connections.

    `events`: by session and seq, in the order of arrival. `gaps`: by session, the ranges that the
    server reported as removed by retention. `is_many`: ids are positions.
    """

    events: Mapping[tuple[str, int], Message]
    gaps: Mapping[str, Sequence[tuple[int, int]]]
    is_many: bool

    def heads(self) -> dict[str, int]:
        """Return the last seq of each session."""
        return dict(self.events.keys())  # The later events of a session replace the earlier ones.


def joined(visits: Iterable[Visit]) -> View:
    """Check that the connections of one client to one session's stream form one view (G8).

    - The view is dense from the first event: no event comes twice, and only reported gaps are
      missing.
    - Each connection continues right after the last id that arrived completely.
    - A message made for this one reader has no id.
    - A stream reports `stream.live` once, when it has reached the head.
    - A stream sends nothing after `stream.closing`.
    """
    return _Joining(is_many=False).join(visits)


def joined_many(visits: Iterable[Visit]) -> View:
    """Check the stream of many sessions: dense in each session, and no position comes twice."""
    return _Joining(is_many=True).join(visits)


def views_agree(*views: View) -> None:
    """Check that any two clients agree on the events both have seen (G8).

    They agree byte for byte, whatever stream they used. For streams of many sessions they also
    agree on the order, wherever they were cut off.
    """
    data: dict[tuple[str, int], bytes] = {}
    ids: dict[tuple[bool, tuple[str, int]], str | None] = {}
    for view in views:
        for place, message in view.events.items():
            assert data.setdefault(place, message.data) == message.data, (
                f"two clients differ at {place}"
            )
            known = ids.setdefault((view.is_many, place), message.id)
            assert known == message.id, f"two clients have {place} as {known} and {message.id}"
    for one, other in combinations((view.events for view in views if view.is_many), 2):
        both = zip(
            (place for place in one if place in other),
            (place for place in other if place in one),
            strict=True,
        )
        for here, there in both:
            assert here == there, f"where one client was given {here}, another was given {there}"


class _Joining:
    """Reads the connections of one client, one message at a time."""

    def __init__(self, *, is_many: bool) -> None:
        self._is_many = is_many
        self._events: dict[tuple[str, int], Message] = {}
        self._gaps: dict[str, list[tuple[int, int]]] = {}
        # For each session, the last seq that was seen or reported as removed, and the last epoch.
        self._seqs: dict[str, int] = {}
        self._epochs: dict[str, int] = {}
        self._ids: set[str] = set()
        self._place: str | None = None

    def join(self, visits: Iterable[Visit]) -> View:
        for number, visit in enumerate(visits, 1):
            where = f"visit {number} (after {visit.after})"
            assert visit.after == self._place, f"{where}: the last one ended at {self._place}"
            self._see_visit(visit, where)
        return View(self._events, self._gaps, self._is_many)

    def _see_visit(self, visit: Visit, where: str) -> None:
        is_live = is_over = False
        for message in visit.messages:
            assert not is_over, f"{where}: {message.data[:80]!r} comes after stream.closing"
            body: Frame = json.loads(message.data)
            kind = str(body["kind"])
            if not kind.startswith("stream."):
                self._see_event(message, body, where)
                continue
            assert message.id is None, (
                f"{where}: {kind}, which is for one reader, has the id {message.id}"
            )
            assert message.event == kind, f"{where}: {kind} is called {message.event}"
            is_over = kind == "stream.closing"
            if kind == "stream.gap":
                self._see_gap(body["session"], body["first"], body["last"], where)
            if kind == "stream.live":
                assert not is_live, f"{where}: it is live twice"
                assert self._is_many or body["head"] == self._place, (
                    f"{where}: live at {body['head']}: {self._place}"
                )
                is_live = True

    def _see_event(self, message: Message, body: Frame, where: str) -> None:
        session, epoch, seq = str(body["session"]), int(body["epoch"]), int(body["seq"])
        expected = self._seqs.get(session, 0) + 1
        assert message.event is None, f"{where}: {body['cursor']} is called {message.event}"
        assert message.id is not None, f"{where}: {body['cursor']} has no id"
        assert seq >= expected, f"{where}: {seq} of {session} comes twice"
        assert seq == expected, f"{where}: {expected} of {session} is left out, {seq} came"
        assert epoch >= self._epochs.get(session, 0), (
            f"{where}: the epoch falls at {body['cursor']}"
        )
        assert body["cursor"] == f"{epoch}.{seq}", (
            f"{where}: {body['cursor']} is the cursor of {epoch}.{seq}"
        )
        if not self._is_many:
            assert message.id == body["cursor"], (
                f"{where}: {body['cursor']} has the id {message.id}"
            )
            assert not self._seqs or session in self._seqs, (
                f"{where}: of another session, {session}"
            )
        assert message.id not in self._ids, f"{where}: the id {message.id} comes twice"
        self._ids.add(message.id)
        self._seqs[session], self._epochs[session] = seq, epoch
        self._events[session, seq] = message
        self._place = message.id

    def _see_gap(self, session: str, first: int, last: int, where: str) -> None:
        seen = self._seqs.get(session, 0)
        assert first <= last, f"{where}: a gap from {first} to {last}"
        # A stream of many sessions reports the whole removed range. That may be more than this
        # client has missed.
        is_next = first <= seen + 1 if self._is_many else first == seen + 1
        assert is_next, f"{where}: a gap from {first} where {seen + 1} of {session} comes next"
        self._seqs[session] = max(seen, last)
        self._gaps.setdefault(session, []).append((first, last))


# ── Leaks ──
@dataclass(frozen=True, slots=True)
class Things:
    """Fds, threads, tasks and children of this process."""

    fds: frozenset[str]
    threads: frozenset[int]
    tasks: frozenset[int]
    children: frozenset[int]

    @classmethod
    def now(cls) -> Things:
        """Take a snapshot; inside a running loop it includes the tasks of that loop."""
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
        """Describe the fds, threads, tasks and children that did not exist before."""
        more = {
            "fd": self.fds - before.fds,
            "thread": self.threads - before.threads,
            "task": self.tasks - before.tasks,
            "child": self.children - before.children,
        }
        return [
            f"{what} {name}" for what, names in more.items() for name in sorted(map(str, names))
        ]


def _fds() -> Iterable[str]:
    for name in os.listdir("/proc/self/fd"):
        try:
            yield f"{name}: {os.readlink(f'/proc/self/fd/{name}')}"
        except OSError:
            continue  # The fd that listed the folder.


def _children() -> Iterable[int]:
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/children", encoding="ascii") as file:
                yield from map(int, file.read().split())
        except OSError:
            continue  # That thread has ended.
