"""Server state that the HTTP routes share: host, settings, policies, streams, proxy, drain."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from banksman import Host
from banksman.cluster.http.forwarded_request import Application
from banksman.cluster.http.host_view import UnownedSessions
from banksman.cluster.http.owner_proxy import OwnerProxy
from banksman.errors import NotFound
from banksman.server.api.request_replay import RequestReplay
from banksman.server.graceful_shutdown import StartDrain
from banksman.server.http.auth import AuthMiddleware
from banksman.server.http.start_policy import StartPolicy
from banksman.server.problems import session_of
from banksman.server.server_settings import ServerSettings
from banksman.server.streams.follower import EventStreams
from banksman.sessions.session import Session
from banksman.sessions.session_access import AccessReader

if TYPE_CHECKING:
    from banksman.cluster.host import Member
    from banksman.server.ops.upgrade import ServerUpgrade
    from banksman.server.ops.webhooks import TargetCounts


@dataclass(slots=True)
class Context:
    """Everything that a route handler can reach.

    `drain`: starts the shutdown of the server. `proxy`: sends requests to other hosts of the same
    store; None if the store is not shared. `application`: answers requests that other hosts forward
    to this one. `url`: the address of the web page; empty if the server has no port.
    """

    host: Host
    settings: ServerSettings
    policy: StartPolicy
    streams: EventStreams
    drain: StartDrain
    store: str
    url: str = ""
    once: RequestReplay = field(default_factory=RequestReplay)
    started: float = field(default_factory=time.time)
    authentication: AuthMiddleware | None = None
    proxy: OwnerProxy | None = None
    application: Application | None = None
    member: Member | None = None
    # None: this server is part of another program.
    upgrade: ServerUpgrade | None = None
    # What each target of webhooks got, by its label.
    webhooks: Mapping[str, TargetCounts] = field(default_factory=dict[str, "TargetCounts"])
    # The shutdown that has begun leaves the work to the next server.
    is_handing_over: bool = False
    unowned_sessions: UnownedSessions = field(init=False)
    _access: AccessReader | None = None

    def __post_init__(self) -> None:
        self.unowned_sessions = UnownedSessions(self.host)

    @property
    def access(self) -> AccessReader:
        """Reads which callers may use a session. Opens the store with the first use."""
        if self._access is None:
            self._access = AccessReader(self.host.log)
        return self._access

    @property
    def rate_limited(self) -> int:
        """How many requests were refused because their token has sent too many."""
        limit = None if self.authentication is None else self.authentication.rate_limit
        return 0 if limit is None else limit.refused

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
