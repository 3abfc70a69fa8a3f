"""The hosts that share a store."""

from __future__ import annotations

from msgspec import Struct


class Host(Struct, kw_only=True):
    """A host that shares the store, as it last announced itself.

    Attributes:
        id: Id of the host.
        name: Name of the host.
        pid: Process id.
        labels: Its labels.
        agents: Agents that it has.
        room: How many sessions it takes; 0 if it runs none.
        used: How many sessions it has.
        version: Version of Banksman.
        draining: Whether it is shutting down.
        since: When it started, in seconds since 1970.
        here: Whether it is the host that answers this request.
        silent: Whether it has missed its lease, and its end was not announced.
        front: Whether it serves HTTP.
    """

    id: str
    name: str
    pid: int
    labels: list[str]
    agents: list[str]
    room: int
    used: int
    version: str
    draining: bool
    since: float
    here: bool
    silent: bool = False
    front: bool = False


class Hosts(Struct):
    """The hosts that share the store.

    Attributes:
        hosts: The hosts; none if the store belongs to this machine alone.
    """

    hosts: list[Host]


class HostDraining(Struct):
    """What happens to the sessions of a host that shuts down, as far as it can be told now.

    Attributes:
        draining: Whether it is shutting down.
        sessions: How many sessions it has.
        hosts: Names of the hosts that have room for them, and what they need.
        waiting: How many sessions no host can take. They wait, with all that was accepted in them.
    """

    draining: bool
    sessions: int
    hosts: list[str]
    waiting: int
