"""Streams without frames show all other events once and in order, also across reconnects.

The stream becomes live and sends heartbeats, although the filtered events would fill it.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.server.kit import Served, shared
from tests.server.streams.stream_clients import NDJSON, SSE, Client, body, is_live
from tests.server.streams.test_follower_marks import MANY, of, said
from tests.server.streams.test_shared_pages import Reader, last_seq, streams_of
from tests.thorough import thorough

from banksman import Host
from banksman.core.session.event import FRAMES
from banksman.server.streams.event_format import StreamForm
from banksman.server.streams.sources import PAGE_EVENTS_MAX, SCAN_EVENTS_MAX, ManySessions, OneSession
from banksman.testing import fake_agent
from banksman.testing.checks import Message

pytestmark = thorough


@pytest.fixture(scope="module", params=["memory:", None], ids=["memory", "sqlite"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    settings: dict[str, Any] = {} if request.param is None else {"store": request.param}
    with shared(tmp_path_factory.mktemp("server"), **settings) as served:
        yield served


@pytest.fixture(params=["memory:", None], ids=["memory", "sqlite"])
def fresh(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Served]:
    settings: dict[str, Any] = {} if request.param is None else {"store": request.param}
    with Served(tmp_path / "server", **settings) as served:
        yield served


def own(served: Served, session: str) -> list[Any]:
    return served.get(f"{of(session)}?frames=0&limit=1000")["events"]


def shown(client: Client) -> list[Any]:
    """Return all events that the client received, over all its visits."""
    return [body(message) for visit in client.visits for message in visit.messages if message.id is not None]


def ids(client: Client) -> list[str]:
    return [message.id for visit in client.visits for message in visit.messages if message.id is not None]


def ends(turn: str) -> Callable[[Message], bool]:
    def is_it(message: Message) -> bool:
        return message.id is not None and (event := body(message))["kind"] == "turn.ended" and event["turn"] == turn

    return is_it


@pytest.mark.thorough
@pytest.mark.parametrize("accept", [SSE, NDJSON])
def test_stream_without_frames_loses_and_repeats_nothing_across_reconnects(fresh: Served, accept: str) -> None:
    session = fresh.open()
    for number in range(3):
        said(fresh, session, f"{number}\n@@stream 30 0 漢")
    turn = fresh.ask(session, "@@stream 60 0.005 字")
    last = ends(turn)
    chance = random.Random(7)
    for path in (f"{of(session)}?frames=0", f"{MANY}?frames_of="):
        client = Client(fresh.port, path, accept=accept)
        is_over: list[bool] = []

        def see(message: Message, is_over: list[bool] = is_over) -> bool:
            is_over += [True] if last(message) else []
            return bool(is_over)

        for _ in range(200):
            client.visit(bytes_max=chance.randrange(300, 3000), until=see, resets=chance.random() < 0.5)
            if is_over:
                break
        events = [{name: value for name, value in event.items() if name != "position"} for event in shown(client)]
        assert events == [event for event in own(fresh, session) if event["seq"] <= events[-1]["seq"]]
        assert len(client.visits) > 3


def test_stream_of_many_includes_frames_of_watched_sessions_only(served: Served) -> None:
    watched, other, third = served.open(name="watched"), served.open(name="other"), served.open()
    for session in (watched, other, third):
        said(served, session, "hello\n@@stream 20 0 漢")
    everything = Client(served.port, MANY)
    everything.visit(until=is_live)
    places = {(event["session"], event["seq"]): event for event in shown(everything)}
    for query, sessions in (
        ("frames_of=watched", {watched}),
        (f"frames_of={watched},other,,", {watched, other}),
        ("frames_of=", set[str]()),
        ("frames_of=no-such-session", set[str]()),
        (f"frames_of={third}&sessions={third},watched", {third}),
    ):
        client = Client(served.port, f"{MANY}?{query}")
        client.visit(until=is_live)
        wanted = [
            event
            for event in places.values()
            if (event["kind"] not in FRAMES or event["session"] in sessions)
            and ("&sessions=" not in query or event["session"] in (third, watched))
        ]
        assert shown(client) == wanted, query
        # A position belongs to the store, whichever stream gave it: without a filter, all events behind it follow.
        middle = ids(client)[5]
        late = Client(served.port, MANY, after=middle)
        late.visit(until=is_live)
        assert ids(late) == ids(everything)[ids(everything).index(middle) + 1 :]
    with served.stream(f"{MANY}?frames_of={','.join(f's{number}' for number in range(501))}") as stream:
        assert stream.status == 400


def test_stream_after_now_is_live_at_once_and_sees_new_events(served: Served) -> None:
    session = served.open()
    said(served, session, "before\n@@stream 30 0 漢")
    everything = Client(served.port, MANY)
    everything.visit(until=is_live)
    for query in ("after=now", "after=now&frames_of=", f"after=now&sessions={session}"):
        with served.stream(f"{MANY}?{query}") as stream:
            messages = stream.messages()
            live = next(messages)
            assert (live.event, live.data["head"]) == ("stream.live", everything.place), query
            turn = served.ask(session, "now")
            first = next(message for message in messages if message.id is not None)
            assert (first.data["kind"], first.data["turn"]) == ("turn.queued", turn)
        served.outcome(session, turn)
        everything.visit(until=is_live)
    # A browser that lost its connection requests the same URL, with its position.
    with served.stream(f"{MANY}?after=now", after=first.id) as stream:
        again = stream.until_live()
        assert again[0].data["seq"] == first.data["seq"] + 1
    # The stream of one session has no such place.
    with served.stream(f"{of(session)}?after=now") as stream:
        assert stream.status == 422


def test_stream_after_now_works_on_an_empty_store(fresh: Served) -> None:
    with fresh.stream(f"{MANY}?after=now") as stream:
        assert next(stream.messages()).event == "stream.live"
        session = fresh.open()
        assert next(message for message in stream.messages() if message.id is not None).data["session"] == session


@pytest.mark.thorough
@pytest.mark.parametrize("path", ["one", "many"])
def test_stream_that_filters_everything_still_sends_heartbeats(tmp_path: Path, path: str) -> None:
    with Served(tmp_path / "server", heartbeat_seconds=0.2) as served:
        session = served.open()
        # More often than the heartbeat, and for much longer.
        turn = served.ask(session, "@@stream 3000 0.02 漢")
        with served.stream(f"{of(session)}?frames=0" if path == "one" else f"{MANY}?frames_of=") as stream:
            kinds = (message.event or message.data["kind"] for message in stream.messages())
            wanted = ["turn.started", "stream.heartbeat", "stream.heartbeat", "stream.heartbeat"]
            seen: list[str] = []
            for kind in kinds:
                seen += [kind] if kind == wanted[len(seen)] else []
                assert kind != "turn.ended", "no sign of life while it was said"
                if len(seen) == len(wanted):
                    break
        served.post(f"/v1/sessions/{session}/turns/{turn}/interrupt")


@pytest.mark.parametrize("store", ["memory:", "sqlite"])
@pytest.mark.parametrize("is_many", [False, True], ids=["one", "many"])
async def test_page_without_visible_events_advances_the_cursor(tmp_path: Path, store: str, is_many: bool) -> None:
    where = store if store == "memory:" else f"sqlite:{tmp_path / 'log.sqlite'}"
    async with Host(where) as host, asyncio.timeout(60):
        session = await host.open("claude", command=fake_agent.command())
        await (await session.ask(f"@@stream {2 * SCAN_EVENTS_MAX} 0 漢")).outcome()
        count = await last_seq(session)
        nobody, everybody = frozenset[str](), frozenset((session.id,))
        for is_shown in (False, True):
            source: Any = OneSession(session, raw=False, frames=is_shown)
            if is_many:
                source = ManySessions(host, None, raw=False, frames_of=everybody if is_shown else nobody)
            place = await source.begin(None)
            total, empty = 0, 0
            for _ in range(count):
                if await source.is_at_end(place):
                    break
                page = await source.next(place, StreamForm.SSE)
                assert page.place != place
                assert page.events <= PAGE_EVENTS_MAX
                place, total, empty = page.place, total + page.events, empty + (not page.data)
            events = [event async for event in session.events() if is_shown or not event.is_frame]
            assert total == len(events)
            assert bool(empty) is not is_shown


async def test_page_cache_is_separate_for_each_form_of_stream() -> None:
    """All readers are at the same place. The cache of one form does not serve another."""
    async with Host("memory:") as host, asyncio.timeout(60):
        session = await host.open("claude", command=fake_agent.command())
        await (await session.ask("@@stream 20 0 漢")).outcome()
        count = await last_seq(session)
        streams = streams_of()
        one = [
            OneSession(session, raw=False, partial=partial, frames=frames)
            for partial, frames in itertools.product((False, True), repeat=2)
        ]
        many = [
            ManySessions(host, None, raw=False, partial=partial, frames_of=frames_of)
            for partial, frames_of in itertools.product((False, True), (None, frozenset[str](), frozenset("x")))
        ]
        readers = [Reader(streams, source, await source.begin(None), "session") for source in one]
        readers += [Reader(streams, source, await source.begin(None), "many") for source in many]
        running = [reader.start() for reader in readers]
        events = [event async for event in session.events()]
        few = sum(not event.is_frame for event in events)
        # In the order of the sources above.
        for reader, wanted in zip(readers, (few, count, few, count, count, few, few, count, few, few), strict=True):
            await reader.until(wanted)
            found = [body(message) for message in reader.messages if message.id is not None]
            assert len(found) == wanted
        with_partial = [any(b'"partial"' in message.data for message in reader.messages) for reader in readers]
        assert with_partial == [False, False, False, True, False, False, False, True, False, False]
        streams.closing.set_result(None)
        await asyncio.gather(*running)
        await streams.pages.close()
