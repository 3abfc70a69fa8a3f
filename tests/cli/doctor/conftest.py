"""NATS nodes of the cluster tests, for the tests of this folder."""

from __future__ import annotations

from tests.cluster import conftest as cluster

nats_one = cluster.nats_one
nats_three = cluster.nats_three
prefix = cluster.prefix
patient = cluster.patient
