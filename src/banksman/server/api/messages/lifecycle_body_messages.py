"""Bodies of the events of sessions and processes, one type for each kind, for OpenAPI.

The server decodes nothing with these types: it sends each body as the log has it.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from banksman.server.api.messages.command_messages import Step, Survivor, Swept


class ProcessStartedBody(Struct):
    """A process of the agent was started.

    Attributes:
        process: Number of the process in the session.
        pid: Process id.
        born: Start time from the kernel, which distinguishes processes with the same pid.
    """

    process: int
    pid: int
    born: Any


class ProcessAdoptedBody(Struct):
    """The next host took over the process of a session that was handed over.

    Attributes:
        process: Its number in the session.
        pid: Its pid.
        hold: Name under which it has waited.
        born: What identifies the process, its keeper and its new host.
    """

    process: int
    pid: int
    hold: str
    born: Any


class ProcessExitedBody(Struct, omit_defaults=True):
    """The leader of a process ended.

    Attributes:
        process: Number of the process.
        code: Exit code; null if a signal ended it.
        signal: Number of the signal that ended it; null if it exited.
        out_of_memory: Whether the kernel killed it because memory ran out.
    """

    process: int
    code: int | None
    signal: int | None
    out_of_memory: bool = False


class ProcessStoppedBody(Struct):
    """A process was stopped by the stop ladder.

    Attributes:
        process: Number of the process.
        ladder: Rungs that were taken, each with `at` in seconds since 1970.
    """

    process: int
    ladder: list[Step]


class ProcessSweptBody(Struct, omit_defaults=True):
    """Processes besides the leader had to be ended.

    Attributes:
        process: Number of the process.
        swept: Processes that were ended.
        survivors: Processes that could not be ended.
        drained: False if a process outside the tree still held the output open.
        by: `interrupt`, if the processes were ended after an interrupt.
        after: Turn that was interrupted.
    """

    process: int
    swept: list[Swept]
    survivors: list[Survivor]
    drained: bool
    by: str | None = None
    after: str | None = None


class Left(Struct, omit_defaults=True):
    """A process that was left running.

    Attributes:
        pid: Process id.
        command: Its command line.
        why: Why the process could not be ended.
    """

    pid: int
    command: str
    why: str | None = None


class ProcessLeftBody(Struct):
    """An interrupted turn left processes running, as the session's options say.

    Attributes:
        process: Number of the process.
        left: Processes that are still running.
        after: Turn that was interrupted.
    """

    process: int
    left: list[Left]
    after: str


class ProcessRetiredBody(Struct):
    """A process is stopped while no turn is open.

    Attributes:
        process: Number of the process.
        reason: Why it is stopped: `idle`, `old`, `stale` and others.
    """

    process: int
    reason: str


class ProcessBackedOffBody(Struct):
    """A process crashed, and the next one starts after a delay.

    Attributes:
        crashes: Number of crashes in a row.
        seconds: Seconds until the next start.
    """

    crashes: int
    seconds: float


class SessionOpenedBody(Struct, omit_defaults=True):
    """The session was opened, or opened again with other settings.

    It has further members, as in `POST /v1/sessions`.

    Attributes:
        agent: Name of its agent.
        cwd: Folder in which the agent works.
        env: Names of the environment variables that are set.
        resume: Id of the agent's conversation that the session continues.
        fork: Whether the session continues a copy of that conversation.
        labels: Labels that a host must have to run it.
        fallback: Other agents that may serve it, in order of preference.
        containment: What its agents may use: `user`, `limits`, `scrub`, `wrap`, and the hooks
            `on_open` and `on_close`.
        functions: Hooks that are functions. The log cannot keep them.
        survive: "crash" if its agent survives the death of its host.
        caller: Name of the caller that opened it.
    """

    agent: str
    cwd: str | None
    env: list[str]
    resume: str | None
    fork: bool
    labels: list[str] | None = None
    fallback: list[str] | None = None
    containment: dict[str, Any] | None = None
    functions: list[str] | None = None
    survive: str | None = None
    caller: str | None = None


class SessionSharedBody(Struct):
    """The session is shared with these callers, and with no others.

    Attributes:
        shared: Names of the callers.
        caller: Name of the caller that shared it.
    """

    shared: list[str]
    caller: str | None


class SessionClosedBody(Struct, omit_defaults=True):
    """The session was closed.

    Attributes:
        caller: The caller that closed it; null if none was named.
    """

    caller: str | None = None


class SessionImportedBody(Struct):
    """The events before this one were imported.

    Attributes:
        origin: Id of the session from which they come.
        at: When they were imported, in seconds since 1970.
    """

    origin: str
    at: float


class SessionRecoveredBody(Struct):
    """A host recovered the session after its previous host had died.

    Attributes:
        unknown: Turns whose outcome is `unknown`.
        queued: Turns that still wait.
        swept: Command lines of leftover processes that were ended.
    """

    unknown: list[str]
    queued: list[str]
    swept: list[str]


class SessionConversationBody(Struct, omit_defaults=True):
    """The agent's conversation has a new id.

    Attributes:
        conversation: The new id; null: the next process begins a new conversation.
        spent: Cost of the conversation, if the id is repeated after a failure of the log.
    """

    conversation: str | None
    spent: float | None = None


class SessionSettingBody(Struct):
    """A setting of the agent changed.

    Attributes:
        name: Name of the setting: `model` or `permission_mode`.
        value: New value; null: the value with which the session was opened.
        by: What changed it.
        agent: The agent of the setting, if another agent of the session serves it now.
        caller: The caller that changed it; null if it has no name, or if no caller did.
    """

    name: str
    value: str | None
    by: str
    agent: str | None = None
    caller: str | None = None


class SessionContextLostBody(Struct):
    """The agent has lost the conversation.

    Attributes:
        conversation: Id of the conversation.
        error: Error message of the agent.
    """

    conversation: str | None
    error: str


class SessionContextRestoredBody(Struct):
    """Another host restored the agent's conversation from its transcript.

    Attributes:
        conversation: Id of the conversation.
        turn: Last turn in the transcript.
        missing: Number of later turns, which the agent does not remember.
    """

    conversation: str
    turn: str | None
    missing: int


class SessionStoreReturnedBody(Struct):
    """The store works again.

    Attributes:
        retries: Number of retries until the store worked.
    """

    retries: int


class SessionLeftBody(Struct):
    """The host handed the session over.

    Attributes:
        queued: Waiting turns, which the next host will run.
    """

    queued: list[str]


class SessionHandedOverBody(Struct):
    """The host handed the session over together with its process, whose turn continues.

    Attributes:
        hold: Name under which the process waits for the next host.
        host: Pid of the host that handed it over.
        seconds: How long the process waits. Then it is ended.
        until: The end of that wait, in seconds since 1970.
        process: The number of the process in the session.
        open: Open turns, which the next host continues.
        queued: Waiting turns, which the next host will run.
    """

    hold: str
    host: int
    seconds: float
    until: float
    process: int
    open: list[str]
    queued: list[str]


class SessionFellBackBody(Struct, rename={"before": "from"}):
    """Another agent of the session serves its next turns.

    Attributes:
        from: The agent that served it until now.
        to: The agent that serves it from now on.
        why: `limited` or `missing`: the agent that served it cannot. `available again`: an agent of
            higher preference can. `required`: only this agent can serve the next ask. `removed`:
            the session was opened again without the other one. `return`: the store works again,
            and earlier events about the agents may be lost.
        limited_until: When the limit of the former agent ends, in seconds since 1970; null if it is
            not known to be limited.
    """

    before: str
    to: str
    why: str
    limited_until: float | None
