"""`banksman doctor --store nats://…` reports each fault of a cluster by the name of its server, with a fix."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tests.cluster.certificates import certificate
from tests.cluster.lines import until
from tests.cluster.log.test_cluster_log import opened
from tests.store.kit import Writer, known

from banksman.cli.doctor import stores
from banksman.cluster.log.cluster_health import ClusterHealth, NatsServer
from banksman.cluster.log.streams import NatsStreams
from banksman.cluster.nats import Nats
from banksman.cluster.store_address import parse
from banksman.errors import Unanswered
from banksman.testing.nats_servers import Servers, free_ports

pytestmark = pytest.mark.thorough

SECONDS_MAX = 60.0
NAMES = ("access", "cluster", "remains", "session", "store", "sync")


def doctor(store: str, *words: str) -> list[tuple[str, str, str]]:
    """Return verdict, finding and fix of every check of a store."""
    done = subprocess.run(
        [sys.executable, "-m", "banksman", "doctor", "--json", "--store", store, *words],
        check=False,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
    )
    assert done.stdout, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == (0 if found["well"] else 1)
    return [(each["verdict"], each["seen"], each["fix"] or "") for each in found["checks"] if each["name"] in NAMES]


def doctor_in_time(store: str, *words: str) -> list[tuple[str, str, str]]:
    """Return the findings as soon as no replica lags. A new replica catches up in its own time."""
    deadline = time.monotonic() + SECONDS_MAX
    while True:
        found = doctor(store, *words)
        if time.monotonic() > deadline or not any("lags or is gone" in seen for _, seen, _ in found):
            return found


def by_monitors(servers: Servers) -> list[str]:
    return [word for monitor in servers.monitors() for word in ("--monitor", monitor)]


def of(found: list[tuple[str, str, str]], *parts: str) -> tuple[str, str]:
    """Return verdict and fix of the one finding that contains all parts."""
    lines = [(verdict, fix) for verdict, seen, fix in found if all(part in seen for part in parts)]
    assert len(lines) == 1, found
    return lines[0]


def wait_missed(servers: Servers, stream: str, gone: int) -> None:
    """Wait until the leader of the stream has noticed that a replica does not answer."""
    deadline = time.monotonic() + SECONDS_MAX
    while time.monotonic() < deadline:
        seen = servers.look(servers.leader_of(stream), "/jsz?accounts=true&streams=true&limit=1000") or {}
        accounts: list[dict[str, Any]] = seen.get("account_details") or []
        for each in (each for account in accounts for each in account.get("stream_detail") or ()):
            if each["name"] == stream:
                peers: list[dict[str, Any]] = each["cluster"].get("replicas") or []
                if any(peer["name"] == f"n{gone}" and not peer["current"] for peer in peers):
                    return
    raise AssertionError(f"nobody has missed node {gone}")


async def make_streams(store: str) -> None:
    """Make the streams as the first host does."""
    address = parse(store)
    nats = Nats(address, name="test")
    await nats.connect()
    try:
        async with asyncio.timeout(SECONDS_MAX):
            while True:
                # On a busy machine, a server that has just started may take longer than the limit for an answer.
                with contextlib.suppress(Unanswered):
                    return await NatsStreams(nats, address).ensure_all()
    finally:
        await nats.close()


def test_doctor_of_a_healthy_cluster_reports_ok(nats_three: Servers, prefix: str) -> None:
    store = nats_three.store(prefix)
    asyncio.run(make_streams(store))
    found = doctor_in_time(store, *by_monitors(nats_three))
    assert {verdict for verdict, seen, _ in found if "without credentials" not in seen} == {"ok"}
    for url in nats_three.urls():
        assert of(found, f"{url.removeprefix('nats://')} is n", "nats-server 2.") == ("ok", "")
        assert of(found, f"{url.removeprefix('nats://')} syncs before it acknowledges") == ("ok", "")
    assert of(found, f"stream {prefix}-events, 3 replicas") == ("ok", "")


def test_doctor_makes_no_stream(nats_one: Servers, prefix: str) -> None:
    for _ in range(2):
        assert of(doctor(nats_one.store(prefix)), "has no sessions yet")[0] == "ok"


async def delete_stream(store: str, name: str) -> None:
    nats = Nats(parse(store), name="test")
    await nats.connect()
    try:
        assert (await nats.api(f"STREAM.DELETE.{name}", {})).get("success")
    finally:
        await nats.close()


def test_doctor_reports_a_deleted_stream(nats_one: Servers, prefix: str) -> None:
    store = nats_one.store(prefix)
    for kind, fix in (("hosts", "restart one host"), ("events", "stop all hosts"), ("records", "stop all hosts")):
        asyncio.run(make_streams(store))
        asyncio.run(delete_stream(store, f"{prefix}-{kind}"))
        verdict, said = of(doctor(store), f"stream {prefix}-{kind} is missing")
        assert verdict == "wrong"
        assert fix in said


def test_doctor_reports_streams_without_a_replica(nats_one: Servers, nats_three: Servers, prefix: str) -> None:
    store = nats_one.store(prefix)
    asyncio.run(make_streams(store))
    verdict, fix = of(doctor(store), f"stream {prefix}-events has no replica: the death of one server stops everything")
    assert verdict == "note"
    assert "three servers" in fix
    store = nats_three.store(prefix, replicas=1)
    asyncio.run(make_streams(store))
    verdict, fix = of(doctor(store), f"stream {prefix}-events has no replica: the death of one server stops everything")
    assert verdict == "wrong"
    assert fix == f"nats stream edit {prefix}-events --replicas 3"


def test_doctor_reports_a_server_that_syncs_at_intervals() -> None:
    with Servers(sync_interval=None) as servers:
        verdict, fix = of(doctor(servers.store(), *by_monitors(servers)), "syncs every 120 s", "power cut")
        assert verdict == "wrong"
        assert "sync_interval: always" in fix


def test_doctor_notes_an_unknown_sync_setting(nats_one: Servers, nats_three: Servers, prefix: str) -> None:
    """Also if another server answers there."""
    for words in ((), by_monitors(nats_three)):
        found = doctor(nats_one.store(prefix), *words)
        verdict, fix = of(found, "sync interval of", "unknown: no monitoring port answers")
        assert verdict == "note"
        assert "--monitor" in fix


def test_doctor_reports_an_unreachable_server() -> None:
    (port,) = free_ports(1)
    found = doctor(f"nats://127.0.0.1:{port}")
    verdict, fix = of(found, f"127.0.0.1:{port} does not answer", "refused")
    assert verdict == "wrong"
    assert "nats-server" in fix
    assert of(found, "no server answers")[0] == "wrong"


def test_doctor_reports_a_server_that_is_down_or_unnamed(nats_three: Servers, prefix: str) -> None:
    store = nats_three.store(prefix)
    asyncio.run(make_streams(store))
    gone = (nats_three.leader_of(f"{prefix}-events") + 1) % 3
    nats_three.kill(gone)
    try:
        wait_missed(nats_three, f"{prefix}-events", gone)
        found = doctor(store)
    finally:
        nats_three.restart(gone)
        nats_three.wait_ready()
    assert of(found, f"{nats_three.urls()[gone].removeprefix('nats://')} does not answer")[0] == "wrong"
    assert of(found, f"stream {prefix}-events", f"n{gone} lags or is gone")[0] == "wrong"
    first = nats_three.store(prefix).partition(",")[0]
    verdict, fix = of(doctor(f"{first}/{prefix}"), "names 1 of 3 servers")
    assert verdict == "note"
    assert "name all" in fix


def test_doctor_reports_a_cluster_without_quorum() -> None:
    with Servers(3) as servers:
        # The remaining server does not lead, and cannot be elected.
        leader = servers.meta_leader()
        assert leader is not None
        servers.kill(leader)
        servers.kill((leader + 1) % 3)
        assert of(doctor(servers.store()), "JetStream did not answer")[0] == "wrong"


def test_doctor_reports_a_lease_unlike_the_clusters(nats_one: Servers, prefix: str) -> None:
    asyncio.run(make_streams(nats_one.store(prefix, lease=5)))
    verdict, fix = of(doctor(nats_one.store(prefix, lease=60)), "the lease of hosts of", "is 5 s", "lease=60")
    assert verdict == "wrong"
    assert fix.startswith("set lease=5")


def test_doctor_reports_refused_credentials_without_showing_them() -> None:
    with Servers(user="me", password="a/secret") as servers:
        found = doctor(servers.store().replace("a%2Fsecret", "another-secret"))
        assert of(found, "cannot log in to")[0] == "wrong"
        assert "another-secret" not in json.dumps(found)
        assert of(doctor(servers.store()), "has no sessions yet")[0] == "ok"


def test_doctor_accepts_a_token_in_the_address() -> None:
    with Servers(token="a/word") as servers:
        assert of(doctor(servers.store()), "has no sessions yet")[0] == "ok"
        assert of(doctor(servers.store().partition("?")[0]), "cannot log in to")[0] == "wrong"


def test_doctor_accepts_tls_and_a_client_certificate(tmp_path: Path) -> None:
    theirs, ours = certificate(tmp_path, "theirs"), certificate(tmp_path, "ours")
    with Servers(tls=theirs) as servers:
        assert of(doctor(servers.store(ca=theirs.cert)), "has no sessions yet")[0] == "ok"
        assert of(doctor(servers.store()), "certificate verify failed")[0] == "wrong"
    with Servers(tls=theirs._replace(ca=ours.cert)) as servers:
        store = servers.store(ca=theirs.cert, cert=ours.cert, key=ours.key)
        assert of(doctor(store), "has no sessions yet")[0] == "ok"
        assert of(doctor(servers.store(ca=theirs.cert)), "tls://")[0] == "wrong"


def test_doctor_reports_unusable_key_files(tmp_path: Path, nats_one: Servers) -> None:
    for setting in ("creds", "nkey", "ca", "cert"):
        found = doctor(nats_one.store("p", **{setting: tmp_path / "missing"}).replace("nats://", "tls://"))
        assert "wrong" in {verdict for verdict, _, _ in found}, setting


def test_doctor_reports_a_small_max_payload() -> None:
    with Servers(more="max_payload: 65536") as servers:
        verdict, fix = of(doctor(servers.store()), "accepts messages of at most 65536 bytes")
        assert verdict == "wrong"
        assert "max_payload" in fix


def introduction(**said: object) -> bytes:
    usual = {"server_id": "x", "server_name": "it", "version": "2.15.1", "jetstream": True, "max_payload": 1 << 20}
    return b"INFO " + json.dumps({**usual, **said}).encode() + b"\r\n"


@pytest.mark.parametrize(
    ("said", "seen", "does"),
    [
        (introduction(version="2.9.10"), "nats-server 2.9.10", "upgrade it"),
        (introduction(version="2.12.0-RC.1", jetstream=None), "nats-server 2.12.0, without JetStream", "turn it on"),
        (b"HTTP/1.1 400 Bad Request\r\n", "not a NATS server", "check that nats-server is running"),
        (b"INFO [1]\r\n", "cannot decode its INFO line", "check that nats-server is running"),
        (b"INFO {\r\n", "cannot decode its INFO line", "check that nats-server is running"),
    ],
    ids=["too old", "without JetStream", "HTTP", "a list", "half"],
)
def test_doctor_reports_an_old_or_foreign_server(said: bytes, seen: str, does: str) -> None:
    """No server that old is available. This listener only sends the introduction of such a server."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        child = os.fork()
        if child == 0:
            try:
                for _ in range(100):
                    connection, _ = listening.accept()
                    connection.sendall(said)
                    connection.close()
            finally:
                os._exit(0)
        try:
            found = doctor(f"nats://127.0.0.1:{listening.getsockname()[1]}")
        finally:
            os.kill(child, 9)
            os.waitpid(child, 0)
    verdict, fix = of(found, seen)
    assert verdict == "wrong"
    assert does in fix


@pytest.mark.parametrize("store", ["nats://", "nats://h/p?lease=never", "redis://h"])
def test_doctor_reports_a_malformed_store_address(store: str) -> None:
    assert any(verdict == "wrong" for verdict, _, _ in doctor(store))


def test_doctor_checks_a_named_sqlite_file(tmp_path: Path) -> None:
    assert of(doctor(f"sqlite:{tmp_path / 'a.db'}"), str(tmp_path / "a.db"), "does not exist yet")[0] == "ok"


def test_doctor_without_the_nats_client_says_what_to_install(nats_one: Servers) -> None:
    code = f"""
import sys
sys.modules["nats"] = None
from banksman.cli import main
sys.exit(main(["doctor", "--json", "--store", {nats_one.store()!r}]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=SECONDS_MAX
    )
    found = [each for each in json.loads(done.stdout)["checks"] if each["name"] == "cluster"]
    assert [(each["verdict"], each["fix"]) for each in found] == [("wrong", "pip install 'banksman[cluster]'")]


# -- access ----------------------------------------------------------------------------------------------------------
def test_doctor_reports_access_without_credentials(nats_one: Servers, prefix: str) -> None:
    verdict, fix = of(doctor(nats_one.store(prefix)), "accepts clients without credentials")
    assert verdict == "wrong"
    assert "password" in fix


def test_doctor_reports_credentials_that_are_not_required(prefix: str) -> None:
    """The URL has a password. Without one, a stranger gets into the same account, and then into another."""
    account = "{ jetstream: enabled, users: [{ user: us, password: secret }, { user: any, password: any }] }"
    for strangers, verdict in (("any", "wrong"), ("other", "ok")):
        more = f"accounts {{ A: {account}, B: {{ users: [{{ user: other, password: other }}] }} }}"
        with Servers(1, more=f"{more}\nno_auth_user: {strangers}") as servers:
            store = servers.store(prefix).replace("nats://", "nats://us:secret@")
            asyncio.run(make_streams(store))
            assert of(doctor(store), "credentials")[0] == verdict


def test_doctor_reports_access_without_tls_unless_on_loopback() -> None:
    server = NatsServer("10.0.0.1:4222", id="a", version=(2, 12))
    here = NatsServer("127.0.0.1:4222", id="b", version=(2, 12))
    local = NatsServer("[::1]:4222", id="c", version=(2, 12))
    for servers, count in (((server, here, local), 1), ((here, local), 0), ((replace(server, has_tls=True),), 0)):
        found = list(stores._access(parse("nats://u:p@10.0.0.1"), ClusterHealth(servers)))  # pyright: ignore[reportPrivateUsage]
        assert [each.verdict.value for each in found if "TLS" in each.seen] == ["wrong"] * count


# -- contents --------------------------------------------------------------------------------------------------------
async def test_doctor_reports_damaged_sessions_and_records(nats_one: Servers, prefix: str, tmp_path: Path) -> None:
    store = nats_one.store(prefix)
    async with opened(nats_one, tmp_path, prefix) as log:
        nats = log._nats  # pyright: ignore[reportPrivateUsage]
        for id in ("whole", "hole", "tail", "blob"):
            writer = await Writer.claim(log, id)
            for number in range(3):
                await writer.commit(b"%d" % number if id != "blob" or number else os.urandom(1 << 20))
            log.release(id, writer.epoch)
            await until(lambda id=id: known(log, id).owner is None)
        await asyncio.to_thread(_is_whole, store)
        messages, _ = await nats.read(f"{prefix}-events", 1, f"{prefix}.ev.*", 100)
        seqs = {id: [each.seq for each in messages if each.subject.endswith(f".{id}")] for id in ("hole", "tail")}
        for seq in (seqs["hole"][2], seqs["tail"][-1]):
            await nats.api(f"STREAM.MSG.DELETE.{prefix}-events", {"seq": seq})
        await nats.api(f"STREAM.PURGE.OBJ_{prefix}-blobs", {})
        await nats.publish(f"{prefix}.rec.session.odd", b"{")
        found = await asyncio.to_thread(doctor, store)
        for words in (
            "events 2 to 2 of session hole",
            "events 3 to 3 of session tail",
            "events 1 to 1 of session blob",
        ):
            assert of(found, words, "missing")[0] == "wrong"
        verdict, fix = of(found, f"cannot decode the record under {prefix}.rec.session.odd")
        assert verdict == "wrong"
        assert f"rmm {prefix}-records" in fix
        assert not any("whole" in seen and verdict == "wrong" for verdict, seen, _ in found)


def _is_whole(store: str) -> None:
    assert of(doctor(store), "4 sessions, intact")[0] == "ok"


async def test_doctor_reports_remains_of_a_deletion(nats_one: Servers, prefix: str, tmp_path: Path) -> None:
    async with opened(nats_one, tmp_path, prefix) as log:
        nats = log._nats  # pyright: ignore[reportPrivateUsage]
        await (await Writer.claim(log)).commit(os.urandom(1 << 20))
        # As a host leaves it that dies after the first step.
        await nats.publish(f"{prefix}.rec.session.s", b"")
        found = await asyncio.to_thread(doctor, nats_one.store(prefix))
        assert of(found, f"events under {prefix}.ev.s", "no session")[1].endswith(f"--subject {prefix}.ev.s")
        assert f"nats object del {prefix}-blobs s." in of(found, "the blob s.", "no session")[1]
