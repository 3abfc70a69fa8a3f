"""The script engine of the fake agents, and the two JSON-RPC agents on it as plain processes."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from banksman.testing import fake_acp, fake_agent, fake_codex, fake_script
from banksman.testing.fake_acp.acp_turn import VERBS as ACP
from banksman.testing.fake_agent import Evidence
from banksman.testing.fake_codex.codex_agent import VERBS as CODEX
from banksman.testing.fake_script import ScriptError, VerbTable

SECONDS_MAX = 20.0


def table() -> VerbTable:
    verbs = VerbTable({"noon": "the clock strikes"})
    verbs.add("text", "LINE", fake_script.say)
    verbs.add("say", "TEXT", fake_script.say)
    verbs.add("exit", "CODE", fake_script.leave)
    return verbs


@pytest.mark.parametrize(
    ("text", "point", "words"),
    [
        ("text  two  spaces ", "", [" two  spaces "]),
        ("text", "", [""]),
        ("say  two  spaces ", "", ["two  spaces"]),
        ("exit 3 ", "", ["3"]),
        ("at noon say x", "noon", ["x"]),
        ("at noon text  x", "noon", [" x"]),
    ],
)
def test_step_has_the_arguments_of_its_line(text: str, point: str, words: list[str]) -> None:
    step = table().parse(text)
    assert (step.point, step.words) == (point, words)


@pytest.mark.parametrize("text", ["shout", "say", "exit", "exit 3 4", "exit -1", "at dusk say x"])
def test_line_that_is_no_step_is_refused(text: str) -> None:
    with pytest.raises(ScriptError):
        table().parse(text)


def test_points_are_refused_in_a_dialect_without_them() -> None:
    verbs = VerbTable()
    verbs.add("say", "TEXT", fake_script.say)
    with pytest.raises(ScriptError, match="no verb 'at'"):
        verbs.parse("at noon say x")


def test_directives_are_the_marked_lines_of_a_prompt() -> None:
    words, steps = table().directives("first\n@@text  a\nsecond @@say no\n@@exit 3")
    assert words == "first\nsecond @@say no"
    assert [(step.where, step.words) for step in steps] == [("@@1", [" a"]), ("@@3", ["3"])]


def test_shared_verbs_are_one_function_in_every_dialect() -> None:
    names = {"text": "say", "raw": "raw", "hang": "hang", "touch": "touch", "await": "wait", "exit": "exit"}
    for name, claudes in names.items():
        assert ACP[name].perform is CODEX[name].perform is fake_agent.VERBS[claudes].perform
    for verbs in (ACP, CODEX):
        assert all(verb.doc.endswith(".") for verb in verbs.values())


def acp(prompt: str) -> list[dict[str, Any]]:
    text = {"sessionId": "", "prompt": [{"type": "text", "text": prompt}]}
    return [
        {"id": 1, "method": "session/new", "params": {}},
        {"id": 2, "method": "session/prompt", "params": text},
    ]


def codex(prompt: str) -> list[dict[str, Any]]:
    text = {"input": [{"type": "text", "text": prompt}]}
    return [
        {"id": 1, "method": "thread/start", "params": {}},
        {"id": 2, "method": "turn/start", "params": text},
    ]


class Driven:
    """A fake JSON-RPC agent that got one prompt."""

    def __init__(self, command: list[str], messages: list[dict[str, Any]]) -> None:
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        opening, prompt = messages
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._send(opening)
        opened = json.loads(self.process.stdout.readline())["result"]
        if "sessionId" in opened:
            prompt["params"]["sessionId"] = opened["sessionId"]
        self._send(prompt)

    def _send(self, message: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message).encode() + b"\n")
        self.process.stdin.flush()

    def rest(self) -> tuple[list[dict[str, Any]], bytes, int]:
        """Close its stdin, and return its remaining messages, its stderr and its exit code."""
        out, err = self.process.communicate(timeout=SECONDS_MAX)
        return [json.loads(line) for line in out.splitlines()], err, self.process.returncode


def test_unknown_verb_is_an_error_of_the_acp_prompt() -> None:
    written, _, code = Driven(fake_acp.command(), acp("@@text a\n@@shout hello")).rest()
    [answer] = [message for message in written if message.get("id") == 2]
    assert answer["error"]["code"] == -32603
    assert "no verb 'shout'" in answer["error"]["message"]
    assert code == 0


def test_unknown_verb_ends_the_fake_codex_loudly() -> None:
    _, err, code = Driven(fake_codex.command(), codex("@@text a\n@@shout hello")).rest()
    assert b"no verb 'shout'" in err
    assert code == 64


@pytest.mark.parametrize("dialect", ["acp", "codex"])
def test_reached_steps_are_evidence(dialect: str, tmp_path: Path) -> None:
    prompt = "@@text a\n@@text b"
    if dialect == "acp":
        driven = Driven(fake_acp.command(evidence=tmp_path), acp(prompt))
    else:
        driven = Driven(fake_codex.command(evidence=tmp_path), codex(prompt))
    driven.rest()
    [process] = Evidence(tmp_path).processes
    assert process.steps == [("@@0", "text", "text a"), ("@@1", "text", "text b")]


@pytest.mark.parametrize("dialect", ["acp", "codex"])
def test_answer_is_written_in_full_when_stdin_has_ended(dialect: str) -> None:
    """The answer is larger than the pipe: the agent reads the end of stdin before it can write the rest."""
    prompt = f"@@text {'x' * 200_000}"
    driven = (
        Driven(fake_acp.command(), acp(prompt)) if dialect == "acp" else Driven(fake_codex.command(), codex(prompt))
    )
    written, _, code = driven.rest()
    assert any(message.get("id") == 2 or message.get("method") == "turn/completed" for message in written)
    assert code == 0
