"""Open a SQLite store that an older version wrote, and whose host was killed: see write.py."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.compatibility import agent
from tests.compatibility.write import QUICK, Row
from tests.compatibility.written import Written, doctor, ends, events_of, outcome_of, recalled, rows_of

from banksman import Host, Kind, NotFound
from banksman.testing import checks, fake_agent

# Sessions with a turn that ran when the host was killed, and the idempotency key of that turn.
OPEN = {"s-running": "key-open", "s-asking": "key-asking", "s-keeping": "key-keeping"}
# Keys of turns that had ended.
KEYS = {
    "s-talk": ("key-hello", "key-read", "key-failed", "key-interrupted"),
    "s-running": ("key-before",),
    "s-resting": ("key-rest",),
    "s-long": ("key-long-2",),
}
MAIN = Path(fake_agent.__file__).parent / "__main__.py"


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Written:
    return Written("store", tmp_path, monkeypatch)


@pytest.fixture
def store(written: Written) -> str:
    return f"sqlite:{written.folder / 'store.db'}"


def comparable(rows: list[Row]) -> list[Row]:
    """Drop the time and the error's text. Programs read the outcome, and only people read the text."""
    return [
        {**{name: value for name, value in row.items() if name not in ("what", "at")}, "data": without_words(row)}
        for row in rows
    ]


# Members that later versions have added, and `spent`, which this version keeps where that one forgot it.
CHANGED = ("used", "added", "caller", "used_by", "spent")


def without_words(row: Row) -> Row:
    data = {name: value for name, value in json.loads(row["data"]).items() if name not in CHANGED}
    return {**data, "error": data["error"] is not None} if "error" in data else data


async def test_opened_store_lists_kept_sessions_and_no_deleted_one(written: Written, store: str) -> None:
    async with Host(store) as host:
        found = [(session.id, session.name, session.agent) for session in host.sessions()]
        assert found == [(row["session"], row["name"], row["agent"]) for row in written.rows("session")]
        for gone in ("s-gone", "gone"):
            with pytest.raises(NotFound):
                host.session(gone)
        # The id and the name are free again, and the new session has no event of the deleted one.
        session = await host.open("claude", id="s-gone", name="gone", command=[agent.NAME], options=QUICK)
        assert (await (await session.ask("new", key="key-gone")).outcome()).text == "new"
        prompts = [event.body["prompt"] for event in await events_of(session) if event.kind == "turn.queued"]
        assert prompts == ["new"]


async def test_opened_store_has_every_event_and_settles_as_before(written: Written, store: str) -> None:
    for _ in range(2):  # The second open must not settle the turns again.
        async with Host(store) as host:
            for session in host.sessions():
                rows, expected = rows_of(await events_of(session)), written.events(session.id)
                assert rows[: len(expected)] == expected
                assert comparable(rows[len(expected) :]) == comparable(written.settled(session.id))
    assert {row["session"] for row in written.rows("settled")} == set(OPEN)


async def test_opened_store_has_the_outcome_of_every_ended_turn(written: Written, store: str) -> None:
    expected = written.rows("outcome")
    assert {row["kind"] for row in expected} == {"done", "failed", "interrupted", "preempted", "withdrawn"}
    async with Host(store) as host:
        for row in expected:
            turn = await host.session(row["session"]).turn(row["turn"])
            assert await outcome_of(turn, row["session"]) == row


async def test_usage_of_ended_turns_is_counted(written: Written, store: str) -> None:
    """The version that wrote the store counted no usage. It is counted from the agent's own reports."""
    known = {row["session"] for row in written.rows("session")} - set(OPEN)
    events = [json.loads(row["data"]) for id in known for row in written.events(id) if row["kind"] == "turn.ended"]
    reports: list[dict[str, int]] = [data["usage"] or {} for data in events if data["by"] != "withdrawn"]
    assert reports
    async with Host(store) as host:
        found = [row.usage for row in await host.usage("session") if row.key in known]
    assert sum(usage.turns for usage in found) == len(reports)
    assert sum(usage.tokens.input for usage in found) == sum(usage.get("input_tokens", 0) for usage in reports)


@pytest.mark.parametrize("session", OPEN)
async def test_open_turn_has_one_outcome_after_recovery(written: Written, store: str, session: str) -> None:
    turn = written.turn(session, OPEN[session])
    async with Host(store) as host:
        opened = await host.take_over(session)
        assert (await (await opened.turn(turn)).outcome()).kind is Kind.UNKNOWN
        again = await opened.ask("never said", key=OPEN[session])
        assert again.id == turn
        assert (await again.outcome()).kind is Kind.UNKNOWN
        assert (await (await opened.ask("go on")).outcome()).text == "go on"
        events = await events_of(opened)
    assert ends(events, turn) == ["unknown"]
    checks.log(events)
    checks.turns(events)


async def test_queued_ask_is_served_and_conversation_and_settings_go_on(written: Written, store: str) -> None:
    async with Host(store) as host:
        session = await host.take_over("s-running")
        assert session.settings == (("model", "third-model"),)
        queued = await session.turn(written.turn("s-running", "key-queued"))
        assert (await queued.outcome()).text == "after it"
        assert await recalled(session) == ["before", "work", "after it"]
        kinds = [event.kind for event in await events_of(session)]
    assert "session.context_lost" not in kinds


async def test_retried_prompt_has_its_old_outcome_and_a_new_one_is_served(written: Written, store: str) -> None:
    async with Host(store) as host:
        for name, keys in KEYS.items():
            session = host.session(name)
            for key in keys:
                again = await session.ask("never said", key=key)
                assert await outcome_of(again, name) == written.outcome(name, key)
            assert (await (await session.ask("new")).outcome()).text == "new"
            assert not [event for event in await events_of(session) if b"never said" in event.data]


async def test_retried_prompt_has_its_outcome_after_retention_took_the_turn(store: str) -> None:
    """The snapshot has the outcome of the turn. The text of the turn is not kept."""
    async with Host(store) as host:
        session = host.session("s-long")
        (gap, *_) = await events_of(session)
        assert (gap.kind, gap.body["first"]) == ("stream.gap", 1)
        again = await session.ask("never said", key="key-trimmed")
        assert (await again.outcome()).kind is Kind.DONE
        assert (await (await session.ask("new")).outcome()).text == "new"
        assert not [event for event in await events_of(session) if b"never said" in event.data]


async def test_kept_question_is_answered_by_its_old_id(written: Written, store: str) -> None:
    (asked,) = (row for row in written.events("s-keeping") if row["kind"] == "question.asked")
    question = json.loads(asked["data"])["question"]
    async with Host(store) as host:
        session = host.session("s-keeping")
        (found,) = await session.open_questions()
        assert (found.id, found.tool, found.input) == (question, "Bash", {"command": "true"})
        assert (await session.answer(question, "allow")).is_first
        # The agent asks the same question again and gets the kept answer.
        turn = await session.ask('once more\n@@ask Bash {"command": "true"}\n@@say I may')
        assert (await turn.outcome()).text == "I may"


def test_doctor_finds_the_store_whole(written: Written, store: str, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):  # The first pass checks the store as the killed host left it, the second pass checks it settled.
        found = doctor(capsys, store)
        assert {verdict for verdict, _ in found} == {"ok"}, found
        assert any(f"{len(written.rows('session'))} sessions" in seen and "intact" in seen for _, seen in found)
        asyncio.run(settle(store))


async def settle(store: str) -> None:
    async with Host(store):
        pass


async def test_exported_session_is_imported(written: Written, tmp_path: Path) -> None:
    async with Host(f"sqlite:{tmp_path / 'another.db'}") as host:
        session = await host.import_session(written.folder / "talk.export", name="again")
        *rows, last = rows_of(await events_of(session))
        assert [{**row, "session": "s-talk"} for row in rows] == written.events("s-talk")
        assert last["kind"] == "session.imported"
        for row in written.rows("outcome"):
            if row["session"] == "s-talk":
                turn = await session.turn(row["turn"])
                assert await outcome_of(turn, "s-talk") == row


async def test_bundle_is_replayed(written: Written) -> None:
    """The replayed agent gives the same answers as in the recorded first turn of the bundle."""
    command = [sys.executable, "-I", "-S", str(MAIN), "--replay", str(written.folder / "talk.bundle")]
    how: dict[str, Any] = {"model": "first-model", "rules": {"Read": "allow"}, "options": QUICK}
    async with Host("memory:") as host:
        session = await host.open("claude", command=command, **how)
        assert (await (await session.ask("hello")).outcome()).text == "hello"
