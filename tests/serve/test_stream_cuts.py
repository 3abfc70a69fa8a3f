"""A stream that is cut at every byte: whoever comes back sees the rest, and everything once."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.serve.joining import NDJSON, SSE, Client, is_live, walk
from tests.serve.kit import Served

from banksman.testing import checks

# At once: more would only wait for each other.
CLIENTS = 3
# Characters of two, three and four bytes, so that a cut falls into each of them.
PROMPT = "grüße 漢字 🙂\n@@stream 2 0 é漢🙂\n@@say am Ende 🙂\n@@hang"
LAST = 'am Ende 🙂"}'.encode()

ONE = "/v1/sessions/short/events"
MANY = "/v1/events"


# Ten thousand connections each: seconds on a machine that has nothing else to do.
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("path", "accept", "step"),
    [
        pytest.param(ONE, SSE, 1, id="sse"),
        pytest.param(ONE, NDJSON, 1, id="ndjson"),
        pytest.param(MANY, SSE, 1, id="many-sse"),
        # The same code as two of those above, so not at every byte, but in all of its characters.
        pytest.param(MANY, NDJSON, 7, id="many-ndjson"),
    ],
)
def test_a_stream_that_is_cut_at_every_byte_joins_exactly(tmp_path: Path, path: str, accept: str, step: int) -> None:
    with Served(tmp_path / "served") as served:
        session = served.open(name="short")
        served.ask(session, PROMPT)
        # The turn is in flight and stays so; from here on nothing is added.
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

        with ThreadPoolExecutor(CLIENTS) as threads:
            begin = range(0, CLIENTS * step, step)
            cuts = [range(at, size + 1, CLIENTS * step) for at in begin]
            list(threads.map(lambda numbers: _cut_each(numbers, served.port, path, accept, view), cuts))
        # Nothing was added meanwhile, or the last of them would not have shown the same.
        assert walk(served, session).heads() == known.heads()


def _cut_each(cuts: Iterable[int], port: int, path: str, accept: str, whole: checks.View) -> None:
    heads = whole.heads()
    for count in cuts:
        # Every way to go and every way to come back, each for a fourth of the bytes.
        client = Client(port, path, accept=accept, uses_query=count % 2 == 1)
        received = client.visit(bytes_max=count, resets=count % 4 < 2)
        assert received.bytes == count
        client.visit(until=is_live)
        view = client.view()
        assert view.heads() == heads, f"cut at byte {count}"
        checks.views_agree(whole, view)
