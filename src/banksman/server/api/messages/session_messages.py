"""Sessions: opened, listed, looked at, changed."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from banksman.server.api.messages.common_messages import (
    Body,
    ClockName,
    Objects,
    Query,
    Rules,
    SessionPhase,
    SessionState,
    Text,
    Texts,
    Variables,
    Word,
)
from banksman.server.api.messages.turn_messages import Question, Waiting

# A page of sessions: more is cut.
SESSIONS_MAX = 1000


class OpenSession(Body):
    """A session to open. An existing session of this name is claimed and opened again.

    Attributes:
        agent: Name of the agent's profile, as `GET /v1/agents` lists it.
        cwd: Folder in which the agent works.
        name: Name of the session, unique in the store.
        command: Command that replaces the profile's own: words, or one string that is split as a shell does.
        args: Arguments that are added to the command.
        env: Environment variables to set.
        inherit_env: Whether the agent gets the server's environment, too.
        model: Model that the agent uses.
        permission_mode: Permission mode, in the agent's own words.
        system_prompt: System prompt for the agent.
        mcp_servers: MCP servers for the agent, as ACP describes them.
        options: Options of the session: time limits, queue length and others.
        resume: Conversation id of the agent that this session goes on with.
        fork: Whether to go on with a copy of the conversation `resume`.
        rules: Which tools are allowed, denied or asked about, by name. A `*` at the end stands for any ending.
        labels: Labels that a host must have to run this session.
    """

    # A list that is empty here is made anew for each: a Struct is no plain class.
    agent: Word = "claude"
    cwd: Text | None = None
    name: Word | None = None
    command: Text | Texts | None = None
    args: Texts = []  # noqa: RUF012
    env: Variables | None = None
    inherit_env: bool = True
    model: Word | None = None
    permission_mode: Word | None = None
    system_prompt: Text | None = None
    mcp_servers: Objects = []  # noqa: RUF012
    options: dict[str, Any] | None = None
    resume: Word | None = None
    fork: bool = False
    rules: Rules | None = None
    labels: Annotated[list[Word], Meta(max_length=32)] = []  # noqa: RUF012


class ChangeSession(Body):
    """Changes of a session. Members that are left out stay as they are.

    Attributes:
        name: New name; null takes the name away.
        model: New model.
        permission_mode: New permission mode, in the agent's own words.
    """

    name: Word | msgspec.UnsetType | None = msgspec.UNSET
    model: Word | msgspec.UnsetType = msgspec.UNSET
    permission_mode: Word | msgspec.UnsetType = msgspec.UNSET


class ListSessions(Query):
    """A page of sessions.

    Attributes:
        after: Id or name of a session: the page begins after it.
        limit: Number of sessions, at most 1000.
    """

    after: str | None = None
    limit: Annotated[int, Meta(ge=1)] = SESSIONS_MAX


class DeleteSession(Query):
    """How to close a session.

    Attributes:
        forget: Whether to delete its log, too.
    """

    forget: bool = False


class Owner(Struct):
    """The process that has a session.

    Attributes:
        pid: Process id.
        address: Where it can be reached; empty if nowhere.
    """

    pid: int
    address: str


class Session(Struct, kw_only=True):
    """A session, as it is now.

    Attributes:
        id: Id of the session, unique for ever.
        name: Name of the session.
        agent: Name of its agent.
        phase: What it is doing, in detail.
        state: What it is doing, in one word.
        created: When it was created, in seconds since 1970.
        at: When its last event happened; null if it has none.
        cwd: Folder in which the agent works; null where it is not known.
        holder: Turn that runs.
        hold: Hold that is granted.
        queue: Asks that wait, in the order in which they are served.
        questions: Ids of the questions that wait for an answer.
        conversation: Id of the agent's own conversation.
        seq: Number of its last event.
        cost: What it has cost, in US dollars; null if the agent does not say.
        owner: The process that has it, if that is another one.
        host: Name of the host that has it, where several hosts share the store.
    """

    id: str
    name: str | None
    agent: str
    phase: SessionPhase
    state: SessionState
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
    """A page of sessions.

    Attributes:
        sessions: The sessions, oldest first.
        next: Where the next page begins (`after`); null: this is the last page.
    """

    sessions: list[Session]
    next: str | None


class Clock(Struct):
    """A watchdog of the turn that runs.

    Attributes:
        name: Which watchdog.
        seconds: Its limit.
        left: Seconds that are left.
        running: Whether it is counting.
    """

    name: ClockName
    seconds: float
    left: float
    running: bool


class ProcessShown(Struct):
    """A process of the session's tree.

    Attributes:
        pid: Process id.
        parent: Process id of its parent.
        command: Its command line.
        state: The kernel's letter for its state, such as `S` or `R`.
        rss_bytes: Resident memory.
    """

    pid: int
    parent: int
    command: str
    state: str
    rss_bytes: int


class Frame(Struct):
    """A line to the agent or from it, as the log has it.

    Attributes:
        at: When it was written, in seconds since 1970.
        text: Its beginning.
    """

    at: float
    text: str


class Request(Struct):
    """A request to the agent, besides its turns, that it has not answered.

    Attributes:
        id: Id of the request.
        kind: What is asked: `handshake`, `interrupt`, `set model` and the like.
        seconds: For how long it waits; null if that is not known.
    """

    id: str
    kind: str
    seconds: float | None


class Why(Session, kw_only=True):
    """A session with everything that explains what it waits for.

    Attributes:
        holder_prompt: Beginning of the prompt of the turn that runs.
        last_in: Last line from the agent; null if none is among the last events.
        last_out: Last line to the agent; null if none is among the last events.
        requests: Requests to the agent that it has not answered.
        asked: Questions that wait for an answer, in full.
        clocks: Watchdogs of the turn that runs.
        timers: Seconds that are left of each timer, by name.
        pids: Process ids of the agent's tree.
        tree: Processes of the agent's tree.
        counters: Counters of the session, by name.
        seconds_since_in: Seconds since the agent last said something.
        seconds_since_out: Seconds since the agent was last told something.
        waits_for_place: Whether it waits until it may start a process.
    """

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
