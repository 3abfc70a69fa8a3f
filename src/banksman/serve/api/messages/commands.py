"""Commands: started, read, written to, watched, ended."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from banksman.serve.api.messages.parts import ITEMS_MAX, Body, Query, Seconds, Text, Variables, Wait, Word


class Given(Body):
    """One of the two."""

    text: str | None = None
    base64: str | None = None


class StartCommand(Body):
    argv: Annotated[list[Text], Meta(min_length=1, max_length=ITEMS_MAX)]
    cwd: Text | None = None
    env: Variables | None = None
    inherit_env: bool = True
    timeout: Seconds | None = None
    idle_timeout: Seconds | None = None
    grace: Seconds = 5.0
    # null: nothing; "pipe": what is sent to …/stdin; else this, and then its end.
    stdin: str | Given | None = None
    # A terminal: true, or [rows, columns].
    pty: bool | Annotated[list[int], Meta(min_length=2, max_length=2)] = False
    user: Word | None = None
    output_bytes_max: Annotated[int, Meta(ge=0, le=64 << 20)] = 1 << 20


class Swept(Struct):
    pid: int
    command: str


class Survivor(Struct):
    pid: int
    command: str
    why: str


class Step(Struct):
    rung: str
    at: float


class Finished(Struct):
    ended: str
    code: int | None
    signal: int | None
    seconds: float
    drained: bool
    swept: list[Swept]
    survivors: list[Survivor]
    ladder: list[Step]


class Command(Struct):
    id: str
    argv: list[str]
    state: str
    pid: int | None
    finished: Finished | None


class Commands(Struct):
    commands: list[Command]


class ReadOutput(Query):
    after: Annotated[int, Meta(ge=0, le=1 << 53)] = 0
    stream: str = "stdout"
    limit: Annotated[int, Meta(ge=1)] = 65536
    wait: Wait = 0.0
    encoding: str = "text"


class OutputPiece(Struct, omit_defaults=True):
    next: int
    missed: int
    end: bool
    text: str | None = None
    base64: str | None = None


class WatchOutput(Query):
    pattern: str
    after: Annotated[int, Meta(ge=0, le=1 << 53)] = 0
    stream: str = "stdout"
    wait: Wait = 30.0


class Matched(Struct):
    matched: bool
    begin: int | None
    next: int | None
    text: str | None
    groups: list[str | None]
    end: bool


class WriteStdin(Given):
    end: bool = False


class SendSignal(Body):
    signal: int | Word
    group: bool = False


class Resize(Body):
    rows: int
    columns: int


class StopCommand(Body):
    at_once: bool = False
