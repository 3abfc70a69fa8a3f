"""Recovery of a session whose host died, at every event, and its continuation by the next host.

The ledger reads the log independently (see ledger.py), so two readers agree about which prompts were sent.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from tests.core.session import exploration, histories, ledger
from tests.core.session.histories import Told, history
from tests.core.session.ledger import Ledger
from tests.core.session.scenarios import FIRST, HELD, LOW, MERGING, PATIENT, SECOND, STEER, URGENT, USUAL, ask, scenario
from tests.core.session.talk import Talk
from tests.thorough import one_in, thorough

from banksman.core.dialects.meaning import ProviderFailure, TurnOver, UsageReported
from banksman.core.dialects.tokens import Tokens
from banksman.core.session import crash_recovery, questions
from banksman.core.session import event as kinds
from banksman.core.session import history as pasts
from banksman.core.session.ask_queue import BACKGROUND, INTERACTIVE, NORMAL
from banksman.core.session.effects import Append
from banksman.core.session.event import Entry
from banksman.core.session.facts import AskWithdrawn, Begun
from banksman.core.session.history import SessionHistory
from banksman.core.session.outcome import Kind, outcome_of
from banksman.core.session.state import Mode, ProcessPhase, Session
from banksman.core.session.turn import Turn
from banksman.core.wire.elided_text import REDACTED
from banksman.errors import ErrorKind

# Maximum of steps of the next host for the whole queue: a start, a turn and an exit for each ask.
STEPS_MAX = 100


def body(entry: Entry) -> dict[str, Any]:
    return msgspec.json.decode(entry[2])


def read(found: Ledger, entries: Iterable[Entry], *, is_strict: bool = False) -> Ledger:
    """`is_strict`: no ask may be served before a more urgent or an older one, for any reason."""
    for entry in entries:
        found = ledger.fold(found, entry, lambda granted, other: not is_strict)
    return found


def asks(past: SessionHistory) -> list[tuple[str, int]]:
    """Return the waiting asks in order, each with its attempt."""
    return [(ask.id, turn.attempt) for turn in past.session.queue if isinstance(turn, Turn) for ask in turn.asks]


def savers(past: SessionHistory) -> set[str]:
    """Return the asks that only tell a process to save: they end with that process."""
    return {turn.id for turn in past.session.queue if isinstance(turn, Turn) and turn.ask and turn.ask.is_last}


# -- the log ends at any event -----------------------------------------------------------------------------------------
def check_settled(past: SessionHistory, before: Ledger) -> list[Entry]:
    """Settle a session, check the settling entries, and return them."""
    settled = crash_recovery.settle(past)
    after = pasts.fold(past, settled)
    # Questions that were kept before stay kept, and the one about a budget needs no process.
    stay = tuple(each for each in past.questions if each.is_kept or questions.is_about_budget(each))
    assert after.questions == stay
    assert (after.session.turn, after.session.own) == (None, None)
    assert after.session.process.tasks == ()
    # The queue is unchanged, except for asks to save: their process is gone.
    saving = savers(past)
    assert after.session.queue == tuple(turn for turn in past.session.queue if turn.id not in saving)
    # An append is atomic, so a turn that one of its asks has counted is over in every real log.
    told = read(replace(before, is_counted=False), settled)
    assert told.waiting == tuple(waiting for waiting in before.waiting if waiting.id not in saving)
    assert (told.turn, told.own) == ((), None)
    # Every begun turn gets exactly one end, with outcome UNKNOWN. No other turn ends.
    withdrawn = [entry for entry in settled if entry[1] == kinds.TURN_ENDED and entry[0] in saving]
    assert [outcome_of(body(entry)).kind for entry in withdrawn] == [Kind.WITHDRAWN] * len(saving)
    ended = [entry for entry in settled if entry[1] == kinds.TURN_ENDED and entry not in withdrawn]
    begun = {*(member.id for member in before.turn), *(() if before.own is None else (before.own,))}
    assert sorted(id or "" for id, _, _ in ended) == sorted(begun)
    assert all(outcome_of(body(entry)).kind is Kind.UNKNOWN for entry in ended)
    assert told.open == before.open - begun - saving
    # Each question is answered once, before the end of its turn.
    answered = [(body(entry)["question"], entry[0]) for entry in settled if entry[1] == kinds.QUESTION_ANSWERED]
    assert answered == [(question.id, question.turn) for question in past.questions if question not in stay]
    assert all(turn is None or turn in begun for _, turn in answered)
    kinds_in_order = [kind for _, kind, _ in settled]
    assert kinds_in_order == [
        *[kinds.QUESTION_ANSWERED] * len(answered),
        *[kinds.TURN_ENDED] * len(withdrawn + ended),
        *[kinds.TASKS_CHANGED] * bool(past.session.process.tasks),
        *[kinds.SESSION_RECOVERED] * bool(settled),
    ]
    if settled:
        recovered = body(settled[-1])
        assert sorted(recovered["unknown"]) == sorted(begun)
        assert recovered["queued"] == [id for id, _ in asks(past) if id not in saving]
    # The known cost stays, and so does the total of the conversation.
    assert after.session.cost == past.session.cost
    assert after.session.spent == past.session.spent
    # Settling is idempotent.
    assert crash_recovery.settle(after) == []
    if past.session.mode is Mode.CLOSED:
        assert settled == []
    return settled


@pytest.mark.parametrize("name", one_in(8, histories.NAMES))
def test_log_cut_anywhere_leaves_begun_turns_unknown_and_others_queued(name: str) -> None:
    one = history(name)
    past, before = pasts.beginning(one.config), Ledger()
    check_settled(past, before)
    for entry in one.entries:
        past, before = pasts.fold(past, (entry,)), read(before, (entry,))
        # Recovery usually reads a snapshot: the result is the same.
        assert check_settled(past, before) == check_settled(pasts.decode(pasts.encode(past), one.config), before)


def test_settle_logs_swept_processes_without_open_turns() -> None:
    past = pasts.beginning(histories.TELLING)
    [recovered] = crash_recovery.settle(past, swept=["sleep 60"])
    assert recovered[1] == kinds.SESSION_RECOVERED
    assert body(recovered) == {"unknown": [], "queued": [], "swept": ["sleep 60"]}
    assert crash_recovery.settle(past) == []


def test_settle_answers_question_of_ended_turn_outside_any_turn() -> None:
    """The question belongs to a background task. An event of an ended turn would come after the end of that turn."""
    one = history("asked and added")
    settled = check_settled(pasts.fold(pasts.beginning(one.config), one.entries), read(Ledger(), one.entries))
    asked = [body(entry) for entry in one.entries if entry[1] == kinds.QUESTION_ASKED]
    requests = {said["question"]: said["request"] for said in asked}
    answered = {requests[body(entry)["question"]]: entry[0] for entry in settled if entry[1] == kinds.QUESTION_ANSWERED}
    assert answered == {"q1": None, "q2": None, "q3": "s"}


def test_settle_refuses_redacted_ask_and_keeps_others_queued() -> None:
    """The log does not store the secret, and the rest of the prompt is not the caller's prompt."""
    talk = histories.open_talk()
    talk.serve(ask("a", NORMAL), spent=1.5, cost=1.0)
    talk.ask(ask("b", NORMAL))
    for name in ("c", "d", "e"):
        talk.ask(ask(name, NORMAL, on_busy="collect"))
    talk.ask(ask("f", NORMAL))
    entries = [entry for append in talk.appends for entry in append]
    secrets = {"c": f'"prompt":"it is {REDACTED}"', "f": f'"prompt":[{{"type":"text","text":"{REDACTED}"}}]'}
    redacted = [
        (id, kind, data.replace(f'"prompt":"{id}"'.encode(), secrets[id].encode()) if id in secrets else data)
        for id, kind, data in entries
    ]
    past = pasts.fold(pasts.beginning(talk.state.config), redacted)
    settled = crash_recovery.settle(past)
    outcomes = {id: Kind(body((id, kind, data))["outcome"]) for id, kind, data in settled if kind == kinds.TURN_ENDED}
    assert outcomes == {"c": Kind.REFUSED, "f": Kind.REFUSED, "b": Kind.UNKNOWN}
    after = pasts.fold(past, settled)
    assert asks(after) == [("d", 1), ("e", 1)]
    assert body(settled[-1])["queued"] == ["d", "e"]
    assert (after.session.spent, after.session.cost) == (1.5, 1.0)
    assert crash_recovery.settle(after) == []


@pytest.mark.parametrize(
    ("before", "told", "after"), [(0.0, None, 0.0), (1.5, None, 1.5), (1.5, 1.75, 1.75), (None, 2.0, None)]
)
def test_settle_keeps_known_total_of_conversation(
    before: float | None, told: float | None, after: float | None
) -> None:
    """The next turn costs the growth of the total since then. Usage that is already in the log is not counted again."""
    talk = Talk(state=Session(config=histories.TELLING, conversation="one", spent=before))
    talk.ask(ask("a", NORMAL))
    talk.begin()
    talk.opens("a0000")
    talk.mean(UsageReported(spent=told))
    past = pasts.beginning(talk.state.config)
    past = replace(past, session=replace(past.session, spent=before))
    appends = [effect for effect in talk.effects if isinstance(effect, Append)]
    past = pasts.fold(past, [entry for append in appends for entry in append.entries])
    assert pasts.fold(past, crash_recovery.settle(past)).session.spent == after


def folded(talk: Told) -> SessionHistory:
    """Return the history of a host that died now, settled by the next one."""
    past = pasts.beginning(talk.state.config)
    for append in talk.appends:
        past = pasts.fold(past, append)
    return pasts.fold(past, crash_recovery.settle(past))


@pytest.mark.parametrize("reason", ["preempted", "limited"])
def test_cost_of_requeued_turn_is_counted_once_after_crash(reason: str) -> None:
    talk = Told(config=replace(histories.TELLING, on_limit="wait"))
    talk.serve(ask("a", NORMAL), spent=4.0)
    talk.ask(ask("b", BACKGROUND, on_preempt="requeue"))
    talk.opens("b0000")
    if reason == "preempted":
        talk.ask(ask("u", INTERACTIVE))
        talk.hear(b"ok interrupt-b#1-1")
        talk.mean(TurnOver(("b0000",), is_aborted=True, spent=6.0))
    else:
        limit = ProviderFailure(ErrorKind.USAGE_LIMIT, limited_until=900.0)
        talk.mean(TurnOver(("b0000",), is_error=True, error="no", failure=limit, spent=6.0))
    talk.hear(b"settled b0000")
    assert "b" in [turn.id for turn in talk.state.queue]
    session = folded(talk).session
    assert (session.spent, session.cost, session.used.usd) == (6.0, 6.0, 6.0)


def test_settle_adds_no_cost_that_end_of_steered_ask_has() -> None:
    talk = Told()
    talk.serve(ask("a", NORMAL), spent=4.0)
    talk.ask(ask("b", NORMAL))
    talk.opens("b0000")
    talk.ask(STEER)
    talk.hear(f"taken {STEER.ref}".encode())
    talk.mean(TurnOver((STEER.ref,), spent=5.0))
    talk.wait(0.6)
    assert STEER.id in talk.kinds
    talk.mean(UsageReported("c1", Tokens(5)))
    session = folded(talk).session
    assert (session.spent, session.used.usd) == (5.0, 5.0)


@pytest.mark.parametrize("next_event", ["withdrawn", "exit", "crash"])
def test_reported_cost_of_open_turn_is_counted_once(next_event: str) -> None:
    talk = Told()
    talk.serve(ask("a", NORMAL), spent=4.0)
    talk.ask(ask("b", NORMAL))
    talk.opens("b0000")
    talk.mean(UsageReported(spent=4.5))
    if next_event == "withdrawn":
        talk.ask(ask("c", NORMAL))
        talk.tell(AskWithdrawn(talk.at, "c"))
    elif next_event == "exit":
        talk.die(code=1)
    session = folded(talk).session
    assert (session.spent, session.used.usd) == (4.5, 4.5)
    if next_event == "exit":
        talk.ask(ask("d", NORMAL))
        talk.wait(60)
        talk.begin()
        talk.over("d0000", spent=5.0)
        assert talk.state.used.usd == 5.0


# -- the next host ---------------------------------------------------------------------------------------------------
def go_on(past: SessionHistory) -> Told:
    """Start another host from the log, with an agent that does its work, until the queue is empty."""
    talk = Told(past)
    talk.tell(Begun(0.0))
    for _ in range(STEPS_MAX):
        session = talk.state
        match session.process.phase:
            case ProcessPhase.STARTING:
                talk.begin()
            case ProcessPhase.STOPPING:
                talk.die(signal=15)
            case _ if session.turn is not None:
                talk.over(session.turn.ref)
            case _:
                break
    assert not talk.state.queue
    assert talk.state.turn is None
    return talk


def same_place(past: SessionHistory) -> SessionHistory:
    """Ignore the number of events."""
    return replace(past, session=replace(past.session, head=0, committed=0))


@pytest.mark.parametrize("name", one_in(8, histories.TOYS))
def test_next_host_serves_queue_in_order_and_once(name: str) -> None:
    one = history(name)
    before, last = Ledger(), None
    for number, past in one.borders():
        before = read(before, one.appends[number - 1] if number else ())
        if past.session.mode is Mode.CLOSED:
            continue
        settled = crash_recovery.settle(past)
        found = pasts.fold(past, settled)
        if same_place(found) == last:
            continue  # Only frames were added since.
        last = same_place(found)
        talk = go_on(found)
        # Each waiting ask has one outcome. A begun turn has no outcome from this host.
        waited = [ask for ask, _ in asks(found)]
        assert sorted(talk.outcomes) == sorted(waited)
        # In the combined log of both hosts, each ask ends once, and no ask was overtaken.
        after = read(read(before, settled), (entry for append in talk.appends for entry in append), is_strict=True)
        assert after.open == frozenset()
        assert after.ended == before.queued
        by_class = sorted(found.session.queue, key=lambda turn: -turn.priority)
        served = [entry[0] for append in talk.appends for entry in append if entry[1] == kinds.TURN_STARTED]
        assert served == [turn.id for turn in by_class]
        # Nothing that was settled comes back in the continued log. Only a question about the budget may be open.
        if talk.state.budget_question is not None:
            continue
        assert crash_recovery.settle(pasts.fold(found, [entry for append in talk.appends for entry in append])) == []


# The host dies at any moment. `exploration._crash` settles the session and checks the remaining queue.
CRASHES = {
    each.name: each
    for each in (
        scenario("two asks", LOW, PATIENT, crash=1, interrupt=1),
        scenario("two crashes", PATIENT, URGENT, crash=2),
        scenario("a log that takes its time", LOW, PATIENT, lazy="log", crash=1),
        scenario("a log that fails", PATIENT, lazy="log", fail=1, crash=1),
        scenario("steered", USUAL, STEER, lazy="log", crash=1),
        scenario("steered, merged", PATIENT, STEER, manners=MERGING, lazy="log", crash=1),
        scenario("collected", FIRST, SECOND, withdraw=1, crash=1),
        scenario("an own turn", PATIENT, own=1, lazy="log", crash=1),
        scenario("two own turns", LOW, own=2, crash=2),
        scenario("a question", LOW, question=1, crash=1, exit=1),
        scenario("a late answer", LOW, USUAL, question=2, crash=1, late=1),
        scenario("a question and a log that fails", LOW, lazy="log", question=1, fail=1, crash=1, close=1),
        scenario("a hold", HELD, LOW, holds=(("hold", NORMAL),), crash=1),
        scenario("another model", USUAL, setting=1, lazy="log", crash=1),
        scenario("one is moved", USUAL, PATIENT, move=1, crash=1),
        scenario("a close", PATIENT, lazy="log pipe start", close=1, crash=1),
        scenario("a process that exits", LOW, PATIENT, lazy="start", exit=1, crash=1),
    )
}


# Small scenarios, for `make test`. The others take seconds each.
SMALL = ("a log that fails", "an own turn", "a question")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in SMALL else thorough) for name in CRASHES])
def test_host_crash_at_any_point_keeps_every_guarantee(name: str) -> None:
    found = exploration.assert_holds(CRASHES[name])
    assert found.is_whole
    assert found.terminals > 0
