"""Many sessions over one connection (scenario 59), and a session of another host."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.server.kit import Served
from tests.server.streams.stream_clients import NDJSON, SSE, Client, body, is_live, walk
from tests.thorough import thorough

from banksman import Host
from banksman.testing import checks, fake_agent
from banksman.testing.checks import Message

SESSIONS = 20


class Wanted:
    """True when each of these turns has ended and the stream is live."""

    def __init__(self, turns: set[str]) -> None:
        self._left: set[str] = {"live", *turns}

    def __call__(self, message: Message) -> bool:
        if is_live(message):
            self._left.discard("live")
        elif message.id is not None and (shown := body(message))["kind"] == "turn.ended":
            self._left.discard(shown["turn"])
        return not self._left


@thorough
def test_stream_of_twenty_sessions_is_complete_over_one_connection(tmp_path: Path) -> None:
    with Served(tmp_path / "served") as served, ThreadPoolExecutor(8) as threads:

        def begin(number: int) -> tuple[str, str]:
            session = served.open(name=f"tab-{number}")
            return session, served.ask(session, "@@stream 10 0.01 é漢🙂")

        def follow(each: tuple[Client, set[str]]) -> None:
            client, wanted = each
            client.visit(until=Wanted(wanted))

        turns = dict(threads.map(begin, range(SESSIONS)))
        sessions = list(turns)
        some = sessions[3:7]
        # By id and by name, and some of them twice.
        names = ",".join([*some, "tab-3", "tab-4"])
        of_all, of_some = set(turns.values()), {turns[session] for session in some}
        followed = [
            (Client(served.port, "/v1/events"), of_all),
            (Client(served.port, "/v1/events", accept=NDJSON), of_all),
            (Client(served.port, f"/v1/events?sessions={names}"), of_some),
            (Client(served.port, f"/v1/events?sessions={names}", accept=NDJSON), of_some),
        ]
        list(threads.map(follow, followed))
        known = {session: walk(served, session) for session in sessions}
        views = [client.view() for client, _ in followed]
        checks.views_agree(*known.values(), *views)
        for client, wanted in followed:
            # Also read the events after the end of the last turn.
            client.visit(until=is_live)
            whole = client.view()
            shown = sessions if wanted is of_all else some
            assert whole.heads() == {name: seq for one in shown for name, seq in known[one].heads().items()}
        # Each stream can resume from any position that another received.
        *_, position = (message.id for message in views[0].events.values())
        late = Client(served.port, f"/v1/events?sessions={names}", after=position)
        late.visit(until=is_live)
        assert not [message for message in late.visits[0].messages if message.id is not None]


def test_stream_of_all_shows_a_session_made_later(tmp_path: Path) -> None:
    with Served(tmp_path / "served") as served, served.stream("/v1/events") as stream:
        stream.until_live()
        session = served.open()
        assert next(message for message in stream.messages() if message.id is not None).data["session"] == session


async def test_stream_shows_a_session_of_another_host_live(tmp_path: Path) -> None:
    def begin() -> Served:
        served = Served(tmp_path / "served")
        served.start()
        return served

    served = await asyncio.to_thread(begin)
    try:
        async with Host(f"sqlite:{served.folder / 'store.db'}") as host:
            session = await host.open("claude", command=fake_agent.command())
            clients = [
                Client(served.port, path, accept=accept)
                for path in (f"/v1/sessions/{session.id}/events", "/v1/events")
                for accept in (SSE, NDJSON)
            ]
            for client in clients:
                await asyncio.to_thread(client.visit, until=is_live)
            # From here on the clients wait for events of another process.
            turn = await session.ask("@@stream 20 0.01 é漢🙂")
            await asyncio.gather(
                *(asyncio.to_thread(client.visit, until=Wanted({turn.id})) for client in clients),
                turn.outcome(),
            )
            assert served_elsewhere(await asyncio.to_thread(served.get, f"/v1/sessions/{session.id}"))
            checks.views_agree(*(client.view() for client in clients))
            assert len({client.seqs[session.id] for client in clients}) == 1
    finally:
        await asyncio.to_thread(served.stop)


def served_elsewhere(shown: dict[str, object]) -> bool:
    return shown["owner"] is not None
