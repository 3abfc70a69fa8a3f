"""Messages about the server and its hosts: health, agents, drain, login, stacks, errors."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from banksman.server.api.messages.common_messages import Body, HealthStatus, Seconds


class Agent(Struct):
    """The profile of an agent.

    Attributes:
        name: Name of the profile.
        found: Whether its program is installed on this machine.
        path: Path of its program; null if it is not installed.
        command: Command that starts the agent.
        dialect: Protocol that the agent speaks; empty if the profile is invalid.
        capabilities: Features that the agent supports.
        title: Name for display.
        install: How to install the agent.
        website: Website of the agent.
        source: File of a user-defined profile; null for a built-in profile.
        overrides: Whether that file replaces a built-in profile.
        error: Error in the profile; its other members are then unknown.
        repairs: Faults of the agent that Banksman works around.
        note: Remark for display.
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
    """The known profiles.

    Attributes:
        agents: The profiles, sorted by name.
    """

    agents: list[Agent]


class Drain(Body):
    """How to shut down.

    Attributes:
        timeout: Seconds that running turns may take; null: the value of the settings.
        hand_over: Keep what runs for the next server of the same store, instead of finishing it.
        hold_seconds: Seconds that the next server has; null: the value of the settings.
    """

    timeout: Seconds | None = None
    hand_over: bool = False
    hold_seconds: Seconds | None = None


class Draining(Struct):
    """A shutdown that has begun.

    Attributes:
        draining: Always true.
    """

    draining: bool


class Upgrade(Body):
    """How to upgrade the server.

    Attributes:
        command: The command of the new version, without `serve`; null: `banksman` on the PATH of
            the server.
        hold_seconds: Seconds that the new version has to take over; null: the value of the
            settings.
    """

    command: list[str] | None = None
    hold_seconds: Seconds | None = None


class Upgrading(Struct):
    """An upgrade that has begun. The new version has checked that it can take over.

    Attributes:
        version: The new version.
    """

    version: str


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
        token: Page token for the header `Authorization: Bearer`, or the named token of the login.
        expires: When the token expires, in seconds since 1970. 253370764800, in the year 9999: it
            is a named token without an end.
    """

    token: str
    expires: int


class LoginCode(Struct):
    """A one-time code: `URL/#code=CODE` logs a browser in.

    Attributes:
        code: The code, which works once.
        seconds: Lifetime of the code.
        url: Address of the page for clients on this machine.
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
        started: When the server started, in seconds since 1970.
        draining: Whether the server is shutting down.
        store: Address of the store, without credentials.
        settings: All settings, without secrets.
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
        coroutine: Name of its coroutine.
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
        left_out: Number of tasks and of threads that exceed the limits and are not shown.
    """

    tasks: list[Task]
    threads: list[Thread]
    left_out: dict[str, int] = {}


class Problem(Struct):
    """An error, as RFC 9457 defines it.

    Attributes:
        type: URN of the kind of error.
        title: Kind of error, in one word.
        status: HTTP status of the response.
        detail: Description of the error.
        hint: How to fix it or what to do next; may be empty.
        ids: Related ids, such as `session` and `turn`.
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
        labels: Labels of the host.
        agents: Agents that are installed on it.
        room: Maximum number of sessions; 0 if it runs no sessions.
        used: Number of sessions that it has.
        version: Version of Banksman.
        draining: Whether the host is shutting down.
        since: When the host started, in seconds since 1970.
        here: Whether this host answers the request.
        silent: Whether it has been silent for longer than its lease, without a notice of its end.
        front: Whether the host serves HTTP.
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
        hosts: The hosts; an empty list if the store belongs to this machine alone.
    """

    hosts: list[Host]


class HostDraining(Struct):
    """Expected fate of the sessions of a host that shuts down.

    Attributes:
        draining: Whether the host is shutting down.
        sessions: Number of sessions that it has.
        hosts: Names of the hosts that have room for these sessions, with their agents and labels.
        waiting: Number of sessions that no host can take. They wait, and their accepted asks stay
            queued.
    """

    draining: bool
    sessions: int
    hosts: list[str]
    waiting: int
