"""Edge cases of `replay`. The exploration checks that a replay agrees with the session after every event."""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.core.session import exploration, scenarios, toy
from tests.core.session.scenarios import ask
from tests.core.session.talk import TELLING, Talk, of

from banksman.core.dialects.dialect import Verdict
from banksman.core.dialects.meaning import Replied
from banksman.core.process_facts import (
    Started,
)
from banksman.core.session import event as kinds
from banksman.core.session.effects import Append, Resolve
from banksman.core.session.event import Entry, Event, entry
from banksman.core.session.facts import (
    AppendFailed,
    Asked,
    Committed,
    FramesRead,
    ProcessReported,
    Reconfigured,
    SettingAsked,
    Timer,
    TimerFired,
)
from banksman.core.session.outcome import Kind
from banksman.core.session.permissions import Rules
from banksman.core.session.replay import replay
from banksman.core.session.session_config import Config
from banksman.core.session.state import Mode, Session
from banksman.core.session.step import step
from banksman.core.session.turn import Turn, TurnPhase
from banksman.errors import StoreError

CONFIG = Config(dialect=toy.ToyDialect())


def _events(*entries: Entry) -> list[Event]:
    return [Event("s", 1, seq, 0.0, turn, kind, data) for seq, (turn, kind, data) in zip(count(1), entries)]


def _queued(
    id: str,
    priority: int = 10,
    into: str | None = None,
    *,
    rules: Rules = (),
    schema: object = None,
    is_last: bool = False,
) -> Entry:
    return entry(
        id,
        kinds.TURN_QUEUED,
        ref=f"{id}-0000",
        prompt=id,
        priority=priority,
        on_busy="enqueue",
        on_preempt="end",
        key=None,
        rules=rules,
        schema=schema,
        is_last=is_last,
        into=into,
    )


def _ended(id: str, **more: object) -> Entry:
    return entry(id, kinds.TURN_ENDED, **{"outcome": Kind.WITHDRAWN, "spent": 0.0, "cost_in_all": None, **more})


def _unknown(prefix: str) -> st.SearchStrategy[str]:
    known = {value for name, value in vars(kinds).items() if name.isupper()}
    return st.text(min_size=1, max_size=8).map(prefix.__add__).filter(lambda kind: kind not in known)


def test_replay_of_empty_log_is_new_session() -> None:
    assert replay([], CONFIG) == Session(config=CONFIG)


@pytest.mark.parametrize("seqs", [(2,), (1, 3), (1, 1), (1, 2, 2)])
def test_replay_refuses_gap_or_repetition(seqs: tuple[int, ...]) -> None:
    events = [Event("s", 1, seq, 0.0, None, kinds.UPDATE, b"{}") for seq in seqs]
    with pytest.raises(AssertionError):
        replay(events, CONFIG)


@given(kind=st.sampled_from(["turn.", "queue.", "session.", "process.", ""]).flatmap(_unknown))
def test_replay_ignores_unknown_kind(kind: str) -> None:
    state = replay(_events(_queued("a"), ("a", kind, b'{"x":1}')), CONFIG)
    assert [waiting.id for waiting in state.queue] == ["a"]
    assert state.head == 2


def test_replay_does_not_read_frames() -> None:
    state = replay(_events((None, kinds.UPDATE, b"no json"), (None, kinds.SENT, b"\xff")), CONFIG)
    assert state.head == state.committed == 2


def test_replay_continues_from_earlier_replay() -> None:
    events = _events(_queued("a"), _queued("b"), entry("a", kinds.TURN_STARTED, attempt=1, joined=[]))
    for cut in range(len(events) + 1):
        assert replay(events[cut:], CONFIG, replay(events[:cut], CONFIG)) == replay(events, CONFIG)


def test_replay_keeps_collected_asks_with_their_leader() -> None:
    started = entry("a", kinds.TURN_STARTED, attempt=1, joined=["b"])
    queue = _events(_queued("a"), _queued("b", into="a"), _queued("c", into="a"))
    state = replay(queue, CONFIG)
    assert [waiting.id for waiting in state.queue] == ["a"]
    state = replay([*queue, *_events(*(started,) * 4)[3:]], CONFIG)
    assert state.turn is not None
    assert [each.id for each in state.turn.asks] == ["a", "b", "c"]
    withdrawn = [*queue, *_events(*(_ended("a"),) * 4)[3:]]
    first = replay(withdrawn, CONFIG).queue[0]
    assert first.id == "b"


@pytest.mark.parametrize("entries", [[_ended("x")], [entry("x", kinds.TURN_STARTED, attempt=1)]])
def test_replay_refuses_turn_that_was_never_queued(entries: list[Entry]) -> None:
    with pytest.raises(AssertionError):
        replay(_events(*entries), CONFIG)


def test_replay_restores_open_turn_and_closed_session() -> None:
    events = _events(
        _queued("a"),
        entry("a", kinds.TURN_STARTED, attempt=1, joined=[]),
        entry("a", kinds.TURN_INTERRUPTED, cause="interrupt", clock=None),
        entry("own-1", kinds.TURN_STARTED, origin="task", attempt=1),
        entry(None, kinds.SESSION_CONVERSATION, conversation="talk"),
        entry(None, kinds.PROCESS_STARTED, process=3, pid=1),
        entry(None, kinds.SESSION_CLOSED),
    )
    state = replay(events, CONFIG)
    assert state.turn is not None
    assert state.turn.phase is TurnPhase.INTERRUPTING
    assert state.own is not None
    assert state.own_count == 1
    assert state.conversation == "talk"
    assert state.process.number == 3
    assert state.mode is Mode.CLOSED
    lost = _events(*((None, event.kind, event.data) for event in events[4:5]), entry(None, kinds.SESSION_CONTEXT_LOST))
    assert replay(lost, CONFIG).conversation is None


def test_replay_restores_conversation_when_store_returns() -> None:
    """The name of the conversation was in a failed append: a resume would begin a new conversation."""
    written: list[Entry] = []
    state = Session(config=CONFIG)

    def tell(*facts: exploration.Fact) -> list[exploration.Effect]:
        nonlocal state
        done: list[exploration.Effect] = []
        for fact in facts:
            state, effects = step(state, fact)
            done += effects
            for effect in effects:
                if isinstance(effect, Append):
                    written.extend(effect.entries)
        return done

    tell(Asked(0.0, ask("a", 10)), Committed(0.0, 1), ProcessReported(0.0, 1, Started(77, 0.0)), Committed(0.0, 3))
    init = toy.ToyDialect().read(b"init")
    assert init is not None
    tell(FramesRead(0.0, 1, (b"init",), ((0, init),)))
    del written[state.committed :]
    failed = tell(AppendFailed(0.0, StoreError("full")))
    assert [effect.outcome.durable for effect in failed if isinstance(effect, Resolve)] == [False]
    tell(TimerFired(1.0, (Timer.STORE, "1")))
    tell(Committed(1.0, len(written)))
    again = replay(_events(*written), CONFIG)
    assert state.conversation == "talk"
    assert exploration.projection(again) == exploration.projection(state)


# -- options of asks, and settings -------------------------------------------------------------------------------------
def _folded(talk: Talk, after: Session | None = None) -> Session:
    """Replay the log of a session."""
    appended = [entry for effect in of(Append, talk.effects) for entry in effect.entries]
    return replay(_events(*appended), talk.state.config, after)


def test_replay_restores_rules_schema_and_last_flag_of_ask() -> None:
    rules: Rules = (("Bash", Verdict.DENY), ("mcp__*", Verdict.ASK))
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    entries = (_queued("a", rules=rules, schema=schema, is_last=True), _queued("b"))
    first, second = (waiting.ask for waiting in replay(_events(*entries), CONFIG).queue if isinstance(waiting, Turn))
    assert first is not None
    assert second is not None
    assert (first.rules, first.schema, first.is_last) == (rules, schema, True)
    assert (second.rules, second.schema, second.is_last) == ((), None, False)


def test_replay_restores_ask_unchanged() -> None:
    talk = Talk(TELLING)
    wanted = replace(ask("a", 10, key="k"), rules=(("Bash", Verdict.ASK),), schema={"type": "object"}, is_last=True)
    talk.ask(wanted)
    [waiting] = _folded(talk).queue
    assert isinstance(waiting, Turn)
    assert waiting.ask == wanted


def test_replay_restores_last_setting_of_each_name() -> None:
    talk = Talk(TELLING)
    talk.serve(ask("a", 10))
    for number, (name, value) in enumerate((("model", "x"), ("permission_mode", "plan"), ("model", "y")), 1):
        talk.tell(SettingAsked(0.0, f"c{number}", name, value))
        talk.mean(Replied(f"setting-1-{number}"))
    # A setting that the agent refused never applies.
    talk.tell(SettingAsked(0.0, "c4", "model", "z"))
    talk.mean(Replied("setting-1-4", error="no"))
    assert _folded(talk).settings == talk.state.settings == (("permission_mode", "plan"), ("model", "y"))
    # The session is opened again with another model: the change of the model ends.
    talk.tell(Reconfigured(0.0, TELLING, False, ("model",)))
    assert _folded(talk).settings == talk.state.settings == (("permission_mode", "plan"),)


def test_replay_restores_settings_when_store_returns() -> None:
    talk = Talk(TELLING)
    talk.serve(ask("a", 10))
    talk.is_log_slow = True
    talk.tell(SettingAsked(0.0, "c", "model", "x"))
    durable = talk.state.committed
    talk.mean(Replied("setting-1-1"))
    written = [entry for effect in of(Append, talk.effects) for entry in effect.entries][:durable]
    talk.effects.clear()
    talk.tell(AppendFailed(0.0, StoreError("full")))
    talk.tell(TimerFired(1.0, (Timer.STORE, "1")))
    talk.commit()
    written += [entry for effect in of(Append, talk.effects) for entry in effect.entries]
    assert replay(_events(*written), TELLING).settings == talk.state.settings == (("model", "x"),)


def test_replay_restores_known_and_unknown_cost() -> None:
    talk = Talk(TELLING)
    talk.serve(ask("a", 10), spent=1.25)
    talk.serve(ask("b", 10), spent=2.0, cost=0.5)
    assert _folded(talk).spent == talk.state.spent == 2.0
    assert _folded(talk).cost == talk.state.cost == 1.75
    old = Session(config=TELLING, conversation="old", spent=None)
    talk = Talk(state=old)
    talk.serve(ask("a", 10))
    assert _folded(talk, old).spent is None
    assert _folded(talk, old).cost is None
    talk.serve(ask("b", 10), spent=3.0)
    assert _folded(talk, old).spent == 3.0


def test_replay_drops_overflown_conversation() -> None:
    talk = Talk(TELLING)
    talk.serve(ask("a", 10), spent=2.0)
    talk.serve(ask("b", 10), is_error=True, is_overflow=True)
    again = _folded(talk)
    assert (again.conversation, again.spent) == (talk.state.conversation, talk.state.spent) == (None, 0.0)


def test_replay_keeps_fork_until_named_or_lost() -> None:
    forked = Session(config=TELLING, fork_of="theirs", spent=None)
    talk = Talk(state=forked)
    talk.ask(ask("a", 10))
    talk.begin()
    assert _folded(talk, forked).fork_of == talk.state.fork_of == "theirs"
    talk.over("a0000")
    again = _folded(talk, forked)
    assert (again.fork_of, again.conversation) == (talk.state.fork_of, "talk")
    lost = Talk(state=forked)
    lost.ask(ask("a", 10))
    lost.tell(ProcessReported(0.0, 1, Started(77, 0.0)))
    lost.die(code=1, stderr="forgotten")
    assert _folded(lost, forked).fork_of is None
    assert lost.state.fork_of is None


def test_scenarios_have_unique_names() -> None:
    assert not set(scenarios.SCENARIOS) & set(scenarios.LARGE)
