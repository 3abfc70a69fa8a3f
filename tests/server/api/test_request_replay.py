"""`Idempotency-Key`: a repeated request gets the same answer and runs once, also across a kill."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from tests.server.kit import Answer, Served

from banksman import Host, NotFound
from banksman.server.access.roles import ADMIN
from banksman.server.api import request_replay, turn_routes
from banksman.server.api import route as http
from banksman.server.api.messages.turn_messages import Ask
from banksman.sessions import caller_futures
from banksman.testing import fake_agent


def send(served: Served, path: str, body: Any, key: str) -> Answer:
    return served.request("POST", path, body, headers={"Idempotency-Key": key})


def at_once(served: Served, path: str, body: Any, key: str, times: int = 20) -> list[Answer]:
    with ThreadPoolExecutor(times) as pool:
        return [sent.result() for sent in [pool.submit(send, served, path, body, key) for _ in range(times)]]


def ids(served: Served, what: str) -> set[str]:
    """Return the ids of all sessions, or of all commands."""
    return {each["id"] for each in served.get(f"/v1/{what}")[what]}


def test_idempotency_key_makes_concurrent_requests_run_once(served: Served) -> None:
    sessions, commands = ids(served, "sessions"), ids(served, "commands")
    body = {"command": fake_agent.command()}
    opened = at_once(served, "/v1/sessions", body, "open")
    assert {answer.status for answer in opened} == {201}
    assert len({(answer.body, answer.headers["location"]) for answer in opened}) == 1
    (session,) = ids(served, "sessions") - sessions

    turns = f"/v1/sessions/{session}/turns"
    asked = at_once(served, turns, {"prompt": "hello"}, "ask")
    assert {answer.status for answer in asked} == {202}
    (turn,) = {answer.json["turn"] for answer in asked}
    served.outcome(session, turn)
    events = served.get(f"/v1/sessions/{session}/events?limit=1000")["events"]
    assert sum(event["kind"] == "turn.queued" for event in events) == 1, [event["kind"] for event in events]

    started = at_once(served, "/v1/commands", {"argv": ["true"]}, "start")
    assert {answer.status for answer in started} == {201}
    assert len({answer.json["id"] for answer in started}) == 1
    assert len(ids(served, "commands") - commands) == 1


def test_idempotency_key_refuses_another_body_and_is_scoped_by_path(served: Served) -> None:
    commands = ids(served, "commands")
    assert send(served, "/v1/commands", {"argv": ["true"]}, "k").status == 201
    answer = send(served, "/v1/commands", {"argv": ["true", "x"]}, "k")
    assert (answer.status, answer.json["type"]) == (422, "urn:banksman:key-used")
    # An equal body in another spelling is the same body.
    assert send(served, "/v1/commands", b'{ "grace": 5.0, "argv" : ["tr\\u0075e"] }', "k").status == 415
    again = served.request(
        "POST",
        "/v1/commands",
        b'{ "grace": 5.0, "argv" : ["tr\\u0075e"] }',
        headers={"Idempotency-Key": "k", "Content-Type": "application/json"},
    )
    assert again.status == 201
    assert len(ids(served, "commands") - commands) == 1
    first, second = (send(served, "/v1/sessions", {"command": fake_agent.command()}, key).json["id"] for key in "kl")
    assert first != second
    turns = [send(served, f"/v1/sessions/{id}/turns", {"prompt": "x"}, "k").json["turn"] for id in (first, second)]
    assert turns[0] != turns[1]
    assert send(served, f"/v1/sessions/{first}/turns", {"prompt": "y"}, "k").status == 422


@pytest.mark.thorough
def test_idempotency_key_of_failed_request_may_be_retried(served: Served, tmp_path: Path) -> None:
    commands = ids(served, "commands")
    program = tmp_path / "program"
    body = {"argv": [str(program)]}
    assert send(served, "/v1/commands", body, "failed").status == 422
    # A failed request releases its key: another body may use it, and the same body may be tried again.
    program.write_text("#!/bin/sh\n", encoding="utf-8")
    program.chmod(0o755)
    answers = at_once(served, "/v1/commands", body, "failed")
    assert {answer.status for answer in answers} == {201}
    assert len(ids(served, "commands") - commands) == 1


@pytest.mark.thorough
def test_idempotency_key_survives_a_server_kill(tmp_path: Path) -> None:
    served = Served(tmp_path / "server")
    body = {"command": fake_agent.command(memory=tmp_path / "memory")}
    with served:
        session = send(served, "/v1/sessions", body, "open").json["id"]
        turn = send(served, f"/v1/sessions/{session}/turns", {"prompt": "hello"}, "ask").json["turn"]
        before = served.outcome(session, turn)
        served.kill()
        served.start()
        again = send(served, "/v1/sessions", body, "open")
        assert (again.status, again.json["id"]) == (201, session)
        asked = at_once(served, f"/v1/sessions/{session}/turns", {"prompt": "hello"}, "ask", 5)
        assert {(answer.status, answer.json["turn"]) for answer in asked} == {(202, turn)}
        assert served.outcome(session, turn)["text"] == before["text"]
        assert len(served.get("/v1/sessions")["sessions"]) == 1
        events = served.get(f"/v1/sessions/{session}/events?limit=1000")["events"]
        assert sum(event["kind"] == "turn.queued" for event in events) == 1


def test_idempotency_key_that_is_malformed_is_refused(served: Served) -> None:
    commands = ids(served, "commands")
    for key in ("", " ", "a b", "x" * 256, "\xe9", "\t"):
        for path, body in (
            ("/v1/commands", {"argv": ["true"]}),
            ("/v1/sessions", {}),
            ("/v1/sessions/x/turns", {"prompt": "x"}),
        ):
            answer = send(served, path, body, key)
            assert (answer.status, answer.json["type"]) == (400, "urn:banksman:bad-key"), (key, path)
    assert ids(served, "commands") == commands
    assert send(served, "/v1/commands", {"argv": ["true"]}, "!" + "~" * 254).status == 201


def test_idempotency_key_of_deleted_session_makes_it_again(served: Served) -> None:
    body = {"command": fake_agent.command(), "name": "again"}
    first = send(served, "/v1/sessions", body, "twice")
    assert served.request("DELETE", "/v1/sessions/again?forget=1").status == 204
    second = send(served, "/v1/sessions", body, "twice")
    assert served.get("/v1/sessions/again")["id"] == second.json["id"] == first.json["id"]


def test_idempotency_key_of_turn_deleted_with_its_session_asks_again(served: Served) -> None:
    body = {"command": fake_agent.command(), "name": "made-twice"}
    turns: list[str] = []
    for _ in range(2):
        session = send(served, "/v1/sessions", body, "made-twice").json["id"]
        turns.append(send(served, f"/v1/sessions/{session}/turns", {"prompt": "hello"}, "ask").json["turn"])
        assert served.outcome(session, turns[-1])["kind"] == "done"
        assert served.request("DELETE", f"/v1/sessions/{session}?forget=1").status == 204
    assert turns[0] != turns[1]


def test_idempotency_key_of_ask_never_sent_asks_again(served: Served) -> None:
    session = served.open({"prompt work": ["hang"]})
    turns = f"/v1/sessions/{session}/turns"
    served.ask(session, "work")
    refused = send(served, turns, {"prompt": "later"}, "later").json["turn"]
    assert served.request("DELETE", f"/v1/sessions/{session}").status == 200
    assert served.outcome(session, refused)["kind"] == "refused"
    again = send(served, turns, {"prompt": "later"}, "later").json["turn"]
    assert again != refused
    assert served.outcome(session, again)["kind"] == "done"
    # The turn is done now, and stays the answer.
    assert send(served, turns, {"prompt": "later"}, "later").json["turn"] == again


async def test_request_replay_forgets_large_answers_to_bound_memory() -> None:
    asked = request_replay.RequestReplay()
    large = request_replay.BYTES_MAX // 4

    async def answer() -> http.HttpAnswer:
        return http.HttpAnswer({"argv": "x" * large}, 201)

    first = await asked.do("commands", "0", _Body("x"), answer)
    assert (await asked.do("commands", "0", _Body("x"), answer)).encoded() == first.encoded()
    for number in range(1, 10):
        await asked.do("commands", str(number), _Body("x"), answer)
    kept = list(asked._entries.values())  # pyright: ignore[reportPrivateUsage]
    assert 1 <= len(kept) <= 4
    assert asked._weight == sum(entry.weight for entry in kept) <= request_replay.BYTES_MAX  # pyright: ignore[reportPrivateUsage]


async def test_request_replay_remembers_newest_answer_however_large() -> None:
    asked = request_replay.RequestReplay()
    times: list[int] = []

    async def answer() -> http.HttpAnswer:
        times.append(1)
        return http.HttpAnswer({"argv": "x" * request_replay.BYTES_MAX}, 201)

    for _ in range(2):
        await asked.do("commands", "k", _Body("x"), answer)
    assert len(times) == 1


async def test_request_replay_gives_unencodable_answer_to_all_and_runs_once() -> None:
    asked = request_replay.RequestReplay()
    times: list[int] = []
    is_begun, goes_on = asyncio.Event(), asyncio.Event()

    async def answer() -> http.HttpAnswer:
        times.append(1)
        is_begun.set()
        await goes_on.wait()
        return http.HttpAnswer({"cwd": "\udcff"}, 201, {"Location": "/v1/commands/c-1"})

    both = [asyncio.create_task(asked.do("commands", "k", _Body("x"), answer)) for _ in range(2)]
    await is_begun.wait()
    goes_on.set()
    answers = await asyncio.gather(*both)
    assert ([told.status for told in answers], len(times)) == ([500, 500], 1)


async def test_idempotency_key_of_turn_dropped_by_retention_does_not_ask_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session has forgotten the key too: it remembers fewer keys than the server."""
    monkeypatch.setattr(caller_futures, "KEYS_MAX", 1)
    async with Host(f"sqlite:{tmp_path}/store.db?keep_bytes=2000") as host:
        session = await host.open("claude", command=fake_agent.command())
        context = SimpleNamespace(session=host.session, once=request_replay.RequestReplay())

        headers: dict[str, str] = {}
        who = {"caller": ADMIN, "path": {"id": session.id}, "header": headers.get}
        call = SimpleNamespace(context=context, body=Ask(prompt="first"), key="first", **who)
        first = (await turn_routes.ask(cast("Any", call))).made
        await (await session.turn(first)).outcome()
        with contextlib.suppress(NotFound):
            for number in itertools.count():
                await (await session.ask("@@flood 300 200", key=str(number))).outcome()
                await session.turn(first)
        assert (await turn_routes.ask(cast("Any", call))).made == first


class _Counted(OrderedDict[Any, Any]):
    """Counts the entries that an iteration visits."""

    steps = 0

    def __iter__(self) -> Iterator[Any]:
        for key in super().__iter__():
            self.steps += 1
            yield key

    def items(self) -> Any:
        return [(key, self[key]) for key in self]


class _Body(msgspec.Struct):
    text: str


@pytest.mark.thorough
async def test_request_replay_cost_is_independent_of_key_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds at the maximum number of keys too, and running requests are not forgotten."""
    monkeypatch.setattr(request_replay, "KEYS_MAX", 100)
    asked = request_replay.RequestReplay()
    entries = asked._entries = _Counted()  # pyright: ignore[reportPrivateUsage]
    is_over = asyncio.Event()

    async def answer() -> http.HttpAnswer:
        return http.HttpAnswer(None)

    async def answer_later() -> http.HttpAnswer:
        await is_over.wait()
        return await answer()

    slow = asyncio.ensure_future(asked.do("turns", "slow", _Body("slow"), answer_later))
    await asyncio.sleep(0)
    for number in range(300):
        await asked.do("turns", str(number), _Body("x"), answer)
    assert entries.steps <= 300
    assert len(entries) <= 101
    is_over.set()
    assert await asked.do("turns", "slow", _Body("slow"), answer) == (await slow).encoded()
    assert asked._weight == request_replay.ENTRY_BYTES * len(entries)  # pyright: ignore[reportPrivateUsage]
