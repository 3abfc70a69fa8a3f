"""Check the stores: an SQLite file (damage, owners, free space) or NATS servers.

The checks of NATS cover versions, replicas, streams, access, used storage, the stored sessions and
the sync interval. This module turns observations into findings. Most observations come from
`store/sqlite/store_health.py`, `cluster/log/cluster_health.py` and `cluster/log/store_check.py`.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from banksman.cli.doctor import Check, DoctorOptions, Finding, note, ok, wrong
from banksman.cli.doctor.machine import room
from banksman.cli.doctor.places import private, specs, stores
from banksman.cluster import store_address as addresses
from banksman.cluster.store_address import StoreAddress
from banksman.store.sqlite import store_health
from banksman.store.sqlite.store_health import StoreHealth

if TYPE_CHECKING:
    from banksman.cluster.log.cluster_health import ClusterHealth, NatsServer, StorageUse
    from banksman.cluster.log.store_check import StoreContents


# A larger file makes checks and backups slow.
LARGE_BYTES = 8 << 30
_KNOWN = ("sqlite:", "memory:", *addresses.SCHEMES)

# A message of this size holds an event unsplit, with its headers; see `banksman.cluster`.
PAYLOAD_BYTES_MIN = 1 << 20
# How many remains of deletions are listed, of each kind.
REMAINS_MAX = 5
SEE = "see the configuration in docs/cluster.md"
_SETTING = "jetstream { sync_interval: always }"
ALWAYS = f"set {_SETTING} in the configuration of each server, and restart the servers one by one"
# The streams that the first host creates together, and the advice if one of them was deleted.
MADE_AT_ONCE = {
    "-events": (
        "stop all hosts, and restore the stream with its events before a host creates an empty one"
    ),
    "-records": (
        "stop all hosts, and restore the stream with its records before a host creates an empty one"
    ),
    "-hosts": "restart one host: it creates the stream again, and nothing is lost",
}


def checks(which: DoctorOptions) -> list[Check]:
    def store() -> Iterator[Finding]:
        for path in stores(which.store):
            yield from _sqlite_store(path)
        if which.store is not None and not which.store.startswith(_KNOWN):
            message, hint = addresses.why_unusable(which.store)
            yield wrong("store", message, hint)

    return [store, *cluster_checks(which)]


def _sqlite_store(path: Path) -> Iterator[Finding]:
    found = store_health.look(path)
    if found is None:
        yield ok("store", f"{path} (does not exist yet)")
        folder = next(folder for folder in path.parents if folder.is_dir())
        yield room("disk", str(folder))
        return
    yield from _health(found)
    for name in ("", "-wal", "-shm"):
        file = Path(f"{path}{name}")
        if file.exists():
            verdict = private("store", file, os.stat(file), may_be_read=False)
            if verdict.fix:
                yield verdict
    if not os.access(path, os.W_OK) or not os.access(path.parent, os.W_OK):
        yield wrong(
            "store",
            f"cannot write to {path}",
            f"let this user write to it and to its folder {path.parent}",
        )
    yield room("disk", str(path.parent))


def _health(found: StoreHealth) -> Iterator[Finding]:
    size = found.store_bytes + found.log_bytes
    who = f", in use by process {', '.join(map(str, found.hosts))}" if found.hosts else ""
    seen = (
        f"{found.path}, schema {found.schema}, {found.sessions} sessions, "
        f"{size / (1 << 20):.1f} MiB{who}"
    )
    if found.faults:
        fix = (
            "stop all programs that use it, copy it with its -wal and -shm files, "
            "and restore a backup"
        )
        yield wrong("store", f"{found.path} is damaged: {'; '.join(found.faults)}", fix)
    for damaged in found.damaged:
        fix = (
            "restore a backup of the store, or delete the session (banksman close --forget); "
            "the others are intact"
        )
        yield wrong("session", f"{found.path}: {damaged}", fix)
    if found.faults:
        return
    if not found.is_checked:
        seen += (
            "; not checked to the end, "
            f"because that takes longer than {store_health.CHECK_SECONDS_MAX:.0f} s"
        )
        yield note("store", seen, "run sqlite3 FILE 'PRAGMA integrity_check' for the full check")
    elif size > LARGE_BYTES:
        yield note("store", seen, "set keep_bytes or keep_seconds in [serve]")
    else:
        yield ok("store", f"{seen}, intact")


# A full JetStream rejects every write. Warn at the first share, report a fault at the second.
FULL_HIGH, FULL_MAX = 0.8, 0.95


def cluster_checks(which: DoctorOptions) -> list[Check]:
    """Return the checks of stores on NATS."""

    def cluster() -> Iterator[Finding]:
        for spec in specs(which.store):
            if spec is not None and addresses.is_address(spec):
                yield from _nats_store(addresses.parse(spec), which.monitors)

    return [cluster]


def _nats_store(address: StoreAddress, monitors: tuple[str, ...]) -> Iterator[Finding]:
    try:
        from banksman.cluster.log import cluster_health, store_check  # noqa: PLC0415
    except ModuleNotFoundError as exc:
        if (exc.name or "").partition(".")[0] != "nats":
            raise
        yield wrong(
            "cluster",
            f"cannot check {address}: the package nats-py is not installed",
            "pip install 'banksman[cluster]'",
        )
        return
    found = asyncio.run(cluster_health.look(address, monitors=monitors))
    yield from _servers(found)
    if found.entered:
        yield wrong("cluster", f"{address}: {found.entered}", found.hint or SEE)
    else:
        yield from _size(address, found)
        yield from _streams(address, found)
        ids = {server.id for server in found.servers}
        yield from map(
            _room, asyncio.run(cluster_health.look_at_usage(address, ids, monitors=monitors))
        )
        yield from _access(address, found)
        if _has(found, f"{address.prefix}-events") and _has(found, f"{address.prefix}-records"):
            yield from _contents(address.prefix, asyncio.run(store_check.look(address)))
    yield from _syncing(found)


def _servers(found: ClusterHealth) -> Iterator[Finding]:
    for server in found.servers:
        if server.fault:
            fix = "check that nats-server is running there and that its port is reachable"
            yield wrong("cluster", f"{server.place} does not answer: {server.fault}", fix)
            continue
        yield _server(server)


def _server(server: NatsServer) -> Finding:
    version = ".".join(map(str, server.version))
    seen = f"{server.place} is {server.name}, nats-server {version}"
    if not server.is_recent:
        return wrong(
            "cluster",
            seen,
            "upgrade it to 2.12 or newer, which can change several records atomically",
        )
    if not server.has_jetstream:
        return wrong("cluster", f"{seen}, without JetStream", f"turn it on; {SEE}")
    if server.payload_bytes_max < PAYLOAD_BYTES_MIN:
        seen += f", accepts messages of at most {server.payload_bytes_max} bytes"
        return wrong(
            "cluster", seen, f"set max_payload to {PAYLOAD_BYTES_MIN} (the default) or more"
        )
    return ok("cluster", seen)


def _size(address: StoreAddress, found: ClusterHealth) -> Iterator[Finding]:
    size = found.cluster_size
    if size > 1 and len(address.servers) < size:
        seen = f"{address} names {len(address.servers)} of {size} servers"
        fix = "name all (HOST:PORT,HOST:PORT): a host that starts while one is down needs another"
        yield note("cluster", seen, fix)
    if size == 2:
        yield wrong(
            "cluster",
            "with two servers, both must be up",
            "run three servers: then one may be down",
        )


def _streams(address: StoreAddress, found: ClusterHealth) -> Iterator[Finding]:
    for stream in found.streams:
        seen = (
            f"stream {stream.name}, "
            f"{stream.replicas} {'replicas' if stream.replicas > 1 else 'replica'}"
        )
        if not stream.leader:
            fix = "start more than half of its servers; acknowledged data is kept meanwhile"
            yield wrong("cluster", f"{seen}: it has no leader, and accepts nothing", fix)
        elif stream.late:
            yield wrong(
                "cluster",
                f"{seen}: {', '.join(stream.late)} lags or is gone",
                "start it, or let it catch up",
            )
        elif stream.replicas == 1:
            yield _alone(stream.name, found.cluster_size)
        else:
            yield ok("cluster", seen)
        if stream.lease is not None and stream.lease != address.lease:
            seen = (
                f"the lease of hosts of {address} is {stream.lease:g} s, "
                f"but the URL says lease={address.lease:g}"
            )
            yield wrong(
                "cluster",
                seen,
                f"set lease={stream.lease:g}: otherwise two hosts may own one session",
            )
    if found.missing and not found.streams:
        yield ok("cluster", f"{address} has no sessions yet: the first host creates its streams")
    elif found.streams:
        yield from _gone(found)


def _access(address: StoreAddress, found: ClusterHealth) -> Iterator[Finding]:
    """Check that the servers require credentials and use TLS.

    A client that may publish under Banksman's subjects can run programs on every host.
    """
    if found.is_open:
        seen = f"{address} accepts clients without credentials: each can run programs on every host"
        yield wrong(
            "access", seen, f"require an account with a user and a password, or creds=; {SEE}"
        )
    else:
        yield ok("access", f"{address} requires credentials")
    plain = [
        server.place
        for server in found.servers
        if not (server.fault or server.has_tls or _is_here(server.place))
    ]
    if plain and not address.tls:
        seen = (
            f"{', '.join(plain)}: "
            "no TLS, so the network can read credentials and all output of agents"
        )
        yield wrong("access", seen, f"turn TLS on, and use tls:// in the URL; {SEE}")


def _is_here(place: str) -> bool:
    """Return whether the server is reached over loopback, without a network."""
    host = place.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _has(found: ClusterHealth, name: str) -> bool:
    return any(stream.name == name and stream.leader for stream in found.streams)


def _contents(prefix: str, found: StoreContents) -> Iterator[Finding]:
    for seen, fix in found.faults:
        yield wrong("session", seen, fix or SEE)
    for part in found.remains[:REMAINS_MAX]:
        subject = f"{prefix}.ev.{part}"
        seen = (
            f"events under {subject} belong to no session: "
            "a deletion was interrupted, or is in progress"
        )
        yield note("remains", seen, f"nats stream purge {prefix}-events --subject {subject}")
    for name in found.blobs[:REMAINS_MAX]:
        seen = (
            f"the blob {name} belongs to no session: a deletion was interrupted, or is in progress"
        )
        yield note("remains", seen, f"nats object del {prefix}-blobs {name}")
    left = max(0, len(found.remains) - REMAINS_MAX) + max(0, len(found.blobs) - REMAINS_MAX)
    if left:
        yield note("remains", f"{left} more of these", "remove these, and check again")
    if not found.is_checked:
        yield note("session", "not all events were checked: there are too many for one run")
    elif not found.faults:
        yield ok("session", f"{found.sessions} sessions, intact")


def _room(found: StorageUse) -> Finding:
    used, share = _size_in_words(found.used_bytes), found.share
    if found.limit_bytes is None or share is None:
        return ok("storage", f"{found.place} stores {used}, without a limit")
    seen = f"{found.place} stores {used}, {share:.0%} of {_size_in_words(found.limit_bytes)}"
    fix = (
        "raise max_file_store or the account's limit, or delete sessions (banksman close --forget)"
    )
    if share >= FULL_MAX:
        return wrong("storage", f"{seen}: a full server accepts nothing", fix)
    return note("storage", seen, fix) if share > FULL_HIGH else ok("storage", seen)


def _size_in_words(count: int) -> str:
    size, units = float(count), ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.0f} {units[0]}" if units[0] == "bytes" else f"{size:.1f} {units[0]}"


def _gone(found: ClusterHealth) -> Iterator[Finding]:
    for name in found.missing:
        for kind, fix in MADE_AT_ONCE.items():
            if name.endswith(kind):
                yield wrong("cluster", f"stream {name} is missing, but others exist", fix)


def _alone(name: str, cluster_size: int) -> Finding:
    seen = f"stream {name} has no replica: the death of one server stops everything"
    if cluster_size >= 3:
        return wrong("cluster", seen, f"nats stream edit {name} --replicas 3")
    return note("cluster", seen, f"run three servers; {SEE}")


def _syncing(found: ClusterHealth) -> Iterator[Finding]:
    unknown = [each.place for each in found.syncing if each.seconds is None]
    for each in found.syncing:
        if each.seconds == 0:
            yield ok("sync", f"{each.place} syncs before it acknowledges")
        elif each.seconds is not None:
            seen = (
                f"{each.place} syncs every {each.seconds:g} s: "
                "a power cut loses what was acknowledged since then"
            )
            yield wrong("sync", seen, ALWAYS)
    if unknown:
        seen = f"sync interval of {', '.join(unknown)} unknown: no monitoring port answers"
        fix = f"pass --monitor http://HOST:8222, or look for {_SETTING} in the configuration"
        yield note("sync", seen, fix)
