"""Talk to examples/chat_bot.py: a person preempts a chore, and each message gets one outcome."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.examples.programs import Program
from tests.process.helpers import wait_until

from banksman.testing.fake_agent import Evidence


def update(id: int, chat: str, text: str) -> str:
    return json.dumps({"update_id": id, "chat": chat, "text": text})


def test_chat_bot_answers_a_person_before_a_running_chore(tmp_path: Path) -> None:
    started, go = tmp_path / "started", tmp_path / "go"
    script = {
        "prompt tidy up": [f"touch {started}", f"wait {go}", "say tidied"],
        "prompt why is CI red?": ["say the build is broken"],
    }
    with Program("chat_bot.py", tmp_path, script=script) as bot:
        bot.write(update(1, "chores", "tidy up"))
        wait_until(started.exists, "the first prompt")
        bot.write(update(2, "alice", "why is CI red?"))
        assert bot.read() == "alice: the build is broken"
        go.touch()
        assert bot.read() == "chores: tidied"
        assert bot.end() == (0, "", "")


@pytest.mark.thorough
def test_chat_bot_stops_the_last_message_of_a_chat(tmp_path: Path) -> None:
    started = tmp_path / "started"
    with Program("chat_bot.py", tmp_path, script={"prompt hang": [f"touch {started}", "hang"]}) as bot:
        bot.write(update(1, "alice", "hang"))
        wait_until(started.exists, "the first prompt")
        bot.write(update(2, "bob", "/stop"))  # Bob has sent nothing.
        bot.write(update(3, "alice", "/stop"))
        assert bot.read() == "alice: (interrupted: no answer)"
        assert bot.end() == (0, "", "")


@pytest.mark.thorough
def test_chat_bot_asks_once_when_an_update_is_delivered_twice(tmp_path: Path) -> None:
    for _ in range(2):
        with Program("chat_bot.py", tmp_path) as bot:
            for _ in range(2):
                bot.write(update(7, "alice", "count me"))
                assert bot.read() == "alice: count me"
            assert bot.end() == (0, "", "")
    prompts = [process.stdin.count(b"count me") for process in Evidence(tmp_path / "evidence").processes]
    assert prompts == [1]
