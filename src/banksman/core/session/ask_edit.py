"""Change the prompt or the class of a queued ask.

An ask can be edited until its first grant. Afterwards the agent may have its prompt, and a requeued
turn repeats that one.
"""

from __future__ import annotations

from banksman.core.session import ask_queue
from banksman.core.session import event as kinds
from banksman.core.session.effects import SettingTaken
from banksman.core.session.facts import AskEdited
from banksman.core.session.state import Mode, Session, Store, not_open
from banksman.core.session.transition import Transition
from banksman.errors import BanksmanError, Refused


def edit(work: Transition, fact: AskEdited) -> None:
    """Edit a queued ask and log the change, or refuse it."""
    refusal = _refusal(work.state, fact)
    if refusal is not None:
        work.do(SettingTaken(fact.change, refusal))
        return
    work.set(queue=ask_queue.edit(work.state.queue, fact.turn, fact.prompt, fact.priority))
    told = {"prompt": fact.prompt, "priority": fact.priority, "caller": fact.caller}
    work.log(fact.turn, kinds.TURN_EDITED, **told)
    work.after_commit(SettingTaken(fact.change))


def _refusal(state: Session, fact: AskEdited) -> BanksmanError | None:
    if state.store is not Store.WORKING:
        return state.store_error
    # The next owner of a session that leaves has its queue as the log has it now.
    if state.mode is not Mode.OPEN:
        return not_open(state, turn=fact.turn)
    message = f"cannot edit turn {fact.turn}"
    turn = ask_queue.find(state.queue, fact.turn)
    if turn is None or turn.attempt > 1:
        why = "it is not queued" if turn is None else "the agent may have its prompt"
        return Refused(f"{message}: {why}", hint="interrupt it, and ask again", turn=fact.turn)
    is_of_hold = any(ask.hold is not None for ask in turn.asks)
    if fact.priority is not None and (is_of_hold or len(turn.asks) > 1):
        why = "its hold has the priority" if is_of_hold else "other asks share its turn"
        hint = "leave its priority, or interrupt it and ask again"
        return Refused(f"{message}: {why}", hint=hint, turn=fact.turn)
    return None
