"""Messages about commands: start, read, watch, write, signal, stop, results."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from banksman.server.api.messages.common_messages import (
    ITEMS_MAX,
    Body,
    CommandEnded,
    CommandState,
    OutputEncoding,
    OutputStream,
    Query,
    Seconds,
    SignalName,
    Text,
    Variables,
    Wait,
    Word,
)


class Given(Body):
    """Bytes, as text or in base64: exactly one of the two.

    Attributes:
        text: The bytes as text.
        base64: The bytes in base64.
    """

    text: str | None = None
    base64: str | None = None


class StartCommand(Body):
    """A command to start in the background.

    Attributes:
        argv: The program and its arguments. No shell is involved.
        cwd: Folder in which the command runs.
        env: Environment variables to set.
        inherit_env: Whether the command also inherits the server's environment.
        timeout: Seconds after which the command is stopped.
        idle_timeout: Seconds without output after which the command is stopped.
        grace: Seconds between SIGTERM and SIGKILL when the command is stopped.
        stdin: null: empty. `"pipe"`: the data that clients send to `…/stdin`. Otherwise these
            bytes, followed by the end of input.
        pty: Whether the command gets a terminal: true, or its size as `[rows, columns]`.
        user: User that the command runs as, by name or by number.
        output_bytes_max: Number of bytes that are kept of each output stream.
    """

    argv: Annotated[list[Text], Meta(min_length=1, max_length=ITEMS_MAX)]
    cwd: Text | None = None
    env: Variables | None = None
    inherit_env: bool = True
    timeout: Seconds | None = None
    idle_timeout: Seconds | None = None
    grace: Seconds = 5.0
    stdin: str | Given | None = None
    pty: bool | Annotated[list[int], Meta(min_length=2, max_length=2)] = False
    user: Word | int | None = None
    output_bytes_max: Annotated[int, Meta(ge=0, le=64 << 20)] = 1 << 20


class Swept(Struct):
    """A process that had to be ended.

    Attributes:
        pid: Process id.
        command: Its command line.
    """

    pid: int
    command: str


class Survivor(Struct):
    """A process that could not be ended.

    Attributes:
        pid: Process id.
        command: Its command line.
        why: Why it could not be ended.
    """

    pid: int
    command: str
    why: str


class Step(Struct):
    """A rung of the stop ladder that was taken.

    Attributes:
        rung: Name of the rung: `eof`, `term`, `rest`, `kill`, `cgroup`, `keeper` and others.
        at: When it was taken, in seconds. In the result of a command: since the start of the
            command. In the event `process.stopped`: since 1970.
    """

    rung: str
    at: float


class Finished(Struct):
    """How a command ended.

    Attributes:
        ended: Why the command ended.
        code: Exit code; null if a signal ended it.
        signal: Number of the signal that ended it; null if it exited.
        seconds: How long the command ran.
        drained: False if a process outside its tree still held its output open.
        swept: Processes that had to be ended besides its leader.
        survivors: Processes that could not be ended.
        ladder: Rungs of the stop ladder that were taken.
    """

    ended: CommandEnded
    code: int | None
    signal: int | None
    seconds: float
    drained: bool
    swept: list[Swept]
    survivors: list[Survivor]
    ladder: list[Step]


class Command(Struct):
    """The present state of a command.

    Attributes:
        id: Id of the command.
        argv: The program and its arguments.
        state: Progress of the command.
        pid: Process id of its leader.
        finished: How the command ended; null until then.
        caller: The caller that started it; null if it has no name.
    """

    id: str
    argv: list[str]
    state: CommandState
    pid: int | None
    finished: Finished | None
    caller: str | None = None


class Commands(Struct):
    """A list of commands.

    Attributes:
        commands: The commands.
    """

    commands: list[Command]


class TakeEnded(Body):
    """How long to wait for a command to end.

    Attributes:
        wait: Seconds to wait if no command has ended yet, at most 60.
    """

    wait: Wait = 0.0


class ReadOutput(Query):
    """Selection of a piece of output.

    Attributes:
        after: Offset in bytes at which to begin.
        stream: Output stream to read.
        limit: Maximum number of bytes, at most 1 MiB.
        wait: Seconds to wait for output, at most 60.
        encoding: Encoding of the output in the response.
    """

    after: Annotated[int, Meta(ge=0, le=1 << 53)] = 0
    stream: OutputStream = "stdout"
    limit: Annotated[int, Meta(ge=1)] = 65536
    wait: Wait = 0.0
    encoding: OutputEncoding = "text"


class OutputPiece(Struct, omit_defaults=True):
    """A piece of output.

    Attributes:
        next: Value of `after` for the next piece.
        missed: Number of bytes before this piece that are lost, because they were not kept.
        end: Whether this is the end of the stream.
        text: The output, with `encoding=text`.
        base64: The output, with `encoding=base64`.
    """

    next: int
    missed: int
    end: bool
    text: str | None = None
    base64: str | None = None


class WatchOutput(Query):
    """A pattern to wait for.

    Attributes:
        pattern: Regular expression, in the syntax of Python.
        after: Offset in bytes at which to begin.
        stream: Output stream to search.
        wait: Seconds to wait for a match, at most 60.
    """

    pattern: str
    after: Annotated[int, Meta(ge=0, le=1 << 53)] = 0
    stream: OutputStream = "stdout"
    wait: Wait = 30.0


class Matched(Struct):
    """Whether output matched a pattern.

    Attributes:
        matched: Whether the output matched.
        begin: Offset of the match.
        next: Offset after the match.
        text: The matching text.
        groups: The groups of the match.
        end: Whether the command has ended.
    """

    matched: bool
    begin: int | None
    next: int | None
    text: str | None
    groups: list[str | None]
    end: bool


class WriteStdin(Given):
    """Bytes for the command's stdin.

    Attributes:
        end: Whether to close stdin after these bytes.
    """

    end: bool = False


class SendSignal(Body):
    """A signal to send.

    Attributes:
        signal: Name or number of the signal.
        group: Whether to send it to the leader's whole process group.
    """

    signal: int | SignalName
    group: bool = False


class Resize(Body):
    """A new size of the command's terminal.

    Attributes:
        rows: Number of rows.
        columns: Number of columns.
    """

    rows: int
    columns: int


class StopCommand(Body):
    """How to stop a command.

    Attributes:
        at_once: Whether to kill it immediately, without SIGTERM and `grace`.
    """

    at_once: bool = False
