"""One HTTP exchange of the CLI with a server: connect, send, read, and translate each failure.

The server listens on a port, on a port with TLS, or on a Unix socket. An error says which side must
act: `NoServer` and its kinds for the connection, `RequestRefused` for a refusal of the server.
`client.py` decides which server is asked, and what is repeated.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import ssl
from collections.abc import Generator, Mapping
from typing import Any, cast
from urllib.parse import urlencode

from banksman import sockets
from banksman.cli.client.discovery import ServerAddress, pid_of
from banksman.cli.client.server_reply import decode, detail_of, hint_of
from banksman.errors import BanksmanError, UsageError

CONNECT_SECONDS_MAX = 10.0
# A live server answers sooner, unless it was asked to wait. Closing and interrupting take as long
# as the ladder.
ANSWER_SECONDS_MAX = 120.0
ANSWER_BYTES_MAX = 512 << 20
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


@contextlib.contextmanager
def exchange(
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


class _BySocket(http.client.HTTPConnection):
    """HTTP connection over a Unix socket. The `Host` header is localhost."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=CONNECT_SECONDS_MAX)
        self._path = path

    def connect(self) -> None:
        self.sock = sockets.connect(self._path, CONNECT_SECONDS_MAX)


def _connection_to(place: ServerAddress) -> http.client.HTTPConnection:
    """Return an unconnected connection. Raises `UsageError` for an unusable CA file."""
    if place.socket is not None:
        return _BySocket(place.socket)
    if not place.is_secure:
        return http.client.HTTPConnection(place.host, place.port, timeout=CONNECT_SECONDS_MAX)
    try:
        context = ssl.create_default_context(cafile=place.cafile)
    except OSError as exc:  # ssl.SSLError is one: a file without a certificate.
        reason = "it has no PEM certificate" if isinstance(exc, ssl.SSLError) else exc.strerror
        hint = "pass the PEM file of the CA with --cafile or BANKSMAN_CAFILE"
        message = f"cannot read the CA certificates in {place.cafile}: {reason}"
        raise UsageError(message, hint=hint) from exc
    return http.client.HTTPSConnection(
        place.host, place.port, timeout=CONNECT_SECONDS_MAX, context=context
    )


def _connect(place: ServerAddress) -> http.client.HTTPConnection:
    connection = _connection_to(place)
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


def read_body(response: http.client.HTTPResponse, place: ServerAddress) -> bytes:
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


def decoded_body(content: bytes, place: ServerAddress) -> Any:
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
        reply = decoded_body(read_body(response, place), place)
        if isinstance(reply, dict):
            said = cast("dict[str, Any]", reply)
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
