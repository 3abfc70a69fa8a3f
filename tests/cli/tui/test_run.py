"""`banksman run` from the view of a user at a terminal."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from tests.cli.tui.kit import BANKSMAN, CTRL_C, SECONDS_MAX, Terminal, processes_in
from tests.server.kit import Served
from tests.sessions.test_provider_errors import LIMITED, rate_limit, retry

from banksman.testing import fake_agent

AGENT = ("--", *fake_agent.command())
# Sequences that clear the screen, move the cursor, rename the window, reverse the text, and ring the bell.
HOSTILE = "\x1b[2J\x1b[H\x1b]0;mine\x07\x9b31m\u202erts\x07 after"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    return folder


def piped(env: dict[str, str], *words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*BANKSMAN, *words], capture_output=True, text=True, timeout=SECONDS_MAX, check=False, env=env, **options
    )


def last_event(served: Served) -> str:
    """Return the kind of the last event of the session that was opened last."""
    session = sessions(served)[-1]
    return served.get(f"/v1/sessions/{session['id']}/events?after={session['seq'] - 1}")["events"][-1]["kind"]


def sessions(served: Served) -> list[dict[str, Any]]:
    return served.get("/v1/sessions")["sessions"]


def test_run_shows_text_as_it_is_said_and_once(env: dict[str, str], folder: Path) -> None:
    gate = folder / "gate"
    prompt = f"@@stream 3 0 word\n@@wait {gate}\n@@say # Title\n@@say *not* `marked`"
    with Terminal("run", "claude", prompt, *AGENT, env=env, cwd=folder) as terminal:
        terminal.wait_text("word0 word1 word2")
        gate.touch()
        assert terminal.end() == 0
        assert "word0 word1 word2 \n# Title\n*not* `marked`\n" in terminal.words
        # Once: text that came in pieces is not shown again as a whole.
        assert terminal.words.count("word1") == 1
        assert "done, $" in terminal.words


def test_run_shows_text_before_its_block_is_whole(env: dict[str, str], folder: Path) -> None:
    with Terminal("run", "claude", "@@stream 100 0.2 piece", *AGENT, env=env, cwd=folder) as terminal:
        terminal.wait_text("piece0 piece1 ")
        terminal.type(CTRL_C)
        assert terminal.end() == 130
        assert "piece99" not in terminal.words


def test_run_and_ask_tell_limit_of_the_account(env: dict[str, str], folder: Path) -> None:
    prompt = f"@@raw {rate_limit(time.time() + 3600)}\n@@boundary {json.dumps(LIMITED)}"
    met = piped(env, "run", "--name", "limited", "claude", prompt, *AGENT, cwd=folder)
    assert "the agent's account is limited until " in met.stderr
    asked = piped(env, "ask", "limited", "hello", cwd=folder)
    assert asked.stderr.startswith("the session is limited until ")


def test_run_tells_retries_of_the_agent(env: dict[str, str], folder: Path) -> None:
    prompt = f"@@raw {retry()}\n@@say hello"
    done = piped(env, "run", "claude", prompt, *AGENT, cwd=folder)
    assert "the provider failed, and the agent tries again (1)" in done.stderr
    assert done.stdout == "hello\n"


def test_run_leaves_nothing_when_it_is_over(env: dict[str, str], folder: Path, served: Served) -> None:
    with Terminal("run", "claude", "@@hold 60 setsid\n@@say over", *AGENT, env=env, cwd=folder) as terminal:
        terminal.wait_said("over")
        assert terminal.end() == 0
    assert processes_in(folder) == []
    assert last_event(served) == "session.closed"


def test_run_shows_a_tool_as_one_line_with_its_time(env: dict[str, str], folder: Path) -> None:
    gate = folder / "gate"
    prompt = f'@@tool_use Bash {{"command": "make test"}}\n@@wait {gate}\n@@tool_result ok\n@@say over'
    with Terminal("run", "claude", prompt, *AGENT, env=env, cwd=folder) as terminal:
        # While the tool runs, the status line names it.
        terminal.wait(lambda: any("Bash: make test" in line and "Ctrl-C" in line for line in terminal.lines), "status")
        gate.touch()
        assert terminal.end() == 0
        assert "✓ Bash: make test, " in terminal.text
        assert "Ctrl-C interrupts" not in terminal.text


def test_run_ctrl_c_stops_the_turn_and_shows_the_receipt(env: dict[str, str], folder: Path, served: Served) -> None:
    with Terminal("run", "claude", "@@say begun\n@@hang", *AGENT, env=env, cwd=folder) as terminal:
        terminal.wait_text("begun")
        assert processes_in(folder)
        terminal.type(CTRL_C)
        assert terminal.end() == 130
        assert "stopping the turn; Ctrl-C again ends the session" in terminal.text
        assert "stopped, by boundary" in terminal.text
        assert "interrupted" in terminal.text
        assert "Traceback" not in terminal.words
    assert processes_in(folder) == []


def test_run_ctrl_c_twice_ends_session_and_whole_tree(env: dict[str, str], folder: Path, served: Served) -> None:
    prompt = "@@on_interrupt ignored\n@@hold 60 setsid\n@@say begun\n@@hang"
    with Terminal("run", "claude", prompt, *AGENT, env=env, cwd=folder) as terminal:
        terminal.wait_text("begun")
        assert len(processes_in(folder)) >= 2
        terminal.type(CTRL_C)
        terminal.wait_text("Ctrl-C again ends the session")
        terminal.type(CTRL_C)
        assert terminal.end() == 130
        assert "Traceback" not in terminal.words
        # The verb waited neither for the receipt nor for the outcome.
        assert "stopped, by" not in terminal.words
    assert processes_in(folder) == []
    assert last_event(served) == "session.closed"


@pytest.mark.thorough
@pytest.mark.parametrize("columns", [40, 20])
def test_run_stays_readable_on_a_narrow_terminal(env: dict[str, str], folder: Path, columns: int) -> None:
    gate = folder / "gate"
    prompt = (
        f'@@think hm\n@@tool_use Bash {{"command": "make all the tests"}}\n@@wait {gate}\n@@tool_result ok\n@@say done'
    )
    with Terminal("run", "claude", prompt, *AGENT, env=env, cwd=folder, columns=columns) as terminal:
        terminal.wait(lambda: " s" in terminal.text, "the line that moves")
        assert [line for line in terminal.lines if line and not line.startswith("·")] == [
            terminal.text.splitlines()[-1]
        ]
        gate.touch()
        assert terminal.end() == 0
        # Words are whole, and wrapped lines are indented.
        assert any(line.startswith("✓ Bash: make") for line in terminal.lines)
        assert all(len(line) <= columns for line in terminal.lines)


@pytest.mark.parametrize("key", ["a", "1", "d"])
def test_run_question_is_answered_by_a_key(env: dict[str, str], folder: Path, key: str) -> None:
    prompt = '@@ask Bash {"command": "make test"}\n@@say over'
    with Terminal("run", "claude", prompt, *AGENT, env=env, cwd=folder) as terminal:
        terminal.wait_text("Bash: make test — allow? [a]llow / [d]eny / [i]nterrupt")
        terminal.type(f"x{key}")
        terminal.wait_said("over")
        assert terminal.end() == 0
        assert ("✗ Bash: make test" in terminal.words) == (key == "d")


@pytest.mark.thorough
def test_run_question_shows_the_end_of_a_command_padded_with_blanks(env: dict[str, str], folder: Path) -> None:
    given = {"command": f"ls{' ' * 3000}; rm -rf /home", "description": "list files"}
    prompt = f"@@ask Bash {json.dumps(given)}\n@@say over"
    with Terminal("run", "claude", prompt, *AGENT, env=env, cwd=folder) as terminal:
        terminal.wait_text("Bash (2 lines above) — allow? [a]llow")
        assert "│ command: ls [3000 blanks] ; rm -rf /home" in terminal.lines
        assert "│ the agent says: list files" in terminal.lines
        terminal.type("d")
        assert terminal.end() == 0


def test_run_question_is_printed_in_full_without_a_terminal(env: dict[str, str], folder: Path) -> None:
    given = {"file_path": "x", "old_string": "a\nb", "new_string": "evil " * 1000}
    prompt = f"@@ask Edit {json.dumps(given)}\n@@say over"
    done = piped(env, "run", "claude", prompt, "--on-question", "fail", *AGENT, cwd=folder)
    assert ("evil " * 1000).strip() in done.stderr
    assert "│   a\n│   b\n" in done.stderr


@pytest.mark.thorough
def test_run_question_may_stop_the_turn(env: dict[str, str], folder: Path) -> None:
    with Terminal("run", "claude", '@@ask Bash {"command": "x"}', *AGENT, env=env, cwd=folder) as terminal:
        terminal.wait_text("[i]nterrupt")
        terminal.type("i")
        assert terminal.end() == 1
        assert "interrupted" in terminal.text


def test_run_question_is_asked_at_the_terminal_when_stdin_was_the_prompt(env: dict[str, str], folder: Path) -> None:
    read, write = os.pipe()
    os.write(write, b'@@ask Bash {"command": "ls"}\n@@say over')
    os.close(write)
    try:
        with Terminal("run", "claude", *AGENT, env=env, cwd=folder, stdin=read) as terminal:
            terminal.wait_text("[a]llow")
            terminal.type("a")
            assert terminal.end() == 0
            assert "over" in terminal.text
    finally:
        os.close(read)


def test_run_without_a_prompt_at_a_terminal_says_both_ways(env: dict[str, str], folder: Path) -> None:
    with Terminal("run", "claude", env=env, cwd=folder) as terminal:
        assert terminal.end() == 2
        assert 'banksman run claude "PROMPT"' in terminal.words
        assert "on stdin" in terminal.words


@pytest.mark.thorough
def test_run_escapes_terminal_sequences_of_the_agent(env: dict[str, str], folder: Path) -> None:
    tool = json.dumps({"command": HOSTILE})
    prompt = f"@@say before\n@@tool_use Bash {tool}\n@@tool_result ok\n@@think {HOSTILE}\n@@say {HOSTILE}"
    with Terminal("run", "claude", prompt, *AGENT, env=env, cwd=folder) as terminal:
        assert terminal.end() == 0
        assert "before" in terminal.text
        assert terminal.text.count("\\x1b[2J") >= 2
        for sequence in (b"\x1b[2J", b"\x1b[H", b"\x1b]", b"\x07", b"\x9b", "\u202e".encode()):
            assert sequence not in terminal.said


@pytest.mark.thorough
@pytest.mark.parametrize("more", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_run_prints_no_sequence_when_colour_is_off(env: dict[str, str], folder: Path, more: dict[str, str]) -> None:
    # Silent for longer than the delay of the status line.
    prompt = '@@tool_use Bash {"command": "x"}\n@@stream 2 1.5\n@@tool_result ok\n@@say over'
    with Terminal("run", "claude", prompt, *AGENT, env={**env, **more}, cwd=folder) as terminal:
        assert terminal.end() == 0
        assert "over" in terminal.text
        assert b"\x1b" not in terminal.said


def test_run_piped_prints_only_the_agents_text_on_stdout(env: dict[str, str], folder: Path) -> None:
    prompt = f'@@tool_use Bash {{"command": "x"}}\n@@tool_result ok\n@@say {HOSTILE}\n@@say over'
    done = piped(env, "run", "claude", "-", *AGENT, cwd=folder, input=prompt)
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == "over"
    assert "[Bash: x]" in done.stderr
    assert not set(done.stdout + done.stderr) & set("\x1b\x07\x9b\r")
    assert piped(env, "run", "claude", "@@say a\n@@say b", "--format", "quiet", *AGENT, cwd=folder).stdout == "b\n"


def test_run_json_is_the_events_then_the_outcome(env: dict[str, str], folder: Path) -> None:
    done = piped(env, "run", "claude", "hello", "--json", *AGENT, cwd=folder)
    *events, last = [json.loads(line) for line in done.stdout.splitlines()]
    assert events[-1]["kind"] == "turn.ended"
    assert last["outcome"]["text"] == "hello"
    assert done.stderr == ""


@pytest.mark.thorough
@pytest.mark.parametrize(("how", "code"), [("allow", 0), ("deny", 0), ("fail", 1)])
def test_run_on_question_flag_decides_a_question(env: dict[str, str], folder: Path, how: str, code: int) -> None:
    prompt = '@@ask Bash {"command": "ls"}\n@@say over'
    done = piped(env, "run", "claude", prompt, "--on-question", how, *AGENT, cwd=folder)
    assert done.returncode == code, done
    assert ("over" in done.stdout) == (how != "fail")
    assert "Ctrl-C" not in done.stderr


@pytest.mark.thorough
@pytest.mark.thorough
def test_run_timeout_stops_the_turn(env: dict[str, str], folder: Path, served: Served) -> None:
    done = piped(env, "run", "claude", "@@hang", "--timeout", "0.5", *AGENT, cwd=folder)
    assert (done.returncode, "interrupted: --timeout 0.5 s reached" in done.stderr) == (1, True), done
    named = piped(env, "run", "claude", "@@hang", "--timeout", "0.5", "--name", "slow", *AGENT, cwd=folder)
    assert (named.returncode, "stopped, by boundary" in named.stderr) == (1, True)
    assert "interrupted: --timeout 0.5 s reached" in named.stderr
    assert "Ctrl-C" not in named.stderr
    # A session with a name is kept.
    assert [each["phase"] for each in sessions(served) if each["name"] == "slow"] == ["idle"]
    again = piped(env, "run", "claude", "more", "--name", "slow", *AGENT, cwd=folder)
    assert (again.returncode, again.stdout) == (0, "more\n")
    piped(env, "close", "slow")
    assert processes_in(folder) == []


@pytest.mark.thorough
def test_run_exit_codes_of_wrong_usage(env: dict[str, str], folder: Path) -> None:
    assert piped(env, "run", "claude", "x", "--timeout", "0", *AGENT).returncode == 2
    assert piped(env, "run", "claude", "x", "--").returncode == 2
    assert piped(env, "run", "claude", "-", input=" \n").returncode == 2
    assert piped(env, "run", "nobody-knows-it", "x").returncode == 4
