"""A session that has only its record because its host died or was cut off. No caller has its id."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import msgspec
import pytest
from tests.server.kit import no_drain
from tests.store.kit import Writer, data, everything

from banksman import Host, UsageError
from banksman.cluster.http.forwarded_request import ForwardedRequest, response_of
from banksman.server import app, http_service
from banksman.server.api.messages.session_messages import session_id
from banksman.server.server_settings import ServerSettings
from banksman.sessions import recovery
from banksman.store.memory import MemoryLog
from banksman.testing import fake_agent


@pytest.mark.parametrize("name", [None, "a-name"])
async def test_session_left_incomplete_is_completed_by_the_same_key(name: str | None) -> None:
    settings = ServerSettings(store="memory:")
    async with Host("memory:") as host:
        context = http_service.context_of(host, settings, no_drain)
        app.make(context, token="a-token-of-the-tests", port=0)
        assert context.application is not None
        id = session_id("the-key")
        # The host came this far: the log has the record, and no spec of the session.
        host.log.release(id, await recovery.create(host.log, id, name, "claude"))
        headers = {"content-type": "application/json", "idempotency-key": "the-key"}
        body = msgspec.json.encode({"command": fake_agent.command({}), "name": name})
        opened = response_of(
            await context.application(ForwardedRequest("POST", "/v1/sessions", headers, body).encoded())
        )
        assert (opened.status, msgspec.json.decode(opened.body)["id"]) == (201, id)
        # The session has the requested command, not the default of its agent.
        turn = await host.session(id).ask("hello")
        assert (await turn.outcome()).text == "hello"
        again = response_of(
            await context.application(ForwardedRequest("POST", "/v1/sessions", headers, body).encoded())
        )
        assert msgspec.json.decode(again.body)["id"] == id
        page = await host.log.read(id, 0, 1000)
        assert [event.kind for event in page.events].count("session.opened") == 1


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_create_neither_reuses_nor_deletes_a_session_made_by_another_host(
    is_cancelled: bool,
) -> None:
    log = MemoryLog()
    writer = await Writer.claim(log)
    await writer.commit(b"of another host")
    writer.release()
    creating = asyncio.ensure_future(recovery.create(log, "s", None, "claude"))
    if is_cancelled:
        await asyncio.sleep(0)
        creating.cancel()
        with suppress(asyncio.CancelledError, UsageError):
            await creating
    else:
        with pytest.raises(UsageError, match="session 's' already exists"):
            await creating
    assert data(await everything(log)) == [b"of another host"]
    assert (await Writer.claim(log)).epoch == writer.epoch + 2  # The claim was released.
    await log.close()
