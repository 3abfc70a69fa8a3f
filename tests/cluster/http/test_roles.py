"""A front end of a cluster allows each role what the documented table says, in sessions that another host owns."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests import kept
from tests.cluster.fleet import fleet
from tests.cluster.shared import some_prefix
from tests.server.access.test_role_matrix import differences
from tests.server.kit import Served
from tests.thorough import thorough

from banksman.server.access.roles import Role
from banksman.testing.nats_servers import Servers

pytestmark = thorough


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory, nats_one: Servers) -> Iterator[Served]:
    with fleet(tmp_path_factory.mktemp("fleet"), nats_one, some_prefix()) as found:
        host, front = found.host("a", room=64), found.front()
        with kept.shared(host.process.pid, front.pid):
            yield front


@pytest.mark.parametrize("role", list(Role))
def test_front_end_allows_what_the_documented_table_says(front: Served, role: str) -> None:
    assert differences(front, role) == []
    (host,) = {each["host"] for each in front.get("/v1/sessions")["sessions"] if each["owner"]}
    assert host == "a"
