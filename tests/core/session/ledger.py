"""Independent reader of the log: it derives the state of all turns, and checks each entry.

It shares only the event names with `replay` and the scheduler, so that it does not repeat their mistakes. `Violation`
names the broken rule.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from msgspec.structs import replace

from banksman.core.session import event as kinds
from banksman.core.session.event import Entry


class Violation(AssertionError):
    """A broken guarantee, with the rule and a description."""

    def __init__(self, rule: str, message: str) -> None:
        super().__init__(f"{rule}: {message}")
        self.rule = rule


def check(is_so: object, rule: str, message: str) -> None:
    """Raise `Violation` if it is not so. Often reached checks with a long message raise it themselves instead."""
    if not is_so:
        raise Violation(rule, message)


class Waiting(msgspec.Struct, frozen=True):
    id: str
    priority: int
    # The ask into which this ask was collected.
    leader: str | None


class Ledger(msgspec.Struct, frozen=True):
    waiting: tuple[Waiting, ...] = ()
    # The asks of the open turn. The first one names the turn.
    turn: tuple[Waiting, ...] = ()
    own: str | None = None
    queued: frozenset[str] = frozenset()
    ended: frozenset[str] = frozenset()
    # Input tokens that were reported for each open turn, and whether an ask of the turn has counted its usage.
    used: tuple[tuple[str, int], ...] = ()
    is_counted: bool = False
    # Until when the account is limited.
    limited: float | None = None
    # All input tokens and turns that were ever counted.
    spent: tuple[int, int] = (0, 0)
    # The same for the other agents of the session.
    parked: tuple[tuple[str, float | None], ...] = ()
    serving: str = ""
    # The highest class that each edited ask has got.
    classes: tuple[tuple[str, int], ...] = ()
    # Input tokens whose events the log had lost. They were logged again, without their turn.
    lost: int = 0

    @property
    def open(self) -> frozenset[str]:
        return self.queued - self.ended


# Whether the first ask may be granted before the second if the priority class does not decide: holds and open windows.
MayPass = Callable[[str, str], bool]


def fold(ledger: Ledger, entry: Entry, may_pass: MayPass) -> Ledger:
    """Return the ledger after one more entry."""
    id, kind, data = entry
    if kind == kinds.UPDATE:
        return ledger
    if kind == kinds.SENT:
        if data.startswith(b"P") and (not ledger.turn or ledger.turn[0].id != id):
            raise Violation("log", f"a prompt is sent outside its turn: {entry}")
        return ledger
    if kind == kinds.SESSION_IMPORTED:
        # Turns that were open or waiting are served by the session that the log was imported from.
        return replace(ledger, waiting=(), turn=(), own=None, ended=ledger.queued)
    if kind == kinds.LIMITS_CHANGED:
        told = msgspec.json.decode(data)
        if told["agent"] is None:
            return replace(ledger, limited=told["limited_until"])
        return replace(ledger, parked=_sorted({**dict(ledger.parked), told["agent"]: told["limited_until"]}))
    if kind == kinds.SESSION_FELL_BACK:
        return _change_agent(ledger, msgspec.json.decode(data))
    if not kind.startswith(("turn.", "queue.", "usage.")):
        return ledger
    body: dict[str, Any] = msgspec.json.decode(data)
    ledger = _spend(replace(ledger, limited=_limited(ledger, kind, body)), body)
    if kind == kinds.USAGE_REPORTED and id is None:
        return replace(ledger, lost=ledger.lost + body["added"]["tokens"]["input"])
    assert id is not None
    match kind:
        case kinds.TURN_QUEUED:
            check(id not in ledger.queued, "log", f"{id} was queued twice")
            waiting = Waiting(id, body["priority"], body.get("into"))
            return replace(ledger, waiting=(*ledger.waiting, waiting), queued=ledger.queued | {id})
        case kinds.TURN_STARTED:
            return _start(ledger, id, body, may_pass)
        case kinds.USAGE_REPORTED:
            used = dict(ledger.used)
            used[id] = used.get(id, 0) + body["added"]["tokens"]["input"]
            missing = body["used"]["tokens"]["input"] - used[id]
            check(0 <= missing <= ledger.lost, "usage", f"{used[id]} were added: {body}")
            return replace(ledger, used=tuple(used.items()))
        case kinds.TURN_REQUEUED:
            check(any(member.id == id for member in ledger.turn), "log", f"{id} is requeued and was not granted")
            if ledger.turn[0].id != id:
                # The ask was to be added to the turn, and was not sent before its end. It is an ordinary ask again.
                unsent = tuple(member for member in ledger.turn if member.id == id)
                rest = tuple(member for member in ledger.turn if member.id != id)
                return replace(ledger, turn=rest, waiting=_at_head_of_class(ledger.waiting, unsent))
            ledger = replace(_count(ledger, id, body), is_counted=False)
            # Prompts that were added to it stay with the agent.
            added = tuple(member for member in ledger.turn[1:] if member.leader != id)
            group = tuple(member for member in ledger.turn if member not in added)
            return replace(ledger, turn=added, waiting=_at_head_of_class(ledger.waiting, group))
        case kinds.TURN_ENDED:
            after = _end(_count(ledger, id, body), id)
            return after if after.turn or after.own else replace(after, is_counted=False)
        case kinds.TURN_EDITED:
            (edited,) = (waiting for waiting in ledger.waiting if waiting.id == id)
            priority = body["priority"]
            if priority in (None, edited.priority):
                return ledger
            check(edited.leader is None, "log", f"{id} shares a turn, and gets another priority")
            rest = tuple(waiting for waiting in ledger.waiting if waiting.id != id)
            classes = dict(ledger.classes)
            classes[id] = max(priority, classes.get(id, priority))
            waiting = (*rest, replace(edited, priority=priority))
            return replace(ledger, waiting=waiting, classes=tuple(classes.items()))
        case kinds.QUEUE_CHANGED:
            check(body["before"] is None, "log", "nobody asks for another place than the first")
            moved = tuple(waiting for waiting in ledger.waiting if waiting.id == id)
            rest = tuple(waiting for waiting in ledger.waiting if waiting.id != id)
            return replace(ledger, waiting=_at_head_of_class(rest, moved))
        case _:
            return ledger


def _change_agent(ledger: Ledger, body: dict[str, Any]) -> Ledger:
    serving = ledger.serving or body["from"]
    if body["to"] == serving:
        return ledger
    limits = {**dict(ledger.parked), serving: ledger.limited}
    limited = limits.pop(body["to"], None)
    return replace(ledger, serving=body["to"], limited=limited, parked=_sorted(limits))


def _sorted(limits: dict[str, float | None]) -> tuple[tuple[str, float | None], ...]:
    return tuple(sorted(limits.items()))


def _limited(ledger: Ledger, kind: str, body: dict[str, Any]) -> float | None:
    """Until when the account is limited after this entry. An answer of the provider ends a limit."""
    if kind == kinds.TURN_ENDED and body["outcome"] == "done":
        return None
    told = (body.get("failure") or body).get("limited_until")
    return ledger.limited if told is None else told


def _spend(ledger: Ledger, body: dict[str, Any]) -> Ledger:
    added = body.get("added")
    if added is None:
        return ledger
    tokens, turns = ledger.spent
    return replace(ledger, spent=(tokens + added["tokens"]["input"], turns + added["turns"]))


def _count(ledger: Ledger, id: str, body: dict[str, Any]) -> Ledger:
    """Check that the end of a turn adds what its reports have not added, and that only one of its asks does."""
    added = body.get("added")
    if added is None:
        return ledger
    if ledger.own != id:
        check(not ledger.is_counted, "usage", f"{id} counts its turn again")
        ledger = replace(ledger, is_counted=True)
    used = dict(ledger.used)
    total = used.pop(id, 0) + added["tokens"]["input"]
    check(added["turns"] == 1, "usage", f"{id} counts {added['turns']} turns")
    if "used" in body:
        check(total == body["used"]["tokens"]["input"], "usage", f"{total} were added to {id}: {body['used']}")
    return replace(ledger, used=tuple(used.items()))


def _start(ledger: Ledger, id: str, body: dict[str, Any], may_pass: MayPass) -> Ledger:
    if "origin" in body:
        check(ledger.own is None, "log", f"{id} began in the middle of {ledger.own}")
        return replace(ledger, own=id)
    if any(member.id == id for member in ledger.turn):
        # The ask was added to a turn that has ended, and now has a separate turn.
        first = next(member for member in ledger.turn if member.id == id)
        rest = tuple(member for member in ledger.turn if member.id != id)
        return replace(ledger, turn=(first, *rest), is_counted=False)
    check(id in ledger.open, "log", f"{id} began and was not waiting")
    group = tuple(waiting for waiting in ledger.waiting if id in (waiting.id, waiting.leader))
    rest = tuple(waiting for waiting in ledger.waiting if waiting not in group)
    if "into" in body:
        check(bool(ledger.turn), "G1", f"{id} was added to no turn")
        return replace(ledger, waiting=rest, turn=(*ledger.turn, *group))
    check(not ledger.turn, "G1", f"{id} began in the middle of {ledger.turn}")
    _check_order(ledger, group[0], may_pass)
    return replace(ledger, waiting=rest, turn=group)


def _check_order(ledger: Ledger, granted: Waiting, may_pass: MayPass) -> None:
    is_before = True
    for other in ledger.waiting:
        if other.id == granted.id:
            is_before = False
        elif other.leader is None and not may_pass(granted.id, other.id):
            check(other.priority <= granted.priority, "G5", f"{granted.id} was granted before the more urgent {other}")
            is_overtaken = is_before and other.priority == granted.priority
            check(not is_overtaken, "G5", f"{granted.id} was granted before {other}, who was there first")


def _at_head_of_class(waiting: tuple[Waiting, ...], group: tuple[Waiting, ...]) -> tuple[Waiting, ...]:
    first = group[0]
    index = next((i for i, other in enumerate(waiting) if other.priority == first.priority), len(waiting))
    return (*waiting[:index], *group, *waiting[index:])


def _end(ledger: Ledger, id: str) -> Ledger:
    if ledger.own == id:
        return replace(ledger, own=None)
    check(id in ledger.queued, "log", f"{id} ended and was never queued")
    check(id not in ledger.ended, "log", f"{id} ended twice")
    led = [waiting for waiting in ledger.waiting if waiting.leader == id]
    # Collected asks keep the place of the first ask, and the next ask leads them.
    heirs = [replace(other, leader=led[0].id if other is not led[0] else None) for other in led]
    waiting = tuple(
        kept for other in ledger.waiting if other not in led for kept in (heirs if other.id == id else [other])
    )
    turn = tuple(member for member in ledger.turn if member.id != id)
    return replace(ledger, waiting=waiting, turn=turn, ended=ledger.ended | {id})
