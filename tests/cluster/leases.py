"""Leases in tests: long ones, so that a machine that stalls costs no host its own, and the end of a dead host's lease.

When a lease runs out the servers put an empty message in the place of the host's last heartbeat. `end_lease` puts it
there at once, so that a test of what follows need not wait for the time.
"""

from __future__ import annotations

from banksman.cluster.log.streams import StreamNames
from banksman.cluster.nats import Nats
from banksman.cluster.store_address import parse

LEASE_SECONDS = 60.0


async def end_lease(url: str, host: str) -> None:
    """`host` is an id. Its process must be dead: a heartbeat after this would make it lose its lease for real."""
    address = parse(url)
    nats = Nats(address, name="end-lease")
    await nats.connect()
    try:
        await nats.publish(StreamNames(address.prefix).host(host), b"", headers={"Nats-TTL": "60s"})
    finally:
        await nats.close()
