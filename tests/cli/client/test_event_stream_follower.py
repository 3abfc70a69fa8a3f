"""Event follower: whatever happens to its connections, it yields each event once and omits none."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from tests.cli.client.player import SSE, Player, Silence, answer

from banksman.cli.client import event_stream
from banksman.cli.client.client import Client
from banksman.cli.client.discovery import named
from banksman.cli.client.event_stream import EventFollower, StreamBroken
from banksman.cli.client.exchange import NoServer, NotLetIn, RequestRefused


def stored(seq: int) -> bytes:
    event = {"cursor": f"2.{seq}", "session": "s", "epoch": 2, "seq": seq, "at": 0.0, "turn": None, "kind": "update"}
    return f"id: 2.{seq}\ndata: {json.dumps(event)}\n\n".encode()


def made(kind: str, **more: object) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'kind': kind, **more})}\n\n".encode()


def place_of(request: str) -> int:
    """Return the last seq that the client has, according to its request."""
    header = re.search(r"Last-Event-ID: [0-9]+\.([0-9]+)", request)
    query = re.search(r"[?&]after=[0-9]+\.([0-9]+)", request)
    assert header is None or query is None  # `after` would win, and never advance.
    found = header or query
    return 0 if found is None else int(found[1])


def from_place(request: str, last: int) -> bytes:
    """Return the answer of a correct server: the rest of the events."""
    events = [stored(seq) for seq in range(place_of(request) + 1, last + 1)]
    return b"retry: 0\n\n" + b"".join(events) + made("stream.live", head=f"2.{last}")


def follower(player: Player, **options: Any) -> EventFollower:
    pauses: list[float] = []
    options.setdefault("pause", pauses.append)
    return EventFollower(Client(lambda: named(player.url)), "s", **options)


def seqs(follower: EventFollower, count: int) -> list[int]:
    """Return the seqs of the first `count` events."""
    with contextlib.closing(follower.events()) as events:
        return [each["seq"] for each in itertools.islice(events, count)]


@pytest.mark.thorough
@pytest.mark.parametrize("is_reset", [False, True], ids=["end", "reset"])
def test_follower_of_a_stream_cut_at_any_byte_joins_exactly(is_reset: bool) -> None:
    last = 4
    whole = SSE + from_place("", last)
    # A later cut has no effect.
    for cut in range(len(whole) - len(made("stream.live", head=f"2.{last}"))):
        answers: Iterator[bytes | None] = iter([whole[:cut] if not is_reset or cut > len(SSE) else None])
        with Player(lambda request, answers=answers: next(answers, SSE + from_place(request, last))) as player:
            assert seqs(follower(player), 4) == [1, 2, 3, 4], cut
            assert len(player.requests) == 2


def test_follower_of_a_chunked_stream_cut_at_any_byte_joins_exactly() -> None:
    last = 3
    head = SSE.replace(b"Connection: close", b"Transfer-Encoding: chunked")

    def chunked(data: bytes) -> bytes:
        # Chunks that end anywhere, as from a proxy.
        pieces = [data[at : at + 37] for at in range(0, len(data), 37)]
        return head + b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)

    whole = chunked(from_place("", last))
    for cut in range(len(head), len(whole)):
        answers = iter([whole[:cut]])
        with Player(lambda request, answers=answers: next(answers, chunked(from_place(request, last)))) as player:
            assert seqs(follower(player), 3) == [1, 2, 3], cut


def test_follower_reconnects_when_the_server_closes() -> None:
    pauses: list[float] = []
    closing = (
        SSE + b"retry: 100\n\n" + stored(1) + made("stream.closing", reason="closing", retry_seconds=2.0) + stored(9)
    )
    answers = iter([closing])
    with Player(lambda request: next(answers, SSE + from_place(request, 3))) as player:
        assert seqs(follower(player, pause=pauses.append), 3) == [1, 2, 3]
    # The requested time, reduced by the jitter that keeps clients from returning together.
    assert [1.5 <= pause <= 2.0 for pause in pauses] == [True]


def test_follower_reports_a_loss_and_its_return_once() -> None:
    told: list[str] = []

    def on_lost(error: Exception) -> None:
        told.append(type(error).__name__)

    # Lost twice in a row, without an event in between.
    answers = iter([SSE + stored(1), SSE, None])
    with Player(lambda request: next(answers, SSE + from_place(request, 3))) as player:
        found = follower(
            player,
            query={"partial": 1},
            on_lost=on_lost,
            on_back=lambda: told.append("back"),
        )
        assert seqs(found, 3) == [1, 2, 3]
        assert len(player.requests) == 4
        assert all("partial=1" in request.partition("\r\n")[0] for request in player.requests)
    assert told == ["Lost", "back"]


def test_follower_never_repeats_an_event() -> None:
    # A server that starts earlier than requested, and repeats an event.
    answers = iter([SSE + stored(1) + stored(2) + stored(2), SSE + stored(1) + stored(2) + stored(3)])
    with Player(lambda request: next(answers)) as player:
        assert seqs(follower(player), 3) == [1, 2, 3]


def test_follower_reconnects_at_a_missing_event() -> None:
    answers = iter([SSE + stored(1) + stored(3) + stored(4)])
    with Player(lambda request: next(answers, SSE + from_place(request, 4))) as player:
        assert seqs(follower(player), 4) == [1, 2, 3, 4]
        assert [place_of(request) for request in player.requests] == [0, 1]


def test_follower_raises_when_an_event_stays_missing() -> None:
    said = SSE + b"".join(stored(seq) for seq in (1, 2, 5, 6))
    with Player(lambda request: said) as player, pytest.raises(StreamBroken, match="events 3 to 4"):
        seqs(follower(player), 9)
    assert len(player.requests) == 2


def test_follower_reports_a_gap_once_and_continues_after_it() -> None:
    gap = made("stream.gap", session="s", first=1, last=5)
    more = made("stream.gap", session="s", first=1, last=7)
    # The stream is cut before the first event after the gap, and retention continues meanwhile.
    answers = iter([SSE + gap, SSE + gap, SSE + more + stored(8)])
    with (
        Player(lambda request: next(answers, SSE + stored(9))) as player,
        contextlib.closing(follower(player).events()) as events,
    ):
        given = list(itertools.islice(events, 4))
    told = [(each["kind"], each.get("seq"), each.get("first"), each.get("last")) for each in given]
    assert told == [
        ("stream.gap", None, 1, 5),
        ("stream.gap", None, 6, 7),
        ("update", 8, None, None),
        ("update", 9, None, None),
    ]


def test_follower_begins_at_its_cursor_and_reconnects_at_the_latest() -> None:
    answers = iter([SSE + stored(4)])
    with Player(lambda request: next(answers, SSE + from_place(request, 5))) as player:
        assert seqs(follower(player, after="2.3"), 2) == [4, 5]
        assert [place_of(request) for request in player.requests] == [3, 4]


def test_follower_stopped_in_the_middle_resumes_there() -> None:
    with Player(lambda request: SSE + from_place(request, 5)) as player:
        reader = follower(player)
        events = reader.events()
        assert [each["seq"] for each in itertools.islice(events, 2)] == [1, 2]
        events.close()
        assert reader.cursor == "2.2"
        assert seqs(reader, 3) == [3, 4, 5]


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_follower_waits_on_busy_answers_only_after_its_first_connection(status: int) -> None:
    busy = answer(status, {"title": "Busy", "detail": "later"}, headers="Retry-After: 3\r\n")
    pauses: list[float] = []
    answers = iter([SSE + stored(1), busy, busy])
    with Player(lambda request: next(answers, SSE + from_place(request, 2))) as player:
        assert seqs(follower(player, pause=pauses.append), 2) == [1, 2]
    # Longer each time, at least the requested time, and never more than the limit.
    assert pauses[0] <= 0.1
    assert 2.25 <= pauses[1] <= 5.0
    assert 3.75 <= pauses[2] <= 5.0
    with Player(lambda request: busy) as player, pytest.raises(RequestRefused, match="later"):
        seqs(follower(player), 9)


def test_follower_treats_a_client_error_as_final() -> None:
    gone = answer(404, {"title": "NotFound", "detail": "there is no session s"})
    for status, kind in ((401, NotLetIn), (404, RequestRefused), (410, RequestRefused)):
        answers = iter([SSE + stored(1)])
        no = gone.replace(b"404", str(status).encode())
        with Player(lambda request, answers=answers, no=no: next(answers, no)) as player, pytest.raises(kind):
            seqs(follower(player), 9)
        assert len(player.requests) == 2


def test_follower_gives_up_on_a_server_that_stays_away(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def pause(seconds: float) -> None:
        nonlocal now
        pauses.append(seconds)
        now += seconds

    pauses: list[float] = []
    monkeypatch.setattr(event_stream.time, "monotonic", lambda: now)
    with Player(lambda request: SSE + stored(1)) as player:
        reader = follower(player, pause=pause)
        events = reader.events()
        assert next(events)["seq"] == 1
    with pytest.raises(NoServer, match="no server at"):
        next(events)
    assert event_stream.GONE_SECONDS_MAX < now < event_stream.GONE_SECONDS_MAX + 2 * event_stream.PAUSE_SECONDS_MAX
    assert max(pauses) <= event_stream.PAUSE_SECONDS_MAX
    assert len(pauses) < 100


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"retry: 100\n\n",
        made("stream.closing", reason="closing", retry_seconds=1.0),
        made("stream.live", head="2.1"),
        made("stream.live", head="2.1") + made("stream.closing", reason="closing", retry_seconds=1.0),
        stored(1),
    ],
    ids=["nothing", "no event", "that it goes", "that it is there", "both", "what is known"],
)
@pytest.mark.parametrize("at_first", [False, True])
def test_follower_gives_up_on_a_server_that_sends_nothing(
    monkeypatch: pytest.MonkeyPatch, said: bytes, at_first: bool
) -> None:
    """The server answers and closes immediately each time. Without a limit the follower would never end."""
    now = 0.0
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        nonlocal now
        pauses.append(seconds)
        now += seconds
        assert now < 10 * event_stream.GONE_SECONDS_MAX, "it never gives up"

    monkeypatch.setattr(event_stream.time, "monotonic", lambda: now)
    after = "2.1" if at_first else None
    answers = iter([] if at_first else [SSE + stored(1)])
    with Player(lambda request: next(answers, SSE + said)) as player:
        events = follower(player, after=after, pause=pause).events()
        assert at_first or next(events)["seq"] == 1
        with pytest.raises(NoServer, match="closed the connection before it sent an event"):
            next(events)
    assert event_stream.GONE_SECONDS_MAX < now < event_stream.GONE_SECONDS_MAX + 2 * event_stream.PAUSE_SECONDS_MAX
    assert len(pauses) < 400


def test_follower_keeps_following_a_quiet_session_with_cut_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a proxy whose timeout is shorter than the pause between two events."""
    now = 0.0
    monkeypatch.setattr(event_stream.time, "monotonic", lambda: now)
    visits = 100

    def play(request: str) -> bytes:
        nonlocal now
        if len(player.requests) > visits:
            return SSE + from_place(request, 1)
        now += 20.0  # The connection lasted this long.
        return SSE + made("stream.live", head="2.0")

    pauses: list[float] = []
    with Player(play) as player:
        assert seqs(follower(player, pause=pauses.append), 1) == [1]
    assert len(pauses) == visits
    assert max(pauses) <= event_stream.PAUSE_SECONDS_MIN


def test_follower_leaves_a_silent_server_and_reconnects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "SILENCE_SECONDS_MAX", 0.2)
    answers = iter([Silence(SSE + stored(1))])
    with Player(lambda request: next(answers, SSE + from_place(request, 2))) as player:
        assert seqs(follower(player), 2) == [1, 2]


@pytest.mark.parametrize(
    "said",
    [
        answer(200, {"events": []}),
        SSE + b"data: <html>\n\n",
        SSE + b"data: " + b"[" * 100_000 + b"\n\n",
        SSE + stored(1).replace(b'"cursor": "2.1"', b'"cursor": "2.1\\r\\nX: y"'),
    ],
    ids=["another answer", "no JSON", "endless JSON", "no cursor"],
)
def test_follower_raises_on_a_foreign_stream_without_a_retry(said: bytes) -> None:
    with Player(lambda request: said) as player, pytest.raises(StreamBroken):
        seqs(follower(player), 9)
    assert len(player.requests) == 1
