"""What the routes work with: the host, and the few things that are the server's own."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from banksman import Host
from banksman.errors import NotFound
from banksman.run.sessions.session import Session
from banksman.serve.api.once import Once
from banksman.serve.entrance.door import Door
from banksman.serve.entrance.policy import Policy
from banksman.serve.finding import session_of
from banksman.serve.forwarding import Application
from banksman.serve.front import Front
from banksman.serve.nobodys import Nobodys
from banksman.serve.settings import Settings
from banksman.serve.streams.follower import Streams

if TYPE_CHECKING:
    from banksman.run.cluster import Member


@dataclass(slots=True)
class Context:
    """`drain` begins to end the server, with that many seconds for what runs; None: as many as it is set to. `front`:
    how other hosts of the same store are asked; None: there are none. `application`: how they ask us.
    `url`: of the page; empty: there is no port."""

    host: Host
    settings: Settings
    policy: Policy
    streams: Streams
    drain: Callable[[float | None], None]
    store: str
    url: str = ""
    once: Once = field(default_factory=Once)
    started: float = field(default_factory=time.time)
    door: Door | None = None
    front: Front | None = None
    application: Application | None = None
    member: Member | None = None
    nobodys: Nobodys = field(init=False)

    def __post_init__(self) -> None:
        self.nobodys = Nobodys(self.host)

    @property
    def is_closing(self) -> bool:
        return self.streams.is_ending

    def has_session(self, id: str) -> bool:
        try:
            self.host.session(id)
        except NotFound:
            return False
        return True

    def session(self, id_or_name: str) -> Session:
        return session_of(self.host, id_or_name)
