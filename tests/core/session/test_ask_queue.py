"""Scheduling of asks, against a reference list that is sorted for each choice."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from banksman.core.session import ask_queue
from banksman.core.session.ask_queue import BACKGROUND, INTERACTIVE, NORMAL, Hold, Queue, Waiting
from banksman.core.session.turn import Ask, Turn, TurnPhase, queued

PRIORITIES = (BACKGROUND, NORMAL, INTERACTIVE)
AGEING = 300.0


def _turn(id: str, priority: int, *, at: float = 0.0, hold: str | None = None, on_busy: str = "enqueue") -> Turn:
    return queued(Ask(id=id, ref=f"{id}-0000", prompt="", priority=priority, at=at, hold=hold, on_busy=on_busy))


def _choose(queue: Queue, *, at: float = 0.0, hold: Hold | None = None, collecting: tuple[str, ...] = ()) -> str | None:
    chosen = ask_queue.choose(queue, at, hold=hold, ageing_seconds=AGEING, collecting=collecting)
    return None if chosen is None else chosen.id


@dataclass
class Naive:
    """Reference queue. Each ask has a number; within its class, the smaller number is first."""

    waiting: list[tuple[int, str, int]] = field(default_factory=list[tuple[int, str, int]])
    last: int = 0

    def numbers(self, priority: int) -> list[int]:
        return [number for number, _, other in self.waiting if other == priority]

    def add(self, id: str, priority: int, *, is_first: bool) -> None:
        self.last += 1
        number = min(self.numbers(priority), default=0) - 1 if is_first else self.last
        self.waiting.append((number, id, priority))

    def order(self, priority: int) -> list[str]:
        return [id for _, id, other in sorted(self.waiting) if other == priority]

    def next(self) -> str | None:
        return next((id for priority in reversed(PRIORITIES) for id in self.order(priority)), None)


_does = st.lists(
    st.tuples(
        st.sampled_from(["enqueue", "requeue", "remove", "serve", "move"]),
        st.sampled_from(PRIORITIES),
        st.integers(0, 7),
    ),
    max_size=40,
)


@given(does=_does)
def test_queue_chooses_as_sorted_list_would(does: list[tuple[str, int, int]]) -> None:
    queue: Queue = ()
    naive = Naive()
    for count, (what, priority, index) in enumerate(does):
        ids = [waiting.id for waiting in queue]
        picked = ids[index % len(ids)] if ids else ""
        match what:
            case "enqueue":
                queue = ask_queue.enqueue(queue, _turn(f"t{count}", priority))
                naive.add(f"t{count}", priority, is_first=False)
            case "requeue":
                queue = ask_queue.requeue(queue, _turn(f"t{count}", priority))
                naive.add(f"t{count}", priority, is_first=True)
            case "move":
                queue = ask_queue.move(queue, picked, None)
                mine = next((each for each in naive.waiting if each[1] == picked), None)
                if mine is not None:
                    naive.waiting.remove(mine)
                    naive.add(picked, mine[2], is_first=True)
            case _:
                gone = _choose(queue) if what == "serve" else picked
                queue = ask_queue.remove(queue, gone or "")
                naive.waiting = [each for each in naive.waiting if each[1] != gone]
        assert _choose(queue) == naive.next()
        for each in PRIORITIES:
            assert [waiting.id for waiting in queue if waiting.priority == each] == naive.order(each)


@given(ats=st.lists(st.tuples(st.sampled_from(PRIORITIES), st.floats(0, 600)), min_size=1, max_size=12))
def test_queue_age_lifts_by_one_class_only(ats: list[tuple[int, float]]) -> None:
    ats.sort(key=lambda pair: pair[1])
    queue = tuple(_turn(f"t{i}", priority, at=at) for i, (priority, at) in enumerate(ats))
    now = 600.0
    lifted = {BACKGROUND: NORMAL, NORMAL: INTERACTIVE, INTERACTIVE: INTERACTIVE + 1}
    standings = [lifted[priority] if now - at >= AGEING else priority for priority, at in ats]  # pyright: ignore[reportArgumentType]
    assert _choose(queue, at=now) == f"t{standings.index(max(standings))}"


def test_queue_age_preempts_nobody_and_protects_aged_turn() -> None:
    running = replace(_turn("aged", BACKGROUND), phase=TurnPhase.RUNNING, standing=NORMAL, granted_at=400.0)
    assert not ask_queue.displaces(_turn("passed", NORMAL, at=399.0), running)
    assert ask_queue.displaces(_turn("newcomer", NORMAL, at=401.0), running)
    assert ask_queue.displaces(_turn("urgent", INTERACTIVE, at=1.0), running)
    assert not ask_queue.displaces(_turn("aged too", BACKGROUND, at=0.0), running)


@given(priority=st.integers(-5, 30), running=st.integers(-5, 30))
def test_background_preempts_nobody_and_nobody_stops_more_urgent(priority: int, running: int) -> None:
    if ask_queue.preempts(priority, running):
        assert priority > running
        assert priority > BACKGROUND
        assert ask_queue.may_interrupt(priority, running)
    if ask_queue.may_interrupt(priority, running):
        assert priority >= running
        assert priority > BACKGROUND


def test_hold_admits_its_own_and_more_urgent_asks() -> None:
    hold = Hold("h", NORMAL, 0.0)
    queue: tuple[Waiting, ...] = (_turn("equal", NORMAL), _turn("low", BACKGROUND), _turn("own", NORMAL, hold="h"))
    assert _choose(queue, hold=hold) == "own"
    assert _choose(queue[:2], hold=hold) is None
    assert _choose((*queue, _turn("urgent", INTERACTIVE)), hold=hold) == "urgent"
    assert _choose((*queue, Hold("more", INTERACTIVE, 0.0)), hold=hold) == "more"
    # Aging does not raise an ask above a hold: the hold ends by its own clock.
    assert _choose(queue[:2], at=1e6, hold=hold) is None


def test_queue_skips_ask_with_open_collect_window() -> None:
    queue = (_turn("c", INTERACTIVE, on_busy="collect"), _turn("n", NORMAL))
    assert _choose(queue, collecting=("c",)) == "n"
    assert _choose(queue) == "c"


def test_queue_collects_only_like_asks() -> None:
    queue = (_turn("c", NORMAL, on_busy="collect"), _turn("h", NORMAL, on_busy="collect", hold="h"), _turn("n", NORMAL))
    ask = queue[0].ask
    assert ask is not None
    leader = ask_queue.leader(queue, replace(ask, id="d"))
    assert leader is queue[0]
    in_hold = ask_queue.leader(queue, replace(ask, id="d", hold="h"))
    assert in_hold is queue[1]
    assert ask_queue.leader(queue, replace(ask, id="d", priority=INTERACTIVE)) is None
    again = tuple(replace(turn, attempt=2) for turn in queue)
    assert ask_queue.leader(again, replace(ask, id="d")) is None
    joined = ask_queue.join(queue, "c", replace(ask, id="d"))
    assert ask_queue.count(joined) == 4
    found = ask_queue.find(joined, "d")
    assert found is not None
    assert found.id == "c"


def test_queue_move_stays_in_class_and_applies_to_turns_only() -> None:
    queue: Queue = (_turn("a", NORMAL), Hold("h", NORMAL, 0.0), _turn("b", NORMAL), _turn("u", INTERACTIVE))
    assert [waiting.id for waiting in ask_queue.move(queue, "b", "a")] == ["b", "a", "h", "u"]
    for id, before in (("b", "u"), ("b", "h"), ("h", "a"), ("x", None), ("a", "a")):
        assert ask_queue.move(queue, id, before) == queue


def test_queue_drops_last_of_lowest_class_below() -> None:
    queue = (_turn("low1", BACKGROUND), _turn("n", NORMAL), _turn("low2", BACKGROUND))
    gives_way = ask_queue.dispensable(queue, NORMAL)
    assert gives_way is not None
    assert gives_way.id == "low2"
    assert ask_queue.dispensable(queue, BACKGROUND) is None


def test_class_above_is_next_number_past_named_classes() -> None:
    assert [ask_queue.class_above(p) for p in (BACKGROUND, 5, NORMAL, INTERACTIVE, 40)] == [NORMAL, NORMAL, 20, 21, 41]


def test_queue_does_not_collect_asks_with_different_on_preempt() -> None:
    first = Ask(id="a", ref="a0000", prompt="a", priority=NORMAL, on_busy="collect")
    other = Ask(id="b", ref="b0000", prompt="b", priority=NORMAL, on_busy="collect", on_preempt="requeue")
    assert ask_queue.leader((queued(first),), replace(other, on_preempt="end")) is not None
    assert ask_queue.leader((queued(first),), other) is None
