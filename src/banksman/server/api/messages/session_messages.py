"""Messages about sessions: open, list, show, change, delete, explain."""

from __future__ import annotations

import hashlib
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from banksman.server.api.messages.common_messages import (
    Body,
    Caps,
    CapUse,
    ClockName,
    ErrorKindName,
    Objects,
    OnBudget,
    OnLimit,
    Query,
    Rules,
    SessionPhase,
    SessionState,
    Text,
    Texts,
    Variables,
    Word,
)
from banksman.server.api.messages.turn_messages import Question, QueueHold, Waiting

# Number of sessions of a page; a higher `limit` is reduced.
SESSIONS_MAX = 1000


# One number for both, or the soft and the hard limit.
Limit = int | float | Annotated[list[int], Meta(min_length=2, max_length=2)]


class OpenSession(Body):
    """A session to open. An existing session of this name is claimed and opened again.

    Attributes:
        agent: Name of the agent's profile, as `GET /v1/agents` lists it.
        cwd: Folder in which the agent works.
        name: Name of the session, unique in the store.
        command: Command that replaces the profile's: a list of words, or one string that is split
            as a shell does.
        args: Arguments to append to the command.
        env: Environment variables to set.
        inherit_env: Whether the agent also inherits the server's environment.
        model: Model that the agent uses.
        permission_mode: Permission mode, as the agent names it.
        system_prompt: System prompt for the agent.
        mcp_servers: MCP servers for the agent, in the format of ACP.
        options: Options of the session: time limits, queue length and others.
        resume: Id of the agent's conversation that this session continues.
        fork: Whether to continue a copy of the conversation `resume`.
        rules: Which tools are allowed, denied or asked about, by name. A `*` at the end of a name
            matches any ending.
        labels: Labels that a host must have to run this session.
        on_limit: What asks do while the agent's account is limited; `fail` if it is left out.
        fallback: Names of other agents. Each serves asks while the agents before it are limited or
            not installed.
        budget: Caps on what the session may use over its whole life.
        on_budget: What happens at a cap; null: `queue`.
        user: User that the agent runs as. For this and the next five, the settings must let
            callers choose. Left out: as the session had it, else as the settings say.
        limits: Resource limits of each process of the agent, or of its tree, by name.
        scrub: Inherited variables that the agent does not get: `secrets`, `nesting`, or names.
        wrap: Prefix of the agent's command, or the name of a sandbox.
        on_open: Command that makes what the session works in. If it fails, the session is not
            opened.
        on_close: Command that removes it, after the session is closed.
        survive: "crash": the agent works on if the server is killed, and the next server continues
            its turn. The settings must let callers choose this too.
    """

    # msgspec creates a new list for each instance: these defaults are not shared.
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
    on_limit: OnLimit | None = None
    fallback: Annotated[list[Word], Meta(max_length=8)] = []  # noqa: RUF012
    budget: Caps | None = None
    on_budget: OnBudget | None = None
    user: Word | int | None = None
    limits: Annotated[dict[Word, Limit], Meta(max_length=64)] | None = None
    scrub: Annotated[list[Word], Meta(max_length=256)] | None = None
    wrap: Word | Annotated[list[Text], Meta(max_length=256)] | None = None
    on_open: Annotated[list[Text], Meta(max_length=256)] | None = None
    on_close: Annotated[list[Text], Meta(max_length=256)] | None = None
    survive: Literal["crash"] | None = None


class ChangeSession(Body):
    """Changes of a session. Members that are left out stay as they are.

    Attributes:
        name: New name; null removes the name.
        model: New model.
        permission_mode: New permission mode, as the agent names it.
    """

    name: Word | msgspec.UnsetType | None = msgspec.UNSET
    model: Word | msgspec.UnsetType = msgspec.UNSET
    permission_mode: Word | msgspec.UnsetType = msgspec.UNSET


class ListSessions(Query):
    """A page of sessions.

    Attributes:
        after: Id or name of a session. The page begins after it.
        limit: Maximum number of sessions, at most 1000.
    """

    after: str | None = None
    limit: Annotated[int, Meta(ge=1)] = SESSIONS_MAX


class DeleteSession(Query):
    """How to close a session.

    Attributes:
        forget: Whether to delete the session's log, too.
    """

    forget: bool = False


class Owner(Struct):
    """The process that owns a session.

    Attributes:
        pid: Process id.
        address: Address of its host; empty if it cannot be reached.
    """

    pid: int
    address: str


class LimitWindow(Struct):
    """A usage window of the agent's account, as the agent reports it.

    Attributes:
        name: Name of the window, such as `five_hour` or `primary`.
        used: Used fraction of the window; 1 is all of it; null if the agent does not report it.
        resets_at: When the window starts again, in seconds since 1970; null if unknown.
        exhausted: Whether the provider rejects requests until then.
    """

    name: str
    used: float | None
    resets_at: float | None
    exhausted: bool


class SessionAgent(Struct):
    """An agent of a session with fall-backs.

    Attributes:
        name: Name of the agent.
        limited_until: When the limit of its account ends, in seconds since 1970; null if it is not
            limited.
        missing: Whether its program was not found.
    """

    name: str
    limited_until: float | None
    missing: bool


class Session(Struct, kw_only=True):
    """The present state of a session.

    Attributes:
        id: Id of the session, never reused.
        name: Name of the session.
        agent: Name of its agent; after a fall-back, of the agent that serves it now.
        phase: Activity of the session, in detail.
        state: Activity of the session, in one word.
        created: When the session was created, in seconds since 1970.
        at: When its last event happened, in seconds since 1970; null if it has no events.
        cwd: Folder in which the agent works; null if unknown.
        holder: Id of the running turn.
        holder_caller: The person or program that asked for it; null if it has no name.
        holder_since: When it got the session, in seconds since 1970; null if unknown.
        hold: Id of the granted hold.
        holds: The granted hold, and the waiting ones in their order; empty if another process owns
            the session.
        queue: Waiting asks, in the order in which they will run.
        questions: Ids of the questions that wait for an answer.
        conversation: Id of the agent's conversation.
        seq: Number of its last event.
        cost: Cost of the session so far, in US dollars; null if the agent does not report it.
        owner: Process that owns the session, if it is not this server.
        host: Name of the host that owns the session, if several hosts share the store.
        limits: Usage windows of the agent's account, as the agent last reported them.
        limited_until: When the account's limit ends, in seconds since 1970; null if it is not
            limited.
        waits_for_limit: Whether the waiting asks wait until the limit has ended.
        fallback: Agents of the session in order of preference, the first one included; empty if it
            has only one, or if another host owns it.
        budget: Caps of the session and what is used of them, and the shared caps that hold it back.
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
    limits: list[LimitWindow] = []
    limited_until: float | None = None
    waits_for_limit: bool = False
    fallback: list[SessionAgent] = []
    budget: list[CapUse] = []
    holder_caller: str | None = None
    holder_since: float | None = None
    holds: list[QueueHold] = []


class Sessions(Struct):
    """A page of sessions.

    Attributes:
        sessions: The sessions, oldest first.
        next: Value of `after` for the next page; null on the last page.
    """

    sessions: list[Session]
    next: str | None


class BundleSession(Query):
    """Contents of the archive for a bug report.

    Attributes:
        text: Whether it has the words of the conversation. Without them it has types, ids, names of
            tools and models, and numbers.
    """

    text: bool = True


class Clock(Struct):
    """A watchdog of the running turn.

    Attributes:
        name: Name of the watchdog.
        seconds: Time limit.
        left: Seconds left.
        running: Whether the watchdog is counting now.
    """

    name: ClockName
    seconds: float
    left: float
    running: bool


class ProcessShown(Struct):
    """A process in the session's process tree.

    Attributes:
        pid: Process id.
        parent: Process id of its parent.
        command: Name of its program, as the kernel has it.
        state: Process state as a letter, such as `S` or `R`.
        rss_bytes: Resident memory in bytes.
    """

    pid: int
    parent: int
    command: str
    state: str
    rss_bytes: int


class Frame(Struct):
    """A frame to or from the agent, as stored in the log.

    Attributes:
        at: When the frame was logged, in seconds since 1970.
        text: First characters of the frame.
    """

    at: float
    text: str


class Request(Struct):
    """An unanswered request to the agent, besides its turns.

    Attributes:
        id: Id of the request.
        kind: Kind of request: `handshake`, `interrupt`, `set model` and others.
        seconds: How long it has waited; null if unknown.
    """

    id: str
    kind: str
    seconds: float | None


class Retry(Struct):
    """A failed model call that the agent repeats by itself.

    Attributes:
        attempt: Number of the coming retry.
        attempts_max: Number of retries that the agent makes; null if unknown.
        seconds: Seconds until the retry; 0 if it is due or the delay is unknown.
        cause: Why the call failed, in the agent's words.
        error: Kind of the error.
        status: HTTP status of the provider; null if unknown.
    """

    attempt: int
    attempts_max: int | None
    seconds: float
    cause: str
    error: ErrorKindName
    status: int | None


class SessionStderr(Struct):
    """Text that the agent's process has written to stderr.

    Attributes:
        text: At most 64 KiB: the beginning and the end of it. Empty if there is no process.
    """

    text: str


class ControlGroup(Struct):
    """Control group of a process tree. A value is null if the group does not measure or limit it.

    Attributes:
        path: Where it is mounted.
        memory_bytes: Memory in use.
        memory_bytes_peak: The most memory that was in use.
        memory_bytes_max: Limit on the memory.
        processes: Number of processes and threads.
        processes_max: Limit on their number.
        cpu_seconds: Time of the processor that was used.
        cpus_max: Limit on the processors in use.
        out_of_memory_kills: Processes that the kernel has killed because memory ran out.
    """

    path: str
    memory_bytes: int | None
    memory_bytes_peak: int | None
    memory_bytes_max: int | None
    processes: int | None
    processes_max: int | None
    cpu_seconds: float | None
    cpus_max: float | None
    out_of_memory_kills: int | None


class Containment(Struct):
    """Containment of the agent. A member that is null is not restricted.

    Attributes:
        user: User that it runs as.
        limits: Resource limits of each of its processes, by name.
        scrub: Inherited variables that it does not get; null: as its profile says.
        wrap: Prefix of its command, or the name of a sandbox.
        on_open: Command that makes what the session works in.
        on_close: Command that removes it.
        cgroup: Control group of its processes; null if they have none.
        why_not: Why they have none; null if they have one, or if another host owns the session.
    """

    user: str | int | None = None
    limits: dict[str, Limit] | None = None
    scrub: list[str] | None = None
    wrap: str | list[str] | None = None
    on_open: list[str] | None = None
    on_close: list[str] | None = None
    cgroup: ControlGroup | None = None
    why_not: str | None = None


class Why(Session, kw_only=True):
    """A session with everything that explains what it waits for.

    Attributes:
        holder_prompt: Beginning of the prompt of the running turn.
        last_in: Last frame from the agent; null if the last events contain no frame from it.
        last_out: Last frame to the agent; null if the last events contain no frame to it.
        requests: Requests that the agent has not answered.
        asked: Questions that wait for an answer, in full.
        clocks: Watchdogs of the running turn.
        timers: Seconds left of each timer, by name.
        pids: Process ids of the agent's processes.
        tree: Processes in the agent's process tree.
        counters: Counters of the session, by name.
        seconds_since_in: Seconds since the last frame from the agent.
        seconds_since_out: Seconds since the last frame to the agent.
        waits_for_place: Whether the session waits for a free place in the process pool.
        retry: Retry that the running turn waits for; null if the agent works.
        containment: User, limits, environment and prefix of the agent.
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
    retry: Retry | None = None
    containment: Containment


def session_id(key: str) -> str:
    """Derive the session id from a key: the same after a restart."""
    return f"s-{hashlib.blake2b(key.encode(), digest_size=8, person=b'banksman').hexdigest()}"
