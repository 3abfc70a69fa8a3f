"""A planned restart at every point of every explored world: what it may change, and what it must not.

Each state that the exploration finds is handed over on trial, whatever its scenario is about. What the next host gets
must be that state. Then everything that the exploration finds from there on holds for the next host too, without a
second scenario for each world. Only the fields in `CHANGES` differ: the scenarios "a hand-over, …" go on with those.
"""

from __future__ import annotations

import msgspec
from msgspec.structs import replace
from tests.core.session.ledger import check

from banksman.core.session import event as kinds
from banksman.core.session import live_state
from banksman.core.session.ask_queue import Queue
from banksman.core.session.effects import (
    Append,
    AskHuman,
    CancelTimer,
    Effect,
    EndHold,
    Finish,
    GiveReceipt,
    HandOver,
    LeaveInLog,
    StartTimer,
)
from banksman.core.session.facts import HandedOver, HandOverAsked, Timer
from banksman.core.session.hand_over import may_hand_over
from banksman.core.session.state import Mode, Session, Store
from banksman.core.session.step import step
from banksman.core.session.turn import Turn, TurnPhase

AT, BY = 0.0, 1.0
# What a hand-over ends: holds of callers, and the collecting of asks. A turn that was granted and not sent waits again,
# and the log says so.
CHANGES = frozenset(("hold", "queue", "collecting", "turn", "own", "head", "committed"))
# A shared cap that is reached concerns a turn that waits again, so now it is logged, and asked about.
_OF_SHARED_CAPS = frozenset(("shared_told", "budget_question"))
_KINDS = frozenset((kinds.TURN_REQUEUED, kinds.BUDGET_EXCEEDED, kinds.QUESTION_ASKED))


def try_hand_over(session: Session) -> bool:
    """Hand this state over, and check what its next host gets. Return whether it can be handed over now."""
    if session.mode is not Mode.OPEN or session.store is not Store.WORKING:
        return False
    handing, effects = step(session, HandOverAsked(AT, BY))
    if handing.mode is not Mode.HANDING:
        return False  # It has no process that is ready, so it leaves.
    _check_quiet(session, effects)
    _check_same(session, live_state.frozen(handing))
    if not handing.is_handing:
        return False  # Something is owed here: `may_hand_over` waits for it.
    held = check_held(handing)
    _check_same(session, held)
    left, effects = step(handing, HandedOver(AT, handing.process.number, {"hold": "h", "host": 7, "until": 9.0}))
    _check_left(handing, left, effects)
    return True


def check_held(session: Session) -> Session:
    """Encode the state for the next host, as the driver does, and check that it gets exactly this state."""
    check(may_hand_over(session), "G9", "it is handed over, and owes something here")
    held = live_state.frozen(session)
    told = msgspec.json.encode(live_state.encode(held))
    decoded = live_state.decode(msgspec.json.decode(told), session.config)
    check(decoded == held, "G9", f"{held} was handed over, and {decoded} came")
    return decoded


def _is_capped(session: Session) -> bool:
    """Whether a turn waits again that a shared cap concerns."""
    turn = session.turn
    return bool(session.shared) and turn is not None and turn.phase is TurnPhase.STARTING


def _check_quiet(session: Session, effects: list[Effect]) -> None:
    """Check that the request ends nothing but holds: no turn, no question, no timer of them, no process."""
    for effect in effects:
        match effect:
            case EndHold() | HandOver() | StartTimer(subject=(Timer.LEAVE, _)) | CancelTimer(subject=(Timer.HOLD, _)):
                pass
            case Append(entries=entries):
                logged = {kind for _, kind, _ in entries}
                usual = {kinds.HOLD_ENDED, *(_KINDS if _is_capped(session) else {kinds.TURN_REQUEUED})}
                check(logged <= usual, "G9", f"a hand-over logs {logged}")
            case AskHuman() if _is_capped(session):
                pass
            case _:
                check(False, "G9", f"a hand-over does {effect}")


def _check_same(session: Session, held: Session) -> None:
    """Check that the next host gets the state in which the session was."""
    changes = CHANGES | _OF_SHARED_CAPS if _is_capped(session) else CHANGES
    for name in Session.__struct_fields__:
        if name in changes:
            continue
        before, after = getattr(session, name), getattr(held, name)
        check(before == after, "G9", f"handed over with {name} {after}, and it was {before}")
    has_hold = held.hold is not None or len(_turns(held.queue)) < len(held.queue)
    check(not has_hold and held.collecting == (), "G9", "a hold of a caller of the old host is handed over")
    check(_without_callers(session.own) == held.own, "G9", f"handed over with {held.own}, and it was {session.own}")
    turn, waiting = session.turn, _turns(held.queue)
    if turn is not None and turn.phase is TurnPhase.STARTING:
        again = [ask for other in waiting for ask in other.asks]
        check(held.turn is None and all(ask in again for ask in turn.asks), "G9", f"{turn} does not wait again")
        waiting = [other for other in waiting if other.id != turn.id]
    else:
        check(_without_callers(turn) == held.turn, "G9", f"handed over with {held.turn}, and it was {turn}")
    check(waiting == _turns(session.queue), "G9", f"handed over with {waiting} waiting, not {session.queue}")


def _check_left(handing: Session, left: Session, effects: list[Effect]) -> None:
    """Check what the log and the callers get from a session that has been handed over."""
    turns = [turn for turn in (handing.own, handing.turn) if turn is not None]
    opened, queued = [turn.id for turn in turns], [ask.id for turn in _turns(handing.queue) for ask in turn.asks]
    # The record has the timers of the state before.
    appends = [effect for effect in effects if isinstance(effect, Append)]
    check(all(isinstance(effect, Append | CancelTimer) for effect in effects), "G9", f"what has left does {effects}")
    ((_, kind, data),) = (entry for append in appends for entry in append.entries)
    body = msgspec.json.decode(data)
    said = (kind, body["open"], body["queued"])
    check(said == (kinds.SESSION_HANDED_OVER, opened, queued), "G9", f"{opened} are open, and the log says {said}")
    check(left.mode is Mode.LEFT, "G9", "handed over, and still here")
    owed = [effect for seq, effect in left.deferred if seq == left.head]
    passed_on = [effect.turn for effect in owed if isinstance(effect, LeaveInLog)]
    asks = [ask.id for turn in turns for ask in turn.asks]
    check(passed_on == [*asks, *queued], "G9", f"{asks} and {queued} go on, and callers hear of {passed_on}")
    receipts = [effect.interrupt for effect in owed if isinstance(effect, GiveReceipt)]
    waited = [interrupt for turn in turns for interrupt in turn.interrupts]
    check(receipts == waited, "G9", f"{waited} wait for a receipt, and {receipts} get one")
    check(owed[-1] == Finish(), "G9", "handed over, and never finished")


def _without_callers(turn: Turn | None) -> Turn | None:
    return None if turn is None else replace(turn, interrupts=())


def _turns(queue: Queue) -> list[Turn]:
    return [waiting for waiting in queue if isinstance(waiting, Turn)]
