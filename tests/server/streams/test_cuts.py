"""A stream that is cut at any byte resumes with the rest, and shows each event once."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.server.kit import Served
from tests.server.streams.stream_clients import NDJSON, SSE, Client, is_live, walk
from tests.thorough import IS_THOROUGH

from banksman.testing import checks

pytestmark = pytest.mark.thorough

# Only every n-th cut is made. The number has no divisor in common with the lengths of characters.
SHARE = 1 if IS_THOROUGH else 5
# Clients at the same time. More of them would only wait for each other.
CLIENTS = 3
# Characters of two, three and four bytes, so that a cut falls into each of them.
PROMPT = "grüße 漢字 🙂\n@@stream 2 0 é漢🙂\n@@say am Ende 🙂\n@@hang"
LAST = 'am Ende 🙂"}'.encode()

ONE = "/v1/sessions/short/events"
MANY = "/v1/events"


@pytest.mark.parametrize(
    ("path", "accept", "step"),
    [
        pytest.param(ONE, SSE, 1, id="sse"),
        # Almost the same code, so not at every byte, but in all characters.
        pytest.param(ONE, NDJSON, 3, id="ndjson"),
        pytest.param(MANY, SSE, 3, id="many-sse"),
        pytest.param(MANY, NDJSON, 7, id="many-ndjson"),
    ],
)
def test_stream_cut_at_any_byte_resumes_exactly(tmp_path: Path, path: str, accept: str, step: int) -> None:
    step *= SHARE
    with Served(tmp_path / "served") as served:
        session = served.open(name="short")
        served.ask(session, PROMPT)
        # The turn is running, and stays so.
        first = Client(served.port, path, accept=accept)
        first.visit(until=lambda message: LAST in message.data)
        whole = Client(served.port, path, accept=accept)
        size = whole.visit(until=is_live).bytes
        view = whole.view()
        known = walk(served, session)
        checks.views_agree(known, view, first.view())
        assert view.heads() == known.heads()
        assert len(view.events) > 10
        assert size > 3_000

        def cut(begin: int) -> None:
            _cut_each(range(begin * step, size + 1, CLIENTS * step), served.port, path, accept, view)

        with ThreadPoolExecutor(CLIENTS) as threads:
            list(threads.map(cut, range(CLIENTS)))


def _cut_each(cuts: Iterable[int], port: int, path: str, accept: str, whole: checks.View) -> None:
    heads = whole.heads()
    for count in cuts:
        # Each combination of leaving and resuming takes a quarter of the cuts.
        client = Client(port, path, accept=accept, uses_query=count % 2 == 1)
        # The same events may come in fewer chunks than before. Then the whole stream has a few bytes less.
        received = client.visit(bytes_max=count, until=is_live, resets=count % 4 < 2)
        assert received.is_left
        assert received.bytes == count or is_live(received.messages[-1])
        client.visit(until=is_live)
        view = client.view()
        # On a slow machine a watchdog may add events about the hanging turn. All earlier events are still there.
        assert all(view.heads()[session] >= seq for session, seq in heads.items()), f"cut at byte {count}"
        checks.views_agree(whole, view)
