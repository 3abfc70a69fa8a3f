"""The dispatcher passes facts to a state machine: order, re-entry, and the queue after an exception."""

from collections.abc import Callable

import pytest

from banksman.dispatcher import Dispatcher


class Machine:
    """Record the begin and the end of each fact. The `effects` run in between."""

    def __init__(self) -> None:
        self.dispatcher = Dispatcher(self.handle)
        self.effects: dict[str, Callable[[], None]] = {}
        self.notes: list[str] = []

    def dispatch(self, *facts: str) -> None:
        for fact in facts:
            self.dispatcher.dispatch(fact)

    def handle(self, fact: str) -> None:
        self.notes.append(f"+{fact}")
        self.effects.get(fact, lambda: None)()
        self.notes.append(f"-{fact}")


def test_dispatcher_handles_facts_in_order() -> None:
    machine = Machine()
    machine.dispatch("a", "b")
    assert machine.notes == ["+a", "-a", "+b", "-b"]


def test_dispatcher_queues_facts_that_arrive_during_an_effect() -> None:
    machine = Machine()
    machine.effects["a"] = lambda: machine.dispatch("b", "c")
    machine.effects["b"] = lambda: machine.dispatch("d")
    machine.dispatch("a")
    assert machine.notes == ["+a", "-a", "+b", "-b", "+c", "-c", "+d", "-d"]


def test_dispatcher_survives_a_chain_of_facts_without_recursion() -> None:
    machine = Machine()
    left = iter(range(10_000))
    machine.effects["a"] = lambda: machine.dispatch("a") if next(left, None) is not None else None
    machine.dispatch("a")
    assert machine.notes.count("+a") == 10_001


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_dispatcher_keeps_queued_facts_when_the_handler_raises(error: type[BaseException]) -> None:
    machine = Machine()

    def fail() -> None:
        machine.dispatch("b")
        raise error

    machine.effects["a"] = fail
    with pytest.raises(error):
        machine.dispatch("a")
    assert machine.notes == ["+a"]
    machine.dispatch("c")
    assert machine.notes == ["+a", "+b", "-b", "+c", "-c"]


def test_dispatcher_drops_queued_facts_when_it_is_cleared() -> None:
    machine = Machine()

    def clear() -> None:
        machine.dispatch("b")
        machine.dispatcher.clear()

    machine.effects["a"] = clear
    machine.dispatch("a", "c")
    assert machine.notes == ["+a", "-a", "+c", "-c"]
