"""Delivery of one event to a webhook target: the message, its signature, and the HTTP request.

The signature lets a receiver check that the message comes from this server and is new:
`Banksman-Signature` is `v1=` and the HMAC-SHA256 of `<Banksman-Timestamp>.<body>` in hexadecimal.
The key is the content of the secret file. The timestamp is that of the attempt.

The request goes over a new connection to an address that `webhook_targets` permits. A redirect is
an error: its target was not checked. Nothing but the status of the response is used.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import socket
import ssl
import time
from typing import Any, NamedTuple
from urllib.parse import quote

import msgspec

from banksman import Event, __version__
from banksman.server.ops.webhook_targets import WebhookTarget

# Kinds of the log that are delivered, and the name under which receivers get each. A host that died
# cannot log that; the host that finds its session logs `session.recovered`.
KINDS = {
    "turn.ended": "turn.ended",
    "question.asked": "question.asked",
    "session.recovered": "session.lost",
    "budget.warning": "budget.warning",
}
# Common limit of receivers. A larger message is sent without its data.
BODY_BYTES_MAX = 256 << 10
# For one attempt, from the name's resolution to the status of the response.
ATTEMPT_SECONDS_MAX = 15.0
# A status line with headers that is longer is not a response of an HTTP server.
STATUS_BYTES_MAX = 16 << 10
# Interim responses (1xx) before the response.
INTERIM_MAX = 8
# For one address. A name may have another one that answers.
CONNECT_SECONDS_MAX = 5.0

_encoder = msgspec.json.Encoder()


class DeliveryFailed(Exception):
    """An attempt failed. The text says why, and quotes nothing that the receiver has sent."""


class Delivery(NamedTuple):
    """One message: the same bytes in every attempt.

    `id`: names the event. A receiver drops a message whose id it has seen.
    """

    id: str
    event: str
    body: bytes


def delivery_of(event: Event, position: str) -> Delivery:
    """Build the message for an event of the log, which has one of the kinds in `KINDS`."""
    name = KINDS[event.kind]
    shown: dict[str, Any] = {
        "event": name,
        "session": event.session,
        "turn": event.turn,
        "at": event.at,
        "cursor": event.cursor,
        "position": position,
        "is_truncated": False,
        "data": msgspec.Raw(event.data),
    }
    body = _encoder.encode(shown)
    if len(body) > BODY_BYTES_MAX:
        body = _encoder.encode({**shown, "is_truncated": True, "data": None})
    return Delivery(f"{quote(event.session, safe='')}/{event.cursor}", name, body)


def sign(secret: str, timestamp: str, body: bytes) -> str:
    """Return the value of `Banksman-Signature`."""
    digest = hmac.new(secret.encode(), timestamp.encode() + b"." + body, hashlib.sha256)
    return f"v1={digest.hexdigest()}"


async def attempt(target: WebhookTarget, delivery: Delivery, secret: str) -> None:
    """Send a message once. Raises `DeliveryFailed` unless the receiver answers with 2xx."""
    try:
        async with asyncio.timeout(ATTEMPT_SECONDS_MAX):
            status = await _post(target, delivery, secret)
    except TimeoutError as exc:
        raise DeliveryFailed("no response in time") from exc
    except OSError as exc:
        # The name does not resolve, nothing listens, the certificate is not valid …
        raise DeliveryFailed(f"{type(exc).__name__}: {exc.strerror or exc}") from exc
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError) as exc:
        raise DeliveryFailed("the response is not HTTP") from exc
    if 300 <= status < 400:
        raise DeliveryFailed(f"status {status}: redirects are not followed")
    if not 200 <= status < 300:
        raise DeliveryFailed(f"status {status}")


async def _post(target: WebhookTarget, delivery: Delivery, secret: str) -> int:
    reader, writer = await _connect(target)
    try:
        writer.write(_request(target, delivery, secret))
        await writer.drain()
        for _ in range(INTERIM_MAX + 1):
            line = await reader.readuntil(b"\r\n")
            version, status = line.split(maxsplit=2)[:2]
            if not version.startswith(b"HTTP/1."):
                raise ValueError
            if not 100 <= int(status) < 200:
                return int(status)
            # An interim response, such as 103, has headers and no body. The final one follows.
            while await reader.readuntil(b"\r\n") != b"\r\n":
                pass
        raise ValueError
    finally:
        # The rest of the response is not read: a slow receiver must not keep the connection.
        writer.transport.abort()


async def _connect(target: WebhookTarget) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to the first address of the target that it permits and that accepts.

    Raises the error of the last address if none accepts.
    """
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
    addresses = dict.fromkeys(str(one[4][0]) for one in found)
    tls = await asyncio.to_thread(ssl.create_default_context) if target.is_tls else None
    error: OSError | None = None
    for address in addresses:
        if not target.permits(address):
            continue
        try:
            async with asyncio.timeout(CONNECT_SECONDS_MAX):
                return await asyncio.open_connection(
                    address,
                    target.port,
                    ssl=tls,
                    server_hostname=target.host if tls else None,
                    limit=STATUS_BYTES_MAX,
                )
        except OSError as exc:
            error = exc
    if error is not None:
        raise error
    raise DeliveryFailed(f"{target.host} resolves to no permitted address")


def _request(target: WebhookTarget, delivery: Delivery, secret: str) -> bytes:
    timestamp = str(int(time.time()))
    host = f"[{target.host}]" if ":" in target.host else target.host
    lines = (
        f"POST {target.path} HTTP/1.1",
        f"Host: {host}:{target.port}",
        f"User-Agent: banksman/{__version__}",
        "Content-Type: application/json",
        f"Content-Length: {len(delivery.body)}",
        "Connection: close",
        f"Banksman-Event: {delivery.event}",
        f"Banksman-Delivery: {delivery.id}",
        f"Banksman-Timestamp: {timestamp}",
        f"Banksman-Signature: {sign(secret, timestamp, delivery.body)}",
    )
    return "\r\n".join((*lines, "", "")).encode("ascii") + delivery.body
