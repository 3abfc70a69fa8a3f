"""Read-only health check of a NATS cluster (`banksman doctor`): servers, streams, sync, storage.

`store_check.py` checks the content of the streams. This check creates no stream and stores nothing.
First it opens a plain connection to each server. A server introduces itself before it asks for
credentials. So a server that is down, too old or without JetStream is known by name, whatever the
others say. Then it connects like a host, and asks JetStream for the streams.

Clients cannot ask when a server syncs its files. The server reports that on its monitoring port
only. So that port is asked if it is reachable, and the answer counts if it comes from the same
server (`server_id`).
"""

from __future__ import annotations

import asyncio
import json
import os
import urllib.error
import urllib.request
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from typing import Any, cast
from urllib.parse import urlsplit

from msgspec import Struct

from banksman.cluster.log.streams import NOT_FOUND, VERSION_MIN, StreamNames
from banksman.cluster.nats import Nats
from banksman.cluster.store_address import StoreAddress
from banksman.errors import StoreError, Unanswered, Unreachable, UsageError

# A server on the same network introduces itself within a millisecond.
LOOK_SECONDS_MAX = 3.0
# Servers that lost their leader elect another in about five seconds.
ENTER_SECONDS_MAX = 10.0
AGAIN_SECONDS = 0.1
MONITOR_PORT = 8222
# These errors have the code "unavailable", like a leader election. But they last: JetStream is off,
# for this account or on all servers.
NOT_ENABLED = (10039, 10076)
ANSWER_BYTES_MAX = 1 << 20
USAGE_SECONDS_MAX = 5.0


class NatsServer(Struct, frozen=True):
    """A server as it introduced itself.

    `place`: the address as the operator wrote it. `fault`: why the server did not introduce itself;
    then all other fields are empty.
    """

    place: str
    id: str = ""
    name: str = ""
    version: tuple[int, ...] = ()
    has_jetstream: bool = False
    payload_bytes_max: int = 0
    fault: str = ""
    # Client addresses of the other servers of its cluster, as the server reports them.
    others: tuple[str, ...] = ()
    # The server requires TLS on every connection.
    has_tls: bool = False

    @property
    def is_recent(self) -> bool:
        return self.version[: len(VERSION_MIN)] >= VERSION_MIN


class NatsStream(Struct, frozen=True):
    """A stream of the store.

    `late`: names of replicas that are offline or lag. `leader`: empty if no server accepts writes.
    `lease`: only for the stream of hosts, the lease in seconds.
    """

    name: str
    replicas: int
    leader: str
    late: tuple[str, ...] = ()
    lease: float | None = None


class SyncInterval(Struct, frozen=True):
    """The sync interval of one server, from its monitoring port.

    `seconds`: 0 means before every ack; None means unknown.
    """

    place: str
    seconds: float | None = None


class ClusterHealth(Struct, frozen=True):
    """The result of a health check.

    `entered`: why the check could not use JetStream; empty if it could. `missing`: streams that no
    host has created yet. `cluster_size`: the number of known servers.
    """

    servers: tuple[NatsServer, ...]
    entered: str = ""
    hint: str = ""
    streams: tuple[NatsStream, ...] = ()
    missing: tuple[str, ...] = ()
    syncing: tuple[SyncInterval, ...] = ()
    # A client without credentials reaches the same streams.
    is_open: bool = False

    @property
    def cluster_size(self) -> int:
        up = [server for server in self.servers if not server.fault]
        return max([len({server.id for server in up}), *(len(server.others) for server in up)])


async def look(address: StoreAddress, *, monitors: Sequence[str] = ()) -> ClusterHealth:
    """Check the servers and streams of a store.

    `monitors`: monitoring addresses as `http://HOST:PORT`; by default the usual port of each
    server.
    """
    servers = await asyncio.gather(*(_introduced(server) for server in address.servers))
    up = [server for server in servers if not server.fault]
    if not up:
        return ClusterHealth(
            tuple(servers),
            entered="no server answers",
            hint="start nats-server, or pass another address",
        )
    if not any(server.has_jetstream for server in up):
        return ClusterHealth(
            tuple(servers),
            entered="no server has JetStream",
            hint="enable JetStream in their configuration",
        )
    usual = [f"http://{urlsplit(server).hostname}:{MONITOR_PORT}" for server in address.servers]
    syncing = await _syncing(up, monitors or usual)
    try:
        streams, missing = await _streams(address)
    except (StoreError, UsageError) as exc:
        return ClusterHealth(tuple(servers), entered=exc.args[0], hint=exc.hint, syncing=syncing)
    is_open = await _is_open(address, is_made=bool(streams))
    return ClusterHealth(
        tuple(servers), streams=streams, missing=missing, syncing=syncing, is_open=is_open
    )


async def _is_open(address: StoreAddress, *, is_made: bool) -> bool:
    """Return whether a client without credentials reaches the streams of this store.

    A server may map such clients to another account (`no_auth_user`) without these streams. That
    does not count as open. Before the streams exist, any answer of JetStream counts.
    """
    stranger = address.without_credentials
    if stranger == address:
        return True  # The check itself had no credentials.
    nats = Nats(stranger, name="banksman doctor")
    verb = f"STREAM.INFO.{StreamNames(address.prefix).events}" if is_made else "INFO"
    try:
        async with asyncio.timeout(LOOK_SECONDS_MAX):
            await nats.connect()
            return "error" not in await nats.api(verb, {}, timeout=LOOK_SECONDS_MAX)
    except (StoreError, UsageError, TimeoutError):
        return False
    finally:
        await nats.close()


async def _introduced(url: str) -> NatsServer:
    """Read the introduction of one server."""
    parts = urlsplit(url)
    place = f"{parts.hostname}:{parts.port}"
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(LOOK_SECONDS_MAX):
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
            word, _, said = (await reader.readline()).partition(b" ")
        if word != b"INFO":
            return NatsServer(place, fault="not a NATS server, or one that requires TLS first")
        return _server(place, json.loads(said))
    except TimeoutError:
        return NatsServer(place, fault=f"no answer within {LOOK_SECONDS_MAX:g} s")
    except OSError as exc:
        # asyncio words system errors differently. An unknown host name has no errno of the system.
        number = exc.errno or 0
        return NatsServer(
            place, fault=os.strerror(number) if number > 0 else exc.strerror or str(exc)
        )
    except (ValueError, TypeError, AttributeError) as exc:
        return NatsServer(place, fault=f"cannot decode its INFO line: {exc}")
    finally:
        if writer is not None:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()


def _server(place: str, said: dict[str, Any]) -> NatsServer:
    # Versions look like 2.15.1-RC.2. Parts that are not numbers are ignored.
    version = str(said.get("version", "")).partition("-")[0].split(".")
    return NatsServer(
        place,
        id=str(said.get("server_id", "")),
        name=str(said.get("server_name", "")),
        version=tuple(int(part) for part in version if part.isdecimal()),
        has_jetstream=said.get("jetstream") is True,
        payload_bytes_max=int(said.get("max_payload") or 0),
        others=tuple(map(str, said.get("connect_urls") or ())),
        has_tls=said.get("tls_required") is True,
    )


async def _streams(address: StoreAddress) -> tuple[tuple[NatsStream, ...], tuple[str, ...]]:
    names = StreamNames(address.prefix)
    wanted = (names.events, names.records, names.hosts, names.work, f"OBJ_{names.blobs}")
    found: list[NatsStream] = []
    missing: list[str] = []
    nats = Nats(address, name="banksman doctor")
    try:
        async with asyncio.timeout(ENTER_SECONDS_MAX):
            await nats.connect()
            account = await _answer(nats, "INFO")
            if "error" in account:
                words = account["error"].get("description")
                hint = "enable JetStream for this account"
                raise StoreError(f"JetStream refused this account: {words}", hint=hint)
            for name in wanted:
                answer = await _answer(nats, f"STREAM.INFO.{name}")
                if "error" not in answer:
                    found.append(_stream(name, answer, is_hosts=name == names.hosts))
                elif answer["error"].get("err_code") == NOT_FOUND:
                    missing.append(name)
                else:
                    raise StoreError(
                        f"{name}: {answer['error'].get('description')}", hint="see docs/cluster.md"
                    )
    except TimeoutError as exc:
        words = f"JetStream did not answer within {ENTER_SECONDS_MAX:g} s"
        hint = "check the servers: more than half must be up and reach each other"
        raise Unreachable(words, hint=hint) from exc
    finally:
        await nats.close()
    return tuple(found), tuple(missing)


async def _answer(nats: Nats, verb: str) -> dict[str, Any]:
    """Retry until JetStream answers, for example after a leader election.

    The caller sets the deadline.
    """
    while True:
        with suppress(Unanswered):
            answer = await nats.api(verb, {}, timeout=1.0)
            error = _part(answer, "error")
            if error.get("code") != 503 or error.get("err_code") in NOT_ENABLED:
                return answer
        await asyncio.sleep(AGAIN_SECONDS)


def _stream(name: str, answer: dict[str, Any], *, is_hosts: bool) -> NatsStream:
    config, cluster = answer["config"], _part(answer, "cluster")
    replicas: list[dict[str, Any]] = cluster.get("replicas") or []
    late = [str(each["name"]) for each in replicas if each.get("offline") or not each["current"]]
    return NatsStream(
        name,
        replicas=config["num_replicas"],
        # A single server is the leader and does not report one.
        leader=str(cluster.get("leader") or "") if cluster else "itself",
        late=tuple(late),
        lease=config["max_age"] / 1e9 if is_hosts else None,
    )


async def _syncing(
    servers: Sequence[NatsServer], monitors: Sequence[str]
) -> tuple[SyncInterval, ...]:
    answers = await asyncio.gather(*(asyncio.to_thread(varz, monitor) for monitor in monitors))
    known = {str(answer.get("server_id")): answer for answer in answers if answer is not None}
    return tuple(
        SyncInterval(server.place, _sync_seconds(known.get(server.id))) for server in servers
    )


def varz(monitor: str) -> dict[str, Any] | None:
    """Return what a monitoring port reports; None without an answer."""
    if not monitor.startswith(("http://", "https://")):
        return None
    # Never use a proxy: it may answer in place of a dead server.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{monitor.rstrip('/')}/varz", timeout=LOOK_SECONDS_MAX) as answer:
            found: object = json.loads(answer.read(ANSWER_BYTES_MAX))
    except (OSError, ValueError, urllib.error.URLError):
        return None
    return cast("dict[str, Any]", found) if isinstance(found, dict) else None


def _sync_seconds(said: dict[str, Any] | None) -> float | None:
    config = _part(_part(said or {}, "jetstream"), "config")
    if config.get("sync_always") is True:
        return 0.0
    interval = config.get("sync_interval")
    return interval / 1e9 if isinstance(interval, int) else None


def _part(said: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a nested object; empty if it is missing, because servers omit what they lack."""
    return said.get(name) or {}


# Storage use of JetStream, for the doctor. A full store accepts nothing.
#
# There are two limits. The account may have one, and reports it to every client. Each server always
# has one, its share of the disk (`max_file_store`), and reports it on its monitoring port only.


class StorageUse(Struct, frozen=True):
    """The storage that an account or a server uses.

    `place`: which account or server. `limit_bytes`: None if there is no limit, or it is unknown.
    """

    place: str
    used_bytes: int
    limit_bytes: int | None

    @property
    def share(self) -> float | None:
        return None if not self.limit_bytes else self.used_bytes / self.limit_bytes


async def look_at_usage(
    address: StoreAddress, servers: Collection[str], *, monitors: Sequence[str] = ()
) -> tuple[StorageUse, ...]:
    """Return the storage use of the account and of the servers.

    `servers`: ids of the servers that count, because another cluster may answer on a port.
    `monitors`: as in `look`. Raises `StoreError` if the connection is refused or no server answers.
    """
    usual = [f"http://{urlsplit(server).hostname}:{MONITOR_PORT}" for server in address.servers]
    answers = await asyncio.gather(
        *(asyncio.to_thread(varz, monitor) for monitor in monitors or usual)
    )
    known = {str(answer.get("server_id")): answer for answer in answers if answer is not None}
    told = (each for id, answer in known.items() if id in servers for each in _of_server(answer))
    return (*_of_account(await _account(address)), *told)


async def _account(address: StoreAddress) -> dict[str, Any]:
    nats = Nats(address, name="banksman doctor")
    try:
        async with asyncio.timeout(USAGE_SECONDS_MAX):
            await nats.connect()
            return await nats.api("INFO", {}, timeout=USAGE_SECONDS_MAX)
    except TimeoutError as exc:
        raise Unreachable(f"JetStream did not answer within {USAGE_SECONDS_MAX:g} s") from exc
    finally:
        await nats.close()


def _of_account(said: dict[str, Any]) -> Iterator[StorageUse]:
    """Return the use of an account. It has a limit per number of replicas, or one in total."""
    if "error" in said:
        return
    for name, tier in _part(said, "tiers").items() or [("", said)]:
        # The account reports -1 without a limit.
        limit = _number(_part(tier, "limits").get("max_storage"))
        yield StorageUse(
            f"this account{', ' * bool(name)}{name}",
            _number(tier.get("storage")),
            limit if limit > 0 else None,
        )


def _of_server(said: dict[str, Any]) -> Iterator[StorageUse]:
    jetstream = _part(said, "jetstream")
    limit = _number(_part(jetstream, "config").get("max_storage"))
    if limit > 0:
        used = _number(_part(jetstream, "stats").get("storage"))
        yield StorageUse(f"server {said.get('server_name') or said.get('server_id')}", used, limit)


def _number(said: Any) -> int:
    return said if isinstance(said, int) else 0
