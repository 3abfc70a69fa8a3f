"""Host leases on NATS: heartbeats, expiry, fencing and detection of dead hosts.

A host holds a lease that it renews by heartbeats. The servers delete a heartbeat that is not
renewed for a lease, and that deletion is the death of the host.

Clocks of two machines are never compared. The servers count from the arrival of a heartbeat. The
host counts from the moment it *sent* the heartbeat, and only if that heartbeat was acknowledged. So
the lease ends earlier by the host's count than by the servers' count. At `FENCE` of the lease the
host gives up every session. All its processes are dead before the rest of the lease is over
(`OwnershipListener`). Other hosts may claim its sessions only after the servers have ended the
lease.

Heartbeats are frequent: the servers may need seconds to elect a leader, and an election must not
fence a host.

A fenced host continues under a new id, as if it had just started. The old id never returns: each
heartbeat is a compare-and-set on the one before it, and fails once the servers have ended the
lease.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import socket
import time
from collections.abc import Awaitable, Callable
from importlib import metadata

import msgspec

from banksman.cluster.interfaces import HostReport, HostSeen
from banksman.cluster.jetstream import StreamMessage, WrongLastSequence
from banksman.cluster.log.stream_mirror import StreamMirror
from banksman.cluster.log.streams import StreamNames
from banksman.cluster.nats import ANSWER_SECONDS_MAX, Nats
from banksman.errors import BanksmanError, NotOwner, StoreError, Unreachable
from banksman.store.log import OwnershipListener

log = logging.getLogger("banksman")

# The part of a lease after which a host without an acknowledged heartbeat gives up its sessions.
# The remaining 0.4 is the time to end the host's processes.
FENCE = 0.6
BEATS_PER_LEASE = 15
BEAT_SECONDS_MIN = 0.2
RETRY_SECONDS = 0.1


class Heartbeat(msgspec.Struct, frozen=True):
    """The content of a heartbeat."""

    card: HostReport
    pid: int
    version: str
    since: float


class HostLeases:
    """The hosts of a cluster as this process sees them, and its own lease."""

    def __init__(
        self, nats: Nats, names: StreamNames, lease: float, ensure: Callable[[str], Awaitable[None]]
    ) -> None:
        assert lease > 0
        self.lease_seconds = lease
        self._ensure = ensure
        self._nats = nats
        self._names = names
        self._id = _new_id()
        self._card = HostReport(name=socket.gethostname())
        self._since = time.time()
        # The sequence of this host's last stored heartbeat, as it is known here. The next heartbeat
        # expects it.
        self._seq = 0
        self._mirror = StreamMirror(
            nats,
            names.hosts,
            f"{names.prefix}.host.*",
            f"{names.prefix}.live.host.*",
            self._on_change,
        )
        self._seen: dict[str, HostSeen] = {}
        self._gone: list[Callable[[str], None]] = []
        self._lost: list[Callable[[], None]] = []
        # The order of the callbacks is part of the fence: `_lost` before `_guards` (`_lose`).
        self._guards: list[OwnershipListener] = []
        # Why reachable servers refused the last heartbeat; None if they did not.
        self._refusal: StoreError | None = None
        # When the last acknowledged heartbeat was sent; None: this host has no lease. This is the
        # only state of the lease. The fence and the end are computed from it, so they cannot
        # contradict each other.
        self._held_since: float | None = None
        self._beats: asyncio.Task[None] | None = None
        self._fence: asyncio.TimerHandle | None = None
        self._hurry = asyncio.Event()
        self._is_closed = False

    # -- this host --------------------------------------------------------------------------------
    @property
    def id(self) -> str:
        return self._id

    @property
    def address(self) -> str:
        return f"{self._id}@{socket.gethostname()}"

    @property
    def is_held(self) -> bool:
        """Return whether the lease is valid by this host's count, so that a claim made now counts.

        This compares with the clock instead of relying on the fence timer: a blocked event loop
        runs that timer too late.
        """
        return self._held_since is not None and time.monotonic() < self._fence_at

    @property
    def _fence_at(self) -> float:
        assert self._held_since is not None
        return self._held_since + FENCE * self.lease_seconds

    @property
    def _dead_by(self) -> float:
        # The servers end the lease at this time or later: they count from the arrival of the
        # heartbeat. So processes that are dead by then are dead before another host may claim.
        assert self._held_since is not None
        return self._held_since + self.lease_seconds

    def check_held(self) -> None:
        """Raise `Unreachable` if the lease is not held."""
        if not self.is_held:
            hint = "try again: the host reconnects by itself"
            raise Unreachable("this host cannot reach its cluster", hint=hint)

    def guard(self, guard: OwnershipListener) -> None:
        """Register a listener that must end its processes before the lease ends."""
        self._guards.append(guard)
        # A guard that is registered late must not wait for the next heartbeat: until then it would
        # have no deadline by which its processes have to be dead.
        if self.is_held:
            guard.on_held(self._fence_at, self._dead_by)

    async def start(self) -> None:
        """Start the heartbeats. On return the first is acknowledged and all hosts are known."""
        self._is_closed = False  # A failed start has called `stop`.
        # The lease comes before the mirror: without a lease this host may not claim anything,
        # whatever it knows of the others. `_beat` returns without a lease if the ack came too late
        # or the id had expired. Then it is sent again.
        while self._held_since is None:
            await self._beat(ANSWER_SECONDS_MAX * 5)
        if self._beats is not None:
            return
        await self._mirror.start()
        self._beats = asyncio.get_running_loop().create_task(self._go_on())

    async def stop(self) -> None:
        """End the lease now, instead of letting it expire.

        That is safe because the sessions are released and the processes are dead: the lease
        protects nothing that other hosts would have to wait for.
        """
        self._is_closed = True
        if self._fence is not None:
            self._fence.cancel()
        # Stop the heartbeats before the lease is ended. The next one would meet the end, and would
        # start another lease under a new id.
        if self._beats is not None:
            self._beats.cancel()
            await asyncio.wait((self._beats,))
            self._beats = None
        await self._mirror.stop()
        if self._held_since is not None:
            # First by this host's view, then at the servers. In the other order a caller could
            # claim during the await, under a lease that has already ended.
            self._held_since = None
            try:
                # No expected sequence. An unacknowledged heartbeat may be the last message, and the
                # lease has to end behind that one too.
                await self._nats.publish(
                    self._names.host(self._id), b"", headers={"Nats-TTL": "60s"}
                )
            except StoreError:
                pass  # Then the lease expires.
        assert self._beats is None
        # A later start is a new host. Records under the old id stay with that id, which is dead.
        self._id, self._seq = _new_id(), 0

    def abandon(self) -> None:
        """Stop without a word to the servers: the lease expires there."""
        # The event loop is closed, so the fence timer cannot run. `is_held` compares with the clock
        # and with this field, so no later call claims anything.
        self._is_closed = True
        self._held_since = None

    def announce(self, card: HostReport) -> None:
        self._card = card
        self._hurry.set()

    def on_lost(self, callback: Callable[[], None]) -> None:
        self._lost.append(callback)

    async def _go_on(self) -> None:
        """Send heartbeats until cancelled, at intervals and whenever `_hurry` is set."""
        seconds = max(BEAT_SECONDS_MIN, self.lease_seconds / BEATS_PER_LEASE)
        # Give up on one heartbeat early: several attempts must fit between the last ack and the
        # fence.
        patience = min(ANSWER_SECONDS_MAX, self.lease_seconds / 5)
        assert 2 * patience < FENCE * self.lease_seconds
        told = ""
        while True:
            try:
                async with asyncio.timeout(seconds):
                    await self._hurry.wait()
            except TimeoutError:
                pass
            # Clear the event before the heartbeat is sent. An `announce` during the send sets it
            # again, and the next heartbeat carries the new report.
            self._hurry.clear()
            try:
                await self._beat(patience)
                self._refusal = None
            except StoreError as exc:
                log.debug("host %s: heartbeat not acknowledged: %s", self._id, exc)
                self._refusal = None if isinstance(exc, Unreachable) else exc
                if not self.is_held:
                    # An operator may have deleted the stream. Create it again: leases are worthless
                    # tomorrow, so nothing is lost with them.
                    try:
                        await self._ensure(self._names.hosts)
                        self._mirror.reload_soon()
                    except Unreachable:
                        pass
                    except BanksmanError as refusal:
                        # An operator has to act. This host keeps trying, so it recovers whenever
                        # that happens.
                        if str(refusal) != told:
                            told = str(refusal)
                            log.error("host %s: cannot get a lease: %s", self._id, told)
                # Retry quickly: the servers are probably electing a leader, and the lease depends
                # on how soon the first heartbeat is acknowledged.
                await asyncio.sleep(RETRY_SECONDS)
                self._hurry.set()

    async def _beat(self, patience: float) -> None:
        """Send one heartbeat, and extend the lease if it is acknowledged in time."""
        # Take the time before the send. The servers count from the arrival, which is later, so this
        # host's lease always ends first.
        id, sent = self._id, time.monotonic()
        data = msgspec.json.encode(Heartbeat(self._card, os.getpid(), _version(), self._since))
        subject = self._names.host(id)
        try:
            # The compare-and-set keeps an expired id dead: the servers deleted its last heartbeat,
            # so nothing has the expected sequence.
            seq = await self._nats.publish(subject, data, expected=self._seq, timeout=patience)
        except WrongLastSequence:
            await self._look_back(id)
            return
        # Even a late ack tells where the next heartbeat has to follow. But if the fence came during
        # the await, the sequence belongs to an id that this host has given up.
        if id == self._id:
            self._seq = seq
        if id != self._id or time.monotonic() >= sent + FENCE * self.lease_seconds:
            # The fence time of this heartbeat has passed: the ack must not revive the lease.
            return
        # Heartbeats are sent one after the other, so a renewal never shortens the lease.
        assert self._held_since is None or sent >= self._held_since
        self._mirror.put(StreamMessage(subject, data, {}, seq))
        self._held_since = sent
        self._set_fence()
        for guard in self._guards:
            guard.on_held(self._fence_at, self._dead_by)

    async def _look_back(self, id: str) -> None:
        """Find out why a heartbeat met another sequence than it expected.

        - A heartbeat without an ack was stored after all. The next one follows it.
        - The servers ended a lease that this host still counts as held. Its clock stood still (a
          suspended machine), or the heartbeat stayed in a buffer for too long. The host is fenced
          now.
        - The servers ended a lease that this host has already lost. It starts with a new id: an
          expired id must never return.
        """
        last = await self._nats.last(self._names.hosts, self._names.host(id))
        # The fence timer may have run during the await. Then this answer is about an id that this
        # host has given up, and says nothing about the new one.
        if id != self._id:
            return
        if last is not None and last.data:
            self._seq = last.seq
            self._hurry.set()
        elif self._held_since is not None:
            self._lose("the servers have ended its lease")
            # This host missed that message, so its mirror may have missed others too.
            self._mirror.reload_soon()
        else:
            self._id, self._seq = _new_id(), 0
            self._hurry.set()

    def _set_fence(self) -> None:
        """Set the timer that fences this host if no heartbeat is acknowledged before it."""
        # Cancel the timer of the previous heartbeat. Even if it ran, `_on_fence` compares with the
        # clock and would find that the lease was renewed.
        if self._fence is not None:
            self._fence.cancel()
        seconds = max(0.0, self._fence_at - time.monotonic())
        self._fence = asyncio.get_running_loop().call_later(seconds, self._on_fence)

    def _on_fence(self) -> None:
        """Fence this host, unless its lease was renewed since the timer was set."""
        # A closing host has released its sessions. A lease that is already lost must not be lost a
        # second time: the guards would end the processes of the next lease.
        if self._is_closed or self._held_since is None:
            return
        if time.monotonic() < self._fence_at:
            self._set_fence()  # The event loop's clock is coarser than time.monotonic().
            return
        told = "" if self._refusal is None else f" ({self._refusal})"
        self._lose(
            f"no heartbeat was acknowledged for {time.monotonic() - self._held_since:.1f} s{told}"
        )

    def _lose(self, why: str) -> None:
        """Fence this host: take a new id, and notify the callbacks and the guards of the loss."""
        lost, dead_by = self._id, self._dead_by
        log.error("host %s: lease lost: %s: stopping its sessions", lost, why)
        # Change the id before any callback runs. From here on `is_held` is false, and no record
        # names the new id as an owner. So a callback can neither claim nor write under the lost
        # lease.
        self._held_since = None
        self._id, self._seq = _new_id(), 0
        told, hint = "this host could not reach its cluster", _HINT
        if self._refusal is not None:
            # The cluster is reachable, and refuses to store the heartbeat.
            told, hint = (
                f"the cluster refused the heartbeat of this host: {self._refusal.args[0]}",
                self._refusal.hint,
            )
        error = NotOwner(f"{told}, so another host may own the session", hint=hint, host=lost)
        # The callbacks come before the guards: first no answer and no append leaves this host as an
        # owner, then the processes are stopped.
        for callback in self._lost:
            try:
                callback()
            except Exception:
                # A bug in one callback must not keep the guards from learning of the loss. They
                # have processes to end.
                log.exception("host %s: callback for the lost lease failed", lost)
        for guard in self._guards:
            guard.on_lost(error, dead_by)
        # Everything above is synchronous, so no task of this host ran between the loss and the last
        # guard. The assert comes after the guards: a bug here must not keep them from their work.
        assert self._id != lost
        self._hurry.set()

    # -- all hosts --------------------------------------------------------------------------------
    def all(self) -> list[HostSeen]:
        return sorted(self._seen.values(), key=lambda seen: (seen.name, seen.since, seen.id))

    def on_gone(self, callback: Callable[[str], None]) -> None:
        self._gone.append(callback)

    def is_alive(self, id: str) -> bool:
        """Return whether a host lives, according to this process's mirror.

        The mirror may lag, so only `is_dead` may decide that a host is dead.
        """
        return id in self._seen if id != self._id else self._held_since is not None

    async def is_dead(self, id: str) -> bool:
        """Return whether the servers have ended the lease of a host.

        This asks the stream's leader. A host that started a moment ago may be missing in the
        mirror, and a take-over from a live host would give a session two owners.
        """
        if id == self._id:
            return False
        # An empty message is the marker that expiry or `stop` leaves. It vanishes after a while, so
        # a missing message also means a dead host. A host that has not sent its first heartbeat
        # owns nothing: a claim needs a lease.
        last = await self._nats.last(self._names.hosts, self._names.host(id))
        return last is None or not last.data

    def reload_soon(self) -> None:
        """Reload the mirror: notifications may have been missed."""
        self._mirror.reload_soon()

    def _on_change(self, subject: str, message: StreamMessage | None) -> None:
        """Update the known hosts after a heartbeat, or after the end of a lease (None)."""
        id = subject.rpartition(".")[2]
        if message is None:
            # Announce each death once. The mirror may report an end twice: by a notification and by
            # a reload. The host is removed first, so a callback sees the hosts without it.
            if self._seen.pop(id, None) is not None:
                for callback in self._gone:
                    callback(id)
            return
        try:
            said = msgspec.json.decode(message.data, type=Heartbeat)
        except msgspec.DecodeError:
            log.warning("host %s: cannot decode its heartbeat", id)
            return
        self._seen[id] = HostSeen(
            id=id,
            **said.card._asdict(),
            pid=said.pid,
            version=said.version,
            since=said.since,
            seen=time.monotonic(),
        )


def _new_id() -> str:
    return f"h-{os.urandom(6).hex()}"


@functools.cache
def _version() -> str:
    try:
        return metadata.version("banksman")
    except metadata.PackageNotFoundError:
        return "?"


_HINT = "check the network of this host; accepted asks are kept, and the next owner continues them"
