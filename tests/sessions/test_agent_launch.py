"""Start of the agent's process: values that cannot become flags, and an environment without misleading variables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.sessions.helpers import Case, opened

from banksman import Kind, UsageError
from banksman.process.launch import NESTING

# The flags of the dialect, without those of the fake agent.
PLAIN = [
    *("--print", "--input-format", "stream-json", "--output-format", "stream-json", "--verbose"),
    *("--include-partial-messages", "--permission-prompt-tool", "stdio"),
]
ODD = ["-x", "--dangerously-skip-permissions", "two words", " padded\t", "a\nline", "=", "'\"$(touch x)`\\", "ünïcode"]


def words(case: Case, process: int = 0) -> list[str]:
    """Return the argv of a process, without the words of the fake agent."""
    argv = case.processes[process].argv
    return argv[1:][next(index for index, word in enumerate(argv[1:]) if not word.startswith("--fake-")) :]


@pytest.mark.parametrize("value", ODD)
async def test_agent_flag_keeps_any_value_in_one_word(tmp_path: Path, value: str) -> None:
    async with opened(tmp_path, model=value, permission_mode=value, system_prompt=value) as case:
        assert (await case.answer("one")).kind is Kind.DONE
        flags = [f"--model={value}", f"--permission-mode={value}", f"--append-system-prompt={value}"]
        assert words(case) == [*PLAIN, *flags]


async def test_agent_command_has_only_requested_flags_and_extra_args_last(tmp_path: Path) -> None:
    async with opened(tmp_path, args=["--add-dir", "/x y", "-d"]) as case:
        await case.answer("one")
        assert words(case) == [*PLAIN, "--add-dir", "/x y", "-d"]


@pytest.mark.parametrize("fork", [False, True])
async def test_resume_flag_keeps_conversation_in_one_word(tmp_path: Path, fork: bool) -> None:
    async with opened(tmp_path, memory=True, resume="--evil id", fork=fork) as case:
        # The agent does not know the conversation. The session reports it, and then begins another one.
        assert (await case.answer("one")).kind is Kind.FAILED
        assert (await case.answer("two")).kind is Kind.DONE
        assert words(case) == [*PLAIN, "--resume=--evil id", *(["--fork-session"] if fork else [])]
        assert words(case, 1) == PLAIN


async def test_resume_flag_keeps_agent_given_conversation_in_one_word(tmp_path: Path) -> None:
    named = '{"type":"system","subtype":"init","session_id":"--evil id"}'
    async with opened(tmp_path, memory=True) as case:
        await case.answer(f"@@raw {named}\n@@exit 1")
        assert case.session.status().conversation == "--evil id"
        await case.answer("next")
        assert words(case, 1) == [*PLAIN, "--resume=--evil id"]


@pytest.mark.parametrize("name", ["", "a\\u0000b", "a\\nb", "x" * 300_000], ids=["empty", "NUL", "newline", "long"])
async def test_conversation_name_that_cannot_be_an_argument_is_ignored(tmp_path: Path, name: str) -> None:
    named = f'{{"type":"system","subtype":"init","session_id":"{name}"}}'
    async with opened(tmp_path, memory=True) as case:
        await case.answer("one")
        conversation = case.session.status().conversation
        await case.answer(f"@@raw {named}\n@@exit 1")
        assert case.session.status().conversation == conversation
        assert (await case.answer("next")).text == "next"
        assert words(case, 1) == [*PLAIN, f"--resume={conversation}"]


@pytest.mark.parametrize(
    "how",
    [
        {"model": ""},
        {"model": 3},
        {"permission_mode": ""},
        {"system_prompt": ["x"]},
        {"resume": ""},
        {"model": "a\0b"},
        {"system_prompt": "\ud800"},
        {"args": ["a\0b"]},
        {"args": "--flag"},
        {"fork": True},
    ],
)
async def test_open_refuses_value_that_cannot_be_an_argument(tmp_path: Path, how: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        async with opened(tmp_path, **how):
            raise AssertionError("it was opened")


async def test_agent_environment_drops_nesting_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NESTING:
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("OTHER_TEST_VARIABLE", "1")
    async with opened(tmp_path, env={"BANKSMAN_MINE": "1", "CLAUDE_CODE_ENTRYPOINT": "mine"}) as case:
        await case.answer("one")
        found = set(case.processes[0].env)
        # The caller's variables are always there, and all variables that do not mislead.
        assert found >= {"BANKSMAN_MINE", "OTHER_TEST_VARIABLE", "PATH"}
        assert found & NESTING == {"CLAUDE_CODE_ENTRYPOINT"}


async def test_agent_inherits_no_variable_of_banksman(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They can contain the token of a server, with which the agent could answer its own questions."""
    for name in ("BANKSMAN_TOKEN", "BANKSMAN_URL", "BANKSMAN_SERVE_TOKEN", "BANKSMAN_STORE"):
        monkeypatch.setenv(name, "1")
    async with opened(tmp_path) as case:
        await case.answer("one")
        assert not [name for name in case.processes[0].env if name.startswith("BANKSMAN_")]


async def test_agent_environment_is_callers_alone_without_inherit_env(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTHER_TEST_VARIABLE", "1")
    async with opened(tmp_path, env={"BANKSMAN_MINE": "1"}, inherit_env=False) as case:
        await case.answer("one")
        assert "OTHER_TEST_VARIABLE" not in case.processes[0].env
        assert "BANKSMAN_MINE" in case.processes[0].env
