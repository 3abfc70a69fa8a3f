"""Pages of the log: backward from a cursor, without the agent's frames, and with partial text."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.server.kit import Served, shared
from tests.server.streams.test_follower_marks import of, said, trimmed
from tests.thorough import thorough

from banksman import Host
from banksman.core.session.event import FRAMES, UPDATE, Entry, entry
from banksman.server.api import event_routes
from banksman.server.api.event_routes import PageRequest
from banksman.store.log_values import READ_EVENTS_MAX
from banksman.store.sqlite import SqliteLog
from banksman.testing import fake_agent

# Beyond the end of every log.
BEYOND = 999_999_999


@pytest.fixture(scope="module", params=["memory:", None], ids=["memory", "sqlite"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    settings: dict[str, Any] = {} if request.param is None else {"store": request.param}
    with shared(tmp_path_factory.mktemp("server"), **settings) as served:
        yield served


def all_events(served: Served, session: str, query: str = "") -> list[Any]:
    """Read all events forward, page by page."""
    found: list[Any] = []
    after = ""
    while (page := served.get(f"{of(session)}?limit=7{after}{query}"))["events"]:
        found += page["events"]
        after = f"&after={page['next']}"
    return found


def backward(served: Served, session: str, limit: int, query: str = "") -> list[Any]:
    """Read all events backward, page by page; return them in the order of the log."""
    found: list[Any] = []
    place: Any = BEYOND
    while (page := served.get(f"{of(session)}?before={place}&limit={limit}{query}"))["events"]:
        assert len(page["events"]) <= limit
        assert page["next"] == page["events"][-1]["cursor"]
        found = page["events"] + found
        place = page["events"][0]["cursor"]
    return found


def test_events_read_backward_equal_events_read_forward(served: Served) -> None:
    session = served.open()
    said(served, session, "@@stream 20 0 漢")
    said(served, session, "again")
    events = all_events(served, session)
    assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
    for limit in (1, 7, 1000):
        assert backward(served, session, limit) == events
    page = served.get(f"{of(session)}?before=5&limit=2")
    assert [event["seq"] for event in page["events"]] == [3, 4]
    assert (page["head"], page["first"]) == (events[-1]["cursor"], events[0]["cursor"])
    # With the whole cursor, and from right behind the end.
    assert served.get(f"{of(session)}?before={events[4]['cursor']}&limit=2") == page
    assert served.get(f"{of(session)}?before={len(events) + 1}&limit=1")["events"] == events[-1:]
    for nothing in (0, 1, events[0]["cursor"]):
        page = served.get(f"{of(session)}?before={nothing}")
        assert (page["events"], page["next"], page["first"]) == ([], None, events[0]["cursor"])


def test_events_without_frames_are_complete(served: Served) -> None:
    session = served.open()
    for number in range(3):
        said(served, session, f"{number}\n@@stream 50 0 漢")
    own = [event for event in all_events(served, session) if event["kind"] not in FRAMES]
    assert own[-1]["kind"] == "turn.ended"
    assert all_events(served, session, "&frames=0") == own
    for limit in (1, 5, 1000):
        assert backward(served, session, limit, "&frames=0") == own
    # A reader at the end resumes from the head, and not from the last event that it received.
    page = served.get(f"{of(session)}?frames=0&limit=1000")
    assert page["next"] == page["head"]
    again = served.get(f"{of(session)}?frames=0&after={page['next']}")
    assert (again["events"], again["next"]) == ([], page["next"])
    said(served, session, "more")
    more = served.get(f"{of(session)}?frames=0&limit=1000&after={page['next']}")["events"]
    assert [event["kind"] for event in more] == ["turn.queued", "turn.started", "usage.reported", "turn.ended"]


@pytest.mark.thorough
def test_events_route_refuses_contradictory_query(served: Served) -> None:
    session = served.open()
    said(served, session, "hello")
    epoch, _, seq = str(served.get(of(session))["head"]).rpartition(".")
    for query, status in (
        ("before=3&after=1", 422),
        ("before=3&after=", 422),
        ("before=x", 422),
        ("before=", 422),
        ("before=-1", 422),
        (f"before={int(epoch) + 1}.{seq}", 410),
        (f"before={epoch}.{int(seq) + 1}", 410),
        ("frames=2", 400),
        ("partial=x", 400),
    ):
        answer = served.request("GET", f"{of(session)}?{query}")
        assert answer.status == status, (query, answer)
        assert answer.json["hint"], query
    with served.stream(f"{of(session)}?before=3") as stream:
        assert stream.status == 422


@thorough
def test_events_backward_end_where_retention_began(tmp_path: Path) -> None:
    with trimmed(tmp_path / "served") as (served, session, early, first):
        kept = all_events(served, session)
        assert kept[0]["seq"] == first
        assert backward(served, session, 40) == kept
        page = served.get(f"{of(session)}?before={first + 3}&limit=100")
        assert [event["seq"] for event in page["events"]] == [first, first + 1, first + 2]
        assert page["first"] == kept[0]["cursor"]
        # There is nothing before the trimmed events, and the page says where the log begins.
        for place in (early.place, first, 3):
            page = served.get(f"{of(session)}?before={place}")
            assert (page["events"], page["first"]) == ([], kept[0]["cursor"])


@pytest.mark.thorough
async def test_events_backward_pages_are_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A backward page keeps the newest events. The byte limit drops events at the older end."""
    monkeypatch.setattr(event_routes, "PAGE_BYTES_MAX", 5000)
    path = tmp_path / "log.sqlite"
    async with Host(f"sqlite:{path}") as host:
        session = await host.open("claude", command=fake_agent.command())
        for number in range(4):
            await (await session.ask(f"{number} " + "z" * (3 << 20))).outcome()
    # A new host: the first has the last writes in memory. Its pages have a limit in bytes.
    async with Host(f"sqlite:{path}") as host, asyncio.timeout(60):
        session = host.session(session.id)
        seqs = [event.seq async for event in session.events(waits=False)]
        found: list[int] = []
        place = BEYOND
        while page := await session.page_before(place, limit=READ_EVENTS_MAX):
            found = [event.seq for event in page] + found
            place = page[0].seq
        assert found == seqs
        place = seqs[-1] + 1
        pages = 0
        while page := (await event_routes.page_before(session, str(place), PageRequest(limit=10)))["events"]:
            assert len(page) == 1 or sum(len(bytes(event)) for event in page) <= 5000
            place -= len(page)
            pages += 1
        assert place == 1
        assert pages > len(seqs) / 10


@pytest.mark.thorough
@pytest.mark.parametrize("accept", ["page", "text/event-stream"])
def test_events_with_partial_text_are_repeated_when_whole(served: Served, accept: str) -> None:
    session = served.open({"prompt 1": ["speak 0 one two three"]})
    said(served, session, "go")

    def read(query: str) -> list[Any]:
        if accept == "page":
            return served.get(f"{of(session)}?limit=1000{query}")["events"]
        with served.stream(f"{of(session)}?{query}") as stream:
            return [message.data for message in stream.until_live()]

    events = read("&partial=1")
    partial = [event["body"]["partial"] for event in events if "partial" in event["body"]]
    assert all(len(updates) == 1 for updates in partial)
    assert {updates[0]["sessionUpdate"] for updates in partial} == {"agent_message_chunk"}
    assert "".join(updates[0]["content"]["text"] for updates in partial) == "one two three"
    whole = [
        (event["seq"], update["content"]["text"])
        for event in events
        for update in event["body"].get("updates", ())
        if update["sessionUpdate"] == "agent_message_chunk"
    ]
    assert [text for _, text in whole] == ["one two three"]
    assert max(event["seq"] for event in events if "partial" in event["body"]) < whole[0][0]
    # An event has partial updates or whole ones, and a reader that did not request partial ones gets none.
    assert not [event for event in events if "partial" in event["body"] and event["body"]["updates"]]
    plain = read("")
    assert not [event for event in plain if "partial" in event["body"]]
    for event in events:
        event["body"].pop("partial", None)
    assert events == plain


# -- a long session ----------------------------------------------------------------------------------------------------
LINE = (
    b'{"type":"stream_event","event":{"type":"content_block_delta","index":0,"delta":{"type":"text_delta",'
    b'"text":" word"}},"session_id":"x","parent_tool_use_id":null,"uuid":"6a9f"}'
)
EVENTS, OWN = 100_000, 50


async def write_long(path: Path) -> None:
    log = SqliteLog(str(path))
    epoch = await log.claim("long", agent="claude")
    chunk: list[Entry] = [*[(None, UPDATE, LINE)] * 199, entry(None, "clock.warning", clock="silence")]
    quiet: list[Entry] = [(None, UPDATE, LINE)] * 200
    for number in range(EVENTS // 200):
        done = asyncio.get_running_loop().create_future()
        entries = chunk if number % (EVENTS // 200 // OWN) == 0 else quiet
        log.append("long", epoch, number * 200, 1.0, entries, done.set_result)
        assert await done is None
    await log.close()


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process. Unlike wall time, it does not depend on the load of the machine."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.thorough
def test_events_without_frames_are_found_quickly_among_many_frames(tmp_path: Path) -> None:
    folder = tmp_path / "server"
    folder.mkdir()
    asyncio.run(write_long(folder / "store.db"))
    with Served(folder) as served:
        for query in ("?frames=0&limit=1000", f"?before={BEYOND}&frames=0&limit=1000"):
            seconds: list[float] = []
            for _ in range(3):
                begin = cpu_seconds(served.pid)
                page = served.get(of("long") + query)
                seconds.append(cpu_seconds(served.pid) - begin)
                assert len(page["events"]) == OWN
            assert min(seconds) < 0.5, (query, seconds)
        # The end is read quickly, however much is before it.
        begin = cpu_seconds(served.pid)
        assert len(served.get(f"{of('long')}?before={BEYOND}&limit=400")["events"]) == 400
        assert cpu_seconds(served.pid) - begin < 0.5
