"""The server itself: its health, its agents, its end; and what is answered where something is wrong."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from banksman.serve.api.messages.parts import Body, Seconds


class Agent(Struct):
    """`error`: its file is wrong, and nothing else is known of it. `source`: the user's own file; None: the package's.
    `repairs`: what it does otherwise than it should, and what comes of it here."""

    name: str
    found: bool
    path: str | None
    command: list[str]
    dialect: str
    capabilities: list[str]
    title: str = ""
    install: str = ""
    website: str = ""
    source: str | None = None
    overrides: bool = False
    error: str | None = None
    repairs: list[str] = []
    note: str = ""


class Agents(Struct):
    agents: list[Agent]


class Drain(Body):
    timeout: Seconds | None = None


class Draining(Struct):
    draining: bool


class Login(Body):
    token: str


class Health(Struct):
    status: str


class Server(Struct):
    version: str
    pid: int
    started: float
    draining: bool
    store: str
    settings: dict[str, Any]


class Task(Struct):
    name: str
    coroutine: str
    stack: list[str]


class Thread(Struct):
    name: str
    stack: list[str]


class Stacks(Struct):
    tasks: list[Task]
    threads: list[Thread]
    # How many were too many to show, of each.
    left_out: dict[str, int] = {}


class Problem(Struct):
    type: str
    title: str
    status: int
    detail: str
    hint: str
    ids: dict[str, Any]
