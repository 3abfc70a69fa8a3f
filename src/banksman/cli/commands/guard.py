"""`banksman guard`: run a command with the streams of the caller, and end its whole process tree.

This module has the flags and the exit codes. `banksman.guard` runs the command, in this process and
without an event loop. `banksman-guard.pyz` starts here too: see `tools/guard_file.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import sys

from banksman.cli import OWN_FAILURE
from banksman.cli.arguments import Parser
from banksman.cli.command_flags import (
    SIGNALLED,
    add_limits,
    add_stop_times,
    add_surroundings,
    command_of,
    environment,
    error_code,
    seconds,
)
from banksman.errors import BanksmanError, UsageError
from banksman.process.caller import open_caller

TYPE_CHECKING = False
if TYPE_CHECKING:
    from banksman.guard.outcome import GuardOutcome
    from banksman.guard.start import GuardSettings

_NOTES = """\
The command gets stdin, stdout, stderr and every other open file descriptor of the caller. Its whole
process tree is ended when the command exits, when the caller (the parent process of the guard)
dies, when stdin hangs up, and on TERM, INT, HUP and QUIT. The signal is passed on; TERM follows
after half of --grace, and KILL --grace after TERM. Another signal, half a second later or more,
takes the next of these steps at once; HUP does not. Keys of a terminal (Ctrl-C, Ctrl-Z) go to the
command as without a guard.

exit codes: the code of the command; 124 after --timeout, 125 if Banksman itself failed, 126 if the
command cannot be run, 127 if it is not found, 128+n if the command died of signal n, 143 (as after
TERM) if --memory or --pids was exceeded. If a signal to the guard ended the command, the guard dies
of the same signal.
"""


def main(words: list[str]) -> int:
    if sys.platform != "linux":
        parser().parse_args(words)  # For --help.
        return _fail(UsageError("cannot guard a command: guard needs Linux", hint="use exec"))
    try:
        # As early as possible: the caller may die at any time.
        caller = open_caller()
    except BanksmanError as exc:
        return _fail(exc)
    # A collection finds nothing to free here, and the keeper is a fork of this process.
    gc.disable()
    arguments = parser().parse_args(words)
    from banksman.guard.outcome import ReportFile  # noqa: PLC0415
    from banksman.guard.run import run, say  # noqa: PLC0415
    from banksman.guard.signals import die_of  # noqa: PLC0415

    try:
        settings = _settings(arguments)
        report = None if arguments.report is None else ReportFile(arguments.report)
        outcome = run(settings, caller, [] if report is None else report.fds)
    except BanksmanError as exc:
        return _fail(exc)
    except OSError as exc:
        return _fail(UsageError(f"cannot guard the command: {exc}", hint="check `ulimit -a`"))
    for line in _lines(outcome):
        say(line)
    code = outcome.exit_code
    if report is not None:
        try:
            report.write(outcome)
        except OSError as exc:
            say(f"cannot write the report to {arguments.report}: {exc.strerror}")
            code = code or OWN_FAILURE
    if outcome.fatal_signal is not None:
        die_of(outcome.fatal_signal)
        code = SIGNALLED + outcome.fatal_signal
    # The interpreter has nothing to clean up, and its teardown takes milliseconds.
    os._exit(code)


def parser() -> Parser:
    """Build the argument parser of `guard`."""
    flags = Parser(
        "guard",
        "[options] [--] COMMAND …",
        "Run a command in place, and end its whole process tree when it or its caller is over.",
        "banksman guard --timeout 3600 -- claude -p 'Why is CI red?'",
        notes=_NOTES,
        usage_code=OWN_FAILURE,
    )
    add = flags.add_argument
    add("--timeout", type=seconds, metavar="S", help="end the command after S seconds")
    add_stop_times(flags)
    add(
        "--grace-after-eof",
        type=seconds,
        metavar="S",
        default=10.0,
        help="seconds for the command to exit after stdin hangs up (default: 10)",
    )
    add("--no-hangup", action="store_true", help="do not end the command when stdin hangs up")
    add_limits(flags)
    add_surroundings(flags)
    add("--report", metavar="FILE", help="write how it ended to FILE, as JSON")
    add("command", nargs=argparse.REMAINDER, metavar="COMMAND", help=argparse.SUPPRESS)
    return flags


def _settings(arguments: argparse.Namespace) -> GuardSettings:
    from banksman.guard.start import GuardSettings  # noqa: PLC0415
    from banksman.process.program import (  # noqa: PLC0415
        argv_words,
        resolve_program,
        working_folder,
    )

    env = _callers_environment()
    env |= {os.fsencode(k): os.fsencode(v) for k, v in environment(arguments.env).items()}
    argv = argv_words(command_of(arguments, "guard"))
    folder = working_folder(arguments.cwd)
    return GuardSettings(
        path=resolve_program(argv[0], folder, env),
        argv=argv,
        env=env,
        cwd=folder,
        grace=arguments.grace,
        linger=arguments.linger,
        timeout=arguments.timeout,
        grace_after_eof=None if arguments.no_hangup else arguments.grace_after_eof,
        memory_bytes_max=arguments.memory,
        processes_max=arguments.pids,
    )


def _callers_environment() -> dict[bytes, bytes]:
    """Return the environment of the caller, without what only concerns this process."""
    env = dict(os.environb)
    # systemd names the process that has to send the heartbeat. Without the variable, any process of
    # the service may send it, and the command has another pid than this process.
    if env.get(b"WATCHDOG_PID") == str(os.getpid()).encode():
        del env[b"WATCHDOG_PID"]
    # In the C locale, the interpreter sets this variable for itself (PEP 538).
    if b"LC_CTYPE" in env:
        with contextlib.suppress(OSError), open("/proc/self/environ", "rb") as file:
            given = [pair.partition(b"=") for pair in file.read().split(b"\0")]
            del env[b"LC_CTYPE"]
            env |= {name: value for name, _, value in given if name == b"LC_CTYPE"}
    return env


# Why the guard ended the command, in words.
_REASONS = {
    "timeout": "ended the command at its timeout",
    "stdin_hangup": "ended the command: stdin hung up",
    "parent_died": "ended the command: the process that started the guard is gone",
    "memory": "ended the command: its process tree exceeds --memory",
    "pids": "ended the command: its process tree exceeds --pids",
    "keeper_lost": "ended the command: its keeper process was killed",
}


def _lines(outcome: GuardOutcome) -> list[str]:
    """Return what matters for people: why the command was ended, and what could not be ended."""
    lines = [_REASONS[outcome.ended]] if outcome.ended in _REASONS else []
    if outcome.code is None and outcome.signal is None:
        lines.append("exit status unknown: the keeper of the command was killed")
    lines += [
        f"cannot end process {pid} {command!r}: {why}" for pid, command, why in outcome.survivors
    ]
    return lines


def _fail(error: BanksmanError) -> int:
    from banksman.guard.run import say  # noqa: PLC0415

    say(str(error))
    return error_code(error)
