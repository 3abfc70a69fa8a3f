"""Priority queue of asks and holds: an immutable value, and the scheduling rules as functions.

The rules choose the next entry, and decide which entry may interrupt a running turn. `asks.py`
accepts entries, and `grants.py` grants them. The queue is a tuple in the order of acceptance.
Within a priority class the first entry is served first. A requeued turn goes to the head of its
class. This module knows neither process nor clock: the caller decides whether the session is free.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator

from msgspec import Struct
from msgspec.structs import replace

from banksman.core.dialects.dialect import Prompt
from banksman.core.session.turn import Ask, Turn


class Priority(enum.IntEnum):
    """Named priority classes; a higher number is more urgent. Any int is valid."""

    BACKGROUND = 0
    NORMAL = 10
    INTERACTIVE = 20


BACKGROUND, NORMAL, INTERACTIVE = Priority.BACKGROUND, Priority.NORMAL, Priority.INTERACTIVE
# No caller asked for a turn that the agent starts unprompted, so every ask comes first.
OWN_PRIORITY = BACKGROUND


class Hold(Struct, frozen=True):
    """Exclusive use of the session for several asks.

    While the hold is granted, no ask of its class or below comes between its asks. `caller`: the
    person or program that holds. `granted_at`: None while it waits.
    """

    id: str
    priority: int
    at: float
    caller: str | None = None
    granted_at: float | None = None


# A hold waits in the queue among the turns, because it needs the session too.
Waiting = Turn | Hold
Queue = tuple[Waiting, ...]


def class_above(priority: int) -> int:
    """Return the next higher class. Above the named classes it is the next number."""
    return min((named for named in Priority if named > priority), default=priority + 1)


def waited_since(waiting: Waiting) -> float:
    """Time at which the ask or hold was accepted."""
    if isinstance(waiting, Hold):
        return waiting.at
    assert waiting.ask is not None
    return waiting.ask.at


def standing(waiting: Waiting, at: float, ageing_seconds: float) -> int:
    """Return the class in which an entry is chosen: its own, or the next higher after a long wait.

    Ageing never preempts a running turn.
    """
    is_aged = at - waited_since(waiting) >= ageing_seconds
    return class_above(waiting.priority) if is_aged else waiting.priority


def choose(
    queue: Queue,
    at: float,
    *,
    hold: Hold | None,
    ageing_seconds: float,
    collecting: Iterable[str] = (),
) -> Waiting | None:
    """Return the entry to serve next, or None.

    `hold`: the granted hold. Its own turns and more urgent entries pass; all others wait for its
    end. `collecting`: ids of turns whose collect window is still open; they are not ready.
    """
    best: Waiting | None = None
    best_standing = 0
    for waiting in ready(queue, hold=hold, collecting=collecting):
        is_in_hold = (
            hold is not None and not isinstance(waiting, Hold) and _hold_of(waiting) == hold.id
        )
        chosen_as = hold.priority if hold and is_in_hold else standing(waiting, at, ageing_seconds)
        # Strictly greater, so that the first entry of a class stays first.
        if best is None or chosen_as > best_standing:
            best, best_standing = waiting, chosen_as
    return best


def ready(queue: Queue, *, hold: Hold | None, collecting: Iterable[str] = ()) -> Iterator[Waiting]:
    """Return the entries that could be served now, in order."""
    return (waiting for waiting in queue if waiting.id not in collecting and passes(waiting, hold))


def passes(waiting: Waiting, hold: Hold | None) -> bool:
    """Whether the granted hold lets this entry pass: its own asks, and more urgent entries."""
    if hold is None:
        return True
    # Compare the class itself, without ageing: a long hold ends by its own timer, never because of
    # the queue behind it.
    return waiting.priority > hold.priority or (
        isinstance(waiting, Turn) and _hold_of(waiting) == hold.id
    )


def _hold_of(turn: Turn) -> str | None:
    return None if turn.ask is None else turn.ask.hold


def preempts(priority: int, running: int) -> bool:
    """Whether an ask of this class interrupts a running turn. BACKGROUND interrupts no turn."""
    return priority > running and priority > BACKGROUND


def displaces(waiting: Waiting, turn: Turn) -> bool:
    """Whether this waiting entry interrupts that turn.

    A turn may have been chosen for its age, before more urgent entries. Those entries do not
    interrupt it, because otherwise it would never be served.
    """
    if preempts(waiting.priority, turn.priority if turn.standing is None else turn.standing):
        return True
    return preempts(waiting.priority, turn.priority) and waited_since(waiting) > turn.granted_at


def may_interrupt(priority: int, running: int) -> bool:
    """Whether `on_busy="interrupt"` may interrupt a running turn.

    It may interrupt an equal class too, never a more urgent one. A BACKGROUND ask may not
    interrupt.
    """
    return priority >= running and priority > BACKGROUND


def enqueue(queue: Queue, waiting: Waiting) -> Queue:
    """Append an entry to the queue."""
    return (*queue, waiting)


def requeue(queue: Queue, waiting: Waiting) -> Queue:
    """Put an entry back at the head of its class."""
    index = next(
        (i for i, other in enumerate(queue) if other.priority == waiting.priority), len(queue)
    )
    return (*queue[:index], waiting, *queue[index:])


def remove(queue: Queue, id: str) -> Queue:
    """Remove an entry from the queue."""
    return tuple(waiting for waiting in queue if waiting.id != id)


def find(queue: Queue, id: str) -> Turn | None:
    """Return the queued turn that this ask belongs to: its own, or the one that collected it."""
    for waiting in queue:
        if isinstance(waiting, Turn) and any(ask.id == id for ask in waiting.asks):
            return waiting
    return None


def move(queue: Queue, id: str, before: str | None) -> Queue:
    """Move a turn before another one of its class. `before` None: to the head of its class.

    If the target is missing or of another class, the queue stays as it is.
    """
    turn = next(
        (waiting for waiting in queue if isinstance(waiting, Turn) and waiting.id == id), None
    )
    rest = remove(queue, id)
    if turn is None:
        return queue
    # Holds are not in the log. So a logged position must not depend on them.
    targets = [
        i
        for i, other in enumerate(rest)
        if isinstance(other, Turn)
        and other.priority == turn.priority
        and before in (None, other.id)
    ]
    if not targets:
        return queue
    return (*rest[: targets[0]], turn, *rest[targets[0] :])


def edit(queue: Queue, id: str, prompt: Prompt | None, priority: int | None) -> Queue:
    """Change the prompt of a queued ask and the class of its turn. None: as before.

    In another class, the turn is the last one.
    """
    turn = find(queue, id)
    assert turn is not None, f"turn {id} is not queued"
    assert turn.ask is not None
    number = turn.priority if priority is None else priority

    def edited(ask: Ask) -> Ask:
        said = ask.prompt if prompt is None else prompt
        return replace(ask, prompt=said, priority=number) if ask.id == id else ask

    joined = tuple(map(edited, turn.joined))
    changed = replace(turn, ask=edited(turn.ask), joined=joined, priority=number)
    if number == turn.priority:
        return tuple(changed if waiting is turn else waiting for waiting in queue)
    return enqueue(remove(queue, turn.id), changed)


def leader(queue: Queue, ask: Ask) -> Turn | None:
    """Return the waiting turn that collects this ask.

    Its class, hold and options must equal those of the ask, and it must be its first attempt.
    """
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
        replace(waiting, joined=(*waiting.joined, ask))
        if isinstance(waiting, Turn) and waiting.id == id
        else waiting
        for waiting in queue
    )


def count(queue: Queue) -> int:
    """Count the waiting asks, including collected ones. Holds have another limit."""
    return sum(len(waiting.asks) for waiting in queue if isinstance(waiting, Turn))


def dispensable(queue: Queue, priority: int) -> Turn | None:
    """Return the turn to drop from a full queue: the last of the lowest class below `priority`."""
    below = [
        waiting for waiting in queue if isinstance(waiting, Turn) and waiting.priority < priority
    ]
    lowest = min((turn.priority for turn in below), default=None)
    return next((turn for turn in reversed(below) if turn.priority == lowest), None)


def restart_waits(queue: Queue, at: float, wall: float) -> Queue:
    """Let the queued asks wait since `at`, and place their deadlines on this clock.

    The log's times come from another clock, so the time that an ask has already waited is unknown.
    Its deadline is known, because the log has it in Unix time. `wall`: the Unix time at `at`.
    """

    def restarted(ask: Ask) -> Ask:
        due = None if ask.deadline is None else at + ask.deadline - wall
        return replace(ask, at=at, due=due)

    return tuple(
        replace(
            waiting,
            ask=restarted(waiting.ask),
            joined=tuple(restarted(ask) for ask in waiting.joined),
        )
        if isinstance(waiting, Turn) and waiting.ask
        else waiting
        for waiting in queue
    )
