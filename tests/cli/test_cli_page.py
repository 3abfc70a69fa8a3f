"""docs/cli.md equals `--help`, the help of every verb ends with an example, and every example parses."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from tools import cli_page

from banksman import cli
from banksman.cli.arguments import Parser, split_command

ROOT = Path(__file__).resolve().parent.parent.parent


def parser_of(verb: str) -> Parser:
    return import_module(f"banksman.cli.commands.{verb}").parser()


def test_cli_page_equals_the_help_texts() -> None:
    assert cli_page.PAGE.read_text(encoding="utf-8") == cli_page.page(), "regenerate it: make docs-cli"


def test_cli_page_is_independent_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    before = cli_page.page()
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("HOME", "/somewhere")
    monkeypatch.setenv("XDG_CONFIG_HOME", "/elsewhere")
    monkeypatch.setenv("BANKSMAN_FORMAT", "json")
    assert cli_page.page() == before


def test_cli_page_lists_every_exit_code_once() -> None:
    constants = {value for name, value in vars(cli).items() if name.isupper() and isinstance(value, int)}
    assert set(cli_page.CODES) == constants


@pytest.mark.parametrize("verb", cli.VERBS)
def test_help_ends_with_an_example_that_parses(verb: str) -> None:
    flags = parser_of(verb)
    text = flags.format_help()
    assert flags.prog == f"banksman {verb}"
    assert re.search(r"^exit codes: ", text, re.MULTILINE), "every verb says what its exit codes mean"
    match = re.search(r"\nexample:\n  (banksman .*)\n$", text)
    assert match, text[-200:]
    # The part after a pipe is another program.
    first = match[1].split(" | ")[0]
    name, typed, *words = shlex.split(first)
    assert (name, typed) == ("banksman", verb)
    if verb in ("exec", "guard"):
        assert flags.parse_args(words).command
        return
    before, _ = split_command(words)
    flags.read(before)


@pytest.mark.parametrize("verb", cli.VERBS)
@pytest.mark.parametrize("columns", [40, 80, 200])
def test_help_fits_the_terminal(verb: str, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    for line in parser_of(verb).format_help().splitlines():
        # A typed command is one line, however long, and a word cannot be broken.
        is_typed = line.startswith(("usage:", "  ")) or "/" in line
        assert len(line) <= columns or is_typed, line


def test_verb_list_matches_the_command_files() -> None:
    files = {path.stem for path in (ROOT / "src/banksman/cli/commands").glob("*.py")} - {"__init__"}
    assert files == set(cli.VERBS)


def test_first_help_examples_parse() -> None:
    examples = re.findall(r"^  (banksman .*)$", cli.help_text().split("examples:")[1], re.MULTILINE)
    assert examples[0].startswith("banksman run "), "whoever is new sees it first"
    for example in examples:
        _, verb, *words = shlex.split(example)
        parser_of(verb).parse_args(split_command(words)[0])


def test_cli_page_check_passes_on_the_committed_page(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools/cli_page.py"), "--check"],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
    )
    assert (done.returncode, done.stdout) == (0, "cli.md: up to date\n")
