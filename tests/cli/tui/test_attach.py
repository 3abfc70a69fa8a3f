"""`banksman attach` from the view of a user at a terminal."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.cli.tui.conftest import variables
from tests.cli.tui.kit import (
    BACKSPACE,
    BANKSMAN,
    CTRL_A,
    CTRL_C,
    CTRL_D,
    CTRL_U,
    CTRL_W,
    CTRL_Z,
    ENTER,
    LEFT,
    SECONDS_MAX,
    UP,
    Terminal,
)
from tests.server.access import tokens
from tests.server.kit import Served
from tests.thorough import thorough

from banksman.server.access.roles import Role
from banksman.testing import fake_agent

pytestmark = thorough

HOSTILE = "\x1b[2J\x1b[H\x1b]0;mine\x07\x9b31m\u202erts\x07 after"


def wait_until(is_so: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + SECONDS_MAX
    while not (found := is_so()):
        assert time.monotonic() < deadline, what
        time.sleep(0.02)  # Polls the server's state, because no event reports it here.
    return found


def ready(terminal: Terminal) -> None:
    """Wait for an empty input line."""
    terminal.wait(lambda: ">" in terminal.lines, "a line to type in")


def phase(served: Served, session: str) -> str:
    return served.get(f"/v1/sessions/{session}")["phase"]


def test_attach_asks_a_typed_line_and_ctrl_d_leaves(served: Served, env: dict[str, str]) -> None:
    session = served.open(name="talk")
    served.outcome(session, served.ask(session, "said before"))
    with Terminal("attach", "talk", env=env) as terminal:
        terminal.wait_text("talk, claude, idle")
        # The earlier text is there, once.
        terminal.wait_text("> said before\nsaid before\ndone, $")
        terminal.type(f"hello there{ENTER}")
        terminal.wait_text("> hello there\nhello there\ndone, $")
        assert terminal.words.count("hello there\n") == 2
        terminal.type(CTRL_D)
        assert terminal.end() == 0
    events = served.get(f"/v1/sessions/{session}/events?limit=1000&frames=0")["events"]
    asked = [event["body"] for event in events if event["kind"] == "turn.queued"][-1]
    assert (asked["prompt"], asked["priority"]) == ("hello there", 20)
    assert phase(served, session) == "idle"


def test_attach_of_an_asker_asks_with_normal_priority(served: Served, env: dict[str, str]) -> None:
    session = tokens.opened_by(served, "tim", "of-tim")
    token = tokens.create(served, "tim", Role.ASKER)
    asker = {**env, "BANKSMAN_URL": served.url, "BANKSMAN_TOKEN": token}
    with Terminal("attach", "of-tim", env=asker) as terminal:
        ready(terminal)
        terminal.type(f"hello there{ENTER}")
        terminal.wait_text("hello there\ndone, $")
        terminal.type(CTRL_D)
        assert terminal.end() == 0
    events = served.get(f"/v1/sessions/{session}/events?limit=1000&frames=0")["events"]
    asked = [event["body"] for event in events if event["kind"] == "turn.queued"][-1]
    assert (asked["caller"], asked["priority"]) == ("tim", 10)


@pytest.mark.thorough
def test_attach_keeps_the_typed_line_while_output_arrives(served: Served, env: dict[str, str]) -> None:
    session = served.open()
    with Terminal("attach", session, env=env) as terminal:
        ready(terminal)
        turn = served.ask(session, "@@stream 40 0.03 tick\n@@say all\n@@say said")
        terminal.wait_text("tick3 ")
        for letter in "half a line":
            terminal.type(letter)
            terminal.wait(lambda: terminal.cursor_line.startswith("> h"), "the line")
        served.outcome(session, turn)
        terminal.wait_text("done, $")
        lines = [line for line in terminal.lines if line]
        assert lines[-1] == "> half a line"
        # All output is there, on separate lines, without a letter of the typed line in it.
        assert terminal.text.count("half") == 1
        rows = terminal.screen.display
        ticks = rows[terminal.lines.index("all") - 4 : terminal.lines.index("all")]
        assert "".join(ticks).split() == [f"tick{number}" for number in range(40)]
        assert "all\nsaid\ndone" in terminal.text
        terminal.type(CTRL_U + CTRL_D)
        assert terminal.end() == 0


def test_attach_line_can_be_edited(served: Served, env: dict[str, str]) -> None:
    session = served.open()
    with Terminal("attach", session, env=env, columns=30) as terminal:
        ready(terminal)

        def line() -> str:
            return terminal.cursor_line

        def wait_line(text: str) -> None:
            terminal.wait(lambda: line() == text, f"{text!r}, not {line()!r}")

        terminal.type("first" + ENTER)
        terminal.wait_text("done, $")
        terminal.type("one two" + CTRL_W + "drei")
        wait_line("> one drei")
        terminal.type(LEFT * 2 + BACKSPACE + "R")
        wait_line("> one dRei")
        terminal.type(CTRL_A + "日本 ")
        terminal.wait(lambda: "one dRei" in line() and "日" in line(), "wide letters")
        # The cursor is at the place of the next letter: after two letters of two columns each, and a space.
        terminal.wait(lambda: terminal.cursor_column == len("> ") + 5, "the cursor")
        terminal.type(CTRL_U)
        wait_line("> one dRei")
        terminal.type(UP)
        wait_line("> first")
        terminal.type(CTRL_U + "\x1b[200~a\nb\x02\x1b[201~")
        wait_line("> a⏎b\\x02")
        terminal.type(CTRL_U + "x" * 100)
        # One row, however long it is, with the cursor in it.
        terminal.wait(lambda: line().startswith("> …xxx") and len(line()) < 30, "a long line")
        assert len([each for each in terminal.lines if "xxx" in each]) == 1
        terminal.type(CTRL_U + CTRL_D)
        assert terminal.end() == 0


def test_attach_answers_a_question_by_key_only_on_an_empty_line(served: Served, env: dict[str, str]) -> None:
    session = served.open()
    with Terminal("attach", session, env=env) as terminal:
        ready(terminal)
        terminal.type("dr")
        terminal.wait_text("> dr")
        turn = served.ask(session, '@@ask Bash {"command": "make test"}\n@@say over')
        terminal.wait_text("Bash: make test — allow? (clear the line")
        terminal.type("a")
        terminal.wait_text("> dra")
        terminal.type(CTRL_U)
        terminal.wait_text("Bash: make test — allow? [a]llow / [d]eny / [i]nterrupt")
        terminal.type("a")
        assert served.outcome(session, turn)["text"] == "over"
        terminal.wait_text("Bash: make test — allow? allow, by answer")
        terminal.wait_no_text("[a]llow")
        terminal.type(CTRL_D)
        assert terminal.end() == 0


@pytest.mark.thorough
def test_attach_question_shows_code_and_marks_the_agents_words(served: Served, env: dict[str, str]) -> None:
    session = served.open()
    given = {"description": "print the date", "code": "import shutil\nshutil.rmtree('/home')"}
    with Terminal("attach", session, env=env) as terminal:
        ready(terminal)
        served.ask(session, f"@@ask mcp__py__run {json.dumps(given)}\n@@say over")
        terminal.wait_text("mcp__py__run (4 lines above) — allow? [a]llow")
        shown = ["│ code:", "│   import shutil", "│   shutil.rmtree('/home')", "│ the agent says: print the date"]
        assert [line for line in terminal.lines if line.startswith(("│", "┊"))] == shown
        terminal.type("d")
        terminal.wait_text("— allow? deny, by answer")
        # The decided question stays readable.
        assert [line for line in terminal.lines if line.startswith(("│", "┊"))] == shown
        terminal.type(CTRL_D)
        assert terminal.end() == 0


@pytest.mark.thorough
def test_attach_question_longer_than_the_screen_is_written_in_full(served: Served, env: dict[str, str]) -> None:
    session = served.open()
    given = {"file_path": "notes.txt", "content": "".join(f"line {number} of it\n" for number in range(60))}
    with Terminal("attach", session, env=env, rows=20) as terminal:
        ready(terminal)
        served.ask(session, f"@@ask Write {json.dumps(given)}\n@@say over")
        terminal.wait_text("Write (62 lines above) — allow? [a]llow")
        terminal.wait_text("│ file_path: notes.txt")
        terminal.wait_text("the full text is above")
        for number in range(60):
            assert f"│   line {number} of it" in terminal.words
        terminal.type("a")
        terminal.wait_text("over")
        terminal.type(CTRL_D)
        assert terminal.end() == 0


def test_attach_shows_an_earlier_question_until_it_is_answered_elsewhere(served: Served, env: dict[str, str]) -> None:
    session = served.open()
    served.ask(session, '@@ask Bash {"command": "ls"}\n@@say over')
    question = wait_until(lambda: served.get(f"/v1/sessions/{session}/questions")["questions"], "no question")[0]
    with Terminal("attach", session, env=env) as terminal:
        terminal.wait_text("[a]llow")
        served.post(f"/v1/sessions/{session}/questions/{question['id']}", {"decision": "deny"})
        terminal.wait_no_text("[a]llow")
        terminal.wait_text("deny, by answer")
        terminal.type(CTRL_D)
        assert terminal.end() == 0


def test_attach_ctrl_c_stops_the_turn_and_then_leaves(served: Served, env: dict[str, str]) -> None:
    session = served.open()
    with Terminal("attach", session, env=env) as terminal:
        ready(terminal)
        terminal.type(f"@@hang{ENTER}")
        terminal.wait_text("waiting for the agent")
        terminal.type(CTRL_C)
        terminal.wait_text("stopped, by boundary")
        terminal.wait_text("interrupted")
        terminal.type("typed")
        terminal.wait_text("> typed")
        terminal.type(CTRL_C)
        terminal.wait_no_text("> typed")
        terminal.type(CTRL_C)
        assert terminal.end() == 130
    assert phase(served, session) == "idle"


def test_attach_ctrl_c_twice_leaves_and_the_session_continues(served: Served, env: dict[str, str]) -> None:
    session = served.open(options={"drain_seconds": 60})
    turn = served.ask(session, "@@on_interrupt ignored\n@@say begun\n@@hang")
    with Terminal("attach", session, env=env) as terminal:
        terminal.wait_text("begun")
        terminal.type(CTRL_C)
        terminal.wait_text("Ctrl-C again leaves")
        terminal.type(CTRL_C)
        assert terminal.end() == 130
        assert "the session continues" in terminal.words
    assert served.get(f"/v1/sessions/{session}")["holder"] == turn
    served.request("DELETE", f"/v1/sessions/{session}")


@pytest.mark.thorough
@pytest.mark.parametrize("ends", ["kill", "stop"])
def test_attach_reports_a_lost_connection_and_loses_or_repeats_nothing(tmp_path: Path, ends: str) -> None:
    command = fake_agent.command(memory=tmp_path / "memory")
    with Served(tmp_path / "served") as served:
        session = served.post("/v1/sessions", {"command": command, "name": "lasting"})["id"]
        with Terminal("attach", "lasting", env=variables(served), columns=100) as terminal:
            terminal.wait_text("lasting, claude")
            terminal.type(f"before{ENTER}")
            terminal.wait_text("> before\nbefore\ndone")
            terminal.type("half")
            getattr(served, ends)()
            terminal.wait_text("connection lost, trying again")
            terminal.type(" a line")
            served.start()
            terminal.wait_text("connected again")
            served.outcome(session, served.ask(session, "from elsewhere"))
            terminal.wait_text("> from elsewhere\nfrom elsewhere\ndone")
            terminal.type(ENTER)
            terminal.wait_text("> half a line\nhalf a line\ndone")
            for said in ("before", "from elsewhere", "half a line"):
                assert terminal.words.count(f"> {said}\n") == 1, said
            terminal.type(CTRL_D)
            assert terminal.end() == 0


@pytest.mark.thorough
def test_attach_gives_back_a_line_that_could_not_be_sent(tmp_path: Path) -> None:
    with Served(tmp_path / "served") as served:
        session = served.open()
        with Terminal("attach", session, env=variables(served)) as terminal:
            ready(terminal)
            served.stop()
            terminal.wait_text("connection lost")
            terminal.type(f"keep me{ENTER}")
            terminal.wait_text("cannot ask")
            terminal.wait_text("> keep me")
            terminal.type(CTRL_U + CTRL_D)
            assert terminal.end() == 0


@pytest.mark.thorough
@pytest.mark.parametrize("columns", [40, 20])
def test_attach_stays_readable_on_a_narrow_terminal(served: Served, env: dict[str, str], columns: int) -> None:
    session = served.open()
    with Terminal("attach", session, env=env, columns=columns, rows=12) as terminal:
        ready(terminal)
        terminal.type(f'@@ask Bash {{"command": "make test"}}{ENTER}')
        terminal.wait(lambda: "[i]nterrupt" in terminal.text.replace("\n ", ""), "the keys")
        assert terminal.cursor_line == ">"
        terminal.type("a")
        terminal.wait_text("done, $")
        assert all(len(line) <= columns for line in terminal.lines)
        terminal.type(CTRL_D)
        assert terminal.end() == 0


@pytest.mark.thorough
def test_attach_follows_the_window_size(served: Served, env: dict[str, str]) -> None:
    session = served.open()
    with Terminal("attach", session, env=env, columns=80) as terminal:
        ready(terminal)
        terminal.type("y" * 60)
        terminal.wait_text("y" * 60)
        terminal.resize(30, 10)
        terminal.wait(lambda: terminal.cursor_line.startswith("> …y"), "a shorter line")
        terminal.resize(100, 30)
        terminal.wait_text("> " + "y" * 60)
        terminal.type(CTRL_U + CTRL_D)
        assert terminal.end() == 0


@pytest.mark.thorough
def test_attach_can_be_suspended_and_resumed(served: Served, env: dict[str, str]) -> None:
    session = served.open()
    shell = ["bash", "--norc", "--noprofile", "-i"]
    with Terminal(command=shell, env={**env, "PS1": "shell: ", "HISTFILE": ""}, columns=100) as terminal:
        terminal.wait_text("shell:")
        terminal.type(f"{shlex.join(BANKSMAN)} attach {session}{ENTER}")
        ready(terminal)
        terminal.type("kept")
        terminal.wait_text("> kept")
        terminal.type(CTRL_Z)
        terminal.wait_text("Stopped")
        # The shell has a terminal with echo and line mode.
        terminal.type(f"echo $((40 + 2)); fg{ENTER}")
        terminal.wait_text("\n42\n")
        terminal.wait(lambda: terminal.cursor_line == "> kept", "the line again")
        terminal.type(CTRL_U + CTRL_D)
        terminal.wait(lambda: terminal.cursor_line == "shell:", "the shell again")
        terminal.type(f"exit{ENTER}")
        assert terminal.end() == 0


@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_attach_restores_the_terminal_when_ended_by_a_signal(served: Served, env: dict[str, str], number: int) -> None:
    session = served.open()
    with Terminal("attach", session, env=env) as terminal:
        ready(terminal)
        terminal.process.send_signal(number)
        assert terminal.end() == 128 + number


def test_attach_escapes_terminal_sequences_of_the_agent(served: Served, env: dict[str, str]) -> None:
    session = served.open()
    with Terminal("attach", session, env=env, columns=100) as terminal:
        ready(terminal)
        served.outcome(session, served.ask(session, f"@@say before\n@@say {HOSTILE}\n@@think {HOSTILE}"))
        terminal.wait_text("done, $")
        assert "before" in terminal.text
        assert "\\x1b[2J" in terminal.text
        for sequence in (b"\x1b[2J", b"\x1b[H", b"\x1b]", b"\x07", b"\x9b", "\u202e".encode()):
            assert sequence not in terminal.said
        terminal.type(CTRL_D)
        assert terminal.end() == 0


@pytest.mark.thorough
def test_attach_without_a_terminal_only_watches(served: Served, env: dict[str, str]) -> None:
    session = served.open()
    with subprocess.Popen(
        [*BANKSMAN, "attach", session],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
    ) as watching:
        try:
            served.ask(session, f"@@say {HOSTILE}\n@@say over")
            assert watching.stdout is not None
            said = ""
            while "over" not in said:
                line = watching.stdout.readline()
                assert line
                said += line
            watching.send_signal(signal.SIGINT)
            out, told = watching.communicate(timeout=SECONDS_MAX)
            assert watching.returncode == 130
            assert "> @@say" in told
            assert not set(said + out + told) & set("\x1b\x07\x9b\r")
        finally:
            watching.kill()
