"""`banksman completion`: a script by which a shell completes verbs, flags, agents and sessions."""

from __future__ import annotations

from banksman.cli import NOT_SAID, OK
from banksman.cli.arguments import Parser
from banksman.cli.output.terminal import CannotWrite, as_line, close_stdout, say, say_aside, speak_any_language
from banksman.cli.server_command import BROKEN_PIPE

SHELLS = ("bash", "zsh", "fish")
LISTS = ("sessions", "agents", "keys")

_NOTES = """\
To have it in every shell:
  bash   echo 'eval "$(banksman completion bash)"' >> ~/.bashrc
  zsh    echo 'source <(banksman completion zsh)' >> ~/.zshrc      (after compinit)
  fish   banksman completion fish > ~/.config/fish/completions/banksman.fish

Names of sessions are those of the server that runs, or of the store. --list is what the scripts call: it prints names,
one a line, and is silent where there are none.

exit codes: 0 it went well, 2 wrong usage, 5 stdout could not be written.
"""


def parser() -> Parser:
    flags = Parser(
        "completion",
        "bash|zsh|fish",
        "Print a script by which the shell completes verbs, flags, agents and sessions.",
        "banksman completion bash",
        notes=_NOTES,
    )
    flags.add_argument("shell", nargs="?", choices=SHELLS, metavar="bash|zsh|fish", help="for this shell")
    flags.add_argument("--list", choices=LISTS, help="print these names instead")
    return flags


def main(words: list[str]) -> int:
    flags = parser()
    arguments = flags.read(words)
    if (arguments.shell is None) == (arguments.list is None):
        flags.error("for which shell? bash, zsh or fish")
    speak_any_language()
    try:
        if arguments.list is not None:
            _list(arguments.list)
        else:
            say(script(arguments.shell), end="")
    except BrokenPipeError:
        close_stdout()
        return BROKEN_PIPE
    except CannotWrite as exc:
        close_stdout()
        say_aside(f"banksman: {as_line(exc)}")
        return NOT_SAID
    return OK


def script(shell: str) -> str:
    from banksman.cli.completion import shell_scripts  # noqa: PLC0415
    from banksman.cli.completion.command_table import verbs  # noqa: PLC0415

    return shell_scripts.script(shell, list(verbs()))


def _list(what: str) -> None:
    from banksman.cli.completion.name_lists import listed  # noqa: PLC0415

    for name in listed(what):
        say(as_line(name))
