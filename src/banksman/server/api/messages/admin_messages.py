"""The server itself and its hosts: health, agents, drain, logins, stacks; and the body of an error."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from banksman.server.api.messages.common_messages import Body, HealthStatus, Seconds


class Agent(Struct):
    """The profile of an agent.

    Attributes:
        name: Name of the profile.
        found: Whether its program is installed here.
        path: Path of its program.
        command: Its command.
        dialect: Protocol that it speaks; empty if the profile is wrong.
        capabilities: What it can do.
        title: Name for people.
        install: How to install it.
        website: Its website.
        source: File of the user's own profile; null if it is the package's.
        overrides: Whether that file replaces one of the package's.
        error: What is wrong with the profile; then nothing else is known of it.
        repairs: Faults of the agent that Banksman works around.
        note: Remark for people.
    """

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
    """The profiles that are known here.

    Attributes:
        agents: The profiles, by name.
    """

    agents: list[Agent]


class Drain(Body):
    """How to shut down.

    Attributes:
        timeout: Seconds that running turns may take; null: as the settings say.
    """

    timeout: Seconds | None = None


class Draining(Struct):
    """A shutdown that has begun.

    Attributes:
        draining: Always true.
    """

    draining: bool


class Login(Body):
    """Credentials of a browser: exactly one of the two.

    Attributes:
        code: The one-time code of a link to the page.
        token: The server's token.
    """

    code: str | None = None
    token: str | None = None


class LoggedIn(Struct):
    """A token for the page of one browser.

    Attributes:
        token: For the header `Authorization: Bearer`.
        expires: When it ends, in seconds since 1970.
    """

    token: str
    expires: int


class LoginCode(Struct):
    """A one-time code: `URL/#code=CODE` logs a browser in.

    Attributes:
        code: Works once.
        seconds: How long the code can be used.
        url: The page's address, as clients on this machine reach it.
    """

    code: str
    seconds: float
    url: str


class Health(Struct):
    """The health of the server.

    Attributes:
        status: The health in one word.
    """

    status: HealthStatus


class Server(Struct):
    """The server, with its limits and settings.

    Attributes:
        version: Version of Banksman.
        pid: Process id.
        started: When it started, in seconds since 1970.
        draining: Whether it is shutting down.
        store: Its store, without credentials.
        settings: Its settings, without secrets.
    """

    version: str
    pid: int
    started: float
    draining: bool
    store: str
    settings: dict[str, Any]


class Task(Struct):
    """A task of the server's event loop.

    Attributes:
        name: Name of the task.
        coroutine: Its coroutine.
        stack: Its stack, innermost line last.
    """

    name: str
    coroutine: str
    stack: list[str]


class Thread(Struct):
    """A thread of the server.

    Attributes:
        name: Name of the thread.
        stack: Its stack, innermost line last.
    """

    name: str
    stack: list[str]


class Stacks(Struct):
    """Stacks of all tasks and threads, for debugging.

    Attributes:
        tasks: The tasks.
        threads: The threads.
        left_out: How many tasks and threads are not shown because there are too many.
    """

    tasks: list[Task]
    threads: list[Thread]
    left_out: dict[str, int] = {}


class Problem(Struct):
    """An error, as RFC 9457 defines it.

    Attributes:
        type: URN of the kind of error.
        title: Kind of error, in one word.
        status: Status of the response.
        detail: What went wrong.
        hint: What to do next; may be empty.
        ids: What it is about: ids of the session, the turn and others.
    """

    type: str
    title: str
    status: int
    detail: str
    hint: str
    ids: dict[str, Any]


class Host(Struct, kw_only=True):
    """A host that shares the store, as it last announced itself.

    Attributes:
        id: Id of the host.
        name: Name of the host.
        pid: Process id.
        labels: Its labels.
        agents: Agents that it has.
        room: How many sessions it takes; 0 if it runs none.
        used: How many sessions it has.
        version: Version of Banksman.
        draining: Whether it is shutting down.
        since: When it started, in seconds since 1970.
        here: Whether it is the host that answers this request.
        silent: Whether it has missed its lease, and its end was not announced.
        front: Whether it serves HTTP.
    """

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
    """The hosts that share the store.

    Attributes:
        hosts: The hosts; none if the store belongs to this machine alone.
    """

    hosts: list[Host]


class HostDraining(Struct):
    """What happens to the sessions of a host that shuts down, as far as it can be told now.

    Attributes:
        draining: Whether it is shutting down.
        sessions: How many sessions it has.
        hosts: Names of the hosts that have room for them, and what they need.
        waiting: How many sessions no host can take. They wait, with all that was accepted in them.
    """

    draining: bool
    sessions: int
    hosts: list[str]
    waiting: int
