"""Checked options of a command: timeouts, stdin, terminal, and targets and limits of its output.

`StartOptions` are the keywords of `start` and `execute`. `options_of` makes `Options` of them, and
`launch_of` the launch. `process/launch.py` checks the program itself: argv, environment, folder and
user.

All options are checked at the call. A bad number is therefore the caller's error, and never appears
as a strange end of the command. Nothing is opened here: `process/stdio.py` opens the target of a
redirect when the command starts.

The names of targets come from `subprocess`, with one difference. There `None` means inherited. Here
`None` has always meant captured, so "inherit" is a word, as for `stdin`.
"""

from __future__ import annotations

import inspect
import os
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypedDict, TypeVar, cast

from banksman.commands.output import OUTPUT_BYTES_MAX, SPILL_BYTES_MAX
from banksman.core.stop_ladder import Timings
from banksman.errors import UsageError
from banksman.process.launch import PIPES, Argv, Launch, Source, Target, prepare

HINT = (
    'pass None, subprocess.DEVNULL, "inherit", '
    "a path, an open file or its fd; for stderr also subprocess.STDOUT"
)
SECONDS_MAX = 1e8
# The kernel stores each dimension in 16 bits.
SIZE_MAX = 65535


class HasFileno(Protocol):
    """An object with a file descriptor."""

    def fileno(self) -> int: ...


# An int is a file descriptor, or `subprocess.PIPE`, `DEVNULL` or `STDOUT`. A text other than
# "inherit" is the path of a file.
Redirect = int | Literal["inherit"] | str | os.PathLike[str] | HasFileno | None


def parse(name: str, wanted: Any) -> Target:
    """Return the target of one stream. Raises `UsageError` if it is invalid, or a closed fd."""
    if wanted is None or (wanted == subprocess.PIPE and _is_int(wanted)):
        return "pipe"
    if wanted == "inherit":
        return _open_fd(name, wanted, 1 if name == "stdout" else 2)
    if _is_int(wanted):
        if wanted == subprocess.DEVNULL:
            return "null"
        if wanted == subprocess.STDOUT and name == "stderr":
            return "stdout"
        return _open_fd(name, wanted, wanted)
    path: Any = getattr(wanted, "__fspath__", lambda: wanted)()
    if isinstance(path, str | bytes) and path != "pipe":
        return _path(name, path)
    fileno: Any = getattr(wanted, "fileno", None)
    if callable(fileno):
        try:
            fd: Any = fileno()
        except (OSError, ValueError) as exc:
            hint = "pass an open file that has a file descriptor"
            raise UsageError(f"{name} cannot be {wanted!r:.60}: {exc}", hint=hint) from exc
        return _open_fd(name, wanted, fd)
    raise UsageError(f"{name} cannot be {wanted!r:.60}", hint=HINT)


def _is_int(wanted: Any) -> bool:
    return isinstance(wanted, int) and not isinstance(wanted, bool)


def _path(name: str, path: Any) -> bytes:
    encoded = os.fsencode(path)
    if not encoded or b"\0" in encoded:
        raise UsageError(f"{name} cannot be the path {path!r:.60}", hint=HINT)
    # The calling program may change its working directory between the call and the start.
    return os.path.abspath(encoded)


def _open_fd(name: str, wanted: Any, fd: Any) -> int:
    try:
        os.fstat(fd)
    except (OSError, OverflowError, TypeError) as exc:
        raise UsageError(
            f"{name} cannot be {wanted!r:.60}: fd {fd} is not open", hint=HINT
        ) from exc
    return fd


OnOutput = Callable[[str, bytes], None]
Stdin = bytes | Literal["pipe", "inherit"] | None
# True for a terminal of the usual size, or a tuple of rows and columns.
Pty = bool | tuple[int, int]
ROWS, COLUMNS = 24, 80


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Checked options of one command.

    - `timeout`, `idle_timeout`: seconds; None means no limit.
    - `stdin`: None is /dev/null. Bytes are written, then stdin is closed.
    - `pty`: a terminal in place of stdin, stdout and stderr. `terminal` has its size, or None.
    - `stdout`, `stderr`: None means captured; see the module. `outputs` has the parsed targets.
    - `keep_output`: False keeps nothing of the captured output.
    - `eof`: the first rung of the ladder closes stdin and waits up to this many seconds.
    - `caller`: the person or program that wants the command; only shown.
    """

    timeout: float | None = None
    idle_timeout: float | None = None
    grace: float = 5.0
    linger: float = 0.3
    drain: float = 2.0
    stdin: Stdin = None
    pty: Pty = False
    stdout: Redirect = None
    stderr: Redirect = None
    keep_output: bool = True
    output_bytes_max: int = OUTPUT_BYTES_MAX
    output_total_max: int | None = None
    spill_bytes_max: int = SPILL_BYTES_MAX
    on_output: OnOutput | None = None
    eof: float | None = None
    caller: str | None = None
    # For agents: the session keeps their stdout elsewhere.
    keeps_stdout: bool = True
    # For the drop-ins: stdin is a copy of this fd, in place of `stdin`.
    stdin_fd: int | None = None
    # No caller will write to the terminal: the end of input is sent immediately.
    ends_input: bool = False
    outputs: tuple[Target, Target] = field(init=False, default=PIPES)

    def __post_init__(self) -> None:
        for name in ("timeout", "idle_timeout"):
            value = getattr(self, name)
            if value is not None:
                check_seconds(name, value)
                object.__setattr__(self, name, clamp_timeout(value))
        for name in ("grace", "linger", "drain", *(() if self.eof is None else ("eof",))):
            value = getattr(self, name)
            check_seconds(name, value)
            if value > SECONDS_MAX:
                hint = f"pass at most {SECONDS_MAX:.0f} seconds; every wait of a stop has an end"
                raise UsageError(f"{name} cannot be {value!r}", hint=hint)
        _check_count("output_bytes_max", self.output_bytes_max)
        if self.output_total_max is not None:
            _check_count("output_total_max", self.output_total_max)
        stdin: Any = self.stdin
        if isinstance(stdin, bytearray):
            object.__setattr__(self, "stdin", bytes(stdin))
        elif not (stdin is None or isinstance(stdin, bytes) or stdin in ("pipe", "inherit")):
            hint = 'pass None, bytes, "pipe" or "inherit"; encode text to bytes'
            raise UsageError(f"stdin cannot be {stdin!r:.60}", hint=hint)
        if self.terminal is not None and stdin is not None:
            hint = "leave out one of them; write to the command to send input to its terminal"
            raise UsageError("cannot use both pty and stdin: the terminal is the stdin", hint=hint)
        if self.eof is not None and stdin in (None, "inherit"):
            hint = 'pass stdin="pipe" or bytes; Banksman closes no terminal and no inherited stdin'
            message = "cannot use eof: the command has no stdin that can be closed"
            raise UsageError(message, hint=hint)
        self._check_outputs()
        caller: Any = self.caller
        if caller is not None and not isinstance(caller, str):
            raise UsageError(f"caller cannot be {caller!r:.60}", hint="pass a name, or None")
        on_output: Any = self.on_output
        if on_output is not None and not callable(on_output):
            hint = "pass a function of (stream, data)"
            raise UsageError(f"on_output cannot be {on_output!r}", hint=hint)
        if inspect.iscoroutinefunction(on_output):
            hint = "pass a plain function that puts the data into a queue"
            raise UsageError("on_output cannot be async", hint=hint)

    def _check_outputs(self) -> None:
        outputs = parse("stdout", self.stdout), parse("stderr", self.stderr)
        object.__setattr__(self, "outputs", outputs)
        if self.terminal is not None and outputs != PIPES:
            message = "cannot use pty with stdout or stderr: all output goes to the terminal"
            raise UsageError(message, hint="leave out stdout and stderr")
        if self.idle_timeout is not None and "pipe" not in outputs:
            hint = "capture stdout or stderr, or leave out idle_timeout"
            message = "cannot use idle_timeout: no output of the command is captured"
            raise UsageError(message, hint=hint)

    @property
    def terminal(self) -> tuple[int, int] | None:
        """Size of the terminal in rows and columns, or None without a terminal."""
        pty: Any = self.pty
        if pty is False or pty is None:
            return None
        if pty is True:
            return ROWS, COLUMNS
        if not isinstance(pty, tuple | list) or len(cast(Sequence[Any], pty)) != 2:
            raise UsageError(f"pty cannot be {pty!r:.60}", hint="pass True, or (rows, columns)")
        return check_size(*cast(Sequence[Any], pty))

    @property
    def source(self) -> Source:
        """Source of stdin, as the process takes it."""
        if self.stdin_fd is not None:
            return self.stdin_fd
        return "pipe" if isinstance(self.stdin, bytes) else self.stdin or "null"

    @property
    def timings(self) -> Timings:
        return Timings(grace=self.grace, linger=self.linger, drain=self.drain, eof=self.eof)


def clamp_timeout(seconds: float | None) -> float | None:
    """Turn a timeout of years into None. The timers of some event loops do not count that far."""
    return None if seconds is None or seconds > SECONDS_MAX else seconds


def check_seconds(name: str, value: Any) -> None:
    """Raise `UsageError` unless the value is a number of seconds, 0 or more."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UsageError(f"{name} cannot be {value!r}", hint="pass a number of seconds, 0 or more")
    # The condition is also true for NaN. It avoids float(), which overflows on a very large int.
    if not value >= 0:
        raise UsageError(f"{name} cannot be {value!r}", hint="pass a number of seconds, 0 or more")


def check_size(rows: Any, columns: Any) -> tuple[int, int]:
    """Check and return the size of a terminal. Raises `UsageError`."""
    for number in (rows, columns):
        if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= SIZE_MAX:
            hint = f"pass rows and columns as whole numbers from 1 to {SIZE_MAX}"
            message = f"the terminal size cannot be {rows!r:.60} by {columns!r:.60}"
            raise UsageError(message, hint=hint)
    return rows, columns


def _check_count(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        hint = "pass a whole number of bytes, 0 or more"
        raise UsageError(f"{name} cannot be {value!r}", hint=hint)


F = TypeVar("F", bound=Callable[..., Any])


class StartOptions(TypedDict, total=False):
    """The keywords of `start` and `execute`. `Options` and `prepare` define defaults and checks."""

    timeout: float | None
    idle_timeout: float | None
    grace: float
    linger: float
    drain: float
    stdin: Stdin
    pty: Pty
    stdout: Redirect
    stderr: Redirect
    eof: float | None
    caller: str | None
    user: str | int | None
    cwd: str | os.PathLike[str] | None
    env: Mapping[str, str] | None
    inherit_env: bool
    scrub: Iterable[str]
    limits: Mapping[Any, Any] | None
    pass_fds: Sequence[int]
    output_bytes_max: int
    output_total_max: int | None
    keep_output: bool
    on_output: OnOutput | None


# The keywords that `prepare` checks, with its name for each. `Options` checks the others.
_OF_LAUNCH = {"limits": "limits_wanted"} | {
    name: name for name in ("user", "cwd", "env", "inherit_env", "scrub", "pass_fds")
}


def options_of(how: StartOptions, *, ends_input: bool = False) -> Options:
    """Check the keywords and build the options."""
    if unknown := how.keys() - StartOptions.__annotations__.keys():
        raise TypeError(f"got an unexpected keyword argument {min(unknown)!r}")
    wanted: dict[str, Any] = {name: value for name, value in how.items() if name not in _OF_LAUNCH}
    return Options(**wanted, ends_input=ends_input)


def launch_of(
    argv: Argv, how: StartOptions, options: Options, *, helper: Sequence[str] = ()
) -> Launch:
    """Check the keywords and build the launch."""
    wanted: dict[str, Any] = {
        _OF_LAUNCH[name]: value for name, value in how.items() if name in _OF_LAUNCH
    }
    return prepare(argv, **wanted, has_terminal=options.terminal is not None, helper=helper)


def explicit(function: F) -> F:
    """Show the keywords of `StartOptions` in place of `**how` in `inspect.signature` and `help`.

    Editors do this without help.
    """
    checks = [inspect.signature(Options).parameters, inspect.signature(prepare).parameters]
    defaults = {
        name: parameter.default for parameters in checks for name, parameter in parameters.items()
    }
    *first, _how = (shown := inspect.signature(function)).parameters.values()
    keywords = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=defaults[_OF_LAUNCH.get(name, name)],
            annotation=kind,
        )
        for name, kind in _annotations(StartOptions).items()
    ]
    vars(function)["__signature__"] = shown.replace(parameters=[*first, *keywords])
    return function


def _annotations(typed_dict: type) -> dict[str, str]:
    """Return the annotations as written: an alias is shorter than its definition."""
    return {name: kind.__forward_arg__ for name, kind in typed_dict.__annotations__.items()}
