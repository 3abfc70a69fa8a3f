"""Commands: started, read, written to, watched, ended."""

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
    """Bytes, in one of two ways.

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
        cwd: Folder in which it runs.
        env: Environment variables to set.
        inherit_env: Whether it gets the server's environment, too.
        timeout: Seconds after which it is stopped.
        idle_timeout: Seconds without output after which it is stopped.
        grace: Seconds between SIGTERM and SIGKILL when it is stopped.
        stdin: null: none. `"pipe"`: what is sent to `…/stdin`. Else these bytes, and then the end.
        pty: Whether it gets a terminal: true, or `[rows, columns]`.
        user: User that it runs as.
        output_bytes_max: Bytes of each stream that are kept.
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
    user: Word | None = None
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
        why: Why not.
    """

    pid: int
    command: str
    why: str


class Step(Struct):
    """A rung of the stop ladder that was taken.

    Attributes:
        rung: Which: `eof`, `term`, `rest`, `kill`, `keeper` and the like.
        at: When, in seconds after the start.
    """

    rung: str
    at: float


class Finished(Struct):
    """How a command ended.

    Attributes:
        ended: Why it ended.
        code: Exit code; null if a signal ended it.
        signal: Number of the signal that ended it.
        seconds: How long it took.
        drained: False if a process outside its tree still held its output.
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
    """A command, as it is now.

    Attributes:
        id: Id of the command.
        argv: The program and its arguments.
        state: Its progress.
        pid: Process id of its leader.
        finished: How it ended; null until then.
    """

    id: str
    argv: list[str]
    state: CommandState
    pid: int | None
    finished: Finished | None


class Commands(Struct):
    """The commands of this server.

    Attributes:
        commands: Those that run, and those that have ended and are still kept.
    """

    commands: list[Command]


class TakeEnded(Body):
    """Whether to wait for a command that ends.

    Attributes:
        wait: Seconds to wait if none has ended, at most 60.
    """

    wait: Wait = 0.0


class ReadOutput(Query):
    """A piece of output.

    Attributes:
        after: Offset in bytes at which to begin.
        stream: Which stream.
        limit: Number of bytes, at most 1 MiB.
        wait: Seconds to wait for output, at most 60.
        encoding: How it is shown.
    """

    after: Annotated[int, Meta(ge=0, le=1 << 53)] = 0
    stream: OutputStream = "stdout"
    limit: Annotated[int, Meta(ge=1)] = 65536
    wait: Wait = 0.0
    encoding: OutputEncoding = "text"


class OutputPiece(Struct, omit_defaults=True):
    """A piece of output.

    Attributes:
        next: Offset at which to go on (`after`).
        missed: Bytes before this piece that are not kept any more.
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
        pattern: Regular expression, as Python has them.
        after: Offset in bytes at which to begin.
        stream: Which stream.
        wait: Seconds to wait for it, at most 60.
    """

    pattern: str
    after: Annotated[int, Meta(ge=0, le=1 << 53)] = 0
    stream: OutputStream = "stdout"
    wait: Wait = 30.0


class Matched(Struct):
    """Whether output matched a pattern.

    Attributes:
        matched: Whether it did.
        begin: Offset of the match.
        next: Offset after the match.
        text: The match.
        groups: The groups of the match.
        end: Whether the command is over.
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
        end: Whether to close stdin after them.
    """

    end: bool = False


class SendSignal(Body):
    """A signal to send.

    Attributes:
        signal: Its name, or its number.
        group: Whether the leader's whole process group gets it.
    """

    signal: int | SignalName
    group: bool = False


class Resize(Body):
    """A size for the command's terminal.

    Attributes:
        rows: Number of rows.
        columns: Number of columns.
    """

    rows: int
    columns: int


class StopCommand(Body):
    """How to stop a command.

    Attributes:
        at_once: Whether to kill it at once, without SIGTERM and `grace`.
    """

    at_once: bool = False
