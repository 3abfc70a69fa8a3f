"""Streams and subjects of a store on NATS: names, configuration and creation.

Before use it checks the version of the servers, that all hosts have the same lease, and that
neither events nor records were deleted. It also purges the messages of a session.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Mapping
from typing import Any

from banksman.cluster.nats import Nats
from banksman.cluster.store_address import StoreAddress
from banksman.errors import StoreDamaged, StoreError, Unanswered, UsageError

_PLAIN = re.compile(r"[A-Za-z0-9_-]{1,64}")

log = logging.getLogger("banksman")
# JetStream deduplicates message ids within this time. A later repetition fails by its expected
# sequence.
DUPLICATE_SECONDS = 120.0
# The tombstone of a deleted record is kept this long for hosts that were disconnected.
TOMBSTONE_SECONDS = 3600
VERSION_MIN = (2, 12)
RECORDS_AT_ONCE = 500
# The stream already exists: another host created it concurrently, perhaps with other settings.
NAME_IN_USE = 10058
# No such stream; JetStream is off; the servers cannot hold that many replicas.
NOT_FOUND = 10059
NO_JETSTREAM = (10039, 10076)
TOO_MANY_REPLICAS = (10005, 10074, 10052)
_HINT = "run `banksman doctor --store …`, or see docs/cluster.md"


def token(text: str) -> str:
    """Map a text to a unique subject token.

    A subject gives dots, stars and blanks a meaning. Plain text maps to itself, and any other text
    to a hash.
    """
    if _PLAIN.fullmatch(text):
        return text
    # Plain text never contains "=", so the two kinds cannot collide. Long texts are hashed too: a
    # subject must stay short.
    return "=" + hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:40]


# The streams of a store. The first host creates them, and later hosts use them as they are. `P` is
# the prefix.
#
#     P-events   P.ev.<session>        one message per batch of appends; compare-and-set by subject
#     P-records  P.rec.<what>.<key>    one message per session, name and lease; batches are atomic
#     P-hosts    P.host.<id>           one message per host; expires without a heartbeat for a lease
#     P-work     P.place.<need>.…      sessions that need a host; each is taken by one
#     P-blobs                          payloads that are too large for a message
#
# The event stream is created before the record stream. So events without a record stream, or
# session records without an event stream, are not an interrupted first start. One of the two was
# deleted. To create it again would turn every session into an empty one.
#
# The first three streams republish each stored message to `P.live.…`. Everything is stored in
# files. An acknowledged message survives the death of every server, if the servers are configured
# to sync (docs/cluster.md).


class StreamNames:
    """The names of the streams and subjects under one prefix."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.events = f"{prefix}-events"
        self.records = f"{prefix}-records"
        self.hosts = f"{prefix}-hosts"
        self.work = f"{prefix}-work"
        self.blobs = f"{prefix}-blobs"

    def event(self, session: str) -> str:
        return f"{self.prefix}.ev.{token(session)}"

    def event_wakeup(self, session: str) -> str:
        return f"{self.prefix}.live.ev.{token(session)}"

    def record(self, what: str, key: str) -> str:
        return f"{self.prefix}.rec.{what}.{token(key)}"

    def host(self, id: str) -> str:
        return f"{self.prefix}.host.{id}"


class NatsStreams:
    """Create missing streams, each once."""

    def __init__(self, nats: Nats, address: StoreAddress) -> None:
        self._nats = nats
        self._address = address
        self.names = StreamNames(address.prefix)
        self._made: set[str] = set()

    async def ensure_all(self) -> None:
        """Check the server version, and create the streams that every host needs."""
        found = tuple(int(part) for part in self._nats.server_version.split(".")[:2])
        if found < VERSION_MIN:
            needed = ".".join(map(str, VERSION_MIN))
            version = self._nats.server_version
            raise UsageError(
                f"cannot use {self._address}: its nats-server {version} is too old",
                hint=f"install nats-server {needed} or newer",
            )
        names = self.names
        await self._check_whole()
        await self.ensure(names.events)
        await self.ensure(names.records)
        await self.ensure(names.hosts)

    async def _check_whole(self) -> None:
        """Raise `StoreDamaged` if either the event stream or the record stream was deleted."""
        events = await self._find(self.names.events)
        if events is not None and events["state"]["messages"]:
            if await self._find(self.names.records) is None:
                raise self._damaged(self.names.records, self.names.events)
        elif (
            events is None
            and await self._has_sessions()
            and await self._find(self.names.events) is None
        ):
            # Look again: another host may have created everything between the two reads.
            raise self._damaged(self.names.events, self.names.records)

    def _damaged(self, missing: str, left: str) -> StoreDamaged:
        return StoreDamaged(
            f"cannot use {self._address}: {missing} was deleted, and {left} still has sessions",
            hint=(
                f"restore {missing} from a backup, or delete {left} as well, with all sessions "
                "(docs/cluster.md)"
            ),
            stream=missing,
        )

    async def _has_sessions(self) -> bool:
        """Return whether any session record exists. A deleted record is an empty message."""
        if await self._find(self.names.records) is None:
            return False
        first, left = 1, 1
        while left:
            found, left = await self._nats.read(
                self.names.records, first, f"{self.names.prefix}.rec.session.*", RECORDS_AT_ONCE
            )
            if any(message.data for message in found):
                return True
            first = found[-1].seq + 1 if found else first
            left = left if found else 0
        return False

    async def ensure_anew(self, name: str) -> None:
        """Create a stream that may have been deleted since it was last checked.

        Only for streams that hold nothing of lasting value: hosts and queues.
        """
        self._made.discard(name)
        await self.ensure(name)

    async def ensure(self, name: str) -> None:
        """Create a stream if it is missing."""
        if name in self._made:
            return
        found = await self._find(name)
        if found is None:
            await self._make(name)
        elif name == self.names.hosts:
            self._check_lease(found)
        self._made.add(name)

    async def purge(self, session: str, before: int | None) -> None:
        """Delete the messages of a session before a sequence; None deletes all."""
        body: dict[str, object] = {"filter": self.names.event(session)}
        if before is not None:
            body["seq"] = before
        answer = await self._nats.api(f"STREAM.PURGE.{self.names.events}", body)
        if "error" in answer:
            raise Unanswered(
                f"cannot purge {self.names.events}: {answer['error'].get('description')}"
            )

    async def _find(self, name: str) -> dict[str, Any] | None:
        """Return JetStream's information about a stream; None if it does not exist."""
        found = await self._nats.api(f"STREAM.INFO.{self._stream(name)}", {})
        error = found.get("error")
        if error is None:
            return found
        if error.get("err_code") in NO_JETSTREAM:
            hint = "enable JetStream for this account: see docs/cluster.md"
            raise UsageError(
                f"{self._address} has no JetStream: {error.get('description')}", hint=hint
            )
        if error.get("err_code") != NOT_FOUND:
            raise Unanswered(
                f"cannot get {name} from JetStream: {error.get('description')}", hint=_HINT
            )
        return None

    def _check_lease(self, found: dict[str, Any]) -> None:
        """Raise `UsageError` if the servers count another lease than this host.

        A host with a longer lease would be taken for dead while its processes still run.
        """
        # Compare nanoseconds: a fraction of a second may change when it is converted and back.
        nanoseconds = found["config"].get("max_age", 0)
        kept, wanted = nanoseconds / 1e9, self._address.lease
        if nanoseconds != _nanoseconds(self._address.lease):
            raise UsageError(
                f"{self._address} has a lease of {kept:g} s, this host has one of {wanted:g} s",
                hint=f"pass ?lease={kept:g} as the other hosts do, or use another prefix",
            )

    async def _make(self, name: str) -> None:
        wanted = self._address.replicas
        for replicas in (3, 1) if wanted is None else (wanted,):
            config = {**self._config(name), "name": self._stream(name), "num_replicas": replicas}
            made = await self._nats.api(f"STREAM.CREATE.{config['name']}", config)
            error = made.get("error")
            if error is None or error.get("err_code") == NAME_IN_USE:
                if replicas == 1 and len(self._address.servers) > 1:
                    # This is permanent until an operator edits the stream. Perhaps not all servers
                    # were up.
                    log.warning(
                        "%s has one replica: the death of one server stops it; "
                        "add replicas with `nats stream edit`",
                        name,
                    )
                return
            if (
                wanted is not None
                or replicas == 1
                or error.get("err_code") not in TOO_MANY_REPLICAS
            ):
                raise StoreError(
                    f"cannot create {name}: {error.get('description')}",
                    hint=_HINT,
                    code=error["err_code"],
                )

    def _config(self, name: str) -> dict[str, Any]:
        prefix, names = self._address.prefix, self.names
        common: dict[str, Any] = {
            "storage": "file",
            "retention": "limits",
            "discard": "old",
            "allow_direct": True,
            "duplicate_window": _nanoseconds(DUPLICATE_SECONDS),
        }
        own: Mapping[str, dict[str, Any]] = {
            names.events: {
                "subjects": [f"{prefix}.ev.*"],
                "compression": "s2",
                "republish": {
                    "src": f"{prefix}.ev.*",
                    "dest": _wakeup(prefix, "ev"),
                    "headers_only": True,
                },
            },
            names.records: {
                "subjects": [f"{prefix}.rec.>"],
                "max_msgs_per_subject": 1,
                "allow_atomic": True,
                "allow_msg_ttl": True,
                "republish": {"src": f"{prefix}.rec.>", "dest": f"{prefix}.live.rec.>"},
            },
            names.hosts: {
                "subjects": [f"{prefix}.host.*"],
                "max_msgs_per_subject": 1,
                "max_age": _nanoseconds(self._address.lease),
                "duplicate_window": _nanoseconds(min(DUPLICATE_SECONDS, self._address.lease)),
                "allow_msg_ttl": True,
                # Expiry leaves a marker, so watchers are notified of an end like of any other
                # change.
                "subject_delete_marker_ttl": _nanoseconds(max(60.0, 4 * self._address.lease)),
                "allow_rollup_hdrs": True,
                "republish": {"src": f"{prefix}.host.*", "dest": _wakeup(prefix, "host")},
            },
            names.work: {
                "subjects": [f"{prefix}.place.>"],
                "retention": "workqueue",
                "allow_msg_ttl": True,
            },
            names.blobs: {
                "subjects": [f"$O.{names.blobs}.C.>", f"$O.{names.blobs}.M.>"],
                "discard": "new",
                "allow_rollup_hdrs": True,
            },
        }
        return {**common, **own[name]}

    def _stream(self, name: str) -> str:
        """Return the stream name: the stream of an object store bucket has a prefix."""
        return f"OBJ_{name}" if name == self.names.blobs else name


def _wakeup(prefix: str, what: str) -> str:
    """Return the republish subject; the wildcard token is carried over."""
    return f"{prefix}.live.{what}.{{{{wildcard(1)}}}}"


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
