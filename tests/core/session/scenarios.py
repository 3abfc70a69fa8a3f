"""Scenarios for the exploration of a session: its asks, the agent's behaviour, and the possible faults.

Each scenario varies a few things and keeps the rest fixed, so that it can be explored completely. An *eager* part acts
before everything else: the log (each append is durable immediately), the pipe (each frame is written immediately), the
start (a process is ready immediately).
"""

from __future__ import annotations

from typing import Any

from tests.core.session.exploration import Scenario
from tests.core.session.exploration_budgets import FULL_OF_ALICE, NO_TURN_LEFT
from tests.core.session.toy import Manners

from banksman.core.session.ask_queue import BACKGROUND, INTERACTIVE, NORMAL
from banksman.core.session.budget import Budget
from banksman.core.session.turn import Ask


def ask(id: str, priority: int, **others: Any) -> Ask:
    return Ask(id=id, ref=f"{id}0000", prompt=id, priority=priority, **others)


LOW = ask("low", BACKGROUND)
ALSO_LOW = ask("also", BACKGROUND)
USUAL = ask("usual", NORMAL)
PATIENT = ask("patient", NORMAL, on_preempt="requeue")
URGENT = ask("urgent", INTERACTIVE)
STEER = ask("steer", NORMAL, on_busy="steer")
FIRST, SECOND = (ask(id, NORMAL, on_busy="collect") for id in ("first", "second"))
HELD = ask("held", NORMAL, hold="hold")
PUSHY = ask("pushy", NORMAL, on_busy="interrupt")
SHY = ask("shy", INTERACTIVE, on_busy="reject")
EXACT = ask("exact", NORMAL, schema={"type": "object"})
LAST = ask("last", NORMAL, is_last=True)
# The exploration fires their timers at any moment.
BOUND = ask("bound", NORMAL, on_preempt="requeue", deadline=1.0, due=1.0)
BOUND_STEER = ask("hasty", NORMAL, on_busy="steer", deadline=1.0, due=1.0)
BOUND_FIRST, BOUND_SECOND = (ask(id, NORMAL, on_busy="collect", deadline=1.0, due=1.0) for id in ("bf", "bs"))

ALICE = ask("alice", NORMAL, caller="alice")
ALICE_STEERS = ask("more", NORMAL, on_busy="steer", caller="alice")
BOB = ask("bob", INTERACTIVE, caller="bob")

ALL = frozenset(("log", "pipe", "start"))
NAMELESS = Manners(names=False, labels=True, ends=("over",))
SILENT = Manners(names=False, announces=False, ends=("over",))
WORDY = Manners(begins=True, ends=("over", "over,settled", "settled,over", "over+settled"))
SLOW = Manners(ends=("over,settled",))
MERGING = Manners(merges=True, ends=("over,settled",))


def scenario(name: str, *asks: Ask, lazy: str = "", config: dict[str, Any] | None = None, **others: Any) -> Scenario:
    """Make a scenario.

    `lazy`: the parts that are not eager. Integers in `others` are budgets; the rest are scenario fields.
    """
    budget = {name: value for name, value in others.items() if type(value) is int}
    rest = {name: value for name, value in others.items() if type(value) is not int}
    return Scenario(name=name, asks=asks, eager=ALL - set(lazy.split()), budget=budget, config=config or {}, **rest)


_CLOCK = {"clocks": {"overall": 0.0}}
_TOOLS = {"leaves_tools": True}
_QUIET = {"quiet_seconds": 0.1}
_IDLE = {"idle_seconds": 0.0}
_WAIT = {"on_limit": "wait"}
_TWO = ("one", "two")
_CALL = {"on_limit": "call"}
_SHARED = {"shares_budget": True}
_ON_ASK = {"on_budget": "ask"}
_ASKED = {"question_seconds": 0.0}


def _budget(on_budget: str, **caps: Any) -> dict[str, Any]:
    return {"budget": Budget(**caps), "on_budget": on_budget}


SCENARIOS = {
    each.name: each
    for each in (
        scenario("four asks", LOW, USUAL, PATIENT, URGENT),
        scenario("three asks", USUAL, PATIENT, URGENT),
        scenario("an interrupt and a withdrawal", LOW, USUAL, interrupt=1, withdraw=1),
        scenario("one is moved", LOW, USUAL, PATIENT, move=1),
        scenario("one is edited", LOW, PATIENT, edit=1, lazy="log", fail=1),
        scenario("one of several is edited", FIRST, SECOND, edit=2, crash=1),
        scenario("one in a hold is edited", HELD, LOW, holds=(("hold", NORMAL),), edit=1, leave=1),
        scenario("a log that takes its time", LOW, URGENT, lazy="log", withdraw=1),
        scenario("a log that fails", PATIENT, URGENT, lazy="log", fail=1),
        scenario("a log that fails twice", LOW, lazy="log", fail=2, interrupt=1, close=1),
        scenario("a log that is taken over", PATIENT, lazy="log", fenced=1, own=1, close=1),
        scenario("an own turn and a log that fails", USUAL, lazy="log", own=1, fail=1),
        scenario("a log that fails while collecting", FIRST, SECOND, lazy="log", fail=1),
        scenario("an own turn", LOW, URGENT, own=1, interrupt=1),
        scenario("two own turns", LOW, URGENT, own=2),
        scenario("a boundary twice", LOW, PATIENT, stray=1, own=1),
        scenario("a wordy agent", LOW, URGENT, manners=WORDY, own=1, merge=1),
        scenario("a wordy agent, interrupted", USUAL, manners=WORDY, stray=1, interrupt=1, own=1),
        scenario("no acknowledgement", LOW, PATIENT, URGENT, unacknowledged=1),
        scenario("no boundary", LOW, URGENT, missing=1, config=_CLOCK),
        scenario("an agent that errs", LOW, URGENT, manners=Manners(errs=True), interrupt=1),
        scenario("an exit", LOW, URGENT, lazy="start", exit=1, unstartable=1),
        scenario("an exit while the log takes its time", PATIENT, lazy="log start", exit=1, withdraw=1),
        scenario("a cut frame", LOW, URGENT, lazy="pipe", cut=1),
        scenario("a nameless agent", LOW, URGENT, manners=NAMELESS, own=1),
        scenario("a nameless agent, interrupted", LOW, PATIENT, manners=NAMELESS, interrupt=1),
        scenario("an agent that announces nothing", LOW, URGENT, manners=SILENT, interrupt=1, exit=1),
        scenario("an agent that acknowledges nothing", LOW, PATIENT, URGENT, acknowledges=False),
        scenario("a close", PATIENT, lazy="log pipe start", close=1, interrupt=1),
        scenario("a drain", LOW, PATIENT, drain=1, close=1, exit=1, own=1),
        scenario("a leave", PATIENT, lazy="log pipe start", leave=1, hurry=1),
        scenario("a leave among three", LOW, PATIENT, URGENT, leave=1, hurry=1),
        scenario("a leave, withdrawn from", LOW, USUAL, lazy="log", leave=1, withdraw=1),
        scenario("a leave, interrupted", USUAL, lazy="log", leave=1, hurry=1, interrupt=1),
        scenario("a leave, and a close", LOW, USUAL, lazy="log", leave=1, close=1, drain=1),
        scenario("a leave, and a log that fails", LOW, USUAL, lazy="log", leave=1, fail=1),
        scenario("a leave, and a log that fails twice", USUAL, lazy="log", hurry=1, leave=1, fail=2),
        scenario("a leave, and a log that is taken over", PATIENT, lazy="log", leave=1, fenced=1, own=1),
        scenario("a leave, and an exit", LOW, PATIENT, lazy="start", hurry=1, exit=1, unstartable=1),
        scenario("a leave, and a question", LOW, USUAL, hurry=1, question=1, exit=1),
        scenario("a leave, and an own turn", LOW, URGENT, hurry=1, own=1),
        scenario("a leave, and a drain", LOW, PATIENT, drain=1, hurry=1),
        scenario("a leave of holders", HELD, holds=(("hold", NORMAL), ("other", INTERACTIVE)), leave=1, release=1),
        scenario("a leave while collecting", FIRST, SECOND, lazy="log", leave=1, withdraw=1),
        scenario("a leave, steered", PATIENT, STEER, lazy="log", hurry=1, manners=SLOW),
        scenario("a leave, steered and merged", PATIENT, STEER, hurry=1, manners=MERGING),
        scenario("a leave, and another model", USUAL, lazy="log", hurry=1, setting=1, unanswered=1),
        scenario("a leave, and another configuration", LOW, URGENT, hurry=1, reconfigure=1),
        scenario("a leave, and tools that live on", USUAL, URGENT, hurry=1, config=_TOOLS),
        scenario("a leave, and who comes next", PATIENT, URGENT, lazy="log", leave=1, claim=1),
        scenario("a leave, late", LOW, USUAL, hurry=1, late=1),
        scenario("a hand-over", PATIENT, lazy="log pipe start", hand=1, claim=1),
        scenario("a hand-over among three", LOW, PATIENT, URGENT, hand=1, claim=1),
        scenario("a hand-over, interrupted", USUAL, lazy="log pipe", hand=1, interrupt=1, claim=1),
        scenario("a hand-over, withdrawn from", LOW, USUAL, lazy="log", hand=1, withdraw=1, claim=1),
        scenario("a hand-over, and a log that fails", LOW, USUAL, lazy="log", hand=1, fail=1, claim=1),
        scenario("a hand-over, and a log that is taken over", PATIENT, lazy="log", hand=1, fenced=1, own=1),
        scenario("a hand-over that fails", PATIENT, URGENT, hand=1, unhand=2, claim=1),
        scenario("a hand-over, and a question", LOW, USUAL, hand=1, question=1, exit=1, claim=1),
        scenario("a hand-over, and an own turn", LOW, URGENT, hand=1, own=1, claim=1),
        scenario("a hand-over, and another one", USUAL, URGENT, hand=2, claim=2),
        scenario("a hand-over, and a close", LOW, USUAL, hand=1, close=1, drain=1, claim=1),
        scenario("a hand-over, and a leave", LOW, USUAL, hand=1, hurry=1, claim=1),
        scenario("a hand-over, steered", PATIENT, STEER, lazy="log", hand=1, claim=1, manners=SLOW),
        scenario("a hand-over, and another model", USUAL, lazy="log", hand=1, setting=1, unanswered=1, claim=1),
        scenario("a hand-over, and tools that live on", USUAL, URGENT, hand=1, interrupt=1, claim=1, config=_TOOLS),
        scenario("a hand-over, and tasks in the background", USUAL, hand=1, task=2, claim=1),
        scenario("a hand-over, and a death of the next host", USUAL, LOW, hand=1, claim=1, crash=1),
        scenario("a hand-over of holders", HELD, LOW, holds=(("hold", NORMAL),), hand=1, release=1, claim=1),
        scenario("a hand-over, and a budget", USUAL, use=2, hand=1, claim=1, config=_budget("stop", tokens=5)),
        scenario("a hand-over, and a budget that asks", USUAL, use=1, hand=1, claim=1, config=_budget("ask", tokens=5)),
        scenario("a hand-over, and a shared budget", ALICE, reach=1, hand=1, claim=1, config={**_SHARED, **_ON_ASK}),
        scenario("a hand-over, and a wait", USUAL, limited=1, tool=1, hand=1, claim=1, config=_WAIT),
        scenario("a hand-over, and the account", LOW, URGENT, account=1, hand=1, claim=1, config=_WAIT),
        scenario("a hand-over, and a fall-back", USUAL, limited=1, tool=1, hand=1, claim=1, agents=_TWO),
        scenario("a hand-over, and a deadline", BOUND, USUAL, hand=1, claim=1),
        scenario("a hand-over, and a question with a time", USUAL, question=1, hand=1, claim=1, config=_ASKED),
        scenario("two holds", HELD, holds=(("hold", NORMAL), ("other", INTERACTIVE)), release=1),
        scenario("a hold and others", HELD, LOW, URGENT, holds=(("hold", NORMAL),)),
        scenario("a hold, closed", HELD, USUAL, holds=(("hold", NORMAL),), release=1, close=1),
        scenario("collected", FIRST, SECOND, URGENT, withdraw=1),
        scenario("steered", USUAL, STEER, lazy="pipe", exit=1),
        scenario("steered while the log takes its time", USUAL, STEER, lazy="log", withdraw=1),
        scenario("steered, interrupted", PATIENT, STEER, interrupt=1),
        scenario("steered, preempted", PATIENT, STEER, URGENT, manners=SLOW),
        scenario("steered, merged", PATIENT, STEER, URGENT, manners=MERGING),
        scenario("a question", LOW, URGENT, question=1, exit=1),
        # The toy uses the same request id for each question, in every process.
        scenario("a late answer", LOW, USUAL, question=2, exit=1, late=1),
        scenario("a late answer, and a log that fails", USUAL, lazy="log", question=2, fail=1, late=1),
        scenario("late facts", PATIENT, URGENT, late=1),
        scenario("a limit", USUAL, PATIENT, lazy="log", limit=2, exit=1),
        scenario("a limit and a log that fails", USUAL, lazy="log", limit=2, fail=1),
        scenario("late facts of a process", LOW, USUAL, late=1, exit=1),
        scenario("late facts of a slow agent", USUAL, LOW, late=1, manners=SLOW),
        scenario("who interrupts and who is refused", USUAL, PUSHY, SHY),
        scenario("an idle process", LOW, URGENT, lazy="start", interrupt=1, config=_IDLE),
        scenario("late facts of an idle process", LOW, USUAL, late=1, config=_IDLE),
        scenario("an idle process, closed", USUAL, lazy="log start", close=1, config=_IDLE),
        scenario("an eviction", LOW, PATIENT, URGENT, lazy="start", evict=1),
        scenario("an eviction and an own turn", USUAL, evict=1, own=1, task=1),
        scenario("usage", USUAL, use=2, crash=1, interrupt=1),
        scenario("usage of an own turn", USUAL, use=1, own=1, crash=1),
        scenario("usage of collected asks", FIRST, SECOND, use=1, exit=1),
        scenario("usage of a steered turn", USUAL, STEER, use=1),
        scenario("usage of a turn that is asked again", PATIENT, URGENT, use=1),
        scenario("a budget", USUAL, LOW, use=2, config=_budget("queue", tokens=5)),
        scenario("a budget that stops", USUAL, PATIENT, use=2, own=1, config=_budget("stop", tokens=5)),
        scenario("a budget that stops, and an urgent ask", PATIENT, URGENT, use=2, config=_budget("stop", tokens=10)),
        scenario("a budget that asks", USUAL, use=2, close=1, config=_budget("ask", tokens=5)),
        scenario("a budget of turns", LOW, URGENT, own=1, config=_budget("stop", turns=1)),
        scenario("a budget of turns that asks", LOW, USUAL, exit=1, drain=1, config=_budget("ask", turns=1)),
        scenario("a budget, and a host that dies", USUAL, lazy="log", use=1, crash=1, config=_budget("ask", tokens=5)),
        scenario(
            "a budget, and a log that fails", USUAL, LOW, lazy="log", use=1, fail=1, config=_budget("queue", tokens=5)
        ),
        scenario("a budget that asks, and a log that fails", USUAL, lazy="log", fail=1, config=_budget("ask", turns=1)),
        scenario("a budget, steered", USUAL, STEER, lazy="log", use=1, config=_budget("queue", tokens=5)),
        scenario("a budget, and a leave", USUAL, LOW, use=1, leave=1, claim=1, config=_budget("ask", tokens=5)),
        scenario("a budget of working time", USUAL, LOW, config=_budget("stop", working_seconds=1.0)),
        scenario("a shared budget", USUAL, PATIENT, lazy="log", reach=1, refuse=1, config=_SHARED),
        scenario("a shared budget that stops", ALICE, LOW, reach=1, refuse=1, config={**_SHARED, "on_budget": "stop"}),
        scenario("a caller's budget", ALICE, BOB, reach=1, exit=1, cap=FULL_OF_ALICE, config=_SHARED),
        scenario("a caller's budget, steered", ALICE, ALICE_STEERS, reach=1, cap=FULL_OF_ALICE, config=_SHARED),
        scenario("a caller's last turn", ALICE, BOB, reach=1, refuse=1, cap=NO_TURN_LEFT, config=_SHARED),
        scenario("a shared budget, closed", ALICE, reach=1, refuse=1, close=1, leave=1, config=_SHARED),
        scenario("a shared budget that asks", ALICE, reach=1, crash=1, config={**_SHARED, "on_budget": "ask"}),
        scenario("tasks in the background", LOW, URGENT, task=1, evict=1, config=_IDLE),
        scenario("a process that is old", LOW, URGENT, task=1, config={"recycle_seconds": 0.0}),
        scenario("a process that has saved", LAST, USUAL, interrupt=1),
        scenario("tools that live on", LOW, URGENT, interrupt=1, config=_TOOLS),
        scenario("tools that live on, and an own turn", USUAL, URGENT, own=1, exit=1, config=_TOOLS),
        scenario("tools that live on, closed", USUAL, URGENT, lazy="log", close=1, config=_TOOLS),
        scenario("tools that live on, told late", USUAL, late=1, exit=1, interrupt=1, config=_TOOLS),
        scenario("a few words more", LOW, URGENT, manners=WORDY, interrupt=1, config=_QUIET),
        scenario("a few words more of a silent agent", LOW, PATIENT, URGENT, manners=SILENT, config=_QUIET),
        scenario("another model", PATIENT, URGENT, lazy="start", setting=1, unanswered=1),
        scenario("another model, and a log that fails", USUAL, lazy="log", setting=1, fail=1, close=1),
        scenario("another model, and an exit", USUAL, PATIENT, setting=1, unanswered=1, exit=1),
        scenario("another configuration", LOW, URGENT, reconfigure=1, exit=1),
        scenario("another schema", EXACT, USUAL, URGENT, interrupt=1),
        scenario("one crash after the other", LOW, USUAL, PATIENT, lazy="start", exit=2, unstartable=1),
        scenario("a question that nobody answers", LOW, URGENT, question=1, config={"question_seconds": 0.0}),
        scenario("a deadline", BOUND, URGENT, interrupt=1),
        scenario("a deadline, and a slow agent", BOUND, manners=SLOW, own=1, late=1),
        scenario("a deadline, and a host that dies", BOUND, USUAL, lazy="log", crash=1),
        scenario("a deadline, and a log that fails", BOUND, lazy="log", fail=1, late=1),
        scenario("a deadline, and a leave", BOUND, USUAL, lazy="log", leave=1, claim=1),
        scenario("deadlines, collected", BOUND_FIRST, BOUND_SECOND, URGENT),
        scenario("a deadline, collected", BOUND_FIRST, SECOND, withdraw=1, exit=1),
        scenario("a deadline, steered", PATIENT, BOUND_STEER, lazy="log", manners=SLOW),
        scenario("a drain, and tasks in the background", USUAL, drain=1, task=1, own=1, exit=1),
        scenario("a leave, and tasks in the background", USUAL, leave=1, hurry=1, task=2, late=1),
        scenario("tasks in the background, and a log that fails", USUAL, lazy="log", task=2, fail=1, drain=1),
        scenario("tasks in the background, and a host that dies", USUAL, lazy="log", task=2, crash=1),
        scenario("a wait for a limit", LOW, URGENT, limited=2, tool=1, config=_WAIT),
        scenario("a wait, and tasks", USUAL, limited=2, task=1, exit=1, config=_WAIT),
        scenario("a wait, and another session", LOW, URGENT, account=3, lazy="start", config=_WAIT),
        scenario("a wait, and a host that dies", USUAL, lazy="log", limited=2, crash=1, config=_WAIT),
        scenario("a wait, and a log that fails", USUAL, lazy="log", limited=1, account=1, fail=1, config=_WAIT),
        scenario("a wait, and an end", USUAL, limited=1, interrupt=1, close=1, leave=1, config=_WAIT),
        scenario("a wait, and who comes next", USUAL, lazy="log", limited=1, leave=1, claim=1, config=_WAIT),
        scenario("a wait, and a deadline", BOUND, limited=1, account=1, config=_WAIT),
        scenario("a wait, steered", USUAL, STEER, limited=1, manners=SLOW, config=_WAIT),
        scenario("a wait, steered and merged", PATIENT, STEER, limited=1, manners=MERGING, config=_WAIT),
        scenario("a wait, collected", FIRST, SECOND, limited=1, withdraw=1, config=_WAIT),
        scenario("a wait, held", HELD, USUAL, holds=(("hold", NORMAL),), limited=1, config=_WAIT),
        scenario("a wait, told late", USUAL, limited=1, account=2, late=1, config=_WAIT),
        scenario("a wait of an idle process", USUAL, limited=1, evict=1, config={**_WAIT, **_IDLE}),
        scenario("a fall-back", LOW, USUAL, limited=1, tool=1, agents=_TWO),
        scenario("a fall-back, preempted", PATIENT, URGENT, limited=1, agents=_TWO),
        scenario("a fall-back of a missing agent", USUAL, lazy="start", uninstalled=2, limited=1, agents=_TWO),
        scenario("a fall-back, and a host that dies", LOW, USUAL, account=1, crash=1, agents=_TWO),
        scenario("a fall-back, and a log that fails", USUAL, lazy="log", account=1, fail=1, agents=_TWO),
        scenario("a fall-back, and an end", USUAL, account=1, interrupt=1, close=1, leave=1, agents=_TWO),
        scenario("a fall-back, and an own turn", USUAL, account=1, own=1, exit=1, agents=_TWO),
        scenario("a fall-back, and the account", USUAL, account=2, lazy="start", agents=_TWO),
        scenario("a fall-back, and tasks", USUAL, account=2, task=1, agents=_TWO),
        scenario("a fall-back, told late", USUAL, account=1, late=1, agents=_TWO),
        scenario("a fall-back, removed", LOW, USUAL, account=1, reconfigure=1, exit=1, agents=_TWO),
        scenario(
            "a fall-back, removed, and a log that fails",
            USUAL,
            lazy="log",
            account=1,
            reconfigure=1,
            fail=1,
            agents=_TWO,
        ),
        scenario("a fall-back that waits", USUAL, limited=2, tool=1, agents=_TWO, config=_WAIT),
        scenario("a fall-back that waits, closed", USUAL, limited=1, account=1, close=1, agents=_TWO, config=_WAIT),
        scenario("a fall-back, and who comes next", USUAL, lazy="log", account=1, leave=1, claim=1, agents=_TWO),
        scenario("a wait, decided", USUAL, limited=2, account=1, config=_CALL),
        scenario("a full queue", LOW, ALSO_LOW, USUAL, config={"queue_max": 1, "when_full": "drop"}),
    )
}

# Half a second each at most. `make test` runs only these; `make prove`, which CI also runs, runs all.
QUICK = frozenset(
    (
        *("a hold, closed", "a leave, steered and merged", "a question that nobody answers", "an exit"),
        *("an own turn and a log that fails", "late facts", "three asks", "who interrupts and who is refused"),
        *("usage", "usage of collected asks", "a budget that asks", "a shared budget that asks"),
        *("a wait of an idle process", "a hand-over"),
    )
)
assert SCENARIOS.keys() > QUICK

# Ten seconds to a minute and a half each, and up to 1 GB: for `make explore`. Each can be explored completely.
LARGE = {
    each.name: each
    for each in (
        scenario("an interrupt among three", LOW, PATIENT, URGENT, interrupt=1),
        scenario("a withdrawal among three", USUAL, PATIENT, URGENT, withdraw=1),
        scenario("three asks, an interrupt and a withdrawal", LOW, PATIENT, URGENT, interrupt=1, withdraw=1),
        scenario("three asks and a log that fails", LOW, PATIENT, URGENT, lazy="log", fail=1),
        scenario("three asks and two own turns", LOW, PATIENT, URGENT, own=2),
        scenario("three asks and a boundary twice", LOW, PATIENT, URGENT, own=1, stray=1),
        scenario("three asks and a cut frame", LOW, PATIENT, URGENT, lazy="pipe", cut=1),
        scenario("a close at any moment", LOW, PATIENT, lazy="log", close=1, drain=1, interrupt=1, exit=1),
        scenario("holds, closed", LOW, HELD, URGENT, holds=(("hold", NORMAL), ("other", INTERACTIVE)), close=1),
        scenario("steered, and an exit", PATIENT, STEER, lazy="pipe", exit=1, interrupt=1),
        scenario("late facts, and an exit", PATIENT, URGENT, late=1, exit=1, interrupt=1),
        scenario("a nameless agent among three", LOW, PATIENT, URGENT, manners=NAMELESS, own=1, interrupt=1),
    )
}
