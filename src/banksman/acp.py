"""Drop-in for the spawn functions of `agent-client-protocol`, on Banksman's process layer.

    from banksman.acp import spawn_agent_process    # before: from acp import spawn_agent_process

The functions have the parameters and results of that package. The agent is a process of
`banksman.asyncio`, so its whole tree ends with it: after the block, after a cancellation at any
point of it, and after this program was killed. Needs `banksman[acp]`.

At the end of the block the agent's stdin is closed, and the agent has `shutdown_timeout` seconds to
exit. Then it gets TERM, and KILL after the same time, but after at most 5 seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncGenerator, Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

from banksman.asyncio import PIPE, Process, create_subprocess_exec
from banksman.asyncio.process import LIMIT

try:
    from acp import Agent, Client
    from acp.agent.connection import AgentSideConnection
    from acp.client.connection import ClientSideConnection
    from acp.connection import Connection, MethodHandler, StreamObserver
    from acp.transports import default_environment
except ModuleNotFoundError as exc:
    if (exc.name or "").partition(".")[0] != "acp":
        raise
    hint = "run pip install 'banksman[acp]'"
    message = f"banksman.acp needs agent-client-protocol, which is not installed ({hint})"
    raise ModuleNotFoundError(message, name=exc.name) from exc

__all__ = [
    "spawn_agent_process",
    "spawn_client_process",
    "spawn_stdio_connection",
    "spawn_stdio_transport",
]


class _Closable(Protocol):
    async def close(self) -> None: ...


C = TypeVar("C", bound=_Closable)


@contextlib.asynccontextmanager
async def spawn_stdio_transport(
    command: str,
    *args: str,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    stderr: int | None = PIPE,
    limit: int | None = None,
    shutdown_timeout: float = 2.0,
) -> AsyncGenerator[tuple[StreamReader, StreamWriter, Process]]:
    """Start a program and yield its stdout, its stdin and its process.

    `env`: added to the few variables that `acp.transports.default_environment` passes on.
    """
    process = await create_subprocess_exec(
        command,
        *args,
        stdin=PIPE,
        stdout=PIPE,
        stderr=stderr,
        env={**default_environment(), **(env or {})},
        cwd=cwd,
        limit=LIMIT if limit is None else limit,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield process.stdout, process.stdin, process
    finally:
        try:
            process.stdin.close()
            async with asyncio.timeout(shutdown_timeout):
                await process.wait()
        except TimeoutError:
            pass  # The stop below follows in any case, and has no effect on a tree that is gone.
        finally:
            # A cancellation of this wait does not abort the stop: see `Process.stop`.
            await process.stop(grace=shutdown_timeout)


@contextlib.asynccontextmanager
async def spawn_stdio_connection(
    handler: MethodHandler,
    command: str,
    *args: str,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    observers: list[StreamObserver] | None = None,
    **transport_kwargs: Any,
) -> AsyncGenerator[tuple[Connection, Process]]:
    """Start a program and yield a plain JSON-RPC connection to it, and its process."""
    async with (
        spawn_stdio_transport(command, *args, env=env, cwd=cwd, **transport_kwargs) as streams,
        _closing(Connection(handler, streams[1], streams[0], observers=observers)) as connection,
    ):
        yield connection, streams[2]


@contextlib.asynccontextmanager
async def spawn_agent_process(
    to_client: Callable[[Agent], Client] | Client,
    command: str,
    *args: str,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    transport_kwargs: Mapping[str, Any] | None = None,
    **connection_kwargs: Any,
) -> AsyncGenerator[tuple[ClientSideConnection, Process]]:
    """Start an agent and yield the client's connection to it, and its process."""
    how = dict(transport_kwargs or {})
    async with (
        spawn_stdio_transport(command, *args, env=env, cwd=cwd, **how) as (reader, writer, process),
        _closing(
            ClientSideConnection(to_client, writer, reader, **connection_kwargs)
        ) as connection,
    ):
        yield connection, process


@contextlib.asynccontextmanager
async def spawn_client_process(
    to_agent: Callable[[Client], Agent] | Agent,
    command: str,
    *args: str,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    transport_kwargs: Mapping[str, Any] | None = None,
    **connection_kwargs: Any,
) -> AsyncGenerator[tuple[AgentSideConnection, Process]]:
    """Start a client and yield the agent's connection to it, and its process."""
    how = dict(transport_kwargs or {})
    async with (
        spawn_stdio_transport(command, *args, env=env, cwd=cwd, **how) as (reader, writer, process),
        _closing(AgentSideConnection(to_agent, writer, reader, **connection_kwargs)) as connection,
    ):
        yield connection, process


@contextlib.asynccontextmanager
async def _closing(connection: C) -> AsyncGenerator[C]:
    try:
        yield connection
    finally:
        await connection.close()
