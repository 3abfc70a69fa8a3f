"""Limits of the agents' accounts, shared by the sessions of one host.

A session that meets a limit reports it here (`report`), and the other sessions of the same account
learn of it. So only one of them has to fail. All of them wait for the same moment: the end of the
limit plus one random delay (`jitter`), because other hosts may wait for the same end.

An account is named by a hash (`SessionSpec.account`), so that no key or token is kept here. A limit
outlives the sessions that met it, until its end has passed.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping
from functools import partial

# The delay after the end of a limit: a part of the time that is left, up to a maximum.
JITTER_PART = 0.05
JITTER_SECONDS_MAX = 30.0

# Called with the end of the limit; None: the account answers again.
OnLimited = Callable[[float | None], None]


class AccountMember:
    """The place of one session in its account."""

    def __init__(self, account: _Account) -> None:
        self._account = account
        self._on_limited: OnLimited | None = None

    def begin(self, on_limited: OnLimited) -> None:
        """Receive the limits that other sessions report, beginning with the known one."""
        self._on_limited = on_limited
        self._account.members.add(self)
        if self._account.is_limited:
            on_limited(self._account.until)

    def report(self, until: float | None) -> None:
        """Tell the other sessions until when the account is limited."""
        self._account.report(self, until)

    def jitter(self, until: float) -> float:
        """Return the delay in seconds after the end of this limit."""
        return self._account.jitter(until)

    def tell(self, until: float | None) -> None:
        if self._on_limited is not None:
            self._on_limited(until)

    def renew(self, account: _Account) -> None:
        """Take the account with which the session was opened again, and its known limit."""
        is_other = account is not self._account
        self._account.members.discard(self)
        self._account = account
        account.members.add(self)
        if is_other or account.is_limited:
            # The limit of the other account does not apply here.
            self.tell(account.until if account.is_limited else None)

    def leave(self) -> None:
        """Receive nothing more, because the session is over."""
        self._account.members.discard(self)
        self._on_limited = None


class _Account:
    """The limit of one account, and the sessions of this host that use it."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._jitter: tuple[float, float] | None = None
        self.until: float | None = None
        self.members: set[AccountMember] = set()

    @property
    def is_limited(self) -> bool:
        return self.until is not None and self.until > time.time()

    def report(self, source: AccountMember, until: float | None) -> None:
        if until == self.until:
            return
        self.until = until
        for member in self.members - {source}:
            # Not called directly: the reporting session is in the middle of a step.
            asyncio.get_running_loop().call_soon(member.tell, until)

    def jitter(self, until: float) -> float:
        if self._jitter is None or self._jitter[0] != until:
            left = max(0.0, until - time.time())
            self._jitter = (
                until,
                self._chance.uniform(0.0, min(JITTER_PART * left, JITTER_SECONDS_MAX)),
            )
        return self._jitter[1]


class AccountLimits:
    """The accounts of the sessions of one host. Belongs to one event loop."""

    def __init__(self, chance: random.Random | None = None) -> None:
        self._chance = random.Random() if chance is None else chance
        self._accounts: dict[str, _Account] = {}

    def join(self, account: str) -> AccountMember:
        """Return the place of a session that is being opened."""
        return AccountMember(self._find(account))

    def renew(self, member: AccountMember, account: str) -> None:
        """Take the account of a session that was opened again."""
        member.renew(self._find(account))

    def _find(self, name: str) -> _Account:
        for other, account in list(self._accounts.items()):
            if other != name and not account.members and not account.is_limited:
                del self._accounts[other]
        return self._accounts.setdefault(name, _Account(self._chance))


class SessionAccounts:
    """The accounts of the agents of one session, by the name of the agent."""

    def __init__(self, limits: AccountLimits, accounts: Mapping[str, str]) -> None:
        """Prepare the accounts of a session that is being opened: names of accounts by agent."""
        self._limits = limits
        self._accounts = accounts
        self._members: dict[str, AccountMember] = {}
        self._on_limited: Callable[[str, float | None], None] | None = None

    def begin(self, on_limited: Callable[[str, float | None], None]) -> None:
        """Join the accounts. Receive the limits that other sessions report, with the agent."""
        self._on_limited = on_limited
        self.renew(self._accounts)

    def renew(self, accounts: Mapping[str, str]) -> None:
        """Take the accounts with which the session was opened again, and their known limits."""
        assert self._on_limited is not None
        for agent in self._members.keys() - accounts.keys():
            self._members.pop(agent).leave()
        for agent, account in accounts.items():
            if agent in self._members:
                self._limits.renew(self._members[agent], account)
            else:
                # An account without members may be dropped, so its member begins at once.
                self._members[agent] = self._limits.join(account)
                self._members[agent].begin(partial(self._on_limited, agent))

    def report(self, agent: str, until: float | None) -> None:
        """Tell the other sessions until when the account of an agent is limited."""
        if agent in self._members:
            self._members[agent].report(until)

    def jitter(self, agent: str, until: float) -> float:
        """Return the delay in seconds after the end of a limit of this agent's account."""
        return self._members[agent].jitter(until) if agent in self._members else 0.0

    def leave(self) -> None:
        """Receive nothing more, because the session is over."""
        for member in self._members.values():
            member.leave()
