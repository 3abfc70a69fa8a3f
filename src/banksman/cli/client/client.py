"""HTTP client of the CLI: JSON requests and streams, sent to the owner of the session, and retried.

The client uses only the standard library and one connection per request. It follows no redirect and
uses no proxy: the token goes only to the server that was named or found. If another process of this
machine owns the session, that server refuses, and the request goes to the owner (`OwnerServers` in
`discovery.py`). `exchange.py` sends each request, and `event_stream.py` reads the streams.

If a connection breaks, a request that is safe to repeat (a GET, or one with an `Idempotency-Key`)
is repeated a few times. Other requests are not, because the server may have executed them.
"""

from __future__ import annotations

import contextlib
import http.client
import time
from collections.abc import Callable, Generator, Mapping
from typing import Any
from urllib.parse import quote

from banksman.cli.client.discovery import OwnerRequest, OwnerServers, ServerAddress, owner_of
from banksman.cli.client.exchange import (
    ANSWER_SECONDS_MAX,
    ClientError,
    Lost,
    NoServer,
    Query,
    RequestRefused,
    Silent,
    decoded_body,
    exchange,
    read_body,
)
from banksman.cli.client.server_reply import checked
from banksman.cli.output import ProgressMessage

# A GET takes a moment, plus the time that it was asked to wait.
LOOK_SECONDS_MAX = 30.0
# Pauses before the repetitions of a repeatable request.
RETRY_SECONDS = (0.2, 1.0, 3.0)
# Upper bound of the pause that a server with a limit of requests asks for.
RETRY_AFTER_SECONDS_MAX = 60.0
# The title of its refusal.
_TOO_MANY = "RateLimited"


class Client:
    """Client of one server.

    `find` returns the current address for each request, because a restarted server may have moved.
    """

    def __init__(
        self,
        find: Callable[[], ServerAddress],
        *,
        on_gone: Callable[[ServerAddress], None] | None = None,
    ) -> None:
        """Create a client.

        `on_gone`: called with each address that did not answer, before `find` again.
        """
        self._find = find
        self._on_gone = on_gone
        self._pause: Callable[[float], None] = time.sleep
        self._owners = OwnerServers()

    @property
    def place(self) -> ServerAddress:
        """The current address of the server."""
        return self._find()

    def get(self, path: str, query: Query | None = None) -> Any:
        """Send a GET and return the reply."""
        return self.request("GET", path, query=query)

    def post(
        self, path: str, body: Mapping[str, Any] | None = None, *, key: str | None = None
    ) -> Any:
        """Send a POST and return the reply. `key`: the idempotency key."""
        return self.request("POST", path, body={} if body is None else body, key=key)

    def request(
        self,
        method: str,
        path: str,
        *,
        query: Query | None = None,
        body: Mapping[str, Any] | None = None,
        key: str | None = None,
    ) -> Any:
        """Send a request. Return the decoded reply; None if it has no body.

        `key`: makes a request other than GET safe to repeat. If the server refuses because another
        process of this machine owns the session, the request goes to that process.
        """
        request = OwnerRequest(method, path, query, body, key)
        pauses = iter(RETRY_SECONDS)
        refusal: RequestRefused | None = None
        # The owner for this request only: the request names no session in its path (opening by
        # name).
        once: ServerAddress | None = None
        while True:
            owner = once or self._owners.place(request.session)
            try:
                return self._repeated(request, once)
            except Lost:
                # `_repeated` has retried already, and the server may have executed the request.
                raise
            except NoServer as exc:
                if owner is None:
                    raise
                failure: ClientError = exc
            except RequestRefused as exc:
                found = None if owner is not None else owner_of(exc.title, exc.ids, self._find())
                if found is not None:
                    refusal = exc
                    once = self._owners.remember(request, found)
                    continue
                if owner is None or not _is_going(exc):
                    raise
                self._owners.forget(request.session)
                failure = exc
            # The owner may have died just now. The server that refused can then take the session.
            once = None
            pause = next(pauses, None)
            if pause is None:
                raise failure if refusal is None else _unreachable(refusal) from failure
            self._pause(pause)

    def _repeated(self, request: OwnerRequest, once: ServerAddress | None) -> Any:
        headers = {"Accept": "application/json"}
        if request.key is not None:
            headers["Idempotency-Key"] = request.key
        pauses = iter(RETRY_SECONDS if request.method == "GET" or request.key is not None else ())
        limited = iter(RETRY_SECONDS)
        was_there = False
        while True:
            place = once or self._place_for(request.session)
            try:
                with (
                    ProgressMessage(f"waiting for {place.url}"),
                    exchange(
                        *(place, request.method, request.path),
                        query=request.query,
                        body=request.body,
                        headers=headers,
                        answer_seconds_max=_patience(request),
                    ) as response,
                ):
                    answer = decoded_body(read_body(response, place), place)
                # A reply to DELETE may be empty.
                if answer is not None or request.method != "DELETE":
                    answer = checked(answer, is_look=request.method == "GET")
                self._owners.note_asked(request, place)
                return answer
            except RequestRefused as exc:
                # The server has done nothing of it, so any request may be sent again.
                pause = next(limited, None) if exc.title == _TOO_MANY else None
                if pause is None:
                    raise
                pause = max(pause, min(exc.retry_seconds or 0.0, RETRY_AFTER_SECONDS_MAX))
            except NoServer as exc:
                self._note_gone(place)
                # A server that was never there is reported immediately. One that broke the
                # connection may be restarting.
                was_there = was_there or isinstance(exc, Lost)
                pause = next(pauses, None) if was_there and not isinstance(exc, Silent) else None
                if pause is None:
                    raise
            self._pause(pause)

    def _place_for(self, session: str | None) -> ServerAddress:
        """Return the server for requests about this session.

        If the session's owner died with an accepted ask of this client, that ask is sent again
        first.
        """
        orphan = self._owners.take_orphan(session)
        if orphan is not None:
            try:
                self.request(orphan.method, orphan.path, body=orphan.body, key=orphan.key)
            except NoServer:
                self._owners.put_back(orphan)
            except RequestRefused:
                # The server refuses the ask now. The next request reports the state of the session.
                pass
        return self._owners.place(session) or self._find()

    @contextlib.contextmanager
    def stream(
        self,
        path: str,
        *,
        query: Query | None,
        headers: Mapping[str, str],
        silence_seconds_max: float,
    ) -> Generator[http.client.HTTPResponse]:
        """Yield a 2xx response whose body is not read yet.

        Reading it may raise `Lost`, also after `silence_seconds_max` without a byte.
        """
        place = self._place_for(OwnerRequest("GET", path).session)
        try:
            with exchange(
                place,
                "GET",
                path,
                query=query,
                headers=headers,
                answer_seconds_max=silence_seconds_max,
            ) as response:
                yield response
        except NoServer:
            self._note_gone(place)
            raise

    def _note_gone(self, place: ServerAddress) -> None:
        self._owners.note_gone(place)
        if self._on_gone is not None:
            self._on_gone(place)


def _patience(request: OwnerRequest) -> float:
    """Return the timeout for the reply."""
    if request.method != "GET":
        return ANSWER_SECONDS_MAX
    return LOOK_SECONDS_MAX + float((request.query or {}).get("wait") or 0.0)


def segment(text: str) -> str:
    """Quote an id or a name as one path segment."""
    return quote(text, safe="")


def _is_going(error: RequestRefused) -> bool:
    """Return whether the owner's refusal says that it has released the session or is about to."""
    return error.status == 503 or error.title == "NotOwner"


def _unreachable(refusal: RequestRefused) -> RequestRefused:
    """Return the refusal with advice for an owner that does not answer."""
    kill = f"kill {refusal.ids.get('pid')}"
    hint = f"end that process ({kill}); the next verb then takes the session over"
    return RequestRefused(
        refusal.title,
        f"{refusal.detail}; that process does not answer",
        hint=hint,
        status=refusal.status,
        ids=refusal.ids,
    )
