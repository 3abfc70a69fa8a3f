"""A session as a file: its whole log (`export`), or an archive for a bug report (`bundle`)."""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator, Awaitable, Callable

from banksman import Ended, execute
from banksman.errors import CommandError
from banksman.server.access.roles import Action
from banksman.server.api import admin_routes, event_routes, session_routes
from banksman.server.api.messages import session_messages as messages
from banksman.server.api.route import Asgi, HttpAnswer, Route, RouteCall
from banksman.server.context import Context
from banksman.server.streams.download import Download
from banksman.server.streams.event_format import StreamForm
from banksman.sessions.session import Session

ZIP = "application/zip"
# The checks of `banksman doctor` take one or two seconds, and longer if a store does not answer.
DOCTOR_SECONDS_MAX = 30.0


async def export(call: RouteCall) -> Asgi:
    """Send the log of a session as a file: secrets were removed before it was stored."""
    session: Session = call.context.session(call.path["id"])
    pieces = call.context.host.export_lines(session.id)
    name = f"{session.id}.ndjson"
    return await _download(call, session, pieces, media_type=StreamForm.NDJSON.value, name=name)


async def bundle(call: RouteCall) -> Asgi:
    """Send an archive for a bug report, without secrets and personal data."""
    query: messages.BundleSession = call.query
    session: Session = call.context.session(call.path["id"])
    pieces = call.context.host.bug_report(session.id, _parts(call, session), text=query.text)
    return await _download(call, session, pieces, media_type=ZIP, name=f"{session.id}.zip")


async def _download(
    call: RouteCall, session: Session, pieces: AsyncGenerator[bytes], *, media_type: str, name: str
) -> Asgi:
    return Download(
        call.context.streams,
        # Here an error is still an answer: the session has no events.
        await anext(pieces),
        pieces,
        media_type=media_type,
        name=name,
        is_allowed=event_routes.guard(call, session),
    )


def _parts(call: RouteCall, session: Session) -> dict[str, Callable[[], Awaitable[bytes]]]:
    """Return what makes the parts beside the log of the session, by their names."""

    def of(handle: Callable[[RouteCall], Awaitable[HttpAnswer]]) -> Callable[[], Awaitable[bytes]]:
        async def make() -> bytes:
            answer = await handle(call)
            return answer.encoded().value

        return make

    async def said() -> bytes:
        # Only the owner of the session has it.
        return session.stderr().encode(errors="replace") if session.is_open else b""

    return {
        "why.json": of(session_routes.why),
        "server.json": of(admin_routes.server),
        "stacks.json": of(admin_routes.show_stacks),
        "doctor.json": lambda: _doctor(call.context),
        "metrics.txt": of(admin_routes.show_metrics),
        "stderr.txt": said,
    }


async def _doctor(context: Context) -> bytes:
    """Return the findings of `banksman doctor`, run by this server's user with its settings."""
    store = context.settings.store
    # In the environment: a command line is visible to every user of the machine.
    env = {} if store is None else {"BANKSMAN_STORE": store}
    argv = [sys.executable, "-m", "banksman", "doctor", "--format", "json"]
    done = await execute(argv, env=env, timeout=DOCTOR_SECONDS_MAX)
    if done.ended is not Ended.EXITED or not done.stdout.total or done.stdout.dropped:
        words = done.stderr.text.strip()[-500:]
        raise CommandError(f"doctor has failed ({done.ended}): {words}")
    return done.stdout.text.encode()


ID = "/v1/sessions/{id}"
ROUTES = (
    Route(
        method="GET",
        path=f"{ID}/export",
        action=Action.READ,
        handle=export,
        summary="Download the whole log of a session, to import it into another store.",
        answer=str,
        media_type=StreamForm.NDJSON.value,
        problems=(422, 429),
    ),
    Route(
        method="GET",
        path=f"{ID}/bundle",
        action=Action.BUNDLE,
        handle=bundle,
        summary="Download an archive for a bug report: log, state, versions, checks, settings.",
        query=messages.BundleSession,
        answer=bytes,
        media_type=ZIP,
        problems=(422, 429),
    ),
)
