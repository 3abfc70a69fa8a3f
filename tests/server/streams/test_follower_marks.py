"""Marks of a stream besides events: live, heartbeat, gap and closing."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from tests.server.kit import Sent, Served, Stream
from tests.server.streams.stream_clients import NDJSON, SSE, Client, body, is_live, walk

from banksman.server.streams.sources import PAGE_EVENTS_MAX
from banksman.testing import checks
from banksman.testing.checks import Message

MANY = "/v1/events"


def of(session: str) -> str:
    return f"/v1/sessions/{session}/events"


def said(served: Served, session: str, prompt: str) -> None:
    served.outcome(session, served.ask(session, prompt))


# -- stream.live -----------------------------------------------------------------------------------------------------
def test_stream_is_live_once_after_the_replay(served: Served) -> None:
    session = served.open()
    said(served, session, f"@@stream {2 * PAGE_EVENTS_MAX} 0 漢")
    places: dict[str, list[str]] = {}
    for path in (of(session), MANY):
        client = Client(served.port, path)
        client.visit(until=is_live)
        places[path] = [message.id or "" for message in client.view().events.values()]
    # Also when the last page is full: no shorter page marks the end then.
    full = PAGE_EVENTS_MAX
    for path, ids in places.items():
        for count in (0, 1, full - 1, full, full + 1, 2 * full, len(ids) - 1):
            client = Client(served.port, path, after=ids[-count - 1])
            client.visit(until=is_live)
            messages = client.visits[0].messages
            assert [message.id for message in messages[:-1]] == ids[len(ids) - count :]
            assert body(messages[-1]) == {"kind": "stream.live", "head": ids[-1]}


@pytest.mark.thorough
def test_stream_is_live_once_while_events_are_written(tmp_path: Path) -> None:
    with Served(tmp_path / "served", heartbeat_seconds=0.1) as served:
        session = served.open()
        said(served, session, "@@stream 300 0 漢")
        turn = served.ask(session, "@@stream 300 0.002 字")

        def see(path: str) -> Client:
            wanted = {"live", turn}

            def is_all(message: Message) -> bool:
                shown = body(message)
                if is_live(message):
                    wanted.discard("live")
                elif shown["kind"] == "turn.ended":
                    wanted.discard(shown["turn"])
                return not wanted

            client = Client(served.port, path)
            assert client.visit(until=is_all).is_left
            return client

        with ThreadPoolExecutor(2) as threads:
            for client in threads.map(see, (of(session), MANY)):
                assert sum(map(is_live, client.visits[0].messages)) == 1
                assert len(client.view().events) > 600


# -- stream.heartbeat ------------------------------------------------------------------------------------------------
@pytest.mark.thorough
@pytest.mark.parametrize("accept", [SSE, NDJSON])
def test_quiet_stream_sends_heartbeats(tmp_path: Path, accept: str) -> None:
    with Served(tmp_path / "served", heartbeat_seconds=0.2) as served:
        session = served.open()
        said(served, session, "hello")
        for path in (of(session), MANY):
            client = Client(served.port, path, accept=accept)
            beats: list[float] = []

            def third(message: Message, beats: list[float] = beats) -> bool:
                if message.event == "stream.heartbeat":
                    beats.append(time.monotonic())
                return len(beats) == 3

            client.visit(until=third)
            *_, live, first, second, last = client.visits[0].messages
            assert is_live(live)
            assert body(first) == body(second) == body(last) == {"kind": "stream.heartbeat", "head": client.place}
            assert beats[2] - beats[0] > 0.3  # By its timer, and not in every iteration of the loop.
            client.view()


@pytest.mark.thorough
def test_busy_stream_sends_no_heartbeat(tmp_path: Path) -> None:
    with Served(tmp_path / "served", heartbeat_seconds=30) as served:
        session = served.open()
        turn = served.ask(session, "@@stream 50 0.01 漢")
        client = Client(served.port, of(session))
        client.visit(until=lambda message: body(message)["kind"] == "turn.ended")
        assert not [message for message in client.visits[0].messages if message.event == "stream.heartbeat"]
        assert served.outcome(session, turn)["kind"] == "done"


# -- stream.gap ------------------------------------------------------------------------------------------------------
KEEP = 30_000


@contextmanager
def trimmed(folder: Path) -> Generator[tuple[Served, str, Client, int]]:
    """Serve a session that has lost its beginning; yield a client that saw some of the lost part, and the first seq."""
    with Served(folder, keep_bytes=KEEP) as served:
        session = served.open(name="long")
        said(served, session, "hello")
        early = Client(served.port, of(session))
        early.visit(until=is_live)
        assert not early.view().gaps
        for number in range(20):
            said(served, session, f"turn {number}\n@@stream 100 0 漢字")
            page = served.get(f"{of(session)}?limit=1")
            if "gap" in page and page["gap"]["last"] > 300:
                break
        else:
            raise AssertionError("nothing was taken")
        # A server may show cached events after they are gone. A new server cannot.
        served.stop()
        served.start()
        said(served, session, "here again")
        yield served, session, early, served.get(f"{of(session)}?limit=1")["gap"]["last"] + 1


def test_stream_reports_range_dropped_by_retention(tmp_path: Path) -> None:
    with trimmed(tmp_path / "served") as (served, session, early, first):
        seen = early.view().heads()[session]
        views = [walk(served, session)]
        assert views[0].gaps == {session: [(1, first - 1)]}
        # A page reports to a returning reader only the range that it missed.
        page = served.get(f"{of(session)}?limit=5&after={early.place}")
        assert page["gap"] == {"first": seen + 1, "last": first - 1}
        assert [event["seq"] for event in page["events"]] == list(range(first, first + 5))
        for accept in (SSE, NDJSON):
            new = Client(served.port, of(session), accept=accept)
            new.visit(until=is_live)
            views.append(new.view())
            assert views[-1].gaps == {session: [(1, first - 1)]}
            back = Client(served.port, of(session), accept=accept, after=early.place)
            back.visits = list(early.visits)
            back.visit(until=is_live)
            views.append(back.view())
            assert views[-1].gaps == {session: [(seen + 1, first - 1)]}
            # The stream of many sessions reports the gap too.
            many = Client(served.port, MANY, accept=accept)
            many.visit(until=is_live)
            views.append(many.view())
            assert views[-1].gaps == {session: [(1, first - 1)]}
        checks.views_agree(*views)
        heads = [view.heads() for view in views]
        assert all(head == heads[0] for head in heads)

        # A reader that knows the gap does not get it again.
        many = Client(served.port, MANY)
        many.visit(until=is_live)
        other = served.open()
        many.visit(until=is_live)
        assert not [message for message in many.visits[1].messages if message.event == "stream.gap"]
        assert set(many.view().heads()) == {session, other}


@pytest.mark.thorough
@pytest.mark.parametrize(
    "lost", ["id = (SELECT max(id) FROM chunks WHERE session = ?)", "session = ?"], ids=["the end", "all"]
)
def test_stream_of_many_reports_damaged_range_before_live(tmp_path: Path, lost: str) -> None:
    with Served(tmp_path / "served") as served:
        damaged, whole = served.open(), served.open()
        for session in (damaged, whole):
            said(served, session, "x")
        served.stop()
        with contextlib.closing(sqlite3.connect(served.folder / "store.db")) as store:
            store.execute(f"DELETE FROM chunks WHERE {lost}", (damaged,))
            [(head,)] = store.execute("SELECT seq FROM sessions WHERE id = ?", (damaged,)).fetchall()
            [(left,)] = store.execute("SELECT count(*) FROM chunks WHERE session = ?", (damaged,)).fetchall()
            store.commit()
        served.start()
        assert served.request("GET", of(damaged)).json["title"] == "StoreDamaged"
        for path, sessions in ((MANY, {damaged, whole}), (f"{MANY}?sessions={damaged}", {damaged})):
            client = Client(served.port, path)
            client.visit(until=is_live)
            view = client.view()
            assert view.gaps == {damaged: [(1, head)]}
            assert {session for session, _ in view.events} == (sessions if left else sessions - {damaged})
            if not left:
                continue
            # A reader that resumes from the last remaining event gets the gap as well.
            last = max(seq for session, seq in view.events if session == damaged)
            again = Client(served.port, path, after=view.events[damaged, last].id)
            again.visit(until=is_live)
            assert [m.event for m in again.visits[0].messages if m.event is not None] == ["stream.gap", "stream.live"]


# -- unknown history -------------------------------------------------------------------------------------------------
def test_stream_cursor_of_another_history_is_gone(served: Served) -> None:
    session = served.open()
    said(served, session, "hello")
    epoch, _, seq = str(served.get(of(session))["head"]).rpartition(".")
    for cursor in (f"{int(epoch) + 1}.{seq}", f"{epoch}.{int(seq) + 1}", "1.999999999", "999999999"):
        for accept in (SSE, NDJSON):
            for how in ({"path": f"{of(session)}?after={cursor}"}, {"path": of(session), "after": cursor}):
                with served.stream(accept=accept, **how) as stream:
                    assert stream.status == 410, (cursor, accept)
                    assert stream.headers["content-type"] == "application/problem+json"
    for cursor in (f"{int(epoch) + 1}.{seq}", f"{epoch}.{int(seq) + 1}"):
        answer = served.request("GET", f"{of(session)}?after={cursor}")
        assert (answer.status, answer.json["title"]) == (410, "HistoryLost")
        assert answer.json["hint"]
    # A malformed cursor is an error of the caller.
    for path in (f"{of(session)}?after=x", f"{MANY}?after=x"):
        with served.stream(path) as stream:
            assert stream.status == 422, path


# -- stream.closing --------------------------------------------------------------------------------------------------
def rest(stream: Stream) -> list[Sent]:
    return list(stream.messages())


@pytest.mark.thorough
def test_stream_of_deleted_session_ends(served: Served) -> None:
    session, other = served.open(), served.open()
    said(served, session, "hello")
    with served.stream(of(session)) as stream, served.stream(MANY) as many, served.stream(of(other)) as others:
        for open_one in (stream, many, others):
            open_one.until_live()
        assert served.request("DELETE", f"/v1/sessions/{session}?forget=1").status == 204
        *_, last = rest(stream)
        assert last.event == "stream.closing"
        assert last.id is None
        assert last.data["retry_seconds"] == 1.0
        assert "deleted" in last.data["reason"] or "no such" in last.data["reason"], last
        # Followers of other sessions see no change.
        said(served, other, "still here")
        seen = others.messages()
        assert next(message for message in seen if message.data["kind"] == "turn.ended")
        assert next(message for message in many.messages() if message.data["session"] == other)
    with served.stream(of(session)) as stream:
        assert stream.status == 404


@pytest.mark.thorough
def test_stream_survives_close_and_reopen_of_its_session(tmp_path: Path) -> None:
    with Served(tmp_path / "served") as served:
        session = served.open()
        said(served, session, "before")
        clients = [served.stream(of(session)), served.stream(MANY)]
        with ExitStack() as stack:
            streams = [stack.enter_context(client) for client in clients]
            known = [stream.until_live() for stream in streams]
            assert served.request("DELETE", f"/v1/sessions/{session}").json["phase"] == "closed"
            turn = served.ask(session, "after")
            assert served.outcome(session, turn)["kind"] == "done"
            for stream, before in zip(streams, known, strict=True):
                after: list[Sent] = []
                for message in stream.messages():
                    after.append(message)
                    if message.data["kind"] == "turn.ended":
                        break
                seqs = [message.data["seq"] for message in (*before, *after)]
                assert seqs == list(range(1, len(seqs) + 1))
                assert "session.closed" in [message.data["kind"] for message in after]


# -- limits ----------------------------------------------------------------------------------------------------------
@pytest.mark.thorough
def test_streams_per_client_are_bounded_with_retry_after(tmp_path: Path) -> None:
    with Served(tmp_path / "served", streams_max=3) as served:
        session = served.open()
        with ExitStack() as stack:
            streams = [stack.enter_context(served.stream(path)) for path in (of(session), of(session), MANY)]
            for stream in streams:
                stream.until_live()
            for path in (of(session), MANY):
                with served.stream(path) as refused:
                    assert refused.status == 429
                    assert int(refused.headers["retry-after"]) > 0
            assert served.get(of(session))["events"]  # A plain page is not counted.
        # The places are free again as soon as the server has noticed.
        wait_until(lambda: followers(served) == 0)
        with served.stream(of(session)) as stream:
            stream.until_live()


def followers(served: Served) -> int:
    lines = served.request("GET", "/metrics").body.decode().splitlines()
    return sum(int(float(line.split()[-1])) for line in lines if line.startswith("banksman_followers{"))


def wait_until(is_so: Callable[[], bool], seconds: float = 30.0) -> None:
    """Poll, because no event reports this. Each look is a round trip."""
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline
