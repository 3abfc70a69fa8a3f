"""Common parts of `exec` and `guard`: flags, how their values are parsed, and exit codes.

It imports little, because both verbs start fast.
"""

from __future__ import annotations

from banksman.cli import OWN_FAILURE
from banksman.errors import BanksmanError, ProgramNotExecutable, ProgramNotFound, UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse

NOT_EXECUTABLE, NOT_FOUND, SIGNALLED = 126, 127, 128

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
# Longer times count as no limit. Some timers do not count further.
SECONDS_MAX = 100 * 365 * 86400.0


def add_stop_times(flags: argparse.ArgumentParser) -> None:
    """Add --grace and --linger."""
    flags.add_argument(
        "--grace",
        type=seconds,
        metavar="S",
        default=5.0,
        help="seconds between TERM and KILL (default: 5)",
    )
    flags.add_argument(
        "--linger",
        type=seconds,
        metavar="S",
        default=0.3,
        help="seconds for leftover processes to finish (default: 0.3)",
    )


def add_limits(flags: argparse.ArgumentParser) -> None:
    """Add --memory and --pids."""
    flags.add_argument(
        "--memory",
        type=size,
        metavar="SIZE",
        help="end the command if its tree uses more memory: 512M, 4G",
    )
    flags.add_argument(
        "--pids",
        type=whole_number,
        metavar="N",
        help="end the command if its tree has more than N processes",
    )


def add_surroundings(flags: argparse.ArgumentParser) -> None:
    """Add --cwd and --env."""
    flags.add_argument("--cwd", metavar="D", help="working folder of the command")
    flags.add_argument(
        "--env",
        metavar="K=V",
        action="append",
        default=[],
        help="set an environment variable of the command; may be repeated",
    )


def command_of(arguments: argparse.Namespace, verb: str) -> list[str]:
    """Return the words of the command. Raises `UsageError` if there are none."""
    words: list[str] = arguments.command
    command = words[1:] if words[:1] == ["--"] else words
    if not command:
        hint = f"run `banksman {verb} [options] -- COMMAND …`"
        raise UsageError("cannot run a command: none was given", hint=hint)
    return command


def error_code(error: BanksmanError) -> int:
    """Return the exit code of an error, as a shell has it. The command was not run."""
    match error:
        case ProgramNotFound():
            return NOT_FOUND
        case ProgramNotExecutable():
            return NOT_EXECUTABLE
        case _:
            return OWN_FAILURE


def seconds(text: str) -> float:
    """Parse a time: a number of seconds that is not negative."""
    value = float(text)
    if not value >= 0:
        raise ValueError(text)
    return min(value, SECONDS_MAX)


def size(text: str) -> int:
    """Parse a size in bytes: a whole number with an optional unit K, M, G or T."""
    number = text.upper().removesuffix("IB").removesuffix("B")
    unit = number[-1:] if number[-1:] in _UNITS else ""
    return whole_number(number.removesuffix(unit)) * _UNITS[unit]


def whole_number(text: str) -> int:
    """Parse a whole number above 0."""
    value = int(text)
    if value <= 0:
        raise ValueError(text)
    return value


def environment(pairs: list[str]) -> dict[str, str]:
    """Parse the values of --env."""
    for pair in pairs:
        if "=" not in pair or pair.startswith("="):
            raise UsageError(f"--env {pair!r} is not of the form K=V")
    return dict(pair.split("=", 1) for pair in pairs)
