"""`banksman exec`: run a command and end its whole process tree when it is over.

This module has the flags, the exit codes and the output of `--json`. `cli/foreground.py` runs the
command, in this process and without a server. Slow imports come late, so that short commands start
fast.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import signal
import sys
from collections.abc import Generator
from typing import TYPE_CHECKING

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
from banksman.errors import BanksmanError, MachineError, UsageError
from banksman.process.caller import open_caller
from banksman.process.zygote_client import warm_up

if TYPE_CHECKING:
    from banksman.commands.options import Options
    from banksman.commands.output import Output
    from banksman.commands.result import Finished
    from banksman.process.launch import Launch

TIMED_OUT = 124

_NOTES = """\
exit codes: the code of the command; 124 after either timeout, 125 if Banksman itself failed, 126 if
the command cannot be run, 127 if it is not found, 128+n after signal n, 143 (as after TERM) if
--memory or --pids was exceeded. Ctrl-C and TERM end the whole tree: TERM, then KILL after --grace;
a second Ctrl-C, half a second later or more, kills at once. The death of the parent process ends
the tree too, with code 129 as after HUP, unless HUP is ignored (nohup).

With --pty, and by default if stdin, stdout and stderr are terminals, the command runs on a new
terminal and gets all keys. Ctrl-C then goes to the foreground process of that terminal; three
Ctrl-C within a second end the tree. The command's stderr goes to the same terminal. If MAKEFLAGS
names open file descriptors of make's jobserver, the command inherits them.
"""


def main(words: list[str]) -> int:
    # Garbage collection during startup takes a tenth of the start time and finds nothing to free.
    gc.disable()
    arguments = parser().parse_args(words)
    try:
        # Check the inherited fds first: a number that is closed now may soon be an fd of this
        # process.
        arguments.fds = _fds(arguments.pass_fds)
        # As early as possible: the caller may die at any time.
        caller = _open_caller()
        # Start the helper process before the slower imports, so that both run in parallel.
        warm_up()
        with _without_ssl():
            launch, options = _order(arguments)
            from banksman.cli.foreground import run_foreground  # noqa: PLC0415
            from banksman.cli.watches import Watches  # noqa: PLC0415

        watches = Watches(
            caller=caller,
            grace_after_eof=arguments.grace_after_eof,
            memory_bytes_max=arguments.memory,
            processes_max=arguments.pids,
        )
        # The objects that exist now live until the end. Freezing them spares every later
        # collection, including the one at exit, from visiting them.
        gc.freeze()
        gc.enable()
        finished, caught = run_foreground(launch, options, watches, is_quiet=arguments.json)
        if arguments.json:
            # ASCII, so that the JSON is the same in every locale.
            print(_json(as_json(finished)), flush=True)
            # The JSON names the output files, and its reader opens them after this process is gone.
            # They are kept only now: if the print fails, no reader knows their names.
            finished.stdout.keep()
            finished.stderr.keep()
        else:
            _say_what_matters(finished, caught)
        if watches.exceeded is not None:
            reason = f"its process tree exceeds --{watches.exceeded}"
            print(f"banksman: ended the command: {reason}", file=sys.stderr)
    except BanksmanError as exc:
        return _report_error(exc, is_json=arguments.json)
    except BrokenPipeError:
        _close_stdout()
        return SIGNALLED + signal.SIGPIPE
    except (OSError, RuntimeError, MemoryError) as exc:
        # The process cannot create a loop or a thread, or cannot write its output. Print one line
        # and exit with the code for Banksman's failures. A traceback exits with 1, which looks like
        # the command's code.
        _close_stdout()
        return _report_error(
            MachineError(f"cannot continue: {exc}", hint="check `ulimit -a` and `df`"),
            is_json=False,
        )
    # A command that exited without being stopped keeps its exit code, however late the signal came.
    if caught is not None and finished.ended == "stopped":
        return SIGNALLED + caught
    return exit_code(finished)


@contextlib.contextmanager
def _without_ssl() -> Generator[None]:
    """Hide the `ssl` module while asyncio is imported.

    asyncio works without TLS, and loading `ssl` is a third of its import time. Nothing here makes a
    connection. After this block, `import ssl` works again.
    """
    is_loaded = "ssl" in sys.modules
    if not is_loaded:
        sys.modules["ssl"] = None  # pyright: ignore[reportArgumentType]  None marks a missing module.
    try:
        yield
    finally:
        if not is_loaded:
            del sys.modules["ssl"]


def parser() -> Parser:
    """Build the argument parser of `exec`."""
    flags = Parser(
        "exec",
        "[options] [--] COMMAND …",
        "Run a command, pass its output through, and end its whole process tree when it is over.",
        "banksman exec --timeout 600 --idle-timeout 60 -- make test",
        notes=_NOTES,
        # Banksman's failures have a separate code, so that they are not mistaken for the command's.
        usage_code=OWN_FAILURE,
    )
    add = flags.add_argument
    add("--timeout", type=float, metavar="S", help="end the command after S seconds")
    add(
        "--idle-timeout",
        type=float,
        metavar="S",
        help="end the command after S seconds without output",
    )
    add_stop_times(flags)
    add(
        "--drain",
        type=float,
        metavar="S",
        default=2.0,
        help="seconds to wait for the end of the output (default: 2)",
    )
    add(
        "--grace-after-eof",
        type=seconds,
        metavar="S",
        help="end the command S seconds after stdin hangs up (default: never)",
    )
    add_limits(flags)
    add_surroundings(flags)
    add(
        "--pass-fds",
        metavar="N,N",
        help="open file descriptors that the command inherits under the same numbers",
    )
    add(
        "--pty",
        action="store_true",
        default=None,
        help=(
            "run the command on a new terminal (default: if stdin, stdout and stderr are terminals)"
        ),
    )
    add(
        "--no-pty",
        dest="pty",
        action="store_false",
        help="use pipes for the output, even at a terminal",
    )
    add(
        "--output-bytes-max",
        type=int,
        metavar="N",
        help="with --json: bytes to keep of each stream, from its head and tail",
    )
    add(
        "--json",
        action="store_true",
        help="print one JSON object instead of passing the output through",
    )
    add("command", nargs=argparse.REMAINDER, metavar="COMMAND", help=argparse.SUPPRESS)
    return flags


def _order(arguments: argparse.Namespace) -> tuple[Launch, Options]:
    from banksman.commands.options import Options  # noqa: PLC0415
    from banksman.commands.output import OUTPUT_BYTES_MAX, SPILL_BYTES_MAX  # noqa: PLC0415
    from banksman.process.launch import prepare  # noqa: PLC0415

    command = command_of(arguments, "exec")
    is_captured: bool = arguments.json
    kept: int = (
        OUTPUT_BYTES_MAX if arguments.output_bytes_max is None else arguments.output_bytes_max
    )
    size = _terminal_size(arguments)
    options = Options(
        timeout=arguments.timeout,
        idle_timeout=arguments.idle_timeout,
        grace=arguments.grace,
        linger=arguments.linger,
        drain=arguments.drain,
        stdin="inherit" if size is None else None,
        pty=size or False,
        # With --json there is no user to type input, so the command's input ends immediately.
        ends_input=size is not None and is_captured,
        output_bytes_max=kept if is_captured else 0,
        spill_bytes_max=SPILL_BYTES_MAX if is_captured else 0,
    )
    launch = prepare(
        command,
        cwd=arguments.cwd,
        env=environment(arguments.env),
        pass_fds=arguments.fds,
        # An inherited TERM already describes the user's terminal. Only without one a default is
        # needed.
        has_terminal=size is not None and "TERM" not in os.environ,
    )
    return launch, options


def _open_caller() -> int:
    """Return a pidfd of the parent process; -1 if it is not to be watched."""
    # With SIGHUP ignored (nohup), the command is meant to outlive its caller.
    is_detached = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return -1 if is_detached or sys.platform != "linux" else open_caller()


def _terminal_size(arguments: argparse.Namespace) -> tuple[int, int] | None:
    """Return the rows and columns of the command's terminal; None if it gets no terminal."""
    wanted: bool | None = arguments.pty
    if wanted is None:
        # If stderr is redirected, the user wants it separate, but a terminal has only one stream.
        # In the background the terminal belongs to another job: changing its mode would stop this
        # process (SIGTTOU).
        wanted = not arguments.json and all(map(os.isatty, (0, 1, 2))) and _is_foreground()
    if not wanted:
        return None
    try:
        found = os.get_terminal_size(1)
    except OSError:
        return 24, 80
    return found.lines or 24, found.columns or 80


def _is_foreground() -> bool:
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        # ENOTTY: this terminal is not the controlling terminal of the session (`setsid banksman
        # exec …`). Its keys send no signals to this process, so the command runs as without a
        # terminal.
        return False


def _fds(given: str | None) -> tuple[int, ...]:
    """Return the fds to pass on: those of --pass-fds, and of the jobserver of a parent make."""
    try:
        wanted = [int(number) for number in given.split(",")] if given else []
    except ValueError as exc:
        raise UsageError(f"--pass-fds {given!r} is not of the form 3,4") from exc
    for fd in wanted:
        if not _is_inherited(fd):
            raise UsageError(f"cannot pass on fd {fd}: it is not open", hint="redirect it: 3<FILE")
    flags = os.environ.get("MAKEFLAGS", "")
    if "--jobserver-" in flags:
        import re  # noqa: PLC0415

        named = re.findall(r"--jobserver-(?:auth|fds)=(\d+),(\d+)", flags)
        # For a rule without a +, make has closed these fds. make reports that itself where it
        # matters.
        wanted += [
            fd
            for number in (named[-1] if named else ())
            if _is_inherited(fd := int(number)) and fd > 2
        ]
    return tuple(dict.fromkeys(wanted))


def _is_inherited(fd: int) -> bool:
    """Return whether the fd was open at the start: fds that Python opens are not inheritable."""
    try:
        return os.get_inheritable(fd)
    except (OSError, OverflowError):
        return False


def _close_stdout() -> None:
    """Redirect stdout to /dev/null: the interpreter must not retry a failed write at exit."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def exit_code(finished: Finished) -> int:
    """Return the exit code of `banksman exec` for a finished command."""
    if finished.ended in ("timeout", "idle_timeout"):
        return TIMED_OUT
    if finished.signal is not None:
        return SIGNALLED + finished.signal
    # The end of the command was not observed. That is neither success nor an exit code of the
    # command.
    return OWN_FAILURE if finished.code is None else finished.code


def as_json(finished: Finished) -> dict[str, object]:
    """Return the result as the object that --json prints."""
    return {
        "ended": finished.ended.value,
        "code": finished.code,
        "signal": finished.signal,
        "seconds": round(finished.seconds, 6),
        "stdout": _output_as_json(finished.stdout),
        "stderr": _output_as_json(finished.stderr),
        "drained": finished.drained,
        "swept": [{"pid": process.pid, "command": process.command} for process in finished.swept],
        "survivors": [
            {"pid": left.pid, "command": left.command, "why": left.why}
            for left in finished.survivors
        ],
        "ladder": [{"rung": step.rung, "at": round(step.at, 6)} for step in finished.ladder],
    }


def _json(value: object) -> str:
    import json  # noqa: PLC0415  Imported only for --json: every import adds to the start time.

    return json.dumps(value)


def _output_as_json(output: Output) -> dict[str, object]:
    return {
        "text": output.text,
        "bytes": output.total,
        "dropped": output.dropped,
        "file": output.file,
    }


# The rungs of the stop ladder in words, each with a place for its time.
_RUNGS = {
    "eof": "end of input at {:.1f} s",
    "term": "TERM to the command at {:.1f} s",
    "rest": "TERM to the rest of its tree at {:.1f} s",
    "kill": "KILL to its whole tree at {:.1f} s",
    "keeper": "KILL to its keeper at {:.1f} s",
}


def _say_what_matters(finished: Finished, caught: int | None) -> None:
    """Report on stderr why the command was ended, and which processes could not be ended."""
    if finished.ended != "exited" and caught != signal.SIGPIPE:
        steps = ", ".join(_RUNGS[step.rung].format(step.at) for step in finished.ladder)
        print(
            f"banksman: {finished.ended.value} after {finished.seconds:.1f} s ({steps})",
            file=sys.stderr,
        )
    elif finished.code is None and finished.signal is None:
        print(
            "banksman: exit status unknown: the keeper of the command was killed", file=sys.stderr
        )
    if not finished.drained:
        reason = "a process outside the command's tree still holds its output"
        print(f"banksman: output may be missing: {reason}", file=sys.stderr)
    for left in finished.survivors:
        print(
            f"banksman: cannot end process {left.pid} {left.command!r}: {left.why}", file=sys.stderr
        )


def _report_error(error: BanksmanError, *, is_json: bool) -> int:
    print(f"banksman: {error}", file=sys.stderr)
    if is_json:
        print(_json({"error": type(error).__name__, "message": error.args[0], "hint": error.hint}))
    return error_code(error)
