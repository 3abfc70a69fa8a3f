"""Who speaks next: a queue as a value, and the rules over it as functions.

The queue is a tuple in order of acceptance. Within a class the first one is served first; a requeued turn goes before
the first of its class. Nothing here knows a process or a clock: whether the session is free is the caller's to say.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator

from msgspec import Struct
from msgspec.structs import replace

from banksman.core.session.turn import Ask, Turn


class Priority(enum.IntEnum):
    """The classes, the more urgent the higher. Any int will do; these have names."""

    BACKGROUND = 0
    NORMAL = 10
    INTERACTIVE = 20


BACKGROUND, NORMAL, INTERACTIVE = Priority.BACKGROUND, Priority.NORMAL, Priority.INTERACTIVE
# What an agent does of its own accord was asked for by nobody: whoever asks comes first.
OWN_PRIORITY = BACKGROUND


class Hold(Struct, frozen=True):
    """Several asks in a row: while it is granted, nobody of its class or below comes between them."""

    id: str
    priority: int
    at: float


# In the queue, a hold waits among the turns: it wants the session as they do.
Waiting = Turn | Hold
Queue = tuple[Waiting, ...]


def class_above(priority: int) -> int:
    """The class one up. Above the named ones there is no next name, so it is the next number."""
    return min((named for named in Priority if named > priority), default=priority + 1)


def waited_since(waiting: Waiting) -> float:
    if isinstance(waiting, Hold):
        return waiting.at
    assert waiting.ask is not None
    return waiting.ask.at


def standing(waiting: Waiting, at: float, ageing_seconds: float) -> int:
    """The class it is chosen in: its own, or one up if it has waited for so long. Ageing never preempts."""
    is_aged = at - waited_since(waiting) >= ageing_seconds
    return class_above(waiting.priority) if is_aged else waiting.priority


def choose(
    queue: Queue, at: float, *, hold: Hold | None, ageing_seconds: float, collecting: Iterable[str] = ()
) -> Waiting | None:
    """The one to be served next, or None.

    `hold`: the one that is granted; its own turns and whoever is more urgent pass, the others wait for its end.
    `collecting`: turns whose window is still open; they are not ready.
    """
    best: Waiting | None = None
    best_standing = 0
    for waiting in ready(queue, hold=hold, collecting=collecting):
        is_in_hold = hold is not None and not isinstance(waiting, Hold) and _hold_of(waiting) == hold.id
        chosen_as = hold.priority if hold and is_in_hold else standing(waiting, at, ageing_seconds)
        # Strictly greater: the first of a class stays the first.
        if best is None or chosen_as > best_standing:
            best, best_standing = waiting, chosen_as
    return best


def ready(queue: Queue, *, hold: Hold | None, collecting: Iterable[str] = ()) -> Iterator[Waiting]:
    """Those that could be served now, in order."""
    return (waiting for waiting in queue if waiting.id not in collecting and _passes(waiting, hold))


def _passes(waiting: Waiting, hold: Hold | None) -> bool:
    if hold is None:
        return True
    # By its own class and not by its age: a hold that lasts is ended by its own clock, never by a queue behind it.
    return waiting.priority > hold.priority or (isinstance(waiting, Turn) and _hold_of(waiting) == hold.id)


def _hold_of(turn: Turn) -> str | None:
    return None if turn.ask is None else turn.ask.hold


def preempts(priority: int, running: int) -> bool:
    """Whether an ask of this class interrupts a turn of that one. BACKGROUND interrupts nobody."""
    return priority > running and priority > BACKGROUND


def displaces(waiting: Waiting, turn: Turn) -> bool:
    """Whether this one, which waits, interrupts that turn. Those that it was chosen before, for its age, do not: it
    would never be served."""
    if preempts(waiting.priority, turn.priority if turn.standing is None else turn.standing):
        return True
    return preempts(waiting.priority, turn.priority) and waited_since(waiting) > turn.granted_at


def may_interrupt(priority: int, running: int) -> bool:
    """Whether `on_busy="interrupt"` may: its equals too, never somebody more urgent, and never for BACKGROUND."""
    return priority >= running and priority > BACKGROUND


def enqueue(queue: Queue, waiting: Waiting) -> Queue:
    return (*queue, waiting)


def requeue(queue: Queue, waiting: Waiting) -> Queue:
    """Back to the head of its class."""
    index = next((i for i, other in enumerate(queue) if other.priority == waiting.priority), len(queue))
    return (*queue[:index], waiting, *queue[index:])


def remove(queue: Queue, id: str) -> Queue:
    return tuple(waiting for waiting in queue if waiting.id != id)


def find(queue: Queue, id: str) -> Turn | None:
    """The queued turn that this ask belongs to: its own, or the one that it was collected into."""
    for waiting in queue:
        if isinstance(waiting, Turn) and any(ask.id == id for ask in waiting.asks):
            return waiting
    return None


def move(queue: Queue, id: str, before: str | None) -> Queue:
    """Put one before another of its class; before None: to the head of its class. Anything else changes nothing."""
    turn = next((waiting for waiting in queue if isinstance(waiting, Turn) and waiting.id == id), None)
    rest = remove(queue, id)
    if turn is None:
        return queue
    # Holds are not in the log, so nothing in the log may be told by its place among them.
    targets = [
        i
        for i, other in enumerate(rest)
        if isinstance(other, Turn) and other.priority == turn.priority and before in (None, other.id)
    ]
    if not targets:
        return queue
    return (*rest[: targets[0]], turn, *rest[targets[0] :])


def leader(queue: Queue, ask: Ask) -> Turn | None:
    """The waiting turn that collects this ask: of the same class and hold."""
    for waiting in queue:
        if (
            isinstance(waiting, Turn)
            and waiting.ask is not None
            and waiting.ask.on_busy == "collect"
            and waiting.priority == ask.priority
            and waiting.ask.hold == ask.hold
            and waiting.ask.on_preempt == ask.on_preempt
            and waiting.ask.rules == ask.rules
            and waiting.ask.schema == ask.schema
            and waiting.attempt == 1
        ):
            return waiting
    return None


def join(queue: Queue, id: str, ask: Ask) -> Queue:
    """Add an ask to a waiting turn."""
    return tuple(
        replace(waiting, joined=(*waiting.joined, ask)) if isinstance(waiting, Turn) and waiting.id == id else waiting
        for waiting in queue
    )


def count(queue: Queue) -> int:
    """The asks that wait, collected ones one by one. Holds are no asks, and have a bound of their own."""
    return sum(len(waiting.asks) for waiting in queue if isinstance(waiting, Turn))


def dispensable(queue: Queue, priority: int) -> Turn | None:
    """Who gives way when the queue is full and the policy is to drop: the last of the lowest class below this one."""
    below = [waiting for waiting in queue if isinstance(waiting, Turn) and waiting.priority < priority]
    lowest = min((turn.priority for turn in below), default=None)
    return next((turn for turn in reversed(below) if turn.priority == lowest), None)
