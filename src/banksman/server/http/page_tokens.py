"""One-time login codes, and the page tokens that browsers get for them.

The page must not use a cookie. Browsers send a cookie to every port of a host, so a development server at another port
of 127.0.0.1 would receive it and could use it here. The page keeps its token in `localStorage` instead, which belongs
to one origin (scheme, host and port), and sends it as an `Authorization` header.

A link carries a *code* and never the token: browsers write links to their history. A code is used once, within
`CODE_SECONDS_MAX`, and is worthless afterwards.

A *page token* is `bmp_ID.EXPIRES.MAC`. The MAC is keyed by the server's token and covers the port. So the server keeps
no table, a page stays logged in when the server restarts, and another server token ends every page token. Logging out
revokes one page token: its id goes to a file beside the server's token, until it would have expired anyway.
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import hmac
import logging
import os
import re
import secrets
import time
from pathlib import Path

from banksman.errors import UsageError
from banksman.folders import state_folder

CODE_SECONDS_MAX = 600.0
# Codes that were handed out and not used yet. Only clients that are let in can ask for one.
CODES_MAX = 16
PAGE_TOKEN_SECONDS_MAX = 30 * 24 * 3600
# Of those that have not expired. Beyond that the oldest are forgotten first.
REVOKED_MAX = 2_000

_PAGE_TOKEN = re.compile(r"bmp_([A-Za-z0-9_-]{16})\.([0-9]{1,12})\.([A-Za-z0-9_-]{43})")

log = logging.getLogger("banksman.serve")


def revoked_path() -> Path | None:
    """Where revoked page tokens are recorded; None: the user has no home folder."""
    try:
        return state_folder() / "logged-out"
    except UsageError:
        return None


class PageTokens:
    """Hand out codes, exchange each once for a page token, verify and revoke page tokens."""

    def __init__(self, token: str, port: int, revoked: Path | None = None) -> None:
        """`revoked`: the file of revoked ids. Servers of one user share it, and see what the others add."""
        self._key = token.encode("utf-8", "surrogatepass")
        self._port = port
        self._path = revoked
        self._revoked: set[str] = set()
        # Of the file, when it was read.
        self._stamp: tuple[int, int] | None = None
        # By the hash of each code: a lookup then takes a time that says nothing about the codes.
        self._codes: dict[bytes, float] = {}

    # -- codes -------------------------------------------------------------------------------------------------------
    def make_code(self) -> str:
        """A new code. The oldest unused one goes if there are too many."""
        code = secrets.token_urlsafe(16)
        while len(self._codes) >= CODES_MAX:
            del self._codes[next(iter(self._codes))]
        self._codes[_hash(code)] = time.monotonic() + CODE_SECONDS_MAX
        return code

    def take_code(self, code: str) -> bool:
        """Whether this code is valid. It is not any more after this call."""
        deadline = self._codes.pop(_hash(code), None)
        return deadline is not None and time.monotonic() <= deadline

    # -- page tokens -------------------------------------------------------------------------------------------------
    def make(self) -> tuple[str, int]:
        """A new page token, and when it expires (seconds since 1970)."""
        expires = int(time.time()) + PAGE_TOKEN_SECONDS_MAX
        id = secrets.token_urlsafe(12)
        return f"bmp_{id}.{expires}.{self._mac(id, expires)}", expires

    def is_valid(self, given: str) -> bool:
        match = _PAGE_TOKEN.fullmatch(given)
        if match is None:
            return False
        id, expires, mac = match[1], int(match[2]), match[3]
        if not hmac.compare_digest(mac, self._mac(id, expires)):
            return False
        return time.time() <= expires and not self.is_revoked(given)

    def is_revoked(self, given: str) -> bool:
        match = _PAGE_TOKEN.fullmatch(given)
        return match is not None and match[1] in self._known_revoked()

    def revoke(self, given: str) -> None:
        """From now on, and after a restart, this page token is refused."""
        assert self.is_valid(given), "only a page token that was let in can be logged out"
        id, expires, _mac = given.removeprefix("bmp_").split(".")
        self._known_revoked().add(id)
        if self._path is None:
            return
        try:
            _record(self._path, f"{id} {expires}")
        except OSError as exc:
            log.warning("logout not recorded: the page token is valid again after a restart: %s", exc.strerror)

    def _mac(self, id: str, expires: int) -> str:
        digest = hmac.digest(self._key, f"banksman page {self._port} {id} {expires}".encode(), "sha256")
        return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()

    def _known_revoked(self) -> set[str]:
        if self._path is None:
            return self._revoked
        try:
            found = self._path.stat()
            stamp = found.st_mtime_ns, found.st_size
            if stamp != self._stamp:
                lines = self._path.read_text(encoding="ascii", errors="replace").splitlines()
                self._revoked |= {line.split(" ")[0] for line in lines}
                self._stamp = stamp
        except FileNotFoundError:
            pass
        except OSError as exc:
            log.warning("cannot read which page tokens were logged out: %s (path=%s)", exc.strerror, self._path)
        return self._revoked


def _hash(code: str) -> bytes:
    return hashlib.sha256(code.encode("utf-8", "surrogatepass")).digest()


def _record(path: Path, line: str) -> None:
    """Add a line, and drop those that have expired. Servers that do so at the same time wait for each other."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(fd, "r+", encoding="ascii", errors="replace") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        lines = [kept for kept in file.read().splitlines() if not _is_expired(kept)][1 - REVOKED_MAX :]
        file.seek(0)
        file.write("".join(f"{kept}\n" for kept in (*lines, line)))
        file.truncate()


def _is_expired(line: str) -> bool:
    expires = line.partition(" ")[2]
    return not expires.isdecimal() or int(expires) < time.time()
