"""Base class of the verbs' argument parsers, their help formatter, and the flag --format.

Each verb makes its parser in `commands/`. `ServerParser` in `server_command.py` adds the flags of
the verbs that use a server. This module imports nothing of the server: `exec` starts fast.
"""

from __future__ import annotations

import argparse
import os
import sys

from banksman.cli import USAGE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

# Longer lines are hard to read, however wide the terminal is.
WIDTH_MAX = 100
WIDTH_MIN = 40
# Without a terminal.
COLUMNS = 80


def _columns() -> int:
    """Return the width of the terminal, as `shutil` does.

    argparse needs it for every flag, and `shutil` imports compression libraries.
    """
    try:
        return int(os.environ["COLUMNS"]) or COLUMNS
    except (KeyError, ValueError):
        pass
    try:
        return os.get_terminal_size(1).columns or COLUMNS
    except OSError:
        return COLUMNS  # stdout is no terminal.


class Help(argparse.HelpFormatter):
    """Help formatter that fits the terminal, within limits.

    It fills paragraphs. Indented lines are commands and stay unchanged. The output is the same
    under every Python version, because the documentation is generated from it.
    """

    def __init__(self, prog: str) -> None:
        width = min(max(_columns(), WIDTH_MIN), WIDTH_MAX)
        super().__init__(prog, max_help_position=min(30, width // 3), width=width - 1)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n\n".join(self._paragraph(part, width) for part in text.strip("\n").split("\n\n"))

    def _paragraph(self, text: str, width: int) -> str:
        lines: list[str] = []
        words: list[str] = []
        for line in (*text.split("\n"), " "):
            if not line.startswith(" "):
                words.append(line)
                continue
            lines += self._split_lines(" ".join(words), width) if words else ()
            words.clear()
            lines.append(line)
        return "\n".join(lines[:-1])

    def _split_lines(self, text: str, width: int) -> list[str]:
        from textwrap import wrap  # noqa: PLC0415

        # A flag in a sentence and a path are never split, because users copy them.
        return wrap(" ".join(text.split()), width, break_on_hyphens=False, break_long_words=False)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return str(action.metavar or action.dest)
        names = ", ".join(action.option_strings)
        if action.nargs == 0:
            return names
        taken = (
            "|".join(map(str, action.choices))
            if action.choices
            else str(action.metavar or action.dest.upper())
        )
        return f"{names} {taken}"


class Parser(argparse.ArgumentParser):
    """Argument parser of one verb. Its help always ends with an example.

    `notes`: further help, including the exit codes. `is_lenient`: the verb works with a broken
    settings file, because it is about that file.
    """

    def __init__(
        self,
        verb: str,
        usage: str,
        description: str,
        example: str,
        *,
        notes: str = "",
        usage_code: int = USAGE,
        is_lenient: bool = False,
    ) -> None:
        super().__init__(
            prog=f"banksman {verb}",
            usage=f"banksman {verb} {usage}".rstrip(),
            description=description,
            epilog=f"{notes.rstrip()}\n\nexample:\n  {example}\n",
            formatter_class=Help,
            allow_abbrev=False,
        )
        self._usage_code = usage_code
        self._is_lenient = is_lenient

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self._refuse(message)

    def _refuse(self, why: object) -> NoReturn:
        from banksman.cli.output import as_line, say_aside  # noqa: PLC0415  Imported only for an error, like the rest.

        say_aside(f"{self.prog}: {as_line(why)}")
        sys.exit(self._usage_code)

    def read(self, words: list[str]) -> argparse.Namespace:
        """Parse flags and positional words in any order."""
        return self.parse_intermixed_args(words)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Parse the words, and take the format from the settings if --format was not given.

        All parse methods of argparse end up here.
        """
        found, rest = super().parse_known_args(args, namespace)
        if getattr(found, "format", "") is None:
            found.format = self._usual_format()
        return found, rest

    def _usual_format(self) -> str:
        from banksman import config  # noqa: PLC0415
        from banksman.errors import UsageError  # noqa: PLC0415

        try:
            return config.load().value("format")
        except UsageError as exc:
            # A lenient verb falls back to text. Every other verb refuses to run with broken
            # settings.
            if self._is_lenient:
                return "text"
            self._refuse(exc)


def add_format(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup,  # pyright: ignore[reportPrivateUsage]
    *,
    json: str,
    quiet: str,
) -> None:
    """Add --format and --json. `json` and `quiet`: the help for the output in these formats."""
    parser.add_argument(
        "--format",
        choices=("text", "json", "quiet"),
        help=f"output format: text (default), json ({json}) or quiet ({quiet})",
    )
    parser.add_argument(
        "--json", dest="format", action="store_const", const="json", help="short for --format json"
    )


def split_command(words: list[str]) -> tuple[list[str], list[str] | None]:
    """Split at `--`.

    Return the words before it and the command after it; None if there is no `--`.
    """
    if "--" not in words:
        return words, None
    at = words.index("--")
    return words[:at], words[at + 1 :]
