"""Sessions: opened, listed, looked at, changed."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from banksman.serve.api.messages.parts import Body, Objects, Query, Text, Texts, Variables, Word
from banksman.serve.api.messages.turns import Question, Waiting

# A page of sessions: more is cut.
SESSIONS_MAX = 1000


class OpenSession(Body):
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
    rules: Variables | None = None
    labels: Annotated[list[Word], Meta(max_length=32)] = []  # noqa: RUF012


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
