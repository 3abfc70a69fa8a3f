"""`banksman completion`: print a shell's completion script, or the names that it asks for.

The names (sessions, agents, settings keys) are looked up here, within a time limit. The scripts
come from `completion_scripts.py`, and their data from `completion_table.py`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from types import FrameType

from banksman.cli import NOT_SAID, OK
from banksman.cli.arguments import Parser
from banksman.cli.output import (
    CannotWrite,
    as_line,
    close_stdout,
    say,
    say_aside,
    speak_any_language,
)
from banksman.cli.server_command import BROKEN_PIPE
from banksman.errors import BanksmanError

SHELLS = ("bash", "zsh", "fish")
LISTS = ("sessions", "agents", "keys")

_NOTES = """\
To enable it in every shell:
  bash   echo 'eval "$(banksman completion bash)"' >> ~/.bashrc
  zsh    echo 'source <(banksman completion zsh)' >> ~/.zshrc      (after compinit)
  fish   banksman completion fish > ~/.config/fish/completions/banksman.fish

Session names come from the running server, or from the store. The scripts call --list, which prints
one name per line, or nothing.

exit codes: 0 success, 2 wrong usage, 5 cannot write to stdout.
"""

# Ten times the duration on an idle machine. The user can stop it earlier with Ctrl-C.
SECONDS_MAX = 5.0
NAMES_MAX = 200


def parser() -> Parser:
    flags = Parser(
        "completion",
        "bash|zsh|fish",
        "Print a script that lets the shell complete verbs, flags, agents and sessions.",
        "banksman completion bash",
        notes=_NOTES,
    )
    flags.add_argument(
        "shell", nargs="?", choices=SHELLS, metavar="bash|zsh|fish", help="the shell"
    )
    flags.add_argument("--list", choices=LISTS, help="print these names instead of a script")
    return flags


def main(words: list[str]) -> int:
    flags = parser()
    arguments = flags.read(words)
    if (arguments.shell is None) == (arguments.list is None):
        flags.error("pass a shell: bash, zsh or fish")
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
    """Return the completion script for a shell."""
    from banksman.cli import completion_scripts  # noqa: PLC0415
    from banksman.cli.completion_table import verbs  # noqa: PLC0415

    return completion_scripts.script(shell, list(verbs()))


def _list(what: str) -> None:

    for name in listed(what):
        say(as_line(name))


# Lists of names for completion: the current sessions, agents and settings keys.
#
# The user has pressed a key and waits, so the list must be fast or empty. A running server answers.
# Without a server the store is read and not changed. The process gives up after `SECONDS_MAX` and
# reports no error.


def listed(what: str) -> list[str]:
    """Return the names of one list. Never raises.

    The process exits after `SECONDS_MAX`, because a blocked read cannot be interrupted.
    """
    signal.signal(signal.SIGALRM, _give_up)
    signal.setitimer(signal.ITIMER_REAL, SECONDS_MAX)
    try:
        # A shell expects one name per line.
        return [name for name in _LISTS[what]() if name.isprintable()]
    except (BanksmanError, OSError, ValueError, ImportError, LookupError):
        return []
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _give_up(number: int, frame: FrameType | None) -> None:
    os._exit(0)


def _sessions() -> Iterable[str]:
    from banksman.cli.client.client import Client  # noqa: PLC0415
    from banksman.cli.client.discovery import find, is_there  # noqa: PLC0415

    place = find()
    if place is not None and is_there(place):
        page = Client(lambda: place).get("/v1/sessions", {"limit": NAMES_MAX})
        return [each["name"] or each["id"] for each in page["sessions"]]
    from banksman.cli.doctor.places import stores  # noqa: PLC0415
    from banksman.store.sqlite import store_health  # noqa: PLC0415

    return [name for path in stores()[:1] for name in store_health.names(path, NAMES_MAX)]


def _agents() -> Iterable[str]:
    from banksman.sessions import known_agents  # noqa: PLC0415

    return sorted({*known_agents.user_files(), *known_agents.packaged()})


def _keys() -> Iterable[str]:
    from banksman.config import KEYS  # noqa: PLC0415

    return KEYS


_LISTS = {"sessions": _sessions, "agents": _agents, "keys": _keys}
