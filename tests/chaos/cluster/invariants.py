"""Invariants that hold after every storm: client answers, logs and prompts of the agents.

Each function raises AssertionError with the place of the violation. The functions take plain values and look at no
process and no port. So the tests can plant a fault for each of them.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from tests.chaos.cluster.history import Ask, Reader

from banksman.testing import checks
from banksman.testing.checks import View

Event = Mapping[str, Any]


def events_of(view: View) -> list[Event]:
    return [json.loads(message.data) for message in view.events.values()]


# -- the logs --------------------------------------------------------------------------------------------------------
def log(events: Sequence[Event]) -> None:
    """Check that sequence numbers are dense from 1 and that epochs never fall.

    If epochs never fall, the writes of two owners do not interleave.
    """
    for place, event in enumerate(events, 1):
        assert event["seq"] == place, f"{event['session']}: where {place} should be there is {event['seq']}"
    for before, after in pairwise(events):
        where = f"{after['session']} at {after['cursor']}"
        assert after["epoch"] >= before["epoch"], f"{where}: the epoch falls from {before['epoch']}"


def readers(given: Iterable[Reader], last: Mapping[str, View]) -> None:
    """Check that every event a client received is in the final log, byte for byte (G8).

    This holds for every time and every front end. `last`: the last reading of each session.
    """
    known = {place: message.data for view in last.values() for place, message in view.events.items()}
    for reader in given:
        assert not reader.view.gaps, f"{reader.name}: was told of gaps {reader.view.gaps}"
        for place, message in reader.view.events.items():
            assert place in known, f"{reader.name}: was given {place}, which is not there any more"
            assert known[place] == message.data, f"{reader.name}: was given another {place}: {message.data!r:.200}"
    checks.views_agree(*last.values(), *(reader.view for reader in given))


# -- the asks --------------------------------------------------------------------------------------------------------
def asks(session: str, events: Sequence[Event], asked: Sequence[Ask]) -> None:
    """Check the asks of one session against its log.

    Each accepted ask is one turn. The log has that turn once, with at most one start and exactly one end, and the end
    agrees with the outcome that every client received. A turn may start again only if the log says that it was requeued
    first: its process had died before the prompt was sent.
    """
    queued = {event["turn"]: event["body"]["key"] for event in events if event["kind"] == "turn.queued"}
    ended = {event["turn"]: event["body"] for event in events if event["kind"] == "turn.ended"}
    endings = Counter(event["turn"] for event in events if event["kind"] == "turn.ended")
    starts = Counter(event["turn"] for event in events if event["kind"] == "turn.started")
    starts.subtract(event["turn"] for event in events if event["kind"] == "turn.requeued")
    twice = [key for key, count in Counter(queued.values()).items() if count > 1]
    assert not twice, f"{session}: {twice} are in the log twice"
    for ask in asked:
        _ask(f"{session}: {ask.key}", ask, queued, endings, starts, ended)
    # No other client asks. Another key in the log is an invented ask.
    others = set(queued.values()) - {ask.key for ask in asked}
    assert not others, f"{session}: nobody asked {others}"
    unended = [key for turn, key in queued.items() if not endings[turn]]
    assert not unended, f"{session}: {unended} never ended"


def _ask(
    where: str,
    ask: Ask,
    queued: Mapping[str, str],
    endings: Mapping[str, int],
    starts: Mapping[str, int],
    ended: Mapping[str, Mapping[str, Any]],
) -> None:
    turns = {each.turn for each in ask.accepted}
    assert len(turns) <= 1, f"{where} was accepted as {turns}"
    for turn in turns:
        assert queued.get(turn) == ask.key, f"{where} was accepted as {turn}, which the log does not have"
        assert endings[turn] == 1, f"{where} ended {endings[turn]} times"
        assert starts[turn] <= 1, f"{where} began {starts[turn]} times"
    kinds = {(each.kind, each.text) for each in ask.told}
    assert len(kinds) <= 1, f"{where}: clients were told different outcomes: {kinds}"
    for turn in turns:
        for kind, text in kinds:
            logged = ended[turn]["outcome"]
            assert logged == kind, f"{where}: a client was told {kind}, and the log says {logged}"
            assert kind != "done" or text == ask.answer, f"{where}: the answer is {text!r}"


def answers(asked: Sequence[Ask]) -> None:
    """Check that no answer contains a part of the answer to another ask."""
    words = {ask.word for ask in asked}
    for ask in asked:
        for told in ask.told:
            others = set((told.text or "").split()) & words - {ask.word}
            assert not others, f"{ask.key} was answered with words of {others}"


def prompts(session: str, given: Sequence[Sequence[str]], events: Sequence[Event], asked: Sequence[Ask]) -> None:
    """Check that no ask was given to an agent twice, over all processes of the session.

    An ask that is done was given exactly once. `given`: the prompts that each process of the session read.
    """
    readings: dict[str, int] = defaultdict(int)
    for process in given:
        for prompt in process:
            readings[prompt.split("\n")[0]] += 1
    ended = {event["turn"]: event["body"]["outcome"] for event in events if event["kind"] == "turn.ended"}
    for ask in asked:
        count = readings[ask.word]
        assert count <= 1, f"{session}: the prompt of {ask.key} was given to an agent {count} times"
        for each in ask.accepted:
            if ended.get(each.turn) == "done":
                assert count == 1, f"{session}: {ask.key} is done, and no agent was given it"
