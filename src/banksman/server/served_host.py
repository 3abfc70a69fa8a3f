"""Open a host, continue what the last server of its store has handed over, and serve it over HTTP.

`banksman serve`, `banksman host` and a verb with an embedded host share this part. It installs no
signal handler, prints and announces nothing, and makes no token.

A hand-over holds the agents still until this host has taken them over, and most of that time is the
import of modules. So this module and those it imports need nothing of HTTP: `http_service.py`, with
the routes, uvicorn and the cluster, is imported after the take-over. If that or the rest of the
start fails, this host hands over what it has taken, so a broken version loses nothing.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from banksman import Host
from banksman.errors import UsageError
from banksman.server.graceful_shutdown import StartDrain
from banksman.server.http.start_policy import StartPolicy
from banksman.server.http.tls import ServerCertificate
from banksman.server.ops import server_hand_over, webhooks
from banksman.server.server_settings import STORE_SETTING, ServerSettings

if TYPE_CHECKING:
    from banksman.server.context import Context

# The packages that the application imports. A missing one is an error of the start, before anything
# is taken over.
PACKAGES = ("starlette", "uvicorn", "httptools", "prometheus_client")
for _package in PACKAGES:
    if find_spec(_package) is None:
        raise ModuleNotFoundError(f"No module named {_package!r}", name=_package)

# Prefix of the address of a host that listens on a Unix socket only.
UNIX = "unix:"


@asynccontextmanager
async def serving(
    settings: ServerSettings,
    listeners: Sequence[socket.socket],
    *,
    token: str,
    port: int,
    address: str,
    drain: StartDrain,
    takes_over: bool = False,
    certificate: ServerCertificate | None = None,
) -> AsyncGenerator[Context]:
    """Open a host and serve its HTTP application until the context exits.

    `address`: where other processes find this host. `port`: 0 without one. `drain`: called when a
    client requests the shutdown over HTTP. `takes_over`: continue what the last server of this
    store has handed over, before the first client can ask for it. `certificate`: of the port; None
    for plain HTTP.
    """
    if settings.otel_endpoint is not None and not _has_telemetry():
        hint = "pip install 'banksman[otel]', or leave otel_endpoint out"
        raise UsageError("cannot send spans: OpenTelemetry is not installed", hint=hint)
    policy = StartPolicy(settings)
    budget, caller_budgets = settings.shared_budgets()
    # Answers come from HTTP clients, and those see the open questions. The log must not warn that a
    # question waits for an answer.
    logging.getLogger("banksman.questions").setLevel(logging.ERROR)
    # Webhooks are sent by the servers with a port. A host in a verb is there for its verb only.
    webhook_secret = webhooks.load_secret(settings) if port else None
    keys = [] if webhook_secret is None else [webhook_secret]
    async with Host(
        store_of(settings),
        secrets=[token, *keys, *settings.secrets],
        processes_max=settings.processes_max,
        address=address,
        permit=policy.reopen,
        user_helper=settings.user_helper,
        budget=budget,
        caller_budgets=caller_budgets,
        survive=settings.survive,
        hold_seconds=settings.hold_seconds,
    ) as host:
        if takes_over:
            await server_hand_over.take(host, settings)
        serves = False
        try:
            # In a thread: what was taken over is served meanwhile.
            await asyncio.to_thread(import_module, "banksman.server.http_service")
            from banksman.server import http_service  # noqa: PLC0415

            context = http_service.context_of(host, settings, drain, policy)
            context.url = "" if port == 0 else address
            async with http_service.serving(
                context,
                listeners,
                token=token,
                port=port,
                certificate=certificate,
                webhook_secret=webhook_secret,
            ):
                serves = True
                yield context
        except BaseException as exc:
            if takes_over and not serves:
                await server_hand_over.give_back(host, settings, exc)
            raise


def _has_telemetry() -> bool:
    try:
        return find_spec("opentelemetry.sdk") is not None
    except ModuleNotFoundError:
        return False


def store_of(settings: ServerSettings) -> str | None:
    """Return the store address with the retention settings, unless the address has its own.

    A store in memory keeps everything and takes no settings.
    """
    # Without a path the store is the file in the state folder.
    store = settings.store or "sqlite:"
    if not store.startswith("sqlite:"):
        return store
    found = STORE_SETTING.search(store)
    own = "" if found is None else store[found.end() :]
    keeps = [
        f"{name}={value}"
        for name, value in (
            ("keep_bytes", settings.keep_bytes),
            ("keep_seconds", settings.keep_seconds),
        )
        if value is not None and f"&{name}=" not in f"&{own}"
    ]
    if not keeps:
        return settings.store
    return f"{store}{'?' if found is None else '&'}{'&'.join(keeps)}"
