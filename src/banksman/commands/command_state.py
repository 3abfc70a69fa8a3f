"""State of a running command that its next host needs and the keeper does not know, as bytes.

The keeper knows the process: its pids, its start time, its streams. This record adds what only the
old host knows: the id, the options, the kept output, and the time of the last output. It also has
the secret of the hold, so only the user may read it (`process/hold_record.py`).

The record begins with a word that names its format. A host of another version that does not know
the word leaves the command alone, and its hold ends by itself.
"""

from __future__ import annotations

import marshal
import subprocess
from dataclasses import asdict, dataclass
from typing import Any, Literal

from banksman.commands.options import Options
from banksman.commands.output import CaptureState
from banksman.core.process_facts import Stream, Swept
from banksman.errors import Refused

# Change the number with every change that an older version cannot read.
WORD = b"banksman-command-1\n"
ANY_WORD = b"banksman-command-"

StdinKind = Literal["null", "pipe", "given"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandOptions:
    """The options that still matter after the start.

    `captured`: whether stdout and stderr are captured.
    """

    timeout: float | None
    idle_timeout: float | None
    grace: float
    linger: float
    drain: float
    eof: float | None
    stdin: StdinKind
    terminal: tuple[int, int] | None
    captured: tuple[bool, bool]
    output_bytes_max: int
    output_total_max: int | None
    spill_bytes_max: int
    caller: str | None = None

    @classmethod
    def of(cls, options: Options) -> CommandOptions:
        stdin: StdinKind = "given" if isinstance(options.stdin, bytes) else "null"
        stdout, stderr = options.outputs
        return cls(
            timeout=options.timeout,
            idle_timeout=options.idle_timeout,
            grace=options.grace,
            linger=options.linger,
            drain=options.drain,
            eof=options.eof,
            stdin="pipe" if options.stdin == "pipe" else stdin,
            terminal=options.terminal,
            captured=(stdout == "pipe", stderr == "pipe"),
            output_bytes_max=options.output_bytes_max,
            output_total_max=options.output_total_max,
            spill_bytes_max=options.spill_bytes_max,
            caller=options.caller,
        )

    def restored(self) -> Options:
        """Return the options for a process that runs already: nothing is opened or written."""
        stdout, stderr = (None if is_pipe else subprocess.DEVNULL for is_pipe in self.captured)
        return Options(
            timeout=self.timeout,
            idle_timeout=self.idle_timeout,
            grace=self.grace,
            linger=self.linger,
            drain=self.drain,
            eof=self.eof,
            # The old host has written the whole input that was given with the options.
            stdin={"null": None, "pipe": "pipe", "given": b""}[self.stdin],  # pyright: ignore[reportArgumentType]
            pty=False if self.terminal is None else self.terminal,
            stdout=stdout,
            stderr=stderr,
            output_bytes_max=self.output_bytes_max,
            output_total_max=self.output_total_max,
            spill_bytes_max=self.spill_bytes_max,
            caller=self.caller,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandState:
    """A command that another host can continue.

    `scope`: the store of its server, so that two servers of one user keep their commands apart.
    `last_output`: CLOCK_MONOTONIC, like all times here. `owes_report`: the end of the command is
    still to be reported.
    """

    id: str
    scope: str
    secret: bytes
    argv: tuple[str, ...]
    options: CommandOptions
    last_output: float
    is_output_whole: bool
    swept: tuple[Swept, ...]
    captures: dict[Stream, CaptureState]
    owes_report: bool


def encode(state: CommandState) -> bytes:
    # Kept output may have megabytes, which `marshal` copies once. Format 4 is the same in every
    # supported Python.
    captures = {stream.value: asdict(capture) for stream, capture in state.captures.items()}
    swept = [(each.pid, each.command) for each in state.swept]
    fields = {name: getattr(state, name) for name in CommandState.__slots__}
    options = asdict(state.options)
    if state.options.caller is None:
        del options["caller"]  # So that earlier versions can read the record.
    fields |= {"options": options, "captures": captures, "swept": swept}
    return WORD + marshal.dumps(fields, 4)


def is_command(record: bytes) -> bool:
    """Whether this is the record of a command, or its beginning."""
    return record.startswith(ANY_WORD)


def decode(record: bytes) -> CommandState | None:
    """Return the command of a record. None: it is the record of something else.

    Raises `Refused` if another version of Banksman has written it.
    """
    if not is_command(record):
        return None
    word, _, body = record.partition(b"\n")
    try:
        if word + b"\n" == WORD:
            return _built(marshal.loads(body))
    except (EOFError, TypeError, ValueError, KeyError, AttributeError):
        pass
    message = f"cannot take over a command: its record {word[:40].decode('ascii', 'replace')}"
    raise Refused(f"{message} is not readable here", hint="use the version that has written it")


def _built(fields: dict[str, Any]) -> CommandState:
    captures = fields["captures"].items()
    built: dict[str, Any] = {
        "options": CommandOptions(**fields["options"]),
        "captures": {Stream(name): CaptureState(**capture) for name, capture in captures},
        "swept": tuple(Swept(*each) for each in fields["swept"]),
    }
    return CommandState(**{**fields, **built})
