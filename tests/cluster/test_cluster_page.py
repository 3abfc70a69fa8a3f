"""The configuration in docs/cluster.md starts three servers as printed, and passes the doctor."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest
from tests.cli.doctor.test_stores_cluster import by_monitors, doctor_in_time, make_streams
from tests.cluster.certificates import certificate
from tests.thorough import thorough

from banksman.cluster.log.streams import StreamNames
from banksman.testing.nats_servers import Servers, Tls

PAGE = Path(__file__).resolve().parents[2] / "docs" / "cluster.md"
PASSWORD = "of-the-test"


class AsThePageSays(Servers):
    """Servers with the page's configuration. Only addresses, ports, folders and names are replaced."""

    def __init__(self, tls: Tls) -> None:
        super().__init__(3, user="banksman", password=PASSWORD, tls=tls)

    def _configuration(self, node: int) -> str:
        ours, tls = self._ports[node], self._tls
        assert tls is not None
        (text,) = re.findall(r"```nginx\n(.*?)```", PAGE.read_text(), re.DOTALL)
        for old, new in (
            ("server_name: nats-1", f"server_name: n{node}"),
            ("0.0.0.0:4222", f"127.0.0.1:{ours.client}"),
            ("127.0.0.1:8222", f"127.0.0.1:{ours.monitor}"),
            ("0.0.0.0:6222", f"127.0.0.1:{ours.route}"),
            *((f"10.0.0.{peer + 1}:6222", f"127.0.0.1:{each.route}") for peer, each in enumerate(self._ports)),
            ("/var/lib/nats", f"n{node}"),
            ("/etc/nats/server.pem", tls.cert),
            ("/etc/nats/server.key", tls.key),
            ("/etc/nats/ca.pem", tls.cert),
        ):
            assert old in text, f"the page does not say {old} any more"
            text = text.replace(old, new)
        return text


@thorough
def test_cluster_page_configuration_starts_and_passes_doctor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NATS_PASSWORD", PASSWORD)
    tls = certificate(tmp_path)
    with AsThePageSays(tls) as servers:
        store = servers.store(ca=tls.cert)
        asyncio.run(make_streams(store))
        found = doctor_in_time(store, *by_monitors(servers))
        assert {verdict for verdict, _, _ in found} == {"ok"}, found
        assert sum("syncs before it acknowledges" in seen for _, seen, _ in found) == 3
        assert sum("3 replicas" in seen for _, seen, _ in found) >= 3


def test_cluster_page_names_every_stream() -> None:
    names = StreamNames("banksman")
    page = PAGE.read_text()
    for name in (names.events, names.records, names.hosts, names.work, f"OBJ_{names.blobs}"):
        assert f"`{name}`" in page or f" {name} " in page, name
