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
    cli.OK: "Success.",
    cli.NOT_DONE: "The turn or the command failed, or `doctor` found a problem.",
    cli.USAGE: "Wrong usage or wrong settings. The verb changed nothing.",
    cli.NO_SERVER: "No server answers, or the server denied access.",
    cli.REFUSED: "The server refused the request. stderr has the reason.",
    cli.NOT_SAID: "Cannot write to stdout. The request may have been carried out.",
    cli.OWN_FAILURE: "Only `exec` and `guard`: Banksman itself failed. Few commands exit so.",
    cli.INTERRUPTED: "Ctrl-C.",
}
_MORE = """\
`exec` and `guard` exit with the code of the command, or with 124 (timeout), 126 (the command cannot
be run), 127 (not found), 128+n (signal n). If the reader of a pipe exits early (`| head -1`), the
verb exits with 141, as after SIGPIPE.
"""

_HEAD = """\
# Command line

This page has the help text of every verb. `make docs-cli` generates it from `banksman VERB --help`;
do not edit it.

`banksman --help` lists the verbs. The help of each verb ends with an example. A verb that needs a
server uses the running one. Without a running server, it starts an embedded host.

- Results go to stdout. Progress, warnings and errors go to stderr.
- Colours and control sequences appear only on a terminal. `NO_COLOR` turns colours off, `TERM=dumb`
  both.
- `--json` prints the results for programs.
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
    rows = [f"| {code} | {meaning} |" for code, meaning in CODES.items()]
    return ["## Exit codes", "", "| code | meaning |", "|---|---|", *rows, "", _MORE]


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
        print(f"{PAGE.name}: {'up to date' if is_same else 'out of date; run `make docs-cli`'}")
        return 0 if is_same else 1
    PAGE.write_text(made, encoding="utf-8")
    print(f"wrote {PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
