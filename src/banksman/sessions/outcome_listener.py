"""Interface from the driver to callers: one method for each effect that callers get.

The effects are results of asks, interrupts, holds and settings, questions with their answers, and
callbacks. `tell` calls the method for an effect. `CallerFutures` implements the interface.
"""

from __future__ import annotations

from typing import assert_never

from banksman.core.session.effects import (
    Accept,
    AskHuman,
    AskToSave,
    CallBack,
    CallOnLimit,
    CloseCallback,
    CloseQuestion,
    EndHold,
    EndTerminals,
    GiveReceipt,
    GrantHold,
    LeaveInLog,
    Reject,
    Resolve,
    SettingTaken,
    TellAnswer,
)
from banksman.core.session.outcome import Outcome
from banksman.errors import BanksmanError

# Effects that are addressed to callers.
CallerEffect = (
    Accept
    | Reject
    | Resolve
    | LeaveInLog
    | GiveReceipt
    | GrantHold
    | EndHold
    | AskHuman
    | CloseQuestion
    | TellAnswer
    | CallBack
    | CloseCallback
    | EndTerminals
    | SettingTaken
    | AskToSave
    | CallOnLimit
)


class OutcomeListener:
    """Receives every caller effect of the driver. `CallerFutures` implements it."""

    def accept(self, turn: str) -> None: ...
    def reject(self, turn: str, error: BanksmanError) -> None: ...
    def resolve(self, turn: str, outcome: Outcome) -> None: ...
    def pass_on(self, turn: str) -> None: ...
    def give_receipt(self, effect: GiveReceipt) -> None: ...
    def grant_hold(self, hold: str) -> None: ...
    def end_hold(self, hold: str, error: BanksmanError | None) -> None: ...
    def ask_human(self, effect: AskHuman) -> None: ...
    def close_question(self, question: str) -> None: ...
    def tell_answer(self, effect: TellAnswer) -> None: ...
    def call_back(self, effect: CallBack) -> None: ...
    def close_callback(self, request: str) -> None: ...
    def end_terminals(self, effect: EndTerminals) -> None: ...
    def take_setting(self, change: str, error: BanksmanError | None) -> None: ...
    def ask_to_save(self, prompt: str) -> None: ...
    def call_on_limit(self, effect: CallOnLimit) -> None: ...
    def obstacle(self) -> str:
        """Return why the session cannot be handed over; empty if it can.

        The agent uses something that exists in this host only.
        """
        return ""

    def turns_after(self) -> dict[str, int]:
        """Return where the events of each accepted ask that is not over begin."""
        return {}

    def fail(self, error: BanksmanError) -> None: ...
    def finish(self) -> None: ...


def tell(listener: OutcomeListener, effect: CallerEffect) -> None:
    """Call the listener's method for an effect."""
    match effect:
        case Accept(turn=turn):
            listener.accept(turn)
        case Reject(turn=turn, error=error):
            listener.reject(turn, error)
        case Resolve(turn=turn, outcome=outcome):
            listener.resolve(turn, outcome)
        case LeaveInLog(turn=turn):
            listener.pass_on(turn)
        case GiveReceipt():
            listener.give_receipt(effect)
        case GrantHold() | EndHold():
            _tell_holder(listener, effect)
        case AskHuman():
            listener.ask_human(effect)
        case CloseQuestion(question=question):
            listener.close_question(question)
        case TellAnswer():
            listener.tell_answer(effect)
        case CallBack():
            listener.call_back(effect)
        case CloseCallback(request=request):
            listener.close_callback(request)
        case EndTerminals():
            listener.end_terminals(effect)
        case SettingTaken(change=change, error=error):
            listener.take_setting(change, error)
        case AskToSave(prompt=prompt):
            listener.ask_to_save(prompt)
        case CallOnLimit():
            listener.call_on_limit(effect)
        case _:
            assert_never(effect)


def _tell_holder(listener: OutcomeListener, effect: GrantHold | EndHold) -> None:
    if isinstance(effect, GrantHold):
        listener.grant_hold(effect.hold)
    else:
        listener.end_hold(effect.hold, effect.error)
