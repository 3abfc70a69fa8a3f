"""Corpus of realistic session logs, append by append, for the tests of log readers.

There are three kinds of logs, and each log is the same every time:

- Random walks through the scenarios of the exploration.
- Talks by hand, with parts that the scenarios lack: a cost, an imported conversation, a session that is reopened.
- Recordings of a real agent.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from msgspec.structs import replace
from tests.core.dialects.recordings import corpus
from tests.core.dialects.recordings.rehearsal import Rehearsal
from tests.core.session import exploration, scenarios
from tests.core.session.scenarios import ask
from tests.core.session.talk import TELLING, Talk
from tests.core.session.toy import Manners

from banksman.core.dialects.claude import CLAUDE
from banksman.core.dialects.dialect import Decision, Verdict
from banksman.core.dialects.meaning import (
    LimitsReported,
    LimitWindow,
    ProviderFailure,
    Replied,
    Requested,
    RequestPurpose,
    TurnOpened,
    TurnOver,
    UsageReported,
)
from banksman.core.dialects.tokens import Tokens
from banksman.core.process_facts import Exited, Started, StartFailed, WriteFailed
from banksman.core.session import event as kinds
from banksman.core.session import history as pasts
from banksman.core.session import live_state
from banksman.core.session.ask_queue import BACKGROUND, INTERACTIVE, NORMAL
from banksman.core.session.budget import Budget
from banksman.core.session.effects import Append, Effect
from banksman.core.session.event import Entry, entry
from banksman.core.session.facts import (
    AccountLimited,
    AppendFailed,
    Asked,
    AskEdited,
    AskMoved,
    AskWithdrawn,
    Begun,
    CloseAsked,
    Committed,
    DrainAsked,
    EvictAsked,
    Fact,
    HandedOver,
    HandOverAsked,
    HoldAsked,
    InterruptAsked,
    LeaveAsked,
    ProcessReported,
    QuestionAnswered,
    SettingAsked,
    ShareAsked,
    TimerFired,
)
from banksman.core.session.history import SessionHistory
from banksman.core.session.session_config import Config
from banksman.core.session.state import Session
from banksman.errors import ErrorKind

STEPS_MAX = 400


class Seen(NamedTuple):
    """The live session when its log had `appends` appends and no append was pending."""

    appends: int
    session: Session


class History(NamedTuple):
    name: str
    config: Config
    # Only durable appends.
    appends: tuple[Sequence[Entry], ...]
    seen: tuple[Seen, ...] = ()

    @property
    def entries(self) -> list[Entry]:
        return [entry for append in self.appends for entry in append]

    def borders(self) -> Iterator[tuple[int, SessionHistory]]:
        """Yield the number of appends and their fold, before the first append and after each."""
        past = pasts.beginning(self.config)
        yield 0, past
        for number, append in enumerate(self.appends, 1):
            past = pasts.fold(past, append)
            yield number, past


# -- walks -----------------------------------------------------------------------------------------------------------
_RULES = (("Bash", Verdict.DENY), ("mcp__*", Verdict.ASK))
# All features together, with every fault. The asks use every option of an ask.
EVERYTHING = scenarios.scenario(
    "everything",
    replace(scenarios.LOW, key="k-low"),
    replace(scenarios.USUAL, key="k-usual", rules=_RULES, prompt=[{"type": "text", "text": "usual"}]),
    *(replace(scenarios.PATIENT, key="k"), replace(scenarios.URGENT, key="k"), scenarios.STEER, scenarios.LAST),
    *(scenarios.FIRST, scenarios.SECOND, scenarios.HELD, scenarios.PUSHY, scenarios.SHY, scenarios.EXACT),
    lazy="log pipe start",
    holds=(("hold", NORMAL), ("other", INTERACTIVE)),
    manners=Manners(begins=True, ends=("over,settled", "over+settled"), errs=True),
    config={"clocks": {"overall": 0.0}, "idle_seconds": 0.0, "recycle_seconds": 0.0},
    **dict.fromkeys(("setting", "unanswered", "reconfigure", "fail", "close", "hurry"), 1),
    **dict.fromkeys(("own", "stray", "unacknowledged", "question", "exit", "cut", "unstartable", "late"), 2),
    **dict.fromkeys(("task", "evict"), 2),
    **dict.fromkeys(("withdraw", "interrupt", "move", "release"), 3),
)
# The same features without the faults that end most walks early, and with an agent that merges several prompts.
GOING_WELL = scenarios.scenario(
    "going well",
    *(scenarios.LOW, scenarios.ALSO_LOW, scenarios.PATIENT, scenarios.URGENT, scenarios.STEER),
    *(ask("more", NORMAL, on_busy="steer"), scenarios.FIRST, scenarios.SECOND),
    manners=scenarios.MERGING,
    setting=1,
    **dict.fromkeys(("own", "question", "interrupt", "withdraw", "move"), 2),
)
# Scenarios with situations that the two above reach seldom.
_OTHERS = (
    *("an own turn and a log that fails", "a log that fails while collecting", "a hold and others", "collected"),
    *("steered while the log takes its time", "steered, interrupted", "steered, merged", "a question", "three asks"),
    *("a close", "a drain", "one is moved", "another model", "one crash after the other", "a full queue"),
    *("a leave", "a leave among three"),
)
WALKS = {
    **{f"{EVERYTHING.name} {seed}": (EVERYTHING, seed) for seed in range(16)},
    **{f"{GOING_WELL.name} {seed}": (GOING_WELL, seed) for seed in range(8)},
    **{f"{name} {seed}": (scenarios.SCENARIOS[name], seed) for name in _OTHERS for seed in range(2)},
}


# Facts that would end most walks early are rare.
_CHANCES: dict[type, float] = {
    **dict.fromkeys((CloseAsked, DrainAsked, LeaveAsked, AppendFailed), 0.02),
    **dict.fromkeys((Exited, StartFailed, WriteFailed, TimerFired, EvictAsked), 0.1),
    **dict.fromkeys((Asked, HoldAsked, AskWithdrawn, InterruptAsked, AskMoved, AskEdited), 0.25),
}


def _kind(fact: Fact | None) -> type:
    return type(fact.report if isinstance(fact, ProcessReported) else fact)


def walk(name: str) -> History:
    """Take one random path through a scenario."""
    world_of, seed = WALKS[name]
    lot = random.Random(f"{world_of.name} {seed}")
    world = world_of.first()
    durable: list[Sequence[Entry]] = []
    unlogged: list[Sequence[Entry]] = []
    seen: list[Seen] = []
    has_failed = False
    for _ in range(STEPS_MAX):
        possible = list(exploration.moves(world_of, world))
        if not possible:
            break
        [move] = lot.choices(possible, [_CHANCES.get(_kind(move.fact), 1.0) for move in possible])
        if isinstance(move.fact, Committed):
            while unlogged and sum(map(len, durable)) + len(unlogged[0]) <= move.fact.seq:
                durable.append(unlogged.pop(0))
        elif isinstance(move.fact, AppendFailed):
            unlogged.clear()
            has_failed = True
        world, effects = exploration.take(world_of, move)
        unlogged += _appends(effects)
        if not unlogged and not has_failed:
            seen.append(Seen(len(durable), world.session))
    return History(name, world.session.config, tuple(durable), tuple(seen))


def _appends(effects: Iterable[Effect]) -> list[Sequence[Entry]]:
    return [effect.entries for effect in effects if isinstance(effect, Append)]


# -- talks -----------------------------------------------------------------------------------------------------------
def opened(resume: str | None = None, *, fork: bool = False) -> Entry:
    """The entry that a host writes when it opens a session."""
    return entry(None, kinds.SESSION_OPENED, agent="toy", cwd="/srv", args=["-v"], resume=resume, fork=fork)


class Told(Talk):
    """A talk that keeps its log."""

    def __init__(self, past: SessionHistory | None = None, config: Config = TELLING) -> None:
        super().__init__(config, None if past is None else past.session)
        self.appends: list[Sequence[Entry]] = []
        self.seen: list[Seen] = []

    def tell(self, fact: Fact) -> list[Effect]:
        effects = super().tell(fact)
        self.appends += _appends(effects)
        self.seen.append(Seen(len(self.appends), self.state))
        return effects


def open_talk(resume: str | None = None, *, fork: bool = False, before: Iterable[Sequence[Entry]] = ()) -> Told:
    """Open a session whose log already has the appends of `before`."""
    appends = [*before, [opened(resume, fork=fork)]]
    past = pasts.beginning(TELLING)
    for append in appends:
        past = pasts.fold(past, append)
    talk = Told(past)
    talk.appends += appends
    return talk


def _costs_and_settings() -> Told:
    talk = open_talk()
    talk.serve(ask("a", NORMAL, key="k-a"), spent=1.25)
    talk.serve(ask("b", NORMAL, key="k-b"), spent=2.0, cost=0.5)
    for number, (name, value) in enumerate((("model", "x"), ("permission_mode", "plan"), ("model", "y")), 1):
        talk.tell(SettingAsked(0.0, f"c{number}", name, value))
        talk.mean(Replied(f"setting-1-{number}"))
    talk.tell(ShareAsked(0.0, "s", ("bob", "carol"), "alice"))
    talk.mean(TurnOpened(origin="task", can_interrupt=True))
    talk.mean(UsageReported("c1", Tokens(5, 1)))
    talk.mean(TurnOver(origin="task", text="own", spent=2.5))
    # The conversation overflows: the next one begins empty.
    talk.serve(ask("c", NORMAL), is_error=True, is_overflow=True)
    talk.ask(ask("d", NORMAL, key="k-a"))
    return talk


def _limits() -> Told:
    """An account that reaches its limit, is free again, and reaches it again."""
    talk = open_talk()
    talk.mean(LimitsReported((LimitWindow("five_hour", 0.5, 9.0), LimitWindow("week", None, 99.0))))
    limited = ProviderFailure(ErrorKind.USAGE_LIMIT, status=429, limited_until=20.0)
    talk.serve(ask("a", NORMAL), is_error=True, error="limited", failure=limited)
    talk.serve(ask("b", NORMAL))
    talk.mean(LimitsReported((LimitWindow("five_hour", 1.0, 9.0, is_exhausted=True),)))
    talk.serve(ask("c", NORMAL), is_error=True, failure=ProviderFailure(ErrorKind.USAGE_LIMIT))
    return talk


def _budget() -> Told:
    """A budget that is used up, raised by a person, and used up again. Then the person lets the turn finish."""
    talk = Told(config=replace(TELLING, budget=Budget(tokens=10), on_budget="ask"))
    talk.serve(ask("a", NORMAL), tokens=Tokens(9))
    talk.serve(ask("b", NORMAL), tokens=Tokens(9))
    question = talk.state.budget_question
    assert question is not None
    talk.tell(QuestionAnswered(0.0, question.id, Decision(allows=True, option="raise")))
    talk.serve(ask("c", NORMAL), tokens=Tokens(8))
    talk.serve(ask("d", NORMAL), tokens=Tokens(8))
    question = talk.state.budget_question
    assert question is not None
    talk.tell(QuestionAnswered(0.0, question.id, Decision(allows=True)))
    assert talk.state.is_budget_answered
    return talk


def _fallen_back() -> Told:
    """A session that falls back from a limited agent, and returns to it, while a limit of the other becomes known."""
    agents = tuple(replace(TELLING, agent=name) for name in ("one", "two"))
    talk = Told(config=replace(agents[0], roster=agents))
    limited = ProviderFailure(ErrorKind.USAGE_LIMIT, status=429, limited_until=20.0)
    talk.serve(ask("a", NORMAL), is_error=True, error="limited", failure=limited, spent=1.0)
    for id, until in (("b", 20.0), ("c", None)):
        if until is None:
            talk.tell(AccountLimited(0.0, None, "one"))
        talk.ask(ask(id, NORMAL))
        talk.die(signal=15)
        talk.begin()
        talk.over(f"{id}0000", spent=0.5)
    talk.tell(AccountLimited(0.0, 30.0, "two"))
    return talk


def _handed_over() -> Told:
    """A session that is handed over in the middle of a turn, and continued by the next host."""
    old = open_talk()
    old.ask(ask("a", NORMAL))
    old.begin()
    old.opens("a0000")
    old.ask(ask("b", NORMAL))
    old.tell(HandOverAsked(0.0, 9.0))
    held = live_state.frozen(old.state)
    old.tell(HandedOver(0.0, 1, {"hold": "h", "host": 7, "until": 9.0}))
    adopted = [entry(None, kinds.PROCESS_ADOPTED, process=1, pid=77, hold="h", born=("boot", 77, 1, 76, 1, 8, 1))]
    talk = open_talk(before=[*old.appends, adopted])
    talk.state = replace(held, head=talk.state.head, committed=talk.state.head)
    talk.over("a0000")
    talk.over("b0000")
    return talk


def _imported() -> Told:
    """An imported log: its original opening, queue and conversation do not belong to the new session."""
    first = open_talk()
    first.serve(ask("a", NORMAL, key="k-a"), spent=1.25)
    first.tell(SettingAsked(0.0, "c1", "model", "x"))
    first.mean(Replied("setting-1-1"))
    first.ask(ask("b", NORMAL, key="k-b"))
    first.ask(ask("c", NORMAL))
    imported = [entry(None, kinds.SESSION_IMPORTED, origin="s-there", at=1.0)]
    talk = open_talk(before=[*first.appends, imported])
    talk.serve(ask("d", NORMAL, key="k-d"), spent=3.0)
    return talk


def _kept() -> Told:
    """A question that outlived its process, and a question that did not."""
    about = {"wants": "permission", "tool": "saw", "input": {"depth": 3}, "details": {}}
    asked = [entry(None, kinds.QUESTION_ASKED, question=id, **about) for id in ("q-1", "q-2")]
    settled = [
        entry(None, kinds.QUESTION_KEPT, question="q-1"),
        entry(None, kinds.QUESTION_ANSWERED, question="q-2", answer="withdrawn", by="recovery"),
    ]
    talk = open_talk(before=[asked, settled])
    talk.appends.append([entry(None, kinds.QUESTION_ANSWERED, question="q-1", answer="allow", by="answer")])
    return talk


def _adopted(*, fork: bool, is_known: bool) -> Told:
    talk = open_talk("theirs", fork=fork)
    talk.ask(ask("a", NORMAL))
    if is_known:
        talk.tell(ProcessReported(0.0, 1, Started(77, 0.0, ("boot", 77, 5, 78, 6, 79, 7, 80, 8))))
        talk.hear(b"ok handshake-1")
        talk.over("a0000", spent=3.0)
        talk.serve(ask("b", NORMAL), spent=4.0)
    else:
        talk.tell(ProcessReported(0.0, 1, Started(77, 0.0)))
        talk.die(code=1, stderr="forgotten")
        talk.ask(ask("b", NORMAL))
    return talk


def _opened_again() -> Told:
    talk = open_talk()
    talk.serve(ask("a", NORMAL, key="k"), spent=1.0)
    talk.tell(SettingAsked(0.0, "c", "model", "x"))
    talk.mean(Replied("setting-1-1"))
    talk.tell(CloseAsked(0.0))
    talk.die(signal=15)
    again = open_talk(before=talk.appends)
    again.serve(ask("b", NORMAL, key="k"), spent=1.5)
    again.ask(ask("c", NORMAL))
    return again


def _left() -> Told:
    """One host leaves with an ask in the queue, and another host continues."""
    talk = open_talk()
    talk.serve(ask("a", NORMAL, key="k"), spent=1.0)
    talk.ask(ask("b", NORMAL, key="k-b"))
    talk.opens("b0000")
    talk.ask(ask("c", NORMAL, key="k-c"))
    talk.tell(LeaveAsked(0.0))
    talk.over("b0000", spent=1.5)
    talk.die(signal=15)
    again = open_talk(before=talk.appends)
    again.tell(Begun(0.0))
    again.begin()
    again.over("c0000", spent=2.0)
    return again


def _asked_and_added() -> Told:
    """A turn that uses every option, and a queue whose order only the log has."""
    talk = open_talk()
    talk.ask(ask("a", NORMAL))
    talk.begin()
    talk.opens("a0000")
    for name in ("low", "lower", "lowest"):
        talk.ask(ask(name, BACKGROUND, rules=_RULES, schema={"type": "object"}))
    talk.tell(AskMoved(0.0, "lowest"))
    talk.tell(AskEdited(0.0, "c", "lower", prompt="another", priority=NORMAL))
    talk.ask(ask("s", NORMAL, on_busy="steer"))
    for name in ("q1", "q2"):
        talk.mean(Requested(name, RequestPurpose.PERMISSION, "can_use_tool", "Bash"))
    talk.ask(ask("t", NORMAL, on_busy="steer"))
    talk.hear(b"taken s0000", b"over a0000 a0000", b"settled a0000")
    talk.mean(Requested("q3", RequestPurpose.ELICITATION, "elicitation"))
    return talk


_TALKS = {
    "costs and settings": _costs_and_settings,
    "limits": _limits,
    "budget": _budget,
    "fallen back": _fallen_back,
    "handed over": _handed_over,
    "imported": _imported,
    "a question is kept": _kept,
    "adopted": functools.partial(_adopted, fork=False, is_known=True),
    "adopted and forgotten": functools.partial(_adopted, fork=False, is_known=False),
    "forked": functools.partial(_adopted, fork=True, is_known=True),
    "forked and forgotten": functools.partial(_adopted, fork=True, is_known=False),
    "opened again": _opened_again,
    "left": _left,
    "asked and added": _asked_and_added,
}


def talked(name: str) -> History:
    talk = _TALKS[name]()
    return History(name, talk.state.config, tuple(talk.appends), tuple(talk.seen))


# -- all -------------------------------------------------------------------------------------------------------------
def recorded(name: str) -> History:
    """The history of a recording, one append for each entry, because a cut may be anywhere."""
    entries = Rehearsal(name, corpus.whole).entries
    return History(name, Config(dialect=CLAUDE), tuple((entry,) for entry in entries))


TOYS = (*_TALKS, *WALKS)
NAMES = (*TOYS, *corpus.NAMES)


def history(name: str) -> History:
    return talked(name) if name in _TALKS else walk(name) if name in WALKS else recorded(name)
