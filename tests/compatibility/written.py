"""Fixture, unpacked for a test: the files that an older version left, and their contents as that version read them."""

from __future__ import annotations

import json
import os
import tarfile
from collections.abc import Iterable
from pathlib import Path

import pytest
from tests.compatibility import agent
from tests.compatibility.write import Row, event_row, outcome_row

from banksman import Event, Session, Turn
from banksman.cli import main

FOLDER = Path(__file__).parent


class Written:
    def __init__(self, name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        with tarfile.open(FOLDER / f"{name}.tar.xz") as archive:
            archive.extractall(folder, filter="data")
        with Path(FOLDER, f"{name}.jsonl").open(encoding="utf-8") as lines:
            self._rows: list[Row] = [json.loads(line) for line in lines]
        environment = dict(os.environ)
        agent.install(folder, environment)
        for variable in ("PATH", "HOME"):
            monkeypatch.setenv(variable, environment[variable])
        # The variable would select another folder for the agent's conversations.
        monkeypatch.delenv("CLAUDE_CONFIG_DIR", raising=False)

    def rows(self, what: str) -> list[Row]:
        return [row for row in self._rows if row["what"] == what]

    def events(self, session: str) -> list[Row]:
        return [row for row in self.rows("event") if row["session"] == session]

    def settled(self, session: str) -> list[Row]:
        """Return the events that the older version appended when it opened the store again."""
        return [row for row in self.rows("settled") if row["session"] == session]

    def turn(self, session: str, key: str) -> str:
        """Return the turn of the ask with this idempotency key."""
        (turn,) = (
            row["turn"]
            for row in self.events(session)
            if row["kind"] == "turn.queued" and json.loads(row["data"])["key"] == key
        )
        return turn

    def outcome(self, session: str, key: str) -> Row:
        turn = self.turn(session, key)
        (row,) = (row for row in self.rows("outcome") if row["turn"] == turn)
        return row


async def outcome_of(turn: Turn, session: str) -> Row:
    return {**outcome_row(turn.id, await turn.outcome()), "session": session}


async def recalled(session: Session) -> list[str]:
    """Return the first line of each prompt that the agent remembers, without the prompt that asks for them."""
    outcome = await (await session.ask("@@recall")).outcome()
    *prompts, _ = json.loads(outcome.text or "")
    return [prompt.partition("\n")[0] for prompt in prompts]


async def events_of(session: Session) -> list[Event]:
    return [event async for event in session.events(0)]


def rows_of(events: Iterable[Event]) -> list[Row]:
    return [event_row(event) for event in events]


def ends(events: Iterable[Event], turn: str) -> list[str]:
    """Return each outcome that the log has for a turn."""
    return [event.body["outcome"] for event in events if event.kind == "turn.ended" and event.turn == turn]


def doctor(capsys: pytest.CaptureFixture[str], store: str, *words: str) -> list[tuple[str, str]]:
    """Return the verdict and the text of each check of the store, without the check of the disk's free space."""
    capsys.readouterr()
    main(["doctor", "--json", "--store", store, *words])
    found = json.loads(capsys.readouterr().out)
    checks = (each for each in found["checks"] if each["group"] == "stores" and each["name"] != "disk")
    return [(each["verdict"], each["seen"]) for each in checks]
