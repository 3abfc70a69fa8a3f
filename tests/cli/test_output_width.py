"""Output on a terminal fits every width, and has colour only where the user wants it."""

from __future__ import annotations

import os
import time
from collections.abc import Generator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import pytest
from tests.cli.tui.kit import Terminal
from tests.server.kit import TOKEN, Served, shared
from tests.thorough import one_in

CTRL_C_CODE = 130


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Generator[Served]:
    with shared(tmp_path_factory.mktemp("looking")) as served:
        for number in range(14):
            closed = served.open(name=f"over-{number:02}")
            served.request("DELETE", f"/v1/sessions/{closed}")
        # It keeps sending text: a session that is silent for a minute counts as wedged.
        session = served.open({"prompt work": ["stream 3000 0.2"]}, name="fix-the-build-that-is-red-since-monday")
        served.ask(session, "work")
        served.open(name="idle-one")
        asks = served.open(name="asks-one")
        served.ask(asks, '@@ask Bash {"command": "ls"}')
        deadline = time.monotonic() + 60
        while served.get(f"/v1/sessions/{asks}")["state"] != "asks":
            assert time.monotonic() < deadline
            time.sleep(0.01)
        yield served


def environment(served: Served, **more: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "TERM")}
    folder = served.folder
    return {
        **{name: value for name, value in clean.items() if not name.startswith("BANKSMAN_")},
        "BANKSMAN_URL": served.url,
        "BANKSMAN_TOKEN": TOKEN,
        "XDG_STATE_HOME": str(folder / "mine"),
        "XDG_CONFIG_HOME": str(folder / "config"),
        **more,
    }


class Seen(NamedTuple):
    lines: list[str]
    said: bytes


def seen(
    served: Served, *words: str, columns: int = 80, rows: int = 40, env: Mapping[str, str] = MappingProxyType({})
) -> Seen:
    """Return the final screen, and all bytes that were sent to it."""
    with Terminal(*words, columns=columns, rows=rows, env=environment(served, **env)) as terminal:
        assert terminal.end() == 0
        return Seen(terminal.lines, bytes(terminal.said))


def test_cli_ps_lists_sessions_that_need_attention_first(served: Served) -> None:
    lines = seen(served, "ps", columns=140).lines
    assert lines[0].split() == ["STATE", "NAME", "SESSION", "AGENT", "HOLDER", "QUEUE", "ASKS", "COST", "LAST"]
    states = [line.split()[0] for line in lines[1:14]]
    assert states == ["asks", "running", "idle", *["gone"] * 10]
    assert lines[4].split()[1] == "over-13", "the newest of those first"
    assert lines[14] == "4 more sessions are over: run `banksman ps --all`"
    assert sum(line.startswith("gone") for line in seen(served, "ps", "--all", columns=140).lines) == 14


@pytest.mark.parametrize("columns", one_in(3, [20, 30, 40, 60, 80, 100]))
def test_cli_ps_fits_the_terminal_width(served: Served, columns: int) -> None:
    lines = seen(served, "ps", columns=columns).lines
    # A line that is too long would continue in the next row.
    assert [line.split()[0] for line in lines[:4]] == ["STATE", "asks", "running", "idle"]
    assert lines[1].split()[1].startswith("asks-one"[: 8 if columns < 30 else None])
    assert all(len(line) <= columns for line in lines)
    assert "…" not in lines[0], "a column is whole, or not there; only a name is cut"


@pytest.mark.thorough
def test_cli_colour_is_off_for_no_color_and_dumb_terminals(served: Served) -> None:
    assert b"\x1b[33masks" in seen(served, "ps").said
    assert b"\x1b[32mrunning" in seen(served, "why", "fix-the-build-that-is-red-since-monday").said
    for env in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        for words in (["ps"], ["why", "idle-one"], ["log", "idle-one"]):
            assert b"\x1b" not in seen(served, *words, env=env).said, (words, env)


def test_cli_log_indents_continued_lines(served: Served) -> None:
    lines = seen(served, "log", "asks-one", columns=60).lines
    begun = [line for line in lines if line[:18].strip()]
    more = [line for line in lines if line.strip() and not line[:18].strip()]
    assert more, "something did not fit"
    assert all(line.startswith(" " * 20) and line[20] != " " for line in more)
    assert all(line[10:18].count(":") == 2 for line in begun), f"cursor and time stand in columns of their own: {begun}"


@pytest.mark.thorough
def test_cli_log_follow_reports_a_lost_connection_and_its_return(tmp_path: Path) -> None:
    with Served(tmp_path / "served") as served:
        session = served.open()
        served.outcome(session, served.ask(session, "one"))
        words = ("log", session, "--follow")
        with Terminal(*words, columns=120, rows=60, env=environment(served)) as terminal:
            terminal.wait_text("turn.ended")
            served.kill()
            terminal.wait_text("reconnecting, no event is lost")
            served.start()
            terminal.wait_text("connected again")
            served.outcome(session, served.ask(session, "two"))
            terminal.wait_text("says two")
            terminal.type("\x03")
            assert terminal.end() == CTRL_C_CODE
            words_said = terminal.words
        cursors = [line.split()[0] for line in words_said.splitlines() if line[10:18].count(":") == 2]
        assert len(cursors) == len(set(cursors)), "nothing twice"


@pytest.mark.thorough
def test_cli_doctor_fits_the_terminal_width(served: Served) -> None:
    terminal = seen(served, "doctor", columns=50, rows=200)
    assert b"\x1b[32mok" in terminal.said
    lines = [line for line in terminal.lines if line]
    assert all(len(line) <= 50 for line in lines)
    known = ("  ok ", "  note ", "  wrong ", " " * 9)
    assert all(line.startswith(known) for line in lines if line.startswith(" ")), lines
