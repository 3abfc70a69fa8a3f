"""HTTP client of the CLI: JSON requests and streams, with errors that say which side must act.

The client uses only the standard library and one connection per request. It follows no redirect and
uses no proxy: the token goes only to the server that was named or found. If another process of this
machine owns the session, that server refuses, and the request goes to the owner (`OwnerServers` in
`discovery.py`). `event_stream.py` reads the streams.

If a connection breaks, a request that is safe to repeat (a GET, or one with an `Idempotency-Key`)
is repeated a few times. Other requests are not, because the server may have executed them.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import ssl
import time
from collections.abc import Callable, Generator, Mapping
from typing import Any, cast
from urllib.parse import quote, urlencode

from banksman.cli.client.connections import CONNECT_SECONDS_MAX, connection_to
from banksman.cli.client.discovery import (
    OwnerRequest,
    OwnerServers,
    ServerAddress,
    owner_of,
    pid_of,
)
from banksman.cli.client.server_reply import checked, decode, detail_of, hint_of
from banksman.cli.output import ProgressMessage
from banksman.errors import BanksmanError

# A live server answers sooner, unless it was asked to wait. Closing and interrupting take as long
# as the ladder.
ANSWER_SECONDS_MAX = 120.0
# A GET takes a moment, plus the time that it was asked to wait.
LOOK_SECONDS_MAX = 30.0
ANSWER_BYTES_MAX = 512 << 20
# Pauses before the repetitions of a repeatable request.
RETRY_SECONDS = (0.2, 1.0, 3.0)
# Upper bound of the pause that a server with a limit of requests asks for.
RETRY_AFTER_SECONDS_MAX = 60.0
# The title of its refusal.
_TOO_MANY = "RateLimited"
# The text of a server for a path that it does not have.
_NO_PATH = "this path does not exist"


Query = Mapping[str, str | int | float | None]


class ClientError(BanksmanError):
    """The request failed: the server was not reached, or it refused."""


class NoServer(ClientError):
    """No server answers at the address, or it is not Banksman."""


class Lost(NoServer):
    """The connection broke after it was made. The server may have executed the request."""


class Silent(Lost):
    """The server accepted the connection but sent nothing before the timeout. Not repeated."""


class RequestRefused(ClientError):
    """The server refused the request, with its explanation."""

    def __init__(
        self,
        title: str,
        detail: str,
        *,
        hint: str = "",
        status: int,
        ids: Mapping[str, Any] | None = None,
    ):
        super().__init__(detail or title, hint=hint)
        self.title = title
        self.detail = detail
        self.status = status
        self.retry_seconds: float | None = None
        self.ids = dict(ids or {})


class NotLetIn(RequestRefused):
    """The token is missing or wrong."""


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
                    _exchange(
                        *(place, request.method, request.path),
                        query=request.query,
                        body=request.body,
                        headers=headers,
                        answer_seconds_max=_patience(request),
                    ) as response,
                ):
                    answer = _decoded(_read(response, place), place)
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
            with _exchange(
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


@contextlib.contextmanager
def _exchange(
    place: ServerAddress,
    method: str,
    path: str,
    *,
    query: Query | None,
    headers: Mapping[str, str],
    body: Mapping[str, Any] | None = None,
    answer_seconds_max: float = ANSWER_SECONDS_MAX,
) -> Generator[http.client.HTTPResponse]:
    """Send one request and yield a 2xx response whose body is not read yet.

    Raises `RequestRefused` for another status, and `NoServer` or `Lost` for a failed connection.
    """
    connection = _connect(place)
    try:
        with _losses(place):
            assert isinstance(connection.sock, socket.socket)
            connection.sock.settimeout(answer_seconds_max)
            target = _target(place, path, query)
            response = _ask(
                connection, method, target, token=place.token, body=body, headers=headers
            )
        # The response owns the socket now, so closing the connection does not close it.
        with contextlib.closing(response):
            if not 200 <= response.status < 300:
                raise _problem(response, place)
            with _losses(place):
                yield response
    finally:
        connection.close()


def _connect(place: ServerAddress) -> http.client.HTTPConnection:
    connection = connection_to(place)
    try:
        connection.connect()
    except (ConnectionRefusedError, FileNotFoundError) as exc:
        if not place.is_local:
            # Only this machine's servers can be started from here.
            raise NoServer(
                f"no server at {place.url}: {exc.strerror}",
                hint="check --url and BANKSMAN_URL, and start the server on that machine",
            ) from exc
        raise NoServer(f"no server at {place.url}: start one with banksman serve") from exc
    except TimeoutError as exc:
        raise NoServer(f"no answer from {place.url} within {CONNECT_SECONDS_MAX:.0f} s") from exc
    except ssl.SSLCertVerificationError as exc:
        hint = "pass the CA of the server with --cafile, and a URL with a name of its certificate"
        reason = f"its certificate is not trusted: {exc.verify_message}"
        raise NoServer(f"cannot use the server at {place.url}: {reason}", hint=hint) from exc
    except ssl.SSLError as exc:
        hint = "check --url: does the server speak https?"
        raise NoServer(f"cannot use the server at {place.url}: no TLS", hint=hint) from exc
    except (OSError, UnicodeError) as exc:
        reason = getattr(exc, "strerror", None) or str(exc)
        raise NoServer(f"no server at {place.url}: {reason}") from exc
    return connection


def _ask(
    connection: http.client.HTTPConnection,
    method: str,
    target: str,
    *,
    token: str | None,
    body: Mapping[str, Any] | None,
    headers: Mapping[str, str],
) -> http.client.HTTPResponse:
    every = {"Connection": "close", "User-Agent": "banksman", **headers}
    if token is not None:
        every["Authorization"] = f"Bearer {token}"
    content = None
    if body is not None:
        every["Content-Type"] = "application/json"
        # ASCII: a terminal may deliver a lone surrogate. Escaped, it reaches the server, which
        # rejects it with a clear error.
        content = json.dumps(body).encode()
    try:
        connection.request(method, target, body=content, headers=every)
    except (BrokenPipeError, ConnectionResetError):
        # The server stopped reading, perhaps because the body is too large. It may have sent a
        # reply with the reason before that.
        pass
    return connection.getresponse()


@contextlib.contextmanager
def _losses(place: ServerAddress) -> Generator[None]:
    """Translate failures of an established connection."""
    try:
        yield
    except TimeoutError as exc:
        pid = pid_of(place)
        server = "the server" if pid is None else f"the server (pid {pid})"
        hint = f"{server} may be stopped or busy; see its log"
        raise Silent(f"{place.url} does not answer", hint=hint) from exc
    except (http.client.RemoteDisconnected, http.client.IncompleteRead, ConnectionError) as exc:
        raise Lost(
            f"the connection to {place.url} was lost", hint="check that the server is still running"
        ) from exc
    except http.client.HTTPException as exc:
        if isinstance(exc, http.client.BadStatusLine) and "HTTP/1.".startswith(
            str(exc.args[0])[:7]
        ):
            raise Lost(
                f"the connection to {place.url} was lost",
                hint="check that the server is still running",
            ) from exc
        # The text of this exception would repeat the bytes that the other side sent.
        reason = "it does not speak HTTP"
        raise NoServer(
            f"cannot use the server at {place.url}: {reason}", hint="check --url and BANKSMAN_URL"
        ) from exc
    except OSError as exc:
        raise Lost(f"the connection to {place.url} was lost: {exc.strerror or exc}") from exc


def _target(place: ServerAddress, path: str, query: Query | None) -> str:
    said = {name: value for name, value in (query or {}).items() if value is not None}
    return f"{place.prefix}{path}{'?' if said else ''}{urlencode(said)}"


def _read(response: http.client.HTTPResponse, place: ServerAddress) -> bytes:
    content = response.read(ANSWER_BYTES_MAX + 1)
    if len(content) > ANSWER_BYTES_MAX:
        raise NoServer(
            f"cannot read the reply of {place.url}: it is larger than {ANSWER_BYTES_MAX} bytes"
        )
    # A read with a limit does not notice an early end, so the remaining length is checked. A
    # response that was cut in its header has no body at all.
    is_said_empty = response.status == 204 or response.headers.get("Content-Length") == "0"
    if response.length or (not content and not is_said_empty):
        raise Lost(
            f"the connection to {place.url} was lost", hint="check that the server is still running"
        )
    return content


def _decoded(content: bytes, place: ServerAddress) -> Any:
    if not content:
        return None
    try:
        return decode(content)
    except (ValueError, RecursionError) as exc:
        reason = "it is not Banksman"
        raise NoServer(
            f"cannot use the server at {place.url}: {reason}", hint="check --url and BANKSMAN_URL"
        ) from exc


def _path_hint(place: ServerAddress) -> str:
    """Return the hint for a path that the server does not have. Verbs send only known paths."""
    if place.prefix:
        return f"remove {place.prefix} from --url or BANKSMAN_URL, unless a proxy needs it"
    return "check that --url or BANKSMAN_URL names a Banksman server of this version"


def _problem(response: http.client.HTTPResponse, place: ServerAddress) -> RequestRefused:
    """Build the error for a refusal, also for one from a proxy or another program."""
    said: dict[str, Any] = {}
    with contextlib.suppress(ClientError), _losses(place):
        decoded = _decoded(_read(response, place), place)
        if isinstance(decoded, dict):
            said = cast("dict[str, Any]", decoded)
    title = str(said.get("title") or http.client.responses.get(response.status, "Refused"))
    detail = str(said.get("detail") or f"{place.url} answers {response.status} {title}")
    detail = detail_of(detail)
    hint = hint_of(str(said.get("hint") or ""))
    ids = cast("dict[str, Any]", said["ids"]) if isinstance(said.get("ids"), dict) else {}
    kind = RequestRefused
    if response.status == 401:
        kind = NotLetIn
        if place.token is None:
            limit = "the token in the state folder is only for the server that this user runs"
            hint = f"set BANKSMAN_TOKEN; {limit}"
        else:
            hint = f"check the token in {place.token_from}: it is for another server"
    elif response.status == 404 and (not said or detail == _NO_PATH):
        hint = _path_hint(place)
    problem = kind(title, detail, hint=hint, status=response.status, ids=ids)
    after = response.headers.get("Retry-After", "")
    if after.isascii() and after.isdigit() and len(after) < 6:
        problem.retry_seconds = float(after)
    return problem
