"""Fold of a log, and its snapshots: a fold from a snapshot equals a fold from the first event."""

from __future__ import annotations

import inspect
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.core.session import histories
from tests.core.session.exploration import projection
from tests.core.session.histories import History, history, open_talk
from tests.core.session.scenarios import ask
from tests.core.session.talk import CONFIG, TELLING
from tests.thorough import one_in

from banksman.core.dialects.dialect import Verdict
from banksman.core.dialects.meaning import BackgroundTask, Requested, RequestPurpose
from banksman.core.session import event as kinds
from banksman.core.session import history as pasts
from banksman.core.session import replay
from banksman.core.session.ask_queue import NORMAL
from banksman.core.session.event import Entry, Event, entry
from banksman.core.session.history import VERSION, LastProcess, OpenQuestion, SessionHistory
from banksman.core.session.idempotency import KEYS_MAX, IdempotencyKey, IdempotencyKeys
from banksman.core.session.state import Mode, ProcessState, Session
from banksman.core.session.turn import Ask, Turn, TurnPhase
from banksman.errors import StoreTooNew

# Session members, besides the turns, that the log contains.
LOGGED = (
    *("fork_of", "is_adopted", "spent", "cost", "own_count", "limits", "limited_until", "used", "raised", "told"),
    *("is_budget_answered", "agent", "agents"),
)
SAVED = {field.name for field in msgspec.structs.fields(pasts._Saved)}  # pyright: ignore[reportPrivateUsage]


def queued(id: str, key: str | None = None) -> Entry:
    body: dict[str, Any] = {"ref": f"{id}0000", "prompt": id, "priority": NORMAL, "on_busy": "enqueue"}
    body |= {"on_preempt": "end", "key": key, "rules": [], "schema": None, "is_last": False, "into": None}
    return entry(id, kinds.TURN_QUEUED, **body)


def prefixes(of: History) -> list[SessionHistory]:
    """The fold before the first entry and after each entry."""
    folded = [pasts.beginning(of.config)]
    for one in of.entries:
        folded.append(pasts.fold(folded[-1], (one,)))
    return folded


def written(past: SessionHistory) -> SessionHistory:
    """The same history, decoded from its snapshot."""
    return pasts.decode(pasts.encode(past), past.session.config)


# -- a snapshot equals the fold ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", one_in(8, histories.NAMES))
def test_history_from_any_snapshot_equals_history_from_start(name: str) -> None:
    one = history(name)
    entries = one.entries
    whole = pasts.fold(pasts.beginning(one.config), entries)
    assert whole.session.head == whole.session.committed == len(entries)
    for cut, past in enumerate(prefixes(one)):
        snapshot = written(past)
        assert snapshot == past, f"at {cut}"
        assert pasts.encode(snapshot) == pasts.encode(past), f"at {cut}"
        assert pasts.fold(snapshot, entries[cut:]) == whole, f"at {cut}"


def test_history_folds_events_like_entries() -> None:
    one = history("costs and settings")
    events = [Event("s", 3, seq, 1.5, *one) for seq, one in enumerate(one.entries, 1)]
    assert pasts.fold_events(pasts.beginning(one.config), events) == prefixes(one)[-1]


@pytest.mark.parametrize("name", one_in(8, histories.TOYS))
def test_history_matches_live_session_at_every_event(name: str) -> None:
    """The exploration checks the turns in every order. This test checks the rest, and situations without a scenario."""
    one = history(name)
    borders = dict(one.borders())
    for appends, live in one.seen:
        past = borders[appends]
        assert projection(past.session) == projection(live)
        assert past.session.process.tasks == live.process.tasks
        if live.turn is None and live.own is None:  # The cost of a turn is logged with its end.
            assert [getattr(past.session, member) for member in LOGGED] == [getattr(live, member) for member in LOGGED]
        asked = [*live.questions, *(() if live.budget_question is None else (live.budget_question,))]
        assert [(q.id, q.turn) for q in past.questions] == [(q.id, q.turn) for q in asked]
        assert (past.session.mode is Mode.CLOSED) == (live.mode is Mode.CLOSED)


def test_snapshot_has_every_member_that_folding_changes() -> None:
    """Find a member that a fold changes and that snapshots lack: its value would be lost."""
    fresh = Session(config=TELLING)
    members = set(Session.__struct_fields__) - {"config"}
    changed: set[str] = set()
    for name in histories.TOYS:
        for past in prefixes(history(name)):
            found = {member for member in members if getattr(past.session, member) != getattr(fresh, member)}
            again = written(past).session
            assert {member for member in found if getattr(again, member) == getattr(past.session, member)} == found
            changed |= found
    # The corpus contains each of them. Otherwise the tests above would not cover it.
    of_past = set(SessionHistory.__struct_fields__) - {"session"}
    assert of_past < SAVED
    # The process is saved as its number and its tasks, and the committed position as the head.
    assert changed - {"process", "committed"} == SAVED - of_past - {"version", "processes", "tasks"}


def test_histories_contain_every_folded_kind() -> None:
    told = {kind for name in histories.TOYS for _, kind, _ in history(name).entries}
    source = inspect.getsource(pasts) + inspect.getsource(replay)
    folded = {
        value
        for name, value in vars(kinds).items()
        if name.isupper() and isinstance(value, str) and f"kinds.{name}" in source
    }
    assert {kinds.TURN_REQUEUED, kinds.SESSION_CONTEXT_LOST, kinds.QUESTION_ANSWERED} < folded
    assert folded <= told


# -- the fold ----------------------------------------------------------------------------------------------------------
@pytest.mark.thorough
@given(st.lists(st.tuples(st.none() | st.text(max_size=3), st.sampled_from([kinds.UPDATE, kinds.SENT]), st.binary())))
def test_history_counts_frames_without_reading_them(frames: list[Entry]) -> None:
    """Most of a log is frames, and a frame need not be JSON."""
    past = pasts.fold(pasts.beginning(CONFIG), [queued("a"), *frames, (None, kinds.SENT, b"\xff{"), queued("b", "k")])
    assert past.session.head == past.session.committed == len(frames) + 3
    assert past.keys == IdempotencyKeys([IdempotencyKey("k", "b", len(frames) + 2)])
    assert replace(past.session, head=0, committed=0, queue=()) == Session(config=CONFIG)


def test_history_keys_are_bounded() -> None:
    past = pasts.fold(pasts.beginning(CONFIG), [queued(f"t{n}", f"k{n}") for n in range(KEYS_MAX)])
    assert len(past.keys) == KEYS_MAX
    assert past.keys[0] == IdempotencyKey("k0", "t0", 0)
    # A key that is used again becomes the newest. A new key replaces the oldest.
    past = pasts.fold(past, [queued("again", "k0"), queued("plain"), queued("new", "k-new")])
    assert len(past.keys) == KEYS_MAX
    assert past.keys[0].key == "k2"
    assert past.keys[-2:] == (IdempotencyKey("k0", "again", KEYS_MAX), IdempotencyKey("k-new", "new", KEYS_MAX + 2))
    assert written(past).keys == past.keys


def test_history_does_not_copy_keys_for_each_turn() -> None:
    past = pasts.beginning(CONFIG)
    lists: set[int] = set()
    kept: list[SessionHistory] = []
    for number in range(3 * KEYS_MAX):
        turn = [
            queued(f"t{number}", f"k{number}"),
            entry(f"t{number}", kinds.TURN_ENDED, outcome="done", spent=None, cost=None, cost_in_all=None),
        ]
        past = pasts.fold(past, turn)
        kept.append(past)
        lists.add(id(past.keys._over))  # pyright: ignore[reportPrivateUsage]
    # The list is copied once for every KEYS_MAX dropped keys.
    assert len(lists) == 2
    assert [key.key for key in past.keys] == [f"k{number}" for number in range(2 * KEYS_MAX, 3 * KEYS_MAX)]
    assert [key.key for key in kept[5].keys] == [f"k{number}" for number in range(6)]


def test_histories_with_shared_keys_are_independent() -> None:
    past = pasts.fold(pasts.beginning(CONFIG), [queued("a", "ka"), queued("b", "kb")])
    one, two = (
        pasts.fold(past, [entry(turn, kinds.TURN_ENDED, outcome="done", spent=None, cost=None, cost_in_all=None)])
        for turn in "ab"
    )
    assert [(key.key, key.outcome) for key in one.keys] == [("ka", "done"), ("kb", None)]
    assert [(key.key, key.outcome) for key in two.keys] == [("kb", "done"), ("ka", None)]
    assert one.keys != two.keys
    assert all(written(each).keys == each.keys for each in (past, one, two))


def test_question_outlives_its_turn_without_a_turn() -> None:
    talk = open_talk()
    talk.ask(ask("a", NORMAL))
    talk.begin()
    talk.opens("a0000")
    talk.mean(Requested("q", RequestPurpose.PERMISSION, "can_use_tool", "Bash"))

    def questions() -> list[tuple[str, str | None]]:
        past = pasts.fold(pasts.beginning(TELLING), [one for append in talk.appends for one in append])
        return [(question.id, question.turn) for question in past.questions]

    assert questions() == [(talk.named(), "a")]
    talk.hear(b"over a0000 a0000", b"settled a0000")
    assert questions() == [(talk.named(), None)]
    talk.die(code=0)
    assert questions() == []


def test_questions_end_when_store_returns() -> None:
    """The answer may be lost, and the process was ended."""
    asked = entry(None, kinds.QUESTION_ASKED, question="q", wants="permission", tool="Bash", input={}, details={})
    past = pasts.fold(pasts.beginning(CONFIG), [asked])
    assert [(question.id, question.turn) for question in past.questions] == [("q", None)]
    assert pasts.fold(past, [entry(None, kinds.SESSION_STORE_RETURNED, retries=1)]).questions == ()


def test_history_process_is_the_last_one_started() -> None:
    born = ("boot", 77, 5, 78, 6)
    started = [entry(None, kinds.PROCESS_STARTED, process=1, pid=77, born=born)]
    past = pasts.fold(pasts.beginning(CONFIG), started)
    assert past.process == written(past).process == LastProcess(*born)
    # A process without a birth record does not count as the process before it.
    started.append(entry(None, kinds.PROCESS_STARTED, process=2, pid=78, born=None))
    past = pasts.fold(pasts.beginning(CONFIG), started)
    assert past.process is None
    assert past.session.process == ProcessState(number=2)


# -- the snapshot format -----------------------------------------------------------------------------------------------
# Members that later versions have added. An older snapshot lacks them.
ADDED = {"limits", "limited_until", "used", "raised", "told", "is_budget_answered", "agent", "agents", "held"}
# A snapshot as written by the first version, and as files hold it. If it cannot be read, the format has changed.
_WAITING = (
    '"priority":10,"origin":null,"phase":"%s","attempt":2,"restarts":0,"standing":null,"granted_at":0.0,"joined":[%s],'
    '"steered":[],"unsent":[],"unwanted":[],"cause":null,"clock":null,"wish":null,"interrupts":[],"may_write":false,'
    '"seq":0,"is_opened":false,"names_prompts":false,"heard":[],"tools":[],"can_interrupt":false,'
    '"is_acknowledged":false,"settled":null,"boundary":null}'
)
_ASK = (
    '{"id":"%s","ref":"%s0000","prompt":"%s","priority":10,"on_busy":"collect","on_preempt":"requeue","key":"k",'
    '"hold":null,"at":0.0,"rules":[["Bash","deny"]],"schema":{"type":"object"},"is_last":true}'
)
OLD = (
    '{"version":1,"head":31,"mode":"closed","conversation":"talk","fork_of":"theirs","is_adopted":true,"spent":1.5,'
    '"cost":2.5,"settings":[["model","x"]],"queue":[{"id":"a","ask":' + _ASK % ("a", "a", "a") + ","
    "" + _WAITING % ("queued", _ASK % ("b", "b", "b")) + '],"turn":{"id":"c","ask":' + _ASK % ("c", "c", "c") + ","
    "" + _WAITING % ("starting", "") + ',"own":{"id":"own-3","ask":null,' + _WAITING % ("running", "") + ","
    '"own_count":3,"processes":2,"opened":{"agent":"toy"},"keys":[["k","c",7]],"questions":[["q",null]],'
    '"process":["boot",77,5,78,6],"tasks":[{"id":"t","kind":"shell","description":"a server"}]}'
).encode()


def _old() -> SessionHistory:
    rules, schema = (("Bash", Verdict.DENY),), {"type": "object"}
    a, b, c = (
        replace(ask(id, 10, on_busy="collect", on_preempt="requeue", key="k", is_last=True), rules=rules, schema=schema)
        for id in "abc"
    )
    session = Session(
        config=CONFIG,
        mode=Mode.CLOSED,
        conversation="talk",
        fork_of="theirs",
        is_adopted=True,
        spent=1.5,
        cost=2.5,
        settings=(("model", "x"),),
        queue=(Turn(id="a", ask=a, priority=10, attempt=2, joined=(b,)),),
        turn=Turn(id="c", ask=c, priority=10, attempt=2, phase=TurnPhase.STARTING),
        own=Turn(id="own-3", ask=None, priority=10, attempt=2, phase=TurnPhase.RUNNING),
        own_count=3,
        process=ProcessState(number=2, tasks=(BackgroundTask("t", "shell", "a server"),)),
        head=31,
        committed=31,
    )
    return SessionHistory(
        session=session,
        opened={"agent": "toy"},
        keys=IdempotencyKeys([IdempotencyKey("k", "c", 7)]),
        questions=(OpenQuestion("q", None),),
        process=LastProcess("boot", 77, 5, 78, 6),
    )


def test_snapshot_of_old_version_is_read() -> None:
    found = pasts.decode(OLD, CONFIG)
    assert found == _old()
    # A string enum equals its text, so `==` alone would not find a wrong type.
    assert repr(found) == repr(_old())
    # The old snapshot has every member: decoding ignores a renamed member of a turn or an ask silently.
    names = set(msgspec.json.decode(OLD))
    assert names == SAVED - ADDED
    old_turn = msgspec.json.decode(OLD)["turn"]
    assert set(old_turn) <= set(Turn.__struct_fields__)
    assert set(old_turn["ask"]) <= set(Ask.__struct_fields__)


@pytest.mark.parametrize("version", [VERSION + 1, 0, -1, 10**30])
def test_snapshot_of_newer_version_is_refused(version: int) -> None:
    # The rest of the content does not matter.
    with pytest.raises(StoreTooNew):
        pasts.decode(b'{"version":%d,"head":"?","more":[]}' % version, CONFIG)


def test_snapshot_cut_anywhere_is_an_error() -> None:
    for cut in range(len(OLD)):
        with pytest.raises(ValueError, match=r"."):
            pasts.decode(OLD[:cut], CONFIG)


@pytest.mark.parametrize("name", sorted({*SAVED, "head"} - {"version"}))
def test_snapshot_with_invalid_member_is_an_error(name: str) -> None:
    members: dict[str, Any] = msgspec.json.decode(OLD)
    for nonsense in ([[1]], "?", {"?": 1}, -1.5, True):
        if name in ("conversation", "fork_of", "agent") and nonsense == "?":
            continue
        if name in ("opened", "used") and nonsense == {"?": 1}:
            continue
        if name in ("spent", "cost", "limited_until") and nonsense == -1.5:
            continue
        if name in ("is_adopted", "is_budget_answered") and nonsense is True:
            continue
        with pytest.raises(ValueError, match=r"."):
            pasts.decode(msgspec.json.encode(members | {name: nonsense}), CONFIG)


@pytest.mark.parametrize(
    "garbage",
    [
        *(
            b"",
            b"null",
            b"[]",
            b"\xff\xfe",
            b"{}",
            b'{"version":1}',
            b'{"version":"1","head":1}',
            b'{"version":1,"head":-1}',
        ),
        *(OLD + b"x", OLD[:-1] + b',"later":1}', OLD.replace(b'"phase":"queued"', b'"phase":"dreaming"')),
        b'{"version":1,"head":1,"opened":{"a":' + b"[" * 10**6,
    ],
)
def test_snapshot_decode_refuses_garbage(garbage: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        pasts.decode(garbage, CONFIG)


@given(st.binary(max_size=200))
def test_snapshot_decode_refuses_random_bytes(garbage: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        pasts.decode(garbage, CONFIG)
