"""Where the server is, and the token that it asks for.

The place: `--url`, else `BANKSMAN_URL`, else what a running server has left in the state folder, else the default one.
The token: `BANKSMAN_TOKEN`, else what the URL ends with if it is the one that a server prints (`/#token=…`), else the
file in the state folder. It has no flag, because everybody can read those, and it never gets into a message, because
those are copied about. What is in the file is the key to the server of this machine: it is told to that one only, and
not to whatever a URL names.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

from banksman.errors import UsageError

DEFAULT = "http://127.0.0.1:4380"
_LOCAL = ("127.0.0.1", "::1", "localhost")
# A token is a word; the file of one holds nothing that would take longer to read.
_FILE_BYTES_MAX = 64 << 10


@dataclass(frozen=True, slots=True)
class Place:
    """A server's address, taken apart. `prefix`: what is before `/v1`, for one behind a proxy."""

    url: str
    is_secure: bool
    host: str
    port: int
    prefix: str
    token: str | None = field(repr=False)

    @property
    def is_local(self) -> bool:
        return self.host in _LOCAL


def state_folder() -> Path:
    # An empty or a relative one is to be ignored, says the standard of these folders.
    base = os.environ.get("XDG_STATE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".local" / "state") / "banksman"


def find(url: str | None = None) -> Place:
    """The server to talk to, as it is known at this moment. Raises `UsageError` if what was given cannot be one."""
    said = _said_by_server()
    given = url or os.environ.get("BANKSMAN_URL") or said or DEFAULT
    address, token = _without_token(given)
    place = _parsed(address)
    return Place(
        url=place.url,
        is_secure=place.is_secure,
        host=place.host,
        port=place.port,
        prefix=place.prefix,
        token=_token(token, is_ours=place.is_local or address == said),
    )


def _said_by_server() -> str | None:
    try:
        with (state_folder() / "server.json").open("rb") as file:
            said: Any = json.loads(file.read(_FILE_BYTES_MAX))
    except (OSError, ValueError):
        return None  # None has been started here, or it is just being written; there is a default.
    url = cast("dict[str, Any]", said).get("url") if isinstance(said, dict) else None
    return url if isinstance(url, str) and url else None


def _without_token(url: str) -> tuple[str, str]:
    """What a server prints, taken apart. It is cut off before anything else looks at it, so that nothing repeats it."""
    address, _, token = url.partition("#token=")
    return address, token


def _parsed(url: str) -> Place:
    hint = "it looks like http://127.0.0.1:4380"
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise UsageError("the server's URL cannot be read", hint=hint) from None
    if "@" in parts.netloc:
        # Not repeated: what stands there is a secret.
        raise UsageError("a URL with a user or a password in it is not taken", hint="put the token in BANKSMAN_TOKEN")
    if parts.scheme not in ("http", "https") or not host or not url.isascii() or not url.isprintable() or " " in url:
        raise UsageError(f"{url!r} is not the URL of a server", hint=hint)
    if parts.fragment or parts.query:
        # Not repeated: whoever wrote it may have put a secret there.
        raise UsageError("the server's URL has a ? or a # in it", hint="leave away what comes after the port")
    is_secure = parts.scheme == "https"
    return Place(
        url=f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}",
        is_secure=is_secure,
        host=host,
        port=port or (443 if is_secure else 80),
        prefix=parts.path.rstrip("/"),
        token=None,
    )


def _token(in_url: str, *, is_ours: bool) -> str | None:
    token, place = os.environ.get("BANKSMAN_TOKEN", "").strip(), "BANKSMAN_TOKEN"
    if not token:
        token, place = in_url.strip(), "the server's URL"
    if not token and is_ours:
        path = state_folder() / "token"
        try:
            with path.open("rb") as file:
                token, place = file.read(_FILE_BYTES_MAX).decode("ascii", "replace").strip(), str(path)
        except FileNotFoundError:
            return None
        except OSError as exc:
            raise UsageError(f"the token in {path} cannot be read: {exc.strerror}") from exc
    if not token:
        return None
    # Checked here, because whoever makes a header of it would repeat it when he complains.
    if not all("!" <= character <= "~" for character in token):
        raise UsageError(f"what is in {place} is no token", hint="a token is one word of visible ASCII")
    return token
