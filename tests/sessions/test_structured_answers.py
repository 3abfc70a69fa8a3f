"""Structured answers: the process gets the schema, the value must match it, and the turn is FAILED without one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.sessions.helpers import bodies, ended, opened, prompts, requests

from banksman import AgentError, Kind, UsageError
from banksman.core.session import event as kinds

NUMBER = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
WORD = {"type": "object", "properties": {"word": {"type": "string"}}}


def gives(value: Any, **members: Any) -> str:
    """Return a prompt whose boundary has this value."""
    return f"@@say in words\n@@boundary {json.dumps({'structured_output': value, **members})}"


async def test_ask_with_schema_returns_fitting_value(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        turn = await case.ask(gives({"n": 42}), schema=NUMBER)
        outcome = await case.outcome(turn)
        assert (outcome.kind, outcome.structured, outcome.text) == (Kind.DONE, {"n": 42}, "in words")
        assert ended(await case.events(), turn)["structured"] == {"n": 42}
        (initialize,) = requests(case, "initialize")
        assert initialize["jsonSchema"] == NUMBER


@pytest.mark.parametrize(
    ("prompt", "why"),
    [
        (gives({"n": "42"}), "n: must be a whole number"),
        (gives({}), "n: is missing"),
        (gives({"n": 1, "m": 2}), "m"),
        (gives(None), "gave no value"),
        (gives("42"), "must be an object, not '42'"),
        # This answer has only text.
        ("@@say forty-two", "gave no value"),
    ],
)
async def test_unfitting_or_missing_value_fails_turn_with_reason(tmp_path: Path, prompt: str, why: str) -> None:
    async with opened(tmp_path) as case:
        turn = await case.ask(prompt, schema=NUMBER)
        outcome = await case.outcome(turn)
        assert (outcome.kind, outcome.structured) == (Kind.FAILED, None)
        assert isinstance(outcome.error, AgentError)
        assert "the answer does not match its schema" in str(outcome.error)
        assert why in str(outcome.error)
        # The text is kept.
        assert outcome.text
        assert ended(await case.events(), turn)["structured"] is None
        # The process is kept too, because it did nothing wrong.
        assert (await case.answer(gives({"n": 1}), schema=NUMBER)).structured == {"n": 1}
        assert len(case.processes) == 1


async def test_failed_or_interrupted_turn_reports_no_schema_error(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        outcome = await case.answer(gives({"n": 1}, is_error=True, result="overloaded"), schema=NUMBER)
        assert (outcome.kind, outcome.structured) == (Kind.FAILED, None)
        assert "overloaded" in str(outcome.error)
        turn = await case.reaches("@@say so far\n@@hang", schema=NUMBER)
        await turn.interrupt()
        outcome = await case.outcome(turn)
        assert (outcome.kind, outcome.error, outcome.structured) == (Kind.INTERRUPTED, None, None)


async def test_schemas_get_own_process_and_keep_conversation(tmp_path: Path) -> None:
    async with opened(tmp_path, memory=True) as case:
        assert (await case.answer("plain")).structured is None
        assert (await case.answer(gives({"n": 1}), schema=NUMBER)).structured == {"n": 1}
        assert (await case.answer(gives({"n": 2}), schema=dict(NUMBER))).structured == {"n": 2}
        assert (await case.answer(gives({"word": "a"}), schema=WORD)).structured == {"word": "a"}
        recalled = await case.answer("@@recall")
        assert len(json.loads(recalled.text or "")) == 5
        told = [initialize.get("jsonSchema") for initialize in requests(case, "initialize")]
        assert told == [None, NUMBER, WORD, None]
        conversation = case.session.status().conversation
        resumed = [[word for word in process.argv if "resume" in word] for process in case.processes]
        assert resumed == [[], *[[f"--resume={conversation}"]] * 3]
        events = await case.events()
        assert [body["reason"] for body in bodies(events, kinds.PROCESS_RETIRED)] == ["schema"] * 3
        assert kinds.SESSION_CONTEXT_LOST not in [event.kind for event in events]
        # Each prompt was sent once.
        assert len(prompts(case)) == 5


async def test_schema_is_unaffected_by_later_mutation(tmp_path: Path) -> None:
    schema: dict[str, Any] = {"type": "object", "properties": {"n": {"type": "integer"}}}
    async with opened(tmp_path) as case:
        turn = await case.ask(gives({"n": 1}), schema=schema)
        schema["properties"]["n"]["type"] = "string"
        assert (await case.outcome(turn)).structured == {"n": 1}


@pytest.mark.parametrize(
    "schema",
    [
        "object",
        3,
        [],
        # Valid schemas, but not for a result.
        True,
        False,
        {"type": "objekt"},
        # The schema describes the input of a tool, so it must be an object.
        {"type": "array"},
        {"properties": {"n": {}}},
        {"propertys": {}},
        {"type": "object", "properties": {"n": {"$ref": "other.json"}}},
        {"type": "object", "default": object()},
        {"type": "object", "title": "\ud800"},
    ],
)
async def test_unsupported_schema_is_refused_before_agent_starts(tmp_path: Path, schema: Any) -> None:
    async with opened(tmp_path) as case:
        with pytest.raises(UsageError):
            await case.ask("one", schema=schema)
        assert await case.kinds() == ["session.opened"]
        assert case.processes == []


async def test_asks_are_collected_only_with_equal_schema(tmp_path: Path) -> None:
    async with opened(tmp_path, memory=True, options={"collect_seconds": 0.0}) as case:
        running = await case.running("first")
        asks = [(gives({"n": 1}), NUMBER), ("more", dict(NUMBER)), (gives({"word": "a"}), WORD), ("plain", None)]
        turns = [await case.ask(prompt, on_busy="collect", schema=schema) for prompt, schema in asks]
        await running.interrupt()
        await case.outcome(running)
        outcomes = [await case.outcome(turn) for turn in turns]
        assert [outcome.structured for outcome in outcomes] == [{"n": 1}, {"n": 1}, {"word": "a"}, None]
        assert [outcome.kind for outcome in outcomes] == [Kind.DONE] * 4
        joined = [len(body["joined"]) for body in bodies(await case.events(), kinds.TURN_STARTED)]
        assert joined == [0, 1, 0, 0]


async def test_process_that_dies_at_start_fails_only_its_ask(tmp_path: Path) -> None:
    script = {"process 2": ["exit 1"]}
    async with opened(tmp_path, script, memory=True, options={"backoff_seconds": 0.01}) as case:
        assert (await case.answer("plain")).text == "plain"
        outcome = await case.answer(gives({"n": 1}), schema=NUMBER)
        assert outcome.kind is Kind.FAILED
        assert (await case.answer(gives({"n": 2}), schema=NUMBER)).structured == {"n": 2}
        assert [initialize.get("jsonSchema") for initialize in requests(case, "initialize")] == [None, NUMBER]
