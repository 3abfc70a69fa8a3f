"""Generate docs/cli.md from the `--help` text of each verb, so that both always agree.

    .venv/bin/python tools/cli_page.py            # writes the page
    .venv/bin/python tools/cli_page.py --check    # exits with 1 if the page is out of date

The terminal width and the user are fixed, so the page is the same on every machine.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

from banksman import cli

PAGE = Path(__file__).resolve().parent.parent / "docs" / "cli.md"
COLUMNS = 100
# HOME is the home folder that the page shows.
_SEEN = {"COLUMNS": str(COLUMNS), "HOME": "/home/you", "NO_COLOR": "1", "TERM": "dumb"}
_HIDDEN = ("XDG_CONFIG_HOME", "XDG_STATE_HOME", "LINES", "FORCE_COLOR", "PYTHON_COLORS")

CODES: dict[int, str] = {
    cli.OK: "it went well",
    cli.NOT_DONE: "it was done, and did not go well: the turn failed, `doctor` found something wrong",
    cli.USAGE: "wrong usage, or settings that are wrong: nothing was done",
    cli.NO_SERVER: "there is no server where one was named, or it does not let us in",
    cli.REFUSED: "the server refused, and said why",
    cli.NOT_SAID: "stdout could not be written; what was asked for may be done",
    cli.OWN_FAILURE: "`exec` alone: Banksman itself failed, so that it cannot be taken for the command's own code",
    cli.INTERRUPTED: "Ctrl-C",
}
_MORE = """\
`exec` ends with the code of its command, or with 124 (timeout), 126 (cannot be run), 127 (not found), 128+n (signal n).
A verb whose reader goes away (`| head -1`) ends with 141, as if by the signal.
"""

_HEAD = """\
# The command line

*Made from `banksman VERB --help` by `make docs-cli`, and not to be edited.*

`banksman --help` lists the verbs; each has its own `--help`, which ends with an example. Verbs that ask a server find
the one that runs, and work on a host of their own where there is none.

What people read goes to stdout, without colour and without any control sequence when it is piped, or with `NO_COLOR` or
`TERM=dumb`. `--json` is the same for programs. What is said aside (progress, warnings, errors) goes to stderr.
"""


@contextmanager
def as_seen() -> Generator[None]:
    """Set the environment in which the page is generated."""
    before = dict(os.environ)
    os.environ.update(_SEEN)
    for name in [name for name in os.environ if name in _HIDDEN or name.startswith("BANKSMAN_")]:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def page() -> str:
    with as_seen():
        return "\n".join([_HEAD, *_codes(), *_verbs()])


def _codes() -> list[str]:
    rows = [f"| {code} | {what} |" for code, what in CODES.items()]
    return ["## Exit codes", "", "| | |", "|---|---|", *rows, "", _MORE]


def _verbs() -> list[str]:
    lines = ["## banksman", "", "```text", cli.help_text().rstrip(), "```", ""]
    for verb in cli.VERBS:
        text: str = import_module(f"banksman.cli.commands.{verb}").parser().format_help()
        lines += [f"## banksman {verb}", "", "```text", text.rstrip(), "```", ""]
    return lines


def main(words: list[str]) -> int:
    made = page()
    if words == ["--check"]:
        is_same = PAGE.exists() and PAGE.read_text(encoding="utf-8") == made
        print(
            f"{PAGE.name}: {'as it should be' if is_same else 'not what --help says; make docs-cli writes it'}"
        )
        return 0 if is_same else 1
    PAGE.write_text(made, encoding="utf-8")
    print(f"wrote {PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
