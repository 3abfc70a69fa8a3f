"""Server state that the HTTP routes share: host, settings, policies, streams, proxy, drain."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from banksman import Host
from banksman.cluster.http.forwarded_request import Application
from banksman.cluster.http.host_view import UnownedSessions
from banksman.cluster.http.owner_proxy import OwnerProxy
from banksman.errors import NotFound
from banksman.server.api.request_replay import RequestReplay
from banksman.server.http.auth import AuthMiddleware
from banksman.server.http.start_policy import StartPolicy
from banksman.server.problems import session_of
from banksman.server.server_settings import ServerSettings
from banksman.server.streams.follower import EventStreams
from banksman.sessions.session import Session

if TYPE_CHECKING:
    from banksman.cluster.host import Member


@dataclass(slots=True)
class Context:
    """Everything that a route handler can reach.

    `drain`: starts the shutdown of the server, with a time limit for running turns; None takes the
    limit of the settings. `proxy`: sends requests to other hosts of the same store; None if the
    store is not shared. `application`: answers requests that other hosts forward to this one.
    `url`: the address of the web page; empty if the server has no port.
    """

    host: Host
    settings: ServerSettings
    policy: StartPolicy
    streams: EventStreams
    drain: Callable[[float | None], None]
    store: str
    url: str = ""
    once: RequestReplay = field(default_factory=RequestReplay)
    started: float = field(default_factory=time.time)
    authentication: AuthMiddleware | None = None
    proxy: OwnerProxy | None = None
    application: Application | None = None
    member: Member | None = None
    unowned_sessions: UnownedSessions = field(init=False)

    def __post_init__(self) -> None:
        self.unowned_sessions = UnownedSessions(self.host)

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
