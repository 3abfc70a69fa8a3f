"""Decide in examples/approvals.py: a question is posted, people answer it, and the turn continues."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.examples.programs import Program

from banksman.testing.fake_agent import Evidence

SCRIPT = {"prompt deploy": ['ask Bash {"command": "make deploy"}', "say the turn went on"]}


def asked(channel: Program) -> str:
    """Ask for a deployment and return the id of the question that the agent asks."""
    channel.write("alice ask deploy")
    posted = re.fullmatch(r"(q-\S+): may the agent use Bash with (.*)\?", channel.read())
    assert posted is not None
    assert posted[2] == "{'command': 'make deploy'}"
    return posted[1]


@pytest.mark.parametrize(
    ("click", "answer", "sent"),
    [("approve {}", "allow", b'"behavior":"allow"'), ("deny {} not on a Friday", "deny", b"bob: not on a Friday")],
)
def test_approvals_continue_the_turn_after_a_decision(tmp_path: Path, click: str, answer: str, sent: bytes) -> None:
    with Program("approvals.py", tmp_path, script=SCRIPT) as channel:
        question = asked(channel)
        channel.write(f"bob {click.format(question)}")
        assert channel.read() == f"{question}: {answer}"
        assert channel.read() == "done: the turn went on"
        assert channel.end() == (0, "", "")
    (agent,) = Evidence(tmp_path / "evidence").processes
    assert sent in agent.stdin


@pytest.mark.thorough
def test_approvals_keep_the_first_decision(tmp_path: Path) -> None:
    with Program("approvals.py", tmp_path, script=SCRIPT) as channel:
        question = asked(channel)
        channel.write(f"bob deny {question}")
        assert channel.read() == f"{question}: deny"
        assert channel.read() == "done: the turn went on"
        channel.write(f"carol approve {question}")
        assert channel.read() == f"carol: {question} already has an answer: deny"
        channel.write("carol approve q-0.0")
        assert channel.read().startswith("carol: there is no question")
        assert channel.end() == (0, "", "")


@pytest.mark.thorough
def test_approvals_allow_nothing_when_the_input_ends(tmp_path: Path) -> None:
    with Program("approvals.py", tmp_path, script=SCRIPT) as channel:
        question = asked(channel)
        code, out, err = channel.end()
    assert (code, err) == (0, "")
    assert f"{question}: withdrawn" in out.splitlines()
    (agent,) = Evidence(tmp_path / "evidence").processes
    assert b'"behavior":"allow"' not in agent.stdin
