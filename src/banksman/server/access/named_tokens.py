"""Named tokens: create, list, revoke and recognise them, in one private file.

`banksman token` writes the file, and every server of the user reads it again when it changes. So a
revocation holds at once, also for a server that was not reachable.

The file has only the SHA-256 of each token. A token has 256 random bits, so its hash can be neither
guessed nor looked up in a table: a salt or a slow hash would add nothing. A given token is compared
with each hash in constant time.

A file that cannot be trusted or read admits no named token.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import ipaddress
import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import msgspec

from banksman.errors import UsageError
from banksman.folders import state_folder
from banksman.server.access.roles import Caller, Role
from banksman.server.http import token_file

log = logging.getLogger("banksman.serve")

PREFIX = "bmt_"
TOKENS_MAX = 1000
FILE_BYTES_MAX = 1 << 20
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_PATTERN = re.compile(r"[\x21-\x7e]{1,100}")


class NamedToken(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An entry of the file. `expires`: seconds since 1970; None: never."""

    name: str
    role: Role
    hash: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
    created: float
    expires: float | None = None
    sessions: tuple[str, ...] = ()
    agents: tuple[str, ...] = ()

    @property
    def is_expired(self) -> bool:
        return self.expires is not None and time.time() >= self.expires

    @property
    def caller(self) -> Caller:
        return Caller(self.name, self.role, self.sessions, self.agents, self.expires)


class _TokenList(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    tokens: tuple[NamedToken, ...]


def default_path() -> Path:
    """Return the path of the file, in the user's state folder."""
    return state_folder() / "named-tokens.json"


# -- the file ------------------------------------------------------------------------------------
def read(path: Path) -> tuple[NamedToken, ...]:
    """Return the tokens of the file, also expired ones; none if it does not exist.

    Raises `UsageError` if the file cannot be trusted or decoded.
    """
    data = token_file.read_private(path, FILE_BYTES_MAX)
    if data is None:
        return ()
    try:
        found = msgspec.json.decode(data, type=_TokenList)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        hint = "restore the file, or remove it and create the tokens again"
        raise UsageError(f"cannot read the tokens in {path}: {exc}", hint=hint) from exc
    if found.version != 1:
        hint = "use the version of Banksman that wrote it"
        raise UsageError(f"cannot read {path}: its version is {found.version}", hint=hint)
    return found.tokens


def create(
    path: Path,
    name: str,
    role: Role,
    *,
    sessions: Sequence[str] = (),
    agents: Sequence[str] = (),
    seconds: float | None = None,
) -> str:
    """Add a token and return it. It cannot be shown again."""
    _check(name, sessions, agents)
    token = PREFIX + secrets.token_urlsafe(token_file.TOKEN_BYTES)
    now = time.time()
    added = NamedToken(
        name=name,
        role=role,
        hash=_hash(token),
        created=now,
        expires=None if seconds is None else now + seconds,
        sessions=tuple(sessions),
        agents=tuple(agents),
    )

    def change(present: tuple[NamedToken, ...]) -> tuple[NamedToken, ...]:
        left = tuple(each for each in present if each.name != name or not each.is_expired)
        if any(each.name == name for each in left):
            hint = f"run `banksman token revoke {name}` first, or choose another name"
            raise UsageError(f"cannot create the token: {name} has one already", hint=hint)
        if len(left) >= TOKENS_MAX:
            hint = "revoke tokens that are not used"
            raise UsageError(f"cannot create the token: there are {len(left)}", hint=hint)
        return (*left, added)

    _change(path, change)
    return token


def revoke(path: Path, name: str) -> None:
    """Remove the token of this name. Servers refuse it from now on."""

    def change(present: tuple[NamedToken, ...]) -> tuple[NamedToken, ...]:
        left = tuple(each for each in present if each.name != name)
        if len(left) == len(present):
            hint = "see `banksman token list`"
            raise UsageError(f"cannot revoke the token: {name!r:.80} has none", hint=hint)
        return left

    _change(path, change)


def check_name(name: str) -> None:
    """Raise `UsageError` if no token can have this name."""
    if _NAME.fullmatch(name) is None:
        hint = "use at most 64 letters, digits and . _ @ -, beginning with a letter or a digit"
        raise UsageError(f"a token cannot have the name {name!r:.80}", hint=hint)


def proxy_of(entry: str) -> tuple[str, str]:
    """Return the name of the token and the address in an entry of `trusted_proxies`.

    Raises `UsageError`.
    """
    name, _, address = entry.rpartition("@")
    try:
        check_name(name)
        return name, str(ipaddress.ip_address(address))
    except (UsageError, ValueError) as exc:
        hint = "use NAME@ADDRESS: the name of the proxy's token, and the IP address of the proxy"
        message = f"invalid entry {entry!r:.100} in trusted_proxies"
        raise UsageError(message, hint=hint, setting="trusted_proxies") from exc


def _check(name: str, sessions: Sequence[str], agents: Sequence[str]) -> None:
    check_name(name)
    for word in (*sessions, *agents):
        if _PATTERN.fullmatch(word) is None:
            hint = "use 1 to 100 visible ASCII characters"
            raise UsageError(f"not a pattern of sessions or agents: {word!r:.80}", hint=hint)


def _change(path: Path, change: Callable[[tuple[NamedToken, ...]], tuple[NamedToken, ...]]) -> None:
    token_file.make_private_folder(path.parent)
    with _locked(path.parent):
        tokens = change(read(path))
        data = msgspec.json.format(msgspec.json.encode(_TokenList(1, tokens)), indent=1)
        # The name always has a whole file.
        os.replace(token_file.write_beside(path, data + b"\n"), path)


@contextmanager
def _locked(folder: Path) -> Generator[None]:
    """Keep other processes from changing the file at the same time."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _hash(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


# -- the server's side ---------------------------------------------------------------------------
class NamedTokens:
    """Recognises the tokens of a file, which is read again when it changes."""

    def __init__(self, path: Path | None) -> None:
        """Read the tokens of this file; None: there are none."""
        self._path = path
        self._tokens: tuple[NamedToken, ...] = ()
        # Identity, modification time and size of the file when it was read.
        self._stamp: tuple[int, ...] | None = None
        # That of a file that cannot be trusted, and was reported. () if it has none.
        self._reported: tuple[int, ...] | None = None

    def caller_of(self, given: str) -> Caller | None:
        """Return the holder of a token; None if it is no valid named token."""
        if not given.startswith(PREFIX):
            return None
        wanted = _hash(given)
        found: NamedToken | None = None
        for token in self._current():
            if hmac.compare_digest(token.hash, wanted):
                found = token
        return None if found is None or found.is_expired else found.caller

    def is_revoked(self, given: str) -> bool:
        """Whether this is a named token that is not valid, or not any more."""
        return given.startswith(PREFIX) and self.caller_of(given) is None

    def _current(self) -> tuple[NamedToken, ...]:
        if self._path is None:
            return ()
        try:
            found = os.stat(self._path)
            stamp = (found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size)
        except FileNotFoundError:
            self._tokens, self._stamp = (), None
            return ()
        except OSError as exc:
            self._distrust(exc, ())
            return ()
        if stamp != self._stamp:
            try:
                self._tokens = read(self._path)
                self._stamp, self._reported = stamp, None
            except (OSError, UsageError) as exc:
                self._distrust(exc, stamp)
        return self._tokens

    def _distrust(self, exc: Exception, stamp: tuple[int, ...]) -> None:
        # Each request reads the file again: the reason may lie outside of it, as in its folder.
        if stamp != self._reported:
            log.warning("named tokens are refused: %s", exc)
        self._tokens, self._stamp, self._reported = (), None, stamp
