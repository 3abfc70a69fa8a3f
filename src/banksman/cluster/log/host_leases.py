"""Who lives: each host by a lease that it renews, and that the servers end when it does not.

No clock of one machine is compared with another's. The servers count from when a heartbeat arrived; we count from when
it was *sent*, and only if it was acknowledged, so by our count the lease ends earlier than by theirs. At `FENCE` of it
we stop being the owner of anything, and all our processes are dead before the rest is over (`OwnershipListener`).
Others may take our sessions only after the servers say that the lease has ended.

A heartbeat goes out often: the servers may need seconds to choose a leader, and a host must not be fenced by that.

A host that was fenced begins anew under another id, as if it had been started just now. The old id never comes back:
each heartbeat is stored behind the one before it, and once the servers have ended a lease there is none.
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

# Of the lease, without an acknowledged heartbeat.
FENCE = 0.6
BEATS_PER_LEASE = 15
BEAT_SECONDS_MIN = 0.2
RETRY_SECONDS = 0.1


class Heartbeat(msgspec.Struct, frozen=True):
    """A heartbeat."""

    card: HostReport
    pid: int
    version: str
    since: float


class HostLeases:
    """The hosts of a cluster, as one handle sees them, and its own place among them."""

    def __init__(self, nats: Nats, names: StreamNames, lease: float, ensure: Callable[[str], Awaitable[None]]) -> None:
        self.lease_seconds = lease
        self._ensure = ensure
        self._nats = nats
        self._names = names
        self._id = _new_id()
        self._card = HostReport(name=socket.gethostname())
        self._since = time.time()
        # Of our last heartbeat, as far as we know: the next one is stored behind it, or not at all.
        self._seq = 0
        self._mirror = StreamMirror(
            nats, names.hosts, f"{names.prefix}.host.*", f"{names.prefix}.live.host.*", self._on_change
        )
        self._seen: dict[str, HostSeen] = {}
        self._gone: list[Callable[[str], None]] = []
        self._lost: list[Callable[[], None]] = []
        self._guards: list[OwnershipListener] = []
        # Why the last heartbeat was refused, by servers that can be reached.
        self._refusal: StoreError | None = None
        # When the heartbeat was sent that was acknowledged last; None: we have no lease.
        self._held_since: float | None = None
        self._beats: asyncio.Task[None] | None = None
        self._fence: asyncio.TimerHandle | None = None
        self._hurry = asyncio.Event()
        self._is_closed = False

    # -- our own -----------------------------------------------------------------------------------------------------
    @property
    def id(self) -> str:
        return self._id

    @property
    def address(self) -> str:
        return f"{self._id}@{socket.gethostname()}"

    @property
    def is_held(self) -> bool:
        """By our own count: what we claim now is ours."""
        return self._held_since is not None and time.monotonic() < self._fence_at

    @property
    def _fence_at(self) -> float:
        assert self._held_since is not None
        return self._held_since + FENCE * self.lease_seconds

    @property
    def _dead_by(self) -> float:
        assert self._held_since is not None
        return self._held_since + self.lease_seconds

    def check_held(self) -> None:
        if not self.is_held:
            raise Unreachable("this host cannot reach its cluster", hint="it goes on as soon as it can")

    def guard(self, guard: OwnershipListener) -> None:
        self._guards.append(guard)
        if self.is_held:
            guard.on_held(self._fence_at, self._dead_by)

    async def start(self) -> None:
        """The first heartbeat is acknowledged, and all others are known."""
        self._is_closed = False  # A start that failed has stopped it.
        while self._held_since is None:
            await self._beat(ANSWER_SECONDS_MAX * 5)
        if self._beats is not None:
            return
        await self._mirror.start()
        self._beats = asyncio.get_running_loop().create_task(self._go_on())

    async def stop(self) -> None:
        """Nobody needs to wait for the end of the lease: there is nothing left that it would protect."""
        self._is_closed = True
        if self._fence is not None:
            self._fence.cancel()
        if self._beats is not None:
            self._beats.cancel()
            await asyncio.wait((self._beats,))
            self._beats = None
        await self._mirror.stop()
        if self._held_since is not None:
            self._held_since = None
            try:
                await self._nats.publish(self._names.host(self._id), b"", headers={"Nats-TTL": "60s"})
            except StoreError:
                pass  # Then it ends by itself.
        self._id, self._seq = _new_id(), 0

    def abandon(self) -> None:
        self._is_closed = True
        self._held_since = None

    def announce(self, card: HostReport) -> None:
        self._card = card
        self._hurry.set()

    def on_lost(self, callback: Callable[[], None]) -> None:
        self._lost.append(callback)

    async def _go_on(self) -> None:
        seconds = max(BEAT_SECONDS_MIN, self.lease_seconds / BEATS_PER_LEASE)
        patience = min(ANSWER_SECONDS_MAX, self.lease_seconds / 5)
        told = ""
        while True:
            try:
                async with asyncio.timeout(seconds):
                    await self._hurry.wait()
            except TimeoutError:
                pass
            self._hurry.clear()
            try:
                await self._beat(patience)
                self._refusal = None
            except StoreError as exc:
                log.debug("host %s: a heartbeat was not acknowledged: %s", self._id, exc)
                self._refusal = None if isinstance(exc, Unreachable) else exc
                if not self.is_held:
                    # Perhaps somebody has deleted the stream. It is worth nothing tomorrow, and is made anew.
                    try:
                        await self._ensure(self._names.hosts)
                        self._mirror.reload_soon()
                    except Unreachable:
                        pass
                    except BanksmanError as refusal:
                        # Somebody has to act, and whenever that is, we are still here.
                        if str(refusal) != told:
                            told = str(refusal)
                            log.error("! host %s has no lease, and gets none: %s", self._id, told)
                # Nearly at once: a leader is being chosen, and what counts is when the first one is acknowledged.
                await asyncio.sleep(RETRY_SECONDS)
                self._hurry.set()

    async def _beat(self, patience: float) -> None:
        id, sent = self._id, time.monotonic()
        data = msgspec.json.encode(Heartbeat(self._card, os.getpid(), _version(), self._since))
        subject = self._names.host(id)
        try:
            seq = await self._nats.publish(subject, data, expected=self._seq, timeout=patience)
        except WrongLastSequence:
            await self._look_back(id)
            return
        if id == self._id:
            self._seq = seq
        if id != self._id or time.monotonic() >= sent + FENCE * self.lease_seconds:
            return  # It came too late to mean anything.
        self._mirror.put(StreamMessage(subject, data, {}, seq))
        self._held_since = sent
        self._set_fence()
        for guard in self._guards:
            guard.on_held(self._fence_at, self._dead_by)

    async def _look_back(self, id: str) -> None:
        """A heartbeat that was not answered was stored all the same, and the next one follows it. Or the servers have
        ended the lease while we believed in it: our clock stood still (a machine that was suspended), or what we sent
        lay in a buffer for too long. An id that has ended must not come back by that."""
        last = await self._nats.last(self._names.hosts, self._names.host(id))
        if id != self._id:
            return
        if last is not None and last.data:
            self._seq = last.seq
            self._hurry.set()
        elif self._held_since is not None:
            self._lose("the servers have ended its lease")
            self._mirror.reload_soon()  # We have not heard of that, and perhaps of more.
        else:
            self._id, self._seq = _new_id(), 0
            self._hurry.set()

    def _set_fence(self) -> None:
        if self._fence is not None:
            self._fence.cancel()
        seconds = max(0.0, self._fence_at - time.monotonic())
        self._fence = asyncio.get_running_loop().call_later(seconds, self._on_fence)

    def _on_fence(self) -> None:
        if self._is_closed or self._held_since is None:
            return
        if time.monotonic() < self._fence_at:
            self._set_fence()  # A loop's clock is coarser than ours.
            return
        told = "" if self._refusal is None else f" ({self._refusal})"
        self._lose(f"no heartbeat was acknowledged for {time.monotonic() - self._held_since:.1f} s{told}")

    def _lose(self, why: str) -> None:
        lost, dead_by = self._id, self._dead_by
        log.error("! host %s: %s, so nothing here is ours any more", lost, why)
        self._held_since = None
        self._id, self._seq = _new_id(), 0
        told, hint = "this host could not reach its cluster", _HINT
        if self._refusal is not None:
            # It is heard well, and what it says cannot be stored.
            told, hint = f"its cluster took no heartbeat of this host: {self._refusal.args[0]}", self._refusal.hint
        error = NotOwner(f"{told}, and others may have the session", hint=hint, host=lost)
        for callback in self._lost:
            try:
                callback()
            except Exception:
                # A bug in one of them must not keep the guards from hearing of it: they have processes to end.
                log.exception("! host %s: not everybody could be told that its lease is lost", lost)
        for guard in self._guards:
            guard.on_lost(error, dead_by)
        self._hurry.set()

    # -- all of them -------------------------------------------------------------------------------------------------
    def all(self) -> list[HostSeen]:
        return sorted(self._seen.values(), key=lambda seen: (seen.name, seen.since, seen.id))

    def on_gone(self, callback: Callable[[str], None]) -> None:
        self._gone.append(callback)

    def is_alive(self, id: str) -> bool:
        """As far as we know. That one is dead is only believed of `is_dead`."""
        return id in self._seen if id != self._id else self._held_since is not None

    async def is_dead(self, id: str) -> bool:
        """As the servers say: one that has begun a moment ago may not be known to us yet."""
        if id == self._id:
            return False
        last = await self._nats.last(self._names.hosts, self._names.host(id))
        return last is None or not last.data

    def reload_soon(self) -> None:
        self._mirror.reload_soon()

    def _on_change(self, subject: str, message: StreamMessage | None) -> None:
        id = subject.rpartition(".")[2]
        if message is None:
            if self._seen.pop(id, None) is not None:
                for callback in self._gone:
                    callback(id)
            return
        try:
            said = msgspec.json.decode(message.data, type=Heartbeat)
        except msgspec.DecodeError:
            log.warning("! host %s says of itself what cannot be understood", id)
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


_HINT = "is its network well? What was accepted is kept, and goes on where it can"
