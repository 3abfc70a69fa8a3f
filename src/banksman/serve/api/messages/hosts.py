"""The hosts that share a store."""

from __future__ import annotations

from msgspec import Struct


class Host(Struct, kw_only=True):
    """One that shares the store, as it said last. `room`: how many sessions it takes, 0: none, it asks the others;
    `used`: how many it has. `front`: callers come in there; one that has neither room nor this is a program with
    sessions of its own. `here`: it is the one that answers this. `silent`: it was not heard of for a lease, and its end
    was not heard of either: it is this server that is cut off."""

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
    hosts: list[Host]


class HostDraining(Struct):
    """`sessions`: how many it has. `hosts`: the names of those that have room for them, and what they need, as it looks
    now. `waiting`: for how many of them there is none; they wait, with all that was accepted in them, until one can."""

    draining: bool
    sessions: int
    hosts: list[str]
    waiting: int
