"""A front end reports a session whose log holds a foreign message, and serves the other sessions."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cluster.fleet import fleet, until
from tests.cluster.shared import shared, some_prefix

from banksman.cluster.log.streams import token
from banksman.cluster.nats import Nats
from banksman.cluster.store_address import parse
from banksman.testing.nats_servers import Servers


@pytest.fixture(scope="session")
def nats_one() -> Iterator[Servers]:
    yield from shared(1)


async def put(store: str, subject: str, data: bytes) -> None:
    nats = Nats(parse(store), name="stranger")
    await nats.connect()
    try:
        await nats.publish(subject, data)
    finally:
        await nats.close()


@pytest.mark.thorough
def test_damaged_session_answers_store_damaged_and_others_continue(nats_one: Servers, tmp_path: Path) -> None:
    prefix = some_prefix()
    with fleet(tmp_path, nats_one, prefix) as many:
        host, front = many.host("host"), many.front()
        hurt, well = front.open({}), front.open({})
        for session in (hurt, well):
            assert front.outcome(session, front.ask(session, "hello"))["kind"] == "done"
        asyncio.run(put(many.store, f"{prefix}.ev.{token(hurt)}", b"garbage"))
        told = front.request("POST", f"/v1/sessions/{hurt}/turns", {"prompt": "again"})
        assert (told.status, told.json["title"]) == (500, "StoreDamaged"), told
        assert "nats stream rmm" in told.json["hint"]
        assert front.outcome(well, front.ask(well, "again"))["kind"] == "done"
        with front.stream("/v1/events") as stream:
            assert {sent.data["session"] for sent in stream.until_live()} == {hurt, well}
        # No other host takes it either, and the answer gives the reason.
        many.lose(host, front)
        many.host("next")
        assert front.outcome(well, front.ask(well, "there"))["kind"] == "done"
        told = front.request("POST", f"/v1/sessions/{hurt}/turns", {"prompt": "again"})
        assert (told.status, told.json["title"]) == (500, "StoreDamaged"), told


async def last_event(store: str, prefix: str, session: str) -> object:
    nats = Nats(parse(store), name="stranger")
    await nats.connect()
    try:
        return await nats.last(f"{prefix}-events", f"{prefix}.ev.{token(session)}")
    finally:
        await nats.close()


@pytest.mark.thorough
def test_second_delete_over_http_removes_what_the_first_left(nats_one: Servers, tmp_path: Path) -> None:
    prefix = some_prefix()
    with fleet(tmp_path, nats_one, prefix) as many:
        many.host("host")
        front = many.front()
        session = front.open({})
        assert front.request("DELETE", f"/v1/sessions/{session}").status == 200
        # A delete removes the record first. This is the state after a host that died right after that.
        asyncio.run(put(many.store, f"{prefix}.rec.session.{token(session)}", b""))
        until(lambda: front.request("GET", f"/v1/sessions/{session}").status == 404, "it is not known any more")
        assert asyncio.run(last_event(many.store, prefix, session)) is not None
        assert front.request("DELETE", f"/v1/sessions/{session}?forget=1").status == 404
        assert asyncio.run(last_event(many.store, prefix, session)) is None
