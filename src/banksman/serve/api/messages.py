"""What goes over the wire, both ways: one type for each body, each query and each answer.

They are decoded strictly (a member that is not known is an error), and the OpenAPI is made from them, so that what is
documented is what is taken.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

# A page of events, over HTTP: more is cut.
EVENTS_DEFAULT, EVENTS_MAX = 100, 1000
SESSIONS_MAX = 1000
# A request that waits is answered after so long, so that nobody between here and there takes it for dead.
WAIT_SECONDS_MAX = 60.0

# Of a list or a mapping: more than anybody means, and few enough to be looked at in a moment.
ITEMS_MAX = 10_000

Text = Annotated[str, Meta(max_length=1 << 20)]
Texts = Annotated[list[Text], Meta(max_length=ITEMS_MAX)]
Variables = Annotated[dict[str, str], Meta(max_length=ITEMS_MAX)]
Objects = Annotated[list[dict[str, Any]], Meta(max_length=ITEMS_MAX)]
Word = Annotated[str, Meta(min_length=1, max_length=255)]
Seconds = Annotated[float, Meta(ge=0, le=1e8)]
Wait = Annotated[float, Meta(ge=0)]


class Body(Struct, forbid_unknown_fields=True, kw_only=True):
    """What a client sends."""


class Query(Struct, forbid_unknown_fields=True, kw_only=True):
    """What a client asks for in the URL."""


# -- sessions --------------------------------------------------------------------------------------------------------
class OpenSession(Body):
    agent: Word = "claude"
    cwd: Text | None = None
    name: Word | None = None
    command: Text | Texts | None = None
    args: Texts = []
    env: Variables | None = None
    inherit_env: bool = True
    model: Word | None = None
    permission_mode: Word | None = None
    system_prompt: Text | None = None
    mcp_servers: Objects = []
    options: dict[str, Any] | None = None
    resume: Word | None = None
    fork: bool = False
    rules: Variables | None = None
    labels: Annotated[list[Word], Meta(max_length=32)] = []


class ChangeSession(Body):
    """Members that are not there are left as they are; a name of null takes it away."""

    name: Word | msgspec.UnsetType | None = msgspec.UNSET
    model: Word | msgspec.UnsetType = msgspec.UNSET
    permission_mode: Word | msgspec.UnsetType = msgspec.UNSET


class ListSessions(Query):
    after: str | None = None
    limit: Annotated[int, Meta(ge=1)] = SESSIONS_MAX


class DeleteSession(Query):
    forget: bool = False


class Waiting(Struct):
    """`prompt`: its beginning. `at`: since when it waits; null: nobody can tell."""

    turn: str
    priority: int
    seconds: float
    attempt: int
    prompt: str
    at: float | None


class Owner(Struct):
    pid: int
    address: str


class Session(Struct, kw_only=True):
    """`state`: the phase at a glance: running, asks, queued, idle, wedged, gone, elsewhere; where many hosts share the
    store, also unreachable (its host is silent, and what it accepted is kept) and "not movable" (its host died, and no
    other can go on with it). `at`: the time of its last event; null: it has none. `cwd`: null where it is not known, in
    a list of one that is not open here. `host`: the name of the one that has it, where many share the store."""

    id: str
    name: str | None
    agent: str
    phase: str
    state: str
    created: float
    at: float | None
    cwd: str | None
    holder: str | None
    hold: str | None
    queue: list[Waiting]
    questions: list[str]
    conversation: str | None
    seq: int
    cost: float | None
    owner: Owner | None
    host: str | None = None


class Sessions(Struct):
    sessions: list[Session]
    next: str | None


class Clock(Struct):
    name: str
    seconds: float
    left: float
    running: bool


class ProcessShown(Struct):
    pid: int
    parent: int
    command: str
    state: str
    rss_bytes: int


class Frame(Struct):
    """A line to the agent or from it, as the log has it: its beginning."""

    at: float
    text: str


class Request(Struct):
    """What the agent was told besides its turns, and has not answered. `seconds` null: nobody can tell since when."""

    id: str
    kind: str
    seconds: float | None


class Question(Struct):
    id: str
    turn: str | None
    tool: str
    input: dict[str, Any]
    wants: str
    details: dict[str, Any]


class Why(Session, kw_only=True):
    """`asked`: the questions that wait, whole. `last_in`, `last_out`: the last line from the agent, and to it; null:
    there is none among the last events."""

    holder_prompt: str | None
    last_in: Frame | None
    last_out: Frame | None
    requests: list[Request]
    asked: list[Question]
    clocks: list[Clock]
    timers: dict[str, float]
    pids: list[int]
    tree: list[ProcessShown]
    counters: dict[str, int]
    seconds_since_in: float | None
    seconds_since_out: float | None
    waits_for_place: bool


# -- turns -----------------------------------------------------------------------------------------------------------
class Ask(Body):
    prompt: str | Objects
    priority: int | Word = "normal"
    on_busy: Word = "enqueue"
    on_preempt: Word = "end"
    schema: dict[str, Any] | None = None
    rules: Variables | None = None


class WaitFor(Query):
    wait: Wait = 0.0


class Accepted(Struct):
    turn: str
    state: str


class Outcome(Struct):
    kind: str
    stop_reason: str | None
    text: str | None
    structured: Any
    usage: Any
    cost: float | None
    error: str | None
    clock: str | None
    durable: bool


class Turn(Struct):
    turn: str
    state: str
    outcome: Outcome | None


class MoveTurn(Body):
    """Before which other one that waits; null: to the head of its class."""

    before: Word | None = None


class Moved(Struct):
    queue: list[Waiting]


class Receipt(Struct):
    stopped: bool
    by: str
    kept: str | None
    queued: list[str]


# -- events ----------------------------------------------------------------------------------------------------------
class ReadEvents(Query):
    """`before`: the last ones before it, instead of those after; for a page only. `frames` false: without what the
    agent said and was told. `partial`: also what it has said of a text that is not complete."""

    after: str | None = None
    before: str | None = None
    limit: Annotated[int, Meta(ge=1)] = EVENTS_DEFAULT
    raw: bool = False
    frames: bool = True
    partial: bool = False


class FollowMany(Query):
    # A position, or "now": what is there is not shown.
    after: str | None = None
    # Separated by commas; ids or names.
    sessions: str | None = None
    # The same; whose frames are shown, besides our own kinds of every session. Not given: everybody's.
    frames_of: str | None = None
    raw: bool = False
    partial: bool = False


class Event(Struct, kw_only=True, omit_defaults=True):
    cursor: str
    session: str
    epoch: int
    seq: int
    at: float
    turn: str | None
    kind: str
    body: dict[str, Any]
    frame: str | None = None
    frame_base64: str | None = None


class Gap(Struct):
    first: int
    last: int


class Events(Struct, omit_defaults=True):
    """`next`: where to go on; `head`: the last one there is. `gap`: retention took these before the first. `first`, if
    asked for what is before a cursor: the oldest one that is kept."""

    events: list[Event]
    next: str | None
    head: str | None
    gap: Gap | None = None
    first: str | None = None


# -- questions -------------------------------------------------------------------------------------------------------
class Answer(Body):
    decision: Word
    message: Text | None = None
    updated_input: dict[str, Any] | None = None
    content: dict[str, Any] | None = None
    remember: bool | Word = False
    interrupt: bool = False


class Answered(Struct):
    question: str
    answer: str
    by: str
    message: str | None
    first: bool


class Questions(Struct):
    questions: list[Question]


# -- commands --------------------------------------------------------------------------------------------------------
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


# -- the server ------------------------------------------------------------------------------------------------------
class Agent(Struct):
    """`error`: its file is wrong, and nothing else is known of it. `source`: the user's own file; None: the package's.
    `repairs`: what it does otherwise than it should, and what comes of it here."""

    name: str
    found: bool
    path: str | None
    command: list[str]
    dialect: str
    capabilities: list[str]
    title: str = ""
    install: str = ""
    website: str = ""
    source: str | None = None
    overrides: bool = False
    error: str | None = None
    repairs: list[str] = []
    note: str = ""


class Agents(Struct):
    agents: list[Agent]


class Host(Struct, kw_only=True):
    """One that shares the store, as it said last. `room`: how many sessions it takes, 0: none, it asks the others;
    `used`: how many it has. `front`: callers come in there; one that has neither room nor this is a program with
    sessions of its own. `here`: it is the one that answers this. `silent`: it was not heard of for a lease, and its end
    was not heard of either: it is this server that is cut off."""

    id: str
    name: str
    pid: int
    labels: list[str]
    agents: list[str]
    room: int
    used: int
    version: str
    draining: bool
    since: float
    here: bool
    silent: bool = False
    front: bool = False


class Hosts(Struct):
    hosts: list[Host]


class Drain(Body):
    timeout: Seconds | None = None


class Draining(Struct):
    draining: bool


class HostDraining(Struct):
    """`sessions`: how many it has. `hosts`: the names of those that have room for them, and what they need, as it looks
    now. `waiting`: for how many of them there is none; they wait, with all that was accepted in them, until one can."""

    draining: bool
    sessions: int
    hosts: list[str]
    waiting: int


class Login(Body):
    token: str


class Health(Struct):
    status: str


class Server(Struct):
    version: str
    pid: int
    started: float
    draining: bool
    store: str
    settings: dict[str, Any]


class Task(Struct):
    name: str
    coroutine: str
    stack: list[str]


class Thread(Struct):
    name: str
    stack: list[str]


class Stacks(Struct):
    tasks: list[Task]
    threads: list[Thread]
    # How many were too many to show, of each.
    left_out: dict[str, int] = {}


class Problem(Struct):
    type: str
    title: str
    status: int
    detail: str
    hint: str
    ids: dict[str, Any]
