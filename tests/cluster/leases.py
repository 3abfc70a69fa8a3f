"""Long leases for tests, and the early end of a dead host's lease.

With a long lease a machine that stalls costs no host its lease. When a lease expires, the servers put an empty message
in the place of the host's last heartbeat. `end_lease` puts that message there immediately, so a test of the
consequences need not wait.
"""

from __future__ import annotations

from banksman.cluster.log.streams import StreamNames
from banksman.cluster.nats import Nats
from banksman.cluster.store_address import parse

LEASE_SECONDS = 60.0


async def end_lease(url: str, host: str) -> None:
    """End the lease of a dead host.

    `host`: its id. Its process must be dead: a heartbeat after this call would make it lose its lease for real.
    """
    address = parse(url)
    nats = Nats(address, name="end-lease")
    await nats.connect()
    try:
        await nats.publish(StreamNames(address.prefix).host(host), b"", headers={"Nats-TTL": "60s"})
    finally:
        await nats.close()
